"""What `make_timestep` refuses; what environments do with it is in tests/envs and tests/contracts."""

import pytest
import torch

from torchpod.env import make_timestep


def test_alive_needs_the_groups_of_the_reward():
    never, alive = torch.zeros(4, dtype=torch.bool), torch.ones(4, 2, dtype=torch.bool)
    reward = {"cat": torch.zeros(4, 1), "sheep": torch.zeros(4, 2)}
    told = r"groups of the reward, \['cat', 'sheep'\], and it has \['sheep'\]; give each group a bool tensor \[B, N\]"
    with pytest.raises(ValueError, match=told):
        make_timestep(
            torch.zeros(4, 1),
            reward,
            reset=never,
            terminated=never,
            truncated=never,
            extras={"alive": {"sheep": alive}},
        )
