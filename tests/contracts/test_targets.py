"""An agent with target parameters, and a loss that draws from its keys."""

import torch
from torch import nn

from torchpod import random
from torchpod.agent import Agent, variables_of
from torchpod.learner import Learner, LearnerConfig
from torchpod.types import MID, ActorOutput, Batch, LossOutput, TimeStep, Trajectory

T, B, RATE = 4, 6, 0.125  # a power of two


class Follower(Agent):
    """Regresses on its target network's noisy output."""

    target_rate = RATE

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 1)

    def value(self, x):
        return self.net(x)[..., 0]

    def act(self, timestep, state, keys, explore=True):
        return ActorOutput(self.value(timestep.observation), {}), state

    def prepare(self, trajectory, keys):
        x = trajectory.timestep.observation[:-1]
        return Batch({"x": x, "weight": torch.ones(x.shape[:2])})

    def loss(self, batch, keys, target):
        x, weight = batch.steps["x"], batch.steps["weight"]
        noise = random.normal(keys, x.shape[0])
        goal = target("value", x) + 1.0 + noise
        loss = ((self.value(x) - goal).square() * weight).sum()
        return LossOutput(loss, {"noise": (noise * weight).sum(), "goal": (goal * weight).sum()})


def experience(seed):
    x = torch.randn(T + 1, B, 3, generator=torch.Generator().manual_seed(seed))
    zero = torch.zeros(T + 1, B)
    timestep = TimeStep(torch.full((T + 1, B), MID, dtype=torch.int32), zero, zero + 1, x, {})
    return Trajectory(timestep, ActorOutput(zero[1:], {}), (), ()), random.split(random.key(seed), B)


def make(**config):
    agent = Follower()
    config = LearnerConfig(**({"num_epochs": 1, "num_minibatches": 1, "learning_rate": 0.1} | config))
    learner = Learner(agent, config, num_iterations=10)
    return learner, learner.init(*variables_of(agent))


def test_targets_begin_as_the_parameters_and_follow_by_the_rate_after_every_step(seed):
    learner, state = make()
    trajectory, keys = experience(seed)
    assert all(torch.equal(v, state.params[k]) for k, v in state.targets.items())
    for i in range(5):
        new, _ = learner.update(state, trajectory, random.at(keys, 2 * i))
        for k, target in state.targets.items():
            assert torch.equal(new.targets[k], target + RATE * (new.params[k] - target))
            assert not torch.equal(new.params[k], state.params[k])
        state = new


def test_three_epochs_equal_three_updates_of_one_epoch_and_so_do_the_targets(seed):
    learner, state = make(num_epochs=3, anneal_learning_rate=False)
    single, _ = make(anneal_learning_rate=False)
    trajectory, keys = experience(seed)
    together, _ = learner.update(state, trajectory, keys)
    one_by_one = state
    for epoch in range(3):
        one_by_one, _ = single.update(one_by_one, trajectory, random.advance(keys, 2 * epoch))  # one deal, one loss
    assert together.num_steps == one_by_one.num_steps == 3
    for k, v in together.params.items():
        assert torch.equal(v, one_by_one.params[k])
        assert torch.equal(together.targets[k], one_by_one.targets[k])
        assert not torch.equal(together.targets[k], state.targets[k])


def test_the_loss_uses_the_target_network_and_sends_it_no_gradient(seed):
    learner, state = make()
    trajectory, keys = experience(seed)
    state = state._replace(targets=state.targets | {"net.bias": state.targets["net.bias"] + 7.0})
    new, metrics = learner.update(state, trajectory, keys)
    x = trajectory.timestep.observation[:-1].reshape(-1, 3)
    weight, bias = state.targets["net.weight"], state.targets["net.bias"]
    goal = (x @ weight[0] + bias + 1.0).mean() + metrics["noise"]
    torch.testing.assert_close(metrics["goal"], goal, rtol=1e-4, atol=1e-4)
    # the gradient of the bias is 2 * mean(value - goal), without any share of the target
    value = (x @ state.params["net.weight"][0] + state.params["net.bias"]).mean()
    assert metrics["goal"] - value > 5  # 8 on average, and 1 if the parameters were their own target
    assert metrics["grad_norm"] > 0.5  # and so the gradient is clipped to that
    gradient = 2 * (value - metrics["goal"]) * 0.5 / metrics["grad_norm"]
    torch.testing.assert_close(learner.groups.by_parameter(new.mu)["net.bias"][0] / 0.1, gradient, rtol=1e-4, atol=1e-5)


def test_same_keys_give_the_same_loss_and_others_another(seed):
    learner, state = make(num_epochs=2, num_minibatches=2)
    trajectory, keys = experience(seed)
    one, first = learner.update(state, trajectory, keys)
    two, second = learner.update(state, trajectory, keys)
    _, other = learner.update(state, trajectory, random.advance(keys, 3))
    for name in first:
        assert torch.equal(first[name], second[name])
    for name in one.params:
        assert torch.equal(one.params[name], two.params[name])
    assert first["noise"] != other["noise"] and first["loss"] != other["loss"]


def keys_of_losses(seed, **config):
    trajectory, keys = experience(seed)
    seen = set()

    class Recorder(Follower):
        def loss(self, batch, keys, target):
            seen.add(tuple(keys.tolist()))
            return super().loss(batch, keys, target)

    learner = Learner(Recorder(), LearnerConfig(num_epochs=2, num_minibatches=2, **config), num_iterations=1)
    learner.update(learner.init(*variables_of(learner.agent)), trajectory, keys)
    return seen


def test_every_minibatch_draws_noise_of_its_own(seed):
    assert len(keys_of_losses(seed)) == 2 * 2


def test_every_chunk_draws_noise_of_its_own(seed):
    assert len(keys_of_losses(seed, chunk_rows=4)) == 2 * 2 * 3  # minibatches of 12 rows, so 3 chunks each
