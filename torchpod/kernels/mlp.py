"""Multilayer perceptrons in a program become one operator forward and one backward: see cpu_mlp.cpp and gpu_mlp.py.

On a GPU two networks with the same inputs share operators, if they differ in the size of their outputs alone and both
have a gradient, or neither.

`fuse` finds them in a traced graph, in whatever module they were written: linear layers with tanh or relu between them
and, if there is a gradient, all that belongs to it. What it does not recognise stays as it is.
"""

import functools
import importlib.util
import itertools
import operator
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.utils import _pytree as pytree

from torchpod.kernels.gxx import need

aten = torch.ops.aten

ACTIVATIONS = {aten.tanh.default: 1, aten.relu.default: 2}
"""Their numbers there."""
NUM_LAYERS = (2, 3, 4)
"""Of networks for which there are operators."""
WIDEST = {"cpu": 256, "cuda": 64}
"""Of hidden layers: the weights of a wider one are not in a CPU's cache, and MKL is faster; or not in the shared memory
of a GPU's multiprocessor, where that holds for the last layer as well."""
MANY_INPUTS = 64
"""With more, a GPU keeps the first hidden layer for a backward pass; else it computes all of them again."""
SHARED_BYTES = 227 * 1024
"""Of a block of threads, that a GPU must have: what an H100 and an H200 have."""

LOOKS_FROM = 64
"""With so many inputs a CPU looks which of them are zero, and leaves these out if three in four are."""

FUSED: set[tuple[int, ...]] = set()
"""Of the networks that were fused in this process, the sizes from inputs to outputs: for those who report speed."""

CONTIGUOUS = (torch.Tag.needs_contiguous_strides,)
_LIBRARY = torch.library.Library("torchpod", "DEF")


def _define(layers: int) -> None:
    weights = ", ".join(f"Tensor weight{i}, Tensor bias{i}" for i in range(layers))
    tensors = ", ".join(["Tensor"] * layers)
    hidden = "".join(f", Tensor hidden{i}" for i in range(1, layers))
    later = "".join(f", Tensor weight{i}" for i in range(1, layers))
    for name, arguments, results in (
        ("", f"Tensor x, {weights}", "Tensor"),
        ("_kept", f"Tensor x, {weights}", f"({tensors})"),
        ("_backward", f"Tensor doutput, Tensor x{hidden}{later}", f"({tensors}, {tensors})"),
        ("_dx", f"Tensor doutput{hidden}, Tensor weight0{later}", "Tensor"),
    ):
        _LIBRARY.define(f"mlp{layers}{name}({arguments}, int activation) -> {results}", tags=CONTIGUOUS)
    torch.library.register_fake(f"torchpod::mlp{layers}", lambda x, *rest: _fakes(x, rest)[0], lib=_LIBRARY)
    torch.library.register_fake(f"torchpod::mlp{layers}_kept", lambda x, *rest: _fakes(x, rest), lib=_LIBRARY)
    torch.library.register_fake(f"torchpod::mlp{layers}_backward", _fake_backward, lib=_LIBRARY)
    torch.library.register_fake(f"torchpod::mlp{layers}_dx", _fake_dx, lib=_LIBRARY)


def _fakes(x: Tensor, rest: tuple[Any, ...]) -> tuple[Tensor, ...]:
    """Output and hidden layers."""
    *hidden, output = (x.new_empty(*x.shape[:-1], weight.shape[-2]) for weight in rest[:-1:2])
    return output, *hidden


