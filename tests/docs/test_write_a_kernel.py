"""docs/write-a-kernel.md: its blocks run as a reader would run them, and play by the same rules written as tensors."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import variables_of
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.graph import Replay
from torchpod.makers import make_agent, make_env
from torchpod.rollout import make_step, start, unroll
from torchpod.testing import check_env
from torchpod.trees import stack

pytestmark = pytest.mark.slow  # its C++ takes half a minute to compile
ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "write-a-kernel.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
COMMANDS = re.findall(r"^```bash\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with the files of the page."""
    path = tmp_path_factory.mktemp("reader")
    for block in (BLOCKS[0], BLOCKS[2]):
        name = re.match(r"# (\w+\.py)\n", block)
        assert name is not None
        (path / name[1]).write_text(block)
    return path


@pytest.fixture
def page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The first file, imported."""
    monkeypatch.syspath_prepend(folder)
    import my_kernel_env  # pyright: ignore[reportMissingImports]

    return my_kernel_env


def by_rules(places, action, awake, size):
    """The same step as tensor operations, a loop over hunters."""
    moves = torch.tensor([[0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]], dtype=torch.int32, device=places.device)
    runner = (places[:, 0] + moves[action]).clamp(0, size - 1)
    hunters = places[:, 1:].clone()
    for i in range(hunters.shape[1]):
        gap = runner - hunters[:, i]
        vertical = gap[:, 0].abs() >= gap[:, 1].abs()
        to = hunters[:, i] + torch.where(torch.stack([vertical, ~vertical], -1), gap.sign(), 0)
        others = torch.cat([hunters[:, :i], hunters[:, i + 1 :]], 1)
        goes = awake[:, i] & ~(others == to[:, None]).all(-1).any(-1)
        hunters[:, i] = torch.where(goes[:, None], to, hunters[:, i])
    return torch.cat([runner[:, None], hunters], 1), (hunters == runner[:, None]).all(-1).any(-1)


def random_games(seed, num_games, num_hunters, size, device="cpu"):
    generator = torch.Generator().manual_seed(seed)
    places = torch.randint(size, (num_games, 1 + num_hunters, 2), generator=generator, dtype=torch.int32)
    action = torch.randint(5, (num_games,), generator=generator)
    awake = torch.rand(num_games, num_hunters, generator=generator) < 0.8
    return places.to(device), action.to(device), awake.to(device), size


SIZES = [(64, 6, 10), (7, 1, 2), (1, 12, 4), (33, 3, 25)]


def require_equal(actual, expected):
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_the_kernel_plays_by_the_rules(page, seed, sizes):
    for i in range(20):
        games = random_games(seed + i, *sizes)
        require_equal(page.hunt(*games), by_rules(*games))
        places, *others = games
        apart = torch.stack([places, places], -1)[..., 0]  # other strides
        require_equal(page.hunt(apart, *others), by_rules(*games))


def test_a_population_of_games_equals_its_members(page, seed):
    members = [random_games(seed + i, 8, 6, 10)[:3] for i in range(3)]
    together = torch.vmap(lambda *games: page.hunt(*games, 10))(*(torch.stack(x) for x in zip(*members, strict=True)))
    for i, games in enumerate(members):
        require_equal((x[i] for x in together), by_rules(*games, 10))
    places, action, awake = members[0]  # what all members share has no axis
    shared = torch.vmap(lambda a: page.hunt(places, a, awake, 10))(torch.stack([action, action]))
    require_equal((x[1] for x in shared), by_rules(places, action, awake, 10))


def test_the_environment_passes_the_check_of_the_page(page):
    exec(compile(BLOCKS[1], "write-a-kernel.md", "exec"), {"__name__": "__main__"})


@pytest.mark.parametrize("population", [1, 2])
def test_unrolls_are_equal_compiled_or_not_and_with_the_rules_in_place_of_the_kernel(
    page, folder, seed, population, monkeypatch
):
    env = make_env(f"{folder / 'my_kernel_env.py'}:MyEnv")
    module = sys.modules[type(env).__module__]
    eager, compiled = (play(env, seed, compiled, population) for compiled in (False, True))
    monkeypatch.setattr(module, "hunt", by_rules)
    for other in (compiled, play(env, seed, False, population)):
        require_close(other, eager)
    assert bool((eager[1].discount == 0).any()) and bool((eager[1].reward == 1).any())


def play(env, seed, compiled, population=1, num_envs=16, length=40):
    """Unrolls a new agent: the last state of the game, and all timesteps."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        agent = make_agent(load(["algo.agent.hidden=[8]"]).algo, env.spec)()
    keys = random.split(random.key(seed), 2 * population * num_envs).reshape(2, population, num_envs, 3)
    variables = dict(variables_of(agent)[0] | variables_of(agent)[1])
    members = [(variables, start(agent, env, keys[0, p]), *keys[:, p]) for p in range(population)]
    arguments = members[0] if population == 1 else stack(members)
    step = Compiler(compiled, population)(make_step(agent, env))
    carry, trajectory = unroll(step, *arguments, length=length, time_axis=int(population > 1))
    return carry.env_state[0], trajectory.timestep


