"""The JAX peer of the `brax` suite: an environment of Brax stepped in a `lax.scan`, and PPO of brax.training.

`--mode env_only`: random actions, in Brax's own training wrappers, the whole in one program. `--mode update`:
`brax.training.agents.ppo.train` as it is, with the settings of brax_worker.py; a timed call is what Brax calls a
training epoch, of `--iterations` iterations. Episodes are not counted in training: with `--learn` the greedy policy
plays one in each environment afterwards.

    python bench/peers/jax_brax.py --env ant --backend spring --num-envs 256 --mode update --iterations 2 --repeats 3

It uses every core that it is given. One JSON line; the fields are those of every worker (bench/processes.py,
`Measurement`).
"""

import argparse
import functools
import json
import os
import time
from importlib import metadata

import jax
import jax.numpy as jnp
from brax import envs
from brax.training.agents.ppo import networks, train
from flax import linen

UNROLL_LENGTH, EPOCHS, MINIBATCHES, EPISODE_LENGTH = 32, 4, 4, 1000

# Brax 0.14.2 asks for what JAX 0.10 has no longer: a copy for each device.
jax.device_put_replicated = lambda tree, devices: jax.tree.map(lambda x: jnp.stack([x] * len(devices)), tree)


def make_env(name: str, backend: str | None):
    return envs.get_environment(name, **({"backend": backend} if backend else {}))


def step(env, num_envs: int, steps: int, repeats: int, seed: int) -> dict:
    """Random actions: `repeats` timed calls of `steps` steps, after one that compiles."""
    env = envs.training.wrap(env, episode_length=EPISODE_LENGTH)

    def body(carry, _):
        state, key = carry
        key, own = jax.random.split(key)
        state = env.step(state, jax.random.uniform(own, (num_envs, env.action_size), minval=-1.0, maxval=1.0))
        return (state, key), state.reward.sum()

    def strong(tree):  # a scan's first carry must have the types of all others
        return jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), tree)

    def run(carry):
        carry, rewards = jax.lax.scan(body, carry, None, steps)
        return strong(carry), rewards.sum()

    run, times = jax.jit(run, donate_argnums=0), [clock()]
    key, key_reset = jax.random.split(jax.random.PRNGKey(seed))
    carry = jax.jit(lambda keys: strong(env.reset(keys)))(jax.random.split(key_reset, num_envs)), key
    total = 0.0
    for _ in range(1 + repeats):
        carry, reward = jax.block_until_ready(run(carry))
        times.append(clock())
        total += float(reward)
    mean = total / (steps * num_envs * (1 + repeats))
    return times_of(times) | {
        "unroll_length": steps,
        "dtype": str(carry[0].obs.dtype),
        "iterations": 1,
        "episode_return": mean,  # reward per step
    }


def ppo(env, num_envs: int, iterations: int, repeats: int, warmup: int, learn: bool, seed: int) -> dict:
    """PPO: `repeats` timed epochs of `iterations` iterations, after those that compile, two, and warm up."""
    warmup_calls, calls = max(2, -(-warmup // iterations)), []
    num_calls, times = warmup_calls + repeats, [clock()]

    def mark(num_steps, make_policy, params):  # before the first epoch, and after each
        calls.append((make_policy, params))
        times.append(clock())

    train.train(
        env,
        num_timesteps=num_calls * iterations * UNROLL_LENGTH * num_envs,
        episode_length=EPISODE_LENGTH,
        num_envs=num_envs,
        unroll_length=UNROLL_LENGTH,
        batch_size=num_envs // MINIBATCHES,  # environments in a minibatch
        num_minibatches=MINIBATCHES,
        num_updates_per_batch=EPOCHS,
        learning_rate=3e-4,
        entropy_cost=0.01,
        discounting=0.99,
        gae_lambda=0.95,
        clipping_epsilon=0.2,
        vf_loss_coefficient=0.5,
        max_grad_norm=0.5,
        network_factory=functools.partial(
            networks.make_ppo_networks,
            policy_hidden_layer_sizes=(64, 64),
            value_hidden_layer_sizes=(64, 64),
            activation=linen.tanh,
            distribution_type="normal",
            noise_std_type="log",
        ),
        seed=seed,
        num_evals=1 + num_calls,
        run_evals=False,
        policy_params_fn=mark,
    )
    make_policy, params = calls[-1]
    leaves = jax.tree.leaves(params[1:])  # those before are the normalizer's
    return times_of([times[0], *times[2:]], warmup_calls) | {
        "unroll_length": UNROLL_LENGTH,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "param_count": sum(x.size for x in leaves),
        "dtype": ",".join(sorted({str(x.dtype) for x in leaves})),
        "iterations": iterations,
        "total_iterations": num_calls * iterations,
        "episode_return": play(env, make_policy(params, deterministic=True), num_envs, seed) if learn else None,
        "episodes": num_envs if learn else 0,
    }


def play(env, policy, num_envs: int, seed: int) -> float:
    """The mean return of one episode in each environment."""
    env = envs.training.EpisodeWrapper(envs.training.VmapWrapper(env), EPISODE_LENGTH, 1)

    def body(carry, _):
        state, alive, total = carry
        action, _ = policy(state.obs, jax.random.PRNGKey(0))
        state = env.step(state, action)
        return (state, alive * (1 - state.done), total + alive * state.reward), None

    @jax.jit
    def run(keys):
        carry = env.reset(keys), jnp.ones(num_envs), jnp.zeros(num_envs)
        return jax.lax.scan(body, carry, None, EPISODE_LENGTH)[0][2].mean()

    return float(run(jax.random.split(jax.random.PRNGKey(seed + 1), num_envs)))


def clock() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def times_of(times: list[tuple[float, float]], warmup_calls: int = 1) -> dict:
    """Of the start and the end of each call; what warming up takes longer than other calls is compilation."""
    wall, cpu = ([b - a for a, b in zip(column, column[1:], strict=False)] for column in zip(*times, strict=True))
    warm, wall_s = wall[:warmup_calls], wall[warmup_calls:]
    return {"compile_s": sum(warm) - len(warm) * min(wall_s), "wall_s": wall_s, "cpu_s": cpu[warmup_calls:]}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", required=True)
    parser.add_argument("--backend")
    parser.add_argument("--num-envs", type=int, default=256)
    parser.add_argument("--mode", choices=["env_only", "update"], default="update")
    parser.add_argument("--iterations", type=int, default=4, help="within a timed call; of env_only, steps")
    parser.add_argument("--repeats", type=int, default=3, help="timed calls")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least two calls)")
    parser.add_argument("--learn", action="store_true", help="play episodes afterwards")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    env = make_env(args.env, args.backend)
    if args.mode == "env_only":
        found = step(env, args.num_envs, args.iterations, args.repeats, args.seed)
    else:
        found = ppo(env, args.num_envs, args.iterations, args.repeats, args.warmup, args.learn, args.seed)
    call_steps = found["iterations"] * found["unroll_length"] * args.num_envs
    measurement = {
        "framework": "brax",
        "mode": args.mode,
        "env": args.env,
        "num_envs": args.num_envs,
        "epochs": 0,
        "minibatches": 0,
        "batch_rows": found["unroll_length"] * args.num_envs,
        "param_count": 0,
        "total_iterations": args.repeats + 1,
        "env_steps": [call_steps] * args.repeats,
        "episodes": 0,
        "threads": {"cores": len(os.sched_getaffinity(0)), "flags": os.environ.get("XLA_FLAGS", "")},
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "brax")},
    }
    print(json.dumps(measurement | found))


if __name__ == "__main__":
    main()
