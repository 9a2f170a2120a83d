"""PPO, A2C and IMPALA against their papers."""

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from tests.ops.test_returns import slow_vtrace
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.env import TensorEnv
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import Learner, LearnerConfig
from torchpod.nets.heads import Categorical, MultiCategorical
from torchpod.ops.returns import vtrace
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete
from torchpod.testing import check_agent
from torchpod.types import FIRST, LAST, MID, Batch, TimeStep

DISCRETE = EnvSpec("discrete", observation=Array((5,)), action=Discrete(3))
PAIR = EnvSpec("pair", observation=Array((5,)), action=MultiDiscrete((3, 2)))
CONTINUOUS = EnvSpec("continuous", observation=Array((5,)), action=Box((2,), -3.0, 5.0))
UNBOUNDED = EnvSpec("unbounded", observation=Array((5,)), action=Box((2,)))
ROWS = 40
CONFIGS = {PPO: PPOConfig, A2C: A2CConfig, IMPALA: IMPALAConfig}


def make(cls, spec, seed, **config):
    """An agent whose heads are not almost zero, as they are at the start."""
    torch.manual_seed(seed)
    agent = cls(spec, CONFIGS[cls](hidden=(6, 7), **config))
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return agent


def minibatch(agent, seed, rows=ROWS):
    """Rows of an old policy that is not far away, with weights that sum to 1, some of them 0."""
    rng = np.random.default_rng(seed)
    observation = rng.normal(size=(rows, 5))
    if isinstance(agent.head, MultiCategorical):
        action = rng.integers(0, (3, 2), (rows, 2))
    elif isinstance(agent.head, Categorical):
        action = rng.integers(0, 3, rows)
    else:
        action = rng.normal(size=(rows, 2)) * 2
    policy, value = reference_network(agent, observation)
    weight = (rng.random(rows) > 0.2) * 1.0
    return {
        "observation": observation,
        "first": np.zeros(rows, bool),
        "action": action,
        "action_log_prob": reference_log_prob(agent, policy, action)[0] + 0.3 * rng.normal(size=rows),
        "state_value": value + 0.4 * rng.normal(size=rows),
        "advantage": rng.normal(size=rows),
        "value_target": value + rng.normal(size=rows),
        "weight": weight / weight.sum(),
    }


def reference_network(agent, x):
    """Two separate tanh networks, in float64 NumPy."""
    p = {k: v.detach().numpy().astype(np.float64) for k, v in agent.state_dict().items()}

    def mlp(prefix, h):
        for i in (0, 2):
            h = np.tanh(h @ p[f"{prefix}.net.{i}.weight"].T + p[f"{prefix}.net.{i}.bias"])
        return h

    policy = mlp("encoder", x) @ p["policy.weight"].T + p["policy.bias"]
    value = mlp("value_encoder", x) @ p["value.weight"].T + p["value.bias"]
    return policy, value[:, 0]


def reference_categorical(policy, action):
    probs = np.exp(policy) / np.exp(policy).sum(1, keepdims=True)
    return np.log(probs[np.arange(len(action)), action]), -(probs * np.log(probs)).sum(1)


def reference_log_prob(agent, policy, action):
    """Log-probability and entropy; continuous policies are normal in [-1, 1], the scaled range of the action."""
    if isinstance(agent.head, MultiCategorical):
        parts = [reference_categorical(own, a) for own, a in zip(np.split(policy, [3], 1), action.T, strict=True)]
        return sum(p[0] for p in parts), sum(p[1] for p in parts)
    if isinstance(agent.head, Categorical):
        return reference_categorical(policy, action)
    log_std = agent.head.log_std.detach().numpy().astype(np.float64)
    if agent.head.scale != 1.0:
        action = (action - 1.0) / 4.0  # [-3, 5]
    density = -((action - policy) ** 2) / (2 * np.exp(2 * log_std)) - log_std - 0.5 * np.log(2 * np.pi)
    entropy = (0.5 * np.log(2 * np.pi * np.e) + log_std).sum()
    return density.sum(1), np.full(len(action), entropy)


