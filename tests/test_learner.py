import math
import threading
from typing import ClassVar

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.agent import Agent, variables_of
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.config import ConfigError
from torchpod.distributed import Ranks
from torchpod.learner import Learner, LearnerConfig
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import FIRST, LAST, MID, ActorOutput, Batch, LossOutput, TimeStep, Trajectory

SPEC = EnvSpec("made_up", observation=Array((3,)), action=Discrete(4))


def experience(seed, length, size, observation=None, hidden=0):
    """A trajectory with episodes that end; every row has reward, value and log-prob of its own."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    step_type = torch.full((length + 1, size), MID, dtype=torch.int32)
    last = torch.rand(length + 1, size, generator=generator) < 0.15
    last[1:] &= ~last[:-1]
    step_type[last] = LAST
    step_type[1:][last[:-1]] = FIRST
    reward = normal(length + 1, size)
    discount = 1 - (last & (normal(length + 1, size) > 0)).float()
    extras = {"raw_reward": reward, "game_over": last}
    observation = normal(length + 1, size, 3) if observation is None else observation
    action = torch.randint(4, (length, size), generator=generator)
    output = ActorOutput(action, {"action_log_prob": -normal(length, size).abs(), "state_value": normal(length, size)})
    state = torch.tanh(normal(size, hidden)) if hidden else ()
    return Trajectory(TimeStep(step_type, reward, discount, observation, extras), output, state, state)


def make_ppo(seed, learner=None, **config):
    torch.manual_seed(seed)
    agent = PPO(SPEC, PPOConfig(hidden=(8,), **config))
    learner = Learner(agent, LearnerConfig(**(learner or {})), num_iterations=5)
    return learner, learner.init(*variables_of(agent))


def assert_equal(a, b, **tolerance):
    tolerance = tolerance or {"rtol": 0, "atol": 0}
    pytree.tree_map(lambda x, y: torch.testing.assert_close(x, y, **tolerance), a, b)


class Counter(Agent):
    """One parameter per row of the trajectory, and a loss whose gradient is each row's share of the minibatch.

    So the first moments of Adam, with beta1 = 1/2, show which rows were in which of the minibatches.
    """

    def __init__(self, rows, recurrent=False, column="one"):
        super().__init__()
        self.shares = nn.Parameter(torch.zeros(rows))
        self.recurrent, self.column = recurrent, column
        self.standardise = () if column == "one" else (column,)

    def prepare(self, trajectory, keys):
        t = trajectory.timestep
        steps = {
            "row": t.observation[:-1].long(),
            "one": torch.ones_like(t.reward[1:]),
            "reward": t.reward[1:],
            "weight": (t.step_type[:-1] != LAST).float(),
        }
        return Batch(steps, trajectory.actor_state)

    def loss(self, batch, keys, target):
        b = batch.steps
        value = self.shares[b["row"]] * b[self.column] * b["weight"]
        return LossOutput(value.sum(), {"count": (b["weight"] > 0).float().sum()})


def count_rows(seed, length, size, num_minibatches, *, environments=None, recurrent=False, weights=True, epochs=1):
    """Per row of the whole trajectory, the first moment after one update on some of its environments."""
    environments = environments or slice(0, size)
    rows = torch.arange((length + 1) * size, dtype=torch.float32).view(length + 1, size)
    trajectory = experience(seed, length, size, observation=rows, hidden=2 if recurrent else 0)
    if not weights:
        step_type = torch.full_like(trajectory.timestep.step_type, MID)
        trajectory = trajectory._replace(timestep=trajectory.timestep._replace(step_type=step_type))
    keys = random.split(random.key(seed), size)[environments]

    def take(tree, axis):
        return pytree.tree_map(lambda x: x[:, environments] if axis else x[environments], tree)

    part = Trajectory(*(take(x, 1) for x in trajectory[:2]), *(take(x, 0) for x in trajectory[2:]))
    agent = Counter(length * size, recurrent)
    config = LearnerConfig(num_epochs=epochs, num_minibatches=num_minibatches, max_grad_norm=1e9, beta1=0.5)
    learner = Learner(agent, config, num_iterations=1)
    state, _ = learner.update(learner.init(*variables_of(agent)), part, keys)
    assert state.num_steps == epochs * num_minibatches
    valid = (trajectory.timestep.step_type[:-1] != LAST).flatten()
    return learner.groups.by_parameter(state.mu)["shares"], valid


def decode(mu, num_minibatches, rows):
    """Which minibatch a row was in, from its first moment 1/2^(M - i) / rows; -1 for none."""
    which = num_minibatches + torch.log2(mu * rows).round()
    return torch.where(mu > 0, which, -1.0).long()


@pytest.mark.parametrize("recurrent", [False, True])
@pytest.mark.parametrize(("length", "size", "minibatches"), [(8, 6, 2), (8, 4, 4), (6, 8, 4), (5, 3, 1)])
def test_every_row_is_in_exactly_one_minibatch_of_an_epoch(seed, length, size, minibatches, recurrent):
    rows = length * size // minibatches
    mu, _ = count_rows(seed, length, size, minibatches, recurrent=recurrent, weights=False)
    which = decode(mu, minibatches, rows)
    assert torch.equal(which.bincount(minlength=minibatches), torch.full((minibatches,), rows))
    torch.testing.assert_close(mu, 0.5 ** (minibatches - which) / rows, rtol=1e-5, atol=0)  # and there exactly once
    if recurrent:  # whole environments
        assert (which.view(length, size) == which.view(length, size)[0]).all()


def test_rows_are_dealt_anew_in_every_epoch_and_update(seed):
    one, _ = count_rows(seed, 16, 4, 2, weights=False)
    other, _ = count_rows(seed + 1, 16, 4, 2, weights=False)
    assert not torch.equal(one, other)
    both, _ = count_rows(seed, 16, 4, 2, weights=False, epochs=2)
    patterns = both.mul(32 * 16).round().unique()  # in which minibatch of the first epoch, and of the second
    assert len(patterns) == 4


def test_resets_are_dealt_but_weigh_nothing(seed):
    mu, valid = count_rows(seed, 16, 8, 2)
    assert 0 < valid.sum() < len(valid)
    assert (mu[~valid] == 0).all() and (mu[valid] > 0).all()
    second = mu > (mu[valid].min() + mu[valid].max()) / 2  # the rows of the last minibatch have more of it
    assert mu.sum().item() == pytest.approx(0.25 + 0.5, rel=1e-5)  # the weights of a minibatch sum to 1
    assert mu[second].sum().item() == pytest.approx(0.5, rel=1e-5)


@pytest.mark.parametrize("recurrent", [False, True])
def test_two_ranks_deal_the_same_sets_as_one(seed, recurrent):
    length, size, minibatches = 8, 8, 2
    options = {"recurrent": recurrent, "weights": False}
    whole, _ = count_rows(seed, length, size, minibatches, **options)
    halves = [
        count_rows(seed, length, size, minibatches, environments=e, **options)[0] for e in (slice(0, 4), slice(4, 8))
    ]
    rows = length * size // minibatches
    merged = decode(halves[0] + halves[1], minibatches, rows // 2)
    assert torch.equal(merged, decode(whole, minibatches, rows))


class Together:
    """Stands for `Ranks`: the sum over threads that meet at a barrier."""

    def __init__(self, rank, size, barrier, slots):
        self.rank, self.world_size, self._barrier, self._slots = rank, size, barrier, slots

    def sum(self, x):
        self._slots[self.rank] = x.clone()
        self._barrier.wait(60)
        x.copy_(torch.stack(self._slots).sum(0))
        self._barrier.wait(60)
        return x


@pytest.mark.parametrize("recurrent", [0, 5])
def test_two_ranks_agree_with_one_after_several_updates(seed, recurrent):
    length, size, world = 8, 8, 2
    config = LearnerConfig(num_epochs=2, num_minibatches=2, learning_rate=1e-2, epsilon=1e-3)
    torch.manual_seed(seed)
    agents = [PPO(SPEC, PPOConfig(hidden=(8,), recurrent=recurrent)) for _ in range(world + 1)]
    params, buffers = variables_of(agents[0])
    keys = random.split(random.key(seed), size)
    trajectories = [experience(seed + i, length, size, hidden=recurrent) for i in range(3)]
    barrier, slots, results, failures = threading.Barrier(world), [torch.zeros(())] * world, {}, []

    def work(name, agent, rows, ranks=None):
        try:
            options = {} if ranks is None else {"ranks": ranks}
            learner = Learner(agent, config, num_iterations=5, **options)
            state, metrics = learner.init(dict(params), dict(buffers)), {}
            for i, t in enumerate(trajectories):
                columns = [pytree.tree_map(lambda x: x[:, rows], part) for part in t[:2]]
                states = [pytree.tree_map(lambda x: x[rows], part) for part in t[2:]]
                state, metrics = learner.update(state, Trajectory(*columns, *states), random.at(keys[rows], 3 * i))
            results[name] = state, metrics
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    work("one", agents[0], slice(0, size))
    threads = [
        threading.Thread(
            target=work, args=(r, agents[1 + r], slice(4 * r, 4 * r + 4), Together(r, world, barrier, slots))
        )
        for r in range(world)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures, failures
    assert_equal(results[0][0], results[1][0])  # the ranks themselves are equal to the bit
    assert_equal(results[0][0].params, results["one"][0].params, rtol=0, atol=1e-5)
    assert_equal(results[0][1], results["one"][1], rtol=1e-4, atol=1e-5)
    assert not torch.equal(results["one"][0].params["policy.weight"], params["policy.weight"])


@pytest.mark.parametrize("recurrent", [0, 5])
@pytest.mark.parametrize("chunk_rows", [1, 10, 24, 1000])
def test_chunks_sum_to_the_whole_minibatch(seed, chunk_rows, recurrent):
    trajectory = experience(seed, 12, 8, hidden=recurrent)
    keys = random.split(random.key(seed), 8)
    options = {"num_epochs": 1, "num_minibatches": 2, "epsilon": 1e-2}
    whole, state = make_ppo(seed, learner=options | {"chunk_rows": 10**6}, recurrent=recurrent)
    parts, _ = make_ppo(seed, learner=options | {"chunk_rows": chunk_rows}, recurrent=recurrent)
    (a, metrics_a), (b, metrics_b) = (x.update(state, trajectory, keys) for x in (whole, parts))
    assert_equal(b.params, a.params, rtol=0, atol=1e-6)
    assert_equal(b.mu, a.mu, rtol=1e-4, atol=1e-6)
    assert_equal(metrics_b, metrics_a, rtol=1e-4, atol=1e-5)


def test_frozen_parameters_stay_what_they_are_and_the_others_learn(seed):
    agent = PPO(SPEC, PPOConfig(hidden=(8,)))
    agent.encoder.requires_grad_(False)
    learner = Learner(agent, LearnerConfig(), num_iterations=5)
    state = learner.init(*variables_of(agent))
    fixed = [name for name, _ in agent.encoder.named_parameters(prefix="encoder")]
    assert fixed and not set(fixed) & state.params.keys()
    new, _ = learner.update(state, experience(seed, 8, 8), random.split(random.key(seed), 8))
    assert all(torch.equal(new.buffers[name], state.buffers[name]) for name in fixed)
    assert all((x != state.params[name]).any() for name, x in new.params.items())


class Says(PPO):
    """PPO that says other things beside its loss."""

    def __init__(self, spec, config, metrics=None, buffers=None):
        super().__init__(spec, config)
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))
        self.said = metrics or {}, buffers or (lambda agent: {})

    def loss(self, batch, keys, target):
        out, (metrics, buffers), weight = super().loss(batch, keys, target), self.said, batch.steps["weight"].sum()
        return out._replace(metrics=out.metrics | {k: x * weight for k, x in metrics.items()}, buffers=buffers(self))


@pytest.mark.parametrize("enabled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_metrics_and_buffers_may_be_of_float64(seed, enabled):
    two = torch.tensor(2.0, dtype=torch.float64)
    agent = Says(SPEC, PPOConfig(hidden=(8,)), {"two": two}, lambda agent: {"total": agent.total + two})
    learner = Learner(agent, LearnerConfig(), num_iterations=5, compiler=Compiler(enabled))
    state = learner.init(*variables_of(agent))
    for _ in range(2):
        state, metrics = learner.update(state, experience(seed, 8, 8), random.split(random.key(seed), 8))
    assert metrics["two"] == 2 and state.params["policy.weight"].dtype == torch.float32
    assert state.buffers["total"].dtype == torch.float64 and state.buffers["total"] == 2 * 2 * 16


@pytest.mark.parametrize("enabled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_what_is_only_told_may_be_no_number(seed, enabled):
    nan = torch.tensor(math.nan)
    agent = Says(SPEC, PPOConfig(hidden=(8,)), {"odd": nan}, lambda agent: {"total": agent.total + nan})
    learner = Learner(agent, LearnerConfig(), num_iterations=5, compiler=Compiler(enabled))
    before = learner.init(*variables_of(agent))
    state, metrics = learner.update(before, experience(seed, 8, 8), random.split(random.key(seed), 8))
    assert state.healthy and metrics["odd"].isnan() and metrics["loss"].isfinite() and state.buffers["total"] == 0
    assert not torch.equal(state.params["policy.weight"], before.params["policy.weight"])


@pytest.mark.parametrize(
    ("says", "message"),
    [
        ({"buffers": lambda agent: {"totl": agent.total}}, "'totl', no scalar buffer of floats; did you mean total?"),
        ({"buffers": lambda agent: {"count": agent.count + 1}}, "has 'count', no scalar buffer of floats"),
    ],
)
def test_what_a_loss_cannot_say_is_refused(seed, says, message):
    agent = Says(SPEC, PPOConfig(hidden=(8,)), **says)
    learner = Learner(agent, LearnerConfig(), num_iterations=5)
    with pytest.raises(ValueError, match=message):
        state = learner.init(*variables_of(agent))
        learner.update(state, experience(seed, 8, 8), random.split(random.key(seed), 8))


def test_intervals_of_groups_that_there_are_not_are_refused():
    agent = PPO(SPEC, PPOConfig(hidden=(8,)))
    agent.optimizer_intervals = {"actor": 2}
    with pytest.raises(ValueError, match=r"optimizer_intervals has 'actor', the agent has optimizer groups \['loss'\]"):
        Learner(agent, LearnerConfig(), num_iterations=5)


@pytest.mark.parametrize(("recurrent", "rows"), [(False, (64,)), (True, (2, 64))])
def test_the_length_of_a_gradient_is_learned_from_few_rows(seed, recurrent, rows, monkeypatch):
    length, size, seen = 2, 400, []
    agent = Counter(length * size, recurrent=recurrent)
    observation = torch.arange((length + 1) * size, dtype=torch.float32).view(length + 1, size)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1, chunk_rows=200), num_iterations=1)
    loss = agent.loss
    monkeypatch.setattr(
        agent, "loss", lambda batch, *args: seen.append(batch.steps["weight"].shape) or loss(batch, *args)
    )
    trajectory = experience(seed, length, size, observation=observation)
    learner.update(learner.init(*variables_of(agent)), trajectory, random.split(random.key(seed), size))
    assert seen == [rows, *[(2, 100) if recurrent else (200,)] * 4]


def test_standardised_columns_have_mean_0_and_std_1_over_valid_rows(seed):
    length, size = 16, 6
    rows = torch.arange((length + 1) * size, dtype=torch.float32).view(length + 1, size)
    trajectory = experience(seed, length, size, observation=rows)
    reward = 50 + 7 * trajectory.timestep.reward
    reward[1:][trajectory.timestep.step_type[:-1] == LAST] = 1e6  # rows that do not count
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(reward=reward))
    agent = Counter(length * size, column="reward")
    config = LearnerConfig(num_epochs=1, num_minibatches=1, max_grad_norm=1e9, beta1=0.5)
    learner = Learner(agent, config, num_iterations=1)
    state, _ = learner.update(learner.init(*variables_of(agent)), trajectory, random.split(random.key(seed), size))
    valid = (trajectory.timestep.step_type[:-1] != LAST).flatten()
    gradient = learner.groups.by_parameter(state.mu)["shares"] * 2
    column = (gradient * valid.sum())[valid].double()  # gradient = column / number of rows
    assert abs(column.mean()) < 1e-5
    assert column.var(correction=0).sqrt().item() == pytest.approx(1, abs=1e-4)
    expected = reward[1:].flatten()[valid].double()
    expected = (expected - expected.mean()) / expected.std(correction=0)
    torch.testing.assert_close(column, expected, rtol=1e-4, atol=1e-4)


def test_columns_of_a_group_are_rescaled_and_standardised_by_the_weights_of_that_group(seed):
    learner, _ = make_ppo(seed, {"num_epochs": 1, "num_minibatches": 4})
    learner.agent.standardise = ("advantage", "cats/advantage")
    generator = torch.Generator().manual_seed(seed)
    steps = {}
    for prefix, shape in (("", (12, 8)), ("cats/", (12, 8, 3)), ("dogs/", (12, 8, 2))):
        steps[f"{prefix}weight"] = (torch.rand(shape, generator=generator) > 0.3).float() * 7
        steps[f"{prefix}advantage"] = 5 + 3 * torch.randn(shape, generator=generator)
    minibatches = learner.dealer.deal(Batch(steps), random.split(random.key(seed), 8), torch.tensor(0)).steps
    for prefix in ("", "cats/", "dogs/"):
        weight, x = (minibatches[prefix + name].double().flatten(1) for name in ("weight", "advantage"))
        torch.testing.assert_close(weight.sum(1), torch.ones(4, dtype=torch.float64))
        mean = (weight * x).sum(1)
        std = (weight * (x - mean[:, None]).square()).sum(1).sqrt()
        if prefix == "dogs/":
            assert (mean - 5).abs().max() < 4 and (std - 3).abs().max() < 2.9  # not asked for
        else:
            torch.testing.assert_close(mean, torch.zeros_like(mean), rtol=0, atol=1e-5)
            torch.testing.assert_close(std, torch.ones_like(std), rtol=1e-4, atol=1e-4)


class Quadratic(Agent):
    """Loss `mean over rows of |W x - 1|^2 + |b|^2`: another gradient at every step."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)

    def prepare(self, trajectory, keys):
        x = trajectory.timestep.observation[:-1]
        return Batch({"x": x, "weight": torch.ones(x.shape[:2])})

    def loss(self, batch, keys, target):
        error = (self.net(batch.steps["x"]) - 1).square().sum(-1)
        return LossOutput((error * batch.steps["weight"]).sum(), {})


