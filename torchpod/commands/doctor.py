"""What works on this machine, and why not: `torchpod doctor`."""

import contextlib
import importlib
import importlib.metadata
import importlib.util
import io
import os
import platform
import shutil
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist
from rich.console import Console

Status = Literal["ok", "warn", "no"]

_MIN_PYTHON, _MIN_TORCH = (3, 11), (2, 11)
_MIN_FREE_GB = 5.0
_NEEDED = ("tensordict", "torchrl", "hydra-core", "gymnasium", "numpy", "safetensors")
_OPTIONAL = {
    "tensorboard": ("tensorboard", "logger.tensorboard=true"),
    "wandb": ("wandb", "logger.wandb=true"),
    "matplotlib": ("plot", "torchpod plot"),
    "av": ("video", "torchpod eval RUN --video FILE.mp4"),
    "envpool": ("envpool", "env=envpool"),
    "brax": ("brax", "env=brax"),
    "pettingzoo": ("pettingzoo", "env=pettingzoo"),
}
"""Distribution to (extra of torchpod-rl, what needs it)."""


class Finding(NamedTuple):
    """One line of the report."""

    status: Status
    name: str
    what: str
    repair: str = ""
    essential: bool = False
    """Whether nothing works while this is "no"."""


def doctor() -> int:
    """Prints what works on this machine, what does not, and how to repair it.

    Returns:
      0 if the essentials work - training on the CPU, at least with compile=false -, else 1.
    """
    console = Console(file=sys.stdout)
    colours = {"ok": "green", "warn": "yellow", "no": "red"}
    findings = []
    for check in CHECKS:
        for finding in _run(check):
            findings.append(finding)
            console.print(f"{finding.status:<4}", style=colours[finding.status], end=" ")
            console.print(f"{finding.name:<18} {finding.what}", soft_wrap=True, markup=False, highlight=False)
            if finding.repair:
                console.print(f"{'':24}{finding.repair}", soft_wrap=True, markup=False, highlight=False, style="dim")
    broken = [finding.name for finding in findings if finding.status == "no" and finding.essential]
    print(f"\nnot usable: repair {', '.join(broken)}" if broken else "\nthe essentials work")
    return 1 if broken else 0


