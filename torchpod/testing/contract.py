"""What both conformance tests need: the error, and comparison of trees."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torchpod import blame
from torchpod.specs import Box, Discrete, MultiDiscrete, SpecTree
from torchpod.types import Tree

_BRANCHES = ("branches on a tensor", "use torch.where")
_TAKES_A_NUMBER = ("takes a number out of a tensor", "keep it a tensor")
_LEAVES_TORCH = (
    "hands a tensor's memory to NumPy, or the like",
    "use torch's operators in place of NumPy's (a kernel of your own: as a torch.library.custom_op)",
)
_READS = {
    "data-dependent control flow": _BRANCHES,
    "Boolean value of Tensor with": _BRANCHES,
    "Could not guard on data-dependent": _BRANCHES,
    ".item() on a Tensor": _TAKES_A_NUMBER,
    "cannot be converted to Scalar": _TAKES_A_NUMBER,
    "can be converted to Python scalars": _TAKES_A_NUMBER,
    "can be converted to an index": _TAKES_A_NUMBER,
    "Cannot access data pointer": _LEAVES_TORCH,
    "device type tensor to numpy": _LEAVES_TORCH,
    "numpy() on Tensor that requires grad": _LEAVES_TORCH,
}
"""What torch says where Python reads a tensor, which the code of a program cannot; what that is, and what to do."""


OURS = f"{Path(__file__).parents[1]}{os.sep}"
"""Where our own files lie."""


class ContractError(ValueError):
    """An environment or an agent breaks a rule; the message is the rule, and what came instead."""


def require(condition: bool | Tensor, rule: str) -> None:
    """Raises the rule unless the condition holds."""
    if not condition:
        raise ContractError(rule)


def raised(error: Exception) -> tuple[str, str]:
    """What was raised at which line of the user's, and what stands there."""
    message = str(error).strip().split("\n")[0]
    if message.startswith("vmap: It looks like"):  # and goes on about what it could be
        message = message.partition(". ")[0]
    told = f"{type(error).__name__}: {message.rstrip('.')}"
    traced = [x for x in getattr(error, "real_stack", None) or () if not x.filename.startswith(OURS)]  # by Dynamo
    found = blame.frames(error) + [blame.Frame(compile("", x.filename, "exec"), x.lineno or 0) for x in traced]
    own = [frame for frame in found if frame.is_users]
    if not own:
        return told, ""
    return f"{told} ({Path(own[-1].code.co_filename).name}, line {own[-1].line}: `{own[-1].text}`)", own[-1].text


def require_no_reading(error: Exception) -> None:
    """Raises the rule if `error` is torch's about code of the user's that reads a tensor, with where that stands."""
    raised = error.__cause__ or error  # a CompileError's is torch's own
    own = [frame for frame in blame.frames(raised) if frame.is_users]
    for said, (what, repair) in _READS.items():
        if said in str(error) and own:
            code, line = own[-1]
            where = f"{Path(code.co_filename).name}, line {line}: `{own[-1].text}`"
            raise ContractError(f"{code.co_qualname} {what} ({where}); {repair}.") from error


def attributes(instance: object) -> dict[str, tuple[Any, int]]:
    """What hangs on `self`, with what tells that it was written into: a tensor's version, a container's length."""
    versions = {list: len, dict: len, set: len, Tensor: lambda x: x._version}
    kept = vars(instance).items() if hasattr(instance, "__dict__") else ()
    return {name: (x, next((f(x) for kind, f in versions.items() if isinstance(x, kind)), 0)) for name, x in kept}


def written(instance: object, before: dict[str, tuple[Any, int]]) -> str | None:
    """The first attribute that has changed since `before`, or None."""
    after = attributes(instance)
    changed = [name for name in before if name not in after]
    changed += [n for n, (x, i) in after.items() if n not in before or x is not before[n][0] or i != before[n][1]]
    return f"self.{changed[0]}" if changed else None


def named_leaves(tree: Tree, name: str) -> list[tuple[str, Any]]:
    """Leaves with names such as `observation['position']`."""
    return [(name + pytree.keystr(path), leaf) for path, leaf in pytree.tree_flatten_with_path(tree)[0]]


def form(tree: Tree) -> tuple[Any, ...]:
    """Structure, shapes and dtypes: what must stay the same from step to step."""
    leaves, structure = pytree.tree_flatten(tree)
    return structure, *((tuple(x.shape), x.dtype) for x in leaves)


