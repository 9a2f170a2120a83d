"""The operators of mlp.py on an NVIDIA GPU, in Triton: a small network is one kernel forward and two backward.

A block of threads takes some rows through all layers, with the activations in its registers. Backward, each of a fixed
number of blocks adds up gradients over the rows that it takes in turn, and a second kernel adds up those of the blocks,
always in the same order. Matrix products are in TF32 if torch's are (`torch.set_float32_matmul_precision`); else each
is three products in TF32, of the numbers and of what is left of them, which together lose about as much as one in
float32. (In float32 itself a kernel for 64 x 64 weights spills 20 KB of registers, says `ptxas -v` for sm_90.)
"""

# ruff: noqa: ANN001, ANN202 (what a kernel takes are pointers and numbers of Triton, for which there are no types)
# Triton comes with torch for CUDA alone, makes kernels of functions, and takes one branch of an `if` of constants:
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import itertools
import math
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpod.cpu_kernels import TANH_CLAMP, TANH_P, TANH_Q

ROWS, WARPS = 64, 4
"""Of a block, forward; fewer rows where there are few. So many warps spill nothing, says `ptxas -v` for sm_90."""
ROWS_BACK, WARPS_BACK = 32, 8
"""Of a block, backward."""
INPUTS = 64
"""That are looked at together; with more, the gradient of the first weights is a product of cuBLAS."""
BLOCKS = 264
"""Two for each multiprocessor of an H100: blocks that add up gradients, of all members."""
ALIGNED = 64
"""Where the gradient of a weight may begin, in numbers: inductor's kernels read 16 bytes at a time."""

_CLAMP = tl.constexpr(TANH_CLAMP)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (tl.constexpr(c) for c in TANH_P)
_Q0, _Q1, _Q2, _Q3 = (tl.constexpr(c) for c in TANH_Q)


@triton.jit
def _activated(z, RELU: tl.constexpr):
    """NaN stays NaN."""
    if RELU:
        y = tl.where(z <= 0.0, 0.0, z)
    else:
        x = tl.where(z > _CLAMP, _CLAMP, tl.where(z < -_CLAMP, -_CLAMP, z))
        s = x * x
        p = (((((s * _P0 + _P1) * s + _P2) * s + _P3) * s + _P4) * s + _P5) * s + _P6
        y = x * p / (((s * _Q0 + _Q1) * s + _Q2) * s + _Q3)
    return y


