"""SAC and its discrete form against their papers."""

import math

import numpy as np
import pytest
import torch
from torch.distributions import Independent, Normal, TransformedDistribution
from torch.distributions.transforms import AffineTransform, TanhTransform

from tests.algos.references import CONTINUOUS, ROWS, critic, network, perturbed, rows_of, to_batch
from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.sac import LOG_STD, SAC, DiscreteSAC, SACConfig, sac_agent
from torchpod.compile import Compiler
from torchpod.envs.bsuite.catch import Catch
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import Learner, LearnerConfig
from torchpod.specs import Array, Box, Discrete, EnvSpec
from torchpod.testing import check_agent
from torchpod.types import LAST, MID, ActorOutput, Batch, TimeStep, Trajectory

DISCRETE = EnvSpec("discrete", Array((5,)), Discrete(3))
MASKED = EnvSpec("masked", {"x": Array((5,)), "action_mask": Array((3,), torch.bool)}, Discrete(3))


def make(spec, seed, **config):
    return perturbed(lambda: sac_agent(spec, SACConfig(hidden=(6, 7), activation="tanh", **config)), seed)


def minibatch(seed, discrete):
    if discrete:
        return rows_of(seed, action=lambda rng: rng.integers(0, 3, ROWS))
    noise = {name: lambda rng: rng.normal(size=(ROWS, 2)) for name in ("noise", "next_noise")}
    return rows_of(seed, action=lambda rng: rng.uniform(-1, 1, (ROWS, 2)), **noise)


def reference_continuous(params, targets, b):
    """Row by row. Densities of actions in [-3, 5], which are 1 + 4 tanh(u): the slope is 4 / cosh(u)^2."""

    def draw(observation, noise):
        mean, log_std = np.split(network(params, "policy.0", "policy.1", observation), 2)
        std = np.exp(np.clip(log_std, *LOG_STD))
        u = mean + std * noise
        normal = np.exp(-(((u - mean) / std) ** 2) / 2) / (std * math.sqrt(2 * math.pi))
        return np.tanh(u), np.log(normal / 4 * np.cosh(u) ** 2).sum()

    def critics(variables, observation, action):
        return [critic(variables, i, observation, action) for i in range(2)]

    alpha, losses, td = math.exp(params["log_alpha"]), np.zeros(3), []
    for i in range(len(b["reward"])):
        next_action, next_log_prob = draw(b["next_observation"][i], b["next_noise"][i])
        soft = min(critics(targets, b["next_observation"][i], next_action)) - alpha * next_log_prob
        y = b["reward"][i] + b["discount"][i] * soft
        errors = [y - q for q in critics(params, b["observation"][i], b["action"][i])]
        action, log_prob = draw(b["observation"][i], b["noise"][i])
        policy = alpha * log_prob - min(critics(params, b["observation"][i], action))
        temperature = -alpha * (log_prob + 2 * (math.log(4.0) - 1))  # in a box of half width 4
        losses += b["weight"][i] * np.array([policy, sum(e * e for e in errors) / 2, temperature])
        td.append(np.abs(errors).mean())
    return dict(zip(("policy", "value", "temperature"), losses, strict=True)), td


def reference_discrete(params, targets, b):
    def probs(observation):
        e = np.exp(network(params, "policy.0", "policy.1", observation))
        return e / e.sum()

    def critics(variables, observation):
        return [network(variables, f"critics.{i}.0", f"critics.{i}.1", observation) for i in range(2)]

    alpha, losses, td, target_entropy = math.exp(params["log_alpha"]), np.zeros(3), [], 0.98 * math.log(3)
    for i in range(len(b["reward"])):
        p, now = probs(b["next_observation"][i]), probs(b["observation"][i])
        soft = p @ (np.minimum(*critics(targets, b["next_observation"][i])) - alpha * np.log(p))
        own = critics(params, b["observation"][i])
        errors = [b["reward"][i] + b["discount"][i] * soft - q[b["action"][i]] for q in own]
        policy = now @ (alpha * np.log(now) - np.minimum(*own))
        temperature = now @ (-alpha * (np.log(now) + target_entropy))
        losses += b["weight"][i] * np.array([policy, sum(e * e for e in errors) / 2, temperature])
        td.append(np.abs(errors).mean())
    return dict(zip(("policy", "value", "temperature"), losses, strict=True)), td


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=lambda s: s.name)
def test_losses_equal_the_papers(seed, spec):
    agent, params, buffers, targets = make(spec, seed)
    b = minibatch(seed, spec is DISCRETE)
    out = bind(agent, params | buffers).loss(to_batch(b), torch.zeros(3), bind(agent, targets | buffers))
    want, td = (reference_discrete if spec is DISCRETE else reference_continuous)(params, targets, b)
    for name, value in want.items():
        assert out.loss[name].item() == pytest.approx(value, rel=1e-4, abs=1e-5), name
    np.testing.assert_allclose(out.priority, td, rtol=1e-4, atol=1e-5)
    assert out.metrics["td_error"].item() == pytest.approx(np.dot(b["weight"], td), rel=1e-4)
    assert out.metrics["alpha"].item() == pytest.approx(math.exp(params["log_alpha"]), rel=1e-4)


