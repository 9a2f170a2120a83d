"""What is written is read again bit for bit; whatever else lies there is refused, and nothing is overwritten."""

import errno
import hashlib
import json
import os
import random
import re
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import safetensors.torch
import torch
from torch import Tensor

from torchpod import checkpoint
from torchpod.checkpoint import CheckpointError
from torchpod.distributed import Ranks
from torchpod.main import main

SETTINGS = (
    "compile=false",
    "logger.console=false",
    "num_envs=4",
    "total_env_steps=64",
    "algo.unroll_length=8",
    "algo.agent.hidden=[8]",
    "evaluation.episodes=1",
    "env.max_episode_steps=9",
)


class State(NamedTuple):
    """Some of everything that a run's state holds."""

    params: dict[str, Tensor]
    flag: Tensor
    nested: tuple[Tensor, dict[str, Tensor]]


def make_state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, generator=generator)
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    return State(
        {"weight": weight, "view": weight.T[1:]},
        torch.tensor(True),
        (torch.tensor(2**62 + 1), {"odd": odd, "bfloat": weight.bfloat16(), "empty": torch.zeros(0, 2)}),
    )


def save(run_dir: Path, iteration: int = 1, *, state: State | None = None, keep: int = 3) -> Path:
    state = state or make_state()
    return checkpoint.save(run_dir, iteration, state.params, state, {"wall_s": 0.1}, ranks=Ranks(), keep=keep)


def load(folder: Path) -> tuple[dict[str, Tensor], State, dict]:
    return checkpoint.load(folder, make_state(seed=1), ranks=Ranks())


def bits(x: Tensor) -> bytes:
    return x.contiguous().flatten().view(torch.uint8).numpy().tobytes() if x.numel() else b""


