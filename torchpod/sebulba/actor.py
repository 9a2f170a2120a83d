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
from torchpod.rollout import Step, unroll
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


class Actor:
    """See the module.

    Args:
      index: its number.
      env: its environments; nobody else touches them.
      advance: `(step of a tensor environment, or None, inference)`, shared by all actors.
      env_keys: `[b, 3]` of its share of the environments.
      actor_keys: `[b, 3]`.
      length: T of an unroll.
      refresh: take the newest parameters before every step, not once per unroll.
    """

    def __init__(
        self,
        index: int,
        env: Env,
        advance: tuple[Step | None, Act],
        env_keys: Tensor,
        actor_keys: Tensor,
        *,
        length: int,
        refresh: bool,
    ) -> None:
        self.index, self.env, self.phases = index, env, Phases()
        self._whole, self._act = advance
        self._env_keys, self._actor_keys = env_keys, actor_keys
        self._length, self._refresh = length, refresh
        self._thread: threading.Thread | None = None
        self.carry: Carry | None = None

    def begin(self, exchange: Exchange, first: int) -> None:
        """Starts the thread at unroll `first`, from `carry`."""
        self._thread = threading.Thread(
            target=self._run, args=(exchange, first), name=f"torchpod-actor-{self.index}", daemon=True
        )
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, if there is one, and closes the environments, unless the thread hangs in them."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        if self._thread is None or not self._thread.is_alive():
            getattr(self.env, "close", lambda: None)()

    def produce(self, exchange: Exchange, number: int) -> Item:
        """One unroll."""
        assert self.carry is not None
        self.phases.enter("parameters")
        version, variables = exchange.variables(number)

        def step(variables: Variables, *where: Any) -> tuple[Carry, ActorOutput]:
            newest = exchange.newest()  # ends a run that is over within a step, not within an unroll
            return self._step(newest if self._refresh else variables, *where)

        self.phases.enter("inference")
        self.carry, trajectory = unroll(
            step, variables, self.carry, self._env_keys, self._actor_keys, length=self._length
        )
        return Item(trajectory, self.carry, version, self.phases.take())

    def _run(self, exchange: Exchange, first: int) -> None:
        torch.set_num_threads(1)  # of this thread: more are slower by far when cores are shared
        try:
            for number in itertools.count(first):
                item = self.produce(exchange, number)
                self.phases.enter("queue")
                exchange.put(self.index, item)
        except ClosedError:
            pass
        except BaseException as error:
            exchange.fail(self.index, error)

    def _step(
        self, variables: Variables, carry: Carry, env_keys: Tensor, actor_keys: Tensor
    ) -> tuple[Carry, ActorOutput]:
        if self._whole is not None:
            return self._whole(variables, carry, env_keys, actor_keys)
        output, actor_state, step_keys, count = self._act(variables, carry, env_keys, actor_keys)
        self.phases.enter("environment")
        _, timestep = self.env.step(None, output.action, step_keys)
        self.phases.enter("inference")
        return Carry((), timestep, actor_state, count), output
