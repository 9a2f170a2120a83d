"""Sebulba: actor threads step environments on the host, the learner updates. Read anakin.py first.

After Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning"
(https://arxiv.org/abs/2104.06272), figure 3. The environments of a run are shared out to actor threads as they are to
ranks: actor k of K owns environments `k * B / K ... (k + 1) * B / K - 1`, with the keys that they have in Anakin. An
iteration is: one unroll of every actor, put side by side, one update. With lag 0 it is Anakin's iteration, to the bit
if there is one pool.
"""

import copy
import multiprocessing
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables
from torchpod.anakin import RunState, init_state, next_state
from torchpod.compile import Compiler
from torchpod.distributed import ALONE, Ranks
from torchpod.env import Env
from torchpod.episodes import average, counting
from torchpod.interop import to_tensordict, to_trajectory
from torchpod.learner import Learner, LearnerConfig, LearnerState
from torchpod.replay import ReplayConfig
from torchpod.replay.learning import ReplayLearner, iterations_before
from torchpod.rollout import Step, make_step, start
from torchpod.sebulba.actor import Act, Actor, Pool, make_act, splits
from torchpod.sebulba.exchange import Item, Phases
from torchpod.sebulba.transfer import FIRST_PRIORITY, Handed, Port, Static, hand_over, on, take
from torchpod.types import Carry, Trajectory, Tree
from torchpod.watched import close_all, watched

MOST_CAPTURED = 30
"""Pools that act on one GPU. A graph has the workspace of cuBLAS of the handle and the stream with which it was
captured, here those of the main thread; torch has 32 streams of a priority, of which others may take some."""


@dataclass(frozen=True)
class SebulbaConfig:
    """How acting and learning are laid out."""

    num_actor_threads: int = 2
    """For each device on which the rank acts. 0: none, everything in turn in the main thread, for debugging."""
    pools_per_actor: int = 1
    """Parts of an actor's environments. With 2, one is stepped while the actor decides for the other."""
    pools_share_threads: bool = False
    """The pools of an actor are stepped by the same threads, as many as all of them would have, which have other
    work while the actor decides for one: EnvPool's asynchronous mode, in a fixed order."""
    lag: int | Literal["free"] = 1
    """Unroll n is done with the parameters after n - lag iterations, so that runs repeat to the bit; "free": with the
    newest there are."""
    refresh: Literal["unroll", "step"] = "unroll"
    """When an actor looks for newer parameters. "step" needs lag "free"; `policy_age` is then that of the first step of
    an unroll, and later ones may be newer."""
    queue_size: int = 1
    """Trajectories that an actor may be ahead of the learner."""
    updates_per_batch: int = 1
    """Cut a batch into so many parts, by environments, with an update each; section 3.2 of the paper."""
    split: str | None = None
    """"A:L": of the GPUs of a host the first A act and the next L learn, one rank each. null: every rank acts on the
    GPU on which it learns."""
    timeout_s: float = 300.0
    """A step or a reset of environments on the host that takes longer ends the run."""


