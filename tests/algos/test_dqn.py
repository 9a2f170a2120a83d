"""DQN, C51 and QR-DQN against their papers, in float64 NumPy."""

import math

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.dqn import C51, DQN, QRDQN, C51Config, DQNConfig, QRDQNConfig
from torchpod.algos.r2d2 import R2D2, R2D2Config
from torchpod.env import TensorEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.rollout import make_step, start, unroll
from torchpod.specs import Array, Box, Discrete, EnvSpec
from torchpod.types import FIRST, LAST, MID, ActorOutput, Batch, TimeStep, Trajectory

A, ROWS = 4, 60
SPEC = EnvSpec("plain", Array((5,)), Discrete(A))
MASKED = EnvSpec("masked", {"x": Array((5,)), "action_mask": Array((A,), torch.bool)}, Discrete(A))
CONFIGS = {DQN: DQNConfig, C51: C51Config, QRDQN: QRDQNConfig}


def make(cls, seed, spec=SPEC, **config):
    """An agent whose heads are not almost zero, as they are at the start."""
    torch.manual_seed(seed)
    agent = cls(spec, CONFIGS[cls](hidden=(6, 7), **config))
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return agent


def network(agent, x):
    """What it says of every action `[R, A, outputs]`: two ReLU layers, and eq. 9 of Wang et al. if it is dueling."""
    p = {k: v.detach().numpy().astype(np.float64) for k, v in agent.state_dict().items()}
    h = np.asarray(x, np.float64)
    for i in (0, 2):
        h = np.maximum(h @ p[f"encoder.net.{i}.weight"].T + p[f"encoder.net.{i}.bias"], 0)
    advantage = (h @ p["advantage.weight"].T + p["advantage.bias"]).reshape(len(h), A, -1)
    if not agent.config.dueling:
        return advantage
    value = h @ p["value.weight"].T + p["value.bias"]
    out = np.empty_like(advantage)
    for row in range(len(h)):
        for o in range(advantage.shape[2]):
            out[row, :, o] = value[row, o] + advantage[row, :, o] - sum(advantage[row, :, o]) / A
    return out


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def values(agent, outputs):
    """Action values: the output, the mean of the atoms, the mean of the quantiles."""
    if isinstance(agent, C51):
        return softmax(outputs) @ np.linspace(agent.config.low, agent.config.high, agent.config.num_atoms)
    return outputs.mean(-1)


def minibatch(seed, masked=False):
    rng = np.random.default_rng(seed)
    weight = (rng.random(ROWS) > 0.2) * rng.random(ROWS)
    mask = rng.random((ROWS, A)) > 0.5
    mask[np.arange(ROWS), rng.integers(0, A, ROWS)] = True
    rows = {
        "observation": rng.normal(size=(ROWS, 5)),
        "next_observation": rng.normal(size=(ROWS, 5)),
        "action": rng.integers(0, A, ROWS),
        "reward": rng.normal(size=ROWS) * 2,
        "discount": 0.9 * (rng.random(ROWS) > 0.3),
        "weight": weight / weight.sum(),
    }
    tensors = {k: torch.tensor(v).float() if v.dtype == np.float64 else torch.tensor(v) for k, v in rows.items()}
    if masked:
        for name in ("observation", "next_observation"):
            tensors[name] = {"x": tensors[name], "action_mask": torch.from_numpy(mask)}
    return rows, mask if masked else np.ones_like(mask), Batch(tensors)


def target_outputs(agent, targets, rows, mask):
    """Outputs of the target network for the best allowed action in the following state."""
    online, target = network(agent, rows["next_observation"]), network(targets, rows["next_observation"])
    chooser = values(agent, online) if agent.config.double else values(targets, target)
    best = [max((a for a in range(A) if mask[i, a]), key=lambda a, i=i: chooser[i, a]) for i in range(ROWS)]
    return target[np.arange(ROWS), best]


def huber(x, delta=1.0):
    return 0.5 * x * x if abs(x) <= delta else delta * (abs(x) - 0.5 * delta)