def test_log_prob_is_that_of_torch_and_finite_where_tanh_is_1(seed):
    agent, *_ = make(CONTINUOUS, seed)
    generator = torch.Generator().manual_seed(seed)
    observation, noise = (torch.randn(50, n, generator=generator) for n in (5, 2))
    with torch.no_grad():
        agent.policy[1].weight.mul_(0.5)  # or what torch inverts would round to 1
        mean, log_std = agent.normal(observation)
        action, log_prob = agent.sample(observation, noise)
        normal = Normal(mean.double(), log_std.exp().double())
        squashed = TransformedDistribution(normal, [TanhTransform(), AffineTransform(1.0, 4.0)])
        raw = mean.double() + log_std.exp().double() * noise
        want = Independent(squashed, 1).log_prob(1.0 + 4.0 * raw.tanh())
        torch.testing.assert_close(log_prob.double(), want, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(action, raw.tanh().float())
        agent.policy[1].bias.add_(torch.tensor([30.0, -30.0, 0.0, 0.0]))
        action, log_prob = agent.sample(observation, noise)
    assert (action.abs() == 1).all() and log_prob.isfinite().all() and (log_prob > 40).all()


def gradients(agent, params, buffers, targets, batch, group):
    """Of one loss, with respect to all parameters, as plain autograd takes it."""
    leaves = {k: v.clone().requires_grad_() for k, v in params.items()}
    loss = bind(agent, leaves | buffers).loss(batch, torch.zeros(3), bind(agent, targets | buffers)).loss[group]
    found = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    return dict(zip(leaves, found, strict=True))


@pytest.mark.parametrize("spec", [CONTINUOUS, DISCRETE], ids=lambda s: s.name)
def test_every_group_follows_its_own_loss_alone(seed, spec):
    """What a loss says to parameters of another group is left out, though it says much."""
    agent, params, buffers, targets = make(spec, seed)
    batch = to_batch(minibatch(seed, spec is DISCRETE))
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1, max_grad_norm=1e9), num_iterations=1)
    state = learner.init(params, buffers)._replace(targets=targets)
    one = Batch({k: v[None] for k, v in batch.steps.items()})
    after, _, (priority,) = learner.learn(state, one, learner.dealer.moments_of(one.steps), random.key(seed))
    mu = learner.groups.by_parameter(after.mu)
    assert priority.shape == (ROWS,)
    for group, names in learner.groups.names.items():
        want = gradients(agent, params, buffers, targets, batch, group)
        for name in names:
            torch.testing.assert_close(mu[name] / 0.1, want[name], rtol=1e-3, atol=1e-5)
            assert (want[name] != 0).any()
        others = [g for name, g in want.items() if name not in names and g is not None]
        assert any((g != 0).any() for g in others)


def test_compiled_gradients_equal_eager_ones(seed):
    agent, params, buffers, targets = make(CONTINUOUS, seed)
    learner = Learner(agent, LearnerConfig(), num_iterations=1, compiler=Compiler(True))
    zero = torch.zeros((), dtype=torch.int64)
    args = params, buffers, targets, to_batch(minibatch(seed, False)), random.key(seed), zero, ()
    torch.testing.assert_close(learner._gradient(*args), learner._gradient_one(*args), rtol=1e-4, atol=1e-5)


def test_targets_follow_slowly(seed):
    agent, params, buffers, targets = make(CONTINUOUS, seed, target_rate=0.25)
    learner = Learner(agent, LearnerConfig(num_epochs=1, num_minibatches=1), num_iterations=1)
    one = Batch({k: v[None] for k, v in to_batch(minibatch(seed, False)).steps.items()})
    state = learner.init(params, buffers)._replace(targets=targets)
    after, *_ = learner.learn(state, one, learner.dealer.moments_of(one.steps), random.key(seed))
    for name, old in targets.items():
        torch.testing.assert_close(after.targets[name], 0.75 * old + 0.25 * after.params[name])
        assert not torch.equal(after.targets[name], old)


