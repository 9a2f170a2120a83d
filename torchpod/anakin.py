"""Anakin: environment, policy and update in one program on one device. Read types, agent and rollout first.

After Hessel et al. 2021, "Podracer architectures for scalable reinforcement learning"
(https://arxiv.org/abs/2104.06272), figure 2. An iteration is: unroll T steps of B environments, update. It is a pure
function of `RunState`; `train` replays it many times per return to the host.
"""

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables, variables_of
from torchpod.compile import Compiler, span
from torchpod.distributed import ALONE, Ranks
from torchpod.env import Env
from torchpod.episodes import Episodes, counting, mean_metrics, names_of, none_yet
from torchpod.graph import Replay
from torchpod.learner import Learner, LearnerConfig, LearnerState
from torchpod.phases import Phases
from torchpod.replay import Priorities, ReplayConfig
from torchpod.replay.learning import ReplayLearner, iterations_before
from torchpod.reuse_forward import ReuseForward
from torchpod.rollout import Step, make_step, start, unroll
from torchpod.through_env import Tape, ThroughEnv
from torchpod.trees import stack
from torchpod.types import Carry, Trajectory

ENV_STREAM, ACTOR_STREAM, LEARNER_STREAM, EVAL_STREAM = range(4)
"""Children of the seed's key: what is drawn for one purpose never depends on another."""


class RunState(NamedTuple):
    """Everything a run is. A checkpoint holds exactly this. In a population every leaf has a leading P axis."""

    carry: Carry
    learner: LearnerState
    env_keys: Tensor
    """`[B, 3]`, owned by the environments; so are the next two."""
    actor_keys: Tensor
    learner_keys: Tensor
    episode_return: Tensor
    """`[B]` float32, raw reward of the running episodes; `[B, G]` if there are groups."""
    episode_length: Tensor
    """`[B]` int64; `[B, 1 + G]` of groups whose agents can leave the game: see `count_episodes`."""
    iteration: Tensor
    """int64 scalar."""
    env_steps: Tensor
    """int64 scalar: transitions on all ranks so far, without resets."""
    priorities: Priorities | tuple[()] = ()
    """Of the replay buffer, if it has any. What it holds is in no state: see torchpod.replay."""
    older: tuple[Variables, ...] = ()
    """Variables of the `lag` versions before the newest, oldest first: Sebulba's actors may still act with them."""


class NonFiniteError(FloatingPointError):
    """A gradient was not finite, or a mask allowed nothing. `trajectory` and `iteration` say from what."""

    def __init__(self, iteration: int, trajectory: Trajectory) -> None:
        super().__init__(
            f"the gradient of iteration {iteration} must be finite and is not; look in `trajectory` for numbers that "
            "are not finite and for masks that allow nothing, or lower learning_rate or max_grad_norm."
        )
        self.iteration, self.trajectory = iteration, trajectory


class Report(NamedTuple):
    """What one call to the device brought back."""

    iteration: int
    env_steps: int | list[int]
    """Per member, over all ranks."""
    metrics: dict[str, Tensor]
    """Means over the iterations of the call, on CPU: scalars, or `[P]` in a population."""
    wall_s: float
    """Of the call, without compilation."""
    compile_s: float
    """Spent on compilation, warm-up and capture before the first call; 0 in later reports."""
    failure: NonFiniteError | None = None
    """Of members of a population whose gradient was not finite in this call, while others go on."""


