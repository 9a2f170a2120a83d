"""What does not fit, in one sentence: which key, what was expected, what came, and how to repair it.

For where code of a user's is called for the first time (torchrl.py, policy.py).
"""

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.nn.modules import module as hooks

from torchpod.specs import Box, Discrete, SpecTree

if TYPE_CHECKING:
    from tensordict import TensorDict

Shapes = dict[Any, list[int]]
"""Of one row, by key."""


UNSUPPORTED = {
    **dict.fromkeys(
        ("ACTLoss", "BCLoss", "DTLoss", "DiffusionBCLoss", "GAILLoss", "OnlineDTLoss"),
        "it learns from demonstrations, and an agent here learns from what it did itself",
    ),
    **dict.fromkeys(
        (
            *("DreamerActorLoss", "DreamerModelLoss", "DreamerValueLoss", "DreamerV3ActorLoss", "DreamerV3Loss"),
            *("DreamerV3ModelLoss", "DreamerV3ValueLoss", "WorldModelLoss"),
        ),
        "it is of a model of the environment, and LossAgent has an actor and values",
    ),
    "DiscreteCQLLoss": "it runs its network with parameters that no update reaches; use loss=DQNLoss",
    "QMixerLoss": "it mixes the values of many agents, and LossAgent trains one; use loss=MAPPOLoss",
    "RNDLoss": "it is of a bonus, not of a policy",
}
"""Losses of TorchRL's that `LossAgent` cannot train, and why."""


def unsupported(loss: str) -> str:
    """The sentence about one of them."""
    return f"loss={loss} cannot be used here: {UNSUPPORTED[loss]}."


class Watched:
    """A context that sees modules at work: what networks wrote, and where an error came from.

    Calls of other threads are not seen.

    Args:
      networks: TensorDictModules, by name.
    """

    wrote: dict[str, Shapes]
    """By name of the network, as it was called last."""

    def __init__(self, networks: Mapping[str, nn.Module]) -> None:
        self._names = {net: name for name, net in networks.items()}
        self._running: list[tuple[nn.Module, tuple[Any, ...]]] = []
        self._thread, self.wrote = threading.get_ident(), {}

    def __enter__(self) -> "Watched":
        self._hooks = hooks.register_module_forward_pre_hook(self._begin), hooks.register_module_forward_hook(self._end)
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def _begin(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() == self._thread:
            self._running.append((module, args))

    def _end(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        while self._running.pop()[0] is not module:  # what raised an error that was caught
            pass
        if module in self._names:
            self.wrote[self._names[module]] = shapes_of(out, cast(Any, module).out_keys)

    @property
    def network(self) -> str | None:
        """That raised the error."""
        return next((self._names[module] for module, _ in self._running if module in self._names), None)

    def layer(self) -> str | None:
        """The layer that raised the error, and what it was given; None where the error did not come from a layer."""
        if not self._running or hasattr(self._running[-1][0], "in_keys") or self.network is None:
            return None
        module, args = self._running[-1]
        given = [x for x in args if isinstance(x, Tensor)]
        shapes = [list(x.shape[1:]) for x in given]
        name = f"{type(module).__name__}({module.extra_repr()})"
        weight = getattr(module, "weight", None)
        if isinstance(weight, Tensor) and given and given[0].dtype != weight.dtype:
            hint = "" if given[0].is_floating_point() else " (x.float() before it, or an embedding of classes)"
            return f"{name} takes {_short(weight.dtype)} and gets {_short(given[0].dtype)}{hint}"
        if isinstance(module, nn.Linear) and shapes and shapes[0][-1:] != [module.in_features]:
            found = shapes[0][-1] if shapes[0] else 0
            return f"{name} takes {module.in_features} numbers and gets {found}"
        return f"{name} cannot use the shape {shapes[0] if len(shapes) == 1 else shapes}"


def shapes_of(data: "TensorDict", keys: Sequence[Any] | None = None) -> Shapes:
    """Of one row; of these keys, if they are there."""
    own = data if keys is None else data.select(*keys, strict=False)
    return {_dotted(key): list(x.shape[data.batch_dims :]) for key, x in own.items(True, True)}


def misread(what: str, in_keys: Sequence[Any], data: "TensorDict", whose: str) -> str | None:
    """A sentence if a network reads a key that is not there.

    Args:
      what: the network, in words.
      in_keys: of the network.
      data: what it would get.
      whose: data it is, in words.
    """
    known = set(data.keys(True))
    for key in in_keys:
        if key not in known:
            found = sorted(_dotted(key) for key in data.keys(True, True))
            return f"{what} reads {key!r}, and {whose} has {found}; name one of these in its in_keys, or rename it."
    return None


def undivided(what: str, in_keys: Sequence[Any], data: "TensorDict", whose: str) -> str | None:
    """As `misread`, if a network that takes tensors reads a whole dict."""
    leaves = set(data.keys(True, True))
    for key in in_keys:
        if key in data.keys(True) and key not in leaves:
            inner = sorted(x for x in leaves if not isinstance(x, str) and x[: len(_path(key))] == _path(key))
            return f"{what} reads {key!r}, which in {whose} is the dict of {inner}; name these in its in_keys."
    return None


def miswritten(what: str, key: Any, size: int | None, wrote: Shapes) -> str | None:
    """A sentence if a network did not write a key, with `size` numbers on the last axis (None: with any number)."""
    shape = wrote.get(_dotted(key))
    must = f"{what} must write {key!r}" + ("" if size is None else f" with shape [{size}] per row")
    if shape is None:
        return f"{must}, and writes {sorted(wrote)}; name it so in out_keys, or tell the loss by set_keys."
    if size is not None and shape[-1:] != [size]:
        return f"{must}, and writes it with shape {shape}; give it a last axis of {size}."
    return None


def only_for(loss: type) -> str | None:
    """The actions of a loss of TorchRL's, or of one derived from it: "discrete", "continuous", or None for both."""
    for name in (c.__name__ for c in loss.__mro__ if is_torchrls(c)):
        if name in _OF_NUMBERS or _is_for_choices(name):
            return "continuous" if name in _OF_NUMBERS else "discrete"
    return None


def is_torchrls(kind: type) -> bool:
    """Whether a class is TorchRL's own, not one of that name."""
    return kind.__module__.partition(".")[0] == "torchrl"


def for_actions(loss: str, action: SpecTree) -> str:
    """The loss of TorchRL's for such actions that is nearest to another one, by name."""
    is_for_choices = _is_for_choices(loss)
    if isinstance(action, Box):
        return _CONTINUOUS.get(loss, "SACLoss") if is_for_choices else loss
    if isinstance(action, Discrete):
        return loss if is_for_choices else _DISCRETE.get(loss, "DiscreteSACLoss")
    return "ClipPPOLoss"


_DISCRETE = {"SACLoss": "DiscreteSACLoss", "IQLLoss": "DiscreteIQLLoss"}
_CONTINUOUS = {discrete: continuous for continuous, discrete in _DISCRETE.items()}
_OF_NUMBERS = {"CQLLoss", "CrossQLoss", "DDPGLoss", "REDQLoss", "SACLoss", "TD3BCLoss", "TD3Loss", "TQCLoss"}


def _is_for_choices(loss: str) -> bool:
    return loss.startswith("Discrete") or "DQN" in loss


def _short(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _path(key: Any) -> tuple[str, ...]:
    return (key,) if isinstance(key, str) else tuple(key)


def _dotted(key: Any) -> str:
    return key if isinstance(key, str) else ".".join(key)
