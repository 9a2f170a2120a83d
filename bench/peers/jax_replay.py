"""The JAX peer of suite `agents`: DQN on CartPole-v1, SAC and TD3 on Pendulum-v1, which learn from replay.

The work of torchpod's experiments dqn_cartpole, sac_pendulum and td3_pendulum: of these are the environments, the steps
between updates, the rows per update, networks and settings, and the losses, which are the papers'. Environments are
those of jax_ppo.py, and so is the ending: a time limit ends an episode like any other end, as in purejaxrl and rejax,
where torchpod goes on with the value of what follows. Left out is what torchpod has besides: metrics of every update, a
check for gradients that are not finite, norms of gradients that are not clipped, targets of SAC's policy, steps that
only reset. A whole run, from the first parameters on, is one `lax.scan` inside one `jit`; what is kept lies in its
carry and is written in place. What JAX programs of this kind can do better than most is done here: one draw for all
updates of an iteration, and TD3's policy takes no gradient in an update that is not its turn.

    taskset -c 0 python bench/peers/jax_replay.py --case dqn_cartpole

One JSON line; the fields are those of every worker (bench/processes.py, `Measurement`).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax_ppo  # first: it sets what XLA reads once
from jax_ppo import ADAM_B1, ADAM_B2, ADAM_EPS, Episodes

import jax  # isort: skip
import jax.numpy as jnp  # isort: skip
import jaxlib  # isort: skip
from jax import Array, lax  # isort: skip

UNROLL_LENGTH, MIN_SIZE = 4, 1000
EPSILON, EXPLORATION_FRACTION = 0.05, 0.2
LOG_STD = -20.0, 2.0
NOISE_STD, TARGET_NOISE_STD, TARGET_NOISE_CLIP = 0.3, 0.2, 0.5

Layers = list[tuple[Array, Array]]
Params = dict[str, Any]
"""Of each optimizer group its layers: `values`; or `policy`, `critics` (two) and, of SAC, `log_alpha`."""


class Work(NamedTuple):
    """An experiment: environment, settings, and what differs between algorithms."""

    env: jax_ppo.Work
    init: Callable[["Work", Array], Params]
    act: Callable[["Work", Params, Array, Array, Array], Array]  # observation, key, share of the run that is left
    gradients: Callable[["Work", Params, Params, "Rows", Array, Array], Params]  # rows, noise, number of the update
    num_envs: int
    total_env_steps: int
    capacity: int
    batch_size: int
    hidden: int
    learning_rate: float
    discount: float
    updates: int = 8  # per iteration
    n_step: int = 1
    num_noises: int = 0  # standard normals per row
    reward_scale: float = 1.0
    target_rate: float = 0.02
    targets: tuple[str, ...] = ()  # groups that have some
    policy_interval: int = 1  # updates of the critics per update of the policy and of all targets
    max_grad_norm: float = float("inf")
    anneals: bool = False


class Rows(NamedTuple):
    """What an update learns from, `[K, ...]`."""

    observation: Array
    action: Array
    reward: Array  # of n steps
    discount: Array  # of the value that follows
    next_observation: Array


# --- Networks ---------------------------------------------------------------------------------------------------------


def layers(key: Array, sizes: tuple[int, ...], head_gain: float) -> Layers:
    """Orthogonal weights, of gain sqrt 2 but for the last ones, and no biases at first."""
    keys, made = jax.random.split(key, len(sizes) - 1), []
    for i, (k, num_in, num_out) in enumerate(zip(keys, sizes[:-1], sizes[1:], strict=True)):
        gain = head_gain if i == len(sizes) - 2 else 2**0.5
        made.append((jax.nn.initializers.orthogonal(gain)(k, (num_in, num_out), jnp.float32), jnp.zeros(num_out)))
    return made


def mlp(layers: Layers, x: Array) -> Array:
    """Dense layers, relu between them."""
    for weight, bias in layers[:-1]:
        x = jax.nn.relu(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def critics(layers: list[Layers], observation: Array, action: Array) -> Array:
    """What each critic says, `[2, K]`."""
    both = jnp.concatenate([observation, action], -1)
    return jnp.stack([mlp(own, both)[..., 0] for own in layers])


# --- DQN --------------------------------------------------------------------------------------------------------------


def init_dqn(work: Work, key: Array) -> Params:
    """One network."""
    return {"values": layers(key, (work.env.observation_size, work.hidden, work.hidden, work.env.num_actions), 1.0)}


def act_dqn(work: Work, params: Params, observation: Array, key: Array, remaining: Array) -> Array:
    """Epsilon-greedy; epsilon falls from 1 to `EPSILON` in a part of the run."""
    share = jnp.minimum((1.0 - remaining) / EXPLORATION_FRACTION, 1.0)
    random_key, action_key = jax.random.split(key)
    is_random = jax.random.uniform(random_key, observation.shape[:1]) < 1.0 + share * (EPSILON - 1.0)
    any_action = jax.random.randint(action_key, observation.shape[:1], 0, work.env.num_actions)
    return jnp.where(is_random, any_action, mlp(params["values"], observation).argmax(-1))


def dqn_gradients(work: Work, params: Params, targets: Params, rows: Rows, noise: Array, number: Array) -> Params:
    """Double DQN: the online network chooses the action that the target values."""
    best = mlp(params["values"], rows.next_observation).argmax(-1)
    following = mlp(targets["values"], rows.next_observation)
    num_actions = work.env.num_actions
    # A mask: a gather has a scatter for its gradient, which is slow.
    target = rows.reward + rows.discount * (following * jax.nn.one_hot(best, num_actions)).sum(-1)

    def loss(params: Params) -> Array:
        taken = (mlp(params["values"], rows.observation) * jax.nn.one_hot(rows.action, num_actions)).sum(-1)
        return 0.5 * ((target - taken) ** 2).mean()

    return jax.grad(loss)(params)


# --- SAC --------------------------------------------------------------------------------------------------------------


def init_sac(work: Work, key: Array) -> Params:
    """A policy of means and log standard deviations, two critics, the temperature's logarithm."""
    params = init_policy_and_critics(work, key, 2 * work.env.num_actions)
    return params | {"log_alpha": jnp.log(jnp.float32(0.1))}


