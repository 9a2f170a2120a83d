"""What the programs of an iteration become on an NVIDIA H100, found out where there is none: see lowered.py.

Every compiled function of one iteration is traced as if its arguments were on a GPU, and lowered by inductor to Triton
and cuBLAS with the very settings of a run there; what the iteration does is then computed on the CPU, uncompiled, so
that the next function gets its arguments. Counted are the kernels of all programs, as often as they are called, and
the operators between them, each of which launches at least one. `--compile` also makes machine code of the kernels;
`--check` runs every program, its kernels in Triton's interpreter (interpreted.py), and compares what comes out.
"""

import argparse
import collections
import importlib
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple, TypedDict

import torch
from torch import Tensor
from torch._inductor import config as inductor_config
from torch._subclasses import fake_tensor
from torch.fx.experimental import proxy_tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from torchpod.anakin import Anakin
from torchpod.bench import anakin_worker, interpreted
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.dealer import DEFAULT_CHUNK_ROWS
from torchpod.graph import Replay
from torchpod.kernels import inductor, mlp
from torchpod.kernels.vjp import Vjp
from torchpod.makers import make_agent, make_env
from torchpod.trees import reader

CAPABILITY = 90
"""Of an H100, and of an H200."""
SIZE = {
    "multi_processor_count": 132,
    "regs_per_multiprocessor": 65536,
    "max_threads_per_multi_processor": 2048,
    "max_threads_per_block": 1024,
    "warp_size": 32,
}
LAUNCH = re.compile(
    r"^\s+(?:\w+ = )?(triton_\w+\.run|extern_kernels\.\w+|torch\.ops\.[\w.]+|aten\.\w+)\(", re.MULTILINE
)
"""A line of inductor's program that launches something."""
ON_HOST = re.compile(r"empty_strided_cpu|cpp_fused|\.item\(\)|\.tolist\(\)|\.cpu\(\)|device='cpu'|device\(type='cpu'\)")
"""What a program must not do that is captured."""
PATIENCE_S = 90.0
"""For the machine code of a kernel; on a busy core the slowest took 15."""
NETWORKS = torch.ops.torchpod.mlps.default, torch.ops.torchpod.mlps_backward.default
"""Operators; the second is two kernels or, if its networks have many inputs, three."""
SMALLEST = 1e-6
"""Below this a tensor's largest number is what was left of larger ones."""
TOLERANCE = 1e-4
"""On what programs compute: rounded otherwise, in float32."""


class OnCpu(TorchDispatchMode):
    """What would be made on the GPU is made on the CPU: constants, of which the compiler wants to know the values."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls it elsewhere."""

        def moved(x: Any) -> Any:
            return torch.device("cpu") if isinstance(x, torch.device) and x.type == "cuda" else x

        return func(*map(moved, args), **{name: moved(x) for name, x in (kwargs or {}).items()})


class Between(TorchDispatchMode):
    """Counts the operators that make something new, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts, and calls."""
        if not func.is_view and func.namespace != "prim" and "empty" not in func.__name__:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


