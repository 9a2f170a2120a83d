"""The torch side of the `anakin` suite: one case, one JSON line, as bench/peers/jax_ppo.py prints it.

taskset -c 0 python -m torchpod.bench.anakin_worker --num-envs 1024 --iterations 2 --repeats 3 --mode update
"""

import argparse
import json

from torchpod.bench.harness import Measurement

MODES = ("env_only", "policy", "update")


def measure(num_envs: int, iterations: int, repeats: int, mode: str, *, warmup: int = 0, seed: int = 0) -> Measurement:
    """Compiles, warms up, then times `repeats` calls of `iterations` iterations each: the work of jax_ppo.py.

    Args:
      num_envs: environments, B.
      iterations: iterations within one timed call.
      repeats: timed calls.
      mode: "env_only" (random actions), "policy" (+ networks, sampling, stored trajectory) or "update" (all of PPO).
      warmup: iterations before the first timed one, rounded up to whole calls, at least one call; the learning rate
        falls to 0 over warm-up and timed iterations together (`total_iterations`).
      seed: of parameters and environments.

    Returns:
      The measurement; `compile_s` is everything from the built agent to the end of the first call, less the time of
      a later call.
    """
    raise NotImplementedError("bench/anakin_worker.py: measure() is not filled in")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=2, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--mode", choices=MODES, default="update")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least one call)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="kept for symmetry: the output is always JSON")
    args = parser.parse_args()
    m = measure(args.num_envs, args.iterations, args.repeats, args.mode, warmup=args.warmup, seed=args.seed)
    print(json.dumps(m))


if __name__ == "__main__":
    main()
