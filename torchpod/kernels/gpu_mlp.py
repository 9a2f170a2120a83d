"""Networks of mlp.py on an NVIDIA GPU, in Triton: one or two of them are one kernel forward and two backward.

A block of threads takes some rows through all layers of a network, with the activations in its registers; two networks
with the same inputs, such as a policy and its critic, share a launch. Backward, each of a fixed number of blocks
computes the hidden layers of its rows again, which is quicker than to read them, and adds up gradients over the rows
that it takes in turn; a second kernel adds up those of the blocks, always in the same order. Where inputs are many, the
first hidden layer is kept, and the gradient of the first weights is a product of cuBLAS.

Matrix products are in TF32 if torch's are (`torch.set_float32_matmul_precision`), and then tanh is the GPU's own, which
errs by 2^-11, as does a number that is rounded to TF32, and its derivative, 1 - tanh^2, by twice that. Else each is
three products in TF32, of the numbers and of what is left of them, which together lose about as much as one in float32.
(In float32 itself a kernel for 64 x 64 weights spills 20 KB of registers, says `ptxas -v` for sm_90.)
"""

# ruff: noqa: ANN001, ANN202 (what a kernel takes are pointers and numbers of Triton, for which there are no types)
# Triton comes with torch for CUDA alone, makes kernels of functions, and takes one branch of an `if` of constants:
# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchpod.kernels.cpu_kernels import TANH_CLAMP, TANH_P, TANH_Q
from torchpod.kernels.mlp import MANY_INPUTS

FORWARD, FORWARD_MANY = (64, 64, 3), (128, 32, 3)
"""Rows of a block at most, inputs that it looks at together, and the steps of that loop under way at once; then those
of a network with many inputs. Measured on an H100, as are the next two."""
BACKWARD = 32
"""Rows of a block at most; half of that for four layers whose products are three each, for there is no more memory."""
WARPS = 4
"""Of a block."""
BLOCKS = 264
"""Two for each multiprocessor of an H100: blocks that add up gradients, of all networks and members."""
ADD = 32, 32
"""Blocks whose sums are added at once, and parameters, of a block of threads."""
MULTIPROCESSORS = 132
"""Of an H100: where blocks of fewer rows keep more of them busy, they have fewer."""
ALIGNED = 64
"""Where the gradient of a weight may begin, in numbers: inductor's kernels read 16 bytes at a time."""

_CLAMP = tl.constexpr(TANH_CLAMP)
_P0, _P1, _P2, _P3, _P4, _P5, _P6 = (tl.constexpr(c) for c in TANH_P)
_Q0, _Q1, _Q2, _Q3 = (tl.constexpr(c) for c in TANH_Q)


@triton.jit
def _activated(z, RELU: tl.constexpr, TF: tl.constexpr):
    """NaN stays NaN."""
    if RELU:
        y = tl.where(z <= 0.0, 0.0, z)
    elif TF == "tf32":
        y = tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [z], tl.float32, is_pure=True, pack=1)
    else:
        x = tl.where(z > _CLAMP, _CLAMP, tl.where(z < -_CLAMP, -_CLAMP, z))
        s = x * x
        p = (((((s * _P0 + _P1) * s + _P2) * s + _P3) * s + _P4) * s + _P5) * s + _P6
        y = tl.fdiv(x * p, ((s * _Q0 + _Q1) * s + _Q2) * s + _Q3)
    return y


@triton.jit
def _matrix(start, r, c, rows, COLUMNS: tl.constexpr):
    """Rows `r` and columns `c` of a `[rows, COLUMNS]` matrix, 0 beyond."""
    return tl.load(start + r * COLUMNS + c, mask=(r < rows) & (c < COLUMNS), other=0.0)


@triton.jit
def _weight(w, outputs, IN: tl.constexpr, P_IN: tl.constexpr, P_OUT: tl.constexpr):
    """`[P_OUT, P_IN]`; P is what is a power of two."""
    return _matrix(w, tl.arange(0, P_OUT)[:, None], tl.arange(0, P_IN)[None, :], outputs, IN)


@triton.jit
def _bias(b, outputs, P_OUT: tl.constexpr):
    n = tl.arange(0, P_OUT)
    return tl.load(b + n, mask=n < outputs, other=0.0)[None, :]


@triton.jit
def _layer(h, weight, bias, TF: tl.constexpr):
    """`h [rows, inputs]` -> `[rows, outputs]`."""
    return tl.dot(h, tl.trans(weight), input_precision=TF) + bias