@pytest.mark.parametrize("anneal", [False, True, "schedule"])
@pytest.mark.parametrize("max_grad_norm", [0.5, 1e6, math.inf])
def test_clipping_annealing_and_adam_equal_torchs(seed, max_grad_norm, anneal):
    length, size, iterations = 4, 5, 6
    torch.manual_seed(seed)
    agent, reference = Quadratic().double(), Quadratic().double()
    reference.load_state_dict(agent.state_dict())
    trajectory = experience(seed, length, size)
    x = trajectory.timestep.observation.double()
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(observation=x))
    config = LearnerConfig(
        num_epochs=2,
        num_minibatches=1,
        learning_rate=0.03,
        max_grad_norm=max_grad_norm,
        anneal_learning_rate=bool(anneal),
        schedules={"learning_rate": ((20.0, 0.03), (60.0, 0.01))} if anneal == "schedule" else None,
    )
    rates = [0.03 * (1 - i / iterations) if anneal else 0.03 for i in range(iterations)]
    rates = [0.03, 0.03, 0.03, 0.025, 0.02, 0.015] if anneal == "schedule" else rates
    learner = Learner(agent, config, num_iterations=iterations, steps_per_iteration=10)
    state = learner.init(*variables_of(agent))
    optimizer = torch.optim.Adam(reference.parameters(), lr=0.03, eps=1e-5)
    for i in range(iterations):
        state, metrics = learner.update(state, trajectory, random.split(random.key(i), size))
        norms = []
        for _ in range(2):
            for group in optimizer.param_groups:
                group["lr"] = rates[i]
            optimizer.zero_grad()
            ((reference.net(x[:-1]) - 1).square().sum(-1)).mean().backward()
            norms.append(nn.utils.clip_grad_norm_(reference.parameters(), max_grad_norm))
            optimizer.step()
        for name, value in reference.named_parameters():
            # bias corrections and rates are float32: 1e-4 of the distance that can have been covered
            torch.testing.assert_close(state.params[name], value.detach(), rtol=0, atol=1e-4 * 0.03 * 2 * (i + 1))
        torch.testing.assert_close(metrics["grad_norm"], torch.stack(norms).mean().detach(), rtol=1e-4, atol=1e-5)


