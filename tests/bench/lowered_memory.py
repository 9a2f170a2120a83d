"""What a step of a thousand agents allocates, compiled for a GPU; run by test_lowered.py where one can be pretended."""

import json
import math
import re

import torch

from torchpod import random
from torchpod.bench.lowered_worker import lower, pretend
from torchpod.envs import TagContinuous

BUFFER = re.compile(r"empty_strided_cuda\(\(([\d, ]*)\), \([\d, ]*\), torch\.(\w+)\)")
NUM_ENVS = 2

if __name__ == "__main__":
    env = TagContinuous(num_taggers=100, num_runners=900)
    keys = random.split(random.key(0), NUM_ENVS)
    state, _ = env.init(keys)
    action = {g: torch.zeros(NUM_ENVS, n, 2, dtype=torch.int64) for g, n in (env.spec.groups or {}).items()}
    pretend({})
    with torch.no_grad():
        code = lower(env.step, (state, action, keys)).code
    sizes = [
        math.prod(int(n) for n in shape.split(",") if n.strip()) * getattr(torch, dtype).itemsize
        for shape, dtype in BUFFER.findall(code)
    ]
    print(json.dumps({"buffers": len(sizes), "bytes": sum(sizes) / NUM_ENVS, "largest": max(sizes) / NUM_ENVS}))
