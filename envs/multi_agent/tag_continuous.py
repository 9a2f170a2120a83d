"""TagContinuous: taggers chase runners over a plane; who is caught leaves the game.

The continuous Tag of WarpDrive, Lan et al. 2021 (https://arxiv.org/abs/2108.13976): rules, rewards and observations are
those of its `TagContinuous` for the CPU. Starts are random, time-outs truncate, and tags are counted, where its kernels
for the GPU let threads race.
"""

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import at_least, number, true_or_false
from torchpod.ops import neighbors
from torchpod.specs import Array, EnvSpec, MultiDiscrete
from torchpod.types import Tree

CIRCLE = float(np.float32(2 * math.pi))


class TagContinuousState(NamedTuple):
    """Of all A agents, the taggers first; float32 `[B, A]` where nothing else is said."""

    x: Tensor
    """From 0 to `grid_length`."""
    y: Tensor
    heading: Tensor
    """From 0 to 2 pi."""
    speed: Tensor
    acceleration: Tensor
    """Per step; it stays until it is changed, or the speed is at a limit."""
    alive: Tensor
    """`[B, A]` bool, in the game."""
    seen_alive: Tensor
    """`[B, A]` bool, likewise before the last tags: observations are made before them."""
    time: Tensor
    """`[B]` int32, steps since the start."""