def test_the_learning_rate_is_annealed_to_nothing_and_not_below(seed):
    learner, state = make_ppo(seed, learner={"num_epochs": 1, "num_minibatches": 1, "learning_rate": 1e-2})
    keys, sizes = random.split(random.key(seed), 4), []
    for i in range(7):  # of 5
        new, _ = learner.update(state, experience(seed + i, 8, 4), keys)
        sizes.append(max(float((v - state.params[k]).abs().max()) for k, v in new.params.items()))
        state = new
    assert sizes[0] == pytest.approx(1e-2, rel=1e-2)  # the first step of Adam
    assert all(s > 0 for s in sizes[:5]) and sizes[5:] == [0, 0]
    assert sizes[4] < 0.6e-2


def test_flat_vectors_hold_each_parameter_from_a_whole_cache_line_on(seed):
    torch.manual_seed(seed)
    agent = PPO(SPEC, PPOConfig(hidden=(4,)))
    learner = Learner(agent, LearnerConfig(), num_iterations=1)
    parts = {name: torch.randn(p.shape) for name, p in agent.named_parameters()}
    flat, offset = learner.groups.flat(parts), 0
    for name, part in parts.items():
        assert torch.equal(flat[offset : offset + part.numel()], part.flatten()), name
        offset += part.numel() + -part.numel() % 16
    assert flat.shape == (offset,) == learner.init(*variables_of(agent)).mu["loss"].shape
    assert_equal(learner.groups.by_parameter({"loss": flat}), parts)
    both = learner.groups.flat({name: torch.stack([part, -part]) for name, part in parts.items()}, 1)
    assert torch.equal(both, torch.stack([flat, -flat]))


