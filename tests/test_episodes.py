import secrets

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod.episodes import average, count_episodes, counting, mean_metrics, names_of, none_yet
from torchpod.specs import Array, Discrete, EnvSpec, MultiDiscrete
from torchpod.types import FIRST, LAST, MID, TimeStep


@pytest.fixture
def rng():
    seed = secrets.randbits(32)
    print(f"seed={seed}")
    return np.random.default_rng(seed)


class Stream:
    """Environments that go on from one trajectory to the next, with lives that end before the game does."""

    def __init__(self, rng, size, game_over=0.5):
        self.rng, self.size, self.game_over_share = rng, size, game_over
        self.step_type = np.full(size, FIRST)
        self.reward, self.over = np.zeros(size), np.zeros(size, bool)

    def next(self):
        was_last = self.step_type == LAST
        last = (self.rng.random(self.size) < 0.2) & ~was_last
        self.step_type = np.where(was_last, FIRST, np.where(last, LAST, MID))
        self.reward = np.where(was_last, 0.0, self.rng.integers(-5, 6, self.size))
        self.over = last & (self.rng.random(self.size) < self.game_over_share)

    def trajectory(self, length):
        rows = [(self.step_type, self.reward, self.over)]
        for _ in range(length):
            self.next()
            rows.append((self.step_type, self.reward, self.over))
        return (np.stack(x) for x in zip(*rows, strict=True))


def to_timestep(step_type, raw_reward, over):
    raw = torch.tensor(raw_reward, dtype=torch.float32)
    clipped = raw.clamp(-1, 1)  # what the agent learns from, which must not be counted
    extras = {"raw_reward": raw, "game_over": torch.tensor(over)}
    return TimeStep(torch.tensor(step_type, dtype=torch.int32), clipped, torch.ones_like(raw), clipped, extras)


@pytest.mark.parametrize("game_over", [1.0, 0.5])
@pytest.mark.parametrize("length", [1, 2, 7, 32])
def test_returns_and_lengths_equal_a_loop_over_several_trajectories(rng, length, game_over):
    size = 6
    stream = Stream(rng, size, game_over)
    running_return, running_length = torch.zeros(size), torch.zeros(size, dtype=torch.int64)
    returns, lengths, transitions = np.zeros(size), np.zeros(size, int), 0
    finished = 0
    for _ in range(10):
        step_type, reward, over = stream.trajectory(length)
        found = count_episodes(to_timestep(step_type, reward, over), running_return, running_length)
        running_return, running_length = found.running_return, found.running_length
        expected = np.zeros(5)
        for t in range(1, length + 1):
            for b in range(size):
                if step_type[t - 1, b] != LAST:
                    expected[3] += 1
                    returns[b] += reward[t, b]
                    lengths[b] += 1
                if over[t, b]:
                    expected[:3] += 1, returns[b], lengths[b]
                    returns[b], lengths[b] = 0, 0
        np.testing.assert_array_equal(found.sums.numpy(), expected)
        np.testing.assert_array_equal(running_return.numpy(), returns)
        np.testing.assert_array_equal(running_length.numpy(), lengths)
        assert found.sums.dtype == torch.float64 and running_length.dtype == torch.int64
        finished += expected[0]
        transitions += expected[3]
    assert transitions < 10 * length * size or length == 1
    assert finished > 0 or length == 1


def test_an_episode_of_three_steps_by_hand():
    # FIRST MID LAST | FIRST MID: rewards 1 and 2, reset, 4; the first episode had 10 in 5 steps before
    timestep = to_timestep(
        np.array([[FIRST], [MID], [LAST], [FIRST], [MID]]),
        np.array([[0.0], [1.0], [2.0], [0.0], [4.0]]),
        np.array([[False], [False], [True], [False], [False]]),
    )
    found = count_episodes(timestep, torch.tensor([10.0]), torch.tensor([5]))
    assert found.sums.tolist() == [1, 13, 7, 3, 0]
    assert found.running_return.tolist() == [4] and found.running_length.tolist() == [1]