def window(seed, action, size=6):
    """Windows of one step, the last two of which begin at the end of an episode, and the third ends in one."""
    generator = torch.Generator().manual_seed(seed)
    step_type = torch.full((2, size), MID, dtype=torch.int32)
    step_type[0, -2:] = step_type[1, 2] = LAST
    discount = torch.ones(2, size)
    discount[1, 2] = 0.0
    observation = torch.randn(2, size, 5, generator=generator)
    timestep = TimeStep(step_type, torch.randn(2, size, generator=generator), discount, observation, {})
    return Trajectory(timestep, ActorOutput(action[None], {}), (), ())


def test_rows_are_transitions_with_actions_in_the_unit_box(seed):
    agent, *_ = make(CONTINUOUS, seed, discount=0.9, reward_scale=0.5)
    action = torch.rand(6, 2, generator=torch.Generator().manual_seed(seed)) * 8 - 3
    trajectory, keys = window(seed, action), random.split(random.key(seed), 6)
    row = {k: v[0] for k, v in agent.prepare(trajectory, keys).steps.items()}
    t = trajectory.timestep
    torch.testing.assert_close(row["action"], (action - 1) / 4)
    torch.testing.assert_close(row["reward"], 0.5 * t.reward[1])
    torch.testing.assert_close(row["discount"], 0.9 * t.discount[1])
    assert torch.equal(row["observation"], t.observation[0]) and torch.equal(row["next_observation"], t.observation[1])
    assert row["weight"].tolist() == [1, 1, 1, 1, 0, 0]
    noise = torch.cat([row["noise"], row["next_noise"]]).flatten()
    assert len(set(noise.tolist())) == 24  # every row has its own, on both sides