def init_policy_and_critics(work: Work, key: Array, outputs: int) -> Params:
    """Layers of both."""
    policy_key, *critic_keys = jax.random.split(key, 3)
    size, middle = work.env.observation_size, (work.hidden, work.hidden)
    return {
        "policy": layers(policy_key, (size, *middle, outputs), 0.01),
        "critics": [layers(k, (size + work.env.num_actions, *middle, 1), 1.0) for k in critic_keys],
    }


def sac_normal(policy: Layers, observation: Array) -> tuple[Array, Array]:
    """Mean and log of the standard deviation, before tanh."""
    mean, log_std = jnp.split(mlp(policy, observation), 2, -1)
    return mean, jnp.clip(log_std, *LOG_STD)


def act_sac(work: Work, params: Params, observation: Array, key: Array, remaining: Array) -> Array:
    """A draw, in [-1, 1]."""
    mean, log_std = sac_normal(params["policy"], observation)
    return jnp.tanh(mean + jnp.exp(log_std) * jax.random.normal(key, mean.shape))


def sac_sample(work: Work, policy: Layers, observation: Array, noise: Array) -> tuple[Array, Array]:
    """Actions in [-1, 1], and the log-density of what the environment makes of them."""
    mean, log_std = sac_normal(policy, observation)
    raw = mean + jnp.exp(log_std) * noise
    log_slope = 2.0 * (jnp.log(2.0) - raw - jax.nn.softplus(-2.0 * raw))
    log_normal = -0.5 * noise**2 - log_std - 0.5 * jnp.log(2.0 * jnp.pi)
    assert work.env.half_range is not None
    return jnp.tanh(raw), (log_normal - log_slope - jnp.log(work.env.half_range)).sum(-1)