def test_groups_count_the_means_over_their_agents_apart_and_their_sum(rng):
    length, size = 5, 3
    a, b = (torch.tensor(rng.integers(-4, 5, (length + 1, size, n)), dtype=torch.float32) for n in (4, 1))
    step_type = torch.full((length + 1, size), MID, dtype=torch.int32)
    step_type[-1] = LAST
    extras = {"raw_reward": {"a": a, "b": b}, "game_over": step_type == LAST}
    timestep = TimeStep(step_type, {"a": a, "b": b}, {"a": a, "b": b}, {}, extras)
    extras["raw_reward"] = {"b": b, "a": a}  # in whatever order
    before = torch.tensor(rng.integers(-9, 9, (size, 2)), dtype=torch.float32)
    found = count_episodes(timestep, before, torch.zeros(size, dtype=torch.int64))
    of_a, of_b = a[1:].double().mean(-1).sum() + before[:, 0].sum(), b[1:].double().sum() + before[:, 1].sum()
    expected = torch.tensor([size, of_a + of_b, size * length, size * length, of_a, of_b, 0]).double()
    torch.testing.assert_close(found.sums, expected)
    assert found.running_return.shape == (size, 2) and not found.running_return.any()
    metrics = mean_metrics([{"episodes": found.sums}, {"episodes": found.sums}], names_of(timestep))
    assert metrics["episode_return/a"].item() == pytest.approx(of_a.item() / size)
    assert metrics["episode_return/b"].item() == pytest.approx(of_b.item() / size)
    assert metrics["episode_return"].item() == pytest.approx((of_a + of_b).item() / size)


def test_groups_whose_episodes_go_on_keep_what_they_gained_since_the_last_end(rng):
    a = torch.tensor(rng.integers(-4, 5, (4, 2, 3)), dtype=torch.float32)
    step_type = torch.full((4, 2), MID, dtype=torch.int32)
    step_type[2, 0] = LAST
    timestep = TimeStep(step_type, {}, {}, {}, {"raw_reward": {"a": a}, "game_over": step_type == LAST})
    found = count_episodes(timestep, torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))
    torch.testing.assert_close(found.running_return[0, 0], a[3, 0].mean())
    torch.testing.assert_close(found.running_return[1, 0], 1 + a[1:, 1].mean(-1).sum())
    torch.testing.assert_close(found.sums[4].float(), 1 + a[1:3, 0].mean(-1).sum())


@pytest.mark.parametrize("groups", [False, True])
def test_rows_of_masks_that_allow_nothing_are_counted(rng, groups):
    mask, action = Array((5,), torch.bool), MultiDiscrete((2, 3))
    spec = EnvSpec("masked", {"action_mask": mask}, action)
    if groups:
        spec = EnvSpec(
            "masked", {"a": {"action_mask": mask}, "b": mask}, {"a": action, "b": action}, groups={"a": 2, "b": 1}
        )
    timestep = to_timestep(*Stream(rng, 4).trajectory(9))
    may = rng.random((10, 4, 2, 5) if groups else (10, 4, 5)) < 0.4
    seen = {"action_mask": torch.tensor(may)}
    timestep = timestep._replace(observation={"a": seen, "b": seen["action_mask"]} if groups else seen)
    zeros = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    found = counting({}, spec)(timestep, *zeros)
    closed = (~may[..., :2].any(-1)).sum() + (~may[..., 2:].any(-1)).sum()
    assert found.sums[-1].item() == closed > 0
    assert torch.equal(found.sums[:-1], count_episodes(timestep, *zeros).sums[:-1])


SPEC = EnvSpec(
    "pair", {"a": Array((1,)), "b": Array((1,))}, {"a": Discrete(2), "b": Discrete(2)}, groups={"a": 3, "b": 2}
)


