"""The line that says how a run ended."""

import math

import pytest

from torchpod.metrics import short
from torchpod.run.summary import result_of

SUMMARY = {
    "eval_return": {"mean": 21.5, "iqm": 0.98765, "ci95": [-0.01234, 12345.6], "episodes": 32},
    "unfinished_episodes": 0,
    "unfinished_steps": 0,
    "env_steps": 65_536,
    "resets": 0,
    "env_steps_per_s": 1234.5,
    "compile_s": 0.0,
}


def test_the_interval_is_said_to_be_of_the_iqm():
    assert result_of(SUMMARY) == (
        "eval return 21.5 with greedy actions (IQM 0.9877, 95 % CI of the IQM [-0.01234, 12,346], 32 episodes) after "
        "65,536 env steps; 1,234 env steps/s"
    )


def test_cut_episodes_resets_and_compilation_are_told_where_there_are_any():
    more = {"unfinished_episodes": 3, "unfinished_steps": 27_000, "resets": 1_024, "compile_s": 12.34}
    assert result_of(SUMMARY | more).endswith(
        ", 32 episodes, 3 of them cut at 27,000 steps) after 65,536 env steps (and 1,024 resets); 1,234 env steps/s, "
        "12.3 s compilation"
    )


def test_groups_policies_and_what_the_environment_says_are_told_behind_the_episodes():
    parts = {"groups": {"red": {"mean": -2.0}}, "policies": {"a": {"mean": 3.25}}, "episode": {"red": 0.5}}
    told = result_of(SUMMARY | {"eval_return": SUMMARY["eval_return"] | parts})
    assert ", 32 episodes: red -2, policy a 3.25, red 0.5) after " in told


def test_of_many_numbers_of_the_environments_the_first_are_told():
    parts = {"episode": {name: float(i) for i, name in enumerate("abcdef")}}
    told = result_of(SUMMARY | {"eval_return": SUMMARY["eval_return"] | parts})
    assert ", 32 episodes: a 0, b 1, c 2, d 3 and 2 more in summary.json) after " in told


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.97312, "0.9731"),
        (-0.0000125, "-1.25e-05"),
        (500.0, "500"),
        (9999.4, "9999"),
        (9999.5, "10,000"),
        (-1_234_567.8, "-1,234,568"),
        (2.5e9, "2.5e+09"),
        (math.inf, "inf"),
        (math.nan, "-"),
    ],
)
def test_numbers_are_shown_with_four_digits_or_as_whole_ones(value, shown):
    assert short(value) == shown
