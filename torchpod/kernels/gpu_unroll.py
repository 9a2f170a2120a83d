"""The steps of an unroll as one kernel of an NVIDIA GPU: policy, environment, random words and all that lies between.

A step is traced as for inductor (inductor.py). Its graph says, row by row, what becomes of an environment, so that a
block of threads can take some rows through all steps, with their state in its registers: no launch in between, and
nothing read again. Here the graph is written out as a kernel of Triton, operator by operator: a tensor `[B, ...]` is as
many columns `[BLOCK]` as a row of it has numbers, and indexing, concatenation and views only rename columns. Networks
are those of gpu_mlp.py. What has an operator that is not in `POINTWISE` or below, or rows of many numbers, stays what
inductor makes of it, a step at a time.

It pays where launches bound a run, that is with few environments (docs/design.md). TORCHPOD_UNROLL_KERNEL=0 turns it
off.
"""

import contextlib
import functools
import hashlib
import importlib
import itertools
import math
import operator
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from torchpod.kernels.cpu_calls import NotRecordable, Unroll
from torchpod.kernels.mlp import gpu_mlp
from torchpod.trees import reader

aten, prims = torch.ops.aten, torch.ops.prims

ENABLED = os.environ.get("TORCHPOD_UNROLL_KERNEL") != "0"
MOST_ROWS = 4096
"""Environments up to which it was faster than a step at a time, on an H200 (docs/design.md)."""
MOST_COLUMNS = 64
"""Numbers in a row of a tensor: each is a register of every thread."""
MOST_LINES = 20_000
"""Of a kernel."""
BLOCK = 16
"""Rows of a block: the least that a product of matrices takes, for there are few."""
WARPS, STAGES = 4, 1
"""Of a block; weights are not read ahead, which would take their memory twice."""

TYPES = {
    torch.float64: "tl.float64",
    torch.float32: "tl.float32",
    torch.int64: "tl.int64",
    torch.int32: "tl.int32",
    torch.int16: "tl.int16",
    torch.int8: "tl.int8",
    torch.uint8: "tl.uint8",
    torch.bool: "tl.int1",
}


class Value(NamedTuple):
    """A tensor: the names of what a row of it holds, in the order of its elements."""

    shape: tuple[int, ...]
    """Without the rows, if it has any."""
    columns: tuple[str, ...]
    has_rows: bool
    dtype: torch.dtype

    @property
    def is_one_number(self) -> bool:
        """The same everywhere, so that it may have any shape."""
        return not self.has_rows and len(set(self.columns)) == 1


def _cast(x: str, source: torch.dtype, to: torch.dtype) -> str:
    if source == to:
        return x
    if to == torch.bool:
        return f"({x} != 0)"
    return f"{x}.to({TYPES[to]})"


def _number(x: float | bool) -> str:
    if isinstance(x, float) and not math.isfinite(x):
        return f'float("{x}")'
    return repr(int(x) if isinstance(x, bool) else x)


_NAN = "propagate_nan=tl.PropagateNan.ALL"
POINTWISE: dict[Any, str] = {
    aten.add.Tensor: "{} + {}",
    aten.sub.Tensor: "{} - {}",
    aten.mul.Tensor: "{} * {}",
    aten.div.Tensor: "{} / {}",
    aten.neg.default: "-{}",
    aten.abs.default: "tl.abs({})",
    aten.minimum.default: f"tl.minimum({{}}, {{}}, {_NAN})",
    aten.maximum.default: f"tl.maximum({{}}, {{}}, {_NAN})",
    aten.where.self: "tl.where({}, {}, {})",
    aten.bitwise_and.Tensor: "{} & {}",
    aten.bitwise_and.Scalar: "{} & {}",
    aten.bitwise_or.Tensor: "{} | {}",
    aten.bitwise_xor.Tensor: "{} ^ {}",
    aten.logical_and.default: "{} & {}",
    aten.logical_or.default: "{} | {}",
    **dict.fromkeys((aten.__rshift__.Scalar, aten.__rshift__.Tensor), "{} >> {}"),
    **dict.fromkeys((aten.__lshift__.Scalar, aten.__lshift__.Tensor), "{} << {}"),
    aten.exp.default: "libdevice.exp({})",
    aten.log.default: "libdevice.log({})",
    aten.log1p.default: "libdevice.log1p({})",
    aten.sqrt.default: "libdevice.sqrt({})",
    aten.sin.default: "libdevice.sin({})",
    aten.cos.default: "libdevice.cos({})",
    aten.tanh.default: "libdevice.tanh({})",
    aten.floor.default: "libdevice.floor({})",
    aten.round.default: "libdevice.nearbyint({})",
    aten.reciprocal.default: "1.0 / {}",
    aten.relu.default: "tl.where({0} <= 0, 0.0, {0})",
    prims.convert_element_type.default: "{}",
    **dict.fromkeys((aten.clone.default, aten.alias.default, aten.detach.default), "{}"),
    aten.lift_fresh_copy.default: "{}",
}
"""Operators of numbers, as Triton has them; arguments are brought to the type of the result."""
COMPARISONS: dict[Any, str] = {
    getattr(getattr(aten, name), kind): f"{{}} {sign} {{}}"
    for name, sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">="))
    for kind in ("Tensor", "Scalar")
}
"""Their arguments are brought to the type that they have in common."""
_OF_FLOATS = (aten.floor.default, aten.round.default, aten.relu.default)


