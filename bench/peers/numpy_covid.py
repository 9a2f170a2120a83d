"""The COVID-19 economy in NumPy: one game, arrays over its states. Model: docs/covid-economy.md."""

from pathlib import Path

import numpy as np

DATA = Path(__file__).resolve().parents[2] / "envs" / "multi_agent" / "data"
START, WINDOW, LAG = 81, 600, 29
DECAY_DAYS = np.array([27.72427749633789, 62.91925048828125, 129.2318572998047, 264.43182373046875, 542.06005859375])
PLANNER_ALPHA = 0.757
PLANNER_BOUNDS = (-0.007381112780421972, -0.0001451095740776509, 0.002124679973348975, 0.00270779593847692)


class CovidEconomy:
    """Actions of 51 governors, then that of the planner.

    Unemployment remembers in five sums, as in the tensor program.
    """

    def __init__(self, max_episode_steps=540):
        self.limit = max_episode_steps
        c = np.genfromtxt(DATA / "covid_states.csv", delimiter=",", names=True, dtype=None, encoding="utf-8")
        moves = np.loadtxt(DATA / "covid_prestart_policy_changes.csv", delimiter=",", skiprows=1, dtype=np.int64)
        n, self.population = len(c), c["population"].astype(float)
        self.size = n + 1
        self.before = np.ones((START + 1, n))
        for day, state, level in moves:
            self.before[day:, state] = level
        self.changes = np.diff(self.before, axis=0, prepend=self.before[:1])
        self.memory = np.exp(-np.arange(START, -1, -1) / DECAY_DAYS[:, None]) @ self.changes
        self.keeps, self.rest = np.exp(-1 / DECAY_DAYS)[:, None], np.exp(-WINDOW / DECAY_DAYS)[:, None]
        self.weights, self.least = np.stack([c[f"w{k}"] for k in range(5)]), c["unemp_bias_pct"]
        self.spread, self.response = c["beta_intercept"], c["beta_slope"]
        self.doses = np.floor(3000 * self.population / 1e6) / self.population
        self.first = [c[k] / self.population for k in ("S0", "I0", "R0")]
        self.unemployed = c["unemp_pct0"] / 100
        best = (np.log(2) + self.least) / 100
        self.capacity = 0.6 - best
        people = 328_737_916
        workers = int(0.6 * people - (best * self.population).sum())
        wage = 65_300 / (workers / people) / 365
        good_times = self.population * self.capacity * wage
        self.share = good_times / good_times.sum()
        self.subsidy, self.value = 20_000 / 365 / 20 / (self.capacity * wage), 1e7 / (365 * self.capacity * wage)
        odds = 0.3 * c["alpha_health"] / (1 - c["alpha_health"])
        self.governor = odds / (1 + odds), c["min_h"], c["max_h"], c["min_e"], c["max_e"]
        odds = 0.45 * PLANNER_ALPHA / (1 - PLANNER_ALPHA)
        self.planner = odds / (1 + odds), *PLANNER_BOUNDS
        self.seen, self.masks = np.zeros((n, n + 13), np.float32), (np.ones((n, 11), bool), np.ones((1, 21), bool))
        self.seen[:, :n] = np.eye(n)

    def actions(self, rng, num):
        return rng.integers(0, [11] * (self.size - 1) + [21], (num, self.size))

    def reset(self, start=None):
        n = self.size - 1
        self.day, self.level_of_subsidy, self.wait = 0, 0, np.zeros(n, int)
        self.levels = np.concatenate([self.before, np.zeros((self.limit, n))])  # of day t in row START + t
        self.s, self.i, self.r, self.v = (*(x.copy() for x in self.first), np.zeros(n))
        self.sums, self.jobless, self.output = self.memory, self.unemployed, np.zeros(n)
        return self.observe()

    def step(self, action):
        chosen, self.day = action[:-1], self.day + 1
        may = self.wait == 0
        acts, before = may & (chosen > 0), self.levels[START + self.day - 1]
        self.wait = np.where(may, np.where(acts, 27, 0), self.wait - 1)
        level = self.levels[START + self.day] = np.where(acts, chosen, before)
        if (self.day - 1) % 90 == 0:
            self.level_of_subsidy = int(action[-1])

        doses = np.minimum(self.doses, self.s) if self.day >= 296 else 0.0
        rate = self.spread + self.response * self.levels[START + self.day - LAG]
        infections = rate * self.s * self.i * (1 - doses / (self.s + 1e-10 / self.population))
        ended = self.i / 14
        self.s, self.i = np.maximum(self.s - infections - doses, 0), np.maximum(self.i + infections - ended, 0)
        self.r, self.v = self.r + ended, self.v + doses

        self.jobless = (np.logaddexp(0, self.pressure(level, before)) + self.least) / 100
        paid = self.level_of_subsidy * self.subsidy
        working = np.maximum(0.6 - 0.6 * (0.1 * self.i + 0.02 * self.r) - self.jobless, 0)
        self.output = working / self.capacity + paid

        health, country = -0.02 * ended * self.value, self.share * paid
        planner = (self.share * health).sum(), (self.share * self.output - 1.03 * country).sum()
        reward = np.append(welfare(self.governor, health, self.output), welfare(self.planner, *planner))
        return self.observe(), reward.astype(np.float32), False, self.day == self.limit

    def pressure(self, level, before):
        """What changes of the level do to employment."""
        self.sums = self.keeps * self.sums + (level - before)
        if self.day > WINDOW - START:
            self.sums -= self.rest * self.changes[self.day + START - WINDOW]
        return (self.weights * self.sums).sum(0)

    def observe(self):
        n, removed = self.size - 1, self.r
        own = [self.s, self.i, removed + self.v, 0.02 * removed, self.v, self.jobless, self.output]
        own += [self.levels[START + self.day - LAG + 1] / 10, self.levels[START + self.day] / 10]
        own, tomorrow, since = np.stack(own), self.day + 1, self.day % 90
        vaccine = min(1.0, 296.0 - tomorrow) if tomorrow <= 296 else 1.0
        common = [(90 - since) / 90, self.level_of_subsidy / 20, vaccine, self.day / self.limit]
        seen, (governor, planner) = self.seen.copy(), (mask.copy() for mask in self.masks)
        seen[:, n:-4], seen[:, -4:] = own.T, common
        governor[:, 1:], planner[:, 1:] = (self.wait == 0)[:, None], since == 0
        return (seen, governor), (np.append(own, common).astype(np.float32)[None], planner)