@triton.jit
def _get(h, at, inside, size, P: tl.constexpr):
    n = tl.arange(0, P)[None, :]
    return tl.load(h + at * size + n, mask=inside & (n < size), other=0.0)


@triton.jit
def _keep(h, to, at, inside, size, stride, P: tl.constexpr):
    n = tl.arange(0, P)[None, :]
    tl.store(to + at * stride + n, h, mask=inside & (n < size))


@triton.jit
def _either(first, second, is_second, NETWORKS: tl.constexpr):
    chosen = first
    if NETWORKS == 2:
        chosen = tl.where(is_second, second, first)
    return chosen


@triton.jit
def _first_layer(x, w0, b0, at, inside, RELU: tl.constexpr, TF: tl.constexpr, BLOCK: tl.constexpr,
                 N0: tl.constexpr, N1: tl.constexpr, K: tl.constexpr, P1: tl.constexpr):  # fmt: skip
    n, k = tl.arange(0, P1), tl.arange(0, K)
    z = tl.zeros([BLOCK, P1], tl.float32)
    for start in range(0, N0, K):
        inputs = start + k
        seen = tl.load(x + at * N0 + inputs[None, :], mask=inside & (inputs < N0)[None, :], other=0.0)
        z = tl.dot(seen, _matrix(w0, n[None, :], inputs[:, None], N1, N0), z, input_precision=TF)
    return _activated(z + tl.load(b0 + n, mask=n < N1, other=0.0)[None, :], RELU, TF)


@triton.jit
def _forward(
    x, w0, b0, w1, b1, w2, b2, w3, b3, w0_, b0_, w1_, b1_, w2_, b2_, w3_, b3_, h, h_, y, y_, rows, outputs, outputs_,
    NETWORKS: tl.constexpr, LAYERS: tl.constexpr, RELU: tl.constexpr, KEEP: tl.constexpr, TF: tl.constexpr,
    BLOCK: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    K: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, P_LAST: tl.constexpr, P_OUT: tl.constexpr,
):  # fmt: skip
    """N0 inputs, then the size of each hidden layer; P the next power of two, K of the inputs that are taken together.

    What ends with an underscore belongs to the second network; w3 and b3 to the last layer, 1 and 2 to those between.
    """
    second, member = tl.program_id(0) % NETWORKS == 1, tl.program_id(1).to(tl.int64)
    r = tl.program_id(0) // NETWORKS * BLOCK + tl.arange(0, BLOCK)[:, None]
    inside, at = r < rows, member * rows + r
    outputs = _either(outputs, outputs_, second, NETWORKS)
    w, b = _either(w0, w0_, second, NETWORKS) + member * N1 * N0, _either(b0, b0_, second, NETWORKS) + member * N1
    a = _first_layer(x, w, b, at, inside, RELU, TF, BLOCK, N0, N1, K, P1)
    if KEEP:
        _keep(a, _either(h, h_, second, NETWORKS), at, inside, N1, N1, P1)
    if LAYERS > 2:
        w, b = _either(w1, w1_, second, NETWORKS) + member * N2 * N1, _either(b1, b1_, second, NETWORKS) + member * N2
        a = _activated(_layer(a, _weight(w, N2, N1, P1, P2), _bias(b, N2, P2), TF), RELU, TF)
    if LAYERS > 3:
        w, b = _either(w2, w2_, second, NETWORKS) + member * N3 * N2, _either(b2, b2_, second, NETWORKS) + member * N3
        a = _activated(_layer(a, _weight(w, N3, N2, P2, P3), _bias(b, N3, P3), TF), RELU, TF)
    LAST: tl.constexpr = N1 if LAYERS == 2 else N2 if LAYERS == 3 else N3
    w, b = _either(w3, w3_, second, NETWORKS) + member * outputs * LAST, _either(b3, b3_, second, NETWORKS)
    b += member * outputs
    a = _layer(a, _weight(w, outputs, LAST, P_LAST, P_OUT), _bias(b, outputs, P_OUT), TF)
    _keep(a, _either(y, y_, second, NETWORKS), at, inside, outputs, outputs, P_OUT)


@triton.jit
def _through(dz, weight, h, RELU: tl.constexpr, TF: tl.constexpr):
    """From the gradient behind a layer to that before the activation `h` that it took."""
    dh = tl.dot(dz, weight, input_precision=TF)
    if RELU:
        dh = tl.where(h <= 0.0, 0.0, dh)
    else:
        dh = dh * (1.0 - h * h)
    return dh


