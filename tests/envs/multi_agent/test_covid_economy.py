"""An oracle in NumPy float64 tells what should happen: people, dollars, the whole past summed anew each day."""

import csv
import itertools
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.compile import Compiler
from torchpod.envs.multi_agent import covid_economy
from torchpod.envs.multi_agent.covid_economy import CovidEconomy
from torchpod.types import FIRST, LAST, MID

ROOT = Path(__file__).parents[3]
FILES = Path(covid_economy.__file__).parent / "data"
LAMBDA = np.array([27.72427749633789, 62.91925048828125, 129.2318572998047, 264.43182373046875, 542.06005859375])
N, CALIFORNIA, START = 51, 4, 81
GROUPS = ("governor", "planner")


class Oracle:
    """One environment; the names of the arguments are those of `CovidEconomy`, those of the rest of the equations."""

    def __init__(
        self,
        max_episode_steps=540,
        enforce_masks=True,
        cooldown=28,
        subsidy_interval=90,
        vaccine_day=296,
        vaccine_interval=1,
        vaccines_per_million=3000,
        observe_rate=False,
        governor_health_priority=0.3,
        planner_health_priority=0.45,
        risk_aversion=2,
        reward_normalization_factor=1,
        spread_scale=1,
        response_scale=1,
        unemployment_scale=1,
    ):
        self.T, self.enforce, self.cooldown, self.dt_s = max_episode_steps, enforce_masks, cooldown, subsidy_interval
        self.t_v, self.dt_v, self.vpm, self.eta = vaccine_day, vaccine_interval, vaccines_per_million, risk_aversion
        self.rate, self.divisor = observe_rate, reward_normalization_factor
        self.m_i, self.m_s, self.m_u = spread_scale, response_scale, unemployment_scale
        with open(FILES / "covid_states.csv") as file:
            rows = list(csv.DictReader(file))
        self.table = {k: np.array([float(row[k]) for row in rows]) for k in rows[0] if k != "state"}
        c, self.pop = self.table, self.table["population"]
        self.levels = np.ones((601 + self.T, N))  # of days -600 to T
        with open(FILES / "covid_prestart_policy_changes.csv") as file:
            for day, state, level in list(csv.reader(file))[1:]:
                self.levels[600 - START + int(day) :, int(state)] = int(level)
        assert (self.level(0) == c["stringency0"]).all()
        self.w = np.stack([c[f"w{k}"] for k in range(5)])
        self.kernel = np.exp(-np.arange(600) / LAMBDA[:, None])
        us = 328737916
        no_covid = (math.log(2) + c["unemp_bias_pct"]) * self.pop / 100
        self.wage = 65300 / (int(0.6 * us - no_covid.sum()) / us) / 365
        self.pmax = self.production(0, 0, no_covid)
        self.bounds = {
            "governor": (c["min_h"], c["max_h"], c["min_e"], c["max_e"]),
            "planner": (-0.007381112780421972, -0.0001451095740776509, 0.002124679973348975, 0.00270779593847692),
        }
        z_i = governor_health_priority * c["alpha_health"] / (1 - c["alpha_health"])
        z_p = planner_health_priority * 0.757 / (1 - 0.757)
        self.alpha = {"governor": z_i / (1 + z_i), "planner": z_p / (1 + z_p)}

        self.t, self.sigma, self.cooldown_until = 0, 0, np.zeros(N, int)
        self.S, self.I, self.R, self.V = c["S0"], c["I0"], c["R0"], np.zeros(N)
        self.D, self.U, self.post = 0.02 * c["R0"], c["unemp_pct0"] * self.pop / 100, np.zeros(N)

    def level(self, t):
        return self.levels[600 + t]

    def production(self, infected, dead, unemployed):
        cannot = 0.6 * (0.1 * infected + dead) + unemployed
        return np.maximum(0, 0.6 * self.pop - cannot) * self.wage

    def masks(self):
        governor, planner = np.ones((N, 11), bool), np.ones((1, 21), bool)
        governor[:, 1:] = (self.t >= self.cooldown_until)[:, None]
        planner[:, 1:] = self.t % self.dt_s == 0
        return {"governor": governor, "planner": planner}

    def step(self, action):
        mask = self.masks()["governor"]
        self.t += 1
        t, c, pop = self.t, self.table, self.pop
        level = self.level(t - 1).copy()
        for i, a in enumerate(action["governor"]):
            if a > 0 and (mask[i, a] or not self.enforce):
                level[i] = a
            if t == self.cooldown_until[i] + 1:
                self.cooldown_until[i] += 1 if a == 0 else self.cooldown
        self.levels[600 + t] = level
        if (t - 1) % self.dt_s == 0:
            self.sigma = action["planner"][0]
        sub = self.sigma / 20 * pop * 20000 / 365

        delivered = t >= self.t_v and t % self.dt_v == 0
        doses = np.floor(self.dt_v * self.vpm * pop / 1e6) if delivered else np.zeros(N)
        beta = self.m_i * c["beta_intercept"] + self.m_s * c["beta_slope"] * self.level(t - 29)
        v = np.minimum(doses, self.S)
        new = beta * self.S / pop * self.I * (1 - np.minimum(1, doses / (self.S + 1e-10)))
        self.S, self.I, self.R, self.V = (
            np.maximum(0, self.S - new - v),
            np.maximum(0, self.I + new - self.I / 14),
            np.maximum(0, self.R + self.I / 14 + v),
            self.V + v,
        )
        dead = 0.02 * (self.R - self.V)
        deaths, self.D = dead - self.D, dead

        past = self.levels[t : 601 + t][::-1]  # of days t to t - 600
        filtered = self.kernel @ (past[:-1] - past[1:])
        self.U = (np.logaddexp(0, self.m_u * (self.w * filtered).sum(0)) + c["unemp_bias_pct"]) * pop / 100
        self.prod = self.production(self.I, self.D, self.U)
        self.post = self.prod + sub

        health, best = -deaths * 1e7 / 365, self.pmax.sum()
        planner = np.array([health.sum() / best]), np.array([(self.post.sum() - 1.03 * sub.sum()) / best])
        return {
            "governor": self.reward("governor", health / self.pmax, self.post / self.pmax),
            "planner": self.reward("planner", *planner),
        }

    def reward(self, group, h, f):
        f = np.clip(f, 0.1, 3)
        e = (1 + (np.log(f) if self.eta == 1 else (f ** (1 - self.eta) - 1) / (1 - self.eta))) / 365
        h_0, h_1, e_0, e_1 = self.bounds[group]
        alpha = self.alpha[group]
        whole = alpha * (h - h_0) / (h_1 - h_0 + 1e-10) + (1 - alpha) * (e - e_0) / (e_1 - e_0 + 1e-10)
        return whole / self.divisor

    def observe(self):
        people = np.stack([self.S, self.I, self.R, self.D, self.V, self.U]) / self.pop
        levels = np.stack([self.level(self.t - 28), self.level(self.t)]) / 10
        own = np.concatenate([people, self.post[None] / self.pmax, levels])  # [9, N]
        tomorrow, dt = self.t + 1, self.dt_v
        first = next(t for t in itertools.count(1) if t >= self.t_v and t % dt == 0)
        vaccine = min(1, (first - tomorrow) / dt) if tomorrow <= first else 1 - tomorrow % dt / dt
        common = [(self.dt_s - self.t % self.dt_s) / self.dt_s, self.sigma / 20, vaccine, self.t / self.T]
        common += [self.vpm / 1e6 if tomorrow > first else 0.0] * self.rate
        governor = np.concatenate([np.eye(N), own.T, np.tile(common, (N, 1))], 1)
        return {"governor": governor, "planner": np.concatenate([own.ravel(), common])[None]}


