"""Refuse to build where symbolic links became text files; all metadata is in pyproject.toml."""

from pathlib import Path

from setuptools import setup

LINKED = ("envs", "algos", "configs", "bench")

missing = [f"torchpod/{name}" for name in LINKED if not (Path(__file__).parent / "torchpod" / name).is_dir()]
if missing:
    # Without this, setuptools would silently build a wheel that lacks these packages.
    raise SystemExit(
        f"torchpod cannot be built here: {', '.join(missing)} should be a symbolic link to the folder of"
        " the same name but is not a directory; check out again with `git clone -c core.symlinks=true`."
    )

setup()
