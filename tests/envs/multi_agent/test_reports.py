"""What the environments report of episodes, by hand and in the metrics of a run."""

import numpy as np
import pytest
import torch

from tests.envs.multi_agent.test_covid_economy import N, Oracle
from torchpod import random
from torchpod.agent import bind
from torchpod.algos.multi_agent import IPPO, IPPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.envs import CovidEconomy, TagContinuous, TagGridWorld
from torchpod.learner import LearnerConfig
from torchpod.types import LAST


def anakin(env, population=1, **settings):
    torch.manual_seed(0)
    return Anakin(
        lambda: IPPO(env.spec, IPPOConfig(hidden=(4,))),
        env,
        num_envs=6,
        unroll_length=10,
        learner=LearnerConfig(num_epochs=1, num_minibatches=1),
        num_iterations=4,
        compiler=Compiler(enabled=False, population=population),
        **settings,
    )


@pytest.mark.parametrize("population", [1, 2])
def test_the_tag_rate_is_the_share_of_games_that_ended_with_a_tag(population):
    env = TagGridWorld(num_taggers=2, grid_length=3, start="uniform", max_episode_steps=7)
    program = anakin(env, population)
    seen = []
    for report, running in train(program, program.init(0), iterations_per_call=2):
        count = report.metrics["episodes"]
        assert (count > 0).all()
        seen.append((count, report.metrics["episode_tag_rate"], running.state.carry.timestep))
    # The same again, step by step.
    state = program.init(0)
    for count, rate, _ in seen:
        ended, tagged = torch.zeros_like(count), torch.zeros_like(count)
        for _ in range(2):
            timestep = program.rollout(state)[1].timestep
            step_type, discount = (
                x if population == 1 else x.transpose(0, 1)
                for x in (timestep.step_type, timestep.discount["runner"][..., 0])
            )
            last = step_type[1:] == LAST
            ended, tagged = ended + last.sum((0, -1)), tagged + (last & (discount[1:] == 0)).sum((0, -1))
            state, _ = program.iterate(state)
        assert torch.equal(count, ended.double()) and torch.equal(rate, tagged / ended)
    assert any(0 < r < 1 for _, rate, _ in seen for r in rate.flatten().tolist())


def test_runners_that_have_left_the_game_were_tagged():
    env = TagContinuous(num_taggers=1, num_runners=4, num_other_agents_observed=2)
    state = env.reset(random.split(random.key(0), 2))
    alive = torch.tensor([[True, True, False, False, True], [True, False, False, False, True]])
    assert env.extras(state._replace(alive=alive))["episode"]["tag_rate"].tolist() == [0.5, 0.75]
    stays = TagContinuous(
        num_taggers=1, num_runners=4, num_other_agents_observed=2, runner_exits_game_after_tagged=False
    )
    assert "episode" not in stays.extras(state)  # nobody leaves: nobody knows


def test_the_country_is_reported_as_the_oracle_counts_it(seed):
    days = 45
    env, oracle, rng = CovidEconomy(max_episode_steps=days), Oracle(), np.random.default_rng(seed)
    keys = random.key(0)[None]
    state, timestep = env.init(keys)
    sums, people, best = (
        dict.fromkeys(("unemployment", "stringency", "production", "subsidies"), 0.0),
        oracle.pop.sum(),
        oracle.pmax.sum(),
    )
    for i in range(days):
        action = {"governor": rng.integers(0, 11, N), "planner": rng.integers(0, 21, 1)}
        oracle.step(action)
        state, timestep = env.step(state, {g: torch.from_numpy(a)[None] for g, a in action.items()}, keys)
        sums["unemployment"] += oracle.U.sum() / people
        sums["stringency"] += (oracle.level(i + 1) * oracle.pop).sum() / people
        sums["production"] += oracle.prod.sum() / best
        sums["subsidies"] += (oracle.post - oracle.prod).sum() / best
    assert timestep.extras["game_over"].item()
    told = {name: x.item() for name, x in timestep.extras["episode"].items()}
    for name, total in sums.items():
        assert told[name] == pytest.approx(total / days, rel=1e-5, abs=1e-7)
    for name, x in (
        ("infected", oracle.I),
        ("vaccinated", oracle.V),
        ("deaths", oracle.D),
        ("recovered", oracle.R - oracle.V - oracle.D),
    ):
        assert told[name] == pytest.approx(x.sum(), rel=1e-5)


def test_the_planners_reward_is_its_two_indices():
    env, keys = CovidEconomy(max_episode_steps=10), random.key(0)[None]
    state, timestep = env.init(keys)
    total = 0.0
    for i in range(10):
        action = {"governor": torch.full((1, N), i), "planner": torch.tensor([[7]])}
        state, timestep = env.step(state, action, keys)
        total += timestep.reward["planner"].item()
    told = timestep.extras["episode"]
    alpha = env.planner.alpha
    weighed = alpha * told["health_index"] + (1 - alpha) * told["economic_index"]
    assert weighed.item() == pytest.approx(total / 10, rel=1e-5)


def test_policies_report_rewards_and_explained_variance():
    program = anakin(TagGridWorld(num_taggers=2, grid_length=3, start="uniform", max_episode_steps=7))
    state = program.init(0)
    trajectory = program.rollout(state)[1]
    _, metrics = program.iterate(state)
    counts = trajectory.timestep.step_type[:-1] != LAST
    keys = random.at(state.learner_keys, torch.tensor(0))
    batch = bind(program.agent, state.learner.params | state.learner.buffers).prepare(trajectory, keys)
    for name in ("tagger", "runner"):
        reward = trajectory.timestep.reward[name][1:][counts]
        for what, x in (("mean", reward.mean()), ("min", reward.min()), ("max", reward.max())):
            torch.testing.assert_close(metrics[f"{name}/reward_{what}"].float(), x)
        value, target = (
            batch.report[f"{name}/{column}"].double().numpy()[counts] for column in ("value", "value_target")
        )
        explained = 1 - (target - value).var() / target.var()
        assert metrics[f"{name}/explained_variance"].item() == pytest.approx(explained, rel=1e-4, abs=1e-4)