class Sebulba:
    """One training program.

    Args:
      make_agent: builds the agent, with torch's generator seeded by the run's seed.
      make_env: builds environments; called once per pool. A tensor environment is stepped in the threads as well.
      num_envs: B on this rank, over all its actors.
      unroll_length: T.
      learner: how to learn.
      num_iterations: of the whole run.
      compiler: how to compile.
      config: see `SebulbaConfig`.
      ranks: all processes of the run.
      device: where it learns.
      actor_devices: where actors decide, in turn; where it learns if empty.
      replay: what is kept, for an agent that learns from replay.

    Raises:
      ValueError: if environments, actors and updates do not divide, or the agent was not made for the lag.
    """

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        make_env: Callable[[], Env],
        *,
        num_envs: int,
        unroll_length: int,
        learner: LearnerConfig,
        num_iterations: int,
        compiler: Compiler,
        config: SebulbaConfig | None = None,
        ranks: Ranks = ALONE,
        device: torch.device | str = "cpu",
        actor_devices: Sequence[torch.device | str] = (),
        replay: ReplayConfig | None = None,
    ) -> None:
        config = config or SebulbaConfig()
        self.device = torch.device(device)
        devices = [torch.device(d) for d in actor_devices] or [self.device]
        agent = make_agent()
        _check(
            agent,
            config,
            learner,
            num_envs=num_envs,
            unroll_length=unroll_length,
            population=compiler.population,
            device=self.device,
            actor_devices=devices,
        )
        self.make_agent, self.agent = make_agent, agent.to(device)
        self.num_actors = max(1, config.num_actor_threads) * len(devices)
        num_pools = self.num_actors * config.pools_per_actor
        self.num_envs, self.unroll_length, self.num_iterations = num_envs, unroll_length, num_iterations
        self.config, self.ranks = config, ranks
        self.actor_devices = [devices[k % len(devices)] for k in range(self.num_actors)]
        # Programs with their arguments in memory of their own, to be captured. On the CPU only tests want that.
        self.static = any(d.type == "cuda" for d in (self.device, *devices))
        total = num_envs * ranks.world_size
        self.learner = Learner(
            self.agent,
            learner,
            num_iterations=num_iterations * config.updates_per_batch,
            iterations_before=iterations_before(self.agent, replay, num_envs=total, unroll_length=unroll_length),
            steps_per_iteration=total * unroll_length // config.updates_per_batch,
            compiler=compiler,
            ranks=ranks,
        )
        self.replay = None
        if self.agent.replayed:
            self.replay = ReplayLearner(
                self.agent,
                self.learner,
                replay or ReplayConfig(),
                num_envs=num_envs,
                unroll_length=unroll_length,
                compiler=compiler,
            )
        self.envs = _environments(make_env, self.num_actors, config)
        self.begun = False
        """Whether a `Program` has taken over the environments, and closes them; or they are closed."""
        self._workers: list[list[BaseProcess]] = [[] for _ in self.envs]  # processes that each has started
        self.compiler, self._count = compiler, compiler(counting(self.agent.teams, self.envs[0].spec))
        if compiler.enabled and not self.agent.may_fall_back:
            compiled = {d: compiler(self._advance_of(self.agent, self.envs[0])) for d in devices}
            self._advances = [compiled[self._actor_device(i)] for i in range(num_pools)]
        else:
            # A module whose parameters one thread has put in place must not be called by another.
            own = [self._advance_of(copy.deepcopy(self.agent), self.envs[0]) for _ in range(num_pools)]
            self._advances = [compiler(advance, fall_back=True) for advance in own]

    @property
    def restartable(self) -> bool:
        """Whether a checkpoint holds the environments too: tensor environments; others begin new episodes."""
        return self.envs[0].traits.pure

    def capturable(self) -> bool:
        """Whether a graph can hold what has run so far."""
        return not self.compiler.fell_back

    def init(self, seed: int, iteration: int = 0) -> RunState:
        """The state before the first iteration, or to resume from a checkpoint of another. Starts the environments."""
        self.begun = False

        def begin(agent: Agent, env_keys: Tensor) -> Carry:
            if self.restartable or not iteration:
                return self._start(agent, env_keys)
            # Keys of their own, or the episodes of the first start would come again.
            return self._start(agent, random.fold_in(env_keys, iteration * self.unroll_length))

        state = init_state(
            seed,
            self.make_agent,
            self.learner,
            begin,
            self.num_envs,
            ranks=self.ranks,
            device=self.device,
            replay=self.replay,
        )
        return state._replace(older=self.older([self.learner.acting(state.learner, state.iteration)]))

    def resume(self, state: RunState, begun: RunState) -> RunState:
        """The state of a checkpoint; environments that it does not hold begin new episodes, those of `init`."""
        if self.restartable:
            return state
        carry = begun.carry._replace(step=state.carry.step)
        return state._replace(carry=carry, episode_return=begun.episode_return, episode_length=begun.episode_length)

    def close(self) -> None:
        """Closes the environments of a run that never began; otherwise `Program.close` does."""
        if not self.begun:
            self.begun = True
            close_all(self.envs)

    def older(self, versions: list[Variables]) -> tuple[Variables, ...]:
        """The `lag` versions before the newest, oldest first; the first one stands for those before it."""
        lag = 0 if self.config.lag == "free" else self.config.lag
        return tuple(versions[max(0, len(versions) - 1 - back)] for back in range(lag, 0, -1))

    def actors(self, state: RunState) -> list[Actor]:
        """Actors that stand where the state says. Captures their programs, if they are to be."""
        each, per_actor = self.config.pools_per_actor, len(self.envs) // self.num_actors
        num, actors = self.num_actors * each, []
        variables = self.learner.acting(state.learner, state.iteration)
        for k, device in enumerate(self.actor_devices):
            phases, pools = Phases(self.envs[0].spec.name), []
            envs: list[Any] = self.envs[k * per_actor : (k + 1) * per_actor]
            if per_actor < each:
                envs = envs[0].batches
            for i, env in enumerate(envs, k * each):
                share = pytree.tree_map(
                    lambda x, i=i, device=device: (x.chunk(num)[i] if x.ndim else x).contiguous().to(device),
                    (state.carry, state.env_keys, state.actor_keys),
                )
                carry, env_keys, actor_keys = share
                advance, port = self._advances[i], None
                if self.static:
                    with torch.no_grad(), on(device):
                        own = pytree.tree_map(lambda x, device=device: x.to(device), variables)
                        capture, args = self.compiler.captures(device), (own, *share)
                        advance = Static(
                            advance, args, capture=capture, capturable=self.capturable, priority=FIRST_PRIORITY
                        )
                    port = None if self.restartable else Port(device)
                if not self.config.num_actor_threads:  # the watchdog of the threads sleeps while the main thread steps
                    env = watched(env, "training", self.config.timeout_s)
                pools.append(Pool(env, advance, env_keys, actor_keys, carry, phases, port))
            actors.append(
                Actor(
                    k,
                    pools,
                    phases,
                    device,
                    length=self.unroll_length,
                    refresh=self.config.refresh == "step",
                    workers=[x for own in self._workers[k * per_actor : (k + 1) * per_actor] for x in own],
                )
            )
        return actors

    def example(self, state: RunState, actors: list[Actor]) -> Trajectory:
        """A trajectory as actors make them, of one decision repeated: to compile with, without stepping anything."""
        items = []
        for actor in actors:
            handed = hand_over(self.learner.acting(state.learner, state.iteration), self.device)
            for pool in actor.pools:
                with torch.no_grad(), on(actor.device):
                    decided = pool.advance(take(handed, actor.device), pool.carry, *pool.keys)
                output = decided[1] if self.restartable else decided[0]
                timesteps, outputs = (
                    pytree.tree_map(lambda x, times=times: torch.stack([x] * times), tree)
                    for tree, times in (
                        (pool.carry.timestep, self.unroll_length + 1),
                        (output, self.unroll_length),
                    )
                )
                states = hand_over((pool.carry.actor_state, pool.carry), actor.device)
                items.append(Item(to_tensordict(Trajectory(timesteps, outputs, (), ())), states, 0, {}))
        return merge(items, self.device)

    def update(self, state: RunState, trajectory: Trajectory) -> tuple[RunState, dict[str, Tensor]]:
        """The second half of an iteration, from one unroll of all environments; pure, leaves `state.carry` alone."""
        learner, num, history = state.learner, self.config.updates_per_batch, []
        metrics: dict[str, Tensor] = {}
        if self.replay:
            keys = random.at(state.learner_keys, state.iteration * self.learner.counters_per_update)
            learner, metrics = self.replay.update(learner, trajectory, state.priorities, state.iteration, keys)
            return self._after(state, trajectory, learner, metrics)
        for i in range(num):
            part = trajectory if num == 1 else _part(trajectory, i, num)
            counter = (state.iteration * num + i) * self.learner.counters_per_update
            keys = random.at(state.learner_keys.chunk(num)[i], counter)
            learner, metrics = self.learner.update(learner, part, keys)
            history.append(metrics)
        if num > 1:
            metrics = average(history)
        return self._after(state, trajectory, learner, metrics)

    def fill(self, state: RunState, trajectory: Trajectory) -> tuple[RunState, dict[str, Tensor]]:
        """In the first iterations of an agent with replay, instead of `update`."""
        assert self.replay is not None
        learner = self.replay.store(state.learner, trajectory, state.priorities, state.iteration)
        return self._after(state, trajectory, learner, {})

    def _after(
        self, state: RunState, trajectory: Trajectory, learner: LearnerState, metrics: dict[str, Tensor]
    ) -> tuple[RunState, dict[str, Tensor]]:
        episodes = self._count(trajectory.timestep, state.episode_return, state.episode_length)
        return next_state(state, state.carry, learner, metrics, episodes, self.ranks)

    def _advance_of(self, agent: Agent, env: Env) -> Step | Act:
        return make_step(agent, env) if env.traits.pure else make_act(agent)

    def _actor_device(self, pool: int) -> torch.device:
        return self.actor_devices[pool // self.config.pools_per_actor]

    def _start(self, agent: Agent, env_keys: Tensor) -> Carry:
        shares = env_keys.chunk(len(self.envs))
        if self.restartable:
            return side_by_side([start(agent, env, keys) for env, keys in zip(self.envs, shares, strict=True)])
        carries = []
        for i, (env, keys) in enumerate(zip(self.envs, shares, strict=True)):
            before = multiprocessing.active_children()
            carries.append(start(agent, watched(env, "its first reset", self.config.timeout_s), keys.cpu()))
            self._workers[i] = [process for process in multiprocessing.active_children() if process not in before]
        whole = side_by_side([carry._replace(env_state=()) for carry in carries])
        return pytree.tree_map(lambda x: x.to(self.device), whole)


def _check(
    agent: Agent,
    config: SebulbaConfig,
    learner: LearnerConfig,
    *,
    num_envs: int,
    unroll_length: int,
    population: int,
    device: torch.device,
    actor_devices: Sequence[torch.device],
) -> None:
    """Raises `ValueError` if the settings do not fit, before a GPU is used or environments are made."""
    num_actors = max(1, config.num_actor_threads) * len(actor_devices)
    num_pools = num_actors * config.pools_per_actor
    threads = f"num_actor_threads={config.num_actor_threads}"
    if len(actor_devices) > 1:
        threads += f" on each of {len(actor_devices)} devices"
    for name, parts in (
        (threads, num_actors),
        (f"{threads} with loop.pools_per_actor={config.pools_per_actor}", num_pools),
        (f"updates_per_batch={config.updates_per_batch}", config.updates_per_batch),
    ):
        if num_envs % parts:
            raise ValueError(f"num_envs={num_envs} per rank cannot be split by loop.{name}; use a multiple of {parts}.")
    if device.type == "cuda" and num_pools > MOST_CAPTURED * len(actor_devices):
        raise ValueError(
            f"loop.{threads} with loop.pools_per_actor={config.pools_per_actor} are {num_pools} pools, and "
            f"{MOST_CAPTURED} per GPU can act at the same time; use at most {MOST_CAPTURED * len(actor_devices)}."
        )
    if population > 1:
        raise ValueError(f"population={population} needs loop=anakin; Sebulba trains one member.")
    if config.refresh == "step" and config.lag != "free":
        raise ValueError(f"loop.refresh=step takes the newest parameters, not those of loop.lag={config.lag}.")
    if agent.through_env:
        raise ValueError(
            f"{type(agent).__name__} learns through the environment, and Sebulba differentiates no steps; "
            "run it with loop=anakin."
        )
    if agent.reuse_forward:
        raise ValueError(
            "reuse_forward keeps the forward pass of the rollout for the update, and Sebulba's actors and learner "
            "have each their own programs; use reuse_forward=false or loop=anakin."
        )
    most = agent.max_lag
    if most is not None and (config.lag == "free" or config.lag > most):
        raise ValueError(
            f"{type(agent).__name__} learns from the parameters that act, or those at most {most} "
            f"iteration(s) older, and cannot correct for loop.lag={config.lag}; use loop.lag={most}."
        )
    if agent.replayed and config.updates_per_batch > 1:
        raise ValueError(
            f"loop.updates_per_batch={config.updates_per_batch} cuts up trajectories, and "
            f"{type(agent).__name__} learns from replay; use algo.learner.num_minibatches for the updates "
            "per unroll."
        )
    if most == 0 and config.updates_per_batch > 1:
        raise ValueError(
            f"{type(agent).__name__} learns from the parameters that act, and all but the first of "
            f"loop.updates_per_batch={config.updates_per_batch} updates have newer ones; use "
            "loop.updates_per_batch=1."
        )
    parts, each = config.updates_per_batch, num_envs // config.updates_per_batch
    by_envs = agent.recurrent or unroll_length % learner.num_minibatches
    if parts > 1 and by_envs and each % learner.num_minibatches:
        raise ValueError(
            f"num_envs={num_envs} per rank are {each} in each of loop.updates_per_batch={parts} updates, which "
            f"cannot be dealt to algo.learner.num_minibatches={learner.num_minibatches}; use a multiple of "
            f"{parts * learner.num_minibatches}."
        )
    if {d.type for d in actor_devices} != {device.type}:
        raise ValueError(f"actor_devices={list(actor_devices)} and device={device} must be all CPU or all CUDA.")
    if config.pools_share_threads and config.pools_per_actor == 1:
        raise ValueError("loop.pools_share_threads=true is for several pools; raise loop.pools_per_actor=1.")


def _environments(make_env: Callable[[], Env], num_actors: int, config: SebulbaConfig) -> list[Env]:
    """One per pool; or, where the pools of an actor share threads, one per actor, which has a batch per pool."""
    num = config.pools_per_actor
    if not config.pools_share_threads:
        return [make_env() for _ in range(num_actors * num)]
    envs: list[Any] = [make_env() for _ in range(num_actors)]
    if not splits(envs[0], "in_batches"):
        raise ValueError(
            f"loop.pools_share_threads=true is for EnvPool's environments, and {envs[0].spec.name} is none, or has "
            "something wrapped around it; leave it out."
        )
    return [env.in_batches(num) for env in envs]


def merge(items: list[Item], device: torch.device) -> Trajectory:
    """The unrolls of several pools as one of all their environments, on the learner's device."""
    before, after = _cat([_states_of(item, device) for item in items])
    return to_trajectory([item.steps for item in items], before, after, device=device)


def _states_of(item: Item, device: torch.device) -> tuple[Tree, Tree]:
    """The recurrent states before and after an unroll; what follows on the current stream may read the steps too."""
    actor_state, carry = item.states.tree
    states = take(Handed((actor_state, carry.actor_state), item.states.ready), device)
    if item.states.ready is not None:
        item.states.wait([*item.steps.values(include_nested=True, leaves_only=True)])
    return states


def side_by_side(carries: list[Carry]) -> Carry:
    """Carries of several pools as one of all their environments; all have made the same number of steps."""
    if len(carries) == 1:
        return carries[0]
    env_state, timestep, actor_state = _cat([carry[:3] for carry in carries])
    return Carry(env_state, timestep, actor_state, carries[0].step)


def _part(trajectory: Trajectory, index: int, num: int) -> Trajectory:
    """Part `index` of `num` of the environments."""

    def cut(tree: Tree, axis: int) -> Any:
        return pytree.tree_map(lambda x: x.chunk(num, axis)[index].contiguous(), tree)

    return Trajectory(*cut((trajectory.timestep, trajectory.output), 1), *cut(trajectory[2:], 0))


def _cat(trees: list[Any]) -> Any:
    return pytree.tree_map(lambda *xs: torch.cat(xs), *trees)
