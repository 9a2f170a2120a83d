"""A run of Sebulba under way: its actor threads, and the learner's loop. Read loop.py first."""

import contextlib
import time
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod.agent import Variables
from torchpod.anakin import NonFiniteError, Report, RunState
from torchpod.compile import span
from torchpod.env import Env
from torchpod.episodes import mean_metrics, names_of
from torchpod.sebulba.exchange import Exchange, Item
from torchpod.sebulba.loop import Sebulba, merge, side_by_side
from torchpod.sebulba.transfer import Static, hand_over, take, wait_for
from torchpod.types import Trajectory
from torchpod.watched import close_all, unless

JOIN_S = 2.0
"""How long the end of a run waits for a thread that does not come back from its environments."""


class Program:
    """A run under way. Compiles everything; `begin` starts the actors.

    Args:
      sebulba: the program.
      state: to begin from.
    """

    def __init__(self, sebulba: Sebulba, state: RunState) -> None:
        self._sebulba, self._carry = sebulba, state.carry
        # Where the environments stand, and what the actors may still ask for, is not the update's affair.
        self._state = state._replace(carry=(), older=())
        lag = sebulba.config.lag
        self._iteration = int(state.iteration)
        self.fill_iterations = sebulba.replay.buffer.fill_iterations if sebulba.replay else 0
        self._actors = sebulba.actors(state)
        example = sebulba.example(state, self._actors)
        if sebulba.replay:
            sebulba.replay.buffer.rehearses = True
        if sebulba.static:
            capture = sebulba.compiler.captures(sebulba.device)
            args = self._state, example
            self._update = Static(sebulba.update, args, capture=capture, capturable=sebulba.capturable)
        else:
            self._update = sebulba.update
            sebulba.compiler.ahead(self._update, self._state, example)
            self._update(pytree.tree_map(torch.clone, self._state), example)  # priorities are written in place
        if sebulba.replay:
            sebulba.replay.buffer.rehearses = False
        self._exchange = Exchange(
            [actor.phases for actor in self._actors],
            lag=None if lag == "free" else lag,
            capacity=sebulba.config.queue_size,
            timeout_s=sebulba.config.timeout_s,
        )
        for back in range(0 if lag == "free" else lag, 0, -1):
            if self._iteration - back >= 0:
                self._publish(self._iteration - back, state.older[-back])
        self._publish(self._iteration, sebulba.learner.acting(state.learner, state.iteration))
        self._items: list[Item] = []
        self._checked = False
        self.healthy = bool(state.learner.healthy)
        """Whether all gradients so far were finite."""
        self._threaded, self._until = sebulba.config.num_actor_threads > 0, 0

    def begin(self, until: int) -> None:
        """Starts the actor threads, if there are to be any, for the iterations before that one."""
        self._until = until
        wait_for(
            self._sebulba.device, *self._sebulba.actor_devices
        )  # their streams know nothing of what was done so far
        for actor in self._actors:
            actor.phases.take()  # what was compilation is no time of the actor's
            if self._threaded:
                actor.begin(self._exchange, self._iteration, until)

    @property
    def env_steps(self) -> int:
        """Transitions so far, over all ranks."""
        return int(self._state.env_steps)

    @property
    def state(self) -> RunState:
        """Everything the run is. Between two calls: one that was given up leaves its parts at different iterations."""
        if self._items:
            self._carry = side_by_side([take(item.states, self._sebulba.device)[1] for item in self._items])
        versions = [handed.tree for handed in self._exchange.versions()]
        priorities = pytree.tree_map(torch.clone, self._state.priorities)  # the next iteration writes to them
        return self._state._replace(carry=self._carry, older=self._sebulba.older(versions), priorities=priorities)

    def __call__(self) -> dict[str, Tensor]:
        """One iteration; returns its metrics."""
        number, began, occupancy = self._iteration, time.perf_counter(), self._exchange.occupancy()
        if self._threaded:
            if number >= self._until:
                raise RuntimeError(f"Actors were begun for the iterations before {self._until}; begin with more.")
            with span("get"):
                items = self._exchange.collect()
        else:
            items = [item for actor in self._actors for item in actor.produce(self._exchange, number)]
        waited = time.perf_counter() - began
        with unless(self.failure):
            with span("update"):
                update = self._sebulba.fill if number < self.fill_iterations else self._update
                trajectory = merge(items, self._sebulba.device)
                if self._sebulba.replay and not self._checked:
                    self._sebulba.replay.buffer.check_frames(trajectory)  # a captured update does not
                    self._checked = True
                self._state, metrics = update(self._state, trajectory)
            self._iteration, self._items = number + 1, items
            self._publish(number + 1, self._sebulba.learner.acting(self._state.learner, self._state.iteration))
            self.healthy = bool(self._state.learner.healthy)  # on a GPU, waits for the update
        ages = [number - item.version for item in items]
        took = time.perf_counter() - began
        told = {
            "policy_age": sum(ages) / len(ages),
            "policy_age_max": max(ages),
            "queue_occupancy": occupancy,
            "learner_wait": waited / took,
            "inference_batches_per_s": len(items) * self._sebulba.unroll_length / took,
        } | _shares([item.seconds for item in items])
        return metrics | {name: torch.tensor(float(value)) for name, value in told.items()}

    def failure(self) -> Exception | None:
        """What an actor has failed with, or that it hangs; None if all is well. The next iteration raises it."""
        return self._exchange.failure()

    @property
    def trajectory(self) -> Trajectory:
        """What the last iteration learned from."""
        return merge(self._items, self._sebulba.device)

    def close(self) -> None:
        """Ends the threads and closes the environments."""
        self._exchange.close()
        deadline = time.perf_counter() + JOIN_S
        with contextlib.ExitStack() as joining:
            # What actors launched last still writes to memory that is freed after this.
            joining.callback(wait_for, *self._sebulba.actor_devices)
            envs: list[Env] = []
            joining.callback(close_all, envs)
            for actor in self._actors:
                joining.callback(lambda actor=actor: envs.extend(actor.join(deadline)))

    def _publish(self, version: int, variables: Variables) -> None:
        self._exchange.publish(version, hand_over(variables, self._sebulba.device))