def sac_gradients(work: Work, params: Params, targets: Params, rows: Rows, noise: Array, number: Array) -> Params:
    """Of critics, policy and temperature, each of its own loss."""
    noise, next_noise = jnp.split(noise, 2, -1)
    alpha = jnp.exp(params["log_alpha"])
    next_action, next_log_prob = sac_sample(work, params["policy"], rows.next_observation, next_noise)
    next_value = critics(targets["critics"], rows.next_observation, next_action).min(0) - alpha * next_log_prob
    target = rows.reward + rows.discount * next_value

    def value_loss(own: list[Layers]) -> Array:
        return 0.5 * ((target - critics(own, rows.observation, rows.action)) ** 2).sum(0).mean()

    def policy_loss(own: Layers) -> tuple[Array, Array]:
        action, log_prob = sac_sample(work, own, rows.observation, noise)
        value = critics(params["critics"], rows.observation, action).min(0)
        return (alpha * log_prob - value).mean(), -log_prob.mean()

    policy, entropy = jax.grad(policy_loss, has_aux=True)(params["policy"])
    assert work.env.half_range is not None
    target_entropy = work.env.num_actions * (jnp.log(work.env.half_range) - 1.0)
    return {
        "policy": policy,
        "critics": jax.grad(value_loss)(params["critics"]),
        "log_alpha": alpha * (entropy - target_entropy),
    }


# --- TD3 --------------------------------------------------------------------------------------------------------------


def init_td3(work: Work, key: Array) -> Params:
    """A policy and two critics."""
    return init_policy_and_critics(work, key, work.env.num_actions)


def act_td3(work: Work, params: Params, observation: Array, key: Array, remaining: Array) -> Array:
    """The policy's action plus noise, in [-1, 1]."""
    action = jnp.tanh(mlp(params["policy"], observation))
    return jnp.clip(action + NOISE_STD * jax.random.normal(key, action.shape), -1.0, 1.0)


def td3_gradients(work: Work, params: Params, targets: Params, rows: Rows, noise: Array, number: Array) -> Params:
    """Of the critics; of the policy where it is its turn."""
    smoothing = jnp.clip(TARGET_NOISE_STD * noise, -TARGET_NOISE_CLIP, TARGET_NOISE_CLIP)
    next_action = jnp.clip(jnp.tanh(mlp(targets["policy"], rows.next_observation)) + smoothing, -1.0, 1.0)
    next_value = critics(targets["critics"], rows.next_observation, next_action).min(0)
    target = rows.reward + rows.discount * next_value

    def value_loss(own: list[Layers]) -> Array:
        return 0.5 * ((target - critics(own, rows.observation, rows.action)) ** 2).sum(0).mean()

    def policy_loss(own: Layers) -> Array:
        action = jnp.tanh(mlp(own, rows.observation))
        return -mlp(params["critics"][0], jnp.concatenate([rows.observation, action], -1)).mean()

    zero = partial(jax.tree.map, jnp.zeros_like)
    policy = lax.cond(number % work.policy_interval == 0, jax.grad(policy_loss), zero, params["policy"])
    return {"policy": policy, "critics": jax.grad(value_loss)(params["critics"])}


# --- What is learned --------------------------------------------------------------------------------------------------


