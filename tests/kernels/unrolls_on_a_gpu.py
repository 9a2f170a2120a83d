"""Unrolls as kernels of a GPU, on a CPU: run by test_gpu_unroll.py in a process that has Triton.

For each line of settings: the steps compared with a loop, interpreted; or with --compile, machine code for an H100.
"""

import importlib
import json
import sys

import torch
from torch.utils import _pytree as pytree

from torchpod.algos.ppo import PPO
from torchpod.anakin import Anakin
from torchpod.bench import interpreted
from torchpod.bench.lowered_worker import CAPABILITY, SIZE, OnCpu, pretend
from torchpod.compile import Compiler
from torchpod.compose import load
from torchpod.kernels import gpu_unroll, inductor
from torchpod.kernels.cpu_calls import NotRecordable
from torchpod.makers import make_agent, make_env
from torchpod.rollout import make_step, unroll

LENGTH = 5


class Telling(PPO):
    """Says what it saw, which is part of the carry."""

    def act(self, timestep, state, keys, explore=True):
        output, state = super().act(timestep, state, keys, explore)
        return output._replace(extras=output.extras | {"seen": timestep.observation}), state


def made(overrides):
    """An unroll as a kernel, and the arguments of its first step."""
    config = load(overrides)
    env = make_env(config.env)
    anakin = Anakin(
        make_agent(config.algo, env.spec),
        env,
        num_envs=config.num_envs,
        unroll_length=LENGTH,
        learner=config.algo.learner,
        num_iterations=1000,
        compiler=Compiler(False),
    )
    state, step = anakin.init(config.seed), make_step(anakin.agent, env)
    args = anakin.learner.acting(state.learner, state.iteration), state.carry, state.env_keys, state.actor_keys
    with torch.no_grad():
        result = step(*args)
    graph, *_ = inductor.trace(step, args, device="cuda")
    with OnCpu():
        inductor.simplify(graph)
    return gpu_unroll.GpuUnroll(graph, args, result), step, args


def differences(overrides):
    """The largest difference of a float, in units of the largest number of its tensor, and whether the others agree."""
    looped, step, args = made(overrides)
    with torch.no_grad():
        expected = unroll(step, *args, length=LENGTH)
    last, timesteps, outputs = looped.run(list(pytree.tree_leaves(args)), LENGTH, 0)
    found = last, expected[1]._replace(timestep=timesteps, output=outputs)
    largest, same = 0.0, True
    for x, y in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype)
        if x.is_floating_point():
            largest = max(largest, float((x - y).abs().max() / y.abs().max().clamp(min=1e-6)))
        else:
            same &= torch.equal(x, y)
    return [largest, same]


def compiled(overrides):
    """What ptxas says of registers that are spilled, in bytes."""
    triton, compiler = (importlib.import_module(f"triton.{x}") for x in ("compiler", "backends.compiler"))
    looped, _, args = made(overrides)
    kinds = {torch.float32: "*fp32", torch.float64: "*fp64", torch.int64: "*i64", torch.int32: "*i32"}
    kinds[torch.bool] = "*i1"
    tensors = list(pytree.tree_leaves(args))
    names = looped.kernel.arg_names
    carry = tensors[looped._num_before : looped._num_before + looped._num_carry]
    shown = [x if i in looped._timestep else None for i, x in enumerate(carry)]
    given = [*tensors, *carry, *shown, *looped._outputs[looped._num_carry :]]
    signature = {n: kinds[x.dtype] if x is not None else "constexpr" for n, x in zip(names, given, strict=False)}
    signature |= {"rows": "i32", "length": "i32", "BLOCK": "constexpr", "TF": "constexpr"}
    constants = {"BLOCK": gpu_unroll.BLOCK, "TF": "tf32"}
    constants |= {n: None for n, x in zip(names, given, strict=False) if x is None}
    source = triton.ASTSource(looped.kernel, signature, constants)
    target = compiler.GPUTarget("cuda", CAPABILITY, SIZE["warp_size"])
    kernel = triton.compile(
        source, target=target, options={"num_warps": gpu_unroll.WARPS, "num_stages": gpu_unroll.STAGES}
    )
    return {"shared": kernel.metadata.shared, "lines": looped.source.count("\n"), "ptx": len(kernel.asm["ptx"])}


if __name__ == "__main__":
    check, runs = "--check" in sys.argv, json.loads(sys.argv[1])
    pretend({}, run=check)
    if check:
        interpreted.prepare()
    found = []
    for overrides in runs:
        try:
            found.append(differences(overrides) if check else compiled(overrides))
        except NotRecordable as error:
            found.append(str(error))
    print(json.dumps(found))
