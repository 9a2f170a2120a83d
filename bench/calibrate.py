"""How fast one core multiplies matrices, in NumPy float32: the yardstick that scales the peers' stated figures.

taskset -c 0 python bench/calibrate.py        one JSON line, GFLOP/s (best of 15 samples) per product
"""

import json
import os
import time

# Before NumPy: its BLAS reads them once.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ[_name] = "1"

import numpy as np  # noqa: E402

# The first is a hidden layer of the benchmark's networks on a batch that stays in cache, and scales the figures.
PRODUCTS = ((2048, 64, 64), (512, 512, 512))


def gflops(rows: int, inner: int, columns: int, *, samples: int = 15, sample_s: float = 0.03) -> float:
    """GFLOP/s of `[rows, inner] @ [inner, columns]`, the best of `samples` of about `sample_s` seconds each.

    The best, for other load can only slow a sample down, and a slow yardstick would lower what the peers must reach.
    """
    rng = np.random.default_rng(0)
    a = rng.random((rows, inner), dtype=np.float32)
    b = rng.random((inner, columns), dtype=np.float32)
    out = np.empty((rows, columns), np.float32)
    flop = 2 * rows * inner * columns
    start = time.perf_counter()
    for _ in range(3):
        np.matmul(a, b, out=out)
    calls = max(1, round(3 * sample_s / (time.perf_counter() - start)))
    rates = []
    for _ in range(samples):
        start = time.perf_counter()
        for _ in range(calls):
            np.matmul(a, b, out=out)
        rates.append(calls * flop / (time.perf_counter() - start) / 1e9)
    return max(rates)


if __name__ == "__main__":
    print(json.dumps({"x".join(map(str, product)): round(gflops(*product), 2) for product in PRODUCTS}))
