"""Brax behind the contract: its own steps, no copies, one compilation, and episodes that end as ours do."""

import importlib.util
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.zygote import wait_until
from torchpod import random
from torchpod.compose import load
from torchpod.envs.host import Brax
from torchpod.envs.host.brax import _brax
from torchpod.envs.transforms import action_repeat, time_limit
from torchpod.makers import make_env
from torchpod.run.execute import execute
from torchpod.specs import HOST, Array, Box, EnvSpec
from torchpod.testing import check_env
from torchpod.types import FIRST, LAST, MID

pytestmark = pytest.mark.skipif(importlib.util.find_spec("brax") is None, reason="the extra `brax` is not installed")

ROOT = Path(__file__).parents[3]
WALK = """
import jax, jax.numpy as jnp
from brax.envs import Env, State

class Walk(Env):
    '''From somewhere in [0, 0.5) by the action; the reward is where it is, and beyond 1 is the end.'''

    def reset(self, rng):
        x = jax.random.uniform(rng, (), maxval=0.5)
        return State(None, self.observe(x), jnp.zeros(()), jnp.zeros(()), info={"x": x})

    def step(self, state, action):
        x = state.info["x"] + action[0]
        done = jnp.where(x > 1, 1.0, 0.0)
        return state.replace(obs=self.observe(x), reward=x, done=done, info={"x": x})

    def observe(self, x):
        return {"where": jnp.stack([x, 1 - x]), "far": x > 0.7}

    observation_size, action_size, backend = {"where": 2, "far": 1}, 1, "none"
"""


@pytest.fixture(scope="module")
def walk():
    _brax()  # which hides the warnings of the import
    names = {}
    exec(WALK, names)
    return names["Walk"]()


def keys(num, seed=0):
    return random.split(random.key(seed), num)


def play(env, actions, num_envs, seed=0):
    """Timesteps from `init` on; an action for all environments at every step."""
    seen = [env.init(keys(num_envs, seed))[1]]
    for action in actions:
        seen.append(env.step(None, torch.full((num_envs, 1), float(action)), keys(num_envs))[1])
    return seen


def column(timesteps, pick):
    return torch.stack([pick(t) for t in timesteps])


def test_environments_keep_the_contract(walk):
    assert Brax("fast", episode_length=7).spec == EnvSpec("fast", Array((2,)), Box((1,), -1.0, 1.0), 7)
    check_env(Brax("fast", episode_length=7))
    env = Brax(walk, episode_length=20)
    assert env.spec.observation == {"where": Array((2,)), "far": Array((), torch.bool)} and env.traits == HOST
    check_env(env, num_steps=60)
    check_env(Brax(walk, episode_length=20, action_repeat=3, fresh_resets=False), num_steps=60)