def some(tree, axis):
    """The last of a, and both of b."""
    return torch.cat([tree["a"].narrow(axis, 2, 1), tree["b"]], axis)


@pytest.mark.parametrize("length", [1, 3, 11])
def test_who_leaves_the_game_early_has_shorter_episodes(rng, length):
    """Against a loop over steps, environments and agents, in several trajectories; of groups and of a team."""
    size, agents = 4, {"b": 2, "a": 3}
    parts = {"a": [("a", 0), ("a", 1), ("a", 2)], "b": [("b", 0), ("b", 1)], "some": [("a", 2), ("b", 0), ("b", 1)]}
    step_type, in_game = np.full(size, FIRST), {g: np.ones((size, n), bool) for g, n in agents.items()}
    kept = {kind: {g: np.zeros((size, n)) for g, n in agents.items()} for kind in ("return", "length")}
    ended, running, sums = {kind: dict.fromkeys(parts, 0.0) for kind in kept}, None, 0
    reward = {g: np.zeros((size, n)) for g, n in agents.items()}
    for _ in range(6):
        rows = [(step_type, in_game, reward)]
        for _ in range(length):
            was_last, before = step_type == LAST, in_game
            over = (rng.random(size) < 0.3) & ~was_last
            step_type = np.where(was_last, FIRST, np.where(over, LAST, MID))
            in_game = {g: np.where(was_last[:, None], True, x & (rng.random(x.shape) < 0.7)) for g, x in before.items()}
            reward = {g: np.where(was_last[:, None], 0.0, rng.integers(-4, 5, x.shape)) for g, x in in_game.items()}
            for g, x in before.items():
                kept["length"][g] += np.where(was_last[:, None], 0, x)
                kept["return"][g] += reward[g]
            for kind, own in kept.items():
                for part, members in parts.items():
                    ended[kind][part] += sum(own[g][over, n].sum() for g, n in members)
                for x in own.values():
                    x[over] = 0
            rows.append((step_type, in_game, reward))
        kinds = torch.tensor(np.stack([kind for kind, *_ in rows]))
        alive = {g: torch.tensor(np.stack([x[g] for _, x, _ in rows])) for g in agents}
        raw = {g: torch.tensor(np.stack([x[g] for *_, x in rows])).float() for g in agents}
        timestep = TimeStep(kinds, raw, raw, raw, {"raw_reward": raw, "game_over": kinds == LAST, "alive": alive})
        first = pytree.tree_map(lambda x: x[0], timestep)
        found = counting({"some": some}, SPEC)(timestep, *(running or none_yet(first, {"some": some})))
        running, sums = (found.running_return, found.running_length), sums + found.sums
        assert running[1].dtype == torch.int64
        left = [sum(kept["length"][g][:, n] for g, n in members) for members in parts.values()]
        np.testing.assert_array_equal(running[1][:, 1:].numpy(), np.stack(left, 1))
    metrics = mean_metrics([{"episodes": sums}], names_of(timestep, {"some": some}))
    count = metrics["episodes"].item()
    for kind, own in ended.items():
        for part, members in parts.items():
            name = f"some/episode_{kind}" if part == "some" else f"episode_{kind}/{part}"
            expected = own[part] / len(members) / count if count else np.nan
            np.testing.assert_allclose(metrics[name].item(), expected, rtol=1e-5, atol=1e-6)
    whole = metrics["episode_return/a"] + metrics["episode_return/b"]
    np.testing.assert_allclose(metrics["episode_return"].item(), whole.item(), rtol=1e-5, atol=1e-6)


def test_members_of_a_population_are_counted_apart(rng):
    members = [to_timestep(*Stream(rng, 4).trajectory(9)) for _ in range(3)]
    zeros = torch.zeros(4), torch.zeros(4, dtype=torch.int64)
    single = [count_episodes(m, *zeros) for m in members]
    stacked = pytree.tree_map(lambda *x: torch.stack(x), *members)
    mapped = torch.vmap(lambda t: count_episodes(t, *zeros))(stacked)
    for i in range(3):
        assert torch.equal(mapped.sums[i], single[i].sums)
        assert torch.equal(mapped.running_return[i], single[i].running_return)


