"""What a user installs: wheel and sdist built from a copy of this tree, imported from somewhere else."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LINKED = ("envs", "algos", "configs", "bench")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "torchpod", *LINKED)


def copy_tree(to: Path) -> Path:
    """Copy what the build reads, links as links, so that build/ and *.egg-info land elsewhere."""
    to.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def build(tree: Path, out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(tree)]
    return subprocess.run(command, capture_output=True, text=True, cwd=out.parent)


def package_files(suffix: str) -> set[str]:
    """Every file of this tree with that suffix that belongs to the package, as its path in a wheel."""
    folders = {"torchpod": ROOT / "torchpod", **{f"torchpod/{name}": ROOT / name for name in LINKED}}
    return {
        f"{prefix}/{path.relative_to(folder).as_posix()}"
        for prefix, folder in folders.items()
        for path in folder.rglob(f"*{suffix}")  # does not follow links
        if not str(path).startswith((str(ROOT / "bench/peers"), str(ROOT / "bench/results")))
    }


@pytest.fixture(scope="module")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """An sdist, and the wheel built from that sdist."""
    folder = tmp_path_factory.mktemp("build")
    done = build(copy_tree(folder / "tree"), folder / "dist")
    assert done.returncode == 0, done.stdout + done.stderr
    (sdist,), (wheel,) = (folder / "dist").glob("*.tar.gz"), (folder / "dist").glob("*.whl")
    return sdist, wheel


def test_wheel_holds_every_module_and_config(artefacts: tuple[Path, Path]) -> None:
    names = set(zipfile.ZipFile(artefacts[1]).namelist())
    assert {n for n in names if n.endswith(".py")} == package_files(".py")
    assert {n for n in names if n.endswith(".yaml")} == package_files(".yaml")
    assert {n for n in names if n.endswith(".csv")} == package_files(".csv")
    assert {n for n in names if n.endswith(".cpp")} == package_files(".cpp")
    assert {n for n in names if n.endswith(".h")} == package_files(".h")
    assert "torchpod/envs/multi_agent/data/README.md" in names  # whose data it is, and on what terms
    assert "torchpod/bench/report.md" in names
    assert "torchpod/py.typed" in names
    assert {n.split("/")[0] for n in names} == {"torchpod", "torchpod_rl-0.1.0.dist-info"}


def test_sdist_holds_files_where_the_tree_has_links(artefacts: tuple[Path, Path]) -> None:
    with tarfile.open(artefacts[0]) as tar:
        files = {m.name.split("/", 1)[1] for m in tar.getmembers() if m.isreg()}
        assert not [m.name for m in tar.getmembers() if m.issym() or m.islnk()]
    assert package_files(".py") | package_files(".yaml") | package_files(".csv") <= files


def test_wheel_works_from_another_folder(artefacts: tuple[Path, Path], tmp_path: Path) -> None:
    """Install the wheel into an empty folder and import it with the dependencies of this environment only.

    -S leaves *.pth files unread, so that the editable installation of this tree is out of reach; -P leaves
    out the current folder.
    """
    target = tmp_path / "installed"
    pip_install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip_install, "--target", str(target), str(artefacts[1])], check=True)
    program = f"""
import importlib
for name in {LINKED!r}:
    module = importlib.import_module("torchpod." + name)
    assert module.__file__.startswith({str(target)!r}), module.__file__
from importlib.resources import files
assert list(files("torchpod.configs").rglob("*.yaml")) or not {bool(package_files(".yaml"))}
from importlib.metadata import entry_points
(script,) = entry_points(group="console_scripts", name="torchpod")
assert callable(script.load())
"""
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PYTEST"))}
    environ["PYTHONPATH"] = os.pathsep.join([str(target), sysconfig.get_path("purelib")])
    command = [sys.executable, "-S", "-P", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stderr


def test_checkout_without_links_is_refused_in_one_sentence(tmp_path: Path) -> None:
    """Such a tree (git's core.symlinks=false) has text files that hold the links' targets."""
    tree = copy_tree(tmp_path / "tree")
    for name in LINKED:
        link = tree / "torchpod" / name
        target = os.readlink(link)
        link.unlink()
        link.write_text(target)
    done = build(tree, tmp_path / "dist", "--wheel")
    assert done.returncode != 0
    assert "torchpod/envs, torchpod/algos, torchpod/configs, torchpod/bench should be a symbolic link" in (
        done.stdout + done.stderr
    )
    assert not list((tmp_path / "dist").glob("*.whl"))


@pytest.mark.parametrize("name", LINKED)
def test_folder_is_importable_under_torchpod_alone(name: str) -> None:
    command = [sys.executable, "-c", f"import {name}"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert f"ImportError: import torchpod.{name}, not {name}" in done.stderr


def test_make_says_that_there_is_no_compiler() -> None:
    """With everything else in place, so that nothing is set up here."""
    command = ["make", "setup", f"READY={ROOT / 'Makefile'}", "CXX=no-such-compiler"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stderr.startswith("torchpod: no C++ compiler (no-such-compiler) found")
    assert "install g++, or pass compile=false" in result.stderr and result.stderr.count("\n") == 1