CARTPOLE = {"num_envs": 64, "total_env_steps": 500_000, "capacity": 50_000, "batch_size": 128, "hidden": 128}
PENDULUM = {"num_envs": 8, "total_env_steps": 12_000, "capacity": 100_000, "batch_size": 128, "hidden": 64}
PENDULUM |= {"learning_rate": 2e-3, "discount": 0.95, "reward_scale": 0.1}
WORK = {
    "dqn_cartpole": lambda: Work(
        jax_ppo.WORK["cartpole"](),
        init_dqn,
        act_dqn,
        dqn_gradients,
        **CARTPOLE,
        learning_rate=1e-3,
        discount=0.99,
        n_step=3,
        targets=("values",),
        max_grad_norm=10.0,
        anneals=True,
    ),
    "sac_pendulum": lambda: Work(
        jax_ppo.WORK["pendulum"](), init_sac, act_sac, sac_gradients, **PENDULUM, num_noises=2, targets=("critics",)
    ),
    "td3_pendulum": lambda: Work(
        jax_ppo.WORK["pendulum"](),
        init_td3,
        act_td3,
        td3_gradients,
        **PENDULUM,
        num_noises=1,
        targets=("policy", "critics"),
        policy_interval=2,
    ),
}


# --- Replay -----------------------------------------------------------------------------------------------------------


class Ring(NamedTuple):
    """What was seen: slot `t % S` of step t of all environments, `[S, B, ...]`."""

    observation: Array
    action: Array
    reward: Array
    done: Array


def store(ring: Ring, steps: Ring, iteration: Array) -> Ring:
    """Writes the steps `[T, B, ...]` of an iteration into their slots."""
    slot = iteration * UNROLL_LENGTH % ring.reward.shape[0]
    return jax.tree.map(lambda to, x: lax.dynamic_update_slice_in_dim(to, x, slot, 0), ring, steps)


def draw(work: Work, ring: Ring, iteration: Array, key: Array) -> Rows:
    """Rows `[M, K, ...]` of all updates of an iteration, each window of n steps as likely as any other."""
    num_slots, n = ring.reward.shape[0], work.n_step
    end = (iteration + 1) * UNROLL_LENGTH
    oldest = jnp.maximum(end - num_slots, 0)
    shape = work.updates, work.batch_size
    place = jax.random.randint(key, shape, 0, (end - n - oldest) * work.num_envs)
    first, env = oldest + place // work.num_envs, place % work.num_envs

    def at(x: Array, later: int) -> Array:
        return x.reshape(-1, *x.shape[2:])[(first + later) % num_slots * work.num_envs + env]

    reward, discount = jnp.zeros(shape), jnp.ones(shape)
    for k in range(n):
        reward += discount * at(ring.reward, k)
        discount *= work.discount * (1.0 - at(ring.done, k))
    return Rows(at(ring.observation, 0), at(ring.action, 0), reward, discount, at(ring.observation, n))


# --- Learning ---------------------------------------------------------------------------------------------------------


class Learner(NamedTuple):
    """Parameters, those of the targets, Adam's moments, and the number of updates."""

    params: Params
    targets: Params
    mu: Params
    nu: Params
    count: Array


