"""docs/write-a-kernel.md on a GPU: its Triton kernel beside the rules as tensors, compiled and captured in a graph."""

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.docs.test_write_a_kernel import SIZES, by_rules, folder, page, random_games, require_equal  # noqa: F401
from torchpod import random
from torchpod.compile import Compiler
from torchpod.graph import Replay
from torchpod.testing import check_env


@pytest.mark.gpu
def test_the_triton_kernel_of_the_page_plays_by_the_rules_compiled_and_captured(page, seed):  # noqa: F811
    pytest.importorskip("triton", reason="comes with torch for CUDA")
    import my_triton_kernel  # noqa: F401  # pyright: ignore[reportMissingImports]

    for i, sizes in enumerate(SIZES):
        games = random_games(seed + i, *sizes, device="cuda")
        require_equal(page.hunt(*games), by_rules(*games))
    env = page.MyEnv()
    check_env(env, device="cuda")

    keys = random.split(random.key(seed, "cuda"), 1024)
    step = Compiler(enabled=True)(env.step)
    state, _ = env.init(keys)

    def iterate(carry):
        state, count = carry
        for _ in range(3):
            count = count + 1
            step_keys = random.at(keys, count)
            state, timestep = step(state, random.to_integer(random.bits(step_keys, 1)[:, 0], 5), step_keys)
        return (state, count), timestep

    carry = (state, torch.zeros((), dtype=torch.int64, device="cuda"))
    captured, eager = Replay(iterate, carry, capture=True), Replay(iterate, carry, capture=False)
    for _ in range(20):
        require_equal(pytree.tree_leaves(captured()), pytree.tree_leaves(eager()))
    require_equal(pytree.tree_leaves(captured.state), pytree.tree_leaves(eager.state))
