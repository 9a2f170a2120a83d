"""Distributions over actions."""

import numpy as np
import pytest
import torch
from scipy.stats import chisquare

from torchpod import random
from torchpod.nets import make_head
from torchpod.specs import Array, Discrete, MultiDiscrete

ROWS = 20_000


def head_of(spec):
    head = make_head(spec, 0.0)
    assert head is not None
    return head


def logits_of(seed, num):
    return torch.rand(num, generator=torch.Generator().manual_seed(seed))


def test_several_choices_are_drawn_as_often_as_their_logits_say_and_do_not_depend_on_each_other(seed):
    nvec = (3, 2, 4)
    head, logits = head_of(MultiDiscrete(nvec)), logits_of(seed, sum(nvec))
    logits[6] = -float("inf")  # the second of the last four is not allowed
    action = head.draw(logits.expand(ROWS, -1), random.split(random.key(seed), ROWS), explore=True)
    assert action.shape == (ROWS, 3) and action.dtype == torch.int64
    probs = [part.double().softmax(-1).numpy() for part in logits.split(list(nvec))]
    joint = np.einsum("i,j,k->ijk", *probs).flatten()
    counts = np.bincount(np.ravel_multi_index(action.numpy().T, nvec), minlength=24)
    assert counts[joint == 0].sum() == 0
    assert chisquare(counts[joint > 0], joint[joint > 0] * ROWS).pvalue > 1e-7


def test_without_exploring_each_choice_is_the_likeliest(seed):
    head, logits = head_of(MultiDiscrete((3, 2))), logits_of(seed, 5)
    keys = random.split(random.key(seed), 4)
    assert (
        head.draw(logits.expand(4, -1), keys, explore=False).tolist()
        == [[int(logits[:3].argmax()), int(logits[3:].argmax())]] * 4
    )


def test_one_choice_among_several_is_drawn_as_if_it_were_alone(seed):
    logits, keys = logits_of(seed, 6).expand(100, -1), random.split(random.key(seed), 100)
    one, several = head_of(Discrete(6)), head_of(MultiDiscrete((6,)))
    action = one.draw(logits, keys, explore=True)
    assert torch.equal(several.draw(logits, keys, explore=True)[:, 0], action)
    for a, b in zip(one.log_prob(logits, action), several.log_prob(logits, action[:, None]), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("spec", [Array((2,)), {"a": Discrete(2)}])
def test_there_are_no_heads_for_other_specs(spec):
    assert make_head(spec, 0.0) is None
