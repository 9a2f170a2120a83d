"""docs/covid-economy.md: its block runs, and its defaults are those of the environment."""

import inspect
import re
from pathlib import Path

from torchpod.envs import CovidEconomy

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "covid-economy.md").read_text()


def test_the_block_runs(capsys):
    (block,) = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    names = {}
    exec(compile(block, "docs/covid-economy.md", "exec"), names)
    shapes = re.findall(r"(\w+) (\[[\d, ]+\])", block)
    assert len(shapes) == 2 and all(str(list(names["seen"][name].shape)) == shape for name, shape in shapes)
    assert capsys.readouterr().out.count("tensor(") == 2


def test_the_defaults_are_those_of_the_environment():
    defaults = {name: p.default for name, p in inspect.signature(CovidEconomy).parameters.items()}
    said = dict(re.findall(r"(\w+)`? = ([\d.]+\d|\d)", PAGE))
    said = {name: float(value) for name, value in said.items() if name in defaults}
    assert len(said) >= 7 and all(defaults[name] == value for name, value in said.items())
    assert set(re.findall(r"`(\w+)=", PAGE)) <= {*defaults, "randomise"}


def test_the_page_says_first_what_it_is_not_for():
    assert PAGE.split("\n")[2].startswith("> **For research on learning, not for decisions about policy.**")


def test_the_sources_are_named():
    sources = (ROOT / "envs" / "multi_agent" / "data" / "README.md").read_text()
    for name in (
        "OxCGRT",
        "CSSEGISandData/COVID-19",
        "Bureau of Labor Statistics",
        "CC BY 4.0",
        "Salesforce.com, Inc.",
    ):
        assert name in sources
    for file in (ROOT / "envs" / "multi_agent" / "data").glob("*.csv"):
        assert f"`{file.name}`" in sources
