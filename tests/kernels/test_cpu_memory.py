"""Memory of tensors on a CPU: what is freed is given out again, is bounded, and is nobody else's."""

import gc
import subprocess
import sys
import threading

import pytest
import torch

from torchpod.kernels import cpu_memory
from torchpod.kernels.cpu_memory import memory


@pytest.fixture(autouse=True)
def installed():
    cpu_memory.install()
    gc.collect()


def test_blocks_are_aligned_and_lose_at_most_an_eighth(seed):
    generator = torch.Generator().manual_seed(seed)
    sizes = [1, 63, 64, 65, 512, 513, 1023, 1024, 1025, 2**20, *torch.randint(1, 2**22, (200,), generator=generator)]
    for size in map(int, sizes):
        before = memory().used
        x = torch.empty(size, dtype=torch.uint8)
        taken = memory().used - before
        assert size <= taken <= max(size + 63, size * 9 / 8 + 1), size
        assert x.data_ptr() % 64 == 0
        del x
        assert memory().used == before


def test_what_is_freed_is_given_out_again_and_never_to_two():
    x = torch.empty(1000)
    address = x.data_ptr()
    del x
    y = torch.empty(999)
    z = torch.empty(999)
    assert y.data_ptr() == address != z.data_ptr()
    y.fill_(1)
    z.fill_(2)
    assert (y == 1).all() and (z == 2).all()


def test_an_empty_tensor_takes_nothing_and_resizing_copies():
    before = memory().used
    x = torch.empty(0)
    assert memory().used == before
    x.resize_(10).fill_(3)
    x.resize_(100_000)
    assert (x[:10] == 3).all()


def test_what_is_kept_is_bounded_by_what_was_used():
    script = """
import torch
from torchpod.kernels import cpu_memory
cpu_memory.install()
MB = 1 << 20
for size in range(100, 400, 10):  # each of another size: nothing that is kept fits
    torch.empty(size * MB, dtype=torch.uint8)
    m = cpu_memory.memory()
    assert m.used + m.kept <= m.most_used * 5 / 4 + 64 * MB, (size, m)
assert m.most_used < 460 * MB and m.kept > 0, m
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)


def test_more_than_there_is_is_refused_and_what_was_there_stays():
    x = torch.arange(1000)
    before = memory()
    for size in (2**61, 2**46):
        with pytest.raises(RuntimeError, match=r"memory|allocate|[Ss]torage size"):
            torch.empty(size, dtype=torch.uint8)
    after = memory()
    assert (after.used, after.most_used) == (before.used, before.most_used) and torch.equal(x, torch.arange(1000))


def test_the_profiler_sees_it():
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.empty(100_000)
    (event,) = [x for x in profile.key_averages() if x.key == "aten::empty"]
    assert 400_000 <= event.self_cpu_memory_usage <= 450_000


def test_threads_may_free_what_others_made(seed):
    """As the learner frees the unrolls of actors: nothing is lost, nothing is given out twice."""
    before, box, errors = memory().used, [], []

    def work(number):
        generator = torch.Generator().manual_seed(seed + number)
        try:
            for i in range(2000):
                size = int(torch.randint(1, 5000, (), generator=generator))
                x = torch.full((size,), float(i))
                box.append(x)
                if len(box) > 20:
                    y = box.pop(0)
                    if not (y == y[0]).all():
                        errors.append(y)
                if not (x == i).all():
                    errors.append(x)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    box.clear()
    del threads
    gc.collect()
    assert memory().used <= before + 1024


def test_a_process_may_fork_while_others_allocate():
    script = """
import os, threading, torch
from torchpod.kernels import cpu_memory
cpu_memory.install()
stop = threading.Event()
def work():
    while not stop.is_set():
        torch.empty(100)
threads = [threading.Thread(target=work) for _ in range(3)]
for t in threads: t.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        torch.empty(100)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop.set()
for t in threads: t.join()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=60)