def train(
    sebulba: Sebulba, state: RunState, *, until: int | None = None, iterations_per_call: int = 1
) -> Iterator[tuple[Report, Program]]:
    """Runs iterations and reports after every `iterations_per_call` of them; as `anakin.train`.

    The environments are closed when the iterator is exhausted, closed, or fails.

    Raises:
      ActorError: if an actor thread failed, or an environment does not come back.
      NonFiniteError: if the gradient is not finite any more.
    """
    if sebulba.replay:
        sebulba.replay.check(iterations_per_call)
    until = sebulba.num_iterations if until is None else until
    names = names_of(state.carry.timestep, sebulba.agent.teams)
    iteration, began = int(state.iteration), time.perf_counter()
    try:
        program = Program(sebulba, state)
    except BaseException:
        with contextlib.suppress(Exception):  # what was raised first is what went wrong
            sebulba.close()
        raise
    compile_s = time.perf_counter() - began if sebulba.compiler.enabled else 0.0
    try:
        sebulba.begun = True
        program.begin(until)
        while iteration < until:
            began, history = time.perf_counter(), []
            count = min(iterations_per_call - iteration % iterations_per_call, until - iteration)
            filling = max(0, program.fill_iterations - iteration)  # reported with the first that learns
            for _ in range(min(filling + count, until - iteration)):
                history.append(program())
                iteration += 1
                if not program.healthy:
                    raise NonFiniteError(iteration, program.trajectory)
            metrics = mean_metrics(history, names)
            yield Report(iteration, program.env_steps, metrics, time.perf_counter() - began, compile_s), program
            compile_s = 0.0
    except BaseException:
        with contextlib.suppress(Exception):
            program.close()
        raise
    program.close()


def _shares(seconds: list[dict[str, float]]) -> dict[str, float]:
    """What part of the actors' time went where."""
    total = sum(sum(s.values()) for s in seconds) or 1.0
    names = {name: f"actor_in_{name}" for name in ("environment", "inference", "transfer")}
    shares = {told: sum(s.get(name, 0.0) for s in seconds) / total for name, told in names.items()}
    return shares | {"actor_wait": sum(s.get(name, 0.0) for s in seconds for name in ("parameters", "queue")) / total}
