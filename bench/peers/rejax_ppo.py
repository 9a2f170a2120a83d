"""A third-party check of jax_ppo.py: PPO on CartPole-v1 by rejax (https://github.com/keraJLi/rejax), which is not ours.

rejax's own algorithm on gymnax's environment, with the settings of jax_ppo.py: T=128, 4 epochs x 4 minibatches,
separate 2x64 tanh actor and critic, GAE, clipping, entropy, Adam whose rate falls linearly. What rejax does otherwise:
gradients are clipped entry by entry and not by their norm, actor and critic have an Adam each with epsilon 1e-8,
and networks begin with LeCun's weights and not orthogonal ones.

    taskset -c 0 python bench/peers/rejax_ppo.py --num-envs 1024 --iterations 4 --repeats 5

One JSON line; the fields are those of every worker (bench/processes.py, `Measurement`).
"""

import argparse
import json
import os
import time
from importlib import metadata
from typing import Any, NamedTuple

# As in jax_ppo.py: before jax is imported.
ONE_THREAD_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if len(os.sched_getaffinity(0)) == 1:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD_FLAGS}".strip()

import gymnax  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import rejax  # noqa: E402

UNROLL_LENGTH, EPOCHS, MINIBATCHES, LEARNING_RATE = 128, 4, 4, 2.5e-4


class Episodes(NamedTuple):
    """State of an environment, the return so far, and sum and number of the returns of finished episodes."""

    state: Any
    total: Any
    finished_sum: Any
    finished: Any


class Counting:
    """gymnax's environment as rejax 0.1.3 wants it, with one `done` for both ends of an episode; counts episodes."""

    def __init__(self, env):
        self._env = env

    def __getattr__(self, name):
        if name.startswith("__") or name == "_env":  # what copies look for
            raise AttributeError(name)
        return getattr(self._env, name)

    def reset(self, key, params=None):
        observation, state = self._env.reset(key, params)
        return observation, Episodes(state, *jnp.zeros(3))

    def step(self, key, episodes, action, params=None):
        observation, state, reward, terminated, truncated, info = self._env.step(key, episodes.state, action, params)
        done, total = jnp.logical_or(terminated, truncated), episodes.total + reward
        episodes = Episodes(state, total * (1 - done), episodes.finished_sum + total * done, episodes.finished + done)
        return observation, episodes, reward, done, info


def measure(num_envs: int, iterations: int, repeats: int, *, warmup: int = 0, seed: int = 0) -> dict:
    """The arguments are those of jax_ppo.py."""
    warmup_calls = max(1, -(-warmup // iterations))
    total_iterations = iterations * (warmup_calls + repeats)
    call_steps = iterations * UNROLL_LENGTH * num_envs
    env, params = gymnax.make("CartPole-v1")
    ppo = (
        rejax.get_algo("ppo")
        .create(
            env=Counting(env),
            env_params=params,
            agent_kwargs={"activation": "tanh", "hidden_layer_sizes": (64, 64)},
            num_envs=num_envs,
            num_steps=UNROLL_LENGTH,
            num_epochs=EPOCHS,
            num_minibatches=MINIBATCHES,
            learning_rate=lambda count: LEARNING_RATE * (1 - count // (EPOCHS * MINIBATCHES) / total_iterations),
            gamma=0.99,
            gae_lambda=0.95,
            clip_eps=0.2,
            vf_coef=0.5,
            ent_coef=0.01,
            max_grad_norm=0.5,
            # One call of `train` is as many iterations as come before its one evaluation.
            total_timesteps=call_steps,
            eval_freq=call_steps,
            skip_initial_evaluation=True,
        )
        .replace(eval_callback=lambda algo, state, key: ())
    )  # which is left out
    state = jax.block_until_ready(jax.jit(ppo.init_state)(jax.random.PRNGKey(seed)))
    networks = (state.actor_ts.params, state.critic_ts.params)

    start = time.perf_counter()
    train = jax.jit(lambda state: ppo.train(train_state=state)[0], donate_argnums=0).lower(state).compile()
    compile_s = time.perf_counter() - start

    param_count, dtype = sum(x.size for x in jax.tree.leaves(networks)), str(jax.tree.leaves(networks)[0].dtype)
    wall_s, cpu_s, before, after = [], [], (0.0, 0), finished(state)
    for call in range(warmup_calls + repeats):
        start, cpu_start = time.perf_counter(), time.process_time()
        state = jax.block_until_ready(train(state))
        if call >= warmup_calls:
            wall_s.append(time.perf_counter() - start)
            cpu_s.append(time.process_time() - cpu_start)
        before, after = after, finished(state)
    episodes = after[1] - before[1]  # of the last call
    return {
        "framework": "rejax",
        "mode": "update",
        "env": "cartpole",
        "num_envs": num_envs,
        "unroll_length": UNROLL_LENGTH,
        "epochs": EPOCHS,
        "minibatches": MINIBATCHES,
        "batch_rows": UNROLL_LENGTH * num_envs,
        "param_count": param_count,
        "dtype": dtype,
        "iterations": iterations,
        "total_iterations": total_iterations,
        "compile_s": compile_s,
        "env_steps": [call_steps] * repeats,
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "episode_return": (after[0] - before[0]) / episodes if episodes else None,
        "episodes": episodes,
        "threads": {"cores": len(os.sched_getaffinity(0)), "flags": os.environ.get("XLA_FLAGS", "")},
        "versions": {name: metadata.version(name) for name in ("jax", "jaxlib", "gymnax", "rejax")},
    }


def finished(state) -> tuple[float, int]:
    """Sum of the returns of all finished episodes, and how many there were."""
    return float(state.env_state.finished_sum.sum()), int(state.env_state.finished.sum())


def main() -> None:
    """Command line: that of jax_ppo.py, of which rejax does `--mode update` on CartPole."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=["cartpole"], default="cartpole")
    parser.add_argument("--mode", choices=["update"], default="update")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=4, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least one call)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1, help="of torch; ignored here, where the cores decide")
    args = parser.parse_args()
    print(json.dumps(measure(args.num_envs, args.iterations, args.repeats, warmup=args.warmup, seed=args.seed)))


if __name__ == "__main__":
    main()