@triton.jit
def _matrix(start, r, c, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Rows `r` and columns `c` of a `[ROWS, COLUMNS]` matrix, 0 beyond."""
    inside = (r < ROWS) & (c < COLUMNS)
    return tl.load(start + r * COLUMNS + c, mask=inside, other=0.0)


@triton.jit
def _layer(h, w, b, IN: tl.constexpr, OUT: tl.constexpr, P_IN: tl.constexpr, P_OUT: tl.constexpr, TF: tl.constexpr):
    """`h [rows, P_IN]` -> `[rows, P_OUT]`; P is what is a power of two."""
    n = tl.arange(0, P_OUT)
    weight = _matrix(w, n[None, :], tl.arange(0, P_IN)[:, None], OUT, IN)
    return tl.dot(h, weight, input_precision=TF) + tl.load(b + n, mask=n < OUT, other=0.0)[None, :]


@triton.jit
def _keep(h, to, at, inside, SIZE: tl.constexpr, P: tl.constexpr):
    n = tl.arange(0, P)[None, :]
    tl.store(to + at * SIZE + n, h, mask=inside & (n < SIZE))


@triton.jit
def _forward(
    x, w0, b0, w1, b1, w2, b2, w3, b3, h1, h2, h3, y, rows,
    LAYERS: tl.constexpr, RELU: tl.constexpr, KEEP: tl.constexpr, TF: tl.constexpr, BLOCK: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    K: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, P4: tl.constexpr,
):  # fmt: skip
    """N0 inputs, then the size of each layer; P the next power of two, K of the inputs that are taken together."""
    member = tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside, at = r < rows, member * rows + r
    n, k = tl.arange(0, P1), tl.arange(0, K)
    z = tl.zeros([BLOCK, P1], tl.float32)
    for start in range(0, N0, K):
        inputs = start + k
        seen = tl.load(x + at * N0 + inputs[None, :], mask=inside & (inputs < N0)[None, :], other=0.0)
        z = tl.dot(seen, _matrix(w0 + member * N1 * N0, n[None, :], inputs[:, None], N1, N0), z, input_precision=TF)
    h = _activated(z + tl.load(b0 + member * N1 + n, mask=n < N1, other=0.0)[None, :], RELU)
    if KEEP:
        _keep(h, h1, at, inside, N1, P1)
    h = _layer(h, w1 + member * N2 * N1, b1 + member * N2, N1, N2, P1, P2, TF)
    if LAYERS == 2:
        _keep(h, y, at, inside, N2, P2)
    else:
        h = _activated(h, RELU)
        if KEEP:
            _keep(h, h2, at, inside, N2, P2)
        g = _layer(h, w2 + member * N3 * N2, b2 + member * N3, N2, N3, P2, P3, TF)
        if LAYERS == 3:
            _keep(g, y, at, inside, N3, P3)
        else:
            g = _activated(g, RELU)
            if KEEP:
                _keep(g, h3, at, inside, N3, P3)
            out = _layer(g, w3 + member * N4 * N3, b3 + member * N4, N3, N4, P3, P4, TF)
            _keep(out, y, at, inside, N4, P4)


@triton.jit
def _through(dz, w, h, IN: tl.constexpr, OUT: tl.constexpr, P_IN: tl.constexpr, P_OUT: tl.constexpr,
             RELU: tl.constexpr, TF: tl.constexpr):  # fmt: skip
    """From the gradient behind a layer to that before the activation `h` that it took."""
    weight = _matrix(w, tl.arange(0, P_OUT)[:, None], tl.arange(0, P_IN)[None, :], OUT, IN)
    dh = tl.dot(dz, weight, input_precision=TF)
    if RELU:
        dh = tl.where(h <= 0.0, 0.0, dh)
    else:
        dh = dh * (1.0 - h * h)
    return dh


@triton.jit
def _hidden(h, at, inside, SIZE: tl.constexpr, P: tl.constexpr):
    n = tl.arange(0, P)[None, :]
    return tl.load(h + at * SIZE + n, mask=inside & (n < SIZE), other=0.0)


@triton.jit
def _put_bias(sums, db, AT: tl.constexpr, OUT: tl.constexpr, P_OUT: tl.constexpr):
    """For each parameter in turn the sums hold those of all members."""
    n = tl.arange(0, P_OUT)
    tl.store(sums + AT * tl.num_programs(1) + tl.program_id(1) * OUT + n, db, mask=n < OUT)


@triton.jit
def _put(sums, dw, AT: tl.constexpr, OUT: tl.constexpr, IN: tl.constexpr, P_OUT: tl.constexpr, P_IN: tl.constexpr):
    n, k = tl.arange(0, P_OUT)[:, None], tl.arange(0, P_IN)[None, :]
    to = sums + AT * tl.num_programs(1) + tl.program_id(1) * (OUT * IN)
    tl.store(to + n * IN + k, dw, mask=(n < OUT) & (k < IN))


@triton.jit
def _backward(
    dy, x, h1, h2, h3, w1, w2, w3, dz1, sums, rows, num_blocks,
    LAYERS: tl.constexpr, RELU: tl.constexpr, TF: tl.constexpr, BLOCK: tl.constexpr, TOTAL: tl.constexpr,
    N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr, N4: tl.constexpr,
    K: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, P4: tl.constexpr,
    W0: tl.constexpr, B0: tl.constexpr, W1: tl.constexpr, B1: tl.constexpr,
    W2: tl.constexpr, B2: tl.constexpr, W3: tl.constexpr, B3: tl.constexpr,
):  # fmt: skip
    """Sizes as of `_forward`; W and B: where the gradient of each weight and bias begins in the sums of a block."""
    member = tl.program_id(1).to(tl.int64)
    dw0, db0 = tl.zeros([P1, K], tl.float32), tl.zeros([P1], tl.float32)
    dw1, db1 = tl.zeros([P2, P1], tl.float32), tl.zeros([P2], tl.float32)
    dw2, db2 = tl.zeros([P3, P2], tl.float32), tl.zeros([P3], tl.float32)
    dw3, db3 = tl.zeros([P4, P3], tl.float32), tl.zeros([P4], tl.float32)
    for block in range(tl.program_id(0), num_blocks, tl.num_programs(0)):
        r = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside, at = r < rows, member * rows + r
        if LAYERS == 4:
            dz3 = _hidden(dy, at, inside, N4, P4)
            y3 = _hidden(h3, at, inside, N3, P3)
            dw3 = tl.dot(tl.trans(dz3), y3, dw3, input_precision=TF)
            db3 += tl.sum(dz3, 0)
            dz2 = _through(dz3, w3 + member * N4 * N3, y3, N3, N4, P3, P4, RELU, TF)
        elif LAYERS == 3:
            dz2 = _hidden(dy, at, inside, N3, P3)
        if LAYERS > 2:
            y2 = _hidden(h2, at, inside, N2, P2)
            dw2 = tl.dot(tl.trans(dz2), y2, dw2, input_precision=TF)
            db2 += tl.sum(dz2, 0)
            dz = _through(dz2, w2 + member * N3 * N2, y2, N2, N3, P2, P3, RELU, TF)
        else:
            dz = _hidden(dy, at, inside, N2, P2)
        y1 = _hidden(h1, at, inside, N1, P1)
        dw1 = tl.dot(tl.trans(dz), y1, dw1, input_precision=TF)
        db1 += tl.sum(dz, 0)
        first = _through(dz, w1 + member * N2 * N1, y1, N1, N2, P1, P2, RELU, TF)
        db0 += tl.sum(first, 0)
        if N0 <= K:
            dw0 = tl.dot(tl.trans(first), _hidden(x, at, inside, N0, K), dw0, input_precision=TF)
        else:
            _keep(first, dz1, at, inside, N1, P1)
    sums += tl.program_id(0).to(tl.int64) * TOTAL * tl.num_programs(1)
    if N0 <= K:
        _put(sums, dw0, W0, N1, N0, P1, K)
    _put_bias(sums, db0, B0, N1, P1)
    _put(sums, dw1, W1, N2, N1, P2, P1)
    _put_bias(sums, db1, B1, N2, P2)
    if LAYERS > 2:
        _put(sums, dw2, W2, N3, N2, P3, P2)
        _put_bias(sums, db2, B2, N3, P3)
    if LAYERS > 3:
        _put(sums, dw3, W3, N4, N3, P4, P3)
        _put_bias(sums, db3, B3, N4, P4)


def forward(x: Tensor, *rest: Any) -> Tensor:
    """The operators mlp2, mlp3, mlp4: `(x [..., B, I], weight0, bias0, ..., activation) -> [..., B, O]`."""
    return _run_forward(x, rest, keep=False)[0]


def forward_kept(x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The operators mlp2_kept, ...: the output, and then the hidden layers."""
    return tuple(_run_forward(x, rest, keep=True))


def _run_forward(x: Tensor, rest: tuple[Any, ...], *, keep: bool) -> list[Tensor]:
    *parameters, activation = rest
    sizes = [x.shape[-1], *(weight.shape[-2] for weight in parameters[::2])]
    layers, (members, rows) = len(parameters) // 2, _lead(x)
    made = [x.new_empty(*x.shape[:-1], size) for size in (sizes[-1], *(sizes[1:-1] if keep else ()))]
    hidden = [*made[1:], *[x] * 3][:3]  # what is not there is not looked at
    block = _block(rows, ROWS)
    _forward[(triton.cdiv(rows, block), members)](
        x, *[*parameters, *[x] * 8][:8], *hidden, made[0], rows,
        LAYERS=layers, RELU=activation == 2, KEEP=keep, num_warps=WARPS, **_common(sizes, block),
    )  # fmt: skip
    return made


def backward(dy: Tensor, x: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """The operators mlp2_backward, ...: `(dy, x, hidden1, ..., weight1, ..., activation)`.

    Returns:
      Gradients of weight0, bias0, ...
    """
    *tensors, activation = rest
    layers, (members, rows) = len(tensors) // 2 + 1, _lead(x)
    hidden, weights = tensors[: layers - 1], tensors[layers - 1 :]
    sizes = [y.shape[-1] for y in (x, *hidden, dy)]
    wide, block = sizes[0] > INPUTS, _block(rows, ROWS_BACK)
    num_blocks = triton.cdiv(rows, block)
    lead, places, shapes, total = x.shape[:-2], [], [], 0
    for inputs, size in itertools.pairwise(sizes):
        for shape in ((size, inputs), (size,)):
            places.append(total)
            shapes.append((*lead, *shape))
            total += -(-math.prod(shape) // ALIGNED) * ALIGNED
    programs = min(num_blocks, max(1, BLOCKS // members))
    sums = x.new_empty(programs, members * total)
    dz1 = torch.empty_like(hidden[0]) if wide else x
    names = ("W0", "B0", "W1", "B1", "W2", "B2", "W3", "B3")
    _backward[(programs, members)](
        dy, x, *[*hidden, *[x] * 3][:3], *[*weights, *[x] * 3][:3], dz1, sums, rows, num_blocks,
        LAYERS=layers, RELU=activation == 2, TOTAL=total, num_warps=WARPS_BACK, **_common(sizes, block),
        **dict(zip(names, [*places, *[0] * 8], strict=False)),
    )  # fmt: skip
    added = sums.sum(0) if programs > 1 else sums[0]
    found = [
        added[members * place : members * place + math.prod(shape)].view(shape)
        for place, shape in zip(places, shapes, strict=True)
    ]
    if wide:
        found[0] = dz1.mT @ x
    return tuple(found)


def _lead(x: Tensor) -> tuple[int, int]:
    """Members and rows."""
    return (x.shape[0], x.shape[1]) if x.ndim == 3 else (1, x.shape[0])


def _block(rows: int, most: int) -> int:
    return min(most, max(16, triton.next_power_of_2(rows)))


def _common(sizes: list[int], block: int) -> dict[str, Any]:
    """What both kernels take."""
    sizes = [*sizes, *[0] * 5][:5]
    padded = [max(16, triton.next_power_of_2(size)) for size in sizes]
    return {
        "TF": "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32",
        "BLOCK": block,
        "K": min(padded[0], INPUTS),
        **{f"N{i}": size for i, size in enumerate(sizes)},
        **{f"P{i}": padded[i] for i in range(1, 5)},
    }