@triton.jit
def _put(sums, dw, db, W: tl.constexpr, B: tl.constexpr, outputs, IN: tl.constexpr, P_OUT: tl.constexpr,
         P_IN: tl.constexpr):  # fmt: skip
    """For each parameter in turn the sums of a network hold those of all members."""
    member, members = tl.program_id(1), tl.num_programs(1)
    n, k = tl.arange(0, P_OUT), tl.arange(0, P_IN)[None, :]
    inside = (n < outputs)[:, None] & (k < IN)
    tl.store(sums + W * members + member * outputs * IN + n[:, None] * IN + k, dw, mask=inside)
    tl.store(sums + B * members + member * outputs + n, db, mask=n < outputs)


@triton.jit
def _backward(
    dy, dy_, x, h, h_, w0, b0, w1, b1, w2, b2, w3, w0_, b0_, w1_, b1_, w2_, b2_, w3_, dfirst, sums, rows, num_blocks,
    outputs, outputs_, NETWORKS: tl.constexpr, LAYERS: tl.constexpr, RELU: tl.constexpr, TF: tl.constexpr,
    BLOCK: tl.constexpr, TOTAL: tl.constexpr, N0: tl.constexpr, N1: tl.constexpr, N2: tl.constexpr, N3: tl.constexpr,
    K: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr, P3: tl.constexpr, P_LAST: tl.constexpr, P_OUT: tl.constexpr,
    W0: tl.constexpr, B0: tl.constexpr, W1: tl.constexpr, B1: tl.constexpr,
    W2: tl.constexpr, B2: tl.constexpr, W3: tl.constexpr, B3: tl.constexpr,
):  # fmt: skip
    """As of `_forward`; W and B: where the gradient of each weight and bias begins in the sums of a network.

    `sums [programs, networks, TOTAL * members]`: of a network the first weights of all members, the first biases, ...
    """
    second, member = tl.program_id(0) % NETWORKS == 1, tl.program_id(1).to(tl.int64)
    program, programs = tl.program_id(0) // NETWORKS, tl.num_programs(0) // NETWORKS
    LAST: tl.constexpr = N1 if LAYERS == 2 else N2 if LAYERS == 3 else N3
    outputs = _either(outputs, outputs_, second, NETWORKS)
    dy, h = _either(dy, dy_, second, NETWORKS), _either(h, h_, second, NETWORKS)
    last = _weight(_either(w3, w3_, second, NETWORKS) + member * outputs * LAST, outputs, LAST, P_LAST, P_OUT)
    if N0 <= K:
        first = _weight(_either(w0, w0_, second, NETWORKS) + member * N1 * N0, N1, N0, K, P1)
        bias1 = _bias(_either(b0, b0_, second, NETWORKS) + member * N1, N1, P1)
    if LAYERS > 2:
        weight2 = _weight(_either(w1, w1_, second, NETWORKS) + member * N2 * N1, N2, N1, P1, P2)
        bias2 = _bias(_either(b1, b1_, second, NETWORKS) + member * N2, N2, P2)
    if LAYERS > 3:
        weight3 = _weight(_either(w2, w2_, second, NETWORKS) + member * N3 * N2, N3, N2, P2, P3)
        bias3 = _bias(_either(b2, b2_, second, NETWORKS) + member * N3, N3, P3)
    dw0, db0 = tl.zeros([P1, K], tl.float32), tl.zeros([P1], tl.float32)
    if LAYERS > 2:
        dw1, db1 = tl.zeros([P2, P1], tl.float32), tl.zeros([P2], tl.float32)
    if LAYERS > 3:
        dw2, db2 = tl.zeros([P3, P2], tl.float32), tl.zeros([P3], tl.float32)
    dw3, db3 = tl.zeros([P_OUT, P_LAST], tl.float32), tl.zeros([P_OUT], tl.float32)
    for block in range(program, num_blocks, programs):
        r = block * BLOCK + tl.arange(0, BLOCK)[:, None]
        inside, at = r < rows, member * rows + r
        if N0 <= K:
            y1 = _activated(_layer(_get(x, at, inside, N0, K), first, bias1, TF), RELU, TF)
        else:
            y1 = _get(h, at, inside, N1, P1)
        top = y1
        if LAYERS > 2:
            y2 = _activated(_layer(y1, weight2, bias2, TF), RELU, TF)
            top = y2
        if LAYERS > 3:
            top = _activated(_layer(y2, weight3, bias3, TF), RELU, TF)
        d = _get(dy, at, inside, outputs, P_OUT)
        dw3 = tl.dot(tl.trans(d), top, dw3, input_precision=TF)
        db3 += tl.sum(d, 0)
        d = _through(d, last, top, RELU, TF)
        if LAYERS > 3:
            dw2 = tl.dot(tl.trans(d), y2, dw2, input_precision=TF)
            db2 += tl.sum(d, 0)
            d = _through(d, weight3, y2, RELU, TF)
        if LAYERS > 2:
            dw1 = tl.dot(tl.trans(d), y1, dw1, input_precision=TF)
            db1 += tl.sum(d, 0)
            d = _through(d, weight2, y1, RELU, TF)
        db0 += tl.sum(d, 0)
        if N0 <= K:
            dw0 = tl.dot(tl.trans(d), _get(x, at, inside, N0, K), dw0, input_precision=TF)
        else:
            _keep(d, dfirst + second.to(tl.int32) * N1, at, inside, N1, NETWORKS * N1, P1)
    sums += (program.to(tl.int64) * NETWORKS + second.to(tl.int64)) * TOTAL * tl.num_programs(1)
    if N0 <= K:
        _put(sums, dw0, db0, W0, B0, N1, N0, P1, K)
    else:
        n = tl.arange(0, P1)
        tl.store(sums + B0 * tl.num_programs(1) + tl.program_id(1) * N1 + n, db0, mask=n < N1)
    if LAYERS > 2:
        _put(sums, dw1, db1, W1, B1, N2, N1, P2, P1)
    if LAYERS > 3:
        _put(sums, dw2, db2, W2, B2, N3, N2, P3, P2)
    _put(sums, dw3, db3, W3, B3, outputs, LAST, P_OUT, P_LAST)


