"""COVID-19 and the economy: 51 governors decide how strictly to close their states, a planner how much money to send.

The model of Trott et al. 2021 (https://arxiv.org/abs/2108.02904), which WarpDrive, Lan et al. 2021
(https://arxiv.org/abs/2108.13976), runs on a GPU. It is a game to study learning with, and says nothing about what
anybody should do in a pandemic. Equations, data and licences: docs/covid-economy.md.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import softplus
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, number, true_or_false
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import ACTION_MASK, Tree

DATA = Path(__file__).parent / "data"
NUM_LEVELS, NUM_SUBSIDIES = 10, 20
START = 81
"""The episode's day 0, 2020-03-22, counted from 2020-01-01, when all states were at level 1."""
LAG = 29
"""Days until a level changes how fast the disease spreads."""
NIBBLE, PER_WORD, WORD = 15, 15, 2**60 - 1
"""How levels of past days are kept: four bits each, 15 of them in an int64."""
RECOVERY, DEATH = 1 / 14, 0.02
"""Share of the infected that recover or die in a day, and of those the share that die."""
DECAY_DAYS = (27.72427749633789, 62.91925048828125, 129.2318572998047, 264.43182373046875, 542.06005859375)
"""Of the five memories that unemployment has of changes of the level."""
WINDOW = 600
"""Days after which unemployment forgets a change altogether."""
WORKING, SICK = 0.6, 0.1
"""Share of the people that work in good times, and of the infected that cannot."""
US_POPULATION, GDP_PER_PERSON, MAX_SUBSIDY, VALUE_OF_LIFE = 328_737_916, 65_300, 20_000, 10_000_000
"""Dollars; the first two of a person and year."""
INTEREST = 0.03
"""What the planner pays for the money that it sends."""

COUNTRY = ("unemployment", "stringency", "production", "subsidies", "health_index", "economic_index")
"""Numbers of the country that are reported as means over the days of an episode."""

PLANNER_ALPHA = 0.757
PLANNER_BOUNDS = (-0.007381112780421972, -0.0001451095740776509, 0.002124679973348975, 0.00270779593847692)
"""The planner's row of data/covid_states.csv: its weight of health, and between what health and economy are scaled."""


class CovidEconomyState(NamedTuple):
    """N = 51 states. People are counted as fractions of their state's population.

    The epidemic is float64: it adds up, 540 times, flows of a thousandth of what they are added to. In float32
    observations would be off by 5e-6; as it is, observations and rewards are off by 4e-7 and 2e-6.
    """

    day: Tensor
    """`[B]` int32, since the start."""
    recent: Tensor
    """`[B, N]` int64, stringency of the last 15 days, four bits each, today's lowest. As bytes `[B, 29, N]` the levels
    would be shifted by loops that the compiler does not vectorise: 50 times slower, half of a step."""
    older: Tensor
    """`[B, N]` int64, likewise of the 15 days before."""
    wait: Tensor
    """`[B, N]` int32, days until the governor may act."""
    subsidy: Tensor
    """`[B]` int32, level 0 to 20."""
    susceptible: Tensor
    """`[B, N]` float64."""
    infected: Tensor
    """`[B, N]` float64."""
    removed: Tensor
    """`[B, N]` float64, all that have had the disease; a fiftieth of them died."""
    vaccinated: Tensor
    """`[B, N]` float64."""
    memory: Tensor
    """`[B, 5, N]`, sums of past changes of the level, each forgotten at another speed."""
    unemployed: Tensor
    """`[B, N]`."""
    output: Tensor
    """`[B, N]`, what is produced or paid in subsidies, by what is produced in good times. 0 on the first day."""
    scales: Tensor
    """`[B, 3]` float64, of the spread, of what levels do against it, and of what they do to employment."""
    country: Tensor
    """`[B, 6]`, sums over the days so far of what `COUNTRY` names."""