def _fake_backward(doutput: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of weight and bias, layer by layer."""
    sizes = [y.shape[-1] for y in (x, *rest[: (len(rest) - 1) // 2], doutput)]
    lead = x.shape[:-2]
    shapes = [shape for inputs, size in itertools.pairwise(sizes) for shape in ((*lead, size, inputs), (*lead, size))]
    return tuple(x.new_empty(shape) for shape in shapes)


def _fake_dx(doutput: Tensor, *rest: Any) -> Tensor:
    """The gradient of x."""
    weight = rest[(len(rest) - 1) // 2]  # the first, behind one hidden layer less than there are weights
    return doutput.new_empty(*doutput.shape[:-1], weight.shape[-1])


for _layers in NUM_LAYERS:
    _define(_layers)
_LIBRARY.define(
    "mlps(Tensor x, Tensor[] parameters, int networks, int activation, bool keep) -> Tensor[]", tags=CONTIGUOUS
)
_LIBRARY.define(
    "mlps_backward(Tensor[] doutputs, Tensor x, Tensor[] hidden, Tensor[] parameters, int activation) -> Tensor[]",
    tags=CONTIGUOUS,
)


def _fake_together(x: Tensor, parameters: list[Tensor], networks: int, activation: int, keep: bool) -> list[Tensor]:
    """Outputs and, if they are kept, the first hidden layers."""
    own = len(parameters) // networks
    kept = [parameters[i * own] for i in range(networks)] if keep else []
    last = [parameters[i * own - 2] for i in range(1, networks + 1)]
    return [x.new_empty(*x.shape[:-1], weight.shape[-2]) for weight in (*last, *kept)]


torch.library.register_fake("torchpod::mlps", _fake_together, lib=_LIBRARY)
torch.library.register_fake(
    "torchpod::mlps_backward",
    lambda doutputs, x, hidden, parameters, activation: [p.new_empty(p.shape) for p in parameters],
    lib=_LIBRARY,
)


@functools.cache
def load(device: str = "cpu") -> None:
    """Compiles the operators, for a CPU once per machine, and has them loaded for the next program."""
    if device == "cpu":
        need("cpu_mlp.cpp", "-fno-math-errno", "-ffp-contract=fast", f"-DTORCHPOD_WIDE={LOOKS_FROM}")
    else:
        implement_in_triton(device)


def gpu_mlp() -> Any:
    """The module, which needs Triton."""
    return importlib.import_module("torchpod.kernels.gpu_mlp")


def implement_in_triton(device: str) -> None:
    """Makes the operators of such a device those of gpu_mlp.py."""
    made = gpu_mlp()
    _LIBRARY.impl("mlps", made.forward, device.upper())
    _LIBRARY.impl("mlps_backward", made.backward, device.upper())


class _Layer(NamedTuple):
    """A linear layer as it is traced."""

    x: Node
    weight: Node
    bias: Node
    output: Node


class _Gradient(NamedTuple):
    """What belongs to the backward pass of a network: all nodes are replaced."""

    doutput: Node
    dweights: list[Node]
    dbiases: list[Node]


class _InputGradient(NamedTuple):
    """A backward pass that has the gradient of x alone: critics have it, from which a policy learns."""

    doutput: Node
    dx: Node


class _Network(NamedTuple):
    """Its layers, and one of its backward passes if there is one."""

    layers: list[_Layer]
    gradient: _Gradient | None
    input_gradient: _InputGradient | None

    @property
    def x(self) -> Node:
        return self.layers[0].x

    @property
    def kind(self) -> int:
        return ACTIVATIONS[cast(Any, self.layers[-1].x.target)]

    @property
    def parameters(self) -> list[Node]:
        return [node for layer in self.layers for node in (layer.weight, layer.bias)]

    @property
    def sizes(self) -> tuple[int, ...]:
        return (_value(self.x).shape[-1], *(_value(layer.output).shape[-1] for layer in self.layers))


def fuse(module: GraphModule) -> bool:
    """Rewrites the graph, in place; says whether there was something to rewrite."""
    graph, found = module.graph, []
    layers = {layer.output: layer for layer in map(_layer, list(graph.nodes)) if layer}
    for layer in layers.values():
        chain = _chain(layer, layers)
        if chain is None:
            continue
        gradient, of_input = _gradient(chain), _input_gradient(chain)
        if not (gradient or of_input) and any(len(list(_users(layer.x))) > 1 for layer in chain[1:]):
            continue  # somebody needs the hidden layers
        found.append(_Network(chain, gradient, of_input))
    if not found:
        return False
    on_gpu = []
    for network in found:
        device = _value(network.x).device.type
        FUSED.add(network.sizes)
        load(device)
        if device == "cuda":
            on_gpu.append(network)
        else:
            hidden = _insert_forward(graph, network)
            if network.input_gradient:
                _insert_input_gradient(graph, network, hidden[1:], network.input_gradient)
            elif network.gradient:
                _insert_backward(graph, network, hidden, network.gradient)
    while on_gpu:
        first = on_gpu.pop(0)
        second = next((other for other in on_gpu if _go_together(first, other)), None)
        if second is not None:
            on_gpu.remove(second)
        _insert_together(graph, [first] if second is None else [first, second])
    graph.eliminate_dead_code()
    graph.lint()
    return True


# --- What is recognised -----------------------------------------------------------------------------------------------


@functools.cache
def _has_operators(device: torch.device) -> bool:
    if device.type != "cuda":
        return device.type == "cpu"
    if torch.version.hip is not None or importlib.util.find_spec("triton") is None:
        return False
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0) >= SHARED_BYTES


def _value(node: Node) -> Tensor:
    return node.meta["val"]


def _seen_through(node: Any) -> Any:
    """Behind views, expansions and products with 1 (vmap's, of biases) that change nothing."""
    while isinstance(node, Node) and (
        node.target in (aten.view.default, aten.expand.default)
        or (node.target is aten.mul.Scalar and node.args[1] == 1)
    ):
        before, after = _value(cast(Node, node.args[0])), _value(node)
        if before.shape != after.shape or before.dtype != after.dtype:
            break
        node = node.args[0]
    return node


def _transposed(node: Any) -> Node | None:
    """What a node is the transpose of."""
    node = _seen_through(node)
    if not isinstance(node, Node) or node.target is not aten.permute.default:
        return None
    ndim = _value(node).ndim
    swapped = [*range(ndim - 2), ndim - 1, ndim - 2]
    return _seen_through(node.args[0]) if [d % ndim for d in cast(Any, node.args[1])] == swapped else None


def _product(node: Any) -> tuple[Node, Node] | None:
    """The factors of a product of matrices."""
    node = _seen_through(node)
    if not isinstance(node, Node):
        return None
    if node.target in (aten.mm.default, aten.bmm.default):
        return _seen_through(node.args[0]), _seen_through(node.args[1])
    if node.target is aten.mul.Tensor:  # of a column and a row
        a, b = map(_seen_through, node.args)
        if isinstance(a, Node) and isinstance(b, Node):
            (*_, p, q), (*_, r, s) = ((1, 1, *_value(x).shape) for x in (a, b))
            if q == r == 1 and (p, s) == tuple(_value(node).shape[-2:]) and _value(a).ndim == _value(b).ndim:
                return a, b
    return None


def _layer(node: Node) -> _Layer | None:
    """A linear layer that ends in this node: `addmm(bias, x, weight^T)`, or `bias[:, None] + bmm(x, weight^T)`."""
    if node.op != "call_function" or not isinstance(value := node.meta.get("val"), Tensor):
        return None
    if value.dtype != torch.float32 or not _has_operators(value.device):
        return None
    if node.target is aten.addmm.default and not node.kwargs:
        bias, x, weight = cast(Any, node.args)
    elif node.target is aten.add.Tensor and not node.kwargs and value.ndim == 3:
        bias, product = cast(Any, node.args)
        factors = _product(product)
        if factors is None or not isinstance(bias, Node) or bias.target is not aten.view.default:
            return None
        if _value(bias).ndim != 3 or _value(bias).shape[1] != 1:  # a number for each row
            return None
        (x, weight), bias = factors, bias.args[0]
    else:
        return None
    x, weight, bias = _seen_through(x), _transposed(weight), _seen_through(bias)
    if weight is None or _value(bias).shape != _value(weight).shape[:-1]:
        return None
    if _value(x).ndim != _value(weight).ndim or not _value(weight).is_contiguous():
        return None
    return _Layer(x, weight, bias, node)


def _users(node: Node) -> Iterator[Node]:
    """Who uses a node, seen through what changes nothing."""
    for user in node.users:
        if _seen_through(user) is not user:
            yield from _users(user)
        else:
            yield user


def _chain(head: _Layer, layers: dict[Node, _Layer]) -> list[_Layer] | None:
    """The layers up to this one, the last, if they are a network for which there is an operator."""
    chain, kinds = [head], set()
    while chain[0].x.target in ACTIVATIONS:
        y = chain[0].x
        before = layers.get(_seen_through(y.args[0]))
        size, widest = _value(y).shape[-1], WIDEST[_value(y).device.type]
        if before is None or not 0 < size <= widest or size % 16:
            break
        if len(list(_users(before.output))) > 1 or sum(_layer_input(user, y) for user in _users(y)) > 1:
            break
        kinds.add(y.target)
        chain.insert(0, before)
    goes_on = any(
        user.target in ACTIVATIONS and any(_layer_input(after, user) for after in _users(user))
        for user in _users(head.output)
    )
    output = _value(head.output)
    if output.device.type == "cuda" and output.shape[-1] > WIDEST["cuda"]:
        return None
    return None if goes_on or len(chain) not in NUM_LAYERS or len(kinds) > 1 else chain


def _layer_input(user: Node, y: Node) -> bool:
    """Whether a node takes `y` as the input of a linear layer: whoever does not belongs to a gradient."""
    if user.target is aten.addmm.default:
        return _seen_through(user.args[1]) is y
    factors = _product(user)
    return factors is not None and factors[0] is y and _transposed(factors[1]) is not None


def _find(nodes: Iterable[Node | None]) -> Node | None:
    """The one that there is."""
    found = list({node for node in nodes if node is not None})
    return found[0] if len(found) == 1 else None


def _gradient(chain: list[_Layer]) -> _Gradient | None:
    """The backward pass of a network, if all of it is there, and ends there."""
    dweights, dbiases = [], []
    dz = doutput = _find(_dz_of(user, chain[-1].x) for user in _users(chain[-1].x))
    for i in reversed(range(len(chain))):
        layer = chain[i]
        if dz is None or _value(dz).shape != _value(layer.output).shape:
            return None
        dweights.insert(0, _find(user for user in _users(layer.x) if _dz_of(user, layer.x) is dz))
        dbiases.insert(0, _find(user for user in _users(dz) if _is_row_sum(user)))
        before = {_through_activation(user, dz, layer) for user in _users(dz) if _product(user)}
        if i == 0 and before:  # x gets a gradient as well
            return None
        dz = _find(before)
    if doutput is None or None in dweights or None in dbiases:
        return None
    return _Gradient(doutput, cast(Any, dweights), cast(Any, dbiases))


def _input_gradient(chain: list[_Layer]) -> _InputGradient | None:
    """The backward pass of a network on a CPU in which its parameters are constants, if all of it is there."""
    if _value(chain[-1].output).device.type != "cpu":
        return None
    doutput = dz = None
    for layer in reversed(chain):
        found = {}  # of gradients of the output what comes of them one layer before
        for product in _users_of_matrix(layer.weight):
            factor, matrix = _product(product) or (None, None)
            if factor is None or dz not in (None, factor) or not _is_same(cast(Node, matrix), layer.weight):
                continue
            before = product if layer is chain[0] else _through_activation(product, factor, layer)
            if before is not None and _value(factor).shape == _value(layer.output).shape:
                found[factor] = before
        if len(found) != 1:
            return None
        ((own, dz),) = found.items()
        if any(_dz_of(user, layer.x) is own for user in _users(layer.x)):  # the weights get a gradient as well
            return None
        # Of a hidden layer the next one and the derivative, and of its gradient the product.
        if layer is not chain[0] and (len(list(_users(layer.x))) > 2 or len(list(_users(dz))) > 1):
            return None
        doutput = doutput or own
    return _InputGradient(cast(Node, doutput), cast(Node, dz))


def _users_of_matrix(weight: Node) -> Iterator[Node]:
    """Who uses a matrix, or the transpose of its transpose."""
    for user in _users(weight):
        yield user
        if user.target is aten.permute.default:
            for flipped in _users(user):
                if flipped.target is aten.permute.default:
                    yield from _users(flipped)


def _dz_of(node: Node, x: Node) -> Node | None:
    """If a node is dz^T x, the gradient of the weights of a layer with input x: that dz."""
    factors = _product(node)
    return _transposed(factors[0]) if factors is not None and factors[1] is x else None


def _is_row_sum(node: Node) -> bool:
    if node.target is not aten.sum.dim_IntList:
        return False
    ndim = _value(cast(Node, node.args[0])).ndim
    return [d % ndim for d in cast(Any, node.args[1])] == [ndim - 2]


def _through_activation(node: Node, dz: Node, layer: _Layer) -> Node | None:
    """If a node is dz W: dz of the layer before, that times the derivative of its activation."""
    factors = _product(node)
    if factors is None or factors[0] is not dz or not _is_same(factors[1], layer.weight):
        return None
    user = _find(_users(node))
    if user is None:
        return None
    y = layer.x
    if y.target is aten.tanh.default and user.target is aten.mul.Tensor:
        other = _find(x for x in map(_seen_through, user.args) if x is not _seen_through(node))
        if other is not None and other.target in (aten.sub.Tensor, aten.rsub.Scalar):
            one, square = other.args[:2] if other.target is aten.sub.Tensor else other.args[1::-1]
            if isinstance(square, Node) and square.target is aten.mul.Tensor and one == 1:
                return user if all(_seen_through(x) is y for x in square.args) else None
    if y.target is aten.relu.default and user.target is aten.where.self:
        condition, zero, kept = user.args
        if isinstance(condition, Node) and condition.target is aten.le.Scalar and _seen_through(condition.args[0]) is y:
            is_zero = isinstance(zero, Node) and zero.args and zero.args[-1] == 0
            return user if _seen_through(kept) is _seen_through(node) and is_zero else None
    return None


def _is_same(node: Node, weight: Node) -> bool:
    """Whether a node is a matrix, or the transpose of its transpose."""
    flipped = _transposed(node)
    return node is weight or (flipped is not None and _transposed(flipped) is weight)


# --- What is put in its place -----------------------------------------------------------------------------------------


def _call(graph: Graph, name: str, args: tuple[Any, ...]) -> Node:
    op = getattr(torch.ops.torchpod, name).default
    node = graph.call_function(op, args)
    values = pytree.tree_map_only(Node, lambda x: x.meta["val"], args)
    tensor: Any = next(x for x in pytree.tree_leaves(values) if isinstance(x, Tensor))
    with tensor.fake_mode:
        node.meta["val"] = op(*values)
    return node


def _item(graph: Graph, node: Node, index: int) -> Node:
    item = graph.call_function(operator.getitem, (node, index))
    item.meta["val"] = node.meta["val"][index]
    return item


def _insert_forward(graph: Graph, network: _Network) -> list[Node]:
    """Returns x and the hidden layers, or nothing if they are not kept."""
    layers, kept = network.layers, bool(network.gradient or network.input_gradient)
    with graph.inserting_before(layers[-1].output):
        made = _call(graph, f"mlp{len(layers)}{'_kept' * kept}", (network.x, *network.parameters, network.kind))
        results = [_item(graph, made, i) for i in range(len(layers))] if kept else [made]
    layers[-1].output.replace_all_uses_with(results[0])
    return [network.x, *results[1:]]


def _insert_backward(graph: Graph, network: _Network, hidden: list[Node], gradient: _Gradient) -> None:
    layers = network.layers
    with graph.inserting_before(_after(graph, [gradient.doutput, *hidden])):
        weights = [layer.weight for layer in layers[1:]]
        made = _call(graph, f"mlp{len(layers)}_backward", (gradient.doutput, *hidden, *weights, network.kind))
        _replace_gradient(graph, gradient, [_item(graph, made, i) for i in range(2 * len(layers))])


def _insert_input_gradient(graph: Graph, network: _Network, hidden: list[Node], gradient: _InputGradient) -> None:
    with graph.inserting_before(_after(graph, [gradient.doutput, *hidden])):
        weights = [layer.weight for layer in network.layers]
        made = _call(graph, f"mlp{len(weights)}_dx", (gradient.doutput, *hidden, *weights, network.kind))
    gradient.dx.replace_all_uses_with(made)


def _insert_together(graph: Graph, networks: list[_Network]) -> None:
    """One operator forward for one or two networks on a GPU and, if there are gradients, one backward."""
    from torch._inductor.pattern_matcher import stable_topological_sort  # half a second, for those who compile

    x, kind, number = networks[0].x, networks[0].kind, len(networks)
    parameters = [node for network in networks for node in network.parameters]
    gradients = [network.gradient for network in networks if network.gradient]
    keep, order = bool(gradients) and _value(x).shape[-1] > MANY_INPUTS, _order(graph)
    with graph.inserting_before(min((network.layers[-1].output for network in networks), key=order.__getitem__)):
        made = _call(graph, "mlps", (x, parameters, number, kind, keep))
        results = [_item(graph, made, i) for i in range(len(made.meta["val"]))]
    for network, output in zip(networks, results, strict=False):
        network.layers[-1].output.replace_all_uses_with(output)
    if gradients:
        doutputs = [gradient.doutput for gradient in gradients]
        with graph.inserting_before(_after(graph, [*doutputs, *results])):
            made = _call(graph, "mlps_backward", (doutputs, x, results[number:], parameters, kind))
            own = len(parameters) // number
            for i, gradient in enumerate(gradients):
                _replace_gradient(graph, gradient, [_item(graph, made, i * own + j) for j in range(own)])
    stable_topological_sort(graph)


def _go_together(first: _Network, second: _Network) -> bool:
    """Whether two networks on a GPU can share operators: they are alike, and neither needs what the other gives."""
    alike = first.x is second.x and first.kind == second.kind and first.sizes[:-1] == second.sizes[:-1]
    if not alike or (first.gradient is None) != (second.gradient is None):
        return False
    return not any(
        _comes_from(one.parameters, {other.layers[-1].output})
        or (
            one.gradient
            and other.gradient
            and _comes_from([one.gradient.doutput], {*other.gradient.dweights, *other.gradient.dbiases})
        )
        for one, other in ((first, second), (second, first))
    )


def _comes_from(nodes: list[Node], results: set[Node]) -> bool:
    """Whether nodes are computed with some results."""
    seen, todo = set(nodes), list(nodes)
    while todo:
        node = todo.pop()
        if node in results:
            return True
        fresh = [x for x in node.all_input_nodes if x not in seen]
        seen.update(fresh)
        todo += fresh
    return False


def _order(graph: Graph) -> dict[Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _after(graph: Graph, nodes: list[Node]) -> Node:
    """What comes after the last of some nodes: there all that needs only them can be computed."""
    return max(nodes, key=_order(graph).__getitem__).next


def _replace_gradient(graph: Graph, gradient: _Gradient, items: list[Node]) -> None:
    """By what an operator gives, layer by layer weight and bias."""
    for item, node in zip(items, itertools.chain(*zip(gradient.dweights, gradient.dbiases, strict=True)), strict=True):
        new = item
        if _value(item).shape != _value(node).shape:  # a sum that kept its axis
            with graph.inserting_after(item):
                new = graph.call_function(aten.view.default, (item, list(_value(node).shape)))
            new.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(new)
