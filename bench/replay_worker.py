"""One side of the `replay` suite: a buffer's inserts, samples and new priorities.

taskset -c 0 python -m torchpod.bench.replay_worker --case sample_vector --side torchpod
"""

import argparse
import json
import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from torchpod import random
from torchpod.bench.rates import report
from torchpod.compile import Compiler
from torchpod.host_memory import status_bytes
from torchpod.replay import Priorities, ReplayBuffer, ReplayConfig, Sample
from torchpod.types import MID, ActorOutput, TimeStep, Trajectory, Tree


class Case(NamedTuple):
    """What is done, with what."""

    name: str
    what: str
    """insert, sample, or priorities: what was sampled gets new ones."""
    shape: tuple[int, ...]
    """Of an observation."""
    dtype: torch.dtype
    capacity: int
    num_envs: int
    unroll_length: int
    prioritised: bool = False
    memory: bool = False
    """Whether what our process takes is looked at: targets.py says how much it may."""
    frame_stack: int = 1
    """Frames that an observation holds, of which ours keeps the newest."""


VECTOR, IMAGE = ((4,), torch.float32, 1_000_000, 64, 16), ((84, 84, 4), torch.uint8, 20_000, 16, 16)
FRAMES = (84, 84, 1), torch.uint8, 1_000_000, 16, 16
FEW = VECTOR[0], torch.float32, 10_000, 16, 16
STACKS = (84, 84, 4), *FRAMES[1:]
CASES = (
    Case("insert_vector", "insert", *VECTOR),
    Case("insert_image", "insert", *IMAGE),
    Case("sample_vector", "sample", *VECTOR),
    Case("sample_image", "sample", *IMAGE),
    Case("insert_million_frames", "insert", *FRAMES, memory=True),
    Case("sample_million_frames", "sample", *FRAMES, memory=True),
    Case("insert_million_stacks", "insert", *STACKS, memory=True, frame_stack=4),
    Case("sample_million_stacks", "sample", *STACKS, memory=True, frame_stack=4),
    Case("sample_prioritised", "sample", *VECTOR, prioritised=True),
    Case("sample_few_prioritised", "sample", *FEW, prioritised=True),
    Case("priorities", "priorities", *VECTOR, prioritised=True),
)
ROWS = 256
"""Of a sample."""
SIDES = ("torchpod", "torchrl", "numpy", "gumbel")
"""The last one draws by priority alone: what our tree of sums is measured against."""


def trajectory_of(case: Case, seed: int) -> Trajectory:
    """An unroll of noise; with stacks of frames, one that goes on from itself when it is stored again."""
    torch.manual_seed(seed)
    lead = (case.unroll_length + 1, case.num_envs)
    observation = torch.rand(*lead, *case.shape) * 255 if case.dtype == torch.uint8 else torch.rand(*lead, *case.shape)
    if case.frame_stack > 1:
        newest = observation[:-1, ..., -1]
        stack = [newest.roll(age, 0) for age in reversed(range(case.frame_stack))]
        observation = torch.stack(stack, -1)
        observation = torch.cat([observation, observation[:1]])
    timestep = TimeStep(
        torch.full(lead, MID, dtype=torch.int32), torch.rand(lead), torch.ones(lead), observation.to(case.dtype), {}
    )
    return Trajectory(timestep, ActorOutput(torch.randint(4, (case.unroll_length, case.num_envs)), {}), (), ())