@pytest.mark.filterwarnings("ignore")  # Brax's own, while it makes and traces what nobody maintains
@pytest.mark.parametrize("task", ["fast", pytest.param("inverted_pendulum", marks=pytest.mark.slow)])
def test_steps_are_those_of_brax_itself(task, seed):
    import jax

    options = {} if task == "fast" else {"backend": "spring"}
    env, num_envs = Brax(task, **options), 4
    _, timestep = env.init(keys(num_envs, seed))
    state, step = env._batch.env, jax.jit(jax.vmap(_brax().get_environment(task, **options).step))
    assert torch.equal(timestep.observation, torch.from_numpy(np.array(state.obs)))
    for i in range(5):
        action = random.uniform(random.at(keys(num_envs, seed), i), 1, -1.0, 1.0)
        state = step(state, action.numpy())
        _, timestep = env.step(None, action, keys(num_envs))
        np.testing.assert_allclose(timestep.observation, state.obs, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(timestep.reward, state.reward, rtol=1e-5, atol=1e-6)
        assert (timestep.discount == 1 - torch.from_numpy(np.array(state.done))).all()


def test_everything_is_compiled_once(walk):
    for task in ("fast", walk):
        for _ in range(2):  # a second one, as a pool of Sebulba would be, shares the programs of the first
            env = Brax(task, episode_length=11)
            play(env, [0.3] * 25, num_envs=3)
        assert (env._programs.begin._cache_size(), env._programs.step._cache_size()) == (1, 1)


def test_nothing_is_copied_and_what_was_handed_out_stays():
    env = Brax("fast")
    env.init(keys(8))
    given, share = [], env._programs.share
    env._programs = env._programs._replace(share=lambda x: given.append(share(x)) or given[-1])
    held = []
    for _ in range(20):
        action = torch.rand(8, 1) - 0.5
        _, timestep = env.step(None, action, keys(8))
        assert given[-1].unsafe_buffer_pointer() == action.data_ptr()
        assert timestep.observation.data_ptr() == env._batch.env.obs.unsafe_buffer_pointer()
        held.append((timestep.observation, timestep.observation.clone()))
    assert all(torch.equal(a, b) for a, b in held)
    unaligned = torch.rand(9, 1)[1:]  # which JAX copies
    assert env.step(None, unaligned, keys(8))[1].step_type.tolist() == [MID] * 8


def test_the_final_observation_is_real_and_a_termination_has_discount_0(walk, seed):
    seen = play(Brax(walk), [0.25] * 40, 16, seed)
    step_type, x = column(seen, lambda t: t.step_type), column(seen, lambda t: t.observation["where"][:, 0])
    is_last, is_first = step_type == LAST, step_type == FIRST
    assert is_last.sum() >= 16 and torch.equal(is_first[1:], is_last[:-1])
    assert torch.equal(is_last, x > 1) and (x[is_first] < 0.5).all()
    assert torch.equal(column(seen, lambda t: t.discount) == 0, is_last)
    assert torch.equal(column(seen, lambda t: t.reward), torch.where(is_first, 0.0, x))
    assert len(set(x[is_first].tolist())) == is_first.sum()  # every episode begins somewhere else


def test_episodes_may_begin_as_the_first_one_did(walk):
    seen = play(Brax(walk, fresh_resets=False), [0.25] * 40, 4)
    for timestep in seen:
        first = timestep.step_type == FIRST
        assert torch.equal(timestep.observation["where"][first], seen[0].observation["where"][first])


def test_a_truncation_has_discount_1_and_the_end_wins(walk):
    seen = play(Brax(walk, episode_length=3), [0.01] * 3 + [0.0], 4)
    assert column(seen, lambda t: t.step_type)[:, 0].tolist() == [FIRST, MID, MID, LAST, FIRST]
    assert (column(seen, lambda t: t.discount) == 1).all()
    both = play(Brax(walk, episode_length=2), [0.0, 1.0], 4)[-1]
    assert (both.step_type == LAST).all() and (both.discount[both.observation["where"][:, 0] > 1] == 0).all()


def test_repeated_actions_stop_at_the_end(walk):
    env = action_repeat(Brax(walk, episode_length=100), 3)
    assert env.spec.max_episode_steps == 34 and time_limit(env, 5).spec.max_episode_steps == 5
    start, timestep = play(env, [0.6], 8)
    x, reward = start.observation["where"][:, 0], 0.0
    for _ in range(3):
        moving = x <= 1
        x = torch.where(moving, x + 0.6, x)
        reward = reward + torch.where(moving, x, 0.0)
    torch.testing.assert_close(timestep.observation["where"][:, 0], x)
    torch.testing.assert_close(timestep.reward, reward)


def test_keys_decide_the_episodes_and_init_begins_again(walk):
    env = Brax(walk)
    runs = [column(play(env, [0.2] * 12, 4, s), lambda t: t.observation["where"]) for s in (0, 0, 1)]
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])
    assert env.init(keys(5))[1].reward.shape == (5,)


