"""One compiled function: traced once per input signature, called with almost no overhead.

Below `Compiler` in compile.py, which is what the loops use.
"""

import contextlib
import functools
import importlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch._C._dynamo.guards import TensorGuards
from torch._C._functorch import is_functorch_wrapped_tensor
from torch._functorch.compile_utils import fx_graph_cse
from torch._guards import TracingContext, tracing
from torch._inductor import config as inductor_config
from torch._inductor.decomposition import select_decomp_table
from torch._subclasses import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from torchpod import blame
from torchpod.kernels import cpu_ops, gpu_unroll, gxx, mlp
from torchpod.kernels.cpu_calls import Entry, NotRecordable, Unroll
from torchpod.kernels.cpu_kernels import CpuKernels
from torchpod.kernels.quicker import rare_collections
from torchpod.kernels.together import in_background, install, loaded
from torchpod.trees import outline, paths, reader, writer


class _Recording(threading.local):
    note: Callable[[Entry | None, Sequence[Tensor], Sequence[Any]], None] | None = None


RECORDING = _Recording()
"""Who is told of calls of this thread, a program with the tensors that it took and made (recorded.py)."""


class _Ahead(threading.local):
    active = False


_AHEAD = _Ahead()


@contextlib.contextmanager
def ahead() -> Iterator[None]:
    """In here compiled functions are compiled, but not called: they return zeros of the right shapes.

    Whoever runs an iteration here first, and then once more, has its programs compiled together (together.py), on
    several cores while the next ones are traced.
    """
    with in_background():
        _AHEAD.active = True
        try:
            yield
        finally:
            _AHEAD.active = False


def is_ahead() -> bool:
    """Whether this thread is in there."""
    return _AHEAD.active


class RecompilationError(RuntimeError):
    """A compiled function met inputs that it was not compiled for, in the middle of a run."""


class CompileError(RuntimeError):
    """What a user wrote cannot be compiled; the message names the line."""


class Compiled:
    """A function, compiled with inductor for the first `limit` input signatures; it raises at any other.

    The function is traced by `make_fx`, not by Dynamo, and called without Dynamo's wrappers, which took 70 of the 160
    us of a step of 4 environments: a call reads the tensors out of the arguments, checks their shapes, strides, types
    and devices in C++, runs the program, and puts the results together. What else a function closes over is constant,
    tensors too.
    Calls that autograd or functorch must see through go to `torch.compile`.

    Args:
      fn: pure; takes and returns trees of tensors.
      name: in errors.
      limit: input signatures.
      fallback: what to call, after a warning, if the function cannot be traced; None: raise.
      told: of which lines other functions have already warned; more of the same are not said again.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        limit: int,
        *,
        fallback: Callable[..., Any] | None = None,
        told: dict[str, object] | None = None,
    ) -> None:
        def traced(*args: Any) -> Any:
            return unalias(fn(*args))

        # Dynamo keeps what it compiled on the code object; with one of its own, each function has its own cache and
        # limit.
        traced.__code__ = traced.__code__.replace()
        self._traced, self._name, self._limit = traced, name, limit
        self._fallback, self.fell_back = fallback, False
        self._told = {} if told is None else told
        self._programs: list[_Program] = []

    def __call__(self, *args: Any) -> Any:
        """The result, from the program for such arguments."""
        for program in self._programs:
            inputs = program.read(args)
            if inputs is not None:
                if _AHEAD.active and not program.used:
                    return program.write(program.zeros)
                return program.write(program.run(inputs) if RECORDING.note is None else program.recorded(inputs))
        if self.fell_back and self._fallback is not None:
            with torch.no_grad():
                return self._fallback(*args)
        leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        if any(is_functorch_wrapped_tensor(x) for x in leaves):
            return self._differentiable(*args)
        if any(x.requires_grad for x in leaves):
            if torch.is_grad_enabled():
                return self._differentiable(*args)
            return self(*pytree.tree_map_only(Tensor, torch.detach, args))
        if len({id(x) for x in leaves}) < len(leaves):
            return self(*unalias(args))
        if len(self._programs) >= self._limit and not _AHEAD.active:
            self._programs = [program for program in self._programs if program.used]  # or made for zeros, in vain
        if len(self._programs) >= self._limit:
            raise unexpected(self._name, self._programs, args)
        try:
            self._programs.append(_Program(self._traced, args))
        except Exception as error:
            if self._fallback is None:
                if isinstance(error, RuntimeError) and any(frame.is_users for frame in blame.frames(error)):
                    raise CompileError(f"{self._name}: {where(error)}; {_repair(error)}.") from error
                raise
            with torch.no_grad():
                result = self._fallback(*args)  # what is wrong with the function itself is raised here
            self.fell_back = True
            line, own = where(error), object()
            if self._told.setdefault(line, own) is own:  # one step, for threads that fall back at the same time
                warnings.warn(f"{self._name} runs uncompiled, more slowly: {line}", stacklevel=2)
            return result
        return self(*args)

    @functools.cached_property
    def _differentiable(self) -> Callable[..., Any]:
        return torch.compile(self._traced, backend=_backend, fullgraph=True, dynamic=False)

    def loop(self, args: tuple[Any, ...]) -> tuple[Unroll, list[Tensor]] | None:
        """Many calls in one, and the tensors of the first call's arguments; None where that cannot be."""
        for program in self._programs:
            inputs = program.read(args)
            if inputs is not None and (program.used or not _AHEAD.active):
                loop = program.loop(args)
                return None if loop is None else (loop, inputs)
        return None