def test_actions_lie_in_the_box_and_the_greedy_one_is_the_middle(seed):
    agent, params, _, _ = make(CONTINUOUS, seed)
    x = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).expand(10_000, 5)
    zero, keys = torch.zeros(10_000), random.split(random.key(seed), 10_000)
    timestep = TimeStep(torch.ones(10_000, dtype=torch.int32), zero, zero, x, {})
    with torch.no_grad():
        action, greedy = (agent.act(timestep, (), keys, explore)[0].action for explore in (True, False))
    assert (action >= -3).all() and (action <= 5).all()
    mean = network(params, "policy.0", "policy.1", x[0].double().numpy())[:2]
    np.testing.assert_allclose(greedy[0], 1 + 4 * np.tanh(mean), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(greedy, greedy[:1].expand_as(greedy), rtol=0, atol=1e-5)  # rows may differ by rounding
    below = (action < greedy[0]).double().mean(0)  # tanh keeps the median
    assert ((below - 0.5).abs() < 6 * 0.5 / 100).all()


def test_a_mask_forbids_actions_and_leaves_gradients_finite(seed):
    agent, params, buffers, targets = make(MASKED, seed)
    b = minibatch(seed, True)
    generator = torch.Generator().manual_seed(seed)
    allowed = [torch.rand(ROWS, 3, generator=generator) > 0.5 for _ in range(2)]
    allowed = [mask | (torch.arange(3) == 1) for mask in allowed]
    batch = to_batch(b)
    for name, mask in zip(("observation", "next_observation"), allowed, strict=True):
        batch.steps[name] = {"x": batch.steps[name], "action_mask": mask}
    for group in ("policy", "value", "temperature"):
        found = gradients(agent, params, buffers, targets, batch, group)
        assert all(g.isfinite().all() for g in found.values() if g is not None)
    zero, keys = torch.zeros(ROWS), random.split(random.key(seed), ROWS)
    timestep = TimeStep(torch.ones(ROWS, dtype=torch.int32), zero, zero, batch.steps["observation"], {})
    for explore in (True, False):
        action = agent.act(timestep, (), keys, explore)[0].action
        assert allowed[0].gather(-1, action[:, None]).all() and action.unique().numel() > 1


def test_under_a_mask_the_temperature_aims_at_an_entropy_that_can_be_reached(seed):
    """0.98 of the largest, of what is allowed; of a target of one's own the same share."""
    mask = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    observation = {"x": torch.zeros(3, 5), "action_mask": mask}
    target = sac_agent(MASKED).target_of(observation)
    torch.testing.assert_close(target, 0.98 * torch.tensor([3.0, 2.0, 1.0]).log())
    own = sac_agent(MASKED, SACConfig(target_entropy=0.3)).target_of(observation)
    torch.testing.assert_close(own, 0.3 * torch.tensor([3.0, 2.0, 1.0]).log() / math.log(3.0))
    agent, params, buffers, targets = make(MASKED, seed)
    batch = to_batch(minibatch(seed, True))
    one = torch.arange(3) == 1
    for name in ("observation", "next_observation"):
        batch.steps[name] = {"x": batch.steps[name], "action_mask": one.expand(ROWS, 3)}
    assert gradients(agent, params, buffers, targets, batch, "temperature")["log_alpha"].abs() < 1e-6


def test_the_actions_choose_the_agent_and_wrong_ones_are_refused():
    assert type(sac_agent(CONTINUOUS)) is SAC and type(sac_agent(DISCRETE)) is DiscreteSAC
    with pytest.raises(ValueError, match="SAC needs a Box action with bounds, and free has"):
        SAC(EnvSpec("free", Array((1,)), Box((2,))))
    with pytest.raises(ValueError, match="DiscreteSAC needs a Discrete action, and continuous has .*; use algo=sac, "):
        DiscreteSAC(CONTINUOUS)
    with pytest.raises(ValueError, match="initial_alpha=0.0 be above 0"):
        SAC(CONTINUOUS, SACConfig(initial_alpha=0.0))


def test_the_temperature_is_the_same_whatever_the_units_of_actions(seed):
    """An entropy of -A in [-1, 1], which a box of half width 0.1 cannot reach in its own units."""
    temperatures, generator = [], torch.Generator().manual_seed(seed)
    columns = torch.randn(120, 32, 2, generator=generator)
    for half in (0.1, 1.0, 10.0):
        torch.manual_seed(seed)
        agent = SAC(EnvSpec("box", Array((2,)), Box((2,), -half, half)), SACConfig(hidden=(16,)))
        rates = {"policy": 3e-3, "value": 3e-3, "temperature": 3e-2}
        learner = Learner(
            agent, LearnerConfig(1, 1, learning_rate=rates, anneal_learning_rate=False), num_iterations=120
        )
        params, buffers = variables_of(agent)
        state = learner.init(params, buffers)
        for i, x in enumerate(columns):
            rows = {name: x for name in ("observation", "next_observation", "noise", "next_noise")}
            rows |= {"action": x.tanh(), "reward": -x.tanh().square().sum(-1)}
            rows |= {"discount": torch.zeros(32), "weight": torch.ones(32)}
            batch = Batch({name: column[None] for name, column in rows.items()})
            state, _, _ = learner.learn(state, batch, learner.dealer.moments_of(batch.steps), random.key(i))
        temperatures.append(state.params["log_alpha"].exp())
    torch.testing.assert_close(torch.stack(temperatures), temperatures[1].expand(3), rtol=1e-3, atol=0)
    assert temperatures[1] < 1


def test_the_target_entropy_is_that_of_the_papers_or_given():
    assert sac_agent(EnvSpec("unit", Array((5,)), Box((2,), -1.0, 1.0))).target_entropy == -2
    wide = 2 * (math.log(4.0) - 1)  # the same policy in a box of half width 4
    assert sac_agent(CONTINUOUS).target_entropy.item() == pytest.approx(wide)
    assert sac_agent(DISCRETE).target_entropy.item() == pytest.approx(0.98 * math.log(3))
    assert sac_agent(CONTINUOUS, SACConfig(target_entropy=0.5)).target_entropy == 0.5


IMAGE = EnvSpec("image", Array((6, 5, 2), torch.uint8), Box((1, 2), -1.0, 1.0))


def test_images_and_dicts_are_observed(seed):
    generator = torch.Generator().manual_seed(seed)
    image = torch.randint(0, 256, (4, 6, 5, 2), generator=generator, dtype=torch.uint8)
    both = EnvSpec("both", {"action": Array((3,)), "x": Array((2,))}, Box((2,), -1.0, 1.0))
    for spec, x in ((IMAGE, image), (both, {"action": torch.rand(4, 3), "x": torch.rand(4, 2)})):
        agent = SAC(spec, SACConfig(hidden=(32,), channels=(3,)))
        zero, keys = torch.zeros(4), random.split(random.key(seed), 4)
        out, _ = agent.act(TimeStep(torch.ones(4, dtype=torch.int32), zero, zero, x, {}), (), keys)
        assert out.action.shape == (4, *spec.action.shape)
        low, high = (agent.values(x, torch.full((4, 2), a)) for a in (-1.0, 1.0))
        assert low.shape == (2, 4) and (low != high).any()


@pytest.mark.parametrize("env", [Catch(rows=4, columns=3), Pendulum(max_episode_steps=5)], ids=["catch", "pendulum"])
def test_sac_keeps_the_contract(env):
    check_agent(sac_agent(env.spec, SACConfig(hidden=(6,), channels=(3,))), env, compile=False)