def init_state(
    seed: int,
    make_agent: Callable[[], Agent],
    learner: Learner,
    begin: Callable[[Agent, Tensor], Carry],
    num_envs: int,
    *,
    replay: ReplayLearner | None = None,
    ranks: Ranks,
    device: torch.device,
) -> RunState:
    """The state of a run before its first iteration; `begin(agent, env_keys)` resets its environments."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        agent = make_agent().to(device)
    for x in (*agent.parameters(), *agent.buffers()):  # which may have been drawn from elsewhere
        ranks.first(x)
    root = random.key(seed, device)
    env_keys, actor_keys, learner_keys = (
        random.split(random.fold_in(root, stream), num_envs, ranks.rank * num_envs)
        for stream in (ENV_STREAM, ACTOR_STREAM, LEARNER_STREAM)
    )
    zero = torch.zeros((), dtype=torch.int64, device=device)
    carry = begin(agent, env_keys)
    episode_return, episode_length = none_yet(carry.timestep, agent.teams)
    return RunState(
        carry=carry,
        learner=learner.init(*variables_of(agent)),
        env_keys=env_keys,
        actor_keys=actor_keys,
        learner_keys=learner_keys,
        episode_return=episode_return,
        episode_length=episode_length,
        iteration=zero,
        env_steps=zero.clone(),
        priorities=replay.begin(agent, carry, actor_keys) if replay else (),
    )


def next_state(
    state: RunState, carry: Carry, learner: LearnerState, metrics: dict[str, Tensor], episodes: Episodes, ranks: Ranks
) -> tuple[RunState, dict[str, Tensor]]:
    """The state and the metrics after an iteration, from what it made."""
    sums = ranks.sum(episodes.sums)
    return state._replace(
        carry=carry,
        learner=learner._replace(healthy=learner.healthy & (sums[..., -1] == 0)),
        episode_return=episodes.running_return,
        episode_length=episodes.running_length,
        iteration=state.iteration + 1,
        env_steps=state.env_steps + sums[..., 3].long(),
    ), {**metrics, "episodes": sums}


class Anakin:
    """One training program.

    Args:
      make_agent: builds the agent; called once per member with torch's generator seeded by the member's seed.
      env: a tensor environment.
      num_envs: B on this rank.
      unroll_length: T.
      learner: how to learn.
      num_iterations: of the whole run.
      compiler: how to compile; its population is P.
      ranks: all processes of the run.
      device: where everything lives.
      replay: what is kept, for an agent that learns from replay.
      phases: whether to tell what part of the time rollouts and updates take.
    """

    def __init__(
        self,
        make_agent: Callable[[], Agent],
        env: Env,
        *,
        num_envs: int,
        unroll_length: int,
        learner: LearnerConfig,
        num_iterations: int,
        compiler: Compiler,
        ranks: Ranks = ALONE,
        device: torch.device | str = "cpu",
        replay: ReplayConfig | None = None,
        phases: bool = False,
    ) -> None:
        if not (env.traits.pure and env.traits.capturable):
            raise ValueError(f"environment {env.spec.name} is not a pure tensor program; run it with loop=sebulba.")
        if compiler.population > 1 and not env.traits.vmappable:
            raise ValueError(f"environment {env.spec.name} cannot be vmapped; run it with population=1.")
        self.make_agent, self.env, self.device = make_agent, env, torch.device(device)
        self.agent = make_agent().to(device)
        self.num_envs, self.unroll_length, self.ranks = num_envs, unroll_length, ranks
        self.num_iterations, self.population, self.compiler = num_iterations, compiler.population, compiler
        total = num_envs * ranks.world_size
        before = iterations_before(self.agent, replay, num_envs=total, unroll_length=unroll_length)
        self.learner = Learner(
            self.agent,
            learner,
            num_iterations=num_iterations,
            iterations_before=before,
            steps_per_iteration=total * unroll_length,
            compiler=compiler,
            ranks=ranks,
        )
        self._axis = 0 if self.population == 1 else 1
        self._step = compiler(make_step(self.agent, env), fall_back=self.agent.may_fall_back)
        self._count, self.phases = compiler(counting(self.agent.teams, env.spec)), Phases(self.device, phases)
        self._through = self._reuse = self.replay = None
        if self.agent.replayed:
            sizes = {"num_envs": num_envs, "unroll_length": unroll_length}
            self.replay = ReplayLearner(self.agent, self.learner, replay or ReplayConfig(), compiler=compiler, **sizes)
        elif self.agent.through_env:
            self._through = ThroughEnv(self.agent, env, learner=self.learner, compiler=compiler)
        elif self.agent.reuse_forward:
            self._reuse = ReuseForward(self.agent, env, learner=self.learner, compiler=compiler)

    def init(self, seed: int, members: list[int] | None = None) -> RunState:
        """The state before the first iteration; member p of a population is the run of seed + p."""
        if self.population == 1:
            return self._init_one(seed)
        return stack([self._init_one(s) for s in members or range(seed, seed + self.population)])

    def _init_one(self, seed: int) -> RunState:
        return init_state(
            seed,
            self.make_agent,
            self.learner,
            lambda a, keys: start(a, self.env, keys),
            self.num_envs,
            ranks=self.ranks,
            device=self.device,
            replay=self.replay,
        )

    def rollout(self, state: RunState) -> tuple[Carry, Trajectory]:
        """The first half of an iteration."""
        return self._rollout(self._step, state)

    def _rollout(self, step: Step, state: RunState) -> tuple[Carry, Trajectory]:
        with span("rollout"):
            return unroll(
                step,
                self.learner.acting(state.learner, state.iteration),
                state.carry,
                state.env_keys,
                state.actor_keys,
                length=self.unroll_length,
                time_axis=self._axis,
            )

    def iterate(self, state: RunState) -> tuple[RunState, dict[str, Tensor]]:
        """One iteration: without a host sync, and pure but for what replay keeps."""
        tape = Tape(self._step) if self._through else None
        kept = self._reuse.keep() if self._reuse else None
        with self.phases("rollout"):
            carry, trajectory = self._rollout(tape or kept or self._step, state)
        with span("update"), self.phases("update"):
            keys = random.at(state.learner_keys, state.iteration * self.learner.counters_per_update)
            if self.replay:
                learner, metrics = self.replay.update(
                    state.learner, trajectory, state.priorities, state.iteration, keys
                )
            elif self._through and tape:
                learner, metrics = self._through.update(
                    state.learner, tape.carries, trajectory, state.env_keys, state.actor_keys, keys
                )
            else:
                learner, metrics = self.learner.update(
                    state.learner, trajectory, keys, kept.sum_gradient if kept else None
                )
        return self._after(state, carry, trajectory, learner, metrics)

    def fill(self, state: RunState) -> tuple[RunState, dict[str, Tensor]]:
        """An iteration of the first ones of an agent with replay: it collects, and does not learn."""
        assert self.replay is not None
        carry, trajectory = self.rollout(state)
        learner = self.replay.store(state.learner, trajectory, state.priorities, state.iteration)
        return self._after(state, carry, trajectory, learner, {})

    def _after(
        self, state: RunState, carry: Carry, trajectory: Trajectory, learner: LearnerState, metrics: dict[str, Tensor]
    ) -> tuple[RunState, dict[str, Tensor]]:
        episodes = self._count(trajectory.timestep, state.episode_return, state.episode_length)
        return next_state(state, carry, learner, metrics, episodes, self.ranks)


def train(
    anakin: Anakin, state: RunState, *, until: int | None = None, iterations_per_call: int = 1
) -> Iterator[tuple[Report, Replay]]:
    """Runs iterations and reports after each call to the device.

    Args:
      anakin: the program.
      state: from `Anakin.init`, or a checkpoint.
      until: iteration to stop at; the whole run if None.
      iterations_per_call: iterations between two returns to the host; the last call may have fewer.

    Yields:
      The report, and the program, whose `.state` may be read (or cloned) until the next call.

    Raises:
      NonFiniteError: if no member of the population can learn any more; `state` is then that of the last report.
    """
    until = anakin.num_iterations if until is None else until
    iteration, began, filled = int(state.iteration.flatten()[0]), time.perf_counter(), []
    names = names_of(state.carry.timestep, anakin.agent.teams)
    if anakin.replay:
        anakin.replay.check(iterations_per_call)
    if not (captures := anakin.compiler.captures(anakin.device)):
        anakin.compiler.ahead(anakin.iterate, state)
    replay = Replay(anakin.iterate, state, capture=captures, capturable=lambda: not anakin.compiler.fell_back)
    compile_s = time.perf_counter() - began
    while iteration < until:
        began, before = time.perf_counter(), replay.keep()
        while anakin.replay and iteration < min(anakin.replay.buffer.fill_iterations, until):
            state, metrics = anakin.fill(replay.state)
            replay.load(state)
            filled.append(metrics)
            iteration += 1
        # Calls end at multiples of iterations_per_call, so that a resumed run reports the same rows.
        count = min(iterations_per_call - iteration % iterations_per_call, until - iteration)
        anakin.phases.begin()
        try:
            if count == 1:
                history = [replay()]
            else:  # of several, each of which overwrites the metrics of the one before
                history = [{name: x.clone() for name, x in replay().items()} for _ in range(count)]
            metrics, filled = mean_metrics([*filled, *history], names), []
        except BaseException:
            replay.load(before)  # a call that is interrupted leaves the state of the last report
            raise
        failure = None
        if (before.learner.healthy & ~replay.state.learner.healthy).any():
            failure = _find_failure(anakin, before, iteration + count)
            if not replay.state.learner.healthy.any():
                replay.load(before)
                raise failure
        iteration += count
        env_steps, seconds = replay.state.env_steps.tolist(), time.perf_counter() - began
        metrics |= anakin.phases.shares(count, seconds)
        yield Report(iteration, env_steps, metrics, seconds, compile_s, failure), replay
        compile_s = 0.0


def _find_failure(anakin: Anakin, state: RunState, until: int) -> NonFiniteError:
    """Runs the iterations of a failed call again, one by one: the same keys give the same numbers."""
    state = pytree.tree_map(torch.clone, state)  # priorities are written in place
    for iteration in range(int(state.iteration.flatten()[0]), until):
        fills = anakin.replay and iteration < anakin.replay.buffer.fill_iterations
        after, _ = (anakin.fill if fills else anakin.iterate)(state)
        if (state.learner.healthy & ~after.learner.healthy).any():
            break
        state = after
    _, trajectory = anakin.rollout(state)
    return NonFiniteError(int(state.iteration.flatten()[0]) + 1, trajectory)
