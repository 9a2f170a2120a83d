"""Is the captured iteration right, and free of host syncs? The first rows of suite `gpu`."""

import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.anakin import RunState
from torchpod.bench import anakin_worker
from torchpod.bench.compare import Row, RowMaker
from torchpod.bench.kernels import kernels, profiled, waits
from torchpod.bench.targets import Failure
from torchpod.compile import Compiler
from torchpod.graph import Replay

TOLERANCE = 1e-4
"""On parameters after one iteration: floats differ by ulps between eager, compiled and captured kernels."""


def correctness(device: str, num_envs: int, *, compiled: bool = True) -> tuple[list[Row], list[Failure]]:
    """PPO on CartPole: eager, compiled and captured from the same carry; a resumed run; what a replay waits for.

    Args:
      device: cuda, or cpu, where the same code runs uncaptured.
      num_envs: environments.
      compiled: False for tests.

    Returns:
      Rows, and what is wrong with which of them.
    """
    eager = anakin_worker.build("cartpole", num_envs, 1000, compiler=Compiler(False), device=device)
    program = anakin_worker.build("cartpole", num_envs, 1000, compiler=Compiler(compiled), device=device)
    state, capture = eager.init(0), device == "cuda"
    replay = Replay(program.iterate, state, capture=capture)
    replay()
    captured = pytree.tree_map(torch.clone, replay.state)
    results = {"eager": eager.iterate(state)[0], "compiled": program.iterate(state)[0], "captured": captured}
    make, rows, failures = RowMaker(), [], []
    for a, b in (("eager", "compiled"), ("compiled", "captured")):
        difference = largest_difference(results[a], results[b])
        rows.append(make.alone(f"difference_{a}_{b}/{num_envs}", difference, "largest over parameters"))
        if not difference <= TOLERANCE:
            told = f"{b} differs from {a} by {difference:.2e} after one iteration; {TOLERANCE} is allowed."
            failures.append((rows[-1].name, told))
    unlike = different(results["compiled"], captured, floats=False)
    rows.append(make.alone(f"different_integers_compiled_captured/{num_envs}", len(unlike), "leaves"))
    if unlike:
        failures.append((rows[-1].name, f"captured and compiled differ after one iteration in {unlike}."))

    # A run that went on, beside one whose state was taken to the host and put into a new graph.
    saved = pytree.tree_map(lambda x: x.cpu(), captured)
    resumed = Replay(program.iterate, pytree.tree_map(lambda x: x.to(device), saved), capture=capture)
    for _ in range(2):
        replay()
        resumed()
    unlike = different(replay.state, resumed.state)
    rows.append(make.alone(f"different_after_resume_across_capture/{num_envs}", len(unlike), "leaves"))
    if unlike:
        failures.append((rows[-1].name, f"a run resumed in a new graph differs after two iterations in {unlike}."))

    keys = random.split(random.key(3), num_envs)
    same = torch.equal(random.bits(keys, 8), random.bits(keys.to(device), 8).cpu())
    rows.append(make.alone(f"random_words_as_on_cpu/{num_envs}", int(same), "bool"))
    if not same:
        failures.append((rows[-1].name, f"random words on {device} are not those on the CPU."))

    events = profiled(replay)
    syncs, on_device = waits(events), kernels(events)
    rows.append(make.alone(f"kernels_per_replay/{num_envs}", len(on_device), "kernels"))
    if capture and not on_device:
        told = "the profiler saw no kernel in a replay, so that it would not have seen a host sync either."
        failures.append((rows[-1].name, told))
    rows.append(make.alone(f"host_syncs_per_replay/{num_envs}", len(syncs), "calls"))
    if syncs:
        failures.append((rows[-1].name, f"the host waits for the device during a replay: {sorted(set(syncs))}."))
    return rows, failures


def largest_difference(a: RunState, b: RunState) -> float:
    """Over all parameters."""
    return max(float((x - b.learner.params[name]).abs().max()) for name, x in a.learner.params.items())


def different(a: RunState, b: RunState, *, floats: bool = True) -> list[str]:
    """Names of the leaves that are not equal to the bit; without `floats`, of whole numbers alone: keys, counters."""
    first, second = ({pytree.keystr(path): x for path, x in pytree.tree_flatten_with_path(s)[0]} for s in (a, b))
    if first.keys() != second.keys():
        return sorted(first.keys() ^ second.keys())
    return [
        name for name, x in first.items() if (floats or not x.is_floating_point()) and not torch.equal(x, second[name])
    ]