def _backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    """Of `torch.compile`."""
    from torch._inductor.compile_fx import compile_fx

    if any(isinstance(x, Tensor) and x.is_cpu for x in inputs):
        gxx.cache_per_width()
    with inductor_config.patch(_options(inputs)):
        return cast(Callable[..., Any], compile_fx(graph, inputs))


def where(error: Exception) -> str:
    """The line of a library or of the user's at which tracing ended, and the error."""
    frames, told = blame.frames(error), str(error).strip().split("\n")[0]
    if isinstance(error, _NumPyError):  # not NumPy's own
        frames = [frame for frame in frames if frame.is_users] or frames
    if not frames:
        return told
    return f"{frames[-1].code.co_filename}:{frames[-1].line}, `{frames[-1].text}`, does not compile ({told})"


def _repair(error: Exception) -> str:
    if isinstance(error, GuardOnDataDependentSymNode):
        return "Python cannot branch on what a tensor holds: use torch.where, or run with compile=false"
    if isinstance(error, _NumPyError):
        return "use torch's operators, or run with compile=false"
    return "change it, or run with compile=false"


class _NumPyError(RuntimeError):
    """Someone handed a tensor that is being traced to NumPy, which would read memory that nobody has written."""


@contextlib.contextmanager
def _without_numpy() -> Iterator[None]:
    """Refuses that. A TorchFunctionMode would do so too, and add half a second to the start of a run."""

    def refusing(method: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, FakeTensor) or cast(Any, torch)._is_functional_tensor(x) or is_functorch_wrapped_tensor(x):
                raise _NumPyError("NumPy cannot read the tensors of a compiled program")
            return method(x, *args, **kwargs)

        return refuse

    names = "numpy", "__array__", "__dlpack__"
    before = {name: vars(Tensor).get(name) for name in names}
    for name in names:
        setattr(Tensor, name, refusing(getattr(Tensor, name)))
    try:
        yield
    finally:
        for name, method in before.items():
            if method is None:  # inherited
                delattr(Tensor, name)
            else:
                setattr(Tensor, name, method)


class Signature:
    """Arguments that a program was compiled for: a tree, its constants, and all of its tensors but their numbers."""

    def __init__(self, args: tuple[Any, ...]) -> None:
        self._names = paths(args)
        self._leaves, self._outline = reader(args), outline(args)
        self._outlined, tensors = self._outline(args), self._leaves(args)
        self._guards = TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)

    def read(self, args: tuple[Any, ...]) -> list[Tensor] | None:
        """The tensors of the arguments if they are what the program was compiled for."""
        try:
            leaves = self._leaves(args)
            return list(leaves) if self._guards.check(*leaves) and self._outline(args) == self._outlined else None
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):  # another tree, or arrays compared
            return None

    def mismatch(self, args: tuple[Any, ...]) -> str:
        """Why `args` do not fit."""
        try:
            if self._guards.check(*(leaves := self._leaves(args))):
                return f"lengths and constants of the arguments are {self._outline(args)}, and were {self._outlined}"
            return str(self._guards.check_verbose(*leaves, tensor_check_names=self._names))
        except (AttributeError, IndexError, KeyError, TypeError) as error:
            return f"the arguments have another structure ({error})"


