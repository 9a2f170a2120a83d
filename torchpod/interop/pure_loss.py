"""A TorchRL loss as a pure function of its parameters: what makes an agent of it (torchrl.py).

A `LossModule` owns its parameters (`<network>_params`), and those of its targets, in TensorDicts of its own, caches
what it made of them, and puts them into its networks while it runs. `torch.func.functional_call` cannot reach them
there. `PureLoss` lists them by name, and for one call puts others in their place; then `torch.func.grad`, `vmap` and
`make_fx` see through the loss like through any function.
"""

import contextlib
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import torch
import torchrl.objectives.common
import torchrl.objectives.ppo
import torchrl.objectives.utils
from tensordict import NestedKey, TensorDict
from tensordict.nn import TensorDictParams
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torchrl.modules.value_norm import ValueNorm
from torchrl.objectives import CQLLoss, LossModule, TD3BCLoss

from torchpod.interop.both_ways import both_ways
from torchpod.interop.keyed import Keyed

Tensors = Mapping[str, Tensor]


TORCHRL = threading.RLock()
"""Held while code of TorchRL's runs: how it explores is one setting of the process, not of a thread."""


class PureLoss:
    """See the module.

    Args:
      loss: called once before, so that everything that it makes when it is first used is there.
      adaptive: coefficients that it changes while it runs, such as `beta` of KLPENPPOLoss.
      bootstraps: it makes targets of transitions; its gamma, or that of its value estimator, is `discount` here.
    """

    params: dict[str, nn.Parameter]
    """What it learns, by names such as `actor_network.module.0.weight` and `log_alpha`."""
    buffers: dict[str, Tensor]
    """Coefficients, what of its networks is frozen or otherwise not learned, and running statistics of values, `[]`."""
    settings: tuple[str, ...]
    """Which of the buffers are coefficients that it does not change itself."""
    delayed: tuple[str, ...]
    """The networks that it has targets for."""
    mixes_rows: bool
    """Whether it makes one number of all rows: an adaptive coefficient, running statistics of value targets, CQL's
    mean of its log-sum-exp, or how much of the data's actions TD3+BC clones."""

    def __init__(self, loss: LossModule, adaptive: Sequence[str] = (), *, bootstraps: bool = False) -> None:
        self.loss, self._adaptive = loss, tuple(adaptive)
        self._held: dict[str, tuple[torch.Size, dict[NestedKey, Tensor]]]
        held = {name: child for name, child in loss.named_children() if isinstance(child, TensorDictParams)}
        self._held = {name: (x.batch_size, dict(cast(Any, x).items(True, True))) for name, x in held.items()}
        self.delayed = tuple(_net(name) for name in held if name.startswith("target_"))
        own = {name: x for name, x in loss._parameters.items() if x is not None}
        for name, x in own.items():
            if not x.requires_grad:
                raise ValueError(
                    f"{name} of {type(loss).__name__} is frozen (requires_grad=False), and would be trained; let it "
                    "be trained, or make the loss with a fixed one."
                )
        self.params, self.buffers = dict(own), {}
        self._own = tuple(own)
        owners = {x: name for name, x in own.items()}
        for name, leaf in self._leaves():
            if isinstance(leaf, nn.Parameter) and leaf.requires_grad and leaf not in owners:
                self.params[name], owners[leaf] = leaf, name
        # Two networks may share a part; TorchRL gives it to the second one with its gradient or without.
        places = {x.data_ptr(): name for name, x in self.params.items()}
        self._shared: dict[str, tuple[str, bool]] = {}
        leaves = dict(self._leaves())
        for name, (_, lagging) in self._held.items():
            if name.startswith("target_"):
                for key, leaf in lagging.items():
                    leaf.data.copy_(leaves[f"{_net(name)}.{_joined(key)}"].detach())
        for name, leaf in leaves.items():
            if name in self.params:
                continue
            if leaf.numel() and leaf.data_ptr() in places:
                self._shared[name] = places[leaf.data_ptr()], isinstance(leaf, nn.Parameter)
            else:
                self.buffers[name] = leaf.detach()
        known = set(self.params.values())
        left = [name for name, x in loss.named_parameters() if x.requires_grad and x not in known]
        if left:
            raise ValueError(
                f"{type(loss).__name__} has parameters outside its networks, {left}, which would not be trained; make "
                "them part of a network that it is built of."
            )
        owners_of_gamma = (loss, loss._modules.get("_value_estimator")) if bootstraps else ()
        self._discounts = next((own for own in owners_of_gamma if own is not None and "gamma" in own._buffers), None)
        coefficients = {name: x for name, x in loss._buffers.items() if x is not None}
        if self._discounts is not None:
            coefficients.pop("gamma", None)
            self.buffers["discount"] = cast(Tensor, self._discounts._buffers["gamma"])
        self._coefficients = tuple(coefficients)
        fixed = {name: x for name, x in coefficients.items() if name not in self._adaptive}
        self._truths = {name: bool(x) for name, x in fixed.items() if x.numel() == 1}
        self.buffers |= coefficients
        discount = () if self._discounts is None else ("discount",)
        self.settings = (*(name for name in coefficients if name not in self._adaptive), *discount)
        norms = {name: child for name, child in loss.named_children() if isinstance(child, ValueNorm)}
        running = {f"{name}.{k}": (norm, k, x) for name, norm in norms.items() for k, x in norm.state_dict().items()}
        self._running = {name: (cast(Any, norm)._buffers, k, x.shape) for name, (norm, k, x) in running.items()}
        for name, (_, _, x) in running.items():
            if x.numel() != 1:
                raise ValueError(f"{name} of {type(loss).__name__} has shape {list(x.shape)}; make it with shape=1.")
            self.buffers[name] = x.reshape(())
        self.mixes_rows = bool(running) or bool(self._adaptive) or isinstance(loss, CQLLoss | TD3BCLoss)

    def names_in(self, module: nn.Module, what: str) -> dict[str, str]:
        """For each parameter and buffer of a network, or of something around it, its name here.

        Args:
          module: the network.
          what: to call it in the error.

        Raises:
          ValueError: if the loss was not built of this network.
        """
        known = {x.data_ptr(): name for name, x in (self.buffers | self.params).items() if x.numel()}
        names = {}
        for name, x in (*module.named_parameters(), *module.named_buffers()):
            if x.data_ptr() in known:
                names[name] = known[x.data_ptr()]
            elif isinstance(x, nn.Parameter):
                raise ValueError(
                    f"{name} of the {what} is no parameter of {type(self.loss).__name__}; build the loss from the "
                    "networks that are used."
                )
        return names

    def __call__(
        self, params: Tensors, buffers: Tensors, targets: Tensors, data: TensorDict, keys: Tensor
    ) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What the loss says of the data, with these in place of its own.

        Args:
          params: by the names of `params`.
          buffers: by the names of `buffers`.
          targets: the parameters of the target networks, by the names of `params`; empty if there are none.
          data: `[R]` rows with the keys that the loss reads; it may write more.
          keys: `[3]`, what it draws with (keyed.py).

        Returns:
          Its results by name, and the coefficients in `adaptive`, and running statistics, as they are afterwards.
        """
        loss = self.loss

        def once() -> tuple[dict[str, Tensor], dict[str, Tensor], dict[NestedKey, Tensor]]:
            own = loss._buffers
            given = {name: buffers[name] for name in self._coefficients}
            own |= given | {name: buffers[name].clone() for name in self._adaptive}  # it writes to them
            if self._discounts is not None:
                self._discounts._buffers["gamma"] = buffers["discount"]
            for name, (norm, k, shape) in self._running.items():
                norm[k] = buffers[name].reshape(shape).clone()  # it writes to it
            rows = data.copy()
            calls = _Calls(cast(Any, own), self._truths)
            with self._taking_back(), Keyed(keys), calls:
                out = loss(rows)
            changed = {name for name, x in given.items() if own[name] is not x and name not in self._adaptive}
            if changed := changed - calls.only_read():
                raise ValueError(f"{type(loss).__name__} changes {changed} while it runs; name them in adaptive=...")
            adapted = {name: cast(Tensor, own[name]) for name in self._adaptive}
            adapted |= {name: norm[k].reshape(()) for name, (norm, k, _) in self._running.items()}
            written = {cast(NestedKey, k): x for k, x in rows.items(True, True) if x is not data.get(k, None)}
            return {_joined(key): x for key, x in out.items(True, True)}, adapted, written

        with TORCHRL, self._with(params, buffers, targets), _told_that_it_is_traced():
            out, adapted, written = both_ways(once) if torch.compiler.is_compiling() else once()
        for key, x in written.items():
            data.set(key, x)
        return out, adapted

    def _leaves(self) -> Iterator[tuple[str, Tensor]]:
        for name, (_, leaves) in self._held.items():
            if not name.startswith("target_"):
                for key, leaf in leaves.items():
                    yield f"{_net(name)}.{_joined(key)}", leaf

    @contextlib.contextmanager
    def _with(self, params: Tensors, buffers: Tensors, targets: Tensors) -> Iterator[None]:
        """A context in which the loss has these."""

        def value(name: str, source: Tensors, like: Tensor) -> Tensor:
            if name in self.params:
                return source[name]
            if name in self._shared:
                owner, learns = self._shared[name]
                return (source[owner] if learns else source[owner].detach()).expand(like.shape)
            return buffers[name]

        def tree(name: str) -> TensorDict:
            batch_size, leaves = self._held[name]
            source, td = targets if name.startswith("target_") else params, TensorDict({}, batch_size=batch_size)
            for key, leaf in leaves.items():
                td.set(key, value(f"{_net(name)}.{_joined(key)}", source, leaf))
            return td

        loss = cast(Any, self.loss)
        before = dict(loss._modules), dict(loss._parameters), dict(loss._buffers)
        scalars = [(held, k, held[k]) for held, k, _ in self._running.values()]
        if self._discounts is not None:
            scalars.append((self._discounts._buffers, "gamma", self._discounts._buffers["gamma"]))
        loss._modules |= {name: tree(name) for name in self._held}
        loss._parameters |= {name: params[name] for name in self._own}
        loss._erase_cache()
        try:
            yield
        finally:
            loss._modules, loss._parameters, loss._buffers = before
            for held, k, x in scalars:
                held[k] = x
            loss._erase_cache()

    @contextlib.contextmanager
    def _taking_back(self) -> Iterator[None]:
        """A TensorDict that lends its tensors to a module does not take them back when an error passes."""
        networks = [x for net in self.loss.__dict__.values() if isinstance(net, nn.Module) for x in net.modules()]
        lent = [(part, dict(part._parameters), dict(part._buffers)) for part in networks]
        try:
            yield
        except BaseException:
            for part, own_parameters, own_buffers in lent:
                part._parameters, part._buffers = own_parameters, own_buffers
            raise


def _net(name: str) -> str:
    """The network that `actor_network_params` or `target_actor_network_params` are of."""
    return name.removesuffix("_params").removeprefix("target_")


def _joined(key: NestedKey) -> str:
    return key if isinstance(key, str) else ".".join(cast(Any, key))


class _Calls(TorchFunctionMode):
    """Calls that tracing does not see, by others that it does.

    `x.data` would be a constant: it is `x.detach()`; what is assigned to it is written to x. Of a coefficient it is a
    copy, which takes its place, for what was computed of it is differentiated later. A coefficient that is tested
    (`if self.clip_value:`) and not adaptive is what it was when the agent was made.

    Args:
      buffers: the coefficients, which assignment replaces.
      truths: whether they are other than 0.
    """

    def __init__(self, buffers: dict[str, Tensor], truths: Mapping[str, bool]) -> None:
        super().__init__()
        self._buffers, self._truths = buffers, truths
        self._given = {name: x for name, x in buffers.items() if x is not None}
        self._data: list[tuple[Tensor, Tensor]] = []  # a coefficient as it is or was, and what has its data
        self._copies: list[Tensor] = []

    def only_read(self) -> set[str]:
        """The coefficients whose `.data` was asked for, and never written to."""
        alike = [x for x in self._copies if x._version == 0]
        data = {name: self._data_of(x) for name, x in self._given.items()}
        return {name for name, x in data.items() if self._buffers[name] is x and any(x is y for y in alike)}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == _GET_DATA:
            x = self._data_of(args[0])
            if x is None and self._is_one(args[0]):
                x = args[0].detach().clone()
                self._copies.append(x)
                self._becomes(args[0], x)
            return (args[0] if x is None else x).detach()
        if func == _SET_DATA:
            if self._is_one(args[0]):
                self._becomes(args[0], args[1].detach())
            else:
                args[0].detach().copy_(args[1])
            return None
        if func is Tensor.__setitem__ and isinstance(args[1], Tensor) and isinstance(args[2], int | float):
            x, mask, value = args
            if mask.dtype == torch.bool and mask.shape == x.shape:  # which vmap knows by this name alone
                x.masked_fill_(mask, value)
                return None
        if func is Tensor.__bool__:
            for name, truth in self._truths.items():
                if self._buffers[name] is args[0]:
                    return truth
        return func(*args, **(kwargs or {}))

    def _is_one(self, x: Tensor) -> bool:
        """Whether it is a coefficient, or was one and shares its data."""
        return self._data_of(x) is not None or any(x is now for now in self._buffers.values())

    def _data_of(self, coefficient: Tensor) -> Tensor | None:
        return next((data for x, data in self._data if x is coefficient or data is coefficient), None)

    def _becomes(self, coefficient: Tensor, data: Tensor) -> None:
        """From now on the data of a coefficient, and of what has had its place, are these."""
        before = self._data_of(coefficient)
        same = [x for x, known in self._data if known is before] if before is not None else [coefficient]
        self._data = [(x, known) for x, known in self._data if known is not before] + [(x, data) for x in same]
        self._buffers |= {
            name: data for name, now in self._buffers.items() if now is before or any(now is x for x in same)
        }


_GET_DATA, _SET_DATA = cast(Any, torch.Tensor.data).__get__, cast(Any, torch.Tensor.data).__set__
_MODULES: tuple[Any, ...] = tuple(
    module
    for module in (torchrl.objectives.common, torchrl.objectives.ppo, torchrl.objectives.utils)
    if hasattr(module, "is_dynamo_compiling")
)


@contextlib.contextmanager
def _told_that_it_is_traced() -> Iterator[None]:
    """While a program is traced, TorchRL is told so: it then leaves out branches that depend on data.

    It asks Dynamo, which does not trace our programs (kernels/inductor.py).
    """
    if not torch.compiler.is_compiling():
        yield
        return
    before = [module.is_dynamo_compiling for module in _MODULES]
    for module in _MODULES:
        module.is_dynamo_compiling = lambda: True
    try:
        yield
    finally:
        for module, asked in zip(_MODULES, before, strict=True):
            module.is_dynamo_compiling = asked