class CovidEconomyWindow(CovidEconomy):
    """The same, but all changes of 600 days are added up anew each day, in one product, as in the original.

    That is float32, this float64.
    """

    def __init__(self, max_episode_steps=540):
        super().__init__(max_episode_steps)
        self.fading = np.exp(-np.arange(WINDOW - 1, -1, -1) / DECAY_DAYS[:, None])  # [5, 600]
        self.repeated = np.repeat(self.weights.T[:, :, None], WINDOW, 2)  # [51, 5, 600]

    def reset(self, start=None):
        self.history = np.concatenate([np.ones((WINDOW - START, self.size - 1)), self.before])  # of 601 days
        return super().reset(start)

    def pressure(self, level, before):
        self.history = np.concatenate([self.history[1:], level[None]])
        changes = self.history[1:] - self.history[:-1]
        return (changes.T[:, None] * self.repeated * self.fading).sum((1, 2))


def welfare(weights, health, output):
    alpha, h_0, h_1, e_0, e_1 = weights
    economy = (2 - 1 / np.clip(output, 0.1, 3.0)) / 365  # 1 + the isoelastic utility with eta = 2
    return alpha * (health - h_0) / (h_1 - h_0 + 1e-10) + (1 - alpha) * (economy - e_0) / (e_1 - e_0 + 1e-10)
