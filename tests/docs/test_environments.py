"""docs/environments.md: a section and a picture for every tensor environment, with the sizes that it has."""

import inspect
import re
import struct
from pathlib import Path

import pytest

from torchpod.env import TensorEnv
from torchpod.envs import MAKERS
from torchpod.specs import Discrete, MultiDiscrete

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environments.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
ROWS = dict(re.findall(r"^\| \[(\w+)\]\(#\w+\) \| (.*) \|$", PAGE, re.MULTILINE))
TENSOR = [name for name, maker in MAKERS.items() if isinstance(maker, type) and issubclass(maker, TensorEnv)]


def test_sections_and_rows_are_those_of_the_tensor_environments():
    assert list(SECTIONS) == list(ROWS) == TENSOR


@pytest.mark.parametrize("name", TENSOR)
def test_a_section_has_its_picture_source_class_and_arguments(name):
    text, maker = SECTIONS[name], MAKERS[name]
    assert f'src="images/{name}.png"' in text and "- Source: " in text
    picture = ROOT / "docs" / "images" / f"{name}.png"
    assert picture.stat().st_size < 50_000
    link = re.search(rf"\[{maker.__name__}\]\(\.\./(\S+)\)", text)
    assert link and (ROOT / link[1]).samefile(inspect.getsourcefile(maker))
    (arguments,) = re.findall(r"- Arguments: (.*)", text)
    assert re.findall(r"`(\w+)=", arguments) == list(inspect.signature(maker).parameters)


def shape(spec):
    """That of what is observed, or, of a dict without its mask, what all of it takes."""
    if isinstance(spec, dict):
        return " + ".join(shape(leaf) for name, leaf in spec.items() if name != "action_mask")
    return " x ".join(map(str, spec.shape))


def actions(spec):
    if isinstance(spec, Discrete):
        return f"{spec.num_values} discrete"
    if isinstance(spec, MultiDiscrete):
        return f"{' x '.join(map(str, spec.nvec))} discrete"
    return f"{spec.shape[0]} continuous"


@pytest.mark.parametrize("name", TENSOR)
def test_the_sizes_are_those_of_the_environment(name):
    spec = MAKERS[name]().spec
    observation, action, limit, _ = ROWS[name].split(" | ")
    if spec.groups is None:
        assert observation == shape(spec.observation)
        assert action == actions(spec.action)
    else:
        assert observation == ", ".join(f"{n} x {shape(spec.observation[g])}" for g, n in spec.groups.items())
        numbers = (f"{n} x {actions(spec.action[g]).removesuffix(' discrete')}" for g, n in spec.groups.items())
        assert action == ", ".join(numbers) + " discrete"
    assert limit == str(spec.max_episode_steps or "-")


def test_the_pictures_are_drawn_by_the_command_of_the_page(tmp_path):
    pytest.importorskip("PIL")
    from torchpod.render import frame_size
    from torchpod.render.__main__ import MOMENTS, draw_pictures

    assert "`python -m torchpod.render`" in PAGE and list(MOMENTS) == TENSOR
    files = draw_pictures(tmp_path)
    assert [file.stem for file in files] == TENSOR
    for file in files:
        for path in (file, ROOT / "docs" / "images" / file.name):
            width, height = struct.unpack(">II", path.read_bytes()[16:24])
            assert (height, width) == frame_size(MAKERS[file.stem]())


def test_the_block_registers_a_drawing():
    pytest.importorskip("PIL")
    from torchpod.render import DRAWINGS

    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

    class MyEnv(TensorEnv):
        pass

    try:
        exec(compile(block, "docs/environments.md", "exec"), {"MyEnv": MyEnv})
        assert DRAWINGS[MyEnv].size == (400, 300)
    finally:
        DRAWINGS.pop(MyEnv, None)