def reference_ppo(agent, b):
    """Row by row as in the paper: L^CLIP (eq. 7), L^VF (clipped as in the authors' code), S (eq. 9)."""
    policy, value = reference_network(agent, b["observation"])
    log_prob, entropy = reference_log_prob(agent, policy, b["action"])
    clip, total = float(agent.clip), 0.0
    for i in range(len(value)):
        ratio = math.exp(log_prob[i] - b["action_log_prob"][i])
        advantage, target, old = b["advantage"][i], b["value_target"][i], b["state_value"][i]
        surrogate = min(ratio * advantage, min(max(ratio, 1 - clip), 1 + clip) * advantage)
        error = (value[i] - target) ** 2
        if agent.config.value_clip:
            near = old + min(max(value[i] - old, -clip), clip)
            error = max(error, (near - target) ** 2)
        total += b["weight"][i] * (
            -surrogate + float(agent.value_coefficient) * error / 2 - float(agent.entropy_coefficient) * entropy[i]
        )
    return total


def reference_a2c(agent, b):
    policy, value = reference_network(agent, b["observation"])
    log_prob, entropy = reference_log_prob(agent, policy, b["action"])
    row = -log_prob * b["advantage"] + float(agent.value_coefficient) * (value - b["value_target"]) ** 2 / 2
    return (b["weight"] * (row - float(agent.entropy_coefficient) * entropy)).sum()


def to_batch(b):
    return Batch({k: torch.tensor(v).float() if v.dtype == np.float64 else torch.tensor(v) for k, v in b.items()})


@pytest.mark.parametrize("spec", [DISCRETE, PAIR, CONTINUOUS, UNBOUNDED], ids=lambda s: s.name)
@pytest.mark.parametrize("value_clip", [True, False])
def test_ppo_loss_equals_the_paper(seed, spec, value_clip):
    agent = make(PPO, spec, seed, value_clip=value_clip, entropy_coefficient=0.1, clip=0.15)
    b = minibatch(agent, seed)
    out = agent.loss(to_batch(b), torch.zeros(3), None)
    assert out.loss.item() == pytest.approx(reference_ppo(agent, b), rel=1e-4, abs=1e-5)
    assert 0.1 < out.metrics["clip_fraction"] < 0.9  # both sides of the clip are tested
    parts = out.metrics["policy_loss"] + 0.5 * out.metrics["value_loss"] - 0.1 * out.metrics["entropy"]
    assert parts.item() == pytest.approx(out.loss.item(), rel=1e-4, abs=1e-5)
    assert out.metrics["approx_kl"] > 0