def errors(agent, outputs, target, rows):
    """Error and priority, row by row, as in the papers."""
    found = []
    for own, other, r, g in zip(outputs, target, rows["reward"], rows["discount"], strict=True):
        if isinstance(agent, C51):
            found.append(categorical_error(agent.config, own, other, r, g))
        elif isinstance(agent, QRDQN):
            found.append(quantile_error(own, other, r, g))
        else:
            td = r + g * other[0] - own[0]
            found.append((huber(td, agent.config.huber_delta), abs(td)))
    return np.array(found).T


def categorical_error(c, own, other, r, g):
    """Algorithm 1 of Bellemare et al. 2017, word by word."""
    low, high, n = c.low, c.high, c.num_atoms
    step = (high - low) / (n - 1)
    m, p = np.zeros(n), softmax(other)
    for j in range(n):
        moved = min(max(r + g * (low + j * step), low), high)
        b = (moved - low) / step
        lower, upper = math.floor(b + 1e-12), math.ceil(b - 1e-12)
        if lower == upper:  # which the paper forgets
            m[lower] += p[j]
        else:
            m[lower] += p[j] * (upper - b)
            m[upper] += p[j] * (b - lower)
    assert sum(m) == pytest.approx(1)
    cross = -(m * np.log(softmax(own))).sum()
    return cross, cross


def quantile_error(own, other, r, g):
    """Eq. 10 of Dabney et al. 2018: sum over i of the mean over j of rho_i(T theta_j - theta_i), kappa = 1."""
    n, total = len(own), 0.0
    for i in range(n):
        tau = (2 * (i + 1) - 1) / (2 * n)
        for j in range(n):
            u = r + g * other[j] - own[i]
            total += abs(tau - (u < 0)) * huber(u) / n
    return total, total


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("dueling", [False, True])
@pytest.mark.parametrize(
    ("cls", "small"),
    [
        (DQN, {}),
        (DQN, {"huber_delta": 1.0}),
        (C51, {"num_atoms": 7, "low": -3.0, "high": 2.5}),
        (QRDQN, {"num_quantiles": 5}),
    ],
)
def test_the_loss_is_that_of_the_paper(seed, cls, small, dueling, double, masked):
    settings = {"dueling": dueling, "double": double, "spec": MASKED if masked else SPEC, **small}
    agent, targets = make(cls, seed, **settings), make(cls, seed + 1, **settings)
    rows, mask, batch = minibatch(seed, masked)
    outputs = network(agent, rows["observation"])
    taken = outputs[np.arange(ROWS), rows["action"]]
    error, priority = errors(agent, taken, target_outputs(agent, targets, rows, mask), rows)
    params, buffers = variables_of(targets)
    out = agent.loss(batch, torch.zeros(3), bind(agent, params | buffers))
    assert isinstance(out.loss, torch.Tensor) and out.priority is not None
    assert out.loss.item() == pytest.approx((error * rows["weight"]).sum(), rel=1e-4, abs=1e-5)
    np.testing.assert_allclose(out.priority.detach(), priority, rtol=2e-4, atol=1e-4)
    value = values(agent, outputs)[np.arange(ROWS), rows["action"]]
    assert out.metrics["value"].item() == pytest.approx((value * rows["weight"]).sum(), rel=1e-4, abs=1e-5)
    assert out.metrics["td_error"].item() == pytest.approx((priority * rows["weight"]).sum(), rel=1e-4, abs=1e-5)
    if "huber_delta" in small:
        assert (priority > 1).any() and (priority < 1).any()  # both sides of the Huber loss


@pytest.mark.parametrize("cls", CONFIGS)
def test_no_gradient_flows_through_the_target(seed, cls):
    """Also where the agent is its own target: the gradient is that of the error with the target held fixed."""
    agent = make(cls, seed)
    _, _, batch = minibatch(seed)
    names, leaves = zip(*agent.named_parameters(), strict=True)
    loss = agent.loss(batch, torch.zeros(3), bind(agent, dict(agent.named_parameters()))).loss
    assert isinstance(loss, torch.Tensor)
    params, buffers = variables_of(agent)
    fixed = agent.loss(batch, torch.zeros(3), bind(agent, params | buffers)).loss
    assert isinstance(fixed, torch.Tensor)
    for name, a, b in zip(names, torch.autograd.grad(loss, leaves), torch.autograd.grad(fixed, leaves), strict=True):
        assert torch.equal(a, b) and a.any(), name