class _Program(Signature):
    """A function compiled for one input signature.

    Args:
      fn: pure; takes and returns trees of tensors. Anything else in its arguments is constant.
      args: to compile for.
    """

    def __init__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        super().__init__(args)
        graph, fakes, result, mode = trace(fn, args)
        simplify(graph)
        self._fn, self._on_gpu = fn, any(x.device.type == "cuda" for x in fakes)
        self.write = writer(result)
        self._compiled = lowered(graph, fakes, mode)
        self.run: Callable[[list[Tensor]], Any] = self._first_run
        self.entry: Entry | None = None
        self.used = False
        if _AHEAD.active:
            self.zeros = [
                torch.empty_strided(x.shape, [int(s) for s in strides], dtype=x.dtype, device=x.device).zero_()
                for x, strides in zip(reader(result)(result), self._compiled.output_strides, strict=True)
            ]
        else:
            self._finish()

    def _finish(self) -> None:
        """Waits for g++."""
        compiled = loaded(self._compiled)
        self.run, self.used, self.zeros = _bare(compiled), True, []
        with contextlib.suppress(NotRecordable):
            self.entry = Entry(compiled)

    def _first_run(self, inputs: list[Tensor]) -> Any:
        self._finish()
        return self.run(inputs)

    def recorded(self, inputs: list[Tensor]) -> Any:
        """As `run`, and noted."""
        taken = tuple(inputs)
        outputs = self.run(inputs)
        assert RECORDING.note is not None
        RECORDING.note(self.entry, taken, outputs)
        return outputs

    def loop(self, args: tuple[Any, ...]) -> Unroll | None:
        """See `Compiled.loop`."""
        if not hasattr(self, "_loop"):
            loop = None
            if not self.used:
                self._finish()
            with contextlib.suppress(NotRecordable):
                if self.entry is not None:
                    loop = Unroll(self.entry, args, self.write(self.run(list(self._leaves(args)))))
                elif gpu_unroll.ENABLED and self._on_gpu:
                    loop = self._gpu_loop(args)
            self._loop = loop
        return self._loop

    def _gpu_loop(self, args: tuple[Any, ...]) -> Unroll | None:
        """The same as one kernel; None, after a warning, where writing it fails, which is a bug of ours.

        Raises:
          NotRecordable: if there can be none.
        """
        gpu_unroll.rows_of(args)
        graph, *_ = trace(self._fn, args)  # inductor changes the one that it gets
        simplify(graph)
        inputs = list(self._leaves(args))
        result = self.write(self.run(list(inputs)))
        try:
            loop = gpu_unroll.GpuUnroll(graph, args, result)
            loop.check(inputs)
        except NotRecordable:
            raise
        except Exception as error:
            warnings.warn(
                "an unroll runs step by step, more slowly, for its kernel failed, which is a bug of torchpod's "
                f"(TORCHPOD_UNROLL_KERNEL=0 makes none): {type(error).__name__}: {error}",
                stacklevel=2,
            )
            return None
        return loop


def unexpected(name: str, programs: Sequence[Signature], args: tuple[Any, ...]) -> RecompilationError:
    """What to raise where a function meets arguments of one signature more than it may be compiled for."""
    return RecompilationError(
        f"{name} was compiled for {len(programs)} input signature(s) and met another: {programs[-1].mismatch(args)}. "
        "Keep shapes, dtypes and Python values the same from step to step, or run with compile=false."
    )


