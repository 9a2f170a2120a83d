"""The JAX peer of the `envs` suite: an environment of gymnax under random actions, one JSON line.

As gymnax is used by purejaxrl: `env.step` with its auto-reset mapped over environments that have a key each, actions
drawn for all from one key, in one `lax.scan` inside one `jit`; each step makes its observation. (A key per environment
for the actions too, as `action_space.sample` wants it, is slower; one key for all environments is faster, and resets
them all alike.)

    taskset -c 0 python bench/peers/jax_envs.py --peer Catch-bsuite '{}' --num-envs 2048 --steps 2000 --repeats 3
"""

import argparse
import importlib.metadata
import json
import os
import time

ONE_THREAD_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if len(os.sched_getaffinity(0)) == 1:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD_FLAGS}".strip()

import gymnax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", help="torchpod's name; ignored here")
    parser.add_argument("--arguments", help="of torchpod's environment; ignored here")
    parser.add_argument("--num-envs", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--peer", nargs=2, required=True, help="gymnax's name, and arguments as JSON")
    args = parser.parse_args()
    name, arguments = args.peer[0], json.loads(args.peer[1])
    env, params = gymnax.make(name, **arguments)
    n = args.num_envs

    space = env.action_space(params)

    def draw(key):
        if isinstance(space, gymnax.environments.spaces.Discrete):
            return jax.random.randint(key, (n,), 0, space.n)
        return jax.random.uniform(key, (n, *space.shape), minval=space.low, maxval=space.high)

    def step(carry, _):
        key, observation, state, total = carry
        key, key_action, key_step = jax.random.split(key, 3)
        action = draw(key_action)
        observation, state, reward, _, _, _ = jax.vmap(env.step, in_axes=(0, 0, 0, None))(
            jax.random.split(key_step, n), state, action, params
        )
        return (key, observation, state, total + reward.sum()), None

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, None, args.steps)[0], donate_argnums=0)
    key, key_reset = jax.random.split(jax.random.PRNGKey(args.seed))
    observation, state = jax.vmap(env.reset, in_axes=(0, None))(jax.random.split(key_reset, n), params)
    # A scan wants the types of its first carry to be those of all others.
    carry = (key, observation, state, jnp.float32(0))
    like = jax.eval_shape(lambda c: step(c, None)[0], carry)
    carry = jax.tree.map(lambda x, t: jnp.asarray(x).astype(t.dtype).reshape(t.shape), carry, like)
    wall_s, cpu_s, totals = [], [], []
    began = time.perf_counter()
    carry = jax.block_until_ready(run(carry))
    first_s = time.perf_counter() - began
    for _ in range(args.repeats):
        wall, cpu, before = time.perf_counter(), time.process_time(), float(carry[3])
        carry = jax.block_until_ready(run(carry))
        wall_s.append(time.perf_counter() - wall)
        cpu_s.append(time.process_time() - cpu)
        totals.append(float(carry[3]) - before)
    print(
        json.dumps(
            {
                "framework": "jax",
                "mode": "env_only",
                "num_envs": n,
                "unroll_length": args.steps,
                "epochs": 0,
                "minibatches": 0,
                "batch_rows": args.steps * n,
                "param_count": 0,
                "dtype": "float32",
                "iterations": 1,
                "total_iterations": args.repeats + 1,
                "compile_s": first_s - min(wall_s),
                "env_steps": [n * args.steps] * args.repeats,
                "wall_s": wall_s,
                "cpu_s": cpu_s,
                "episode_return": sum(totals) / (n * args.steps * args.repeats),
                "episodes": 0,
                "threads": {"xla_flags": os.environ.get("XLA_FLAGS", ""), "affinity": len(os.sched_getaffinity(0))},
                "versions": {name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "gymnax")},
            }
        )
    )


if __name__ == "__main__":
    main()