def outline(tree: Tree) -> str:
    """The same in words, such as `{'position': torch.float32 [8, 2]}`."""
    if isinstance(tree, dict):
        return "{" + ", ".join(f"{key!r}: {outline(part)}" for key, part in tree.items()) + "}"
    if type(tree) in (tuple, list):
        inside = ", ".join(map(outline, tree))
        return f"({inside})" if isinstance(tree, tuple) else f"[{inside}]"
    if isinstance(tree, Tensor):
        return f"{tree.dtype} {list(tree.shape)}" + ("" if tree.device.type == "cpu" else f" on {tree.device}")
    inside = ", ".join(f"{name}: {outline(part)}" for name, part in named_leaves(tree, "") if part is not tree)
    return type(tree).__name__ + (f"({inside})" if inside else "")


def clone(tree: Tree) -> Tree:
    """Copies of all tensors."""
    return pytree.tree_map(torch.clone, tree)


def rows(tree: Tree, index: Tensor | slice) -> Tree:
    """The same rows of every leaf."""
    return pytree.tree_map(lambda x: x[index], tree)


def difference(actual: Tree, expected: Tree, name: str, *, rtol: float = 0.0, atol: float = 0.0) -> str | None:
    """The name of the first leaf that differs, or None. Tolerances are for floats."""
    if form(actual) != form(expected):
        return f"{name} (structure, shape or dtype)"
    for (leaf_name, a), b in zip(named_leaves(actual, name), pytree.tree_leaves(expected), strict=True):
        exact = not a.is_floating_point()
        if not (torch.equal(a, b) if exact else torch.allclose(a, b, rtol=rtol, atol=atol, equal_nan=True)):
            return leaf_name
    return None


def require_spec(value: Tree, spec: SpecTree, lead: tuple[int, ...], device: torch.device, name: str) -> None:
    """Requires the structure, shapes (behind axes `lead`), dtypes, device and range that a spec states."""
    if isinstance(spec, dict):
        require(
            isinstance(value, dict) and set(value) == set(spec),
            f"{name} must be a dict with the keys of its spec, {sorted(spec)}; it is {_describe(value)}.",
        )
        for key in spec:
            require_spec(value[key], spec[key], lead, device, f"{name}[{key!r}]")
        return
    require_tensor(value, (*lead, *spec.shape), spec.dtype, device, name)
    if value.is_floating_point():
        require(value.isfinite().all(), f"{name} must be finite; it holds NaN or infinity.")
    if isinstance(spec, Box):
        inside = (value >= spec.low) & (value <= spec.high)
        require(
            inside.all(),
            f"{name} must lie within [{spec.low}, {spec.high}], as its spec says; it reaches from "
            f"{value.min().item():g} to {value.max().item():g}.",
        )
    if isinstance(spec, Discrete):
        inside = (value >= 0) & (value < spec.num_values)
        require(inside.all(), f"{name} must be in {{0, ..., {spec.num_values - 1}}}, as its spec says.")
    if isinstance(spec, MultiDiscrete):
        inside = (value >= 0) & (value < torch.tensor(spec.nvec, device=device))
        require(inside.all(), f"{name} must be integers from 0 and below {list(spec.nvec)}, as its spec says.")


def require_tensor(value: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, name: str) -> None:
    """Requires a tensor of this shape and dtype on this device."""
    want = f"{name} must be a {dtype} tensor of shape {list(shape)}"
    require(isinstance(value, Tensor), f"{want}; it is {_describe(value)}.")
    require(
        tuple(value.shape) == shape and value.dtype == dtype,
        f"{want}; it is {value.dtype} of shape {list(value.shape)}.",
    )
    require(value.device.type == device.type, f"{name} must be on {device}; it is on {value.device}.")


def require_batched(value: Any, num_envs: int, name: str) -> None:
    """Requires a tensor with the B axis first."""
    shape = list(value.shape) if isinstance(value, Tensor) else None
    require(
        bool(shape) and shape[0] == num_envs,
        f"{name} must be a tensor with the B axis first, of {num_envs} rows; it is {_describe(value)}.",
    )


def _describe(value: Any) -> str:
    if isinstance(value, dict):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)}"
    return f"a {type(value).__name__}"