class Anything:
    """Random actions: the governors of the first half do what they like, the others only what they may."""

    def __init__(self, seed):
        self.rng = np.random.default_rng(seed)

    def __call__(self, t, masks):
        governor = self.rng.integers(0, 11, N)
        governor[N // 2 :] *= masks["governor"][N // 2 :, 1]
        return {"governor": governor, "planner": self.rng.integers(0, 21, 1)}


def always(level, subsidy=0):
    """All governors choose that level each day; the subsidy is for the first 90 days."""
    return lambda t, masks: {"governor": np.full(N, level), "planner": np.array([subsidy if t < 90 else 0])}


def require_equal(env, oracles, policies, step=None):
    """Plays an episode of oracles and rows of a batch side by side, and the first step of the next one."""
    step, days = step or env.step, env.max_episode_steps
    keys = random.split(random.key(0), len(oracles))
    state, first = env.init(random.at(keys, 0))
    timestep = first
    for t in range(days + 1):
        for k, oracle in enumerate(oracles):
            masks, numbers = oracle.masks(), oracle.observe()
            for g in GROUPS:
                seen = pytree.tree_map(lambda x, k=k: x[k].numpy(), timestep.observation[g])
                assert np.array_equal(seen["action_mask"], masks[g]), (t, k, g)
                np.testing.assert_allclose(seen["numbers"], numbers[g], rtol=0, atol=1e-6, err_msg=f"{t} {k} {g}")
        actions = [policy(t, oracle.masks()) for policy, oracle in zip(policies, oracles, strict=True)]
        batch = {g: torch.from_numpy(np.stack([a[g] for a in actions])) for g in GROUPS}
        state, timestep = step(state, batch, random.at(keys, t + 1))
        if t == days:
            break
        assert (timestep.step_type == (LAST if t == days - 1 else MID)).all()
        rewards = [oracle.step(a) for oracle, a in zip(oracles, actions, strict=True)]
        for g in GROUPS:
            expected = np.stack([r[g] for r in rewards])
            np.testing.assert_allclose(timestep.reward[g].numpy(), expected, rtol=0, atol=1e-5, err_msg=f"{t} {g}")
            assert (timestep.discount[g] == 1).all()  # a truncation
    assert (timestep.step_type == FIRST).all()
    assert all(torch.equal(timestep.observation[g]["numbers"], first.observation[g]["numbers"]) for g in GROUPS)


@pytest.mark.parametrize(
    ("num_envs", "compiled"), [(5, False), (2, True), pytest.param(5, True, marks=pytest.mark.slow)]
)
def test_whole_episodes_equal_the_oracle(num_envs, compiled):
    env = CovidEconomy()
    policies = [Anything(0), always(10, 20), always(0), Anything(1), always(1)][:num_envs]
    require_equal(env, [Oracle() for _ in policies], policies, Compiler(compiled)(env.step))


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_an_episode_in_which_masks_are_not_enforced_equals_the_oracle(compiled):
    env = CovidEconomy(enforce_masks=False)
    step = Compiler(compiled)(env.step)
    require_equal(env, [Oracle(enforce_masks=False) for _ in range(2)], [Anything(2), always(3, 7)], step)


@pytest.mark.parametrize(
    "settings",
    [
        {"vaccine_day": 30, "vaccine_interval": 7, "vaccines_per_million": 8000, "risk_aversion": 1},
        {"vaccine_day": 50, "observe_rate": True, "reward_normalization_factor": 4},
        {"vaccine_day": 0, "vaccine_interval": 9, "vaccines_per_million": 9000, "observe_rate": True},
        {"cooldown": 10, "subsidy_interval": 13, "governor_health_priority": 1, "planner_health_priority": 2.5},
        {"spread_scale": 1.5, "response_scale": 0.8, "unemployment_scale": 1.7, "risk_aversion": 0.5},
    ],
)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_other_settings_equal_the_oracle_too(settings, compiled):
    env, oracles = CovidEconomy(200, **settings), [Oracle(200, **settings) for _ in range(2)]
    require_equal(env, oracles, [Anything(3), always(0, 20)], Compiler(compiled)(env.step))
    if "vaccine_interval" in settings:
        assert (oracles[1].S == 0).any() and (oracles[1].V > 0).all()  # all are immune before the vaccine is used up


def test_the_longest_episode_forgets_all_changes_before_the_start():
    env = CovidEconomy(600)
    require_equal(env, [Oracle(600)], [Anything(4)])


GOLDEN = {
    1: (3.281419e8, 3.989283e5, 1.971061e5, 3.942122e3, 2.629453e7, 5.483280e10, 0.876852, 0.873383, 0.872530),
    30: (3.249218e8, 1.510347e6, 2.305759e6, 4.611517e4, 3.441758e7, 5.219737e10, 0.670447, 0.745590, 0.704807),
    297: (2.849665e8, 2.475277e6, 4.129617e7, 7.864759e5, 2.461807e7, 5.518003e10, 0.796762, 0.745368, 0.772534),
    540: (4.382037e7, 8.242869e2, 2.849167e8, 1.025544e6, 1.893391e7, 5.700515e10, 0.918287, 0.969098, 0.972433),
}
"""All governors hold: susceptible, infected, recovered or vaccinated, dead, unemployed, production in dollars a day;
the rewards of California, of the mean governor, and of the planner. Computed apart, in float64."""


@pytest.mark.parametrize(
    ("level", "subsidy", "first", "dead", "total"),
    [
        (0, 0, (0.873383, 0.872530), 1.025544e6, (431.58957, 437.98232)),
        (1, 0, None, 4.662531e6, (379.96957, 369.77508)),
        (5, 20, (1.567495, 0.860241), 1.811712e6, (497.57759, 422.89522)),
    ],
)
def test_golden_values(level, subsidy, first, dead, total):
    env, oracle = CovidEconomy(enforce_masks=False), Oracle()
    pop, keys = torch.from_numpy(oracle.pop), random.key(0)[None]
    state, _ = env.init(keys)
    policy, totals = always(level, subsidy), torch.zeros(2, dtype=torch.float64)
    for t in range(1, 541):
        action = {g: torch.from_numpy(a)[None] for g, a in policy(t - 1, None).items()}
        state, timestep = env.step(state, action, keys)
        governor, planner = (timestep.reward[g][0].double() for g in GROUPS)
        mean = torch.stack([governor.mean(), planner[0]])
        totals += mean
        if t == 1 and first:
            np.testing.assert_allclose(mean, first, rtol=0, atol=2e-6)
        if level == 0 and t in GOLDEN:
            inner = state[0]
            s, i, c, v, u = (
                float((x[0] * pop).sum())
                for x in (inner.susceptible, inner.infected, inner.removed, inner.vaccinated, inner.unemployed)
            )
            produced = float((inner.output[0].double() * torch.from_numpy(oracle.pmax)).sum())
            np.testing.assert_allclose([s, i, c + v, 0.02 * c, u, produced], GOLDEN[t][:6], rtol=1e-6)
            np.testing.assert_allclose([governor[CALIFORNIA], *mean], GOLDEN[t][6:], rtol=0, atol=2e-6)
    assert 0.02 * float((state[0].removed[0] * pop).sum()) == pytest.approx(dead, rel=1e-6)
    np.testing.assert_allclose(totals, total, rtol=0, atol=1e-4)


def test_everybody_waits_for_the_day_on_which_vaccines_come_first():
    """Of the multiples of 7 the first that is not before day 30."""
    env, keys = CovidEconomy(vaccine_day=30, vaccine_interval=7, observe_rate=True), random.key(0)[None]
    state, timestep = env.init(keys)
    vaccinated, wait, rate = [], [], []
    for _ in range(45):
        vaccinated.append(float(state[0].vaccinated.sum()))
        wait.append(7 * float(timestep.observation["planner"]["numbers"][0, 0, -3]))
        rate.append(float(timestep.observation["governor"]["numbers"][0, 3, -1]))
        action = {"governor": torch.zeros(1, N).long(), "planner": torch.zeros(1, 1).long()}
        state, timestep = env.step(state, action, keys)
    assert vaccinated[34] == 0 < vaccinated[35] == vaccinated[41] < vaccinated[42]
    np.testing.assert_allclose(wait, [7] * 28 + [6, 5, 4, 3, 2, 1, 0] + [6, 5, 4, 3, 2, 1, 7] + [6, 5, 4], atol=1e-5)
    np.testing.assert_allclose(rate, [0] * 35 + [0.003] * 10)


@pytest.mark.parametrize("eta", [0, 0.5, 1 - 1e-6, 1, 1 + 1e-6, 1 + 1e-12, 2, 5, 10])
def test_utility_keeps_its_digits_whatever_the_risk_aversion(eta):
    """`(f ** p - 1) / p` is the series of p at 0; an own float64 sum where that needs no more than two terms."""
    env, f = CovidEconomy(risk_aversion=eta), np.array([0.01, 0.1, 0.5, 0.999, 1, 1.5, 3, 4], np.float32)
    health, economy = env.indices(torch.zeros(len(f)), torch.from_numpy(f), env.planner._replace(economy_low=0.0))
    seen = 365 * env.planner.economy_width * economy.double().numpy() - 1
    log, p = np.log(f.clip(0.1, 3).astype(np.float64)), 1 - eta
    expected = log + p * log**2 / 2 if abs(p) < 1e-5 else (np.exp(p * log) - 1) / p
    np.testing.assert_allclose(seen, expected, rtol=4e-6, atol=4e-7)
    assert health.isfinite().all()


def test_constants_that_follow_from_the_data():
    env, oracle = CovidEconomy(), Oracle()
    assert oracle.wage == pytest.approx(320.80615, rel=1e-7)
    np.testing.assert_allclose(oracle.pmax[:3], [8.99632697e8, 1.31358787e8, 1.28496913e9], rtol=1e-7)
    assert oracle.pmax.sum() * 365 == pytest.approx(2.146658485e13, rel=1e-7)
    assert env.planner.alpha == pytest.approx(0.5836545875, rel=1e-9)
    assert env.names[CALIFORNIA] == "California" and env.names[8] == "District of Columbia" and len(env.names) == N


@pytest.mark.parametrize(
    ("acts_on", "allowed"), [(range(1, 100), [0, 28, 56, 84]), ([5], [*range(5), *range(32, 100)])]
)
def test_a_governor_that_acts_waits_for_28_days(acts_on, allowed):
    env, keys = CovidEconomy(), random.key(0)[None]
    state, timestep = env.init(keys)
    seen = []
    for t in range(100):
        mask = timestep.observation["governor"]["action_mask"][0]
        assert mask[:, 0].all() and (mask[:, 1:] == mask[:, 1:2]).all()
        seen += [t] if mask[7, 1] else []
        governor = torch.zeros(1, N, dtype=torch.int64)
        governor[0, 7] = 1 + t % 10 if t + 1 in acts_on else 0
        state, timestep = env.step(state, {"governor": governor, "planner": torch.zeros(1, 1).long()}, keys)
        level = 10 * timestep.observation["governor"]["numbers"][0, 7, 59]
        last = max((x for x in allowed if x <= t and x + 1 in acts_on), default=None)
        assert round(float(level)) == (7 if last is None else 1 + last % 10)  # Delaware starts at 7
    assert seen == allowed


@pytest.mark.parametrize("terminal", [False, True])
def test_the_last_day_is_an_end_only_if_it_is_said_to_be(terminal):
    env, keys = CovidEconomy(4, terminal=terminal), random.split(random.key(0), 2)
    state, timestep = env.init(keys)
    zeros = {"governor": torch.zeros(2, N, dtype=torch.int64), "planner": torch.zeros(2, 1, dtype=torch.int64)}
    seen = []
    for _ in range(10):
        state, timestep = env.step(state, zeros, keys)
        seen.append((timestep.step_type[1].item(), timestep.discount["governor"].min().item()))
        assert (timestep.discount["governor"][1] == timestep.discount["planner"][1]).all()
    episode = [(MID, 1), (MID, 1), (MID, 1), (LAST, 0 if terminal else 1), (FIRST, 1)]
    assert seen == 2 * episode


def test_the_planner_is_bound_for_90_days():
    env, keys = CovidEconomy(), random.key(0)[None]
    state, timestep = env.init(keys)
    for t in range(200):
        mask = timestep.observation["planner"]["action_mask"][0, 0]
        assert mask[0] and (mask[1:] == (t % 90 == 0)).all()
        level = torch.tensor([[1 + t % 20]])
        state, timestep = env.step(state, {"governor": torch.zeros(1, N).long(), "planner": level}, keys)
        assert int(state[0].subsidy) == 1 + t // 90 * 90 % 20


def test_randomised_environments_differ_and_each_equals_its_oracle():
    env = CovidEconomy(60, randomise=0.2, spread_scale=1.1)
    keys = random.split(random.key(0), 3)
    scales = env.reset(random.at(keys, 0)).scales
    assert len(scales[:, 0].unique()) == 3 and len(env.reset(random.at(keys, 61)).scales.unique()) == 9
    names = ("spread_scale", "response_scale", "unemployment_scale")

    def oracles(rows):
        return [Oracle(60, **dict(zip(names, row, strict=True))) for row in rows]

    with pytest.raises(AssertionError, match="0 governor"):  # the start is the same, the first reward not
        require_equal(env, oracles(scales.flip(0).tolist()), [Anything(k) for k in range(3)])
    require_equal(env, oracles(scales.tolist()), [Anything(k) for k in range(3)])
    many = env.reset(random.split(random.key(1), 1000)).scales / torch.tensor([1.1, 1, 1])
    assert 0.8 <= many.min() < 0.81 and 1.19 < many.max() < 1.2
    assert (CovidEconomy().reset(keys).scales == 1).all()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"max_episode_steps": 601}, "601 is more than 600"),
        ({"max_episode_steps": 0}, "max_episode_steps=0"),
        ({"cooldown": 0}, "cooldown=0"),
        ({"vaccine_day": -1}, "vaccine_day=-1"),
        ({"enforce_masks": 1}, "enforce_masks=1"),
        ({"terminal": 0}, "terminal=0"),
        ({"randomise": 1.5}, "randomise=1.5"),
        ({"risk_aversion": -1.0}, "risk_aversion=-1"),
        ({"risk_aversion": 10.1}, "risk_aversion=10.1 is wrong; use a number from 0 to 10"),
        ({"reward_normalization_factor": 0.0}, "reward_normalization_factor=0"),
        ({"spread_scale": "a"}, "spread_scale='a'"),
    ],
)
def test_wrong_settings_are_refused(settings, match):
    with pytest.raises(ValueError, match=match):
        CovidEconomy(**settings)
