"""On what a run or a benchmark ran: the machine, the versions, the commit."""

import contextlib
import importlib.metadata
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import torch


def hardware(device: torch.device) -> str:
    """A short name of what the run ran on."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{cpu()['model name']}, {os.cpu_count()} cores"


def cpu() -> dict[str, str]:
    """`model name`, `cpu family` and `model` of this CPU, as /proc/cpuinfo has them; elsewhere at least a name."""
    found = {"model name": platform.processor() or platform.machine(), "cpu family": "", "model": ""}
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        found.update(re.findall(r"^(model name|cpu family|model)\s*:\s*(.*)$", text, re.MULTILINE))
    return found


def versions() -> dict[str, str]:
    """Versions that decide what the numbers are."""
    names = {"torchpod": "torchpod-rl", "torch": "torch", "torchrl": "torchrl", "tensordict": "tensordict"}
    found = {"python": platform.python_version()}
    for name, distribution in names.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(distribution)
    return found


def commit() -> str | None:
    """The commit of the source tree, with `+changes` if it is not clean; None outside a checkout or without git."""
    root = Path(__file__).resolve().parent.parent
    if not (root / ".git").exists() or shutil.which("git") is None:
        return None

    def git(*command: str) -> str:
        return subprocess.run(["git", "-C", root, *command], capture_output=True, text=True, check=False).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+changes" if git("status", "--porcelain", "-uno") else "") or None