def test_what_an_environment_reports_counts_where_games_end(rng):
    length, size = 6, 5
    step_type, reward, over = Stream(rng, size).trajectory(length)
    over[3, 0] = True
    timestep = to_timestep(step_type, reward, over)
    told = {"tags": torch.tensor(rng.random((length + 1, size))).float(), "deaths": torch.tensor(1e6 * reward).float()}
    told["tags"][~timestep.extras["game_over"]] = torch.nan  # it says nothing while a game goes on
    timestep = timestep._replace(extras=timestep.extras | {"episode": told})
    found = count_episodes(timestep, torch.zeros(size), torch.zeros(size, dtype=torch.int64))
    metrics = mean_metrics([{"episodes": found.sums}, {"episodes": 2 * found.sums}], names_of(timestep))
    assert list(metrics)[-2:] == names_of(timestep) == ["episode_deaths", "episode_tags"]
    ended = over[1:].astype(bool)
    for name, x in told.items():
        expected = x[1:].numpy()[ended].astype(float).mean()
        assert metrics[f"episode_{name}"].item() == pytest.approx(expected)


def test_reports_come_behind_the_returns_of_groups():
    a = torch.ones(3, 2, 4)
    step_type = torch.tensor([[MID, MID], [LAST, MID], [FIRST, LAST]], dtype=torch.int32)
    extras = {
        "raw_reward": {"a": a},
        "game_over": step_type == LAST,
        "episode": {"rate": torch.tensor([[9.0, 9], [1, 9], [9, 3]])},
    }
    timestep = TimeStep(step_type, {"a": a}, {"a": a}, {}, extras)
    found = count_episodes(timestep, torch.zeros(2, 1), torch.zeros(2, dtype=torch.int64))
    assert names_of(timestep) == ["episode_return/a", "episode_rate"]
    assert found.sums[4:].tolist() == [3, 4, 0]  # one reward of the first episode, two of the second; 1 + 3


def test_means_are_taken_of_metrics_but_of_those_of_extremes():
    history = [
        {"x": torch.tensor(float(i)), "a/reward_min": torch.tensor(-float(i)), "reward_max": torch.tensor(3.0 - i)}
        for i in (1, 5)
    ]
    assert {k: v.item() for k, v in average(history).items()} == {"x": 3, "a/reward_min": -5, "reward_max": 2}


def test_losses_and_norms_of_groups_are_means_whatever_the_groups_are_called():
    names = ("loss/player_max", "grad_norm/player_min", "player_max/reward_max")
    history = [dict.fromkeys(names, torch.tensor(x)) for x in (1.0, 2.0, 6.0)]
    assert [x.item() for x in average(history).values()] == [3, 3, 6]


def test_iterations_that_say_nothing_of_a_metric_are_left_out():
    """Of three members: one always says something, one once, and one never; an infinity is no NaN."""
    nan, inf = torch.nan, torch.inf
    rows = [[1.0, nan, nan], [-inf, nan, nan], [5.0, 4.0, nan]]
    history = [{name: torch.tensor(row) for name in ("x", "x_min", "x_max")} for row in rows]
    found = average(history)
    for name, want in (("x", [-inf, 4, nan]), ("x_min", [-inf, 4, nan]), ("x_max", [5, 4, nan])):
        torch.testing.assert_close(found[name], torch.tensor(want), rtol=0, atol=0, equal_nan=True)
    sums = torch.zeros(3, 5)
    metrics = mean_metrics([h | {"episodes": sums} for h in history])
    torch.testing.assert_close(metrics["x_max"], torch.tensor([5, 4, nan]).double(), equal_nan=True)