def digests(folder: Path) -> dict[str, str]:
    """Every file below a folder, hidden ones too."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run with two checkpoints, for copies."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", *SETTINGS, f"run_dir={folder}", "checkpoint.interval_s=0"]) == 0
    return folder


@pytest.fixture
def run_dir(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_what_is_written_is_read_bit_for_bit(tmp_path: Path):
    folder = save(tmp_path, 7)
    weights, state, meta = load(folder)
    assert isinstance(state, State)
    for a, b in zip(torch.utils._pytree.tree_leaves(state), torch.utils._pytree.tree_leaves(make_state()), strict=True):
        assert (a.dtype, a.shape, bits(a)) == (b.dtype, b.shape, bits(b))
    assert weights.keys() == {"weight", "view"} and bits(weights["view"]) == bits(make_state().params["view"])
    assert (meta["iteration"], meta["world_size"], meta["wall_s"]) == (7, 1, 0.1)
    assert checkpoint.read_meta(folder) == meta
    assert checkpoint.load_weights(folder).keys() == weights.keys()


def test_a_view_is_saved_without_the_memory_behind_it(tmp_path: Path):
    state = make_state()._replace(params={"weight": torch.zeros(1_000_000)[:3]})
    folder = save(tmp_path, state=state)
    assert sum(path.stat().st_size for path in folder.iterdir()) < 20_000


def test_weights_are_plain_safetensors(tmp_path: Path):
    weights = safetensors.torch.load_file(save(tmp_path) / "weights.safetensors")
    assert torch.equal(weights["weight"], make_state().params["weight"])


def test_policies_also_lie_in_files_of_their_own(tmp_path: Path):
    own = {"net.weight": torch.randn(3, 4), "scale": torch.tensor(2.0)}
    others = {"policies.weight": torch.ones(2), "net.policies.a.weight": torch.ones(1), "weight": torch.zeros(1)}
    params = {f"policies.{policy}.{name}": x.clone() for policy in "ab" for name, x in own.items()}
    folder = save(tmp_path, state=make_state()._replace(params=params | others))
    files = checkpoint.policies_of(folder)
    assert files == {policy: folder / f"policy-{policy}.safetensors" for policy in "ab"}
    copy = shutil.copy(files["a"], tmp_path / "a.safetensors")
    for file in (files["a"], files["b"], copy):
        found = checkpoint.load_file(file)
        assert found.keys() == own.keys() and all(bits(x) == bits(own[name]) for name, x in found.items())
        assert checkpoint.layers_of(Path(file)) == {}  # nothing was told of them
    assert checkpoint.load_weights(folder).keys() == params.keys() | others.keys()
    assert checkpoint.policies_of(save(tmp_path, 2)) == {}
    files["b"].write_bytes(files["a"].read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="policy-b.safetensors is missing or damaged"):
        checkpoint.load_file(files["b"])
    # Who goes on has the same in the weights.
    weights, *_ = checkpoint.load(folder, make_state()._replace(params=params | others), ranks=Ranks())
    assert weights.keys() == params.keys() | others.keys()


def test_only_the_newest_are_kept(tmp_path: Path):
    for iteration in (1, 2, 30, 100, 101):
        save(tmp_path, iteration, keep=2)
    assert [path.name for path in checkpoint.all_of(tmp_path)] == [f"{100:010d}", f"{101:010d}"]
    assert checkpoint.latest(tmp_path).name == f"{101:010d}"
    save(tmp_path, 102, keep=1)
    assert [path.name for path in checkpoint.all_of(tmp_path)] == [f"{102:010d}"]


def test_what_a_killed_process_left_is_ignored_and_removed(tmp_path: Path):
    save(tmp_path, 1)
    partial = tmp_path / "checkpoints" / f".partial-{2:010d}"
    partial.mkdir()
    (partial / "state-0.pt").write_bytes(b"half")
    assert checkpoint.latest(tmp_path).name == f"{1:010d}"
    save(tmp_path, 3)
    assert not partial.exists()
    assert len(checkpoint.all_of(tmp_path)) == 2


@pytest.mark.parametrize("name", ["state-0.pt", "weights.safetensors", "meta.json"])
@pytest.mark.parametrize("damage", ["truncated", "flipped", "empty", "foreign", "missing", "folder"])
def test_a_damaged_file_is_named_and_nothing_is_overwritten(
    name: str, damage: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    path = checkpoint.latest(run_dir) / name
    data = path.read_bytes()
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed={seed}")
    draw = random.Random(seed)
    if damage == "truncated":
        path.write_bytes(data[: draw.randrange(1, len(data))])
    elif damage == "flipped":
        at = draw.randrange(len(data))
        path.write_bytes(data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :])
    elif damage == "empty":
        path.write_bytes(b"")
    elif damage == "foreign":
        path.write_bytes(Path(__file__).read_bytes())
    else:
        path.unlink()
        if damage == "folder":
            path.mkdir()
    before = digests(run_dir)
    capsys.readouterr()
    assert main(["train", f"resume={run_dir}", "total_env_steps=128"]) == 1
    out, error = capsys.readouterr()
    expected = f"{path} is missing or damaged; move the folder {path.parent.name} away to go on from the checkpoint"
    # of meta.json, one flipped bit may hit the number of the format or turn it into another
    allowed = "has checkpoint format" if name == "meta.json" and damage == "flipped" else expected
    assert error.startswith("torchpod: error: ") and error.count("\n") == 1
    assert expected in error or allowed in error
    assert digests(run_dir) == before
    assert main(["eval", str(run_dir)]) == (0 if name == "state-0.pt" else 1)
    assert digests(run_dir) == before
    shutil.rmtree(path.parent)  # as the message says
    assert main(["train", f"resume={run_dir}"]) == 0


def test_every_flipped_byte_of_the_meta_data_is_noticed(tmp_path: Path):
    folder = save(tmp_path)
    path = folder / "meta.json"
    data = path.read_bytes()
    for at in range(len(data)):
        path.write_bytes(data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :])
        with pytest.raises(CheckpointError):
            load(folder)


def change_format(folder: Path) -> None:
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps(meta | {"format": checkpoint.FORMAT + 1}))


def no_checkpoints(folder: Path) -> None:
    shutil.rmtree(folder.parent)


def foreign_config(folder: Path) -> None:
    (folder.parents[1] / "config.yaml").write_text("learning_rate: 3\n")


def other_shapes(folder: Path) -> None:
    path = folder.parents[1] / "config.yaml"
    path.write_text(path.read_text().replace("num_envs: 4", "num_envs: 8"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (change_format, "has checkpoint format 3, this version reads 2."),
        (no_checkpoints, "is a run that has no checkpoint yet; wait for its first one if it is running, or"),
        (foreign_config, "is no run folder: config.yaml is not ours (learning_rate is no setting"),
        (other_shapes, "does not fit this run: .actor_keys is int64 [4, 3] there and int64 [8, 3] here; resume with"),
    ],
)
def test_a_folder_that_cannot_be_resumed_says_why_and_stays_as_it_is(
    change: Callable[[Path], None], message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    change(checkpoint.latest(run_dir))
    before = digests(run_dir)
    capsys.readouterr()
    assert main(["train", f"resume={run_dir}", "total_env_steps=128"]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert digests(run_dir) == before


def test_a_run_without_a_checkpoint_starts_again_as_the_refusal_says(run_dir: Path, capsys: pytest.CaptureFixture[str]):
    shutil.rmtree(run_dir / "checkpoints")
    assert main(["train", f"resume={run_dir}"]) == 1
    advice = re.findall(r"start it again with (.*)\.$", capsys.readouterr().err)[0].split()
    assert advice == [f"run_dir={run_dir}", "resume=auto"]
    assert main(["train", *SETTINGS, *advice]) == 0
    assert checkpoint.all_of(run_dir)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("num_envs=8", "num_envs=8 cannot change: "),
        ("algo.agent.hidden=[9]", "algo.agent.hidden=[9] cannot change: "),
        ("env=catch", "env.name=catch cannot change: "),
        ("algo=a2c", "algo.name=a2c cannot change: "),
        ("seed=1", "seed=1 cannot change: "),
        ("+members.discount=[0.5]", "members.discount=[0.5] cannot change: "),
        ("+members.policies.runner.clip=[0.5]", "members.policies.runner.clip=[0.5] cannot change: "),
        ("experiment=pendulum", "experiment_name=pendulum cannot change: "),
    ],
)
def test_a_setting_that_would_make_it_another_run_is_refused_on_resume(
    override: str, message: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
):
    before = digests(run_dir)
    assert main(["train", f"resume={run_dir}", override]) == 1
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert digests(run_dir) == before


def test_another_number_of_ranks_is_refused(tmp_path: Path):
    folder = save(tmp_path)
    before = digests(tmp_path)
    with pytest.raises(CheckpointError, match=r"was written by 1 rank\(s\), this run has 2; start as many"):
        checkpoint.load(folder, make_state(), ranks=Ranks(1, 2))
    assert digests(tmp_path) == before


def test_a_state_of_other_names_shapes_or_dtypes_is_refused(tmp_path: Path):
    folder, state = save(tmp_path), make_state()
    for like, message in (
        (state._replace(flag=torch.tensor(1)), r"\.flag is bool \[\] there and int64 \[\] here"),
        (state._replace(flag=torch.tensor([True])), r"\.flag is bool \[\] there and bool \[1\] here"),
        (state._replace(params={"weight": state.params["weight"]}), "view'.* there and missing here"),
        (state._replace(nested=(*state.nested, torch.zeros(1))), r"nested\[2\] is missing there"),
    ):
        with pytest.raises(CheckpointError, match=message):
            checkpoint.load(folder, like, ranks=Ranks())


def test_pickled_code_is_never_run(tmp_path: Path):
    class Evil:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "owned",))

    folder = save(tmp_path)
    torch.save({".flag": Evil()}, folder / "state-0.pt")
    with pytest.raises(CheckpointError, match="state-0.pt is missing or damaged"):
        load(folder)
    assert not (tmp_path / "owned").exists()


FILES = ["state-0.pt", "weights.safetensors", "policy-a.safetensors", "meta.json"]


@pytest.mark.parametrize("name", FILES)
def test_a_full_disk_leaves_the_older_checkpoints_and_no_rest(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    state = make_state()._replace(params={"policies.a.weight": torch.ones(3)})
    save(tmp_path, 1, state=state)
    before = digests(tmp_path)
    fsync, written = os.fsync, []

    def full(handle: int) -> None:
        written.append(handle)
        if len(written) > FILES.index(name):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="cannot be written") as error:
        patch.setattr(os, "fsync", full)
        save(tmp_path, 2, state=state)
    assert str(error.value) == (
        f"{tmp_path}/checkpoints/0000000002 cannot be written (No space left on device); free some space, or choose "
        "another folder with run_dir=DIR."
    )
    assert digests(tmp_path) == before
    assert save(tmp_path, 2).is_dir()


def test_a_disk_that_is_full_while_tensors_are_written_is_named_too(tmp_path: Path):
    """By torch's own writer, whose error is about positions in a file."""
    state = make_state()._replace(params={"policies.a.weight": torch.ones(100_000)})
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"0000000001 cannot be written \(File too large\); free some space, or"):
            save(tmp_path, 1, state=state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert save(tmp_path, 1, state=state).is_dir()
