"""Environments of a user's own, as a file beside a run: what they do wrong, and where."""

import hashlib
import subprocess
import threading
import time
from pathlib import Path

import gymnasium
import numpy as np


class Corridor(gymnasium.Env):
    """Go right."""

    observation_space = gymnasium.spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, length: int = 5) -> None:
        self.length, self.position, self.count = length, 0, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.position = 0
        return self._observe(), {}

    def step(self, action):
        self.count += 1
        self.position += int(action)
        return self._observe(), float(action), self.position >= self.length, False, {}

    def _observe(self):
        return np.array([self.position / self.length], np.float32)


class Stuck(Corridor):
    """Sleeps for a minute where it is told to, or fails there."""

    def __init__(self, where, how="sleeps"):
        super().__init__()
        self.where, self.how = where, how

    def reset(self, *, seed=None, options=None):
        self.stop("reset")
        return super().reset(seed=seed)

    def step(self, action):
        self.stop("check")
        if self.count == 150:
            self.stop("training")
        rows = Path("run/metrics.jsonl")
        judging = rows.is_file() and rows.stat().st_size > 0
        if self.count == 0 and judging:  # of an evaluation: others moved before
            self.stop("judging")
        if self.where == "acting":
            self.act(judging)
        if any(Path("run").glob("checkpoints/0*")):
            self.stop("evaluation")
        return super().step(action)

    def act(self, judging):
        """In the main thread an evaluation has no end; an actor's second unroll waits until that has begun."""
        if threading.current_thread() is threading.main_thread():
            if judging:
                Path("begun").touch()
                self.position = 0
                time.sleep(0.1)
        elif self.count > 8:
            while not Path("begun").exists():
                time.sleep(0.01)
            self.stop("acting")

    def stop(self, where):
        if where == self.where and self.how == "fails":
            raise LookupError("no way on")
        if where == self.where:
            Path("sleeps").touch()
            if self.how == "hears_nothing":
                hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)  # for minutes, in C code, without Python's lock
            time.sleep(60)

    def close(self):
        Path("closed").touch()


class Unpaid(Corridor):
    """Whose reward is no number in the final evaluation."""

    def __init__(self, reward):
        super().__init__()
        self.reward = float(reward)

    def step(self, action):
        observation, reward, over, cut, told = super().step(action)
        return observation, self.reward if any(Path("run").glob("checkpoints/0*")) else reward, over, cut, told


class ClosedError(Exception):
    """Of the file's own."""


class Guarded(Corridor):
    """Ends with an exception that only this file knows."""

    def step(self, action):
        if self.count == 120:
            raise ClosedError("the guard went home")
        return super().step(action)


class Spaceless(gymnasium.Env):
    pass


class Small(Corridor):
    observation_space = gymnasium.spaces.Box(0, 255, (12, 12, 3), np.uint8)

    def _observe(self):
        return self.observation_space.low


class Scalar(Corridor):
    action_space = gymnasium.spaces.Box(-1.0, 1.0, (), np.float32)

    def step(self, action):
        assert np.shape(action) == ()
        return super().step(action > 0)


class Missing(Corridor):
    def __init__(self):
        raise FileNotFoundError("no assets")


class Slow(Corridor):
    """Sleeps for 40 s at every step after the first 300."""

    def step(self, action):
        if self.count > 300:
            time.sleep(40)
        return super().step(action)


class Simulated(Slow):
    """In a program of its own."""

    def __init__(self):
        super().__init__()
        self.simulator = subprocess.Popen(["sleep", "1000"])

    def close(self):
        self.simulator.kill()
        self.simulator.wait()


class Faulty(Corridor):
    """Does not come back from its step 120, raises, or shows what is no number or of another shape."""

    def __init__(self, fault):
        super().__init__()
        self.fault = fault

    def step(self, action):
        if self.count < 120:
            return super().step(action)
        Path("fault").touch()
        if self.fault == "hang":
            time.sleep(1e6)
        if self.fault == "hang_in_c":
            hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)
        if self.fault == "raise":
            raise OSError("the corridor is closed")
        return np.full(2 if self.fault == "shape" else 1, np.nan, np.float32), np.nan, False, False, {}


def corridor(length: int = 3) -> gymnasium.Env:
    return Corridor(length)