class _Tables(NamedTuple):
    """Constants of the states, each `[N]` where nothing else is said. Float64 up to `value`."""

    spread: Tensor
    response: Tensor
    """Infections per day, infected and susceptible without measures, and what a level adds to that (it is negative)."""
    susceptible: Tensor
    infected: Tensor
    removed: Tensor
    doses: Tensor
    """Of one delivery."""
    population: Tensor
    value: Tensor
    """What all lives are worth, by a year's production in good times."""
    recent: Tensor
    older: Tensor
    changes: Tensor
    """`[82, N]`, of the level on days up to the start."""
    memory: Tensor
    """`[5, N]`."""
    weights: Tensor
    """`[5, N]`."""
    fades: Tensor
    """`[5, 1]`, what a memory loses in a day: float32 holds that better than what it keeps, which is almost 1."""
    rest: Tensor
    """`[5, 1]`, what is left of it after 600 days."""
    unemployed: Tensor
    least: Tensor
    """Unemployment in percent, without that by changes of the level."""
    capacity: Tensor
    """Who works in good times, the softplus of 0 being unemployed as well."""
    subsidy: Tensor
    """What one level pays, by production in good times."""
    share: Tensor
    """Of the country's production in good times."""
    people: Tensor
    """Of the country's people."""


class Welfare(NamedTuple):
    """How a group weighs health against economy, and the scales of both: floats, or `[N]`."""

    alpha: Any
    health_low: Any
    health_width: Any
    economy_low: Any
    economy_width: Any


