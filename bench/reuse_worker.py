"""One side of the `reuse` suite: one case with or without `reuse_forward`, one JSON line.

taskset -c 0 python -m torchpod.bench.reuse_worker --case impala_cnn --reuse
"""

import argparse
import json
from typing import Any, NamedTuple

from torchpod.algos.a2c import A2C, A2CConfig
from torchpod.algos.impala import IMPALA, IMPALAConfig
from torchpod.anakin import Anakin
from torchpod.bench.anakin_worker import timed
from torchpod.compile import Compiler
from torchpod.env import Env
from torchpod.envs.bsuite.memory_chain import MemoryChain
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.minatar.breakout import Breakout
from torchpod.learner import LearnerConfig

AGENTS = {"a2c": (A2C, A2CConfig), "impala": (IMPALA, IMPALAConfig)}


class Case(NamedTuple):
    """What is trained."""

    agent: str
    env: type[Env]
    num_envs: int
    iterations: int
    """Within one timed call, half a second or more."""
    network: dict[str, Any]


UNROLL_LENGTH = 16
CASES = {
    "a2c_small/64": Case("a2c", CartPole, 64, 200, {}),
    "a2c_small/1024": Case("a2c", CartPole, 1024, 30, {}),
    "a2c_small/4096": Case("a2c", CartPole, 4096, 8, {}),
    "a2c_wide/1024": Case("a2c", CartPole, 1024, 4, {"hidden": (256, 256)}),
    "a2c_gru/256": Case("a2c", MemoryChain, 256, 20, {"recurrent": 64}),
    "a2c_cnn/256": Case("a2c", Breakout, 256, 2, {"hidden": (128,)}),
    "impala_cnn/256": Case("impala", Breakout, 256, 2, {"hidden": (128,)}),
}
"""Networks: small 2 x 64, wide 2 x 256, gru 2 x 64 and 64 cells, cnn 16 channels of 3 x 3 and 128; all but gru twice,
for policy and value."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=CASES, required=True)
    parser.add_argument("--reuse", action="store_true")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    case = CASES[args.case]
    env, (agent, config) = case.env(), AGENTS[case.agent]
    anakin = Anakin(
        lambda: agent(env.spec, config(reuse_forward=args.reuse, **case.network)),
        env,
        num_envs=case.num_envs,
        unroll_length=UNROLL_LENGTH,
        learner=LearnerConfig(num_epochs=1, num_minibatches=1),
        num_iterations=case.iterations * (1 + args.repeats),
        compiler=Compiler(True),
    )
    print(json.dumps(timed(anakin, "update", case.iterations, args.repeats, seed=args.seed)))


if __name__ == "__main__":
    main()
