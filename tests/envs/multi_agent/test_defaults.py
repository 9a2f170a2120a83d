"""Without arguments the games have the numbers of WarpDrive's run configurations, written out here once more."""

import inspect

import pytest

from torchpod.envs import CovidEconomy, TagContinuous, TagGridWorld

# Specification of WarpDrive's games, shared/specs/warpdrive.md, section 2: column tag_gridworld.yaml.
TAG_GRIDWORLD = {
    "num_taggers": 4,
    "grid_length": 100,
    "start": "center",
    "wall_hit_penalty": 0.1,
    "tag_reward_for_tagger": 10.0,
    "tag_penalty_for_runner": 5.0,
    "step_cost_for_tagger": 0.01,
    "use_full_observation": True,
    "max_episode_steps": 100,
}
# Section 3: column tag_continuous.yaml.
TAG_CONTINUOUS = {
    "num_taggers": 10,
    "num_runners": 100,
    "grid_length": 20.0,
    "max_speed": 1.0,
    "skill_level_tagger": 1.0,
    "skill_level_runner": 1.0,
    "max_acceleration": 0.1,
    "min_acceleration": -0.1,
    "max_turn": 2.356,
    "min_turn": -2.356,
    "num_acceleration_levels": 20,
    "num_turn_levels": 20,
    "edge_hit_penalty": 0.0,
    "use_full_observation": False,
    "num_other_agents_observed": 10,
    "tagging_distance": 0.02,
    "tag_reward_for_tagger": 10.0,
    "tag_penalty_for_runner": -10.0,
    "step_penalty_for_tagger": 0.0,
    "step_reward_for_runner": 0.0,
    "end_of_game_reward_for_runner": 1.0,
    "runner_exits_game_after_tagged": True,
    "max_episode_steps": 500,
}
COVID_ECONOMY = {
    "max_episode_steps": 540,  # section 4.1
    "cooldown": 28,  # 4.2
    "subsidy_interval": 90,
    "vaccine_day": 296,  # 4.3
    "vaccine_interval": 1,
    "vaccines_per_million": 3000.0,
    "governor_health_priority": 0.3,
    "planner_health_priority": 0.45,
    "risk_aversion": 2.0,
    "reward_normalization_factor": 1.0,
    "observe_rate": False,  # 4.5
    "spread_scale": 1.0,  # 4.6
    "response_scale": 1.0,
    "unemployment_scale": 1.0,
    # Ours: docs/covid-economy.md, "What is different from the original".
    "enforce_masks": True,
    "terminal": False,
    "randomise": 0.0,
}


@pytest.mark.parametrize(
    ("game", "numbers"),
    [(TagGridWorld, TAG_GRIDWORLD), (TagContinuous, TAG_CONTINUOUS), (CovidEconomy, COVID_ECONOMY)],
)
def test_defaults_are_the_numbers_of_the_specification(game, numbers):
    defaults = {name: p.default for name, p in inspect.signature(game).parameters.items()}
    assert defaults == numbers


def test_observations_of_the_default_games_are_as_long_as_the_specification_says():
    """Sections 2, 3 and 4.5: 4 A + 1 of 5 agents, 7 K + 1 of the nearest 10, and 64 and 463."""
    grid, plane, covid = (game().spec for game in (TagGridWorld, TagContinuous, CovidEconomy))
    assert grid.groups == {"tagger": 4, "runner": 1} and plane.groups == {"tagger": 10, "runner": 100}
    assert {seen.shape for seen in grid.observation.values()} == {(21,)}
    assert {seen.shape for seen in plane.observation.values()} == {(71,)}
    assert covid.groups == {"governor": 51, "planner": 1}
    assert {g: seen["numbers"].shape for g, seen in covid.observation.items()} == {"governor": (64,), "planner": (463,)}
    assert [grid.action["runner"].num_values, plane.action["runner"].nvec] == [5, (21, 21)]
    assert {g: action.num_values for g, action in covid.action.items()} == {"governor": 11, "planner": 21}
