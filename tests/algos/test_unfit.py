"""What errors advise to use is there, and takes the actions."""

import re

import pytest

from torchpod.algos import MAKERS
from torchpod.algos.unfit import unfit
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete

GROUPS = EnvSpec("groups", {"a": Array((2,))}, {"a": Discrete(2)}, groups={"a": 2})


@pytest.mark.parametrize(
    "spec",
    [
        GROUPS,
        *(
            EnvSpec("one", Array((2,)), x)
            for x in (Discrete(3), MultiDiscrete((3, 2)), Box((2,), -1.0, 1.0), Box((2,)))
        ),
    ],
    ids=["groups", "discrete", "multi-discrete", "box", "without bounds"],
)
def test_every_algorithm_that_is_advised_takes_the_actions(spec):
    advised = unfit("X", "nothing", spec).removesuffix(".").split("algo=")[1]
    names = re.split(", | or ", advised)
    assert len(names) >= 3
    for name in names:
        make, config = MAKERS[name]
        make(spec, config())
