"""Tag in NumPy: one game, arrays over its agents. Rules: torchpod/envs/multi_agent."""

import math

import numpy as np

F = np.float32


class TagGridWorld:
    """The runner is the last agent; taggers start in the middle, and it in the corner."""

    moves_x, moves_y = (np.array(x, np.int32) for x in ([0, 1, -1, 0, 0], [0, 0, 0, 1, -1]))

    def __init__(self, num_taggers, grid_length=100, full=True, max_episode_steps=100):
        self.num_taggers, self.length, self.full, self.limit = num_taggers, grid_length, full, max_episode_steps
        self.size = num_taggers + 1
        # What an observation says of types and of oneself never changes.
        self.seen = np.zeros((self.size, 4 * self.size + 1 if full else 6), F)
        if full:
            self.seen[:, 3 * self.size - 1] = 1
            self.seen[:, 3 * self.size : -1] = np.eye(self.size)
        else:
            self.seen[-1, 4] = 1

    def actions(self, rng, num):
        return rng.integers(0, 5, (num, self.size))

    def reset(self, start=None):
        self.time = 0
        self.x = np.full(self.size, self.length // 2, np.int32)
        self.x[-1] = 0
        self.y = self.x.copy()
        return self.observe()

    def moves(self, action):
        return self.moves_x[action], self.moves_y[action]

    def step(self, action):
        self.time += 1
        dx, dy = self.moves(action)
        to_x, to_y = self.x + dx, self.y + dy
        self.x, self.y = np.clip(to_x, 0, self.length), np.clip(to_y, 0, self.length)
        wall = F(0.1) * ((self.x != to_x) | (self.y != to_y))
        tagged = bool(((self.x[:-1] == self.x[-1]) & (self.y[:-1] == self.y[-1])).any())
        reward = (F(10.0) if tagged else F(-0.01)) - wall
        reward[-1] = (F(-5.0) if tagged else F(0.01)) - wall[-1]
        return self.observe(), reward, tagged, self.time == self.limit

    def observe(self):
        seen, x, y = self.seen.copy(), self.x / F(self.length), self.y / F(self.length)
        seen[:, -1] = self.time / self.limit
        if self.full:
            seen[:, : self.size], seen[:, self.size : 2 * self.size] = x, y
            return seen
        seen[:, 0], seen[:, 1] = x, y
        seen[:-1, 2], seen[:-1, 3] = x[-1], y[-1]
        nearest = np.argmin((self.x[:-1] - self.x[-1]) ** 2 + (self.y[:-1] - self.y[-1]) ** 2)
        seen[-1, 2], seen[-1, 3] = x[nearest], y[nearest]
        return seen


class TagGridWorldPerAgent(TagGridWorld):
    """The same game, agent by agent where WarpDrive's class for the CPU goes so: actions, rewards, observations.

    These are dicts by agent. Moves, walls and the tag are arrays over agents there too.
    """

    MOVES = [(0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)]

    def moves(self, action):
        chosen = action.tolist()
        return np.array([self.MOVES[a][0] for a in chosen]), np.array([self.MOVES[a][1] for a in chosen])

    def step(self, action):
        seen, reward, *over = super().step(action)
        return seen, dict(enumerate(reward)), *over

    def observe(self):
        runner, now = self.size - 1, self.time / self.limit
        x, y, seen = self.x / F(self.length), self.y / F(self.length), {}
        if self.full:
            types = np.array([float(i == runner) for i in range(self.size)])
            for i in range(self.size):
                own = np.zeros(self.size)
                own[i] = 1
                seen[i] = np.concatenate([x, y, types, own, [now]], dtype=F)
            return seen
        nearest = np.argmin((self.x[:-1] - self.x[-1]) ** 2 + (self.y[:-1] - self.y[-1]) ** 2)
        for i in range(self.size):
            other = nearest if i == runner else runner
            seen[i] = np.array([x[i], y[i], x[other], y[other], i == runner, now], F)
        return seen


class TagContinuous:
    """Taggers first. Who is tagged leaves the game; observations are made before tags are counted."""

    def __init__(self, num_taggers, num_runners, full=False, num_seen=10, max_episode_steps=500, seed=0):
        self.num_taggers, self.size, self.full, self.num_seen = num_taggers, num_taggers + num_runners, full, num_seen
        self.length, self.limit = F(20.0), max_episode_steps
        self.accelerations = np.concatenate([[0], np.linspace(-0.1, 0.1, 20)]).astype(F)
        self.turns = np.concatenate([[0], np.linspace(-2.356, 2.356, 20)]).astype(F)
        self.is_tagger = (np.arange(self.size) < num_taggers).astype(F)
        self.others = ~np.eye(self.size, dtype=bool)
        self.rng = np.random.default_rng(seed)

    def actions(self, rng, num):
        return rng.integers(0, 21, (num, self.size, 2))

    def reset(self, start=None):
        if start is None:
            place = self.rng.random((2, self.size), F) * self.length
            start = *place, self.rng.integers(0, 4, self.size).astype(F) * F(math.pi / 2)
        self.x, self.y, self.heading = start
        self.speed, self.acceleration = np.zeros(self.size, F), np.zeros(self.size, F)
        self.alive, self.time = np.ones(self.size, bool), 0
        return self.observe()

    def step(self, action):
        self.time += 1
        acceleration = self.acceleration + self.accelerations[action[:, 0]]
        self.heading = np.mod(self.heading + self.turns[action[:, 1]], F(2 * math.pi)) * self.alive
        self.speed = np.clip(self.speed + acceleration, 0, 1) * self.alive
        self.acceleration = acceleration * ((self.speed > 0) & (self.speed < 1))
        angle = self.heading.astype(np.float64)  # so that places are rounded once
        self.x = np.clip((self.x + self.speed * np.cos(angle)).astype(F), 0, self.length)
        self.y = np.clip((self.y + self.speed * np.sin(angle)).astype(F), 0, self.length)
        seen, n = self.observe(), self.num_taggers
        distance = np.hypot(self.x[n:, None] - self.x[:n], self.y[n:, None] - self.y[:n])
        nearest = distance.argmin(1)
        tagged = self.alive[n:] & (distance[np.arange(len(nearest)), nearest] < F(0.02) * self.length)
        reward = np.zeros(self.size, F)
        reward[n:][tagged] = -10
        reward[:n] = 10 * np.bincount(nearest[tagged], minlength=n)
        self.alive = self.alive.copy()
        self.alive[n:][tagged] = False
        if self.time == self.limit:
            reward[n:][self.alive[n:]] += 1
        return seen, reward, not self.alive[n:].any(), self.time == self.limit

    def observe(self):
        side, fast = self.length * F(math.sqrt(2)), F(1 + 1e-10)
        moving = (
            self.x / side,
            self.y / side,
            self.speed / fast,
            self.acceleration / fast,
            self.heading / F(2 * math.pi),
        )
        now, n = F(self.time / self.limit), self.size
        if self.full:
            parts = [(f - f[:, None])[self.others].reshape(n, n - 1) * self.alive[:, None] for f in moving]
            parts += [np.broadcast_to(f, (n, n))[self.others].reshape(n, n - 1) for f in (self.is_tagger, self.alive)]
            return np.concatenate([*parts, (self.alive * now)[:, None]], 1, dtype=F)
        ids = np.flatnonzero(self.alive)  # who has left sees nobody, and nobody sees them
        *moving, is_tagger, x, y = (f[ids] for f in (*moving, self.is_tagger, self.x, self.y))
        distance = (x - x[:, None]) ** 2 + (y - y[:, None]) ** 2
        np.fill_diagonal(distance, np.inf)
        k, rows = min(self.num_seen, len(ids)), np.arange(len(ids))[:, None]
        who = np.argpartition(distance, k - 1, 1)[:, :k]
        who = np.take_along_axis(who, distance[rows, who].argsort(1), 1)
        there = np.isfinite(distance[rows, who])
        seen = np.zeros((n, 7, self.num_seen), F)
        for i, part in enumerate([*((f[who] - f[:, None]) * there for f in moving), is_tagger[who] * there, there]):
            seen[ids, i, :k] = part
        return np.concatenate([seen.reshape(n, -1), (self.alive * now)[:, None]], 1, dtype=F)
