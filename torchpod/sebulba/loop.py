"""Sebulba: actor threads step environments on the host, the learner updates. Read anakin.py first.

After Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning"
(https://arxiv.org/abs/2104.06272), figure 3. The environments of a run are shared out to actor threads as they are to
ranks: actor k of K owns environments `k * B / K ... (k + 1) * B / K - 1`, with the keys that they have in Anakin. An
iteration is: one unroll of every actor, put side by side, one update. With lag 0 it is Anakin's iteration, to the bit
if there is one actor.
"""

import copy
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables
from torchpod.anakin import NonFiniteError, Report, RunState, init_state, next_state
from torchpod.compile import Compiler, span
from torchpod.distributed import ALONE, Ranks
from torchpod.env import Env
from torchpod.episodes import count_episodes, mean_metrics
from torchpod.interop import to_tensordict, to_trajectory
from torchpod.learner import Learner, LearnerConfig
from torchpod.rollout import make_step, start
from torchpod.sebulba.actor import Actor, Pool, make_act
from torchpod.sebulba.exchange import Exchange, Item, Phases
from torchpod.types import Carry, Trajectory, Tree

JOIN_S = 4.0
"""How long the end of a run waits for a thread that does not come back from its environments."""


@dataclass(frozen=True)
class SebulbaConfig:
    """How acting and learning are laid out."""

    num_actor_threads: int = 2
    """0: no threads, everything in turn in the main thread, for debugging."""
    pools_per_actor: int = 1
    """Parts of an actor's environments. With 2, one is stepped while the actor decides for the other."""
    lag: int | Literal["free"] = 1
    """Unroll n is done with the parameters after n - lag updates, so that runs repeat to the bit; "free": with the
    newest there are."""
    refresh: Literal["unroll", "step"] = "unroll"
    """When an actor looks for newer parameters. "step" needs lag "free"."""
    queue_size: int = 1
    """Trajectories that an actor may be ahead of the learner."""
    updates_per_batch: int = 1
    """Cut a batch into so many parts, by environments, with an update each; section 3.2 of the paper."""
    timeout_s: float = 300.0
    """A step of the environments that takes longer ends the run."""