class _Source:
    """Writes the kernel of a step.

    Args:
      graph: of `(variables, carry, *rest) -> (carry, output)`.
      num_before: tensors of `variables`.
      num_carry: tensors of the carry.
      rows: B.

    Raises:
      NotRecordable: if the step cannot be written so.
    """

    def __init__(self, graph: GraphModule, num_before: int, num_carry: int, rows: int) -> None:
        self._graph, self.rows, self._lines, self._values = graph, rows, list[str](), dict[Node, Value]()
        self._by_network: dict[Node, list[Value]] = {}
        self._num_before = num_before
        self._given = [node for node in graph.graph.nodes if node.op == "placeholder"]
        carry = range(num_before, num_before + num_carry)
        (output,) = graph.graph.find_nodes(op="output")
        self._results = cast("list[Node]", list(cast(Any, output.args[0])))
        for i, node in enumerate(self._given):
            is_row = i >= num_before and node.meta["val"].ndim > 0
            self._values[node] = self._argument(node, i, is_row, i in carry)
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                self._values[node] = self._constant(node)
            elif node.op == "call_function":
                value = self._called(node)
                if value is not None:
                    self._values[node] = value
            if len(self._lines) > MOST_LINES:
                raise NotRecordable(f"its kernel would have more than {MOST_LINES} lines")
        self.carry = [self._values[node] for node in self._given[num_before : num_before + num_carry]]
        results = [self._values[node] for node in self._results]
        if any(len(value.columns) != math.prod(value.shape) for value in results):
            raise NotRecordable("a result is a large tensor that it was given")
        self.text = self._text(results, num_before, num_carry)

    # What goes in.

    def _argument(self, node: Node, i: int, is_row: bool, is_carried: bool) -> Value:
        fake = node.meta["val"]
        if fake.dtype not in TYPES:
            raise NotRecordable(f"it takes {fake.dtype}")
        shape = tuple(fake.shape[1:] if is_row else fake.shape)
        if is_row and fake.shape[0] != self.rows:
            raise NotRecordable("not all that it takes has a row per environment")
        size = math.prod(shape)
        if not is_row and size > MOST_COLUMNS:
            return Value(shape, (), False, fake.dtype)  # weights, which networks read themselves
        if size > MOST_COLUMNS:
            raise NotRecordable(f"a row of {size} numbers has no room in registers")
        columns = tuple(f"{'c' if is_carried else 'a'}{i}_{j}" for j in range(size))
        return Value(shape, columns, is_row, fake.dtype)

    def _constant(self, node: Node) -> Value:
        value = getattr(self._graph, str(node.target))
        if not isinstance(value, Tensor):  # the graph of a branch
            raise NotRecordable(f"{node.target} is no tensor")
        has_rows = value.ndim > 0 and len(value) == self.rows and bool((value == value[:1]).all())
        value = value[0] if has_rows else value  # broadcast while it was folded
        if value.numel() > MOST_COLUMNS:
            raise NotRecordable(f"a table of {value.numel()} numbers has no room in registers")
        if value.dtype not in TYPES:
            raise NotRecordable(f"a table has {value.dtype}")
        numbers = [self.literal(x, value.dtype) for x in value.flatten().tolist()]
        return Value(tuple(value.shape), tuple(numbers), has_rows, value.dtype)

    def literal(self, x: float, dtype: torch.dtype) -> str:
        return self.put(f"tl.full([], {_number(x)}, {TYPES[dtype]})")

    def put(self, expression: str) -> str:
        name = f"t{len(self._lines)}"
        self._lines.append(f"{name} = {expression}")
        return name

    # What is computed.

    def _called(self, node: Node) -> Value | None:
        target = node.target
        if target is torch.ops.torchpod.mlps.default:
            return None  # its results are, by `getitem`
        if target in _SPLITS:
            return None
        if target is operator.getitem:
            whole, part = cast("tuple[Node, int]", node.args)
            if whole.target in _SPLITS:
                chosen = _SPLITS[whole.target]
                return _moved(lambda x, *args: chosen(x, *args)[part])(self, whole, node.meta["val"])
            return self._networks(whole)[part]
        value = node.meta["val"]
        if not isinstance(value, Tensor) or value.dtype not in TYPES:
            raise NotRecordable(f"{target} has no kernel here")
        if target in POINTWISE or target in COMPARISONS:
            return self._pointwise(node, value)
        made = _MAKERS.get(cast(Any, target))
        if made is None:
            raise NotRecordable(f"{target} has no kernel here")
        return made(self, node, value)

    def of(self, node: Any) -> Value:
        """What a node is."""
        value = self._values[node]
        if not value.columns:
            raise NotRecordable(f"{node} has too many numbers")
        return value

    def shaped(self, value: Value, whole: Sequence[int]) -> Value:
        """With the shape `whole` that a tensor has, rows included if it has any: by broadcasting."""
        whole = list(whole)
        lead = whole[:1] == [self.rows]
        size = math.prod(whole[1:] if lead else whole)
        if size > MOST_COLUMNS:
            raise NotRecordable(f"a row of {size} numbers has no room in registers")
        if value.is_one_number:
            return Value(tuple(whole[1:] if lead else whole), (value.columns[0],) * size, lead, value.dtype)
        own = list(value.shape)
        if value.has_rows and not (lead and len(own) + 1 == len(whole)):
            raise NotRecordable("rows are moved to another axis")
        grows = lead and not value.has_rows and (len(own) < len(whole) or own[0] == 1)  # the same for each row
        own = own[1:] if grows and len(own) == len(whole) else own
        has_rows = value.has_rows or grows
        shape = whole[1:] if has_rows else whole
        index = torch.arange(math.prod(own)).reshape(own).expand(shape).flatten().tolist()
        return Value(tuple(shape), tuple(value.columns[i] for i in index), has_rows, value.dtype)

    def _pointwise(self, node: Node, result: Tensor) -> Value:
        target = cast(Any, node.target)
        expression = COMPARISONS[target] if target in COMPARISONS else POINTWISE[target]
        if node.target is aten.add.Tensor and result.dtype == torch.bool:
            expression = "{} | {}"
        if node.target in _OF_FLOATS and not result.is_floating_point():
            raise NotRecordable(f"{node.target} of whole numbers has no kernel here")
        arguments = list(node.args)
        if node.target is prims.convert_element_type.default:
            arguments = arguments[:1]
        if node.kwargs.get("alpha", 1) != 1 or node.kwargs.get("rounding_mode") is not None:
            raise NotRecordable(f"{node.target} with {dict(node.kwargs)} has no kernel here")
        tensors = [self.of(x) for x in arguments if isinstance(x, Node)]
        wanted = [result.dtype] * len(arguments)
        if target in COMPARISONS:
            metas = [x.meta["val"] if isinstance(x, Node) else x for x in arguments]
            wanted = [torch.result_type(*cast(Any, metas))] * len(arguments)
        elif target is aten.where.self:
            wanted[0] = torch.bool
        if all(value.is_one_number for value in tensors):
            shaped = {x: self.of(x) for x in arguments if isinstance(x, Node)}
            shape, has_rows, count = (), False, 1
        else:
            shaped = {x: self.shaped(self.of(x), result.shape) for x in arguments if isinstance(x, Node)}
            has_rows = any(value.has_rows for value in shaped.values())
            if has_rows and not all(value.has_rows for value in shaped.values()):
                raise NotRecordable("a table has a number for every environment")
            shape = tuple(result.shape[1:] if has_rows else result.shape)
            count = math.prod(shape)
        columns = []
        for j in range(count):
            told = []
            for x, dtype in zip(arguments, wanted, strict=True):
                if isinstance(x, Node):
                    told.append(_cast(shaped[x].columns[j], shaped[x].dtype, dtype))
                elif isinstance(x, bool) or dtype == torch.bool:
                    told.append(self.literal(bool(x), torch.bool))
                else:
                    told.append(_number(cast(Any, x)))
            columns.append(self.put(expression.format(*told)))
        return Value(shape, tuple(columns), has_rows, result.dtype)

    def _networks(self, node: Node) -> list[Value]:
        x, parameters, networks, activation, keep = cast(Any, node.args)
        if node not in self._by_network:
            seen, own = self.of(x), len(parameters) // networks
            if keep or len(seen.shape) != 1 or not seen.has_rows:
                raise NotRecordable("networks of many inputs have kernels of their own")
            parts = [parameters[k * own : (k + 1) * own] for k in range(networks)]
            self._by_network[node] = [self._network(seen, part, activation == 2) for part in parts]
        return self._by_network[node]

    def _network(self, seen: Value, parameters: Sequence[Node], relu: bool) -> Value:
        sizes = [seen.shape[0], *(bias.meta["val"].shape[-1] for bias in parameters[1::2])]
        padded = [max(16, 1 << (size - 1).bit_length()) for size in sizes]
        tile = self.put(f"tl.zeros([BLOCK, {padded[0]}], tl.float32)")
        inputs = self.put(f"tl.arange(0, {padded[0]})[None, :]")
        for j, column in enumerate(seen.columns):
            whole = f"tl.broadcast_to({column}, [BLOCK])[:, None]"
            tile = self.put(f"tl.where({inputs} == {j}, {whole}, {tile})")
        for i, (weight, bias) in enumerate(zip(parameters[::2], parameters[1::2], strict=True)):
            if not {weight, bias} <= set(self._given[: self._num_before]):
                raise NotRecordable("a network has parameters that are computed in the step")
            w, b = (f"p{self._given.index(x)}" for x in (weight, bias))
            read = f"_weight({w}, {sizes[i + 1]}, {sizes[i]}, {padded[i]}, {padded[i + 1]})"
            tile = self.put(f"_layer({tile}, {read}, _bias({b}, {sizes[i + 1]}, {padded[i + 1]}), TF)")
            if i < len(sizes) - 2:
                tile = self.put(f"_activated({tile}, {relu}, TF)")
        outputs = self.put(f"tl.arange(0, {padded[-1]})[None, :]")
        columns = [self.put(f"tl.sum(tl.where({outputs} == {j}, {tile}, 0.0), 1)") for j in range(sizes[-1])]
        return Value((sizes[-1],), tuple(columns), True, torch.float32)

    # What comes out.

    def _text(self, results: Sequence[Value], num_before: int, num_carry: int) -> str:
        carry, outputs = results[:num_carry], results[num_carry:]
        names = [f"p{i}" for i in range(len(self._given))]
        names += [f"n{i}" for i in range(num_carry)] + [f"s{i}" for i in range(len(results))]
        head, body, tail = [], [f"    {line}" for line in self._lines], []
        for i, node in enumerate(self._given):
            value = self._values[node]
            for j, name in enumerate(value.columns):
                at = f"r * {len(value.columns)} + {j}, mask=inside, other=0" if value.has_rows else f"{j}"
                read = f"tl.load(p{i} + {at})"
                head.append(f"{name} = {read}{'.to(tl.int1)' if value.dtype == torch.bool else ''}")
        for i, (before, after) in enumerate(zip(self.carry, carry, strict=True)):
            after = self.shaped(after, (self.rows, *before.shape)) if before.has_rows else after
            if after.has_rows != before.has_rows or len(after.columns) != len(before.columns):
                raise NotRecordable("what is carried becomes a table of the environments")
            for j, name in enumerate(after.columns):
                new = f"tl.broadcast_to({name}, [BLOCK])" if before.has_rows else name
                body.append(f"    m{i}_{j} = {_cast(new, after.dtype, before.dtype)}")
        for i, before in enumerate(self.carry):
            size = len(before.columns)
            for j, name in enumerate(before.columns):
                if before.has_rows:
                    head.append(f"if s{i} is not None:\n        tl.store(s{i} + r * {size} + {j}, {name}, mask=inside)")
                    where = f"(at + rows) * {size} + {j}"
                    body.append(
                        f"    if s{i} is not None:\n            tl.store(s{i} + {where}, m{i}_{j}, mask=inside)"
                    )
                    tail.append(f"tl.store(n{i} + r * {size} + {j}, {name}, mask=inside)")
                else:
                    tail.append(f"tl.store(n{i} + {j}, {name})")
        for i, (value, node) in enumerate(zip(outputs, self._results[num_carry:], strict=True), num_carry):
            whole = self.shaped(value, node.meta["val"].shape)
            if not whole.has_rows:
                raise NotRecordable("an output has no row per environment")
            size = len(whole.columns)
            for j, name in enumerate(whole.columns):
                body.append(f"    tl.store(s{i} + at * {size} + {j}, {name}, mask=inside)")
        for i, before in enumerate(self.carry):  # at the end, for what is above may still ask for the old ones
            body += [f"    {name} = m{i}_{j}" for j, name in enumerate(before.columns)]
        first = "r = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)", "inside = r < rows"
        lines = [*first, *head, "for t in range(0, length):", "    at = (r * 0 + t) * rows + r", *body, *tail]
        arguments = ", ".join([*names, "rows", "length", "BLOCK: tl.constexpr", "TF: tl.constexpr"])
        return _HEAD + f"def unroll({arguments}):\n" + "".join(f"    {line}\n" for line in lines)


