import torch
from torch import nn

from torchpod.nets import ObservationNormalizer, RunningMoments
from torchpod.specs import Array, Box, Discrete


def test_what_was_seen_comes_out_with_mean_0_and_variance_1(seed):
    x = 5 + 3 * torch.randn(1000, 4, generator=torch.Generator().manual_seed(seed))
    running = RunningMoments((4,))
    assert torch.equal(running(x), x.clamp(-10, 10))  # nothing seen yet
    running.mean.copy_(x.double().mean(0))
    running.variance.copy_(x.double().var(0))
    out = running(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.mean(0), torch.zeros(4), rtol=0, atol=1e-5)
    torch.testing.assert_close(out.std(0), torch.ones(4), rtol=0, atol=1e-5)
    assert running(torch.full((4,), 1e9)).tolist() == [10.0] * 4


def test_of_a_dict_floats_are_normalised_and_nothing_else():
    spec = {
        "image": Array((2, 2, 3), torch.uint8),
        "speed": Box((3,), -1.0, 1.0),
        "action_mask": Array((5,), torch.bool),
        "card": Discrete(7),
    }
    normalizer = ObservationNormalizer(spec)
    normalizer.moments["speed"].mean.fill_(2.0)
    observation = {
        "image": torch.ones(6, 2, 2, 3, dtype=torch.uint8),
        "speed": torch.ones(6, 3),
        "action_mask": torch.ones(6, 5, dtype=torch.bool),
        "card": torch.zeros(6, dtype=torch.int64),
    }
    out = normalizer(observation)
    for name in ("image", "action_mask", "card"):
        assert out[name] is observation[name]
    torch.testing.assert_close(out["speed"], torch.full((6, 3), -1.0))
    assert list(normalizer.seen(observation)) == ["moments.speed"]


def test_an_entry_may_have_any_name():
    """Those that `nn.ModuleDict` takes keep theirs in checkpoints, and no two become one."""
    good = ["speed", "Type", "seen by all agents", "a_b", "50%", "a%2Eb"]
    bad = ["", ".", "a.b", "%a%2Eb", "%", "%type", *dir(nn.ModuleDict())]
    names = [*good, *bad]
    normalizer = ObservationNormalizer({name: Array((2,)) for name in names})
    observation = {name: torch.full((3, 2), 0.1 * i) for i, name in enumerate(names)}
    seen = normalizer.seen(observation)
    assert len(seen) == len(names) and list(seen)[: len(good)] == [f"moments.{name}" for name in good]
    buffers = dict(normalizer.named_buffers())
    for name, x in seen.items():
        buffers[f"{name}.mean"].copy_(x[0])
    out = normalizer(observation)
    assert list(out) == names and all(not x.any() for x in out.values())


def test_an_image_of_bytes_passes_untouched():
    image = torch.ones(2, 4, 4, 3, dtype=torch.uint8)
    assert ObservationNormalizer(Array((4, 4, 3), torch.uint8))(image) is image