def test_double_and_plain_targets_differ(seed):
    """So that the reference tells them apart."""
    rows, mask, _ = minibatch(seed)
    found = []
    for double in (True, False):
        agent, targets = make(DQN, seed, double=double), make(DQN, seed + 1, double=double)
        found.append(target_outputs(agent, targets, rows, mask)[:, 0])
    plain, double = found[1], found[0]
    assert (double <= plain + 1e-12).all() and (double < plain).any()


def test_of_dueling_outputs_only_the_advantages_mean_is_taken_off(seed):
    agent = make(DQN, seed, dueling=True)
    x = torch.randn(9, 5, generator=torch.Generator().manual_seed(seed))
    np.testing.assert_allclose(agent.outputs_of(x).detach(), network(agent, x), rtol=1e-4, atol=1e-5)
    value = agent.value(agent.encoder(x))
    torch.testing.assert_close(agent.outputs_of(x).mean(-2), value)
    assert make(DQN, seed).value is None


@pytest.mark.parametrize(
    ("reward", "discount"), [(0.0, 1.0), (0.5, 0.0), (-20.0, 1.0), (20.0, 0.9), (1.0, 1.0), (0.3, 0.8)]
)
def test_a_distribution_that_is_moved_and_projected_stays_one(seed, reward, discount):
    """At atoms exactly, between them, and beyond the ends."""
    agent = make(C51, seed, num_atoms=5, low=-2.0, high=2.0)  # atoms -2, -1, 0, 1, 2
    rng = np.random.default_rng(seed)
    own, other = rng.normal(size=(2, 3, 5))
    want = [categorical_error(agent.config, a, b, reward, discount)[0] for a, b in zip(own, other, strict=True)]
    tensors = [torch.tensor(x).float() for x in (own, other)]
    error, _ = agent.error(*tensors, torch.full((3,), reward), torch.full((3,), discount))
    np.testing.assert_allclose(error, want, rtol=1e-4)
    if (reward, discount) == (0.0, 1.0):  # nothing moved
        np.testing.assert_allclose(error, -(softmax(other) * np.log(softmax(own))).sum(-1), rtol=1e-4)


class Telling(TensorEnv):
    """The reward names the action, and the step of the episode at which it was taken: 10 * step + action.

    Observation: the step, and how the episode ends: 1 it terminates after 3 steps, 0 it is truncated after 5.
    """

    spec = EnvSpec("telling", Array((2,)), Discrete(A), max_episode_steps=5)

    def reset(self, keys):
        kind = random.to_integer(random.bits(keys, 1), 2).float()
        return torch.cat([torch.zeros_like(kind), kind], -1)

    def transition(self, state, action, keys):
        new = state + torch.tensor([1.0, 0.0])
        return new, 10 * state[:, 0] + action, (new[:, 0] >= 3) & (state[:, 1] == 1)

    def observe(self, state):
        return state


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("cls", CONFIGS)
def test_rows_tell_what_was_earned_from_where_to_where(seed, cls, n):
    """Rewards belong to the action before; truncation bootstraps from the true last observation, termination not."""
    agent, env, size = make(cls, seed, Telling.spec, n_step=n, discount=0.9), Telling(), 6
    assert agent.replayed == n
    keys = random.split(random.key(seed), size)
    params, buffers = variables_of(agent)
    _, long = unroll(make_step(agent, env), params | buffers, start(agent, env, keys), keys, keys, length=40)
    seen = set()
    for begin in range(40 - n):
        t = TimeStep(*(x[begin : begin + n + 1] for x in long.timestep[:4]), extras={})
        output = ActorOutput(long.output.action[begin : begin + n], {})
        batch = agent.prepare(Trajectory(t, output, (), ()), keys).steps
        assert batch["reward"].shape == (1, size) and batch["observation"].shape == (1, size, 2)
        row = {k: v[0] for k, v in batch.items()}
        for b in range(size):
            step, terminates = (int(x) for x in long.timestep.observation[begin, b])
            is_reset = long.timestep.step_type[begin, b] == LAST
            assert row["weight"][b] == (0.0 if is_reset else 1.0)
            assert row["observation"][b].tolist() == [step, terminates]
            assert row["action"][b] == long.output.action[begin, b]
            if is_reset:
                continue
            length = 3 if terminates else 5
            steps = min(n, length - step)
            earned = [10 * (step + i) + long.output.action[begin + i, b].item() for i in range(steps)]
            assert row["reward"][b].item() == pytest.approx(sum(0.9**i * r for i, r in enumerate(earned)), rel=1e-5)
            over = step + steps == length and bool(terminates)
            assert row["discount"][b].item() == pytest.approx(0.0 if over else 0.9**steps)
            assert row["next_observation"][b].tolist() == [step + steps, terminates]
            seen.add((step, terminates))
    assert seen == {(s, 1) for s in range(3)} | {(s, 0) for s in range(5)}