class Lowering(Compiler):
    """Lowers each function for the GPU when it is called first, and calls it as it is.

    Args:
      population: as of `Compiler`.
      machine_code: make it, of every kernel.
      check: compare what the programs compute.

    Attributes:
      calls: of each function for each input signature.
      largest: difference between what a program and its function gave, relative to the largest number of a tensor
        (gradients and metrics are one).
    """

    def __init__(self, population: int = 1, *, machine_code: bool = False, check: bool = False) -> None:
        super().__init__(False, population)
        self._machine_code, self._check, self._between, self.largest = machine_code, check, Between(), 0.0
        if check:
            interpreted.prepare()
        self.programs: dict[Any, Lowered] = {}
        self.calls: collections.Counter[Any] = collections.Counter()
        self.kernels: dict[str, str] = {}
        """Name -> Triton source."""
        pretend(self.kernels, run=check)

    def vjp(self, fn: Callable[..., tuple[Any, Any]]) -> Vjp:
        """Not looked at."""
        raise NotImplementedError(f"{fn.__qualname__}: runs with algo.agent.reuse_forward=true cannot be looked at.")

    def __call__(
        self, fn: Callable[..., Any], *, compilations: int | None = None, fall_back: bool = False
    ) -> Callable[..., Any]:
        """See the class."""
        as_it_is = super().__call__(fn)
        mapped = fn if self.population == 1 else torch.vmap(fn)

        def called(*args: Any) -> Any:
            leaves = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
            key = fn.__qualname__, *((x.shape, x.stride(), x.dtype) for x in leaves)
            with _disable_current_modes(), torch.no_grad():
                self.calls[key] += 1
                result = as_it_is(*args)
                if key not in self.programs:
                    program = self.programs[key] = self._lowered(mapped, inductor.unalias(args))
                    if self._check:
                        self._compare(fn.__qualname__, program, inductor.unalias(args), result)
                return result

        return called

    def _lowered(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> "Lowered":
        before = set(self.kernels)
        program = lower(fn, args)
        to_host = next((line.strip() for line in program.code.splitlines() if ON_HOST.search(line)), None)
        if to_host is not None:
            raise RuntimeError(f"{fn.__qualname__} returns to the host: {to_host}")
        if self._machine_code:
            for name in set(self.kernels) - before:
                make_machine_code(name, self.kernels[name])
        return program

    def _compare(self, name: str, program: "Lowered", args: tuple[Any, ...], expected: Any) -> None:
        tensors = [x for x in pytree.tree_leaves(args) if isinstance(x, Tensor)]
        came = program.run([*tensors, *program.constants])
        for x, y in zip(came, reader(expected)(expected), strict=True):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                raise RuntimeError(f"{name} gives {x.dtype} {list(x.shape)}, and should {y.dtype} {list(y.shape)}.")
            difference = distance(x, y)
            self.largest = max(self.largest, difference)
            if difference > TOLERANCE:
                raise RuntimeError(f"{name}, interpreted, differs by {difference:.2g} from what it should give.")

    @contextmanager
    def counting(self) -> Iterator[collections.Counter[str]]:
        """In here, operators between the programs."""
        with self._between:
            yield self._between.counts


def distance(x: Tensor, y: Tensor) -> float:
    """The largest difference, relative to the largest finite number of `y`; infinite where only equals will do."""
    finite = y.isfinite()
    if not y.is_floating_point() or not torch.equal(x[~finite].nan_to_num(0.5), y[~finite].nan_to_num(0.5)):
        return 0.0 if torch.equal(x, y) else math.inf
    a, b = x[finite].double(), y[finite].double()
    if b.numel() == 0:
        return 0.0
    return float(((a - b).abs().nan_to_num(math.inf) / b.abs().max().clamp(min=SMALLEST)).max())


class Lowered(NamedTuple):
    """A program for the GPU."""

    code: str
    """What it does, as Python."""
    run: Callable[[list[Tensor]], Any]
    constants: list[Tensor]
    """Further arguments."""
    further: list[str]
    """Operators that launch another kernel than their first, once for each."""
    networks: list[str]
    """Operators of networks, and of how many each."""

    @property
    def launches(self) -> list[str]:
        """Names of kernels, and of operators that have some."""
        return [*(x.removesuffix(".run") for x in LAUNCH.findall(self.code)), *self.further]


def pretend(kernels: dict[str, str], *, run: bool = False) -> None:
    """Inductor and Triton believe in a GPU, in this process from now on.

    Args:
      kernels: where names and sources of kernels are put.
      run: make them callable, in the interpreter.
    """
    from torch._dynamo.device_interface import CudaInterface
    from torch._inductor.async_compile import AsyncCompile
    from torch._inductor.fx_passes.joint_graph import UniformValueConstantFolder
    from torch._inductor.runtime import triton_helpers
    from torch._inductor.runtime.hints import DeviceProperties

    major, minor = divmod(CAPABILITY, 10)
    told = DeviceProperties(type="cuda", index=0, cc=CAPABILITY, major=major, **SIZE)
    named = {"name": "NVIDIA H100", "gcnArchName": "", "major": major, "minor": minor}
    properties = type("Properties", (), {**SIZE, **named, "shared_memory_per_block_optin": mlp.SHARED_BYTES})
    fold = UniformValueConstantFolder.run

    def folded(self: Any, *args: Any, **kwargs: Any) -> Any:
        with OnCpu():
            return fold(self, *args, **kwargs)

    def put(self: Any, name: str, source: str, device_str: str = "cuda") -> Any:
        kernels[name] = source
        return interpreted.Interpreted(name, source) if run else None

    settings: list[tuple[Any, str, Any]] = [
        (DeviceProperties, "create", staticmethod(lambda device: told)),
        (CudaInterface, "is_available", staticmethod(lambda: True)),
        (CudaInterface, "get_compute_capability", staticmethod(lambda *_: str(CAPABILITY))),
        (CudaInterface.Worker, "get_device_properties", staticmethod(lambda *_: properties)),
        (CudaInterface.Worker, "current_device", staticmethod(lambda: 0)),
        (torch.cuda, "get_device_properties", lambda *_: properties),
        (torch.cuda, "get_device_capability", lambda *_: (major, minor)),
        (torch.cuda, "current_device", lambda: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda _: 0),
        (triton_helpers, "set_driver_to_gpu", lambda: None),
        (fake_tensor, "CONSTANT_NUMEL_LIMIT", 0),  # numbers that are known while it is traced would be on the GPU
        (proxy_tensor, "CONSTANT_NUMEL_LIMIT", 0),
        (UniformValueConstantFolder, "run", folded),
        (AsyncCompile, "triton", put),
    ]
    for owner, name, value in settings:
        setattr(owner, name, value)
    triton, compiler = (importlib.import_module(f"triton{name}") for name in ("", ".backends.compiler"))
    target = compiler.GPUTarget("cuda", CAPABILITY, SIZE["warp_size"])
    driver = type("Driver", (), {"get_current_target": lambda _: target, "get_current_device": lambda _: 0})
    triton.runtime.driver.set_active(driver())


def lower(fn: Callable[..., Any], args: tuple[Any, ...]) -> Lowered:
    """A function of such arguments, if they were on a GPU."""
    from torch._inductor.graph import GraphLowering

    graph, fakes, _, mode = inductor.trace(fn, args, device="cuda")
    with OnCpu():
        inductor.simplify(graph)
    constants = [node for node in graph.graph.nodes if node.op == "get_attr"]
    last, values = [node for node in graph.graph.nodes if node.op == "placeholder"][-1], []
    for node in constants:  # there is no GPU to put them on, so they are arguments
        value = getattr(graph, str(node.target))
        values.append(value)
        with graph.graph.inserting_after(last):
            last = graph.graph.placeholder(f"constant_{node.name}")
        with mode:
            last.meta["val"] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda")
        fakes.append(last.meta["val"])
        node.replace_all_uses_with(last)
        graph.graph.erase_node(node)
    graph.recompile()
    calls = [node for node in graph.graph.nodes if node.target in NETWORKS]
    backward = [node for node in calls if node.target is NETWORKS[1]]
    many = [node.args[1].meta["val"].shape[-1] > mlp.MANY_INPUTS for node in backward]
    further = [f"torch.ops.{NETWORKS[1]}" for x in many for _ in range(2 if x else 1)]
    networks = [f"{node.target.overloadpacket.__name__} {_number_of(node)}" for node in calls]
    codes: list[str] = []
    GraphLowering.save_output_code = codes.append  # pyright: ignore[reportAttributeAccessIssue]
    with inductor_config.patch(force_disable_caches=True, compile_threads=1):
        compiled = inductor.lowered(graph, fakes, mode)
    code = "\n".join(code.partition("def call(")[2].partition("\nrunner = ")[0] for code in codes)
    return Lowered(code, compiled.current_callable, values, further, networks)


def _number_of(node: Any) -> int:
    """Of networks that share an operator."""
    return node.args[2] if node.target is NETWORKS[0] else len(node.args[0])


def make_machine_code(name: str, source: str) -> None:
    """Of a Triton kernel.

    Raises:
      RuntimeError: if nobody would wait for it.
    """
    began = time.perf_counter()
    interpreted.load(name, source).precompile(warm_cache_only=True)
    seconds = time.perf_counter() - began
    if seconds > PATIENCE_S:
        raise RuntimeError(f"{name} took {seconds:.0f} s to compile, more than {PATIENCE_S:.0f}.")


class Found(TypedDict):
    """What an iteration is on a GPU."""

    launches: int
    """Kernels and operators, each as often as it is called."""
    programs: dict[str, list[int]]
    """Function -> calls, and launches in each."""
    between: dict[str, int]
    """Operators outside of programs."""
    operators: dict[str, int]
    """Those in programs that are neither Triton's nor cuBLAS's."""
    kernels: int
    """Of Triton, different ones."""
    largest_difference: float
    """See `Lowering.largest`."""
    rows: int
    """Environment steps."""
    epochs: int
    layers: list[tuple[int, int]]
    observation_size: int
    state_bytes: float
    """As in anakin_worker.Details."""


def iteration(overrides: Sequence[str], *, machine_code: bool = False, check: bool = False) -> Found:
    """Looks at one iteration of a run of Anakin; of one that learns from replay the first that learns."""
    config = load(overrides)
    env = make_env(config.env)
    compiler = Lowering(config.population, machine_code=machine_code, check=check)
    anakin = Anakin(
        make_agent(config.algo, env.spec),
        env,
        num_envs=config.num_envs,
        unroll_length=config.algo.unroll_length,
        learner=replace(config.algo.learner, chunk_rows=config.algo.learner.chunk_rows or DEFAULT_CHUNK_ROWS["cuda"]),
        num_iterations=config.num_iterations,
        compiler=compiler,
        replay=config.algo.replay,
    )
    state = anakin.init(config.seed)
    for _ in range(anakin.replay.buffer.fill_iterations if anakin.replay else 0):
        state, _ = anakin.fill(state)
    compiler.calls.clear()
    replay = Replay(anakin.iterate, state, capture=False)
    with compiler.counting() as between:
        replay()
    programs: dict[str, list[int]] = {}
    operators: collections.Counter[str] = collections.Counter()
    for key, calls in compiler.calls.items():
        launches = compiler.programs[key].launches
        before, _ = programs.get(key[0], (0, 0))
        programs[key[0]] = [before + calls, len(launches)]
        for name in launches:
            if name.startswith(("torch.ops", "aten.")):
                operators[name] += calls
    in_programs = sum(calls * len(compiler.programs[key].launches) for key, calls in compiler.calls.items())
    return {
        "launches": in_programs + sum(between.values()),
        "programs": programs,
        "between": dict(between),
        "operators": dict(operators),
        "kernels": len(compiler.kernels),
        "largest_difference": compiler.largest,
        "rows": config.num_envs * config.algo.unroll_length,
        "epochs": config.algo.learner.num_epochs,
        **anakin_worker.sizes(anakin, state.carry),
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("overrides", nargs="*", help="as of torchpod train")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--compile", action="store_true", help="make machine code of every kernel")
    how.add_argument("--check", action="store_true", help="run the programs, with TRITON_INTERPRET=1")
    args = parser.parse_args()
    print(json.dumps(iteration(args.overrides, machine_code=args.compile, check=args.check)))


if __name__ == "__main__":
    main()
