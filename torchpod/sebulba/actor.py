"""An actor: a share of the environments, stepped in a thread of its own."""

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchpod import random
from torchpod.agent import Agent, Variables, bind
from torchpod.env import Env
from torchpod.interop import to_tensordict
from torchpod.rollout import Recorder, Step
from torchpod.sebulba.exchange import ClosedError, Exchange, Item, Phases
from torchpod.types import ActorOutput, Carry, Tree

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
        return output, actor_state, random.at(env_keys, count), count

    return act


class Pool:
    """Environments that an actor steps together, and where they stand.

    Args:
      env: nobody else touches it. If it has `send(action)` and `recv()`, its step goes on between the two.
      advance: `(step of a tensor environment, or None, inference)`.
      env_keys: `[b, 3]` of these environments.
      actor_keys: `[b, 3]`.
      carry: to begin from.
      phases: of the actor.
    """

    def __init__(
        self,
        env: Env,
        advance: tuple[Step | None, Act],
        env_keys: Tensor,
        actor_keys: Tensor,
        carry: Carry,
        phases: Phases,
    ) -> None:
        self.env, self.carry = env, carry
        self._whole, self._act = advance
        self._keys, self._phases = (env_keys, actor_keys), phases
        self._splits = hasattr(env, "send")
        self._pending: Any = None

    def send(self, variables: Variables) -> None:
        """Decides, and starts the step."""
        if self._whole is not None:
            self._pending = self._whole(variables, self.carry, *self._keys)
            return
        self._pending = self._act(variables, self.carry, *self._keys)
        if self._splits:
            self.env.send(self._pending[0].action)  # pyright: ignore[reportAttributeAccessIssue]

    def recv(self) -> tuple[Carry, ActorOutput]:
        """Waits for the step."""
        if self._whole is not None:
            self.carry, output = self._pending
            return self.carry, output
        output, actor_state, step_keys, count = self._pending
        self._phases.enter("environment")
        if self._splits:
            timestep = self.env.recv()  # pyright: ignore[reportAttributeAccessIssue]
        else:
            _, timestep = self.env.step(None, output.action, step_keys)
        self._phases.enter("inference")
        self.carry = Carry((), timestep, actor_state, count)
        return self.carry, output


class Actor:
    """See the module.

    Args:
      index: its number.
      pools: its environments. With two, one is stepped while the actor decides for the other.
      phases: its clock.
      length: T of an unroll.
      refresh: take the newest parameters before every step, not once per unroll.
    """

    def __init__(self, index: int, pools: list[Pool], phases: Phases, *, length: int, refresh: bool) -> None:
        self.index, self.pools, self.phases = index, pools, phases
        self._length, self._refresh = length, refresh
        self._thread: threading.Thread | None = None

    def begin(self, exchange: Exchange, first: int) -> None:
        """Starts the thread at unroll `first`."""
        self._thread = threading.Thread(
            target=self._run, args=(exchange, first), name=f"torchpod-actor-{self.index}", daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, if there is one, and closes the environments, unless the thread hangs in them."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            for pool in self.pools:
                getattr(pool.env, "close", lambda: None)()

    def produce(self, exchange: Exchange, number: int) -> list[Item]:
        """One unroll of every pool."""
        self.phases.enter("parameters")
        version, variables = exchange.variables(number)
        self.phases.enter("inference")
        recorders = [Recorder(pool.carry) for pool in self.pools]
        with torch.no_grad():
            for t in range(self._length):
                newest = exchange.newest()  # ends a run that is over within a step, not within an unroll
                for pool, recorder in zip(self.pools, recorders, strict=True):
                    if t > 0:
                        recorder.add(*pool.recv())
                    pool.send(newest if self._refresh else variables)
            for pool, recorder in zip(self.pools, recorders, strict=True):
                recorder.add(*pool.recv())
            trajectories = [recorder.trajectory() for recorder in recorders]
            seconds = self.phases.take()
        return [
            Item(to_tensordict(trajectory), trajectory.actor_state, pool.carry, version, seconds)
            for pool, trajectory in zip(self.pools, trajectories, strict=True)
        ]

    def _run(self, exchange: Exchange, first: int) -> None:
        torch.set_num_threads(1)  # of this thread: more are slower by far when cores are shared
        try:
            for number in itertools.count(first):
                items = self.produce(exchange, number)
                self.phases.enter("queue")
                exchange.put(self.index, items)
        except ClosedError:
            pass
        except BaseException as error:
            exchange.fail(self.index, error)