_HEAD = """import triton
import triton.language as tl
from torch._inductor.runtime.triton_helpers import libdevice

from torchpod.kernels.gpu_mlp import _activated, _bias, _layer, _weight


@triton.jit(do_not_specialize=["length"])
"""


# Operators that rename columns, or go through them.


def _moved(fn: Callable[..., Tensor], *, to_shape: bool = False) -> Any:
    """An operator that only chooses elements, tried out on their numbers, of one row; `to_shape`: it is given one."""

    def make(source: _Source, node: Node, result: Tensor) -> Value:
        value = source.of(node.args[0])
        if value.is_one_number:
            return source.shaped(value, result.shape)
        lead = (1,) if value.has_rows else ()
        index = torch.arange(len(value.columns)).reshape(*lead, *value.shape)
        rest = list(node.args[1:])
        if to_shape and value.has_rows:
            shape = list(cast(Any, rest[0]))
            if shape[:1] != [source.rows]:
                raise NotRecordable("rows are brought together")
            rest[0] = cast(Any, [1, *shape[1:]])
        try:
            out = fn(index, *rest, **node.kwargs)
        except (IndexError, RuntimeError) as error:
            if not value.has_rows:
                raise
            raise NotRecordable(f"{node.target} chooses rows") from error  # which one row has not
        if value.has_rows:
            if out.ndim != result.ndim or out.shape[:1] != (1,) or result.shape[0] != source.rows:
                raise NotRecordable("rows are moved to another axis")
            out = out[0]
        chosen = tuple(value.columns[i] for i in out.flatten().tolist())
        return Value(tuple(out.shape), chosen, value.has_rows, value.dtype)

    return make


