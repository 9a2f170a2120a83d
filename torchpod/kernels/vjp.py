"""A function and its derivative as two compiled programs: what the first computed waits in memory for the second.

`torch.func.vjp` inside of one program cannot stop between the forward and the backward pass. Here both are traced
together and cut where they meet, as autograd does it, but with tensors in and out and no graph at run time: it vmaps
and is captured like any other program. Read inductor.py first.
"""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils import _pytree as pytree

from torchpod.kernels.inductor import Signature, lower, simplify, trace, unalias, unexpected
from torchpod.trees import member, reader, stack, writer

Vjp = Callable[..., tuple[Any, Any, Callable[[Any], Any]]]
"""`(primals, *rest) -> (outputs, aux, pull_back)`.

`pull_back(cotangents)`, of a tree like `outputs`, is the gradient, a tree like `primals`; it holds on to what the
forward pass computed."""


def eager_vjp(fn: Callable[..., tuple[Any, Any]], population: int) -> Vjp:
    """Of `fn(primals, *rest) -> (outputs, aux)`, by `torch.func.vjp`; member by member in a population."""

    def one(primals: Any, *rest: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        outputs, pull_back, aux = torch.func.vjp(lambda x: fn(x, *rest), primals, has_aux=True)  # pyright: ignore[reportAssignmentType]
        return pytree.tree_map(torch.detach, outputs), aux, lambda cotangents: pull_back(cotangents)[0]

    def each(*args: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        outputs, aux, pulls = zip(*(one(*member(args, i)) for i in range(population)), strict=True)
        return (
            stack(outputs),
            stack(aux),
            lambda cotangents: stack([pull(member(cotangents, i)) for i, pull in enumerate(pulls)]),
        )

    return one if population == 1 else each


def compiled_vjp(fn: Callable[..., tuple[Any, Any]], name: str, limit: int, population: int) -> Vjp:
    """Of `fn(primals, *rest) -> (outputs, aux)`, pure; vmapped in a population; see `inductor.Compiled`."""

    def joint(args: tuple[Any, ...], cotangents: Any) -> tuple[Any, Any]:
        def forward(primals: Any) -> tuple[Any, Any]:
            outputs, aux = fn(primals, *args[1:])
            return outputs, (outputs, aux)

        _, pull_back, result = torch.func.vjp(forward, args[0], has_aux=True)  # pyright: ignore[reportAssignmentType]
        return unalias(result), unalias(pull_back(cotangents)[0])

    programs: list[_VjpProgram] = []
    pair = (torch.vmap(fn), torch.vmap(joint)) if population > 1 else (fn, joint)

    def guarded(*args: Any) -> tuple[Any, Any, Callable[[Any], Any]]:
        for program in programs:
            inputs = program.read(args)
            if inputs is not None:
                return program.run(inputs)
        leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        if len({id(x) for x in leaves}) < len(leaves):
            return guarded(*unalias(args))
        if len(programs) >= limit:
            raise unexpected(name, programs, args)
        programs.append(_VjpProgram(*pair, args))
        return guarded(*args)

    return guarded


class _VjpProgram(Signature):
    """Both directions, compiled for one input signature.

    Args:
      fn: the function, once called to know the shapes of what it returns.
      joint: `(args, cotangents) -> ((outputs, aux), gradients)`.
      args: to compile for.
    """

    def __init__(self, fn: Callable[..., Any], joint: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(args)
        with torch.no_grad():
            cotangents = pytree.tree_map(
                lambda x: torch.zeros_like(x, memory_format=torch.contiguous_format), fn(*args)[0]
            )  # as `pull_back` hands them over
        graph, fakes, (result, gradients), mode = trace(joint, (args, cotangents))
        simplify(graph)
        self._write_result, self._write_gradients = writer(result), writer(gradients)
        self._read_cotangents = reader(cotangents)
        self._num_results = len([x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)])
        num_cotangents = len(pytree.tree_leaves(cotangents))
        forward, backward, self._kept_inputs = _cut(graph, self._num_results, num_cotangents)
        self._forward = lower(forward, fakes[: len(fakes) - num_cotangents], mode)
        # Inductor decides how what is kept lies in memory, and the second program is compiled for that.
        _, kept = self._run_forward(list(self._leaves(args)))
        examples = [mode.from_tensor(x, static_shapes=True) for x in (*kept, *pytree.tree_leaves(cotangents))]
        with mode:
            FakeTensorProp(backward, mode).propagate_dont_convert_inputs(*examples)
        self._backward = lower(backward, examples, mode)

    def _run_forward(self, inputs: list[Tensor]) -> tuple[Any, list[Tensor]]:
        results = self._forward(list(inputs))
        kept = [inputs[i] for i in self._kept_inputs] + list(results[self._num_results :])
        return self._write_result(results[: self._num_results]), kept

    def run(self, inputs: list[Tensor]) -> tuple[Any, Any, Callable[[Any], Any]]:
        """Forward; see `Vjp`."""
        (outputs, aux), kept = self._run_forward(inputs)

        def pull_back(cotangents: Any) -> Any:
            leaves = [x.contiguous() for x in self._read_cotangents(cotangents)]
            return self._write_gradients(self._backward([*kept, *leaves]))

        return outputs, aux, pull_back


def _cut(graph: GraphModule, num_results: int, num_cotangents: int) -> tuple[GraphModule, GraphModule, list[int]]:
    """Two graphs out of one of both passes.

    Returns:
      The forward graph, whose outputs are the results and what is to be kept; the backward graph, from kept inputs,
      what else is kept, and cotangents to the gradients; which of the inputs are kept.
    """
    nodes = list(graph.graph.nodes)
    placeholders = [node for node in nodes if node.op == "placeholder"]
    inputs, cotangents = placeholders[:-num_cotangents], placeholders[-num_cotangents:]
    (outputs,) = nodes[-1].args
    results, gradients = outputs[:num_results], outputs[num_results:]
    inside: set[Node] = set(inputs)
    reached = [x for x in results if isinstance(x, Node)]
    while reached:
        node = reached.pop()
        if node not in inside:
            inside.add(node)
            reached += node.all_input_nodes
    for node in nodes:  # what has several results is kept by its results
        if node.target is operator.getitem and node.args[0] in inside:
            inside.add(node)

    def is_kept(node: Node) -> bool:
        used = any(user not in inside and user.op != "output" for user in node.users)
        return node in inside and node.op != "get_attr" and (used or node in gradients)

    kept_inputs = [node for node in inputs if is_kept(node)]
    kept = [node for node in nodes if is_kept(node) and node not in kept_inputs]

    forward, there = Graph(), {}
    for node in [*inputs, *(node for node in nodes if node in inside and node not in inputs)]:
        there[node] = forward.node_copy(node, there.__getitem__)
    forward.output([there[x] if isinstance(x, Node) else x for x in (*results, *kept)])

    backward, back = Graph(), {}
    for node in (*kept_inputs, *kept, *cotangents):
        back[node] = backward.placeholder(node.name)
    for node in nodes[:-1]:
        if node not in back and (node not in inside or node.op == "get_attr"):
            back[node] = backward.node_copy(node, back.__getitem__)
    backward.output([back[x] if isinstance(x, Node) else x for x in gradients])
    backward.eliminate_dead_code()
    return GraphModule(graph, forward), GraphModule(graph, backward), [inputs.index(node) for node in kept_inputs]