def _run(check: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of a check; a crash of it is one more finding, for the other checks still have to run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield from check()
    except Exception as error:
        yield Finding("no", check.__name__.strip("_"), f"the check itself failed: {_first_line(error)}", "report this")


def _python() -> Iterator[Finding]:
    good = sys.version_info[:2] >= _MIN_PYTHON
    version = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    need = ".".join(map(str, _MIN_PYTHON))
    yield Finding("ok" if good else "no", "python", version, "" if good else f"install Python {need} or newer", True)


def _torch() -> Iterator[Finding]:
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    good = version >= _MIN_TORCH
    what = f"{torch.__version__}, CPU capability {torch.backends.cpu.get_cpu_capability()}"
    need = ".".join(map(str, _MIN_TORCH))
    yield Finding("ok" if good else "no", "torch", what, "" if good else f'pip install "torch>={need}"', True)
    for name in _NEEDED:
        version = _version(name)
        if version is None:
            yield Finding("no", name, "is not installed", "pip install torchpod-rl", True)
        else:
            yield Finding("ok", name, version, essential=True)


def _threads() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = torch.get_num_threads()
    what = f"{cores} cores for this process, torch uses {threads} threads"
    if hasattr(os, "getloadavg"):
        load = os.getloadavg()[0]
        what += f", load average {load:.1f}"
        free = max(1, cores - round(load))
        if load > 0.5 * cores and threads > free:
            advice = f"other work keeps cores busy, and threads that wait for one are many times slower: threads={free}"
            yield Finding("warn", "cpu", what, advice)
            return
    if threads > cores:
        yield Finding("warn", "cpu", what, f"more threads than cores are many times slower: threads={cores}")
        return
    yield Finding("ok", "cpu", what)


def _compiler() -> Iterator[Finding]:
    name = os.environ.get("CXX", "g++")
    path = shutil.which(name)
    if path is None:
        repair = "install g++ (Debian, Ubuntu: apt-get install g++), or run with compile=false, which is slower"
        why = f"{name} was not found" + (", which is what CXX names" if "CXX" in os.environ else "")
        yield Finding("no", "C++ compiler", why, repair)
        yield Finding("no", "torch.compile", "not tried on the CPU, without a C++ compiler", "see the line above")
        return
    yield Finding("ok", "C++ compiler", path)
    # A size that was hardly compiled before, or the cache would answer in place of the compiler.
    x = torch.rand(1000 + time.time_ns() % 1_000_000)
    began = time.perf_counter()
    try:
        y = torch.compile(_compiled, fullgraph=True, dynamic=False)(x)
    except Exception as error:
        repair = "run with compile=false; TORCH_LOGS=+inductor shows what the compiler said"
        yield Finding("no", "torch.compile", f"failed: {_first_line(error)}", repair)
        return
    seconds = time.perf_counter() - began
    if torch.allclose(y, _compiled(x), rtol=1e-4):
        yield Finding("ok", "torch.compile", f"works on the CPU; a tiny function took {seconds:.1f} s")
    else:
        yield Finding("no", "torch.compile", "gives wrong numbers on the CPU", "run with compile=false")


def _compiled(x: torch.Tensor) -> torch.Tensor:
    return (x.tanh() + 1.0).sum()


def _cuda() -> Iterator[Finding]:
    if torch.version.cuda is None and torch.version.hip is None:
        repair = "to use a GPU, install a CUDA build of torch: pytorch.org/get-started"
        yield Finding("no", "cuda", f"torch {torch.__version__} is built without CUDA; device=cpu works", repair)
        return
    if not torch.cuda.is_available():
        hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
        why = f"torch is built for CUDA {torch.version.cuda}, but sees no device; device=cpu works"
        if hidden is not None and hidden.strip() in ("", "-1"):
            yield Finding("no", "cuda", why, f"CUDA_VISIBLE_DEVICES={hidden!r} hides all of them: unset it")
        elif shutil.which("nvidia-smi") is None:
            yield Finding("no", "cuda", why, "nvidia-smi was not found: install the driver, if there is a GPU")
        else:
            yield Finding("no", "cuda", why, "nvidia-smi shows the driver's version: is it too old for this CUDA?")
        return
    for index in range(torch.cuda.device_count()):
        device = torch.cuda.get_device_properties(index)
        what = f"{device.name}, {device.total_memory / 2**30:.0f} GiB, compute capability {device.major}.{device.minor}"
        try:
            good = torch.ones(64, device=f"cuda:{index}").sum().item() == 64.0
            problem = "" if good else "a sum on it is wrong"
        except RuntimeError as error:
            problem = _first_line(error)
        if problem:
            yield Finding("no", f"cuda:{index}", f"{what}: {problem}", "see nvidia-smi, or choose another device")
        else:
            yield Finding("ok", f"cuda:{index}", f"{what}, CUDA {torch.version.cuda}")


def _distributed() -> Iterator[Finding]:
    if not dist.is_available():
        yield Finding("no", "distributed", "torch is built without torch.distributed", "one rank works")
        return
    problem = _gloo_problem() if dist.is_gloo_available() else "torch is built without it"
    if problem:
        yield Finding("no", "gloo", f"several ranks on CPUs cannot talk: {problem}", "one rank works")
    else:
        yield Finding("ok", "gloo", "several ranks on CPUs: torchrun --nproc-per-node=K -m torchpod train ...")
    if not dist.is_nccl_available():
        yield Finding("no", "nccl", "torch is built without it; it connects GPUs", "only needed for several GPUs")
    elif torch.cuda.device_count() < 2:
        yield Finding("ok", "nccl", f"built in; {torch.cuda.device_count()} GPU here, so nothing to connect")
    else:
        yield Finding("ok", "nccl", f"several ranks on the {torch.cuda.device_count()} GPUs here")


def _gloo_problem() -> str:
    """Why a group of this process alone cannot add a number; empty if it can."""
    if dist.is_initialized():
        return ""
    try:
        store = dist.HashStore()  # pyright: ignore[reportPrivateImportUsage] - public in torch's documentation
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
        try:
            dist.all_reduce(torch.ones(1))
        finally:
            dist.destroy_process_group()
    except RuntimeError as error:
        return f"{_first_line(error)} (GLOO_SOCKET_IFNAME names the network interface, e.g. lo)"
    return ""


def _packages() -> Iterator[Finding]:
    for name, (extra, use) in _OPTIONAL.items():
        version = _version(name)
        if version is None:
            yield Finding("no", name, f"is not installed; optional, for {use}", f"pip install 'torchpod-rl[{extra}]'")
            continue
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # Brax says which packages it would like to have
                importlib.import_module(name)
        except Exception as error:
            repair = f"pip install --force-reinstall 'torchpod-rl[{extra}]'"
            yield Finding("no", name, f"{version} cannot be imported: {_first_line(error)}", repair)
        else:
            yield Finding("ok", name, f"{version}, for {use}")


def _torchrl_extension() -> Iterator[Finding]:
    version = _version("torchrl")
    if version is None:
        return
    try:
        importlib.import_module("torchrl._torchrl")
    except ImportError as error:
        yield Finding(
            "warn",
            "torchrl C++",
            f"torchrl {version} was built for another torch than {torch.__version__} ({_first_line(error, limit=40)})",
            "torchpod does not need it, and torchrl's losses work; only torchrl's own prioritized replay buffers do "
            "not: for those, install versions of torch and torchrl that belong together",
        )
    else:
        yield Finding("ok", "torchrl C++", "loads; torchpod does not need it")


def _runs_folder() -> Iterator[Finding]:
    runs = Path("runs")
    folder = runs if runs.exists() else Path(".")  # Looking must not make a folder.
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            file.write(b"x")
            file.flush()
    except OSError as error:
        repair = "go to a folder that you may write, or choose one with run_dir=DIR"
        yield Finding("no", "./runs", f"cannot be written: {error.strerror}", repair, True)
        return
    free = shutil.disk_usage(folder).free / 1e9
    what = f"can be written, {free:.0f} GB free"
    if free < _MIN_FREE_GB:
        yield Finding("warn", "./runs", what, "checkpoints may not fit: free some space, or choose run_dir=DIR", True)
    else:
        yield Finding("ok", "./runs", what, essential=True)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def _first_line(error: BaseException, limit: int = 120) -> str:
    """The first line of an error, without the folders of this machine that it may begin with."""
    lines = str(error).strip().splitlines()
    line = lines[0] if lines else type(error).__name__
    head, separator, tail = line.partition(": ")
    line = tail if separator and os.sep in head else line
    return line if len(line) <= limit else line[: limit - 3] + "..."


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    _python,
    _torch,
    _threads,
    _compiler,
    _cuda,
    _distributed,
    _packages,
    _torchrl_extension,
    _runs_folder,
)
