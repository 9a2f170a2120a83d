"""Whether a TorchRL loss is the pure function that pure_loss.py takes it for: beside TorchRL's own way to call it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.nn.parameter import is_lazy
from torchrl.modules.value_norm import ValueNorm

from torchpod import random
from torchpod.interop.keyed import Keyed
from torchpod.interop.pure_loss import TORCHRL, PureLoss

Tensors = dict[str, Tensor]


def require_pure(pure: PureLoss, data: TensorDict, reduction: str) -> None:
    """That the loss, called as TorchRL does, says the same again, and what `pure` says, with the same gradient.

    It holds for the rows that it is tried with; a way that they do not take is not seen, nor a term with less than a
    millionth of the largest gradient. Of the losses of TorchRL the two ways differ by 3e-8 of it, and most by nothing.

    Args:
      pure: the loss.
      data: `[R]` rows as it gets them.
      reduction: that it was made with.

    Raises:
      ValueError: if it is no pure function; the message says why.
    """
    name = type(pure.loss).__name__
    dtypes = {x.dtype: key for key, x in pure.params.items()}
    if len(dtypes) > 1 or dtypes.keys().isdisjoint((torch.float32, torch.float64)):
        found = " and ".join(f"{dtype} ({key})" for dtype, key in dtypes.items())
        raise ValueError(
            f"parameters of {name} are {found}, and all must be float32, or all float64 (by loss.double()); layers "
            "may compute in another type, under torch.autocast."
        )
    for key, x in pure.params.items():
        if x._backward_hooks or x._post_accumulate_grad_hooks:
            raise ValueError(
                f"{key} of {name} has a hook for its gradient, and updates here take gradients of other tensors; take "
                "the hook off, and scale within the network, x * a + x.detach() * (1 - a)."
            )
    ours, gradient = _purely(pure, data)
    with left_alone(pure.loss):
        theirs, expected = _as_torchrl_does(pure, data, reduction)
        before, again = (_as_torchrl_does(pure, data, reduction)[0] for _ in range(2))  # bounds of parameters are kept
    for key, x in before.items():
        if not torch.allclose(x, again[key], rtol=1e-5, atol=1e-7, equal_nan=True):
            raise ValueError(
                f"{name} is no pure function of its parameters: called twice with the same rows and noise it gives "
                f"{key}={float(x):.7g}, then {float(again[key]):.7g}; what changes from call to call is to be a buffer "
                "of the loss, named in adaptive, and noise to be drawn by torch."
            )
    unlike = [key for key, x in theirs.items() if not _close(ours[key], x, 1.0)]
    size = max(float(x.abs().max()) for x in expected.values() if x.numel())
    unlike += [f"the gradient of {key}" for key, x in expected.items() if not _close(gradient[key], x, size)]
    if unlike:
        raise ValueError(
            f"{name} is no function of the parameters that it is given: {', '.join(unlike[:3])} would not be TorchRL's "
            "here; run networks with the parameters of the loss (`with self.critic_network_params.to_module("
            "self.critic_network): ...`), keep no tensor of them, change a coefficient by `self.c = ...`, and compute "
            "with what a row costs, unless the loss is made with reduction='none'."
        )


def _purely(pure: PureLoss, data: TensorDict) -> tuple[Tensors, Tensors]:
    """Terms and gradient, as an update here has them."""
    buffers = {key: x.detach() for key, x in pure.buffers.items()}
    params = targets = {key: x.detach().clone() for key, x in pure.params.items()}

    def total(params: Tensors) -> tuple[Tensor, Tensors]:
        out, _ = pure(params, buffers, targets, data.clone(), random.key(0))
        terms = _terms(out)
        return torch.stack([*terms.values()]).sum(), {key: x.detach() for key, x in terms.items()}

    try:
        gradient, terms = torch.func.grad(total, has_aux=True)(params)
    except Exception as error:
        raise ValueError(f"{type(pure.loss).__name__} is no pure function of its parameters; {_why(error)}") from error
    return terms, gradient


def _why(error: Exception) -> str:
    told = str(error).strip().split("\n")[0]
    if "in-place" in told:
        return (
            "modules that write to their buffers, such as BatchNorm, cannot be used (LayerNorm can), and coefficients "
            f"that the loss writes are to be named in adaptive: {told}"
        )
    if "requires_grad_" in told:
        return (
            "it calls requires_grad_() while it runs; hold a network out of the gradient by its detached parameters "
            "(`with self.actor_network_params.detach().to_module(self.actor_network): ...`), and take a gradient of "
            "observations by torch.func.grad."
        )
    if "'TensorDict' object has no attribute" in told:
        return "it asks for parameters(); take those of a network, self.critic_network_params.values(True, True)."
    return told


def _as_torchrl_does(pure: PureLoss, data: TensorDict, reduction: str) -> tuple[Tensors, Tensors]:
    """Terms and gradient of the loss itself; what it writes to its parameters stays."""
    loss = cast(Any, pure.loss)
    with TORCHRL, left_alone(pure.loss, but_parameters=True), Keyed(random.key(0)):
        loss.reduction = reduction
        try:
            terms = _terms(dict(loss(data.clone()).items(True, True)))
            params = [*pure.params.values()]
            found = torch.autograd.grad(torch.stack([*terms.values()]).sum(), params, allow_unused=True)
        finally:
            loss.reduction = "none"
    gradient = [torch.zeros_like(p) if x is None else x for p, x in zip(params, found, strict=True)]
    return {key: x.detach() for key, x in terms.items()}, dict(zip(pure.params, gradient, strict=True))


@contextmanager
def left_alone(loss: Any, *, but_parameters: bool = False) -> Iterator[None]:
    """A context after which coefficients, running statistics and parameters of a loss are as they were before."""
    owners = [loss, *(child for child in loss.children() if isinstance(child, ValueNorm))]
    buffers = [(owner, name, x) for owner in owners for name, x in owner._buffers.items() if x is not None]
    parameters = () if but_parameters else loss.parameters()
    known = [x for x in (*parameters, *(x for *_, x in buffers)) if not is_lazy(x)]
    before = [(x, x.data_ptr(), x.detach().clone()) for x in known]
    try:
        yield
    finally:
        for owner, name, x in buffers:
            owner._buffers[name] = x
        for x, place, was in before:
            if x.data_ptr() == place:
                x.data.copy_(was)
            else:  # other data was assigned to it
                x.data = was


def _terms(out: dict[str, Tensor]) -> Tensors:
    return {key: x.mean() for key, x in out.items() if isinstance(key, str) and key.startswith("loss")}


def _close(a: Tensor, b: Tensor, size: float) -> bool:
    """`size`: of the largest number beside which a difference counts."""
    return torch.allclose(a.to(b.dtype), b, rtol=1e-5, atol=1e-6 * size, equal_nan=True)