def _keeps_rows(source: _Source, node: Node, dim: int, ndim: int, value: Value) -> int:
    """The axis among those of a row."""
    if not ndim:
        raise NotRecordable(f"{node.target} of a number")
    dim = dim % ndim
    if value.has_rows and dim == 0:
        raise NotRecordable(f"{node.target} goes over rows")
    return dim - 1 if value.has_rows else dim


def _joined(source: _Source, node: Node, result: Tensor) -> Value:
    nodes, *rest = cast(Any, node.args)
    dim = cast(int, rest[0] if rest else node.kwargs.get("dim", 0))
    parts, shapes = [source.of(x) for x in nodes], [x.meta["val"].shape for x in nodes]
    has_rows = any(part.has_rows for part in parts) or list(result.shape[:1]) == [source.rows]
    whole = [source.shaped(part, shape) for part, shape in zip(parts, shapes, strict=True)]
    if any(part.has_rows != has_rows for part in whole):
        raise NotRecordable(f"{node.target} of rows and of what has none")
    axis = _keeps_rows(source, node, dim, result.ndim, whole[0])
    offset, indices, columns = 0, [], []
    for part in whole:
        indices.append(torch.arange(offset, offset + len(part.columns)).reshape(part.shape))
        columns += [_cast(x, part.dtype, result.dtype) for x in part.columns]
        offset += len(part.columns)
    index = torch.cat(indices, axis)
    names = [x if x.isidentifier() else source.put(x) for x in columns]
    return Value(tuple(index.shape), tuple(names[i] for i in index.flatten().tolist()), has_rows, result.dtype)