def test_rewards_are_clipped_one_by_one(seed):
    agent = make(DQN, seed, n_step=2, discount=0.5, reward_clip=1.0)
    kind = torch.tensor([[FIRST], [MID], [MID]], dtype=torch.int32)
    reward, one = torch.tensor([[0.0], [5.0], [-3.0]]), torch.ones(3, 1)
    t = TimeStep(kind, reward, one, torch.zeros(3, 1, 5), {})
    row = agent.prepare(Trajectory(t, ActorOutput(torch.zeros(2, 1, dtype=torch.int64), {}), (), ()), torch.zeros(1, 3))
    assert row.steps["reward"].item() == 1 - 0.5


def decide(agent, size, seed, counter=1, explore=True, remaining=0.0, mask=None):
    """Actions of as many environments in one and the same state, late in the run unless told."""
    x = torch.randn(1, 5, generator=torch.Generator().manual_seed(seed)).expand(size, 5)
    observation = x if mask is None else {"x": x, "action_mask": mask}
    zero = torch.zeros(size)
    timestep = TimeStep(torch.ones(size, dtype=torch.int32), zero, zero, observation, {})
    keys = random.at(random.split(random.key(seed), size), counter)
    params, buffers = variables_of(agent)
    buffers |= {"remaining": torch.tensor(remaining)}
    out, _ = bind(agent, params | buffers).act(timestep, (), keys, explore)
    return out.action.numpy(), x


@pytest.mark.parametrize("cls", CONFIGS)
def test_evaluation_is_greedy(seed, cls):
    agent = make(cls, seed, epsilon=1.0)
    action, x = decide(agent, 500, seed, explore=False, remaining=1.0)
    assert (action == values(agent, network(agent, x)).argmax(-1)).all()


