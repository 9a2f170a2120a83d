"""Random actions are those that specs and masks allow."""

import numpy as np
import torch

from torchpod import random
from torchpod.actions import closed_masks, open_masks, random_action
from torchpod.specs import Array, Discrete, EnvSpec, MultiDiscrete


def test_choices_of_several_are_drawn_by_their_own_part_of_the_mask(seed):
    spec = EnvSpec("pairs", {"x": Array((1,)), "action_mask": Array((5,), torch.bool)}, MultiDiscrete((3, 2)))
    mask = torch.tensor([[False, True, True, True, False]]).expand(500, -1)
    action = random_action(spec, {"x": torch.zeros(500, 1), "action_mask": mask}, random.split(random.key(seed), 500))
    assert action.dtype == torch.int64 and np.unique(action.numpy(), axis=0).tolist() == [[1, 0], [2, 0]]
    free = random_action(spec, {"x": torch.zeros(500, 1)}, random.split(random.key(seed), 500))
    assert len(np.unique(free.numpy(), axis=0)) == 6


def test_masks_that_allow_nothing_are_named():
    mask = Array((3,), torch.bool)
    spec = EnvSpec(
        "pair",
        {"a": {"action_mask": mask}, "b": {"action_mask": mask}, "c": Array((3,))},
        {"a": MultiDiscrete((1, 2)), "b": Discrete(3), "c": Discrete(3)},
        groups={"a": 2, "b": 1, "c": 1},
    )
    one = torch.tensor([True, False, False])
    seen = {"a": {"action_mask": one.expand(5, 4, 2, 3)}, "b": {"action_mask": one.expand(5, 4, 1, 3)}, "c": one}
    where = "in step 0, environment 0, agent 0 it allows none; leave something to agents that are out of the game too."
    named = f"observation['a']['action_mask'] must allow at least one action of choice 1 in every row; {where}"
    assert closed_masks(spec, seen) == [named]
    assert closed_masks(spec, seen | {"a": {"action_mask": ~one.expand(5, 4, 2, 3)}}) == [named.replace("1 in", "0 in")]
    others = {"a": {"action_mask": one | True}, "b": {"action_mask": (one & False).expand(3, 1, 3)}}
    assert closed_masks(spec, seen | others) == [
        "observation['b']['action_mask'] must allow at least one action in every row; in environment 0, agent 0 it "
        "allows none; leave something to agents that are out of the game too."
    ]
    of_members = {"a": {"action_mask": one | True}, "b": {"action_mask": (one & False).expand(2, 5, 4, 1, 3)}}
    assert "; in member 0, step 0, environment 0, agent 0 it allows none" in closed_masks(spec, seen | of_members)[0]
    assert [x.shape for x in open_masks(spec, seen).values()] == [(5, 4, 2), (5, 4, 2), (5, 4, 1)]