def update(work: Work, learner: Learner, rows: Rows, noise: Array, rate: Array) -> Learner:
    """One step of Adam for each group whose turn it is, each clipped by its own norm; then the targets follow."""
    number = learner.count + 1
    gradients = work.gradients(work, learner.params, learner.targets, rows, noise, number)
    groups = {"params": {}, "mu": {}, "nu": {}}
    for group, gradient in gradients.items():
        interval = work.policy_interval if group == "policy" else 1
        old = learner.params[group], learner.mu[group], learner.nu[group]
        step = partial(adam, work, gradient, count=number // interval, rate=rate)
        new = step(old) if interval == 1 else lax.cond(number % interval == 0, step, lambda old: old, old)
        for name, x in zip(groups, new, strict=True):
            groups[name][group] = x
    follow = partial(jax.tree.map, lambda to, x: to + work.target_rate * (x - to))
    new_targets = {group: groups["params"][group] for group in work.targets}
    if (interval := work.policy_interval) == 1:
        targets = follow(learner.targets, new_targets)
    else:
        targets = lax.cond(number % interval == 0, follow, lambda old, new: old, learner.targets, new_targets)
    return Learner(targets=targets, count=number, **groups)


def adam(
    work: Work, gradient: Params, old: tuple[Params, Params, Params], *, count: Array, rate: Array
) -> tuple[Params, Params, Params]:
    """Parameters and moments after a step, which is the group's `count`-th."""
    params, mu, nu = old
    if work.max_grad_norm < float("inf"):
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(gradient)))
        scale = jnp.minimum(work.max_grad_norm / norm, 1.0)
        gradient = jax.tree.map(lambda g: g * scale, gradient)
    mu = jax.tree.map(lambda m, g: ADAM_B1 * m + (1 - ADAM_B1) * g, mu, gradient)
    nu = jax.tree.map(lambda v, g: ADAM_B2 * v + (1 - ADAM_B2) * g * g, nu, gradient)
    mu_scale, nu_scale = 1 / (1 - ADAM_B1**count), 1 / (1 - ADAM_B2**count)
    moved = jax.tree.map(lambda p, m, v: p - rate * m * mu_scale / (jnp.sqrt(v * nu_scale) + ADAM_EPS), params, mu, nu)
    return moved, mu, nu


class Carry(NamedTuple):
    """What one iteration hands to the next."""

    learner: Learner
    env_state: Any
    ring: Ring
    key: Array


def init_carry(work: Work, seed: int) -> Carry:
    """Parameters and environments of one seed, and an empty ring."""
    key, params_key, env_key = jax.random.split(jax.random.key(seed), 3)
    params = work.init(work, params_key)
    zeros = partial(jax.tree.map, jnp.zeros_like)
    targets = jax.tree.map(jnp.copy, {group: params[group] for group in work.targets})
    num_slots = -(-work.capacity // (work.num_envs * UNROLL_LENGTH)) * UNROLL_LENGTH
    lead, size = (num_slots, work.num_envs), (work.env.observation_size,)
    action = jnp.zeros(lead, jnp.int32) if work.env.half_range is None else jnp.zeros((*lead, work.env.num_actions))
    return Carry(
        Learner(params, targets, zeros(params), zeros(params), jnp.int32(0)),
        jax.vmap(work.env.reset)(jax.random.split(env_key, work.num_envs)),
        Ring(jnp.zeros((*lead, *size)), action, jnp.zeros(lead), jnp.zeros(lead)),
        key,
    )


def rollout(work: Work, carry: Carry, remaining: Array) -> tuple[Carry, Ring, Episodes]:
    """T steps with the policy."""

    def body(scan_carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], tuple[Ring, Array]]:
        state, key = scan_carry
        key, action_key, step_key = jax.random.split(key, 3)
        observation = jax.vmap(work.env.observe)(state)
        action = work.act(work, carry.learner.params, observation, action_key, remaining)
        for_env = action if work.env.half_range is None else work.env.half_range * action
        state, reward, done, finished_return = jax_ppo.step_all(work.env, step_key, state, for_env)
        done = done.astype(jnp.float32)
        return (state, key), (Ring(observation, action, work.reward_scale * reward, done), finished_return)

    (state, key), (steps, returns) = lax.scan(body, (carry.env_state, carry.key), None, UNROLL_LENGTH)
    episodes = Episodes(jnp.sum(steps.done * returns), jnp.sum(steps.done))
    return carry._replace(env_state=state, key=key), steps, episodes


