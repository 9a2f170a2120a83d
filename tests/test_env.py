"""What `make_timestep` makes of who is alive; what environments do with it is in tests/envs and tests/contracts."""

import pytest
import torch

from torchpod.env import make_timestep
from torchpod.envs.host.timesteps import grouped_timestep


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


def test_who_is_not_there_at_the_start_has_discount_0_only_after_it_as_on_the_host():
    reset, terminated, truncated = torch.eye(4, dtype=torch.bool)[:3]  # and the last goes on
    alive = torch.tensor([[False, True]] * 4)
    timestep = make_timestep(
        torch.zeros(4, 1),
        {"sheep": torch.zeros(4, 2)},
        reset=reset,
        terminated=terminated,
        truncated=truncated,
        extras={"alive": {"sheep": alive}},
    )
    assert timestep.discount["sheep"].tolist() == [[1, 1], [0, 0], [0, 1], [0, 1]]
    ends = (x.numpy() for x in (terminated, truncated))
    twin, _ = grouped_timestep(
        None, reset.numpy(), {"sheep": torch.zeros(4, 2).numpy()}, *ends, {"sheep": alive.numpy()}
    )
    assert torch.equal(twin.discount["sheep"], timestep.discount["sheep"])