@pytest.mark.parametrize("beta", [0.0, 0.999])
def test_adam_corrects_the_bias_of_its_first_step(seed, beta):
    """After one step both moments, corrected, are the gradient and its square: every parameter moves by the rate."""
    torch.manual_seed(seed)
    agent = PPO(SPEC, PPOConfig(hidden=(4,)))
    config = LearnerConfig(num_epochs=1, num_minibatches=1, beta1=beta, beta2=beta, epsilon=0.0, learning_rate=1e-3)
    learner = Learner(agent, config, num_iterations=10**9)
    params, buffers = variables_of(agent)
    state = learner.init(params, buffers)
    flat = learner.groups.flat({k: torch.randn(p.shape) for k, p in params.items()})
    after, _ = learner._apply(state, flat)
    moved = learner.groups.flat({k: state.params[k] - after.params[k] for k in params})
    torch.testing.assert_close(moved, 1e-3 * flat.sign(), rtol=2e-4, atol=1e-7)


def test_a_reward_that_is_not_a_number_latches_healthy_and_freezes_everything(seed):
    learner, state = make_ppo(seed)
    keys = random.split(random.key(seed), 4)
    good = experience(seed, 8, 4)
    state, _ = learner.update(state, good, keys)
    assert state.healthy
    reward = good.timestep.reward.clone()
    reward[1:] = float("nan")
    bad = good._replace(timestep=good.timestep._replace(reward=reward))
    broken, metrics = learner.update(state, bad, random.at(keys, 10))
    assert not broken.healthy and metrics["loss"].isnan()
    assert_equal(broken._replace(healthy=state.healthy), state)
    later, _ = learner.update(broken, good, random.at(keys, 20))
    assert_equal(later, broken)
    healthy, _ = learner.update(state, good, random.at(keys, 20))
    assert not torch.equal(healthy.params["value.weight"], state.params["value.weight"])


