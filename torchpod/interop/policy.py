"""A trained policy on its own: as a `TensorDictModule`, and as a plain module that `torch.export` takes whole."""

import contextlib
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torchpod.agent import Agent, Variables, bind
from torchpod.interop.unfit import Watched, misread
from torchpod.specs import Box, SpecTree
from torchpod.types import FIRST, MID, TimeStep, Tree

if TYPE_CHECKING:
    from tensordict.nn import TensorDictModule


class Greedy(nn.Module):
    """The greedy actions of an agent, with its parameters and buffers in it.

    Feed-forward agents: `(observation) -> action`. Agents with a recurrent state: `(observation, first, state) ->
    (action, state)`, where `first` `[B]` bool says which rows begin an episode, and `initial_state(B)` is what to begin
    with.

    Args:
      agent: the agent; its own parameters are not used.
      variables: its parameters and buffers.
      groups: of an environment with many agents, `EnvSpec.groups`: observations and actions are dicts by group, too.
      action: `EnvSpec.action`, to whose bounds actions are clipped, as environments do; None leaves them.
    """

    def __init__(
        self, agent: Agent, variables: Variables, groups: dict[str, int] | None = None, action: SpecTree = None
    ) -> None:
        super().__init__()
        self._groups, self._action, self._checked = groups, action, False
        self._agent = [agent]  # in a list: its own parameters are not used, and are not those of this module
        self._names = list(variables)
        for i, value in enumerate(variables.values()):
            self.register_buffer(f"variable_{i}", value.detach().clone())
        # What an agent that learns from single rows keeps, its policy does not depend on.
        self.has_state = agent.recurrent and bool(pytree.tree_leaves(agent.initial_state(1)))

    @property
    def agent(self) -> Agent:
        """What acts; its own parameters are not used."""
        return self._agent[0]

    def initial_state(self, batch_size: int) -> Tree:
        """See `Agent.initial_state`."""
        device = next(self.buffers()).device
        return pytree.tree_map(lambda x: x.to(device), self._agent[0].initial_state(batch_size))

    def forward(self, observation: Tree, first: Tensor | None = None, state: Tree = ()) -> Any:
        """Actions `[B]` int64 or `[B, A]` float32 for observations `[B, ...]`; see the class."""
        size, device = _size(observation)
        first = torch.zeros(size, dtype=torch.bool, device=device) if first is None else first
        action, state = self._act(observation, first, state if self.has_state else self.initial_state(size))
        return (action, state) if self.has_state else action

    def _act(
        self, observation: Tree, first: Tensor, state: Tree, reward: float = 0.0, discount: float = 1.0
    ) -> tuple[Tree, Tree]:
        size, device = _size(observation)

        def signal(value: float) -> Tree:
            if self._groups is None:
                return torch.full((size,), value, device=device)
            return {group: torch.full((size, n), value, device=device) for group, n in self._groups.items()}

        extras = {"raw_reward": signal(reward), "game_over": torch.zeros(size, dtype=torch.bool, device=device)}
        step_type = torch.where(first, FIRST, MID).to(torch.int32)
        timestep = TimeStep(step_type, signal(reward), signal(discount), observation, extras)
        keys = torch.zeros(size, 3, dtype=torch.int64, device=device)  # the greedy action draws nothing
        variables = {name: getattr(self, f"variable_{i}") for i, name in enumerate(self._names)}
        output, state = bind(self._agent[0], variables).act(timestep, state, keys, explore=False)
        return _clipped(output.action, self._action), state

    @torch.no_grad()
    def check(self, observation: Tree) -> None:
        """Tries once whether observations `[B, ...]`, and a recurrent state, are all that the greedy action depends on.

        Raises:
          ValueError: if not.
        """
        mapped = cast(Any, torch._C)._functorch.peek_interpreter_stack() is not None  # by torch.vmap
        captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        if self._checked or mapped or captured or torch.compiler.is_compiling():
            return
        size, device = _size(observation)
        kept = played = self.initial_state(size)
        for i, reward in enumerate((0.0, 1.0, -1.0, 100.0, -100.0)):
            first = torch.full((size,), i == 0, device=device)
            action, played = self._act(observation, first, played, reward, 0.5 if reward else 1.0)
            given = (first, kept) if self.has_state else (first & False, self.initial_state(size))
            alone, kept = self._act(observation, *given)
            if not all(map(_close, pytree.tree_leaves(action), pytree.tree_leaves(alone))):
                seen = "observation, state and first" if self.has_state else "observation alone (recurrent is False)"
                raise ValueError(
                    f"the greedy action of {type(self.agent).__name__} depends on more, such as the last reward or a "
                    f"state, than a policy on its own is given, {seen}; use run.policy, which is given timesteps, or "
                    "let the environment observe what is missing."
                )
            kept, played = pytree.tree_map(lambda x: x.roll(1, 0), (kept, played))  # states of other observations
        self._checked = True