@rare_collections()
def trace(
    fn: Callable[..., Any], args: tuple[Any, ...], device: str | None = None
) -> tuple[torch.fx.GraphModule, list[Any], Any, Any]:
    """The graph of a function, fake inputs for it (on a device, if it is given), its fake result, and their mode."""
    importlib.import_module("torch._inductor.lowering")  # decompositions ask it whether to decompose
    # Without a ShapeEnv inductor would not use its cache. Tensors that the function closes over are constants.
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    leaves, spec = pytree.tree_flatten(args)
    fakes = [mode.from_tensor(x, static_shapes=True) for x in leaves if isinstance(x, Tensor)]
    if device is not None:
        with mode:
            fakes = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device) for x in fakes]
    result = None

    def flat(*tensors: Tensor) -> list[Tensor]:
        nonlocal result
        fresh = iter(tensors)
        result = fn(*pytree.tree_unflatten([next(fresh) if isinstance(x, Tensor) else x for x in leaves], spec))
        return list(reader(result)(result))

    flag, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
    try:
        with torch.no_grad(), mode, _without_numpy():
            table = select_decomp_table()
            try:
                graph = make_fx(torch.func.functionalize(flat), table, _allow_non_fake_inputs=True)(*fakes)
            except RuntimeError as error:
                if "custom_function_call" not in str(error):
                    raise
                # functionalize knows no `torch.autograd.Function`: its operators alone are in a first graph.
                whole = make_fx(flat, _allow_non_fake_inputs=True)(*fakes)
                graph = make_fx(torch.func.functionalize(whole), table, _allow_non_fake_inputs=True)(*fakes)
    finally:
        torch.compiler._is_compiling_flag = flag
    if any(x.target is torch.ops.aten.copy_.default and x.args[0].op == "placeholder" for x in graph.graph.nodes):
        raise RuntimeError(f"{fn.__qualname__} writes to a tensor that it was given; it must make a new one.")
    unseen = [name for name, x in graph.named_buffers() if isinstance(x, FakeTensor)]
    if unseen:
        raise RuntimeError(f"{len(unseen)} tensors of {fn.__qualname__} escape tracing (`x.data`?); use x.detach().")
    return graph, fakes, result, mode


def simplify(graph: torch.fx.GraphModule) -> None:
    """Rewrites a graph, in place."""
    graph.graph = fx_graph_cse(graph.graph)
    cpu_ops.load_those_called(graph)
    _fold_constants(graph)
    _skip_cats(graph.graph)
    mlp.fuse(graph)


def lower(graph: torch.fx.GraphModule, fakes: list[Tensor], mode: Any) -> Callable[[list[Tensor]], Any]:
    """Inductor's program for a graph."""
    return _bare(loaded(lowered(graph, fakes, mode)))


def _bare(compiled: Any) -> Callable[[list[Tensor]], Any]:
    return getattr(compiled, "current_callable", None) or compiled  # without its 2 us of bookkeeping


@rare_collections()
def lowered(graph: torch.fx.GraphModule, fakes: list[Tensor], mode: Any) -> Any:
    """As `lower`, perhaps not loaded yet."""
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    options: dict[str, Any] = _options(fakes) | {
        # It leaves a loop with 35 strided accesses unvectorised however much else there is to do, such as the 10 rounds
        # of a draw from keys [B, 3]: without it Pendulum and Acrobot step twice as fast, CartPole 1.3 times.
        "cpp.enable_tiling_heuristics": False,
        "size_asserts": False,  # `_Program.read` checks sizes
        "cpp.enable_floating_point_contract_flag": "fast",  # fused multiply-add: 4 % of a PPO update
    }
    # A program in C++ as a whole calls nothing in Python between its kernels, and gives Python's lock away meanwhile.
    # Kernels called from Python hold it, so that Sebulba's actors would stand still while the learner computes.
    cpp_wrapper = all(x.device.type == "cpu" for x in fakes)
    if cpp_wrapper:
        install()
    with tracing(TracingContext(mode)), inductor_config.patch(options):
        return compile_fx_inner(joint_graph_passes(graph), fakes, cpp_wrapper=cpp_wrapper)


def _options(inputs: Sequence[Any]) -> dict[str, Any]:
    return {
        "post_grad_custom_post_pass": CpuKernels(),
        # Else a program has rows for as many threads as there are now, and runs with as many as there are then: in a
        # process that is told so later, in a Python thread, which has OpenMP's own number, or from the cache.
        "cpp.threads": torch.get_num_threads(),
        **_gpu_options(inputs),
    }


def _gpu_options(inputs: Sequence[Any]) -> dict[str, Any]:
    """Inductor's, if there is a tensor on a GPU."""
    if not any(isinstance(x, Tensor) and x.device.type == "cuda" for x in inputs):
        return {}
    # No kernel is chosen by timing, for its sums would be rounded otherwise.
    options = {"deterministic": True, "shape_padding": False, "triton.autotune_pointwise": False}
    options["comprehensive_padding"] = False  # what a step returns the next one takes, with the strides of the first
    options["online_softmax"] = False  # for sums that are split inductor takes it back, with a warning
    if hasattr(inductor_config, "combo_kernels_pointwise_only"):  # not in every release
        # Kernels that do not need each other are launched as one; with sums among them ptxas takes minutes.
        options |= {"combo_kernels": True, "combo_kernels_autotune": 0, "combo_kernels_pointwise_only": True}
    return options