class CovidEconomy(TensorEnv):
    """Each step is a day, from 2020-03-22; the reward weighs deaths against production.

    Two groups: 51 `governor`s in the order of data/covid_states.csv, and one `planner`. Actions of governors: 0 keeps
    the level of stringency, 1 to 10 sets it, which is allowed again 28 days later. Actions of the planner: the level of
    subsidies, 0 to 20, to which it is bound for 90 days. What the `action_mask` forbids is taken as 0, or for the
    planner as the level that it has.

    Nothing terminates: the original's `done` after 540 days is a truncation, `LAST` with discount 1, unless `terminal`.
    Nothing is random, unless `randomise`.

    Observation of a governor, `numbers` `[51, 64]` and `action_mask` `[51, 11]`: which state it is (51); susceptible,
    infected, recovered or vaccinated, dead, vaccinated, unemployed (by population); output (by that of good times);
    the level that acts on tomorrow's infections, its own level (by 10); then what all know: days until the planner
    decides (by 90), level of subsidy (by 20), days from tomorrow until vaccines come (by their interval, at most 1:
    0 on the eve of the first delivery, 1 on that of a later one, which counts to the next), day (by 540), and with
    `observe_rate` doses a day and person, 0 before the first delivery. Observation of the planner, `numbers` `[1, 463]`
    and `action_mask` `[1, 21]`: those nine numbers of a state, each of all 51 states, and what all know.

    Reports of an episode, all for the country: as metrics `episode_infected`, `episode_recovered`, `episode_deaths` and
    `episode_vaccinated`, people at its end; as means over its days `episode_unemployment`, share of the people;
    `episode_stringency`, level that a person lives under; `episode_production` without subsidies and
    `episode_subsidies`, by production in good times; `episode_health_index` and `episode_economic_index`, each between
    what the strictest (health) and the loosest (economy) policies reach, which the planner's reward weighs.

    Args:
      max_episode_steps: days, at most 600.
      terminal: True makes the last day an end, after which there is no value, as in the original: agents that know the
        day then learn to do best until that day.
      enforce_masks: False applies a governor's level even where the mask forbids it, as the original does.
      cooldown: days from one change of a level to the next.
      subsidy_interval: days from one decision of the planner to the next.
      vaccine_day: when vaccination begins; 296 is 2021-01-12.
      vaccine_interval: days from one delivery of vaccines to the next, which come on its multiples.
      vaccines_per_million: doses a day per million people; one dose makes immune.
      observe_rate: whether everybody is told how many doses there are.
      governor_health_priority: factor of the odds of health against economy, as inferred from what each state did.
      planner_health_priority: factor of the odds of health against economy, of the planner.
      risk_aversion: the eta of the isoelastic utility of production, at most 10.
      reward_normalization_factor: what all rewards are divided by.
      spread_scale: factor of the rate of infection without measures.
      response_scale: factor of how much a level lowers that rate.
      unemployment_scale: factor of how a change of the level changes unemployment.
      randomise: each episode draws the three scales anew, up to so much below and above, as a fraction.
    """

    def __init__(
        self,
        max_episode_steps: int = 540,
        enforce_masks: bool = True,
        cooldown: int = 28,
        subsidy_interval: int = 90,
        vaccine_day: int = 296,
        vaccine_interval: int = 1,
        vaccines_per_million: float = 3000.0,
        observe_rate: bool = False,
        governor_health_priority: float = 0.3,
        planner_health_priority: float = 0.45,
        risk_aversion: float = 2.0,
        reward_normalization_factor: float = 1.0,
        spread_scale: float = 1.0,
        response_scale: float = 1.0,
        unemployment_scale: float = 1.0,
        randomise: float = 0.0,
        terminal: bool = False,
    ) -> None:
        at_least(1, max_episode_steps=max_episode_steps, cooldown=cooldown, subsidy_interval=subsidy_interval)
        at_least(1, vaccine_interval=vaccine_interval)
        at_least(0, vaccine_day=vaccine_day)
        true_or_false(enforce_masks=enforce_masks, terminal=terminal, observe_rate=observe_rate)
        if max_episode_steps > WINDOW:
            raise ValueError(
                f"max_episode_steps={max_episode_steps} is more than {WINDOW}, the days that unemployment remembers; "
                "use fewer."
            )
        self.max_episode_steps, self.terminal = max_episode_steps, terminal
        self.enforce_masks, self.cooldown = enforce_masks, cooldown
        self.subsidy_interval, self.vaccine_day, self.vaccine_interval = subsidy_interval, vaccine_day, vaccine_interval
        self.first_delivery = -(-max(vaccine_day, 1) // vaccine_interval) * vaccine_interval
        self.risk_aversion = number("risk_aversion", risk_aversion, 0.0, 10.0)
        self.reward_divisor = number("reward_normalization_factor", reward_normalization_factor, 1e-6, 1e6)
        self.randomise = number("randomise", randomise, 0.0, 1.0)
        scales = {
            "spread_scale": spread_scale,
            "response_scale": response_scale,
            "unemployment_scale": unemployment_scale,
        }
        scales = [number(name, scale, 0.0, 10.0) for name, scale in scales.items()]
        self.scales = torch.tensor(scales, dtype=torch.float64)
        states = np.genfromtxt(DATA / "covid_states.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
        self.names = states["state"].tolist()
        doses = number("vaccines_per_million", vaccines_per_million, 0.0, 1e6)
        self.observed_rate = doses / 1e6 if observe_rate else None
        self.tables = _tables(states, vaccine_interval * doses)
        priority = number("governor_health_priority", governor_health_priority, 0.0, 1e6)
        alpha, *bounds = (torch.from_numpy(states[k]) for k in ("alpha_health", "min_h", "max_h", "min_e", "max_e"))
        self.governor = pytree.tree_map(lambda x: x.float(), _welfare(alpha, bounds, priority))
        priority = number("planner_health_priority", planner_health_priority, 0.0, 1e6)
        self.planner = _welfare(PLANNER_ALPHA, PLANNER_BOUNDS, priority)
        n, common = len(states), 4 + observe_rate
        self.spec = EnvSpec(
            "covid_economy",
            observation={
                "governor": {"numbers": Array((n + 9 + common,)), ACTION_MASK: Array((NUM_LEVELS + 1,), torch.bool)},
                "planner": {
                    "numbers": Array((9 * n + common,)),
                    ACTION_MASK: Array((NUM_SUBSIDIES + 1,), torch.bool),
                },
            },
            action={"governor": Discrete(NUM_LEVELS + 1), "planner": Discrete(NUM_SUBSIDIES + 1)},
            max_episode_steps=max_episode_steps,
            groups={"governor": n, "planner": 1},
        )

    def reset(self, keys: Tensor) -> CovidEconomyState:
        """2020-03-22, with the levels of the weeks before."""
        tables, size = _on(self.tables, keys.device), keys.shape[0]
        scales = _each(self.scales.to(keys.device), size)
        if self.randomise:
            scales = scales * random.uniform(keys, 3, 1.0 - self.randomise, 1.0 + self.randomise).double()
        day = torch.zeros(size, dtype=torch.int32, device=keys.device)
        wait = torch.zeros(size, len(self.names), dtype=torch.int32, device=keys.device)
        return CovidEconomyState(
            day=day,
            recent=_each(tables.recent, size),
            older=_each(tables.older, size),
            wait=wait,
            subsidy=torch.zeros_like(day),
            susceptible=_each(tables.susceptible, size),
            infected=_each(tables.infected, size),
            removed=_each(tables.removed, size),
            vaccinated=torch.zeros_like(wait, dtype=torch.float64),
            memory=_each(tables.memory, size),
            unemployed=_each(tables.unemployed, size),
            output=torch.zeros_like(wait, dtype=torch.float32),
            scales=scales,
            country=torch.zeros(size, len(COUNTRY), device=keys.device),
        )

    def transition(
        self, state: CovidEconomyState, action: dict[str, Tensor], keys: Tensor
    ) -> tuple[CovidEconomyState, dict[str, Tensor], Tensor]:
        """A day: levels, subsidies, vaccines and infections, unemployment, production."""
        tables, day = _on(self.tables, keys.device), state.day + 1
        spread, response, impact = state.scales[..., None].unbind(-2)

        chosen, may_act = action["governor"], state.wait == 0
        wait = torch.where(may_act, torch.where(chosen > 0, self.cooldown - 1, 0), state.wait - 1).int()
        acts = (chosen > 0) & may_act if self.enforce_masks else chosen > 0
        level = torch.where(acts, chosen, level_of(state))
        recent = (state.recent << 4 | level) & WORD
        older = (state.older << 4 | state.recent >> 4 * (PER_WORD - 1)) & WORD
        decides = state.day % self.subsidy_interval == 0
        subsidy = torch.where(decides, action["planner"][:, 0], state.subsidy).int()

        s, i = state.susceptible, state.infected
        delivered = (day >= self.vaccine_day) & (day % self.vaccine_interval == 0)
        doses = torch.minimum(tables.doses * delivered[:, None], s)
        rate = spread * tables.spread + response * tables.response * _lagged(state)
        infections = rate * s * i * (1 - doses / (s + 1e-10 / tables.population))
        ended = RECOVERY * i
        s, i = (s - infections - doses).clamp(min=0), (i + infections - ended).clamp(min=0)
        removed, vaccinated = state.removed + ended, state.vaccinated + doses

        # A change counts less every day, and for nothing after 600: only those of before the start get so old. (An
        # episode of 600 days is followed by a reset, for which this is computed too, and thrown away.)
        change = (level - level_of(state)).float()
        forgotten = tables.changes[(day + START - WINDOW).clamp(0, START)]
        memory = state.memory - tables.fades * state.memory + change[:, None] - tables.rest * forgotten[:, None]
        pressure = impact.float() * (tables.weights * memory).sum(1)
        unemployed = (softplus(pressure) + tables.least) / 100

        sick = (SICK * i + DEATH * removed).float()
        paid = subsidy[:, None] * tables.subsidy
        output = (WORKING - WORKING * sick - unemployed).clamp(min=0) / tables.capacity + paid

        # Deaths of the day come from what ended: as a difference of sums of deaths they would lose digits.
        health = -(DEATH * ended * tables.value).float()
        paid, produced = tables.share * paid, tables.share * output  # of the country's production
        planner = self.indices(
            (tables.share * health).sum(-1, keepdim=True),
            (produced - (1 + INTEREST) * paid).sum(-1, keepdim=True),
            self.planner,
        )
        governor = _on(self.governor, keys.device)
        reward = {
            "governor": _weighed(governor, *self.indices(health, output, governor)) / self.reward_divisor,
            "planner": _weighed(self.planner, *planner) / self.reward_divisor,
        }
        each = tables.people * unemployed, tables.people * level, produced - paid, paid
        country = state.country + torch.cat([*(x.sum(-1, keepdim=True) for x in each), *planner], -1)
        epidemic, economy = (s, i, removed, vaccinated), (memory, unemployed, output)
        new = CovidEconomyState(day, recent, older, wait, subsidy, *epidemic, *economy, state.scales, country)
        return new, reward, (day >= self.max_episode_steps) & self.terminal

    def observe(self, state: CovidEconomyState) -> dict[str, dict[str, Tensor]]:
        """See the class."""
        day, device = state.day, state.day.device
        people = [state.susceptible, state.infected, state.removed + state.vaccinated]
        people = [x.float() for x in (*people, DEATH * state.removed, state.vaccinated)]
        levels = [x.float() / NUM_LEVELS for x in (_lagged(state), level_of(state))]
        own = torch.stack([*people, state.unemployed, state.output, *levels], 1)  # [B, 9, N]
        tomorrow = day + 1
        soon = ((self.first_delivery - tomorrow) / self.vaccine_interval).clamp(max=1)
        later = 1 - (tomorrow % self.vaccine_interval) / self.vaccine_interval
        since = day % self.subsidy_interval
        common = [
            (self.subsidy_interval - since) / self.subsidy_interval,
            state.subsidy / NUM_SUBSIDIES,
            torch.where(tomorrow <= self.first_delivery, soon, later),
            day / self.max_episode_steps,
        ]
        if self.observed_rate is not None:
            common.append(torch.where(tomorrow <= self.first_delivery, 0.0, self.observed_rate))
        common = torch.stack(common, -1)  # [B, 4 or 5]
        size, n = own.shape[0], own.shape[2]
        which = torch.eye(n, device=device).expand(size, -1, -1)
        governor = torch.cat([which, own.transpose(1, 2), common[:, None].expand(-1, n, -1)], -1)
        planner = torch.cat([own.flatten(1), common], -1)[:, None]
        return {
            "governor": {"numbers": governor, ACTION_MASK: _mask(state.wait == 0, NUM_LEVELS)},
            "planner": {"numbers": planner, ACTION_MASK: _mask((since == 0)[:, None], NUM_SUBSIDIES)},
        }

    def extras(self, state: CovidEconomyState) -> dict[str, Tree]:
        """What is reported of an episode; see the class."""
        population = _on(self.tables.population, state.day.device)
        people = {
            "infected": state.infected,
            "recovered": (1 - DEATH) * state.removed,
            "deaths": DEATH * state.removed,
            "vaccinated": state.vaccinated,
        }
        means = state.country / state.day.clamp(min=1)[..., None]
        told = {name: (population * x).sum(-1).float() for name, x in people.items()}
        return {"episode": told | dict(zip(COUNTRY, means.unbind(-1), strict=True))}

    def indices(self, health: Tensor, output: Tensor, welfare: Welfare) -> tuple[Tensor, Tensor]:
        """Of health and of the economy, each 0 and 1 where the two extreme policies are on average.

        Args:
          health: what the day's deaths are worth, less than 0, by a year's production in good times.
          output: what is produced or paid, by a day's production in good times.
          welfare: of those who are concerned.
        """
        output = output.clamp(0.1, 3.0)
        power = 1 - self.risk_aversion
        utility = output.log()
        if power != 0:  # output ** power - 1 has no digits left where the power is almost 0
            utility = (power * utility).expm1() / power
        economy = (1 + utility) / 365
        w = welfare
        return (health - w.health_low) / w.health_width, (economy - w.economy_low) / w.economy_width


def _tables(states: Any, doses_per_million: float) -> _Tables:
    """Everything is computed in float64; the epidemic's tables stay so."""
    n, population = len(states), states["population"].astype(np.float64)
    moves = np.loadtxt(DATA / "covid_prestart_policy_changes.csv", delimiter=",", skiprows=1, dtype=np.int64)
    levels = np.ones((START + 1, n))
    for day, state, level in moves:
        levels[day:, state] = level
    words = levels.astype(np.int64)
    changes = np.diff(levels, axis=0, prepend=levels[:1])
    days = np.array(DECAY_DAYS)[:, None]
    least = states["unemp_bias_pct"]
    best = (np.log(2) + least) / 100
    capacity = WORKING - best
    workforce = int(WORKING * US_POPULATION - (best * population).sum())
    wage = GDP_PER_PERSON / (workforce / US_POPULATION) / 365  # dollars a day
    good_times = population * capacity * wage
    single = {
        "changes": changes,
        "memory": np.exp(-np.arange(START, -1, -1) / days) @ changes,
        "fades": -np.expm1(-1 / days),
        "rest": np.exp(-WINDOW / days),
        "weights": np.stack([states[f"w{k}"] for k in range(len(DECAY_DAYS))]),
        "unemployed": states["unemp_pct0"] / 100,
        "least": least,
        "capacity": capacity,
        "subsidy": MAX_SUBSIDY / 365 / NUM_SUBSIDIES / (capacity * wage),
        "share": good_times / good_times.sum(),
        "people": population / population.sum(),
    }
    double = {
        "spread": states["beta_intercept"],
        "response": states["beta_slope"],
        "susceptible": states["S0"] / population,
        "infected": states["I0"] / population,
        "removed": states["R0"] / population,
        "doses": np.floor(doses_per_million * population / 1e6) / population,
        "population": population,
        "value": VALUE_OF_LIFE / (365 * capacity * wage),
    }
    return _Tables(
        recent=torch.from_numpy(sum(words[-1 - age] << 4 * age for age in range(PER_WORD))),
        older=torch.from_numpy(sum(words[-1 - PER_WORD - age] << 4 * age for age in range(PER_WORD))),
        **{k: torch.from_numpy(np.ascontiguousarray(x)).float() for k, x in single.items()},
        **{k: torch.from_numpy(np.ascontiguousarray(x)) for k, x in double.items()},
    )


def _weighed(welfare: Welfare, health: Tensor, economy: Tensor) -> Tensor:
    """The reward."""
    return welfare.alpha * health + (1 - welfare.alpha) * economy


def _welfare(alpha: Any, bounds: Sequence[Any], priority: float) -> Welfare:
    health_low, health_high, economy_low, economy_high = bounds
    odds = priority * alpha / (1 - alpha)
    widths = (health_high - health_low + 1e-10, economy_high - economy_low + 1e-10)
    return Welfare(odds / (1 + odds), health_low, widths[0], economy_low, widths[1])


def level_of(state: CovidEconomyState) -> Tensor:
    """Today's level of each state, `[..., N]` int64."""
    return state.recent & NIBBLE


def _lagged(state: CovidEconomyState) -> Tensor:
    """The level `[B, N]` that acts on tomorrow's infections."""
    return state.older >> 4 * (LAG - 1 - PER_WORD) & NIBBLE


def _mask(may_act: Tensor, largest: int) -> Tensor:
    """Action 0 always, the others where one may act."""
    zero = torch.arange(largest + 1, device=may_act.device) == 0
    return may_act.to(torch.uint8)[..., None] + zero.to(torch.uint8) > 0  # bytes are vectorised better than bool


def _each(table: Tensor, size: int) -> Tensor:
    """One copy per environment."""
    return table.expand(size, *table.shape).clone()


def _on(tables: Any, device: torch.device) -> Any:
    return pytree.tree_map(lambda x: x.to(device), tables)