@pytest.mark.parametrize("cls", [A2C, IMPALA])
@pytest.mark.parametrize("spec", [DISCRETE, PAIR, CONTINUOUS], ids=lambda s: s.name)
def test_a2c_and_impala_loss_equal_the_papers(seed, cls, spec):
    agent = make(cls, spec, seed, entropy_coefficient=0.1)
    b = minibatch(agent, seed)
    out = agent.loss(to_batch(b), torch.zeros(3), None)
    assert out.loss.item() == pytest.approx(reference_a2c(agent, b), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("spec", [DISCRETE, PAIR, CONTINUOUS], ids=lambda s: s.name)
def test_impala_prepares_vtrace_of_the_policy_that_learns(seed, spec):
    """Actions of one policy, targets of another: ratios and values in NumPy, V-trace as tested in tests/ops."""
    actor = make(IMPALA, spec, seed)
    agent = make(IMPALA, spec, seed + 1, discount=0.9, lambda_=0.8, rho_clip=1.5, c_clip=0.7, reward_scale=0.5)
    keys = random.split(random.key(seed), 8)
    params, buffers = variables_of(actor)
    env = Fixed(spec)
    _, trajectory = unroll(make_step(actor, env), params | buffers, start(actor, env, keys), keys, keys, length=6)
    with torch.no_grad():
        batch = agent.prepare(trajectory, keys)
    t = pytree.tree_map(lambda x: x.double().numpy() if x.is_floating_point() else x.numpy(), trajectory.timestep)
    values, log_ratio = [], []
    for i, x in enumerate(t.observation):
        policy, value = reference_network(agent, x)
        values.append(value)
        if i < 6:
            action = trajectory.output.action[i].numpy()
            old = reference_log_prob(actor, reference_network(actor, x)[0], action)[0]
            log_ratio.append(reference_log_prob(agent, policy, action)[0] - old)
    v, reward, discount = np.stack(values), 0.5 * t.reward[1:], 0.9 * t.discount[1:]
    arrays = (np.stack(log_ratio), reward, discount, t.step_type[1:] == LAST, v[:-1], v[1:])
    target, advantage = vtrace(*map(torch.from_numpy, arrays), lambda_=0.8, rho_clip=1.5, c_clip=0.7)
    torch.testing.assert_close(batch.steps["value_target"].double(), target, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(batch.steps["advantage"].double(), advantage, rtol=1e-4, atol=1e-4)
    assert torch.equal(batch.steps["weight"] == 0, trajectory.timestep.step_type[:-1] == LAST)
    told = {"reward": t.reward[1:], "value": v[:-1], "value_target": target.numpy()}
    for name, x in told.items():
        np.testing.assert_allclose(batch.report[name].numpy(), x, rtol=1e-4, atol=1e-4)
    assert np.exp(arrays[0]).max() > 1.5 > 0.7 > np.exp(arrays[0]).min()  # both clips are at work


@pytest.mark.parametrize("cell", ["gru", "lstm"])
def test_impala_with_a_memory_prepares_vtrace_of_one_step_after_another(seed, cell):
    """Environment by environment, from the stored state and, where an episode begins, from none."""
    actor = make(IMPALA, DISCRETE, seed, recurrent=4, cell=cell)
    settings = {"lambda_": 0.8, "rho_clip": 1.2, "c_clip": 0.7}
    agent = make(IMPALA, DISCRETE, seed + 1, recurrent=4, cell=cell, discount=0.9, **settings)
    env, keys, length = Fixed(DISCRETE), random.split(random.key(seed), 8), 11
    params, buffers = variables_of(actor)
    step, variables = make_step(actor, env), params | buffers
    carry, _ = unroll(step, variables, start(actor, env, keys), keys, keys, length=3)
    _, trajectory = unroll(step, variables, carry, keys, keys, length=length)
    t, out = trajectory.timestep, trajectory.output
    value, log_prob = np.zeros((length + 1, 8)), np.zeros((length + 1, 8))
    with torch.no_grad():
        batch = agent.prepare(trajectory, keys)
        for b in range(8):
            state = trajectory.actor_state[b : b + 1]
            for i in range(length + 1):
                if t.step_type[i, b] == FIRST:
                    state = agent.initial_state(1)
                policy, v, state = agent._step(t.observation[i, b : b + 1], torch.tensor([False]), state)
                value[i, b] = v.item()
                if i < length:
                    (log_prob[i, b],), _ = reference_categorical(policy.numpy(), out.action[i, b : b + 1].numpy())
    target, advantage = slow_vtrace(
        np.exp(log_prob[:-1] - out.extras["action_log_prob"].numpy()),
        t.reward[1:].double().numpy(),
        0.9 * t.discount[1:].double().numpy(),
        (t.step_type[1:] == LAST).numpy(),
        value[:-1],
        value[1:],
        **settings,
    )
    np.testing.assert_allclose(batch.steps["value_target"].numpy(), target, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(batch.steps["advantage"].numpy(), advantage, rtol=1e-4, atol=1e-4)
    assert (t.step_type[1:-1] == FIRST).any() and carry.actor_state.any()


def test_a_rho_clip_below_the_c_clip_is_refused(seed):
    with pytest.raises(ValueError, match="rho_clip=0.5 must be at least c_clip=1; raise it"):
        make(IMPALA, DISCRETE, seed, rho_clip=0.5)


@pytest.mark.parametrize("cls", [PPO, A2C, IMPALA])
@pytest.mark.parametrize("spec", [DISCRETE, PAIR, CONTINUOUS], ids=lambda s: s.name)
def test_the_learner_follows_the_gradient_of_the_loss(seed, cls, spec):
    agent = make(cls, spec, seed, **({} if cls is IMPALA else {"normalize_advantage": False}))
    env = Fixed(spec)
    keys = random.split(random.key(seed), 8)
    params, buffers = variables_of(agent)
    _, trajectory = unroll(make_step(agent, env), params | buffers, start(agent, env, keys), keys, keys, length=6)
    config = LearnerConfig(num_epochs=1, num_minibatches=1, max_grad_norm=1e9)
    learner = Learner(agent, config, num_iterations=1)
    state, metrics = learner.update(learner.init(params, buffers), trajectory, keys)
    batch = bind(agent, params | buffers).prepare(trajectory, keys)
    steps = pytree.tree_map(lambda x: x.flatten(0, 1), batch.steps)
    steps["weight"] = steps["weight"] / steps["weight"].sum()
    loss = agent.loss(Batch(steps), keys[0], None).loss
    names, leaves = zip(*agent.named_parameters(), strict=True)
    for name, gradient in zip(names, torch.autograd.grad(loss, leaves), strict=True):
        torch.testing.assert_close(learner.groups.by_parameter(state.mu)[name] / 0.1, gradient, rtol=1e-4, atol=1e-6)
        assert (gradient != 0).any()
    torch.testing.assert_close(metrics["loss"], loss.detach(), rtol=1e-5, atol=1e-6)


class Fixed(TensorEnv):
    """Observations at random, rewards that depend on the action, episodes of four steps."""

    def __init__(self, spec):
        self.spec = EnvSpec(spec.name, spec.observation, spec.action, max_episode_steps=4)

    def reset(self, keys):
        return random.normal(keys, 5)

    def transition(self, state, action, keys):
        reward = state[:, 0] + action.reshape(action.shape[0], -1).float().sum(-1)
        return random.normal(keys, 6)[:, 1:], reward, state[:, 1] > 1

    def observe(self, state):
        return state


@pytest.mark.parametrize("spec", [DISCRETE, PAIR, CONTINUOUS, UNBOUNDED], ids=lambda s: s.name)
@pytest.mark.parametrize(("recurrent", "cell"), [(0, "gru"), (4, "gru"), (4, "lstm")])
def test_act_and_loss_compute_the_same_log_probs_and_values(seed, spec, recurrent, cell):
    """So that the first ratio of every trajectory is 1; with a memory also over resets in the middle of it."""
    agent = make(PPO, spec, seed, recurrent=recurrent, cell=cell)
    env, size, length = Fixed(spec), 12, 15
    env_keys, actor_keys = (random.split(random.key(seed + i), size) for i in range(2))
    params, buffers = variables_of(agent)
    step, variables = make_step(agent, env), params | buffers
    carry, _ = unroll(step, variables, start(agent, env, env_keys), env_keys, actor_keys, length=7)
    after, trajectory = unroll(step, variables, carry, env_keys, actor_keys, length=length)
    first = trajectory.timestep.step_type[:-1] == FIRST
    assert first[1:].any() and not first.all()
    batch = agent.prepare(trajectory, env_keys)
    with torch.no_grad():
        policy, value = agent._sequence(batch.steps["observation"], batch.steps["first"], batch.actor_state)
        log_prob, _ = agent.head.log_prob(policy, batch.steps["action"])
    torch.testing.assert_close(value, trajectory.output.extras["state_value"], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(log_prob, trajectory.output.extras["action_log_prob"], rtol=1e-4, atol=1e-5)
    if recurrent:
        assert torch.equal(trajectory.actor_state, carry.actor_state) and carry.actor_state.any()
        assert torch.equal(trajectory.last_actor_state, after.actor_state)
        # and the memory matters: without it the values are others
        zeros = torch.zeros_like(batch.actor_state)
        with torch.no_grad():
            _, forgotten = agent._sequence(batch.steps["observation"], batch.steps["first"], zeros)
        assert not torch.allclose(forgotten[0][~first[0]], value[0][~first[0]])


def test_a_gru_forgets_at_first_and_only_there(seed):
    agent = make(PPO, DISCRETE, seed, recurrent=4)
    generator = torch.Generator().manual_seed(seed)
    observation, memory = torch.randn(3, 5, generator=generator), torch.randn(3, 4, generator=generator)
    step_type = torch.tensor([FIRST, MID, LAST], dtype=torch.int32)
    zero = torch.zeros(3)
    timestep = TimeStep(step_type, zero, zero, observation, {})
    keys = random.split(random.key(seed), 3)
    out, state = agent.act(timestep, memory, keys)
    fresh, fresh_state = agent.act(timestep, torch.zeros(3, 4), keys)
    same = (state == fresh_state).all(-1)
    assert same.tolist() == [True, False, False]
    assert (out.extras["state_value"] == fresh.extras["state_value"]).tolist() == [True, False, False]
    assert agent.initial_state(7).shape == (7, 4) and not agent.initial_state(7).any()


def test_the_recurrent_bootstrap_value_comes_from_the_last_state(seed):
    agent = make(PPO, DISCRETE, seed, recurrent=4, discount=0.9, gae_lambda=0.0)
    env, keys = Fixed(DISCRETE), random.split(random.key(seed), 8)
    params, buffers = variables_of(agent)
    step = make_step(agent, env)
    carry, trajectory = unroll(step, params | buffers, start(agent, env, keys), keys, keys, length=6)
    with torch.no_grad():
        batch = agent.prepare(trajectory, keys)
    after, _ = agent.act(carry.timestep, carry.actor_state, keys)
    t = trajectory.timestep
    expected = t.reward[-1] + 0.9 * t.discount[-1] * after.extras["state_value"]
    valid = batch.steps["weight"][-1] > 0
    torch.testing.assert_close(batch.steps["value_target"][-1][valid], expected.detach()[valid], rtol=1e-5, atol=1e-5)


def test_images_go_through_a_cnn_and_train_it(seed):
    env, size = Catch(6, 5), 4
    torch.manual_seed(seed)
    agent = PPO(env.spec, PPOConfig(hidden=(8,), channels=(3, 4)))
    keys = random.split(random.key(seed), size)
    params, buffers = variables_of(agent)
    carry = start(agent, env, keys)
    x = carry.timestep.observation
    y = x.movedim(-1, 1)
    for i in (0, 2):
        y = F.relu(
            F.conv2d(y, params[f"encoder.net.convs.{i}.weight"], params[f"encoder.net.convs.{i}.bias"], padding=1)
        )
    y = F.relu(F.linear(y.flatten(1), params["encoder.net.dense.0.weight"], params["encoder.net.dense.0.bias"]))
    torch.testing.assert_close(agent.encoder(x), y)
    assert agent.encoder(x.expand(2, 3, *x.shape)).shape == (2, 3, size, 8)  # any leading axes
    _, trajectory = unroll(make_step(agent, env), params | buffers, carry, keys, keys, length=8)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=2), num_iterations=1)
    state, metrics = learner.update(learner.init(params, buffers), trajectory, keys)
    assert metrics["loss"].isfinite()
    moved = {k for k, v in state.params.items() if not torch.equal(v, params[k])}
    assert {"encoder.net.convs.0.weight", "value_encoder.net.convs.2.weight", "policy.weight"} <= moved


class Masked(Fixed):
    """Four actions; which are allowed depends on the state, always at least one, never the last at even ones."""

    def __init__(self):
        observation = {"x": Array((5,)), "action_mask": Array((4,), torch.bool)}
        self.spec = EnvSpec("masked", observation, Discrete(4), max_episode_steps=4)

    def observe(self, state):
        allowed = state[:, :4] > 0.3
        return {"x": state, "action_mask": allowed | (allowed.sum(-1) == 0)[:, None] & (torch.arange(4) == 1)}


def test_masked_actions_are_never_taken_and_leave_gradients_finite(seed):
    env, size = Masked(), 16
    torch.manual_seed(seed)
    agent = PPO(env.spec, PPOConfig(hidden=(6,)))
    keys = random.split(random.key(seed), size)
    params, buffers = variables_of(agent)
    carry = start(agent, env, keys)
    for explore in (True, False):
        step = make_step(agent, env, explore)
        _, trajectory = unroll(step, params | buffers, carry, keys, keys, length=20)
        mask = trajectory.timestep.observation["action_mask"][:-1]
        action = trajectory.output.action
        assert mask.gather(-1, action[..., None]).all() and not mask.all()
        only = mask.sum(-1) == 1
        assert only.any() and (trajectory.output.extras["action_log_prob"][only] == 0).all()
    learner = Learner(agent, LearnerConfig(num_epochs=2, num_minibatches=2), num_iterations=1)
    state, metrics = learner.update(learner.init(params, buffers), trajectory, keys)
    assert state.healthy and all(v.isfinite().all() for v in state.params.values())
    assert 0 < metrics["entropy"] < math.log(4)
    assert agent.encoder.net[0].in_features == 5  # the mask is no input


def test_greedy_actions_are_the_mode(seed):
    for spec in (DISCRETE, CONTINUOUS):
        agent = make(PPO, spec, seed)
        x = np.random.default_rng(seed).normal(size=(9, 5))
        zero = torch.zeros(9)
        timestep = TimeStep(torch.ones(9, dtype=torch.int32), zero, zero, torch.tensor(x).float(), {})
        out, _ = agent.act(timestep, (), random.split(random.key(seed), 9), explore=False)
        policy, value = reference_network(agent, x)
        wanted = policy.argmax(1) if spec is DISCRETE else 1.0 + 4.0 * policy
        np.testing.assert_allclose(out.action.detach(), wanted, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(out.extras["state_value"].detach(), value, rtol=1e-4, atol=1e-5)


def test_continuous_actions_have_the_mean_and_spread_of_the_policy(seed):
    agent = make(PPO, CONTINUOUS, seed, initial_log_std=-0.5)
    n = 20_000
    x = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).expand(n, 5)
    zero = torch.zeros(n)
    timestep = TimeStep(torch.ones(n, dtype=torch.int32), zero, zero, x, {})
    with torch.no_grad():
        out, _ = agent.act(timestep, (), random.split(random.key(seed), n))
    policy, _ = reference_network(agent, x[:1].double().numpy())
    std = 4.0 * agent.head.log_std.detach().exp().numpy()
    action = out.action.double().numpy()
    assert (abs(action.mean(0) - (1 + 4 * policy[0])) < 6 * std / n**0.5).all()
    np.testing.assert_allclose(action.std(0), std, rtol=6 / (2 * n) ** 0.5)


def test_hyperparameters_are_tensors_of_the_learner_state(seed):
    agent = make(PPO, DISCRETE, seed, clip=0.3)
    params, buffers = variables_of(agent)
    b = to_batch(minibatch(agent, seed))
    losses = [
        bind(agent, params | buffers | {"clip": torch.tensor(c)}).loss(b, torch.zeros(3)).loss for c in (0.3, 0.1)
    ]
    assert losses[0] == agent.loss(b, torch.zeros(3), None).loss and losses[0] != losses[1]
    assert {"discount", "gae_lambda", "clip", "entropy_coefficient"} <= set(buffers)


def test_actions_that_ppo_cannot_take_are_refused():
    both = {"a": Discrete(2), "b": Discrete(3)}
    with pytest.raises(ValueError, match="PPO needs one Discrete, MultiDiscrete or Box action"):
        PPO(EnvSpec("pair", Array((1,)), both))
    with pytest.raises(ValueError, match="PPO is for one agent, and pair has groups .*; use algo=ippo, mappo or ia2c"):
        PPO(EnvSpec("pair", {"a": Array((1,)), "b": Array((1,))}, both, groups={"a": 1, "b": 1}))


FORGOTTEN = {
    "no log-prob": (
        lambda extras: {"state_value": extras["state_value"]},
        "Own needs extras['action_log_prob'] of shape [T, B], here [6, 4], and act returned only ['state_value']; let "
        "act put `dist.log_prob(action)` there, [B], one number per row.",
    ),
    "a log-prob with an axis": (
        lambda extras: extras | {"action_log_prob": extras["action_log_prob"][:, None]},
        "Own needs extras['action_log_prob'] of shape [T, B], here [6, 4], and it has shape [6, 4, 1]; let act put",
    ),
    "no value": (
        lambda extras: {"action_log_prob": extras["action_log_prob"]},
        "Own needs extras['state_value'] of shape [T, B], here [6, 4], and act returned only ['action_log_prob']; let "
        "act put what the critic says of the observation there",
    ),
}


@pytest.mark.parametrize("what", FORGOTTEN)
@pytest.mark.parametrize("cls", CONFIGS)
def test_what_an_act_of_ones_own_forgets_is_named(cls, what):
    said, told = FORGOTTEN[what]

    class Own(cls):
        def act(self, *args, **kwargs):
            output, state = super().act(*args, **kwargs)
            return output._replace(extras=said(output.extras)), state

    agent, env = Own(DISCRETE, CONFIGS[cls](hidden=(6,))), Fixed(DISCRETE)
    # V-trace takes the values of the parameters of the update, and a policy gradient no ratio.
    if (cls is IMPALA and what == "no value") or (cls is A2C and what != "no value"):
        return check_agent(agent, env, num_envs=4, unroll_length=6, quick=True)
    with pytest.raises(ValueError, match=re.escape(told)):
        check_agent(agent, env, num_envs=4, unroll_length=6, quick=True)


@pytest.mark.parametrize("recurrent", [0, 4])
@pytest.mark.parametrize("env", [Catch(rows=4, columns=3), Pendulum(max_episode_steps=5)], ids=["catch", "pendulum"])
@pytest.mark.parametrize("cls", CONFIGS)
def test_every_agent_keeps_the_contract(cls, env, recurrent):
    agent = cls(env.spec, CONFIGS[cls](hidden=(6,), channels=(3,), recurrent=recurrent))
    check_agent(agent, env, compile=False)  # compiled: tests/contracts/test_compiled.py


@pytest.mark.parametrize("cls", CONFIGS)
def test_rewards_are_scaled_then_clipped_before_they_are_learned_from(cls, seed):
    env, keys = Fixed(DISCRETE), random.split(random.key(seed), 8)
    plain, clipped = make(cls, DISCRETE, seed), make(cls, DISCRETE, seed, reward_scale=2.0, reward_clip=0.5)
    params, buffers = variables_of(plain)
    _, trajectory = unroll(make_step(plain, env), params | buffers, start(plain, env, keys), keys, keys, length=6)
    t = trajectory.timestep
    assert ((2 * t.reward).abs() > 0.5).any() and ((2 * t.reward).abs() < 0.5).any()
    by_hand = trajectory._replace(timestep=t._replace(reward=(2 * t.reward).clamp(-0.5, 0.5)))
    with torch.no_grad():
        want, got = plain.prepare(by_hand, keys), clipped.prepare(trajectory, keys)
    assert all(torch.equal(want.steps[name], got.steps[name]) for name in ("advantage", "value_target"))


@pytest.mark.parametrize("cls", CONFIGS)
def test_observations_are_normalised_whatever_their_entries_are_called(cls, seed):
    """As TorchRL's nested keys and attributes of a module are."""

    class Named(Catch):
        def __init__(self):
            super().__init__()
            observation = {name: self.spec.observation for name in ("type", "a.b", "x")}
            self.spec = dataclasses.replace(self.spec, observation=observation)

        def observe(self, state) -> Any:
            return {name: super(Named, self).observe(state) for name in self.spec.observation}

    check_agent(make(cls, Named().spec, seed, normalize_observation=True), Named())


@pytest.mark.parametrize("normalize", [False, True])
def test_a_nested_observation_is_refused_with_what_to_do(normalize, seed):
    spec = EnvSpec("nested", observation={"a": {"b": Array((2,))}}, action=Discrete(3))
    told = "observation['a'] has entries of its own, ['b'], and networks see one level of names; add '+env.transforms="
    with pytest.raises(ValueError, match=re.escape(told)):
        make(PPO, spec, seed, normalize_observation=normalize)
