import collections
import os
import shutil
import sys

import pytest
import torch
import torch.distributed as dist

from torchpod.commands import doctor as module
from torchpod.commands.doctor import Finding, doctor


def findings(check):
    return {finding.name: finding for finding in module._run(check)}


def only(check):
    (finding,) = module._run(check)
    return finding


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_whole_report_on_this_machine(here, capsys):
    assert doctor() == 0
    out = capsys.readouterr().out
    assert out.endswith("the essentials work\n") and "the check itself failed" not in out
    for name in (
        "python",
        "torch",
        "cpu",
        "torch.compile",
        "cuda",
        "gloo",
        "nccl",
        "tensorboard",
        "wandb",
        "matplotlib",
        "av",
        "envpool",
        "brax",
        "pettingzoo",
        "./runs",
    ):
        assert f" {name}" in out
    assert all(line[:5] in ("ok   ", "warn ", "no   ", "     ") for line in out.splitlines()[:-2])
    assert os.listdir(here) == []  # looking left nothing behind
    assert not dist.is_initialized()


def test_only_essentials_decide_the_exit_status(capsys, monkeypatch):
    def optional():
        yield Finding("no", "luxury", "is missing", "buy it")

    def essential():
        yield Finding("no", "air", "is missing", "open a window", True)

    monkeypatch.setattr(module, "CHECKS", (optional,))
    assert doctor() == 0
    monkeypatch.setattr(module, "CHECKS", (optional, essential))
    assert doctor() == 1
    assert capsys.readouterr().out.splitlines()[-6:] == [
        "no   luxury             is missing",
        " " * 24 + "buy it",
        "no   air                is missing",
        " " * 24 + "open a window",
        "",
        "not usable: repair air",
    ]


def test_a_check_that_crashes_does_not_hide_the_others(capsys, monkeypatch):
    def _bad():
        yield Finding("ok", "first", "fine")
        raise KeyError("oops")

    monkeypatch.setattr(module, "CHECKS", (_bad, module._python))
    assert doctor() == 0
    lines = capsys.readouterr().out.splitlines()
    assert "fine" in lines[0] and "bad" in lines[1] and "the check itself failed: 'oops'" in lines[1]
    assert any(line.startswith("ok   python") for line in lines)


def test_every_line_that_is_not_ok_says_how_to_repair_it(here):
    for check in module.CHECKS:
        if check is not module._compiler:
            assert all(finding.repair for finding in module._run(check) if finding.status != "ok")


def test_without_a_compiler_nothing_is_compiled_and_compile_false_is_named(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(torch, "compile", lambda *_, **__: pytest.fail("compiled"))
    found = findings(module._compiler)
    assert found["C++ compiler"].status == found["torch.compile"].status == "no"
    assert "no-such-compiler was not found" in found["C++ compiler"].what
    assert "compile=false" in found["C++ compiler"].repair
    assert not found["C++ compiler"].essential


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_a_compiler_that_fails_is_reported_with_its_reason(monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("CppCompileError: no header\nmore")

    monkeypatch.setattr(torch, "compile", lambda *_, **__: broken)
    found = findings(module._compiler)["torch.compile"]
    assert found.status == "no" and found.what == "failed: CppCompileError: no header"


def test_a_busy_machine_gets_advice_on_threads(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    monkeypatch.setattr(os, "getloadavg", lambda: (5.2, 0.0, 0.0), raising=False)
    assert only(module._threads).status == "warn" and only(module._threads).repair.endswith("threads=3")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.3, 0.0, 0.0))
    assert only(module._threads).status == "ok"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 16)
    assert only(module._threads).repair.endswith("threads=8")


def test_why_there_is_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in only(module._cuda).what
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert "CUDA_VISIBLE_DEVICES='' hides all of them" in only(module._cuda).repair
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(shutil, "which", lambda _: None)
    assert "nvidia-smi was not found" in only(module._cuda).repair
    monkeypatch.setattr(shutil, "which", lambda name: name)
    assert "too old for this CUDA" in only(module._cuda).repair


@pytest.mark.gpu
def test_every_cuda_device_is_tried():
    found = findings(module._cuda)
    assert len(found) == torch.cuda.device_count()
    assert found["cuda:0"].status == "ok" and "GiB" in found["cuda:0"].what


def test_gloo_that_cannot_start_is_reported(monkeypatch):
    def fail(*_, **__):
        raise RuntimeError("Unable to resolve hostname")

    monkeypatch.setattr(dist, "init_process_group", fail)
    gloo = findings(module._distributed)["gloo"]
    assert gloo.status == "no" and "Unable to resolve hostname (GLOO_SOCKET_IFNAME" in gloo.what


def test_an_optional_package_is_missing_or_broken_or_fine(monkeypatch):
    monkeypatch.setattr(module, "_OPTIONAL", {"tensorboard": ("tensorboard", "events")})
    monkeypatch.setattr(module, "_version", lambda _: None)
    missing = only(module._packages)
    assert missing.status == "no" and missing.repair == "pip install 'torchpod-rl[tensorboard]'"
    monkeypatch.setattr(module, "_version", lambda _: "1.0")
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    assert "1.0 cannot be imported" in only(module._packages).what
    monkeypatch.setitem(sys.modules, "tensorboard", module)
    assert only(module._packages) == Finding("ok", "tensorboard", "1.0, for events")


def test_what_a_package_prints_when_it_is_imported_is_not_in_the_report(tmp_path, monkeypatch, capsys):
    (tmp_path / "chatty_package.py").write_text("print('no warp here')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(module, "_OPTIONAL", {"chatty_package": ("chat", "talk")})
    monkeypatch.setattr(module, "_version", lambda _: "1.0")
    assert only(module._packages).status == "ok" and capsys.readouterr().out == ""


def test_what_it_means_that_torchrls_extension_does_not_load(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchrl._torchrl", None)
    found = only(module._torchrl_extension)
    assert found.status == "warn" and not found.essential
    assert "was built for another torch" in found.what and "prioritized replay buffers" in found.repair


def disk(gigabytes: int):
    return lambda _: collections.namedtuple("usage", "total used free")(10**12, 0, gigabytes * 10**9)


def test_a_runs_folder_that_cannot_be_written_is_essential(here, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", disk(100))
    assert only(module._runs_folder).status == "ok"
    (here / "runs").touch()
    found = only(module._runs_folder)
    assert found.status == "no" and found.essential and "run_dir=DIR" in found.repair
    (here / "runs").unlink()
    (here / "runs").mkdir()
    assert only(module._runs_folder).status == "ok" and os.listdir(here / "runs") == []


def test_a_disk_that_is_nearly_full_is_a_warning(here, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", disk(1))
    found = only(module._runs_folder)
    assert found.status == "warn" and "1 GB free" in found.what


def test_old_versions_and_missing_dependencies_are_essential(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.6.1+cu124")
    monkeypatch.setattr(module, "_version", lambda name: None if name == "gymnasium" else "1.0")
    found = findings(module._torch)
    assert found["torch"].status == "no" and found["torch"].repair == 'pip install "torch>=2.11"'
    assert found["gymnasium"].status == "no" and found["gymnasium"].essential
    monkeypatch.setattr(sys, "version_info", (3, 10, 1))
    assert only(module._python).status == "no" and only(module._python).essential


def test_folders_of_this_machine_are_cut_from_errors():
    error = ImportError(f"{os.sep}opt{os.sep}x.so: undefined symbol: {'y' * 200}\nmore")
    assert module._first_line(error) == "undefined symbol: " + "y" * 99 + "..."
    assert module._first_line(RuntimeError()) == "RuntimeError"
