"""The answers that the probes give are right: worked out from their own transitions."""

import pytest
import torch

from torchpod import random
from torchpod.testing import probes
from torchpod.types import LAST


@pytest.mark.parametrize("discount", [0.9, 0.5])
@pytest.mark.parametrize("name", probes.LADDER)
def test_values_are_the_fixed_point_under_the_best_policy(name, discount):
    probe, keys = probes.LADDER[name](), random.split(random.key(0), 64)
    table = {o: 0.0 for o in probe.observations}
    best = dict(zip(probe.observations, probe.best_actions or [0] * len(table), strict=True))
    state, timestep = probe.init(random.at(keys, 0))
    for step in range(1, 60):
        before = timestep
        action = torch.tensor([best[float(o)] for o in before.observation[:, 0]])
        state, timestep = probe.step(state, action, random.at(keys, step))
        for i in range(64):
            if before.step_type[i] != LAST:
                bootstrap = discount * float(timestep.discount[i]) * table[float(timestep.observation[i, 0])]
                table[float(before.observation[i, 0])] = float(timestep.reward[i]) + bootstrap
    assert tuple(table.values()) == pytest.approx(probe.values(discount))


@pytest.mark.parametrize("name", [n for n, p in probes.LADDER.items() if p().best_actions is not None])
def test_the_best_action_earns_more_than_the_other(name):
    probe, keys = probes.LADDER[name](), random.split(random.key(0), 64)
    assert probe.best_actions is not None
    for observation, best in zip(probe.observations, probe.best_actions, strict=True):
        state = torch.full((64, 1), observation)
        rewards = [probe.transition(state, torch.full((64,), a), keys)[1] for a in range(probe.num_actions)]
        assert int(torch.stack(rewards).mean(1).argmax()) == best
