"""Random actions are those that specs and masks allow."""

import numpy as np
import torch

from torchpod import random
from torchpod.actions import random_action
from torchpod.specs import Array, EnvSpec, MultiDiscrete


def test_choices_of_several_are_drawn_by_their_own_part_of_the_mask(seed):
    spec = EnvSpec("pairs", {"x": Array((1,)), "action_mask": Array((5,), torch.bool)}, MultiDiscrete((3, 2)))
    mask = torch.tensor([[False, True, True, True, False]]).expand(500, -1)
    action = random_action(spec, {"x": torch.zeros(500, 1), "action_mask": mask}, random.split(random.key(seed), 500))
    assert action.dtype == torch.int64 and np.unique(action.numpy(), axis=0).tolist() == [[1, 0], [2, 0]]
    free = random_action(spec, {"x": torch.zeros(500, 1)}, random.split(random.key(seed), 500))
    assert len(np.unique(free.numpy(), axis=0)) == 6
