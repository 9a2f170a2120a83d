"""R2D2 against its paper, step by step in float64 NumPy."""

import numpy as np
import pytest
import torch

from torchpod.agent import bind, variables_of
from torchpod.algos.r2d2 import R2D2, R2D2Config
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import FIRST, LAST, MID, ActorOutput, TimeStep, Trajectory

A, K, H = 3, 12, 5
SPEC = EnvSpec("plain", Array((4,)), Discrete(A))
EPSILON = 1e-2


def make(seed, **config):
    """An agent with parameters of a size at which they matter."""
    torch.manual_seed(seed)
    agent = R2D2(SPEC, R2D2Config(hidden=(6,), recurrent=H, rescale=EPSILON, **config))
    with torch.no_grad():
        for p in agent.parameters():
            p.add_(0.3 * torch.randn_like(p))
    return agent


def windows(agent, seed):
    """Sequences with short episodes in them: ends that follow each other closely, terminal ones and others."""
    rng, length = np.random.default_rng(seed), agent.replayed + 1
    kinds, discount = np.empty((length, K), np.int32), np.ones((length, K))
    for k in range(K):
        kind = rng.choice([FIRST, MID, LAST])
        for t in range(length):
            kinds[t, k] = kind
            if kind == LAST:
                discount[t, k] = rng.integers(2)
                kind = FIRST
            else:
                kind = LAST if rng.random() < 0.3 else MID
    reward = np.where(kinds == FIRST, 0.0, rng.standard_normal((length, K)) * 3)
    timestep = TimeStep(
        torch.tensor(kinds),
        torch.tensor(reward, dtype=torch.float32),
        torch.tensor(discount, dtype=torch.float32),
        torch.tensor(rng.standard_normal((length, K, 4)), dtype=torch.float32),
        {},
    )
    action = torch.tensor(rng.integers(A, size=(length - 1, K)))
    state = torch.tensor(rng.standard_normal((K, agent.cell.state_size)), dtype=torch.float32)
    return Trajectory(timestep, ActorOutput(action, {}), state, ())


def h(x):
    return np.sign(x) * (np.sqrt(np.abs(x) + 1) - 1) + EPSILON * x


def h_inverse(x):
    root = (np.sqrt(1 + 4 * EPSILON * (np.abs(x) + 1 + EPSILON)) - 1) / (2 * EPSILON)
    return np.sign(x) * (root**2 - 1)


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def along(params, observation, first, state):
    """Action values of one sequence, `[L + 1, A]`, one step after the other."""
    p = {name: x.detach().double().numpy() for name, x in params.items()}
    values = []
    for x, is_first in zip(observation, first, strict=True):
        state = np.zeros_like(state) if is_first else state
        features = np.maximum(p["encoder.net.0.weight"] @ x + p["encoder.net.0.bias"], 0)
        output, memory = state[:H], state[H:]
        gates = p["cell.input.weight"] @ features + p["cell.input.bias"]
        gates = gates + p["cell.recurrent.weight"] @ output + p["cell.recurrent.bias"]
        enter, forget, new, leave = np.split(gates, 4)
        memory = sigmoid(forget + 1) * memory + sigmoid(enter) * np.tanh(new)
        state = np.concatenate([sigmoid(leave) * np.tanh(memory), memory])
        values.append(p["advantage.weight"] @ state[:H] + p["advantage.bias"])
    return np.array(values)


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize(("burn_in", "length", "n"), [(2, 4, 3), (0, 5, 1), (3, 1, 2)])
def test_loss_and_priority_are_those_of_the_paper(seed, double, burn_in, length, n):
    agent = make(seed, burn_in=burn_in, length=length, n_step=n, double=double, discount=0.9, largest_share=0.7)
    other = make(seed + 1, burn_in=burn_in, length=length, n_step=n, double=double)
    trajectory = windows(agent, seed)
    batch = agent.prepare(trajectory, torch.zeros(K, 3, dtype=torch.int64))
    t = trajectory.timestep
    weight = np.random.default_rng(seed).random(K)
    steps = batch.steps | {"weight": batch.steps["weight"] * torch.tensor(weight, dtype=torch.float32)}
    target = bind(agent, dict(other.named_parameters()) | dict(agent.named_buffers()))
    out = agent.loss(batch._replace(steps=steps), torch.zeros(3, dtype=torch.int64), target)

    loss, priority = 0.0, np.zeros(K)
    kinds, reward, discount = (x.double().numpy() for x in (t.step_type, t.reward, t.discount))
    for k in range(K):
        inputs = t.observation[:, k].double().numpy(), kinds[:, k] == FIRST, trajectory.actor_state[k].double().numpy()
        online, slow = along(dict(agent.named_parameters()), *inputs), along(dict(other.named_parameters()), *inputs)
        errors = []
        for i in range(burn_in, burn_in + length):
            if kinds[i, k] == LAST:
                continue
            total, factor, j = 0.0, 1.0, i
            while j < i + n:
                j += 1
                total += factor * reward[j, k]
                factor *= 0.9 * discount[j, k]
                if kinds[j, k] == LAST:
                    break
            best = (online if double else slow)[j].argmax()
            td = h(total + factor * h_inverse(slow[j, best])) - online[i, trajectory.output.action[i, k]]
            loss += 0.5 * td**2 * weight[k]
            errors.append(abs(td))
        priority[k] = 0.7 * max(errors, default=0.0) + 0.3 * float(np.mean(errors)) if errors else 0.0
    assert isinstance(out.loss, torch.Tensor) and out.priority is not None
    np.testing.assert_allclose(float(out.loss.detach()), loss, rtol=1e-4)
    np.testing.assert_allclose(out.priority.detach().numpy(), priority, rtol=1e-4, atol=1e-5)
    assert ((kinds == LAST).sum(0) > 1).any()  # two episodes end within a sequence