def _made(source: _Source, node: Node, result: Tensor) -> Value:
    """`full`, `scalar_tensor`: one number."""
    number = node.args[1] if node.target is aten.full.default else node.args[0]
    if isinstance(number, Node):
        raise NotRecordable(f"{node.target} of a tensor")
    return Value((), (source.literal(cast(Any, number), result.dtype),), False, result.dtype)


def _counted(source: _Source, node: Node, result: Tensor) -> Value:
    if result.numel() > MOST_COLUMNS:
        raise NotRecordable(f"a table of {result.numel()} numbers has no room in registers")
    start, step = cast(Any, node.kwargs.get("start", 0)), cast(Any, node.kwargs.get("step", 1))
    numbers = [source.literal(start + step * i, result.dtype) for i in range(result.numel())]
    return Value(tuple(result.shape), tuple(numbers), False, result.dtype)


def _groups(source: _Source, node: Node) -> tuple[Value, tuple[int, ...], list[list[str]]]:
    """What is reduced, the shape of what is left, and the columns that are brought together for each element of it."""
    x, dims, keep = cast(Any, [*node.args, *[None] * 3][:3])
    keep = bool(keep or node.kwargs.get("keepdim", False))
    whole = x.meta["val"].shape
    value, dims = source.shaped(source.of(x), whole), [dims] if isinstance(dims, int) else dims
    if not dims:
        raise NotRecordable(f"{node.target} goes over rows")
    axes = [_keeps_rows(source, node, dim, len(whole), value) for dim in dims]
    index = torch.arange(len(value.columns)).reshape(value.shape)
    rest = [i for i in range(index.ndim) if i not in axes]
    shape = tuple(1 if i in axes else n for i, n in enumerate(value.shape) if keep or i not in axes)
    flat = index.permute(*rest, *axes).reshape(math.prod(value.shape[i] for i in rest), -1)
    return value, shape, [[value.columns[i] for i in row] for row in flat.tolist()]


