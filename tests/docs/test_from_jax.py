"""docs/from-jax.md: its Python block runs where JAX is installed, and its commands are settings that exist."""

import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import torch

from torchpod import envs, random
from torchpod.compose import load

PAGE = Path(__file__).parents[2] / "docs" / "from-jax.md"
TEXT = PAGE.read_text()
(BLOCK,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
needs_jax = pytest.mark.skipif(
    importlib.util.find_spec("jax") is None, reason="jax is not installed; it comes with the extra `brax`"
)


@needs_jax
def test_the_block_steps_our_environment_by_a_policy_in_jax(capsys: pytest.CaptureFixture[str]):
    exec(compile(BLOCK, str(PAGE), "exec"), {"__name__": "__main__"})
    first, same = capsys.readouterr().out.splitlines()
    found = re.fullmatch(r"\(256, 4\) tensor\(([\d.]+)\)", first)
    assert found and 150 < float(found[1]) <= 200
    assert same == "True"


@needs_jax
def test_nothing_is_copied_in_either_direction():
    import jax.numpy as jnp

    _, timestep = envs.Catch().init(random.split(random.key(0), 64))
    for tensor in (timestep.observation, timestep.reward, timestep.step_type):
        array = jnp.from_dlpack(tensor)
        back = torch.from_dlpack(array)
        assert array.unsafe_buffer_pointer() == tensor.data_ptr() == back.data_ptr()
        assert back.dtype == tensor.dtype and torch.equal(back, tensor)


def test_the_commands_and_environments_exist():
    commands = re.findall(r"^torchpod train (.*)$", TEXT, re.MULTILINE)
    assert len(commands) == 4
    for command in commands:
        load(shlex.split(command, comments=True))
    (row,) = re.findall(r"^\| gymnax's .*\| (.*), \.\.\. \(\[all\]", TEXT, re.MULTILINE)
    names = [name.removeprefix("env=") for name in re.findall(r"`([\w=]+)`", row)]
    assert len(names) == 6 and set(names) <= set(envs.MAKERS)
