"""Recurrent cells and torsos: against torch's, and the sizes that their papers give."""

import re
from typing import Any

import pytest
import torch

from torchpod.algos.dqn import DQN, DQNConfig
from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.algos.r2d2 import R2D2, R2D2Config
from torchpod.algos.sac import DiscreteSAC, SACConfig
from torchpod.nets import GRUCell, LSTMCell, make_torso
from torchpod.nets.nets import MLP, STATE, Encoder
from torchpod.specs import Array, Box, Discrete, EnvSpec, MultiDiscrete, shape_of


def test_the_gru_cell_equals_torchs():
    torch.manual_seed(0)
    ours, theirs = GRUCell(3, 4), torch.nn.GRUCell(3, 4)
    with torch.no_grad():  # the same gates in the same order: reset, update, new
        theirs.weight_ih.copy_(ours.input.weight)
        theirs.weight_hh.copy_(ours.recurrent.weight)
        theirs.bias_ih.copy_(ours.input.bias.normal_())
        theirs.bias_hh.copy_(ours.recurrent.bias.normal_())
    x, h = torch.randn(6, 3), torch.randn(6, 4)
    torch.testing.assert_close(ours.output(ours.step(ours.input(x), h)), theirs(x, h))


def test_the_lstm_cell_equals_torchs():
    torch.manual_seed(0)
    ours, theirs = LSTMCell(3, 4), torch.nn.LSTMCell(3, 4)
    with torch.no_grad():  # the same gates in the same order: input, forget, cell, output
        theirs.weight_ih.copy_(ours.input.weight)
        theirs.weight_hh.copy_(ours.recurrent.weight)
        theirs.bias_ih.copy_(ours.input.bias.normal_())
        theirs.bias_hh.copy_(ours.recurrent.bias.normal_())
        theirs.bias_hh[4:8] += 1
    x, h, c = torch.randn(6, 3), torch.randn(6, 4), torch.randn(6, 4)
    state = ours.step(ours.input(x), torch.cat([h, c], -1))
    expected = theirs(x, (h, c))
    torch.testing.assert_close(ours.output(state), expected[0])
    torch.testing.assert_close(state, torch.cat(expected, -1))


def test_an_observed_choice_is_a_one_among_zeros():
    spec: dict[str, Any] = {
        "a": Discrete(5),
        "b": MultiDiscrete((2, 3)),
        "c": Array((2, 2), torch.uint8),
        "d": Discrete(3),
        "e": Array(()),
    }
    encoder = Encoder(spec, [], "tanh")
    assert encoder.out_features == 5 + 5 + 4 + 3 + 1
    lead = (4, 7)
    seen = {
        "a": torch.randint(5, lead),
        "b": torch.stack([torch.randint(2, lead), torch.randint(3, lead)], -1),
        "c": torch.randint(256, (*lead, 2, 2), dtype=torch.uint8),
        "d": torch.randint(3, lead),
        "e": torch.randn(lead),
    }
    eye = torch.nn.functional.one_hot
    parts = [eye(seen["a"], 5), eye(seen["b"][..., 0], 2), eye(seen["b"][..., 1], 3)]
    parts += [seen["c"].flatten(-2) / 255, eye(seen["d"], 3), seen["e"][..., None]]
    expected = torch.cat([x.float() for x in parts], -1)
    torch.testing.assert_close(encoder(seen), expected, rtol=0, atol=0)
    torch.testing.assert_close(torch.vmap(encoder)(seen), expected, rtol=0, atol=0)
    with pytest.raises(ValueError, match="one of 10001 values, and networks see one number for each of up to 10000"):
        Encoder(Discrete(10_001), [8], "tanh")