def test_a_class_in_a_file_is_an_environment(tmp_path):
    _brax()
    (tmp_path / "walk.py").write_text(WALK)
    env = make_env(
        {"name": f"{tmp_path / 'walk.py'}:Walk", "transforms": [{"name": "time_limit", "max_episode_steps": 9}]}
    )
    assert (env.spec.name, env.spec.max_episode_steps) == ("Walk", 9)


def test_closing_waits_for_a_step_that_is_under_way(walk):
    """A process that ends while XLA computes is aborted."""
    env = Brax(walk, action_repeat=200_000, episode_length=10**9)
    env.init(keys(2))
    env.send(torch.zeros(2, 1))
    columns = env._pending[1]
    assert not columns[0].is_ready()
    env.close()
    assert all(x.is_ready() for x in columns)


COMPILES = """
import threading
from brax.envs.ant import Ant

class Compiles(Ant):
    def step(self, state, action):
        if threading.current_thread() is not threading.main_thread():
            open("compiles", "w").close()
        return super().step(state, action)
"""


@pytest.mark.slow
def test_a_run_that_is_stopped_while_an_actor_compiles_its_first_step_ends_as_any(tmp_path):
    """C++ that calls Python would be unwound as Python ends, and abort the process."""
    (tmp_path / "walk.py").write_text(COMPILES)
    command = [sys.executable, "-m", "torchpod", "train", "env=walk.py:Compiles", "algo=ppo", "loop=sebulba"]
    run = ["num_envs=4", "total_env_steps=1000", "compile=false", "run_dir=run"]
    with subprocess.Popen([*command, *run], cwd=tmp_path, stderr=subprocess.PIPE, text=True) as process:
        wait_until((tmp_path / "compiles").exists, 120)
        process.send_signal(signal.SIGTERM)
        _, error = process.communicate(timeout=20)
    assert process.returncode == 130
    assert error.endswith("\ntorchpod: stopped by SIGTERM without a new checkpoint\n")  # behind a warning of Brax


def test_what_cannot_be_made_or_stepped_is_refused():
    env = Brax("fast")
    for call in (lambda: env.send(torch.zeros(2, 1)), env.recv):
        with pytest.raises(RuntimeError, match="fast: .* comes? "):
            call()
    env.init(keys(2))
    with pytest.raises(ValueError, match=re.escape("fast takes actions of shape [2, 1]; these are [3, 1].")):
        env.send(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="task='aunt' is not known; did you mean ant"):
        Brax("aunt")
    with pytest.raises(ValueError, match="Brax cannot make ant with {'backend': 'string'}; check them. It says: "):
        Brax("ant", backend="string")
    with pytest.raises(ValueError, match="takes the name of an environment, or a brax.envs.Env without options; not 3"):
        Brax(3)
    with pytest.raises(ValueError, match="episode_length=0 is wrong"):
        Brax("fast", episode_length=0)


def test_brax_is_imported_only_when_used_and_told_when_missing(monkeypatch):
    program = "import sys, torchpod.envs; sys.exit('brax' in sys.modules or 'jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT).returncode == 0
    monkeypatch.setitem(sys.modules, "brax.envs", None)
    with pytest.raises(ImportError, match=r"needs the package brax: pip install 'torchpod-rl\[brax\]'"):
        Brax("ant")


@pytest.mark.slow
def test_ppo_learns_by_the_command_of_the_page(tmp_path):
    (command,) = re.findall(r"^torchpod train (.*env=brax.*)$", (ROOT / "docs" / "loops.md").read_text(), re.MULTILINE)
    overrides = [x for x in shlex.split(command.split(" #")[0]) if "task" not in x and "backend" not in x]
    short = ["env.task=fast", "env.episode_length=100", "num_envs=16", "total_env_steps=30_000", "compile=false"]
    short += ["algo.unroll_length=32", "evaluation.episodes=16", "logger.console=false", f"run_dir={tmp_path / 'run'}"]
    run = execute(load([*overrides, *short]))
    # Pushing all the time gives sum of 0.0002 i (i + 1) = 66.7 over 100 steps; at random, some 17.
    assert run.summary["eval_return"]["mean"] > 60
