"""Losses of TorchRL where a mask forbids actions: in decisions, in exploration, and in what is learned."""

import pytest
import torch

from torchpod import random
from torchpod.agent import bind, variables_of
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent
from torchpod.specs import Array, Discrete, EnvSpec
from torchpod.types import LAST, MID, ActorOutput, TimeStep, Trajectory

SPEC = EnvSpec("masked", {"x": Array((3,)), "action_mask": Array((4,), torch.bool)}, Discrete(4))
DISCRETE = ("A2CLoss", "ClipPPOLoss", "DQNLoss", "DiscreteIQLLoss", "DiscreteSACLoss", "DistributionalDQNLoss")
B = 200


def make(loss, seed):
    torch.manual_seed(seed)
    arguments = {"target_entropy": 0.1} if loss == "DiscreteSACLoss" else {}
    return torchrl_agent(SPEC, TorchRLConfig(loss, hidden=(8,), arguments=arguments))


def masks(seed, *lead):
    """Each allows one action at least."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(*lead, 4, generator=generator) > 0.5
    return mask | (torch.arange(4) == torch.randint(4, (*lead, 1), generator=generator))


@pytest.mark.parametrize("explore", [True, False])
@pytest.mark.parametrize("loss", DISCRETE)
def test_what_is_forbidden_is_not_done(seed, loss, explore):
    agent, mask = make(loss, seed), masks(seed, B)
    params, buffers = variables_of(agent)
    zero = torch.zeros(B)
    timestep = TimeStep(zero.int() + MID, zero, zero, {"x": torch.randn(B, 3), "action_mask": mask}, {})
    with torch.no_grad():
        output, _ = bind(agent, params | buffers).act(timestep, (), random.split(random.key(seed), B), explore=explore)
    assert mask.gather(-1, output.action[:, None]).all()
    assert output.action.unique().numel() == 4


def test_what_is_forbidden_is_not_done_where_all_is_worth_the_least(seed):
    """In float64, too, of which the lowest number is beyond a float32."""
    agent = make("DistributionalDQNLoss", seed).double()
    params, buffers = variables_of(agent)
    for name, value in params.items():
        if name.endswith("bias") and value.shape[-1] == 51 * 4:
            params[name] = value + 1000.0 * (torch.arange(51 * 4) < 4)  # of the lowest atom
    mask = torch.arange(4) == torch.randint(4, (B, 1), generator=torch.Generator().manual_seed(seed))
    zero = torch.zeros(B)
    x = torch.randn(B, 3, dtype=torch.float64)
    timestep = TimeStep(zero.int() + MID, zero, zero, {"x": x, "action_mask": mask}, {})
    keys = random.split(random.key(seed), B)
    with torch.no_grad():
        output, _ = bind(agent, params | buffers).act(timestep, (), keys, explore=False)
    assert torch.equal(output.action, mask.int().argmax(-1))


@pytest.mark.parametrize("loss", ["DQNLoss", "DistributionalDQNLoss"])
def test_targets_do_not_take_what_is_forbidden(seed, loss):
    """The values of an action that nobody may take are changed, and nothing else is."""
    agent, mask = make(loss, seed), masks(seed, 2, B)
    mask[..., 3], mask[..., 0] = False, True
    params, buffers = variables_of(agent)
    x = torch.randn(2, B, 3)
    step_type = torch.full((2, B), MID, dtype=torch.int32)
    timestep = TimeStep(step_type, torch.randn(2, B), torch.ones(2, B), {"x": x, "action_mask": mask}, {})
    action = mask[0].float().multinomial(1)[:, 0]
    trajectory = Trajectory(timestep, ActorOutput(action[None], {}), (), ())
    losses = []
    for more in (0.0, 50.0):
        changed = dict(params)
        for name, value in params.items():
            if name.endswith("bias") and value.shape[-1] % 4 == 0 and value.shape[-1] != 8:
                index = torch.arange(value.shape[-1])
                # DQN: a value per action; its distributional form: atoms x actions, of which the highest counts.
                counts = index == 3 if value.shape[-1] == 4 else index == value.shape[-1] - 1
                changed[name] = value + more * counts
        assert more == 0.0 or any((changed[name] != params[name]).any() for name in params)
        bound, keys = bind(agent, changed | buffers), random.split(random.key(seed), B)
        batch = bound.prepare(trajectory, keys)
        rows = batch._replace(steps={name: _first(value) for name, value in batch.steps.items()})
        losses.append(bound.loss(rows, keys, bound).loss)
    assert LAST not in step_type and torch.equal(*losses)


def _first(tree):
    return {name: _first(x) for name, x in tree.items()} if isinstance(tree, dict) else tree[0]


def test_an_entropy_that_no_policy_may_reach_is_refused():
    told = "DiscreteSACLoss aims at an entropy of all 4 actions, and masked has an action_mask; set "
    with pytest.raises(ValueError, match=told):
        torchrl_agent(SPEC, TorchRLConfig("DiscreteSACLoss", hidden=(8,)))