def _fold_constants(graph: torch.fx.GraphModule) -> None:
    """What follows from `arange`, and from tensors that the function closes over, is computed now.

    Tables of an environment (which bit belongs to which cell, `self.walls.to(action.device)`) are then there before the
    first call, and a CUDA graph holds no copy from the host.
    """
    nodes = graph.graph
    known = {node: getattr(graph, str(node.target)) for node in nodes.find_nodes(op="get_attr")}
    free = set(known)  # what costs nothing in a kernel, as it is
    for node in list(nodes.nodes):
        inputs = node.all_input_nodes
        if node.op != "call_function" or not all(x in known for x in inputs) or not (inputs or node.target in _ROOTS):
            continue
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):  # drawn anew in every call
            continue
        if getattr(node.target, "namespace", "") == "torchpod":
            gxx.load_needed()
        args, kwargs = pytree.tree_map_only(torch.fx.Node, known.__getitem__, (node.args, node.kwargs))
        value = cast(Any, node.target)(*args, **kwargs)
        if _size(value) > max(_LARGE_TABLE, *(_size(known[x]) for x in inputs), 0):
            continue
        if node.target is torch.ops.aten.full.default and value.ndim > 0:
            continue
        known[node] = value
        if inputs and node.target in _VIEWS and all(x in free for x in inputs):
            free.add(node)
        # A CPU kernel makes the numbers of an arange in 64 bits, and then converts them: loading a table is faster.
        elif not inputs and (node.target is not torch.ops.prims.iota.default or value.device.type != "cpu"):
            free.add(node)
    for node, value in known.items():
        if isinstance(value, Tensor) and node not in free and any(user not in known for user in node.users):
            graph.register_buffer(f"_folded_{node.name}", value)
            with nodes.inserting_before(node):
                constant = nodes.get_attr(f"_folded_{node.name}")
            constant.meta["val"] = node.meta["val"]
            node.replace_all_uses_with(constant)
    nodes.eliminate_dead_code()


_ROOTS = (torch.ops.prims.iota.default, torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)
_VIEWS = (torch.ops.aten.unsqueeze.default, torch.ops.aten.view.default, torch.ops.aten.expand.default)
_LARGE_TABLE = 16384
"""Elements up to which a constant may grow when it is folded; what is broadcast over a batch is not."""


def _size(value: Any) -> int:
    """Elements of all tensors."""
    return sum(x.numel() for x in pytree.tree_leaves(value) if isinstance(x, Tensor))


def _skip_cats(graph: torch.fx.Graph) -> None:
    """Slices of a concatenation become slices of the piece that they lie in, so that keys never go through memory."""
    aten = torch.ops.aten
    for node in graph.find_nodes(op="call_function", target=aten.slice.Tensor):
        if len(node.args) != 4 or node.args[0].target is not aten.cat.default:
            continue
        whole, dim, start, end = cast(Any, node.args)
        pieces, cat_dim = cast(Any, (*whole.args, 0)[:2])
        if dim % whole.meta["val"].ndim != cat_dim % whole.meta["val"].ndim:
            continue
        offset = 0
        for piece in pieces:
            size = piece.meta["val"].shape[dim]
            same_type = piece.meta["val"].dtype == whole.meta["val"].dtype
            if same_type and offset <= start < end <= offset + size:
                with graph.inserting_before(node):
                    part = graph.call_function(aten.slice.Tensor, (piece, dim, start - offset, end - offset))
                part.meta["val"] = node.meta["val"]
                node.replace_all_uses_with(part)
                break
            offset += size
    graph.eliminate_dead_code()


def unalias(tree: Any) -> Any:
    """Clones tensors that appear twice: guards take every input for a tensor of its own."""
    leaves, spec = pytree.tree_flatten(tree)
    fresh: list[Any] = []
    for leaf in leaves:
        twice = isinstance(leaf, Tensor) and any(leaf is other for other in fresh)
        fresh.append(leaf.clone() if twice else leaf)
    return pytree.tree_unflatten(fresh, spec)