def _reduced(combine: str, *, bits: bool = False) -> Any:
    """Column by column, from the first to the last; `bits` are those of truth values."""

    def make(source: _Source, node: Node, result: Tensor) -> Value:
        if bits and result.dtype != torch.bool:
            raise NotRecordable(f"{node.target} of bytes has no kernel here")
        value, shape, groups = _groups(source, node)
        columns = []
        for group in groups:
            total = source.put(_cast(group[0], value.dtype, result.dtype))
            for x in group[1:]:
                total = source.put(combine.format(total, _cast(x, value.dtype, result.dtype)))
            columns.append(total)
        return Value(shape, tuple(columns), value.has_rows, result.dtype)

    return make


def _argmax(source: _Source, node: Node, result: Tensor) -> Value:
    """The first of the largest; NaN is larger than anything."""
    value, shape, groups = _groups(source, node)
    columns = []
    for group in groups:
        best, where = group[0], source.literal(0, torch.int64)
        for i, x in enumerate(group[1:], 1):
            is_better = source.put(f"({x} > {best}) | (({x} != {x}) & ({best} == {best}))")
            where = source.put(f"tl.where({is_better}, {i}, {where}).to(tl.int64)")
            best = source.put(f"tl.where({is_better}, {x}, {best})")
        columns.append(where)
    return Value(shape, tuple(columns), value.has_rows, torch.int64)