@triton.jit
def _add(sums, to, programs, total, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """`sums [programs, total]`, over its rows."""
    c = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    added = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, programs, ROWS):
        r = (start + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        added += tl.load(sums + r * total + c[None, :], mask=(r < programs) & (c < total)[None, :], other=0.0)
    tl.store(to + c, tl.sum(added, 0), mask=c < total)


def forward(x: Tensor, parameters: list[Tensor], networks: int, activation: int, keep: bool) -> list[Tensor]:
    """The operator mlps: `(x [..., B, I], weight0, bias0, ... of each network, how many, activation, keep)`.

    Returns:
      The output of each network, `[..., B, O]`; with `keep` then the first hidden layers.
    """
    sizes, outputs, (members, rows) = _sizes(x, parameters, networks), _outputs(parameters, networks), _lead(x)
    made = [x.new_empty(*x.shape[:-1], size) for size in outputs]
    if keep:
        made += [x.new_empty(*x.shape[:-1], sizes[1]) for _ in range(networks)]
    most, together, stages = FORWARD_MANY if sizes[0] > MANY_INPUTS else FORWARD
    block = _block(rows * networks, most)
    _forward[(networks * triton.cdiv(rows, block), members)](
        x, *_slots(parameters, networks, x), *_two(made[networks:], x), *_two(made[:networks], x), rows,
        outputs[0], outputs[-1], KEEP=keep, RELU=activation == 2, num_warps=WARPS, num_stages=stages,
        **_common(sizes, outputs, networks, block, together),
    )  # fmt: skip
    return made


def backward(
    doutputs: list[Tensor], x: Tensor, hidden: list[Tensor], parameters: list[Tensor], activation: int
) -> list[Tensor]:
    """The operator mlps_backward; `hidden`: the first hidden layers if there are many inputs, else nothing.

    Returns:
      Gradients of `parameters`.
    """
    networks = len(doutputs)
    sizes, outputs, (members, rows) = _sizes(x, parameters, networks), _outputs(parameters, networks), _lead(x)
    wide, block = sizes[0] > MANY_INPUTS, _block(rows, _most_back(len(sizes)))
    num_blocks = triton.cdiv(rows, block)
    # Where the sums of a network's parameters lie, of the larger one: networks differ in their outputs alone.
    places, total = [], 0
    for inputs, size in itertools.pairwise([*sizes, max(outputs)]):
        for number in (0 if wide and not places else size * inputs, size):
            places.append(total)
            total += -(-number // ALIGNED) * ALIGNED
    programs = min(num_blocks, max(1, BLOCKS // (members * networks)))
    sums = x.new_empty(programs, networks * members * total)
    dfirst = x.new_empty(*x.shape[:-1], networks * sizes[1]) if wide else x
    slots = _slots(parameters, networks, x)
    names = [f"{kind}{i}" for i in _layers(len(sizes)) for kind in "WB"]
    at = dict.fromkeys(("W0", "B0", "W1", "B1", "W2", "B2", "W3", "B3"), 0) | dict(zip(names, places, strict=True))
    _backward[(programs * networks, members)](
        *_two(doutputs, x), x, *_two(hidden, x), *slots[:7], *slots[8:15], dfirst, sums, rows, num_blocks,
        outputs[0], outputs[-1], RELU=activation == 2, TOTAL=total, num_warps=WARPS, num_stages=1, **at,
        **_common(sizes, outputs, networks, block, MANY_INPUTS),
    )  # fmt: skip
    added = sums[0]
    if programs > 1:
        added, (tile, columns) = torch.empty_like(added), ADD
        _add[(triton.cdiv(len(added), columns),)](sums, added, programs, len(added), ROWS=tile, COLUMNS=columns)
    first: Sequence[Tensor] = ()
    if wide and x.ndim == 2:  # both in one product, whose rows are theirs
        first = (dfirst.mT @ x).split(sizes[1])
    elif wide:
        first = [own.mT @ x for own in dfirst.split(sizes[1], -1)]
    found = []
    for i, parameter in enumerate(parameters):
        network, number = divmod(i, len(places))
        if wide and number == 0:
            found.append(first[network])
        else:
            begin = members * (network * total + places[number])
            found.append(added[begin : begin + parameter.numel()].view(parameter.shape))
    return found


def precision() -> str:
    """Of products of matrices, as torch's are."""
    return "tf32x3" if torch.get_float32_matmul_precision() == "highest" else "tf32"


def _most_back(layers: int) -> int:
    return BACKWARD // 2 if layers == 4 and precision() == "tf32x3" else BACKWARD


def _lead(x: Tensor) -> tuple[int, int]:
    """Members and rows."""
    return (x.shape[0], x.shape[1]) if x.ndim == 3 else (1, x.shape[0])


def _sizes(x: Tensor, parameters: list[Tensor], networks: int) -> list[int]:
    """Inputs and hidden layers."""
    own = parameters[: len(parameters) // networks]
    return [x.shape[-1], *(weight.shape[-2] for weight in own[:-2:2])]


def _outputs(parameters: list[Tensor], networks: int) -> list[int]:
    own = len(parameters) // networks
    return [parameters[i * own - 1].shape[-1] for i in range(1, networks + 1)]


def _block(rows: int, most: int) -> int:
    """Fewer rows where there are few, so that every multiprocessor has some."""
    return min(most, max(16, triton.next_power_of_2(triton.cdiv(rows, MULTIPROCESSORS))))


def _layers(layers: int) -> list[int]:
    """Numbers of the layers in a kernel's arguments: 3 is the last."""
    return [*range(layers - 1), 3]


def _slots(parameters: list[Tensor], networks: int, nothing: Tensor) -> list[Tensor]:
    """As a kernel takes them; what is not there is not looked at."""
    found = [nothing] * 16
    own = len(parameters) // networks
    for i in range(networks):
        for layer, number in enumerate(_layers(own // 2)):
            at = 8 * i + 2 * number
            found[at : at + 2] = parameters[i * own + 2 * layer : i * own + 2 * layer + 2]
    return found


def _two(tensors: list[Tensor], nothing: Tensor) -> list[Tensor]:
    return [*tensors, nothing, nothing][:2]


def _common(sizes: list[int], outputs: list[int], networks: int, block: int, together: int) -> dict[str, Any]:
    """What both kernels take."""
    hidden = [*sizes[1:], 0, 0][:3]
    padded = [max(16, triton.next_power_of_2(size)) for size in (sizes[0], *hidden)]
    return {
        "NETWORKS": networks,
        "LAYERS": len(sizes),
        "TF": precision(),
        "BLOCK": block,
        "K": min(padded[0], together),
        "N0": sizes[0],
        **{f"N{i}": size for i, size in enumerate(hidden, 1)},
        **{f"P{i}": padded[i] for i in range(1, 4)},
        "P_LAST": padded[len(sizes) - 1],
        "P_OUT": max(16, triton.next_power_of_2(max(outputs))),
    }