def fill_iterations(work: Work) -> int:
    """Iterations that only collect; the one after them learns for the first time."""
    enough = max(work.n_step + 2, -(-MIN_SIZE // work.num_envs))
    return -(-enough // UNROLL_LENGTH) - 1


def iterate(work: Work, total: int, learns: bool, carry: Carry, iteration: Array) -> tuple[Carry, Episodes]:
    """T steps, stored, and the updates."""
    remaining = 1.0 - jnp.maximum(iteration - fill_iterations(work), 0) / (total - fill_iterations(work))
    carry, steps, episodes = rollout(work, carry, remaining)
    carry = carry._replace(ring=store(carry.ring, steps, iteration))
    if not learns:
        return carry, episodes
    key, row_key, noise_key = jax.random.split(carry.key, 3)
    rows = draw(work, carry.ring, iteration, row_key)
    noise = jax.random.normal(noise_key, (work.updates, work.batch_size, work.num_noises * work.env.num_actions))
    rate = work.learning_rate * (remaining if work.anneals else 1.0)

    def body(learner: Learner, given: tuple[Rows, Array]) -> tuple[Learner, None]:
        return update(work, learner, *given, rate), None

    learner, _ = lax.scan(body, carry.learner, (rows, noise))
    return carry._replace(learner=learner, key=key), episodes


def run(work: Work, total: int, carry: Carry) -> tuple[Carry, Episodes]:
    """All iterations of a run; the episodes of each, `[iterations]`."""
    before = min(fill_iterations(work), total)
    carry, first = lax.scan(partial(iterate, work, total, False), carry, jnp.arange(before))
    carry, later = lax.scan(partial(iterate, work, total, True), carry, jnp.arange(before, total))
    return carry, jax.tree.map(lambda a, b: jnp.concatenate([a, b]), first, later)


# --- Measuring --------------------------------------------------------------------------------------------------------


def measure(case: str, *, seed: int = 0, steps: int | None = None) -> dict:
    """One run, compiled before; the fields of `Measurement` in bench/processes.py, returns of the last tenth of it.

    Args:
      case: one of `WORK`.
      seed: of parameters and environments.
      steps: of all environments; None for those of the experiment.
    """
    work = WORK[case]()
    per_iteration = UNROLL_LENGTH * work.num_envs
    total = -(-(steps or work.total_env_steps) // per_iteration)
    carry = jax.block_until_ready(jax.jit(partial(init_carry, work))(seed))
    start = time.perf_counter()
    compiled = jax.jit(partial(run, work, total), donate_argnums=0).lower(carry).compile()
    compile_s = time.perf_counter() - start
    start, cpu_start = time.perf_counter(), time.process_time()
    carry, episodes = jax.block_until_ready(compiled(carry))
    wall_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    last = jax.tree.map(lambda x: float(x[-(-9 * total // 10) :].sum()), episodes)
    params, on_cpu = carry.learner.params, jax.default_backend() == "cpu"
    return {
        "framework": "jax",
        "mode": "update",
        "env": case,
        "num_envs": work.num_envs,
        "unroll_length": UNROLL_LENGTH,
        "epochs": 1,
        "minibatches": work.updates,
        "batch_rows": per_iteration,
        "sampled_rows": work.batch_size,
        "param_count": sum(x.size for x in jax.tree.leaves(params)),
        "dtype": str(jax.tree.leaves(params)[0].dtype),
        "device": "cpu" if on_cpu else "cuda",
        "tf32": not on_cpu and jax.config.jax_default_matmul_precision is None,  # what XLA does by default
        "memory_bytes": 0 if on_cpu else jax.local_devices()[0].memory_stats()["peak_bytes_in_use"],
        "iterations": total,
        "total_iterations": total,
        "compile_s": compile_s,
        "env_steps": [total * per_iteration],
        "wall_s": [wall_s],
        "cpu_s": [cpu_s],
        "episode_return": last.return_sum / last.count if last.count else None,
        "episodes": int(last.count),
        "threads": {"cores": len(os.sched_getaffinity(0)), "flags": os.environ.get("XLA_FLAGS", "")},
        "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--case", choices=[*WORK], default="dqn_cartpole")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, help="of all environments; by default those of the experiment")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.device)
    print(json.dumps(measure(args.case, seed=args.seed, steps=args.steps)))


if __name__ == "__main__":
    sys.exit(main())