def require_close(actual, expected):
    for a, b in zip(pytree.tree_leaves(actual), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(a, b)


def reader(folder, *words, **environment):
    """Runs Python as a reader would."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environment}
    result = subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("more", [pytest.param("compile=true", marks=pytest.mark.slow), "population=2"])
def test_the_command_of_the_page_trains(page, folder, more):
    words = shlex.split(COMMANDS[0])
    assert words[:2] == ["torchpod", "train"]
    small = ["num_envs=8", "total_env_steps=512", "algo.unroll_length=16", "evaluation.episodes=2", "compile=false"]
    small += ["algo.agent.hidden=[8]", "logger.console=false"]
    assert reader(folder, "-m", "torchpod", *words[1:], *small, more)


def test_the_triton_kernel_plays_by_the_rules_in_unrolls_too(page, folder, seed):
    """Interpreted, on the CPU: in a process of its own, for Triton reads TRITON_INTERPRET when it is imported."""
    apart = Path(sys.prefix) / "triton"  # where `make test` puts it
    if importlib.util.find_spec("triton") is None and not apart.exists():
        pytest.skip(f"there is no Triton; pip install --no-deps --target {apart} triton")
    script = (
        "import sys\n"
        f"sys.path.append({str(apart)!r})\n"
        "from tests.docs.test_write_a_kernel import *\n"
        "from my_triton_kernel import hunt_triton\n"
        "for i, (num_games, *sizes) in enumerate(SIZES):\n"
        f"    games = random_games({seed} + i, min(num_games, 8), *sizes)  # a game takes a second\n"
        "    require_equal(hunt_triton(*games), by_rules(*games))\n"
        "import my_kernel_env\n"
        "calls = []\n"
        "my_kernel_env.hunt.register_kernel('cpu')(lambda *games: calls.append(games) or hunt_triton(*games))\n"
        "env = my_kernel_env.MyEnv(size=4, num_hunters=3)\n"
        f"made = [play(env, {seed}, compiled, num_envs=2, length=5) for compiled in (False, True)]\n"
        "assert len(calls) >= 10\n"
        "my_kernel_env.hunt = by_rules\n"
        "for played in made:\n"
        f"    require_close(played, play(env, {seed}, False, num_envs=2, length=5))\n"
        "print('equal')\n"
    )
    assert reader(folder, "-c", script, TRITON_INTERPRET="1").endswith("equal\n")


@pytest.mark.gpu
def test_the_triton_kernel_of_the_page_plays_by_the_rules_compiled_and_captured(page, seed):
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    importlib.import_module("my_triton_kernel")  # the page's, which registers itself

    for i, sizes in enumerate(SIZES):
        games = random_games(seed + i, *sizes, device="cuda")
        require_equal(page.hunt(*games), by_rules(*games))
    env = page.MyEnv()
    check_env(env, device="cuda")

    keys = random.split(random.key(seed, "cuda"), 1024)
    step = Compiler(enabled=True)(env.step)
    state, _ = env.init(keys)

    def iterate(carry):
        state, count = carry
        for _ in range(3):
            count = count + 1
            step_keys = random.at(keys, count)
            state, timestep = step(state, random.to_integer(random.bits(step_keys, 1)[:, 0], 5), step_keys)
        return (state, count), timestep

    carry = (state, torch.zeros((), dtype=torch.int64, device="cuda"))
    captured, eager = Replay(iterate, carry, capture=True), Replay(iterate, carry, capture=False)
    for _ in range(20):
        require_equal(pytree.tree_leaves(captured()), pytree.tree_leaves(eager()))
    require_equal(pytree.tree_leaves(captured.state), pytree.tree_leaves(eager.state))