def test_infinite_gradients_latch_too(seed):
    learner, state = make_ppo(seed, learner={"num_epochs": 1, "num_minibatches": 1}, normalize_advantage=False)
    trajectory = experience(seed, 8, 4)
    trajectory.output.extras["state_value"][0, 0] = float("inf")
    broken, _ = learner.update(state, trajectory, random.split(random.key(seed), 4))
    assert not broken.healthy
    assert_equal(broken.params, state.params)


def test_update_is_pure(seed):
    learner, state = make_ppo(seed)
    trajectory, keys = experience(seed, 8, 4), random.split(random.key(seed), 4)
    before = pytree.tree_map(torch.clone, (state, trajectory, keys))
    one, two = (learner.update(state, trajectory, keys) for _ in range(2))
    assert_equal(one, two)
    assert_equal((state, trajectory, keys), before)


def test_environments_that_cannot_be_dealt_are_refused_with_a_number_that_can(seed):
    for recurrent, length in ((5, 8), (0, 7)):
        learner, state = make_ppo(seed, recurrent=recurrent)
        with pytest.raises(ValueError, match=r"num_envs=6 .*num_minibatches=4; use a multiple of 4"):
            learner.update(state, experience(seed, length, 6, hidden=recurrent), random.split(random.key(seed), 6))