def _gathered(source: _Source, node: Node, result: Tensor) -> Value:
    """Of the columns along an axis that which a row asks for."""
    x, dim, at = cast(Any, node.args[:3])
    value, index = (source.shaped(source.of(n), n.meta["val"].shape) for n in (x, at))
    if not (value.has_rows and index.has_rows):
        raise NotRecordable(f"{node.target} of a table")
    axis = _keeps_rows(source, node, dim, result.ndim, value)
    numbers = torch.arange(len(value.columns)).reshape(value.shape)
    columns = []
    for asked, place in zip(index.columns, itertools.product(*map(range, index.shape)), strict=True):
        found, *others = (value.columns[int(x)] for x in numbers[(*place[:axis], slice(None), *place[axis + 1 :])])
        for i, column in enumerate(others, 1):
            found = source.put(f"tl.where({asked} == {i}, {column}, {found})")
        columns.append(found)
    return Value(index.shape, tuple(columns), True, value.dtype)


def _each(source: _Source, node: Node, result: Tensor, fn: Callable[[str], str]) -> Value:
    """What a function makes of every column, brought to the type of the result."""
    value = source.of(node.args[0])
    columns = tuple(fn(_cast(x, value.dtype, result.dtype)) for x in value.columns)
    return Value(value.shape, columns, value.has_rows, result.dtype)


def _clamped(source: _Source, node: Node, result: Tensor) -> Value:
    """NaN stays NaN."""
    given = [*node.args[1:], None, None]
    low, high = (None, given[0]) if node.target is aten.clamp_max.default else given[:2]
    low, high = low if low is not None else node.kwargs.get("min"), high if high is not None else node.kwargs.get("max")
    limits = [(limit, sign) for limit, sign in ((low, "<"), (high, ">")) if limit is not None]
    if any(isinstance(limit, Node) for limit, _ in limits):
        raise NotRecordable(f"{node.target} by tensors has no kernel here")
    most = [(source.literal(cast(Any, limit), result.dtype), sign) for limit, sign in limits]

    def clamp(x: str) -> str:
        for limit, sign in most:
            x = source.put(f"tl.where({x} {sign} {limit}, {limit}, {x})")
        return x

    return _each(source, node, result, clamp)


def _remainder(source: _Source, node: Node, result: Tensor) -> Value:
    """Python's, of a number above 0."""
    by = cast(Any, node.args[1])
    if not by > 0:
        raise NotRecordable(f"{node.target} by {by} has no kernel here")
    form = "libdevice.fmod({}, {})" if result.is_floating_point() else "{} % {}"
    divisor = source.literal(by, result.dtype)

    def remain(x: str) -> str:
        left = source.put(form.format(x, divisor))
        return source.put(f"tl.where({left} < 0, {left} + {divisor}, {left})")

    return _each(source, node, result, remain)


def _negated(source: _Source, node: Node, result: Tensor) -> Value:
    form = "({} == 0)" if result.dtype == torch.bool else "~{}"
    return _each(source, node, result, lambda x: source.put(form.format(x)))


def _power(source: _Source, node: Node, result: Tensor) -> Value:
    """By whole numbers, as products."""
    exponent = cast(Any, node.args[1])
    if exponent not in (2, 3, 4):
        raise NotRecordable(f"{node.target} to {exponent} has no kernel here")
    return _each(source, node, result, lambda x: source.put(" * ".join([f"({x})"] * int(exponent))))