def torchpod(case: Case, seed: int) -> Callable[[], object]:
    """Ours, compiled."""
    trajectory = trajectory_of(case, seed)
    config = ReplayConfig(
        capacity=case.capacity, min_size=1, prioritised=case.prioritised, frame_stack=case.frame_stack
    )
    sizes = {"num_envs": case.num_envs, "unroll_length": case.unroll_length}
    buffer = ReplayBuffer(config, length=1, sequences=False, **sizes)
    priorities, iteration = buffer.priorities("cpu"), torch.zeros((), dtype=torch.int64)
    one = torch.ones((), dtype=torch.int64)

    def insert() -> None:
        buffer.insert(trajectory, iteration, priorities)
        iteration.add_(one)

    for _ in range(buffer.window // case.unroll_length):
        insert()
    if case.what == "insert":
        return insert
    key, beta = random.key(seed), torch.tensor(0.4)

    def at_counter(
        storage: Tree, priorities: Any, iteration: Tensor, beta: Tensor, key: Tensor, count: Tensor
    ) -> Sample:
        return buffer.sample(storage, priorities, iteration, beta, ROWS, random.at(key, count))

    draw = Compiler(True)(at_counter)
    newest, count = iteration - 1, torch.zeros((), dtype=torch.int64)

    def sample() -> Any:
        count.add_(one)
        return draw(buffer.storage, priorities, newest, beta, key, count)

    if case.what == "sample":
        return sample
    leaf, new = sample().leaf, torch.rand(ROWS)
    assert isinstance(priorities, Priorities)
    return lambda: buffer.write_back(priorities, leaf, new)


def torchrl(case: Case, seed: int) -> Callable[[], object]:
    """TorchRL's: storage in memory, sampled evenly. Its prioritised sampler is a C++ extension."""
    from torchrl.data import LazyTensorStorage, PrioritizedSampler, RandomSampler, TensorDictReplayBuffer

    sampler = PrioritizedSampler(case.capacity, 0.6, 0.4) if case.prioritised else RandomSampler()
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(case.capacity), sampler=sampler, batch_size=ROWS)
    t, out = trajectory_of(case, seed).timestep, trajectory_of(case, seed).output
    done = torch.zeros_like(t.step_type[1:], dtype=torch.bool)
    data = {
        "observation": t.observation[:-1],
        "action": out.action,
        "next": {"observation": t.observation[1:], "reward": t.reward[1:], "done": done, "terminated": done.clone()},
    }
    rows = TensorDict(data, batch_size=list(done.shape)).reshape(-1)
    for _ in range(-(-case.capacity // len(rows))):
        buffer.extend(rows)
    if case.what == "insert":
        return lambda: buffer.extend(rows)
    if case.what == "sample":
        return buffer.sample
    index, new = torch.randint(case.capacity, (ROWS,)), torch.rand(ROWS)
    return lambda: buffer.update_priority(index, new)


def numpy(case: Case, seed: int) -> Callable[[], object]:
    """Arrays that hold a step once, and a binary tree of sums: as short as it can be written."""
    t, out = trajectory_of(case, seed).timestep, trajectory_of(case, seed).output
    rows = {
        "observation": t.observation[:-1].flatten(0, 1).numpy(),
        "action": out.action.flatten().numpy(),
        "reward": t.reward[1:].flatten().numpy(),
        "discount": t.discount[1:].flatten().numpy(),
    }
    count, each = case.capacity // case.num_envs * case.num_envs, case.num_envs
    storage = {name: np.zeros((count, *x.shape[1:]), x.dtype) for name, x in rows.items()}
    size = 1 << (count - 1).bit_length()
    tree, place, rng = np.zeros(2 * size if case.prioritised else 0), 0, np.random.default_rng(seed)

    def write(index: np.ndarray, values: np.ndarray) -> None:
        node = index + size
        tree[node] = values
        while node[0] > 1:
            node = np.unique(node // 2)
            tree[node] = tree[2 * node] + tree[2 * node + 1]

    def insert() -> None:
        nonlocal place
        index = (place + np.arange(len(rows["reward"]))) % count
        for name, x in rows.items():
            storage[name][index] = x
        if case.prioritised:
            write(index, np.ones(len(index)))
        place = (place + len(index)) % count

    for _ in range(count // len(rows["reward"])):
        insert()
    if case.what == "insert":
        return insert

    def sample() -> dict[str, np.ndarray]:
        if case.prioritised:
            height, node = (np.arange(ROWS) + rng.random(ROWS)) / ROWS * tree[1], np.ones(ROWS, np.int64)
            while node[0] < size:
                left = tree[2 * node]
                right = height >= left
                height, node = height - np.where(right, left, 0.0), 2 * node + right
            index = node - size
            weight = (tree[node] / tree[node].mean()) ** -0.4
        else:
            index, weight = rng.integers(0, count - each, ROWS), np.ones(ROWS)
        drawn = {name: x[index] for name, x in storage.items()}
        return drawn | {"next_observation": storage["observation"][(index + each) % count], "weight": weight}

    if case.what == "sample":
        return sample
    index, new = rng.integers(0, count, ROWS), rng.random(ROWS)
    return lambda: write(np.sort(index), (new + 1e-6) ** 0.6)


def gumbel(case: Case, seed: int) -> Callable[[], object]:
    """Priorities in a flat vector, compiled: the rows of the largest sums of log-priority and Gumbel noise."""
    t, out = trajectory_of(case, seed).timestep, trajectory_of(case, seed).output
    columns = {"observation": t.observation[:-1], "action": out.action, "reward": t.reward[1:]}
    columns = {name: x.flatten(0, 1) for name, x in (columns | {"discount": t.discount[1:]}).items()}
    times = case.capacity // len(columns["reward"])
    storage = {name: x.repeat(times, *[1] * (x.ndim - 1)) for name, x in columns.items()}
    mass = torch.rand(len(storage["reward"]))
    log_mass, key, count = (mass / mass.mean()).log(), random.key(seed), torch.zeros((), dtype=torch.int64)

    def at_counter(storage: dict[str, Tensor], log_mass: Tensor, key: Tensor, count: Tensor) -> dict[str, Tensor]:
        share = random.to_uniform(random.bits(random.at(key, count), len(log_mass)))
        index = (log_mass - (-share.clamp(min=1e-12).log()).log()).topk(ROWS).indices
        following = storage["observation"][(index + case.num_envs) % len(log_mass)]
        drawn = {name: x[index] for name, x in storage.items()}
        return drawn | {"next_observation": following, "weight": (-0.4 * log_mass[index]).exp(), "index": index}

    draw = Compiler(True)(at_counter)

    def sample() -> object:
        count.add_(1)
        return draw(storage, log_mass, key, count)

    return sample


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=[case.name for case in CASES], required=True)
    parser.add_argument("--side", choices=SIDES, default="torchpod")
    parser.add_argument("--seconds", type=float, default=1.0, help="of a timed call, about")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    case = next(case for case in CASES if case.name == args.case)
    if case.frame_stack > 1 and args.side != "torchpod":
        needed = case.capacity * math.prod(case.shape) * (2 if args.side == "torchrl" else 1)
        parser.exit(1, f"{args.side} keeps whole stacks, and a million of them take {needed / 1e9:.0f} GB.\n")
    rows = case.num_envs * case.unroll_length if case.what == "insert" else ROWS
    work = {"mode": case.what, "num_envs": case.num_envs, "unroll_length": case.unroll_length, "batch_rows": rows}
    sides = {"torchpod": torchpod, "torchrl": torchrl, "numpy": numpy, "gumbel": gumbel}
    call = sides[args.side](case, args.seed)
    rates = {"seconds": args.seconds, "repeats": args.repeats, "packages": ("torch", "torchrl", "numpy")}
    told = report(call, framework=args.side, work=work, rows_per_call=rows, **rates)
    memory_bytes = status_bytes(os.getpid(), "VmHWM")
    print(json.dumps(told | {"memory_bytes": memory_bytes}))


if __name__ == "__main__":
    main()
