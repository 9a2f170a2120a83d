"""An actor: a share of the environments, stepped in a thread of its own."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, Variables, bind
from torchpod.compile import span
from torchpod.env import Env
from torchpod.envs.transforms import Transform, send
from torchpod.interop import to_tensordict
from torchpod.processes import signal_group
from torchpod.rollout import Recorder, Step
from torchpod.sebulba.exchange import ClosedError, Exchange, Item, Phases
from torchpod.sebulba.transfer import Handed, Port, hand_over, stream_of_its_own, take
from torchpod.trees import contiguous, reader, writer
from torchpod.types import ActorOutput, Carry, TimeStep, Tree
from torchpod.watched import close_all

_KILLED_S = 2.0
"""How long `Actor.join` waits for a thread whose worker processes it has killed."""

Act = Callable[[Variables, Carry, Tensor, Tensor], tuple[ActorOutput, Tree, Tensor, Tensor]]
"""(variables, carry, env_keys `[b, 3]`, actor_keys `[b, 3]`) -> (output, actor_state, keys of the step, its number)."""


def make_act(agent: Agent) -> Act:
    """The inference of a step, as a function to compile: draws and counts as `rollout.make_step` does."""

    def act(
        variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor
    ) -> tuple[ActorOutput, Tree, Tensor, Tensor]:
        count = carry.step + 1
        output, actor_state = bind(agent, variables).act(
            carry.timestep, carry.actor_state, random.at(actor_keys, count), True
        )
        return contiguous(output), contiguous(actor_state), random.at(env_keys, count), count

    return act


def splits(env: Env, *names: str) -> bool:
    """Whether the class that defines `step` also defines `send` and `recv`: another's `step` may do more than these.

    A transform does if what is inside does.

    Args:
      env: the environment.
      names: of further methods that it should define.
    """
    owners = [next((c for c in type(env).__mro__ if x in vars(c)), None) for x in ("step", "send", "recv", *names)]
    return None not in owners and len(set(owners)) == 1 and (not isinstance(env, Transform) or splits(env.env))


class Pool:
    """Environments that an actor steps together, and where they stand.

    Args:
      env: nobody else touches it. If it `splits`, a step goes on between its `send` and `recv`.
      advance: step of a tensor environment, or inference for another.
      env_keys: `[b, 3]` of these environments.
      actor_keys: `[b, 3]`.
      carry: to begin from, on the actor's device.
      phases: of the actor.
      port: between an environment on the host and the actor's device; None if that is the host too.
    """

    def __init__(
        self,
        env: Env,
        advance: Step | Act,
        env_keys: Tensor,
        actor_keys: Tensor,
        carry: Carry,
        phases: Phases,
        port: Port | None = None,
    ) -> None:
        self.env, self.carry, self.advance = env, carry, advance
        self.keys, self._phases, self._port = (env_keys, actor_keys), phases, port
        self._types, self._alike = _types(carry.timestep), False
        self._leaves, self._tree = reader(carry.timestep), writer(carry.timestep)
        self.splits = splits(env)
        self._decided: Any = None
        self._native: Any = None

    def send(self, variables: Variables) -> None:
        """Decides, and starts the step."""
        with span("step" if self.env.traits.pure else "act"):
            self._decided = self.advance(variables, self.carry, *self.keys)
        if self.env.traits.pure:
            return
        output, _, step_keys, _ = self._decided
        self._native = output.action, step_keys
        if self._port is not None:
            self._phases.enter("transfer")
            self._native = self._port.download(self._native)
        if self.splits:
            self._phases.enter("environment")
            send(self.env, *self._native)
        self._phases.enter("inference")

    def recv(self) -> tuple[Carry, ActorOutput]:
        """Waits for the step."""
        if self.env.traits.pure:
            self.carry, output = self._decided
            return self.carry, output
        output, actor_state, _, count = self._decided
        self._phases.enter("environment")
        with span("env_step"):
            if self.splits:
                timestep = self.env.recv()  # pyright: ignore[reportAttributeAccessIssue]
            else:
                _, timestep = self.env.step(None, *self._native)
        if not self._alike:  # to the first, whose structure all have from here on
            self.require_types(timestep)
            self._alike = True
        if self._port is not None:
            self._phases.enter("transfer")
            try:
                timestep = self._port.upload(timestep)
            except TypeError:
                self.require_types(timestep)
                raise
        self._phases.enter("inference")
        # A view, as an image with its channels moved, lies otherwise in memory; programs are compiled for one order.
        timestep = self._tree([contiguous(x) for x in self._leaves(timestep)])
        self.carry = Carry((), timestep, actor_state, count)
        return self.carry, output

    def require_types(self, timestep: TimeStep, *, stacked: bool = False) -> None:
        """Raises `TypeError` if a timestep, or many of them `stacked`, has other types or shapes than the first had."""
        for name, first, now in zip(timestep._fields, self._types, _types(timestep, int(stacked)), strict=True):
            if first != now:
                raise TypeError(
                    f"{self.env.spec.name} gave {name} as {now}, and as {first} in its first timestep; give the same "
                    "in every step."
                )


def _types(timestep: TimeStep, leading: int = 0) -> list[str]:
    """Of each part, without its leading axes."""
    return [", ".join(f"{x.dtype} {[*x.shape[leading:]]}" for x in pytree.tree_leaves(part)) for part in timestep]


class Actor:
    """See the module.

    Args:
      index: its number.
      pools: its environments. With two that split, one is stepped while the actor decides for the other.
      phases: its clock.
      device: where it decides.
      length: T of an unroll.
      refresh: take the newest parameters before every step, not once per unroll.
      workers: processes that step its environments.
    """

    def __init__(
        self,
        index: int,
        pools: list[Pool],
        phases: Phases,
        device: torch.device,
        *,
        length: int,
        refresh: bool,
        workers: list[BaseProcess],
    ) -> None:
        self.index, self.pools, self.phases, self.device = index, pools, phases, device
        self._length, self._refresh, self._workers = length, refresh, workers
        self._begun: tuple[int, Handed] | None = None
        """The version for the next unroll, if its first step has been sent."""
        self._handed: Handed | None = None
        self._variables: Variables = {}
        self._thread: threading.Thread | None = None
        self._until = 0
        self._ending = threading.Lock()
        self._ended, self._abandoned = True, False  # who comes second of the thread and `join` closes the environments

    def begin(self, exchange: Exchange, first: int, until: int) -> None:
        """Starts the thread at unroll `first`; the last one is that before `until`."""
        self._until = until
        self._thread = threading.Thread(
            target=self._run, args=(exchange, first), name=f"torchpod-actor-{self.index}", daemon=True
        )
        self._ended = False
        try:
            self._thread.start()
        except RuntimeError:  # the system has no more
            self._thread, self._ended = None, True
            raise

    def join(self, deadline: float) -> list[Env]:
        """Waits for the thread, if there is one; returns the environments to close, unless the thread is still in them.

        It closes them itself when it comes back. Its worker processes are killed if it does not in time, with what
        they have started: a run that is over leaves nothing behind, and a thread that waits for one of them ends.

        Args:
          deadline: until when to wait, by `time.perf_counter`.
        """
        if self._thread is not None:
            self._thread.join(max(0.0, deadline - time.perf_counter()))
            if self._thread.is_alive() and self._workers:
                for process in self._workers:
                    with contextlib.suppress(ValueError):  # the environment has closed it
                        signal_group(process, signal.SIGKILL)
                self._thread.join(_KILLED_S)
        with self._ending:
            self._abandoned = not self._ended
        return [] if self._abandoned else [pool.env for pool in self.pools]

    def produce(self, exchange: Exchange, number: int) -> list[Item]:
        """One unroll of every pool.

        In a thread the first step of the next is begun if its parameters are there already, so that environments that
        are stepped elsewhere do not stand still while this one is handed over.
        """
        begun, self._begun = self._begun, None
        self.phases.enter("parameters")
        version, handed = begun or exchange.variables(number)
        self.phases.enter("inference")
        recorders = [Recorder(pool.carry) for pool in self.pools]
        with torch.no_grad():
            for t in range(self._length):
                for pool, recorder in zip(self.pools, recorders, strict=True):
                    if t > 0:
                        recorder.add(*pool.recv())
                    newest = exchange.newest()  # ends a run that is over within a step, not within an unroll
                    if t > 0 or begun is None:
                        pool.send(self._taken(newest if self._refresh else handed))
            if number + 1 < self._until and all(pool.splits for pool in self.pools):
                self._begun = exchange.known(number + 1)
            for pool, recorder in zip(self.pools, recorders, strict=True):
                recorder.add(*pool.recv())
                if self._begun is not None:
                    exchange.newest()  # a run that is over begins no step
                    pool.send(self._taken(self._begun[1]))
            trajectories = [recorder.trajectory() for recorder in recorders]
            for pool, trajectory in zip(self.pools, trajectories, strict=True):
                pool.require_types(trajectory.timestep, stacked=True)
            seconds = self.phases.take()
        items = []
        for pool, trajectory in zip(self.pools, trajectories, strict=True):
            steps = to_tensordict(trajectory)
            states = hand_over((trajectory.actor_state, pool.carry), self.device)
            items.append(Item(steps, states, version, seconds))
        self.phases.enter("queue")
        return items

    def _taken(self, handed: Handed) -> Variables:
        if handed is not self._handed:
            self._handed, self._variables = handed, take(handed, self.device)
        return self._variables

    def _run(self, exchange: Exchange, first: int) -> None:
        self.phases.thread = threading.get_ident()
        torch.set_num_threads(1)  # of this thread: more are slower by far when cores are shared
        try:
            with stream_of_its_own(self.device):
                for number in range(first, self._until):
                    items = self.produce(exchange, number)
                    with span("put"):
                        exchange.put(self.index, items)
        except ClosedError:
            pass
        except BaseException as error:
            exchange.fail(self.index, error)
        finally:
            with self._ending:
                self._ended = True
            if self._abandoned:  # by `join`: its environments came back too late
                close_all(pool.env for pool in self.pools)