PARAMETERS = {
    # Convolutions and the dense layer for 84x84x4, counted by hand.
    "nature": (8 * 8 * 4 * 32 + 32) + (4 * 4 * 32 * 64 + 64) + (3 * 3 * 64 * 64 + 64) + (7 * 7 * 64 * 512 + 512),
    "impala_shallow": (8 * 8 * 4 * 16 + 16) + (4 * 4 * 16 * 32 + 32) + (9 * 9 * 32 * 256 + 256),
    "impala_deep": (9 * 4 * 16 + 16)
    + 4 * (9 * 16 * 16 + 16)
    + (9 * 16 * 32 + 32)
    + 9 * (9 * 32 * 32 + 32)
    + (11 * 11 * 32 * 256 + 256),
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_the_torsos_have_the_sizes_of_their_papers(name):
    torso = make_torso(name, (84, 84, 4), channels=(), hidden=0)
    assert sum(p.numel() for p in torso.parameters()) == PARAMETERS[name]
    assert torso(torch.rand(2, 3, 84, 84, 4)).shape == (2, 3, torso.out_features)


def test_the_deep_torso_grows_by_width_and_depth():
    grown = make_torso("impala_deep", (16, 16, 1), channels=(), hidden=0, width=2, depth=3)
    convs = [m for m in grown.modules() if isinstance(m, torch.nn.Conv2d)]
    assert len(convs) == 3 * (1 + 3 * 2 * 2) and {m.out_channels for m in convs} == {32, 64}


def test_an_observation_of_two_levels_is_refused_with_the_transform_that_makes_it_one():
    spec = EnvSpec("nest", {"near": {"wall": Box((2,)), "food": Box(())}, "time": Box(())}, Discrete(2))
    with pytest.raises(
        ValueError, match=r"observation\['near'\] has .* \['food', 'wall'\].*env.transforms=\[flatten\]"
    ):
        PPO(spec, PPOConfig())


def test_bytes_are_scaled_and_what_cannot_be_is_refused():
    spec = EnvSpec("bytes", Array((12, 12, 3), torch.uint8), Discrete(2))
    agent = PPO(spec, PPOConfig(hidden=(8,)))
    x = torch.randint(0, 256, (5, 12, 12, 3), dtype=torch.uint8)
    torch.testing.assert_close(agent.encoder(x), agent.encoder.net(x.float() / 255))
    with pytest.raises(ValueError, match=r"images \[12, 12, 3\] are too small .*; use torso=small or larger"):
        PPO(spec, PPOConfig(torso="nature"))
    with pytest.raises(ValueError, match="torso=resnet is not known; use one of small, nature"):
        PPO(spec, PPOConfig(torso="resnet"))
    with pytest.raises(ValueError, match="cell=rnn is not known; use gru or lstm"):
        PPO(spec, PPOConfig(cell="rnn"))


IMAGE, VECTOR = Array((84, 84, 3), torch.uint8), Array((4,))


@pytest.mark.parametrize(
    ("cls", "config"), [(PPO, PPOConfig), (DQN, DQNConfig), (R2D2, R2D2Config), (DiscreteSAC, SACConfig)]
)
@pytest.mark.parametrize("observation", [VECTOR, {"camera": IMAGE, "speed": VECTOR}], ids=["vector", "dict"])
def test_a_torso_that_the_observation_has_no_use_for_is_refused(cls, config, observation):
    spec = EnvSpec("car", observation, Discrete(2))
    shapes = re.escape(str(shape_of(observation)))
    with pytest.raises(ValueError, match=rf"torso=nature is for .* of car are {shapes}; leave torso out"):
        cls(spec, config(torso="nature"))
    cls(spec, config())  # the default is for all


def test_a_torso_is_for_the_one_thing_that_the_policy_sees():
    masked = {"camera": IMAGE, "action_mask": Array((2,), torch.bool), STATE: VECTOR}
    agent = PPO(EnvSpec("car", masked, Discrete(2)), PPOConfig(torso="nature"))
    assert agent.value_encoder is not None
    assert agent.encoder.is_image and not agent.value_encoder.is_image


@pytest.mark.parametrize("sizes", [[0], [8, 0], [-3]])
def test_a_layer_without_units_is_refused(sizes: list[int]):
    with pytest.raises(ValueError, match=f"hidden has a layer of {min(sizes)} units, and must be at least 1 each."):
        MLP(3, sizes)
    assert MLP(3, []).out_features == 3
