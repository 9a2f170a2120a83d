"""What `torchpod train --help` and `torchpod list` say: something of every setting, and of every choice."""

from pathlib import Path

import pytest
import yaml

from torchpod.config import choices, load
from torchpod.explain import explained_choices, explained_settings

AGENT = '''
from dataclasses import dataclass

from torchpod.algos.ppo import PPO, PPOConfig


@dataclass(frozen=True)
class MyConfig(PPOConfig):
    courage: float = 0.5
    """How much is
    dared."""
    haste: int = 3


class MyAgent(PPO):
    """Dares a lot. And more."""

    def __init__(self, spec, config: MyConfig = MyConfig()) -> None:
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

    def __init__(self, grip: float = 1.0, hold: float = 2.0, wind: float = 0.0) -> None:
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


@pytest.mark.parametrize("overrides", RUNS, ids=" ".join)
def test_every_setting_is_explained_and_the_text_is_yaml_of_the_settings(overrides: list[str]):
    config = load(overrides)
    text = explained_settings(config)
    assert yaml.safe_load(text) == config.to_dict()
    assert set(unexplained(text)) <= {f"  name: {config.loop.name}"}  # of which `loop` says what there is


def test_agents_and_environments_of_the_users_are_explained_by_their_own_words(tmp_path: Path):
    (tmp_path / "my_agent.py").write_text(AGENT)
    (tmp_path / "my_env.py").write_text(ENV)
    agent, env = f"algo={tmp_path}/my_agent.py:MyAgent", f"env={tmp_path}/my_env.py:MyEnv"
    lines = explained_settings(
        load([agent, env, "+algo.agent.courage=0.7", "+algo.agent.haste=4", "+env.hold=3.0", "+env.wind=1.0"])
    ).splitlines()
    assert "    courage: 0.7  # How much is dared." in lines
    assert "    haste: 4" in lines
    assert "  hold: 3.0  # how firmly, in N, at both ends." in lines
    assert "  wind: 1.0  # of the day." in lines
    assert {"  # Dares a lot.", "  # A pole that somebody holds."} <= {line[line.find("  #") :] for line in lines}


@pytest.mark.parametrize("group", ["algo", "env", "experiment"])
def test_every_choice_has_a_sentence_of_its_own(group: str):
    rows = [line.split(maxsplit=1) for line in explained_choices(group).splitlines()]
    assert [name for name, _ in rows] == choices(group)
    told = [sentence for _, sentence in rows]
    assert len(set(told)) == len(told) and all(len(sentence) > 15 for sentence in told)
    assert not any(sentence.endswith("al.") for sentence in told)