class TagContinuous(TensorEnv):
    """Agents steer by acceleration and turn; a runner is tagged when its nearest tagger is close enough.

    Groups: `tagger` and `runner`. Actions: two integers per agent, one of acceleration and one of turn. 0 changes
    nothing, k is the k-th of `num_..._levels` even steps from min to max. Terminates when no runner is left.

    What an agent sees of another: how far it is in x and in y, its speed, acceleration and heading, each less one's
    own, whether it is a tagger, and whether it is in the game. Observation, full: `[7 (A - 1) + 1]`, the first of these
    of all others by their ids, then the second, ..., then the time. Partial: `[7 K + 1]`, the same of the K nearest
    that are in the game, the nearest first, with zeros in the place of those that are missing. Who has left the game
    sees nothing (full: who is a tagger, and who in the game), has discount 0, and is False in `extras["alive"]`,
    `{group: [B, N]}`: its rows are not to be learned from. Reports `episode_tag_rate`, the share of runners that were
    tagged by the end of an episode, if they leave the game then.

    Args:
      num_taggers: in group `tagger`.
      num_runners: in group `runner`.
      grid_length: of the square's sides.
      max_speed: of an agent with skill 1, per step.
      skill_level_tagger: times `max_speed`, how fast taggers can be.
      skill_level_runner: times `max_speed`, how fast runners can be.
      max_acceleration: the largest of one action.
      min_acceleration: the least of one action.
      max_turn: the largest of one action, in radians.
      min_turn: the least of one action, in radians.
      num_acceleration_levels: accelerations that there are from least to largest.
      num_turn_levels: turns that there are from least to largest.
      edge_hit_penalty: 0 or less, added where an agent runs into a side.
      use_full_observation: everybody observes all others; False: the nearest.
      num_other_agents_observed: K, of the partial observation.
      tagging_distance: in lengths of the side; a tag takes less than this.
      tag_reward_for_tagger: for each runner that the tagger is nearest to.
      tag_penalty_for_runner: 0 or less, added.
      step_penalty_for_tagger: 0 or less, added in every step.
      step_reward_for_runner: added in every step.
      end_of_game_reward_for_runner: for those that are in the game when time is up.
      runner_exits_game_after_tagged: or it can be tagged again.
      max_episode_steps: the time limit.
    """

    def __init__(
        self,
        num_taggers: int = 10,
        num_runners: int = 100,
        grid_length: float = 20.0,
        max_speed: float = 1.0,
        skill_level_tagger: float = 1.0,
        skill_level_runner: float = 1.0,
        max_acceleration: float = 0.1,
        min_acceleration: float = -0.1,
        max_turn: float = 2.356,
        min_turn: float = -2.356,
        num_acceleration_levels: int = 20,
        num_turn_levels: int = 20,
        edge_hit_penalty: float = 0.0,
        use_full_observation: bool = False,
        num_other_agents_observed: int = 10,
        tagging_distance: float = 0.02,
        tag_reward_for_tagger: float = 10.0,
        tag_penalty_for_runner: float = -10.0,
        step_penalty_for_tagger: float = 0.0,
        step_reward_for_runner: float = 0.0,
        end_of_game_reward_for_runner: float = 1.0,
        runner_exits_game_after_tagged: bool = True,
        max_episode_steps: int = 500,
    ) -> None:
        at_least(1, num_taggers=num_taggers, num_runners=num_runners, max_episode_steps=max_episode_steps)
        at_least(1, num_acceleration_levels=num_acceleration_levels, num_turn_levels=num_turn_levels)
        true_or_false(
            use_full_observation=use_full_observation, runner_exits_game_after_tagged=runner_exits_game_after_tagged
        )
        self.num_taggers, self.num_agents = num_taggers, num_taggers + num_runners
        self.grid_length, self.max_speed = _positive("grid_length", grid_length), _positive("max_speed", max_speed)
        skills = (
            _positive("skill_level_tagger", skill_level_tagger),
            _positive("skill_level_runner", skill_level_runner),
        )
        self.top_speed = [float(np.float32(self.max_speed * skill)) for skill in skills]
        self.accelerations = _levels("acceleration", min_acceleration, max_acceleration, num_acceleration_levels)
        self.turns = _levels("turn", min_turn, max_turn, num_turn_levels, CIRCLE)
        self.edge_hit_penalty = _not_positive("edge_hit_penalty", edge_hit_penalty)
        reach = number("tagging_distance", tagging_distance, 0.0, math.sqrt(2.0)) * self.grid_length
        self.reach = float(np.float32(reach))
        self.tag_reward_for_tagger = number("tag_reward_for_tagger", tag_reward_for_tagger)
        self.tag_penalty_for_runner = _not_positive("tag_penalty_for_runner", tag_penalty_for_runner)
        self.step_rewards = [
            _not_positive("step_penalty_for_tagger", step_penalty_for_tagger),
            number("step_reward_for_runner", step_reward_for_runner),
        ]
        self.end_of_game_reward_for_runner = number("end_of_game_reward_for_runner", end_of_game_reward_for_runner)
        self.runner_exits = runner_exits_game_after_tagged
        self.max_episode_steps = max_episode_steps
        self.num_seen = None if use_full_observation else num_other_agents_observed
        if self.num_seen is not None:
            at_least(1, num_other_agents_observed=self.num_seen)
            if self.num_seen >= self.num_agents:
                raise ValueError(
                    f"num_other_agents_observed={self.num_seen} is more than the {self.num_agents - 1} others that "
                    f"{num_taggers} taggers and {num_runners} runners have; use at most {self.num_agents - 1}, or "
                    "use_full_observation=True."
                )
        seen = Array((7 * (self.num_agents - 1 if self.num_seen is None else self.num_seen) + 1,))
        action = MultiDiscrete((num_acceleration_levels + 1, num_turn_levels + 1))
        groups = {"tagger": num_taggers, "runner": num_runners}
        self.spec = EnvSpec(
            "tag_continuous",
            dict.fromkeys(groups, seen),
            dict.fromkeys(groups, action),
            max_episode_steps,
            groups=groups,
        )

    def reset(self, keys: Tensor) -> TagContinuousState:
        """Everybody stands still in a random place and looks along an axis."""
        first, second = random.bits(keys, 2 * self.num_agents).chunk(2, -1)
        x, y = (random.to_uniform(words, 0.0, self.grid_length) for words in (first, second))
        heading = (first & 3).float() * (math.pi / 2)  # of the bits that no uniform takes
        still, alive = torch.zeros_like(x), torch.ones_like(x, dtype=torch.bool)
        time = torch.zeros(keys.shape[:-1], dtype=torch.int32, device=keys.device)
        return TagContinuousState(x, y, heading, still, still, alive, alive, time)

    def transition(
        self, state: TagContinuousState, action: dict[str, Tensor], keys: Tensor
    ) -> tuple[TagContinuousState, dict[str, Tensor], Tensor]:
        """Everybody moves, then tags are counted."""
        chosen = torch.cat([action["tagger"], action["runner"]], -2)
        s, device, length, n = state, chosen.device, self.grid_length, self.num_taggers
        acceleration = s.acceleration + _level(chosen[..., 0], *self.accelerations)
        turned = s.heading + _level(chosen[..., 1], *self.turns)
        turned = torch.where(turned < 0, turned + CIRCLE, torch.where(turned >= CIRCLE, turned - CIRCLE, turned))
        heading = turned * s.alive
        top = self._by_group(self.top_speed, chosen)
        speed = torch.minimum((s.speed + acceleration).clamp(min=0.0), top) * s.alive
        acceleration = acceleration * ((speed > 0) & (speed < top))
        # Rounded once, so that no compiler's sine or fused multiply-add makes agents change places.
        forward, angle = speed.double(), heading.double()
        to_x, to_y = (s.x + forward * angle.cos()).float(), (s.y + forward * angle.sin()).float()
        x, y = to_x.clamp(0.0, length), to_y.clamp(0.0, length)
        hit = (x != to_x) | (y != to_y)
        reward = (hit * self.edge_hit_penalty + self._by_group(self.step_rewards, chosen)) * s.alive

        time, runs = s.time + 1, s.alive[..., n:]
        dx, dy = (f[..., n:, None] - f[..., None, :n] for f in (x, y))  # [B, M, N]
        distance = neighbors.distance(dx, dy)
        nearest, tagger = distance.min(-1)  # of equal ones the first
        tagged = runs & (nearest < self.reach)
        caught = tagged[..., None] & (tagger[..., None] == torch.arange(n, device=device))
        runs = runs & ~tagged if self.runner_exits else runs
        survived = runs & (time == self.max_episode_steps)[..., None]
        rewards = {
            "tagger": reward[..., :n] + caught.sum(-2) * self.tag_reward_for_tagger,
            "runner": reward[..., n:]
            + tagged * self.tag_penalty_for_runner
            + survived * self.end_of_game_reward_for_runner,
        }
        alive = torch.cat([s.alive[..., :n], runs], -1)
        moved = TagContinuousState(x, y, heading, speed, acceleration, alive, s.alive, time)
        return moved, rewards, ~runs.any(-1)

    def observe(self, state: TagContinuousState) -> dict[str, Tensor]:
        """`[B, N, 7 (A - 1) + 1]` or `[B, N, 7 K + 1]` per group."""
        s, n = state, self.num_taggers
        side, fast = self.grid_length * math.sqrt(2.0), self.max_speed + 1e-10
        moving = ((s.x, side), (s.y, side), (s.speed, fast), (s.acceleration, fast), (s.heading, 2 * math.pi))
        is_tagger = self._by_group([1.0, 0.0], s.x).expand_as(s.x)
        alive = s.seen_alive[..., None]  # [B, A, 1], who looks
        if self.num_seen is None:
            ids = torch.arange(self.num_agents, device=s.x.device)
            above = ids[:-1] >= ids[:, None]
            parts = [alive * ((self._others(f, above) - f[..., None]) / scale) for f, scale in moving]
            parts += [self._others(f, above) for f in (is_tagger, s.seen_alive.float())]
        else:
            who, there = neighbors.nearest(s.x, s.y, s.seen_alive, self.num_seen)
            there = there & alive
            flat = who.flatten(-2)
            parts = [there * ((f.gather(-1, flat).view(who.shape) - f[..., None]) / scale) for f, scale in moving]
            parts += [there * is_tagger.gather(-1, flat).view(who.shape), there.float()]
        time = (s.time.float() / self.max_episode_steps)[..., None, None]
        seen = torch.cat([*parts, alive * time], -1)
        return {"tagger": seen[..., :n, :], "runner": seen[..., n:, :]}

    def extras(self, state: TagContinuousState) -> dict[str, Tree]:
        """Who is in the game, and how many runners have left it."""
        taggers, runners = state.alive.split([self.num_taggers, self.num_agents - self.num_taggers], -1)
        told = {"episode": {"tag_rate": 1.0 - runners.float().mean(-1)}} if self.runner_exits else {}
        return {"alive": {"tagger": taggers, "runner": runners}} | told

    def _by_group(self, values: list[float], like: Tensor) -> Tensor:
        """`[A]` float32: the first value for taggers, the second for runners."""
        is_tagger = torch.arange(self.num_agents, device=like.device) < self.num_taggers
        return torch.where(is_tagger, *values)

    @staticmethod
    def _others(feature: Tensor, above: Tensor) -> Tensor:
        """`[B, A, A - 1]`: that of everybody else, by id."""
        return torch.where(above, feature[..., None, 1:], feature[..., None, :-1])


def _levels(name: str, low: float, high: float, num: int, limit: float = float("inf")) -> tuple[float, float]:
    """The lowest level, and how far it is to the next one."""
    low, high = number(f"min_{name}", low, -limit, limit), number(f"max_{name}", high, -limit, limit)
    if low > high:
        raise ValueError(f"min_{name}={low:g} is above max_{name}={high:g}; exchange them.")
    return low, (high - low) / max(num - 1, 1)


def _level(action: Tensor, low: float, step: float) -> Tensor:
    """What an action adds, float32: nothing, or its level."""
    return torch.where(action == 0, 0.0, low + (action - 1).double() * step).float()


def _positive(name: str, value: float) -> float:
    if number(name, value) <= 0:
        raise ValueError(f"{name}={value!r} is wrong; use a number above 0.")
    return float(value)


def _not_positive(name: str, value: float) -> float:
    if number(name, value) > 0:
        raise ValueError(
            f"{name}={value!r} is wrong; it is added to the reward: use 0 or a number below, e.g. {-value:g}."
        )
    return float(value)