class Sebulba:
    """One training program.

    Args:
      make_agent: builds the agent, with torch's generator seeded by the run's seed.
      make_env: builds environments; called once per actor. A tensor environment is stepped in the threads as well.
      num_envs: B on this rank, over all its actors.
      unroll_length: T.
      learner: how to learn.
      num_iterations: of the whole run.
      compiler: how to compile.
      config: see `SebulbaConfig`.
      ranks: all processes of the run.
      device: of agent and learner.

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
    ) -> None:
        config = config or SebulbaConfig()
        self.num_actors = max(1, config.num_actor_threads)
        num_pools = self.num_actors * config.pools_per_actor
        for name, parts in (
            (f"num_actor_threads={self.num_actors}", self.num_actors),
            (f"num_actor_threads={self.num_actors} with loop.pools_per_actor={config.pools_per_actor}", num_pools),
            (f"updates_per_batch={config.updates_per_batch}", config.updates_per_batch),
        ):
            if num_envs % parts:
                raise ValueError(
                    f"num_envs={num_envs} per rank cannot be split by loop.{name}; use a multiple of {parts}."
                )
        if torch.device(device).type != "cpu":
            raise ValueError(f"device={device}: Sebulba acts and learns on the CPU so far; use device=cpu.")
        if compiler.population > 1:
            raise ValueError(f"population={compiler.population} needs loop=anakin; Sebulba trains one member.")
        if config.refresh == "step" and config.lag != "free":
            raise ValueError(f"loop.refresh=step takes the newest parameters, not those of loop.lag={config.lag}.")
        self.make_agent, self.agent = make_agent, make_agent().to(device)
        most = self.agent.max_lag
        if most is not None and (config.lag == "free" or config.lag > most):
            raise ValueError(
                f"{type(self.agent).__name__} learns from the parameters that act, or at most {most} update(s) older "
                f"ones, and cannot correct for loop.lag={config.lag}; use loop.lag={most}."
            )
        self.num_envs, self.unroll_length, self.num_iterations = num_envs, unroll_length, num_iterations
        self.config, self.ranks, self.device = config, ranks, torch.device(device)
        self.envs = [make_env() for _ in range(num_pools)]
        self.learner = Learner(
            self.agent,
            learner,
            num_iterations=num_iterations * config.updates_per_batch,
            compiler=compiler,
            ranks=ranks,
        )
        self._count = compiler(count_episodes)
        # Uncompiled, a module whose parameters one thread has put in place must not be called by another.
        agents = [self.agent] if compiler.enabled else [copy.deepcopy(self.agent) for _ in self.envs]
        advances = [
            (compiler(make_step(agent, env)) if env.traits.pure else None, compiler(make_act(agent)))
            for agent, env in zip(agents, self.envs, strict=False)
        ]
        self._advances = advances * num_pools if compiler.enabled else advances

    @property
    def restartable(self) -> bool:
        """Whether a checkpoint holds the environments too: tensor environments; others begin new episodes."""
        return self.envs[0].traits.pure

    def init(self, seed: int) -> RunState:
        """The state before the first iteration. Starts the environments."""
        state = init_state(
            seed, self.make_agent, self.learner, self._start, self.num_envs, ranks=self.ranks, device=self.device
        )
        return state._replace(older=self.older([state.learner.params | state.learner.buffers]))

    def resume(self, state: RunState) -> RunState:
        """The state of a checkpoint; environments that it does not hold begin new episodes."""
        if self.restartable:
            return state
        # Keys of their own, or the episodes of the first start would come again.
        keys = random.fold_in(state.env_keys, state.carry.step)
        carry = self._start(self.agent, keys)._replace(step=state.carry.step)
        zeros = torch.zeros_like(state.episode_return), torch.zeros_like(state.episode_length)
        return state._replace(carry=carry, episode_return=zeros[0], episode_length=zeros[1])

    def _start(self, agent: Agent, env_keys: Tensor) -> Carry:
        shares = env_keys.chunk(len(self.envs))
        carries = [start(agent, env, keys) for env, keys in zip(self.envs, shares, strict=True)]
        if not self.restartable:
            carries = [carry._replace(env_state=()) for carry in carries]
        return side_by_side(carries)

    def older(self, versions: list[Variables]) -> tuple[Variables, ...]:
        """The `lag` versions before the newest, oldest first; the first one stands for those before it."""
        lag = 0 if self.config.lag == "free" else self.config.lag
        return tuple(versions[max(0, len(versions) - 1 - back)] for back in range(lag, 0, -1))

    def actors(self, state: RunState) -> list[Actor]:
        """Actors that stand where the state says."""
        num, clocks = len(self.envs), [Phases() for _ in range(self.num_actors)]
        pools = []
        for k, env in enumerate(self.envs):
            carry = pytree.tree_map(lambda x, k=k: x.chunk(num)[k] if x.ndim else x, state.carry)
            keys = state.env_keys.chunk(num)[k], state.actor_keys.chunk(num)[k]
            pools.append(Pool(env, self._advances[k], *keys, carry, clocks[k // self.config.pools_per_actor]))
        each = self.config.pools_per_actor
        return [
            Actor(
                k,
                pools[k * each : (k + 1) * each],
                clock,
                length=self.unroll_length,
                refresh=self.config.refresh == "step",
            )
            for k, clock in enumerate(clocks)
        ]

    def warm_up(self, state: RunState) -> None:
        """Compiles everything in this thread, without a step of an environment: torch compiles in one thread only."""
        num, carry = len(self.envs), state.carry
        share = pytree.tree_map(lambda x: x.chunk(num)[0].contiguous() if x.ndim else x, carry)
        variables = state.learner.params | state.learner.buffers
        keys = state.env_keys.chunk(num)[0], state.actor_keys.chunk(num)[0]
        with torch.no_grad():
            whole, act = self._advances[0]
            if whole is not None:
                _, output = whole(variables, share, *keys)
            else:
                output = act(variables, share, *keys)[0]
        timesteps, outputs = (
            pytree.tree_map(lambda x, times=times: torch.stack([x] * times), tree)
            for tree, times in ((share.timestep, self.unroll_length + 1), (output, self.unroll_length))
        )
        steps = to_tensordict(Trajectory(timesteps, outputs, (), ()))
        self.learn(state, [Item(steps, share.actor_state, share, 0, {})] * num)

    def learn(self, state: RunState, items: list[Item]) -> tuple[RunState, dict[str, Tensor]]:
        """The update of one iteration, from one unroll of every pool."""
        trajectory = merge(items)
        learner, num, history = state.learner, self.config.updates_per_batch, []
        metrics: dict[str, Tensor] = {}
        with span("update"):
            for i in range(num):
                part = trajectory if num == 1 else _part(trajectory, i, num)
                counter = (state.iteration * num + i) * self.learner.counters_per_update
                keys = random.at(state.learner_keys.chunk(num)[i], counter)
                learner, metrics = self.learner.update(learner, part, keys)
                history.append(metrics)
        if num > 1:
            metrics = {name: torch.stack([m[name] for m in history]).mean(0) for name in history[0]}
        episodes = self._count(trajectory.timestep, state.episode_return, state.episode_length)
        carry = side_by_side([item.carry for item in items])
        return next_state(state, carry, learner, metrics, episodes, self.ranks)


class Program:
    """A run under way."""

    def __init__(self, sebulba: Sebulba, state: RunState) -> None:
        self._sebulba, self._state = sebulba, state
        lag = sebulba.config.lag
        first = int(state.iteration)
        self._actors = sebulba.actors(state)
        self._exchange = Exchange(
            [actor.phases for actor in self._actors],
            lag=None if lag == "free" else lag,
            capacity=sebulba.config.queue_size,
            timeout_s=sebulba.config.timeout_s,
        )
        for back in range(0 if lag == "free" else lag, 0, -1):
            if first - back >= 0:
                self._exchange.publish(first - back, state.older[-back])
        self._exchange.publish(first, state.learner.params | state.learner.buffers)
        self._items: list[Item] = []
        self._threaded = sebulba.config.num_actor_threads > 0
        if self._threaded:
            for actor in self._actors:
                actor.begin(self._exchange, first)

    @property
    def healthy(self) -> bool:
        """Whether all gradients so far were finite."""
        return bool(self._state.learner.healthy)

    @property
    def env_steps(self) -> int:
        """Transitions so far, over all ranks."""
        return int(self._state.env_steps)

    @property
    def state(self) -> RunState:
        """Everything the run is."""
        return self._state._replace(older=self._sebulba.older(self._exchange.versions()))

    def __call__(self) -> dict[str, Tensor]:
        """One iteration; returns its metrics."""
        number, began = int(self._state.iteration), time.perf_counter()
        if self._threaded:
            items = self._exchange.collect()
        else:
            items = [item for actor in self._actors for item in actor.produce(self._exchange, number)]
        waited, occupancy = time.perf_counter() - began, self._exchange.occupancy()
        self._state, metrics = self._sebulba.learn(self._state, items)
        self._exchange.publish(number + 1, self._state.learner.params | self._state.learner.buffers)
        ages = [number - item.version for item in items]
        took = time.perf_counter() - began
        told = {
            "policy_age": sum(ages) / len(ages),
            "policy_age_max": max(ages),
            "queue_occupancy": occupancy,
            "learner_wait": waited / took,
            "inference_batches_per_s": len(items) * self._sebulba.unroll_length / took,
        } | _shares([item.seconds for item in items])
        device = self._state.env_steps.device
        metrics |= {name: torch.tensor(float(value), device=device) for name, value in told.items()}
        self._items = items
        return metrics

    @property
    def trajectory(self) -> Trajectory:
        """What the last iteration learned from."""
        return merge(self._items)

    def close(self) -> None:
        """Ends the threads and closes the environments."""
        self._exchange.close()
        deadline = time.perf_counter() + JOIN_S
        for actor in self._actors:
            actor.join(max(0.0, deadline - time.perf_counter()))


def train(
    sebulba: Sebulba, state: RunState, *, until: int | None = None, iterations_per_call: int = 1
) -> Iterator[tuple[Report, Program]]:
    """Runs iterations and reports after every `iterations_per_call` of them; as `anakin.train`.

    The environments are closed when the iterator is exhausted, closed, or fails.

    Raises:
      ActorError: if an actor thread failed, or an environment does not come back.
      NonFiniteError: if the gradient is not finite any more.
    """
    until = sebulba.num_iterations if until is None else until
    iteration, began = int(state.iteration), time.perf_counter()
    sebulba.warm_up(state)
    compile_s = time.perf_counter() - began
    program = Program(sebulba, state)
    try:
        while iteration < until:
            began, history = time.perf_counter(), []
            count = min(iterations_per_call - iteration % iterations_per_call, until - iteration)
            for _ in range(count):
                history.append(program())
                iteration += 1
                if not program.healthy:
                    raise NonFiniteError(iteration, program.trajectory)
            metrics = mean_metrics(history)
            yield Report(iteration, program.env_steps, metrics, time.perf_counter() - began, compile_s), program
            compile_s = 0.0
    finally:
        program.close()


def _shares(seconds: list[dict[str, float]]) -> dict[str, float]:
    """What part of the actors' time went where."""
    total = sum(sum(s.values()) for s in seconds) or 1.0
    names = {"environment": "actor_in_environment", "inference": "actor_in_inference"}
    shares = {told: sum(s.get(name, 0.0) for s in seconds) / total for name, told in names.items()}
    return shares | {"actor_wait": sum(s.get(name, 0.0) for s in seconds for name in ("parameters", "queue")) / total}


def merge(items: list[Item]) -> Trajectory:
    """The unrolls of several pools as one of all their environments."""
    states = _cat([(item.actor_state, item.carry.actor_state) for item in items])
    return to_trajectory([item.steps for item in items], *states)


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