@pytest.mark.parametrize("fraction", [0.2, 0.0])
@pytest.mark.parametrize("epsilon", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("remaining", [1.0, 0.9, 0.5, 0.0])
def test_the_share_of_random_actions_falls_from_1_to_epsilon(seed, epsilon, remaining, fraction):
    agent, n = make(DQN, seed, epsilon=epsilon, exploration_fraction=fraction), 20_000
    action, x = decide(agent, n, seed, remaining=remaining)
    best = values(agent, network(agent, x[:1])).argmax()
    share = epsilon if fraction == 0 else 1 + min(1.0, (1 - remaining) / fraction) * (epsilon - 1)
    for a in range(A):
        want = share / A + (1 - share) * (a == best)
        assert abs((action == a).mean() - want) < 6 * (0.25 / n) ** 0.5 * (0 < want < 1) + 1e-9, (a, want)


@pytest.mark.parametrize("explore", [True, False])
def test_masked_actions_are_never_taken(seed, explore):
    """Greedy and random ones; all that are allowed are tried."""
    agent, n = make(DQN, seed, MASKED, epsilon=0.5), 4000
    mask = torch.rand(n, A, generator=torch.Generator().manual_seed(seed)) > 0.6
    mask |= (mask.sum(-1) == 0)[:, None] & (torch.arange(A) == 2)
    action, x = decide(agent, n, seed, explore=explore, mask=mask)
    assert mask.gather(-1, torch.from_numpy(action)[:, None]).all()
    q = values(agent, network(agent, x))
    best = np.where(mask, q, -np.inf).argmax(-1)
    if not explore:
        assert (action == best).all()
        return
    # Of a random action each that is allowed is as likely as any other.
    for count in range(1, A + 1):
        some = (mask.sum(-1) == count).numpy()
        want = 0.5 + 0.5 / count
        assert abs((action == best)[some].mean() - want) < 6 * (0.25 / some.sum()) ** 0.5 + 1e-9
    two = (mask == torch.tensor([True, True, True, False])).all(-1).numpy()
    others = {a: (action[two] == a).sum() for a in range(3) if a != best[two][0]}
    assert all(abs(x - two.sum() / 6) < 6 * (two.sum() / 6) ** 0.5 for x in others.values())


def random_share(agent, seed, size, draws):
    """How often each environment does not do the greedy action, scaled to its epsilon."""
    best, other = None, np.zeros(size)
    for counter in range(1, draws + 1):
        action, x = decide(agent, size, seed, counter)
        best = values(agent, network(agent, x[:1])).argmax() if best is None else best
        other += action != best
    return other / draws * A / (A - 1)


def test_every_environment_has_its_own_epsilon_which_never_changes(seed):
    size, draws, epsilon, spread = 40, 600, 0.5, 3.0
    shares = random_share(make(DQN, seed, epsilon=epsilon, epsilon_spread=spread), seed, size, draws)
    own = random.uniform(random.at(random.split(random.key(seed), size), 0), 1).squeeze(-1).numpy()
    want = epsilon ** (1 + spread * own)
    assert (want > 0).all() and (want <= epsilon).all() and len(set(want.tolist())) == size
    assert (abs(shares - want) < 6 * (want / draws * A / (A - 1)) ** 0.5 + 2 / draws).all()
    assert want.max() > 2 * want.min() and np.corrcoef(shares, want)[0, 1] > 0.9
    same = random_share(make(DQN, seed, epsilon=epsilon), seed, size, draws)
    assert (abs(same - epsilon) < 6 * (epsilon / draws * A / (A - 1)) ** 0.5).all()


def test_agents_that_cannot_be_are_refused():
    with pytest.raises(
        ValueError, match="DQN needs a Discrete action, and pendulum has Box.*; use algo=sac, td3, ddpg or"
    ):
        DQN(Pendulum().spec)
    for agent, config in ((C51, C51Config), (QRDQN, QRDQNConfig), (R2D2, R2D2Config)):
        with pytest.raises(ValueError, match=f"huber_delta=1 is of DQN, and {agent.__name__} has a loss of its own"):
            agent(CartPole().spec, config(huber_delta=1.0))
    with pytest.raises(ValueError, match="QRDQN is for one agent, and .* has groups .*; use algo=ippo, mappo or ia2c."):
        QRDQN(EnvSpec("pair", Array((1,)), {"a": Discrete(2)}, groups={"a": 1}))
    with pytest.raises(ValueError, match="n_step=0"):
        DQN(SPEC, DQNConfig(n_step=0))
    with pytest.raises(ValueError, match=r"low=1\.0 must be below high=1\.0, and num_atoms=51 at least 2\."):
        C51(SPEC, C51Config(low=1.0, high=1.0))
    with pytest.raises(ValueError, match="num_atoms=1 at least 2"):
        C51(SPEC, C51Config(num_atoms=1))
    assert C51(EnvSpec("images", Box((6, 5, 1), 0.0, 1.0), Discrete(3))).num_actions == 3
