"""What `torchpod train --help` and `torchpod list` say: something of every setting, and of every choice."""

from pathlib import Path

import pytest
import yaml

from torchpod.commands.explain import explained_choices, explained_settings
from torchpod.compose import choices, load
from torchpod.config import ConfigError

AGENT = '''
from dataclasses import dataclass

from torchpod.algos.ppo import PPO, PPOConfig


@dataclass(frozen=True, kw_only=True)
class MyConfig(PPOConfig):
    patience: int
    mood: object = object()
    name: str = "é\\n# b"
    courage: float = 0.5
    """How much is
    dared."""
    haste: int = 3


class MyAgent(PPO):
    """Dares a lot. And more."""

    def __init__(self, spec, config: MyConfig) -> None:
        super().__init__(spec, config)
'''
ENV = '''
"""A pole that somebody holds."""

from torchpod.envs.classic.cartpole import CartPole


class MyEnv(CartPole):
    """As CartPole.

    Args:
      grip, hold: how firmly, in N,
        at both ends.
      wind: of the day.

    Raises:
      ValueError: never.
    """

    def __init__(self, grip: float, hold: float = 2.0, wind: float = 0.0) -> None:
        super().__init__()
'''


def unexplained(text: str) -> list[str]:
    """Settings that neither have a comment behind them nor one above."""
    lines = text.splitlines()
    pairs = zip(["", *lines], lines, strict=False)
    return [line for above, line in pairs if "#" not in line and not above.lstrip().startswith("#") and line[-1] != ":"]


RUNS = (
    *([f"algo={name}"] for name in choices("algo")),
    *([f"env={name}", "loop=sebulba"] for name in choices("env")),
    *([f"experiment={name}"] for name in choices("experiment")),
    ["loss=SACLoss", "env=pendulum"],
)


OF_ENVPOOL = ("  episodic_life: true", "  reward_clip: true")
"""Its own options, which nothing here explains."""


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_every_setting_is_explained_and_the_text_is_yaml_of_the_settings(overrides: list[str]):
    config = load(overrides)
    text = explained_settings(config)
    assert yaml.safe_load(text) == config.to_dict()
    assert set(unexplained(text)) <= {f"  name: {config.loop.name}", *OF_ENVPOOL}  # of which `loop` says what there is


def test_agents_and_environments_of_the_users_are_explained_by_their_own_words(tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "my_env.py").write_text(ENV)
    agent, env = f"algo={tmp_path}/my_agent.py:MyAgent", f"env={tmp_path}/my_env.py:MyEnv"
    lines = explained_settings(load([agent, env, "+algo.agent.haste=4", "+env.wind=1.0"])).splitlines()
    assert "    courage: 0.5  # How much is dared." in lines
    assert "    hidden: [64, 64]  # Units of each hidden layer, of policy and value." in lines
    assert (
        "    haste: 4" in lines
        and "    patience: ???  # To be given." in lines
        and "    mood: <object object" in "\n".join(lines)
    )
    assert "  grip: ???  # To be given. how firmly, in N, at both ends." in lines
    assert '    name: "é\\n# b"' in "\n".join(lines) or '    name: "\\u00e9\\n# b"' in lines
    assert not any(line.startswith("  replay:") for line in lines)
    assert "  hold: 2.0  # how firmly, in N, at both ends." in lines
    assert "  wind: 1.0  # of the day." in lines
    assert {"  # Dares a lot.", "  # A pole that somebody holds."} <= {line[line.find("  #") :] for line in lines}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["algo=ppo", "algo.agent.clip=wide"], "algo.agent.clip='wide': expected a number."),
        (["+algo.agent.patience=1", "+algo.agent.hast=4"], "algo.agent.hast is no setting; did you mean haste?"),
    ],
)
def test_settings_that_training_would_refuse_are_refused(given: list[str], message: str, tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    own = [] if given[0] == "algo=ppo" else [f"algo={tmp_path}/my_agent.py:MyAgent"]
    with pytest.raises(ConfigError, match=message):
        explained_settings(load([*own, *given]))


def test_what_says_nothing_of_itself_is_not_told_as_what_it_is_derived_from(tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(AGENT.replace('"""Dares a lot. And more."""', ""))
    (tmp_path / "my_env.py").write_text("import gymnasium\n\nclass MyEnv(gymnasium.Env):\n    pass\n")
    files = [f"algo={tmp_path}/my_agent.py:MyAgent", f"env={tmp_path}/my_env.py:MyEnv", "loop=sebulba"]
    lines = explained_settings(load(files)).splitlines()
    names = [line for line in lines if line.startswith("  name: ") and ":My" in line]
    assert len(names) == 2 and not any("#" in line for line in names)


@pytest.mark.parametrize("group", ["algo", "env", "experiment"])
def test_every_choice_has_a_sentence_of_its_own(group: str):
    rows = [line.split(maxsplit=1) for line in explained_choices(group).splitlines()]
    assert [name for name, _ in rows] == choices(group)
    told = [sentence for _, sentence in rows]
    assert len(set(told)) == len(told) and all(len(sentence) > 15 for sentence in told)
    assert not any(sentence.endswith(("al.", " ...")) for sentence in told)  # cut, by `et al.` or for its length
