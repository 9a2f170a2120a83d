import torch

from torchpod.graph import Replay


def test_a_state_that_moves_its_own_leaves_around():
    """The next state is made of the old one's tensors, swapped, viewed and kept: each is read before it is written."""

    def rotate(state):
        a, b, c, kept = state
        return (b, c.flip(0), a[:], kept), a.sum()

    start = tuple(torch.arange(3.0) + 10 * i for i in range(4))
    replay, want = Replay(rotate, start, capture=False), start
    for _ in range(3):
        replay()
        want = tuple(x.clone() for x in rotate(want)[0])
        assert all(torch.equal(x, y) for x, y in zip(replay.state, want, strict=True))