def _size(observation: Tree) -> tuple[int, torch.device]:
    """B, and where it is."""
    leaf = pytree.tree_leaves(observation)[0]
    return leaf.shape[0], leaf.device


def _close(x: Tensor, y: Tensor) -> bool:
    return torch.allclose(x, y, equal_nan=True)


def _clipped(action: Tree, spec: SpecTree) -> Tree:
    """Floats within the bounds of their Box."""
    if isinstance(spec, dict):
        return {name: _clipped(x, spec[name]) for name, x in action.items()}
    return action.clamp(spec.low, spec.high) if isinstance(spec, Box) else action


def policy_module(agent: Agent, variables: Variables, *, one_hot: int | None = None) -> "TensorDictModule":
    """The greedy policy for TorchRL: reads `observation` `[B, ...]` and writes `action` `[B]` or `[B, A]`.

    A policy of many agents reads `(group, "observation")` `[B, N, ...]` and writes `(group, "action")` `[B, N]`, which
    are the keys of `to_torchrl`.

    With a recurrent state it also reads `is_init` `[B, 1]` bool and `state`, and writes `("next", "state")`; TorchRL's
    `InitTracker` and `TensorDictPrimer` bring the first two.

    The first call also tries whether the agent acts on what it reads there alone, and refuses one that acts on rewards.

    Args:
      agent: the agent; its own parameters are not used.
      variables: parameters and buffers; those of `variables_of`, or of a checkpoint.
      one_hot: the number of values of a discrete action, which is then written one-hot, `[B, one_hot]` int64: a
        `GymEnv` takes it so unless told otherwise, and plays 0 where a number comes.

    Raises:
      ValueError: if they are not those of the agent, its recurrent state is no single tensor, or one of many agents; if
        these are to be one-hot.
    """
    from tensordict.nn import TensorDictModule  # its import takes a second

    from torchpod.algos.multi_agent import Policies  # torchpod.algos imports torchpod.interop

    groups = agent.groups if isinstance(agent, Policies) else None
    require_variables(agent, variables)
    if one_hot is not None and groups is not None:
        raise ValueError(f"one_hot={one_hot} is for one agent, and {type(agent).__name__} has many; leave it out.")
    greedy = Greedy(agent, variables, groups)
    in_keys: list[Any] = ["observation"]
    out_keys: list[Any] = ["action"]
    if groups is not None:
        in_keys, out_keys = ([(group, x) for group in groups] for x in ("observation", "action"))
    if greedy.has_state and groups is not None:
        raise ValueError(
            f"policy_module has no key for the recurrent state of {type(agent).__name__}, which is of many agents; use "
            "`torchpod export RUN`, whose program takes and gives it."
        )
    if greedy.has_state:
        if not isinstance(greedy.initial_state(1), Tensor):
            raise ValueError(
                f"the recurrent state of {type(agent).__name__} is a tree; policy_module needs one tensor."
            )
        in_keys, out_keys = [*in_keys, "is_init", "state"], [*out_keys, ("next", "state")]
    module = TensorDictModule(
        _Flat(greedy, one_hot) if groups is None else _ByGroup(greedy, tuple(groups)),
        in_keys=in_keys,
        out_keys=out_keys,
    )
    module.register_forward_pre_hook(_check_keys)
    return module


def require_variables(agent: Agent, variables: Variables) -> None:
    """Raises `ValueError` for parameters and buffers that are not those of the agent."""
    known = {name: list(x.shape) for name, x in (*agent.named_parameters(), *agent.named_buffers())}
    if other := sorted(known.keys() ^ variables.keys()):
        raise ValueError(f"the variables are not those of {type(agent).__name__}: {other[0]} is in one of them alone.")
    for name, shape in known.items():
        if (found := list(variables[name].shape)) != shape:
            raise ValueError(
                f"the variables are not those of {type(agent).__name__}: {name} has shape {found}, and there {shape}; "
                "of a population give those of one member, {name: x[0] for name, x in variables.items()}."
            )


def acted(greedy: Greedy, observation: Tree, *rest: Any) -> Any:
    """What the policy does with these; a `ValueError` says why it cannot use the observation."""
    try:
        return greedy(observation, *rest)
    except (AttributeError, KeyError, RuntimeError, ValueError) as error:
        shapes, why = pytree.tree_map(lambda x: list(x.shape[1:]), observation), _why(greedy, error, observation, rest)
        raise ValueError(
            f"the policy cannot use 'observation' of shape {shapes} per row: {why}; give it observations of the "
            "environment that it was trained in."
        ) from error