@pytest.mark.parametrize(
    ("rows", "chunk_rows", "chunks"), [(4096, 2048, 2), (3000, 2048, 2), (2500, 2048, 1), (2053, 64, 1), (12, 4, 3)]
)
def test_chunks_are_equal_and_near_the_size_asked_for(rows, chunk_rows, chunks):
    learner, _ = make_ppo(0, learner={"chunk_rows": chunk_rows})
    minibatches = learner.config.num_minibatches
    assert learner.dealer.num_chunks({"weight": torch.ones(minibatches, rows)}, dealt=True) == chunks
    assert learner.dealer.num_chunks({"weight": torch.ones(minibatches, rows)}, dealt=False) == chunks


class Counted(Ranks):
    """One of two ranks that notes the sizes of what it would sum."""

    sizes: ClassVar[list[int]] = []

    def sum(self, x):
        self.sizes.append(x.numel())
        return x


def test_ranks_sum_one_flat_gradient_per_optimizer_step_and_the_moments_once_an_epoch(seed):
    torch.manual_seed(seed)
    agent = PPO(SPEC, PPOConfig(hidden=(8,)))
    config = LearnerConfig(num_epochs=3, num_minibatches=2)
    learner = Learner(agent, config, num_iterations=5, ranks=Counted(world_size=2))
    state = learner.init(*variables_of(agent))
    Counted.sizes.clear()
    _, metrics = learner.update(state, experience(seed, 8, 4), random.split(random.key(seed), 4))
    moments = 2 * 3  # of 2 minibatches: the weights, the advantages and their squares
    gradient = sum(-(-p.numel() // 16) * 16 for p in agent.parameters())  # each is filled up to whole cache lines
    assert 0 < len(metrics.keys() - {"grad_norm", "healthy"}) <= 16
    gradient += 16  # the other metrics travel with it
    measures = 6 + 2 * 2  # sums, and the extremes of either rank
    assert Counted.sizes == [measures, *[moments, gradient, gradient] * 3]


def test_weights_sum_to_one_however_small_they_are(seed):
    """So that an agent may weigh its rows by importance."""
    size = 6
    trajectory, keys = experience(seed, 16, size), random.split(random.key(seed), size)
    ends = []
    for scale in (1.0, 1e-3):
        torch.manual_seed(seed)
        agent = Quadratic()
        plain = agent.prepare
        agent.prepare = lambda t, k, scale=scale, plain=plain: Batch(
            plain(t, k).steps | {"weight": scale * plain(t, k).steps["weight"]}
        )
        learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=2), num_iterations=1)
        ends.append(learner.update(learner.init(*variables_of(agent)), trajectory, keys)[0].params)
    for name in ends[0]:
        torch.testing.assert_close(ends[0][name], ends[1][name], rtol=1e-4, atol=1e-6)