_SPLITS: dict[Any, Callable[..., Sequence[Tensor]]] = {
    aten.unbind.int: torch.unbind,
    aten.split.Tensor: torch.split,
    aten.split_with_sizes.default: torch.split,
}
_MAKERS: dict[Any, Callable[[_Source, Node, Tensor], Value]] = {
    aten.view.default: _moved(lambda x, sizes: x.reshape(sizes), to_shape=True),
    aten.reshape.default: _moved(lambda x, sizes: x.reshape(sizes), to_shape=True),
    aten.expand.default: lambda source, node, result: source.shaped(source.of(node.args[0]), result.shape),
    aten.unsqueeze.default: _moved(torch.unsqueeze),
    aten.squeeze.dim: _moved(torch.squeeze),
    aten.permute.default: _moved(torch.permute),
    aten.slice.Tensor: _moved(lambda x, *args: aten.slice.Tensor(x, *args)),
    aten.select.int: _moved(torch.select),
    aten.cat.default: _joined,
    aten.full.default: _made,
    aten.scalar_tensor.default: _made,
    prims.iota.default: _counted,
    aten.sum.dim_IntList: _reduced("{} + {}"),
    aten.amax.default: _reduced(f"tl.maximum({{}}, {{}}, {_NAN})"),
    aten.amin.default: _reduced(f"tl.minimum({{}}, {{}}, {_NAN})"),
    aten.any.dim: _reduced("{} | {}", bits=True),
    aten.all.dim: _reduced("{} & {}", bits=True),
    aten.argmax.default: _argmax,
    aten.gather.default: _gathered,
    aten.clamp.default: _clamped,
    **dict.fromkeys((aten.clamp_min.default, aten.clamp_max.default), _clamped),
    aten.remainder.Scalar: _remainder,
    aten.pow.Tensor_Scalar: _power,
    aten.bitwise_not.default: _negated,
    aten.logical_not.default: _negated,
}


def rows_of(args: tuple[Any, ...]) -> int:
    """How many environments there are; asked before a step is traced for a kernel.

    Raises:
      NotRecordable: if they are no rows of the carry, or too many for one kernel to be quicker.
    """
    before = reader(args[1])(args[1])
    rows = {len(x) for x in before if x.ndim}
    if len(rows) != 1 or all(x.ndim for x in before):  # without a number that all share, the counter of steps
        raise NotRecordable("not all of the carry has a row per environment, or there are members of a population")
    (found,) = rows
    if found > MOST_ROWS:
        raise NotRecordable(f"{found} environments fill a GPU step by step")
    return found


class GpuUnroll(Unroll):
    """See the module, and `Unroll`.

    Args:
      graph: of a step, traced and simplified for a GPU.
      args: arguments for an example.
      result: of these.

    Raises:
      NotRecordable: if the step cannot be written so, or is no such step.
    """

    def __init__(self, graph: GraphModule, args: tuple[Any, ...], result: tuple[Any, Any]) -> None:
        super().__init__(cast(Any, None), args, result)
        self._rows, before = rows_of(args), reader(args[1])(args[1])
        if any(before[i].ndim == 0 for i in self._timestep) or not all(x.is_contiguous() for x in reader(args)(args)):
            raise NotRecordable("what a timestep tells has no rows, or an argument is not contiguous")
        self.source = _Source(graph, self._num_before, self._num_carry, self._rows).text

    @functools.cached_property
    def kernel(self) -> Any:
        """Of Triton."""
        from torch._inductor.codecache import PyCodeCache

        digest = hashlib.sha256(self.source.encode()).hexdigest()
        return PyCodeCache.load(self.source, digest[:16]).unroll

    def check(self, inputs: list[Tensor]) -> None:
        """Compiles it, and takes a step.

        Raises:
          NotRecordable: if this GPU has no room for it.
        """
        try:
            self.run(inputs, 1, 0)
        except importlib.import_module("triton.runtime.errors").OutOfResources as error:
            raise NotRecordable(f"no room on this GPU ({error})") from error

    def run(self, inputs: list[Tensor], length: int, axis: int) -> tuple[Any, Any, Any]:
        """See `Unroll.run`; one launch."""
        assert axis == 0
        carry = [torch.empty_like(x) for x in inputs[self._num_before : self._num_before + self._num_carry]]
        shown: list[Tensor | None] = [None] * self._num_carry
        for i in self._timestep:
            shown[i] = carry[i].new_empty(length + 1, *carry[i].shape)
        outputs = [x.new_empty(length, *x.shape) for x in self._outputs[self._num_carry :]]
        precision = gpu_mlp().precision()
        grid = (-(-self._rows // BLOCK),)
        on = torch.cuda.device(inputs[0].device) if inputs[0].is_cuda else contextlib.nullcontext()
        how = {"BLOCK": BLOCK, "TF": precision, "num_warps": WARPS, "num_stages": STAGES}
        with on:
            self.kernel[grid](*inputs, *carry, *shown, *outputs, self._rows, length, **how)
        last, outputs = self._write([*carry, *outputs])
        return last, self._write_timestep([cast(Tensor, shown[i]) for i in self._timestep]), outputs
