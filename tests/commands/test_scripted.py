"""Who plays instead of what was trained: constant and random players, of everybody or of groups."""

import json
from pathlib import Path

import pytest
import torch

from torchpod import random
from torchpod.agent import Agent
from torchpod.commands.scripted import scripted
from torchpod.compose import load
from torchpod.main import main
from torchpod.run.execute import execute
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import MID, ActorOutput, TimeStep

SMALL = ("num_envs=2", "algo.unroll_length=4", "algo.agent.hidden=[4]", "compile=false", "logger.console=false")
ONE = ("algo.learner.num_minibatches=1", "total_env_steps=8", "evaluation.episodes=1")


def evaluated(run: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    capsys.readouterr()
    assert main(["eval", str(run), "--episodes", "2", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.fixture(scope="module")
def covid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scripted") / "covid"
    return execute(load(["algo=ippo", "env=covid_economy", *SMALL, *ONE, f"run_dir={folder}"])).dir


def test_nobody_acts_and_the_totals_are_those_of_the_levels_of_the_start(covid, capsys):
    found = evaluated(covid, capsys, "--instead", "0")
    assert found["groups"]["governor"]["mean"] == pytest.approx(431.58957, rel=1e-5)
    assert found["groups"]["planner"]["mean"] == pytest.approx(437.98232, rel=1e-5)
    assert found["mean"] == pytest.approx(431.58957 + 437.98232, rel=1e-5)


def test_groups_play_apart(covid, capsys):
    trained = evaluated(covid, capsys)
    generous = evaluated(covid, capsys, "--instead", "planner=20", "--instead", "governor=6")
    lazy = evaluated(covid, capsys, "--instead", "governor=6", "--instead", "planner=random")
    assert generous["groups"]["governor"]["mean"] > lazy["groups"]["governor"]["mean"] + 50
    assert generous["groups"]["planner"]["mean"] == pytest.approx(434.9, abs=0.1)
    own = evaluated(covid, capsys, "--instead", "planner=20")
    assert own["groups"] not in (trained["groups"], generous["groups"])


def test_a_summary_tells_the_returns_of_groups(covid):
    summary = json.loads((covid / "summary.json").read_text())["eval_return"]
    assert summary["mean"] == pytest.approx(sum(group["mean"] for group in summary["groups"].values()), rel=1e-6)
    assert summary["groups"].keys() == {"governor", "planner"}


def test_a_constant_player_of_one_agent(tmp_path, capsys):
    run = execute(load(["env=cartpole", *SMALL, *ONE, f"run_dir={tmp_path / 'run'}"])).dir
    found = evaluated(run, capsys, "--instead", "1")
    assert 8 <= found["mean"] <= 11 and "groups" not in found  # always pushed to the right it falls after 8 to 11 steps
    assert evaluated(run, capsys, "--instead", "random")["mean"] > 11.5


class Still(Agent):
    """Takes action 0; has two policies beside the groups."""

    def __init__(self, left=()):
        super().__init__()
        self.shapes = {"left": left, "right": ()}
        self.teams = {
            "edges": lambda tree, axis: torch.cat(
                [tree["left"].narrow(axis, 0, 1), tree["right"].narrow(axis, 2, 1)], axis
            ),
            "all": lambda tree, axis: torch.cat([tree["left"], tree["right"]], axis),
        }

    def act(self, timestep, state, keys, explore=True):
        zeros = {g: torch.zeros(len(keys), 3, *shape, dtype=torch.int64) for g, shape in self.shapes.items()}
        return ActorOutput(zeros, {}), state


def two(action: object, observation: object = Array((1,))) -> EnvSpec:
    specs = {"left": observation, "right": Array((1,))}
    return EnvSpec("two", specs, {"left": action, "right": Discrete(3)}, groups={"left": 3, "right": 3})


def test_what_a_mask_forbids_is_replaced_by_the_first_that_it_allows(seed):
    mask = random.uniform(random.split(random.key(seed), 400), 15).reshape(400, 3, 5) < 0.5
    mask[..., 3] |= ~mask.any(-1)
    observation = {"left": {"x": torch.zeros(400, 3, 1), "action_mask": mask}, "right": torch.zeros(400, 3, 1)}
    ones = {group: torch.ones(400, 3) for group in ("left", "right")}
    timestep = TimeStep(torch.full((400,), MID), ones, ones, observation, {})
    keys = random.split(random.key(seed + 1), 400)
    masked = {"x": Array((1,)), "action_mask": Array((5,), torch.bool)}

    def played(action: object, *instead: str) -> dict:
        return scripted(Still(), two(action, masked), instead).act(timestep, (), keys)[0].action

    found = played(Discrete(5), "left=2")
    wanted = torch.where(mask[..., 2], 2, mask.int().argmax(-1))
    assert torch.equal(found["left"], wanted) and not found["right"].any()
    drawn = played(Discrete(5), "random")
    assert mask.gather(-1, drawn["left"][..., None]).all()
    counts = drawn["right"].flatten().bincount(minlength=3) / 1200
    torch.testing.assert_close(counts, torch.full((3,), 1 / 3), atol=0.07, rtol=0)  # five standard errors


def test_a_policy_that_is_called_like_a_group_and_has_other_agents_is_meant_before_it():
    agent, keys = Still(), random.split(random.key(0), 2)
    agent.teams = {"left": agent.teams["edges"]}
    ones = {group: torch.ones(2, 3) for group in ("left", "right")}
    timestep = TimeStep(torch.full((2,), MID), ones, ones, {group: x[..., None] for group, x in ones.items()}, {})
    found = scripted(agent, two(Discrete(5)), ["left=1"]).act(timestep, (), keys)[0].action
    assert {group: x[0].tolist() for group, x in found.items()} == {"left": [1, 0, 0], "right": [0, 0, 1]}


@pytest.mark.parametrize(
    ("action", "instead", "message"),
    [
        (Discrete(5), ["middle=1"], "the groups of two are ['left', 'right']"),
        (Discrete(5), ["1", "left=2"], "left plays something else already"),
        (Discrete(5), ["middle=1"], ", the policies of the run ['edges', 'all']; name one of them"),
        (Discrete(5), ["edges=1", "all=2"], "left plays something else already"),
        (Discrete(5), ["edges=1", "right=2"], "right plays something else already"),
        (Discrete(5), ["left=5"], "5 is not in Discrete(num_values=5"),
        (Discrete(5), ["left=1.5"], "1.5 is not in Discrete"),
        (Discrete(5), ["left=up"], "'up' is neither random nor numbers"),
        (MultiDiscrete((2, 3)), ["left=1,2,0"], "an action has 2 numbers, not 3"),
        (Box((2,), -1.0, 1.0), ["left=0.5,-2"], "0.5,-2 is not in Box"),
        ({"a": Discrete(2)}, ["left=1"], "of actions {'a': Discrete(num_values=2"),
        (Array((2,)), ["left=1"], "of actions Array(shape=(2,)"),
    ],
)
def test_impossible_players_are_refused(action, instead, message):
    with pytest.raises(ValueError) as error:
        scripted(Still(), two(action), instead)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_those_of_a_policy_play_and_the_others_do_not():
    ones = {group: torch.ones(4, 3) for group in ("left", "right")}
    observation = {group: torch.zeros(4, 3, 1) for group in ("left", "right")}
    timestep, keys = TimeStep(torch.full((4,), MID), ones, ones, observation, {}), random.split(random.key(0), 4)
    found = scripted(Still((2,)), two(MultiDiscrete((2, 3))), ["edges=1"]).act(timestep, (), keys)[0].action
    assert found["left"].tolist() == 4 * [[[1, 1], [0, 0], [0, 0]]] and found["right"].tolist() == 4 * [[0, 0, 1]]
    drawn = scripted(Still(), two(Discrete(3)), ["edges=random"]).act(timestep, (), keys)[0].action
    assert drawn["left"][:, 0].any() and not drawn["left"][:, 1:].any() and not drawn["right"][:, :2].any()


@pytest.mark.parametrize("loser", ["a", "b"])
def test_a_policy_of_a_game_of_turns_may_be_played_at_random(loser, tmp_path, capsys):
    """Both are of one group, the players."""
    pytest.importorskip("envpool", reason="the extra `envpool` is not installed")
    game = ("loop=sebulba", "algo=ippo", "env=envpool", "env.task=TicTacToe-v1", "algo.agent.policies={a: [0], b: [1]}")
    run = execute(load([*game, *SMALL, *ONE, "loop.num_actor_threads=1", f"run_dir={tmp_path / 'run'}"])).dir
    assert evaluated(run, capsys, "--instead", "random").keys() == evaluated(run, capsys).keys()
    found = evaluated(run, capsys, "--instead", f"{loser}=random")
    assert found["policies"].keys() == {"a", "b"}
    assert found["policies"]["a"]["mean"] == -found["policies"]["b"]["mean"]


def test_masks_of_several_choices(seed):
    mask = random.uniform(random.split(random.key(seed), 50), 15).reshape(50, 3, 5) < 0.5
    mask[..., 1] = mask[..., 4] = True  # something is allowed in each choice
    spec = two(MultiDiscrete((2, 3)), {"x": Array((1,)), "action_mask": Array((5,), torch.bool)})
    observation = {"left": {"x": torch.zeros(50, 3, 1), "action_mask": mask}, "right": torch.zeros(50, 3, 1)}
    ones = {group: torch.ones(50, 3) for group in ("left", "right")}
    timestep = TimeStep(torch.full((50,), MID), ones, ones, observation, {})
    found = scripted(Still(), spec, ["left=0,1"]).act(timestep, (), random.split(random.key(0), 50))[0].action["left"]
    assert torch.equal(found[..., 0], torch.where(mask[..., 0], 0, 1))
    assert torch.equal(found[..., 1], torch.where(mask[..., 3], 1, mask[..., 2:].int().argmax(-1)))


def test_continuous_and_several_actions():
    box = scripted(Still(), two(Box((2,), -1.0, 1.0)), ["left=0.5,-1"])
    ones = {group: torch.ones(4, 3) for group in ("left", "right")}
    observation = {group: torch.zeros(4, 3, 1) for group in ("left", "right")}
    timestep = TimeStep(torch.full((4,), MID), ones, ones, observation, {})
    keys = random.split(random.key(0), 4)
    assert torch.equal(box.act(timestep, (), keys)[0].action["left"], torch.tensor([0.5, -1.0]).expand(4, 3, 2))
    both = scripted(Still(), two(MultiDiscrete((2, 3))), ["left=1"])
    assert torch.equal(both.act(timestep, (), keys)[0].action["left"], torch.ones(4, 3, 2, dtype=torch.int64))