class Echo(Agent):
    """Its loss is its hyperparameter."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.hyperparameter("coefficient", 0.8)

    def prepare(self, trajectory, keys):
        return Batch({"weight": torch.ones(trajectory.timestep.reward[1:].shape)})

    def loss(self, batch, keys, target):
        return LossOutput(self.coefficient * batch.steps["weight"].sum() + 0 * self.net.weight.sum(), {})


def test_hyperparameters_are_annealed_to_nothing_and_stay_what_they_were_in_the_state(seed, monkeypatch):
    trajectory, keys = experience(seed, 16, 6), random.split(random.key(seed), 6)
    agent = Echo()
    learner = Learner(agent, LearnerConfig(num_epochs=2, num_minibatches=2, anneal=("coefficient",)), num_iterations=4)
    state, losses = learner.init(*variables_of(agent)), []
    for _ in range(5):
        state, metrics = learner.update(state, trajectory, keys)
        losses.append(metrics["loss"].item())
    assert losses == pytest.approx([0.8, 0.6, 0.4, 0.2, 0.0])
    assert state.buffers["coefficient"] == torch.tensor(0.8)
    wrong = Learner(agent, LearnerConfig(anneal=("entropy",)), num_iterations=4)
    with pytest.raises(ValueError, match=r"anneal=\['entropy'\]: entropy is not known; known: coefficient\."):
        wrong.init(*variables_of(agent))
    agent.register_buffer("table", torch.zeros(3))
    agent.register_buffer("mean", torch.zeros((), dtype=torch.float64))
    for name in ("table", "mean"):
        wrong = Learner(agent, LearnerConfig(anneal=(name,)), num_iterations=4)
        with pytest.raises(ValueError, match=rf"anneal=\['{name}'\]: {name} is not known; known: coefficient\."):
            wrong.init(*variables_of(agent))
    monkeypatch.setattr(Echo, "annealed", ("left",))
    wrong = Learner(agent, LearnerConfig(), num_iterations=4)
    with pytest.raises(ValueError, match=r"Echo\.annealed=\('left',\): left is not known; known: coefficient\."):
        wrong.init(*variables_of(agent))


def test_losses_of_other_names_than_the_optimizer_groups_are_refused(seed, monkeypatch):
    agent, trajectory = Echo(), experience(seed, 16, 6)
    monkeypatch.setattr(Echo, "loss", lambda self, *_: LossOutput({"policy": self.coefficient}, {}))
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=2), num_iterations=4)
    message = (
        r"Echo\.loss must give one loss for each of optimizer_groups\(\), \['loss'\], and gives \['policy'\]; let it"
    )
    with pytest.raises(ValueError, match=message):
        learner.update(learner.init(*variables_of(agent)), trajectory, random.split(random.key(seed), 6))


def test_hyperparameters_follow_their_schedules_and_stay_what_they_were_in_the_state(seed):
    trajectory, keys = experience(seed, 16, 6), random.split(random.key(seed), 6)
    agent, points = Echo(), ((96.0, 0.5), (288.0, 0.1), (384.0, 0.3))
    config = LearnerConfig(num_epochs=2, num_minibatches=2, schedules={"coefficient": points})
    learner = Learner(agent, config, num_iterations=6, steps_per_iteration=96)
    state, losses = learner.init(*variables_of(agent)), []
    for i in range(6):
        assert learner.acting(state, torch.tensor(i))["coefficient"].dtype == torch.float32
        state, metrics = learner.update(state, trajectory, keys)
        losses.append(metrics["loss"].item())
    assert losses == pytest.approx([0.5, 0.5, 0.3, 0.1, 0.3, 0.3])
    assert state.buffers["coefficient"] == torch.tensor(0.8)


@pytest.mark.parametrize(
    ("schedules", "message"),
    [
        ({"entropy": ((0, 1),)}, r"schedules.entropy is not known; known: coefficient, learning_rate, learning_rate.l"),
        (
            {"learning_rate.policy": ((0, 1),)},
            "schedules.learning_rate.policy is not known; did you mean ",
        ),
        ({"coefficient": ((0, 1),)}, "schedules and anneal both have coefficient; leave it out of one of them"),
    ],
)
def test_schedules_that_cannot_work_are_refused(schedules, message):
    agent = Echo()
    learner = Learner(agent, LearnerConfig(anneal=("coefficient",), schedules=schedules), num_iterations=4)
    with pytest.raises(ValueError, match=message):
        learner.init(*variables_of(agent))


def test_a_clip_of_nothing_is_written_inf_and_one_of_everything_is_refused():
    assert load(["algo.learner.max_grad_norm=inf"]).algo.learner.max_grad_norm == math.inf
    with pytest.raises(ConfigError, match=r"algo.learner.max_grad_norm=0.0 must lie from 1e-09 to inf\."):
        load(["algo.learner.max_grad_norm=0"])