@pytest.mark.parametrize("burn_in", [0, 2])
def test_no_gradient_flows_through_the_burn_in(seed, burn_in):
    agent = make(seed, burn_in=burn_in, length=3, n_step=1)
    trajectory = windows(agent, seed)
    kinds = torch.full_like(trajectory.timestep.step_type, MID)  # or the state would be forgotten
    trajectory = trajectory._replace(timestep=trajectory.timestep._replace(step_type=kinds))
    batch = agent.prepare(trajectory, torch.zeros(K, 3, dtype=torch.int64))
    observation = batch.steps["observation"].requires_grad_()
    steps = batch.steps | {"observation": observation}
    variables = {**dict(agent.named_parameters()), **dict(agent.named_buffers())}
    target = bind(agent, {name: x.detach() for name, x in variables.items()})
    out = agent.loss(batch._replace(steps=steps), torch.zeros(3, dtype=torch.int64), target)
    assert isinstance(out.loss, torch.Tensor)
    (gradient,) = torch.autograd.grad(out.loss, observation)
    assert not gradient[:burn_in].any() and gradient[burn_in].any()


def test_the_actor_s_values_are_those_of_the_sequence_until_the_parameters_change(seed):
    """From the stored state the learner computes what the actor did, through the ends of episodes."""
    agent = make(seed, burn_in=2, length=4, n_step=2)
    trajectory = windows(agent, seed)
    t, state = trajectory.timestep, trajectory.actor_state
    outputs = agent.sequence(t.observation, t.step_type == FIRST, state)
    keys = torch.zeros(K, 3, dtype=torch.int64)
    for i in range(agent.replayed + 1):
        step = TimeStep(*(x[i] for x in t[:4]), {})
        action, state = agent.act(step, state, keys, explore=False)
        assert torch.equal(action.action, outputs[i].squeeze(-1).argmax(-1))


def test_unfit_settings_are_refused():
    for settings, told in (
        ({"cell": "rnn"}, "cell=rnn is not known; use gru or lstm"),
        ({"length": 0}, "length=0 and recurrent=64 at least 1"),
        ({"burn_in": -1}, "burn_in=-1 must be at least 0"),
    ):
        with pytest.raises(ValueError, match=told):
            R2D2(SPEC, R2D2Config(**settings))


def test_variables_are_those_that_learn(seed):
    params, _ = variables_of(make(seed))
    assert {name.split(".")[0] for name in params} == {"encoder", "cell", "advantage"}