def _why(greedy: Greedy, error: Exception, observation: Any, rest: tuple[Any, ...]) -> str:
    """What an error says of an observation: an entry that is not there, the layer that cannot use it, or itself."""
    if isinstance(observation, dict):
        inner = [key for key, x in observation.items() if isinstance(x, dict)]
        if isinstance(error, KeyError) and error.args and error.args[0] not in observation:
            key = error.args[0]
            return "it takes one tensor, and no dict" if key is None else f"it reads an entry {key!r} of it"
        if isinstance(error, AttributeError) and inner:
            return f"its entry {inner[0]!r} is a dict, and must be a tensor"
    with contextlib.suppress(type(error)), Watched({"the policy": greedy}) as watched:
        greedy(observation, *rest)
    layer = watched.layer()
    whole = tuple(f"{type(module).__name__}(" for module in (greedy, greedy.agent))
    if layer is not None and not layer.startswith(whole):
        return f"its {layer}"
    return str(error).split("\n")[0].rstrip(".") or type(error).__name__


def _check_keys(module: nn.Module, args: tuple[Any, ...]) -> None:
    """That what it gets, if that is a TensorDict, has what it reads."""
    if args and hasattr(args[0], "batch_dims"):
        own = cast(Any, module)
        if "is_init" in own.in_keys and not {"is_init", "state"} <= set(args[0].keys()):
            width = list(own.module.greedy.initial_state(1).shape[1:])
            found = sorted(map(str, args[0].keys()))
            raise ValueError(
                f"the policy has a memory and reads 'is_init' and 'state' of shape {width} per row, and the TensorDict "
                f"has {found}; give the environment InitTracker() and a TensorDictPrimer of 'state', expand_specs=True."
            )
        told = misread("the policy", own.in_keys, args[0], "the TensorDict")
        if told:
            raise ValueError(told)


class _ByGroup(nn.Module):
    """Observations of each group, as `Greedy` takes them."""

    def __init__(self, greedy: Greedy, groups: tuple[str, ...]) -> None:
        super().__init__()
        self.greedy, self.groups = greedy, groups

    @torch.no_grad()
    def forward(self, *observations: Any) -> tuple[Tensor, ...]:
        plain = [x.to_dict() if hasattr(x, "to_dict") else x for x in observations]
        observation = dict(zip(self.groups, plain, strict=True))
        actions = self.greedy(observation)
        self.greedy.check(observation)
        return tuple(actions[group] for group in self.groups)


class _Flat(nn.Module):
    """What TorchRL hands over, as `Greedy` takes it."""

    def __init__(self, greedy: Greedy, one_hot: int | None) -> None:
        super().__init__()
        self.greedy, self._one_hot = greedy, one_hot
        self._width = list(greedy.initial_state(1).shape[1:]) if greedy.has_state else []

    @torch.no_grad()
    def forward(self, observation: Any, is_init: Tensor | None = None, state: Tensor | None = None) -> Any:
        observation = observation.to_dict() if hasattr(observation, "to_dict") else observation
        lead, rest = None, ()
        if is_init is not None and state is not None:
            lead = self._check_state(is_init, state)
            observation = pytree.tree_map(lambda x: x.reshape(-1, *x.shape[len(lead) :]), observation)
            rest = is_init.reshape(-1), state.reshape(-1, *self._width)
        found = acted(self.greedy, observation, *rest)
        self.greedy.check(observation)
        if lead is None:
            return self._written(found)
        action, after = self._written(found[0]), found[1]
        return action.reshape((*lead, *action.shape[1:])), after.reshape((*lead, *self._width))

    def _written(self, action: Tensor) -> Tensor:
        """One-hot, if it is to be."""
        if self._one_hot is None:
            return action
        try:
            return nn.functional.one_hot(action, self._one_hot)
        except RuntimeError as error:
            raise ValueError(
                f"one_hot={self._one_hot} is the number of values of a discrete action, and the policy takes "
                f"{action.dtype} up to {action.max().item():g}; give its number, or leave it out."
            ) from error

    def _check_state(self, is_init: Tensor, state: Tensor) -> torch.Size:
        """The axes before the recurrent state, which is one of this policy; each row says whether an episode begins."""
        width = self._width
        lead = state.shape[: max(state.ndim - len(width), 0)]
        if list(state.shape) != [*lead, *width]:
            raise ValueError(
                f"the policy reads 'state' of shape {width} per row, and it has shape {list(state.shape)}; let "
                f"TensorDictPrimer bring 'state' of shape {width}, and hand on what the policy wrote at ('next', "
                "'state')."
            )
        if is_init.dtype != torch.bool or is_init.shape not in (lead, (*lead, 1)):
            raise ValueError(
                f"the policy reads 'is_init' as torch.bool of shape {[*lead, 1]}, for 'state' of {list(state.shape)}, "
                f"and it is {is_init.dtype} of shape {list(is_init.shape)}; let InitTracker bring it."
            )
        return lead
