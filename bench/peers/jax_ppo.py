"""The JAX peer of the suites `anakin` and `gpu`: PPO, the work of purejaxrl's `ppo.py`.

T=128 steps, 4 epochs x M minibatches over a random permutation of the T*B rows, separate 2x64 actor and critic, GAE,
clipped objective and clipped values, Adam with linear decay. CartPole-v1 and Pendulum-v1 (dynamics, reset keys and
auto-reset as gymnax has them), networks and optimizer are written out here; MinAtar's Breakout is gymnax's own, with
the settings that purejaxrl has for MinAtar; Pendulum has settings with which it is learned, for with those of CartPole
it is not, by either side. As in purejaxrl, a time limit ends an episode like any other end. The whole training is one
`lax.scan` inside one `jit` with donated buffers: the host calls it once per timed repeat. What purejaxrl has not: on a
CPU a minibatch's gradient is summed over chunks that fit the cache, and shuffles sort integers; both are faster.

    taskset -c 0 python bench/peers/jax_ppo.py --num-envs 1024 --iterations 4 --repeats 5

One JSON line per run; the fields are those of every worker (bench/processes.py, `Measurement`). `--mode env_only`
steps the environment with random actions; `--mode policy` adds networks, sampling and the stored trajectory;
`--mode update` is the whole algorithm. With `--rounds N` it compiles and warms up, prints a line, and then measures
once for each line that it reads (bench/served.py).
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib import metadata
from typing import Any, NamedTuple

# Before jax is imported: XLA reads its flags once. One core is the caller's `taskset`; these keep XLA on a CPU from
# splitting work for a pool that it does not have.
ONE_THREAD_FLAGS = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
if len(os.sched_getaffinity(0)) == 1 and "cuda" not in sys.argv:
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {ONE_THREAD_FLAGS}".strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import jaxlib  # noqa: E402
from jax import Array, lax  # noqa: E402

UNROLL_LENGTH, EPOCHS = 128, 4
GAE_LAMBDA, CLIP, VALUE_COST = 0.95, 0.2, 0.5
# On a CPU, a minibatch's gradient is summed over chunks of at most this many rows, whose activations stay in the cache.
CHUNK_ROWS = 2048
MAX_GRAD_NORM, ADAM_B1, ADAM_B2, ADAM_EPS, HIDDEN = 0.5, 0.9, 0.999, 1e-5, 64

Params = dict[str, Any]
"""Of actor and critic, the layers `[(weight, bias), ...]`; for continuous actions, `log_std [A]`."""


# --- CartPole-v1 ------------------------------------------------------------------------------------------------------


class CartPole(NamedTuple):
    """State of one environment; `episode_return` is what gymnax's LogWrapper adds."""

    x: Array
    x_dot: Array
    theta: Array
    theta_dot: Array
    time: Array
    episode_return: Array


def reset(key: Array) -> CartPole:
    """A fresh state, each variable uniform in [-0.05, 0.05)."""
    x, x_dot, theta, theta_dot = jax.random.uniform(key, (4,), minval=-0.05, maxval=0.05)
    return CartPole(x, x_dot, theta, theta_dot, jnp.int32(0), jnp.float32(0))


def observe(state: CartPole) -> Array:
    """`[4]` float32."""
    return jnp.stack([state.x, state.x_dot, state.theta, state.theta_dot])


def step(key: Array, state: CartPole, action: Array) -> tuple[CartPole, Array, Array, Array]:
    """One Euler step of 0.02 s, then auto-reset: returns state, reward, done and the return of a finished episode."""
    force = 10.0 * (2.0 * action - 1.0)
    cos, sin = jnp.cos(state.theta), jnp.sin(state.theta)
    push = (force + 0.05 * state.theta_dot**2 * sin) / 1.1
    theta_acc = (9.8 * sin - cos * push) / (0.5 * (4.0 / 3.0 - 0.1 * cos**2 / 1.1))
    x_acc = push - 0.05 * theta_acc * cos / 1.1
    reward = jnp.float32(1.0)
    moved = CartPole(
        x=state.x + 0.02 * state.x_dot,
        x_dot=state.x_dot + 0.02 * x_acc,
        theta=state.theta + 0.02 * state.theta_dot,
        theta_dot=state.theta_dot + 0.02 * theta_acc,
        time=state.time + 1,
        episode_return=state.episode_return + reward,
    )
    limit = 12 * 2 * jnp.pi / 360
    done = (jnp.abs(moved.x) > 2.4) | (jnp.abs(moved.theta) > limit) | (moved.time >= 500)
    _, reset_key = jax.random.split(key)
    fresh = reset(reset_key)
    state = jax.tree.map(partial(jnp.where, done), fresh, moved)
    return state, reward, done, moved.episode_return


# --- Pendulum-v1 ------------------------------------------------------------------------------------------------------


class Pendulum(NamedTuple):
    """State of one environment: angle from upright (rad), angular velocity (rad/s)."""

    theta: Array
    theta_dot: Array
    time: Array
    episode_return: Array


def reset_pendulum(key: Array) -> Pendulum:
    """Any angle, velocities in [-1, 1)."""
    high = jnp.array([jnp.pi, 1.0])
    theta, theta_dot = jax.random.uniform(key, (2,), minval=-high, maxval=high)
    return Pendulum(theta, theta_dot, jnp.int32(0), jnp.float32(0))


def observe_pendulum(state: Pendulum) -> Array:
    """`[3]` float32: cosine, sine, angular velocity."""
    return jnp.stack([jnp.cos(state.theta), jnp.sin(state.theta), state.theta_dot])


def step_pendulum(key: Array, state: Pendulum, action: Array) -> tuple[Pendulum, Array, Array, Array]:
    """As `step`, for an action `[1]` in N m: one semi-implicit Euler step of 0.05 s."""
    torque = jnp.clip(action[0], -2.0, 2.0)
    angle = (state.theta + jnp.pi) % (2 * jnp.pi) - jnp.pi
    reward = -(angle**2 + 0.1 * state.theta_dot**2 + 0.001 * torque**2)
    theta_dot = state.theta_dot + 0.05 * (15.0 * jnp.sin(state.theta) + 3.0 * torque)
    theta_dot = jnp.clip(theta_dot, -8.0, 8.0)
    episode_return = state.episode_return + reward
    moved = Pendulum(state.theta + 0.05 * theta_dot, theta_dot, state.time + 1, episode_return)
    done = moved.time >= 200
    _, reset_key = jax.random.split(key)
    state = jax.tree.map(partial(jnp.where, done), reset_pendulum(reset_key), moved)
    return state, reward, done, episode_return


# --- What is learned --------------------------------------------------------------------------------------------------


class Work(NamedTuple):
    """An environment, and PPO's settings for it."""

    reset: Callable[[Array], Any]  # key -> state
    observe: Callable[[Any], Array]  # state -> [O] float32
    step: Callable[[Array, Any, Array], tuple[Any, Array, Array, Array]]
    observation_size: int
    num_actions: int  # or, of continuous actions, A
    activation: Callable[[Array], Array]
    minibatches: int
    learning_rate: float
    versions: dict[str, str]  # of what the environment comes from
    half_range: float | None = None  # of continuous actions, which lie around 0; None: discrete ones
    discount: float = 0.99
    entropy_cost: float = 0.01
    reward_scale: float = 1.0


class Breakout(NamedTuple):
    """State of one of gymnax's environments, and what gymnax's LogWrapper adds."""

    state: Any
    episode_return: Array


def minatar_breakout() -> Work:
    """Of gymnax, which need not be installed for CartPole."""
    import gymnax

    env, params = gymnax.make("Breakout-MinAtar")

    def step(key: Array, breakout: Breakout, action: Array) -> tuple[Breakout, Array, Array, Array]:
        _, state, reward, terminated, truncated, _ = env.step(key, breakout.state, action, params)
        done = terminated | truncated
        episode_return = breakout.episode_return + reward
        return Breakout(state, episode_return * (1 - done)), reward, done, episode_return

    return Work(
        reset=lambda key: Breakout(env.reset(key, params)[1], jnp.float32(0)),
        observe=lambda breakout: env.get_obs(breakout.state).ravel(),
        step=step,
        observation_size=400,
        num_actions=env.num_actions,
        activation=jax.nn.relu,
        minibatches=8,
        learning_rate=5e-3,
        versions={"gymnax": metadata.version("gymnax")},
    )


WORK = {
    "cartpole": lambda: Work(reset, observe, step, 4, 2, jnp.tanh, 4, 2.5e-4, {}),
    "pendulum": lambda: Work(
        reset_pendulum,
        observe_pendulum,
        step_pendulum,
        observation_size=3,
        num_actions=1,
        activation=jnp.tanh,
        minibatches=4,
        learning_rate=1e-3,
        versions={},
        half_range=2.0,
        discount=0.95,
        entropy_cost=0.0,
        reward_scale=0.1,
    ),
    "minatar_breakout": minatar_breakout,
}


# --- Networks and optimizer -------------------------------------------------------------------------------------------


def init_params(work: Work, key: Array) -> Params:
    """Orthogonal weights (gain sqrt 2; 0.01 for the policy's head, 1 for the value's), zero biases and log-std."""

    def tower(key: Array, outputs: int, head_gain: float) -> list[tuple[Array, Array]]:
        first = (work.observation_size, HIDDEN, 2**0.5)
        sizes = [first, (HIDDEN, HIDDEN, 2**0.5), (HIDDEN, outputs, head_gain)]
        keys = jax.random.split(key, len(sizes))
        orthogonal = jax.nn.initializers.orthogonal
        return [(orthogonal(g)(k, (i, o), jnp.float32), jnp.zeros(o)) for k, (i, o, g) in zip(keys, sizes, strict=True)]

    actor_key, critic_key = jax.random.split(key)
    towers = {"actor": tower(actor_key, work.num_actions, 0.01), "critic": tower(critic_key, 1, 1.0)}
    return towers if work.half_range is None else towers | {"log_std": jnp.zeros(work.num_actions)}


def mlp(work: Work, layers: list[tuple[Array, Array]], x: Array) -> Array:
    """Three dense layers, the activation between them."""
    for weight, bias in layers[:-1]:
        x = work.activation(x @ weight + bias)
    weight, bias = layers[-1]
    return x @ weight + bias


def policy(work: Work, params: Params, observation: Array) -> tuple[Array, Array]:
    """`[..., A]` log-probabilities, or means of continuous actions in half ranges; and `[...]` values."""
    output, value = mlp(work, params["actor"], observation), mlp(work, params["critic"], observation)[..., 0]
    return jax.nn.log_softmax(output) if work.half_range is None else output, value


def sample(work: Work, params: Params, key: Array, output: Array) -> tuple[Array, Array]:
    """Actions `[B]` or `[B, A]`, as drawn from what `policy` said, and as the environment takes them."""
    if work.half_range is None:
        action = jax.random.categorical(key, output)
        return action, action
    action = output + jnp.exp(params["log_std"]) * jax.random.normal(key, output.shape)
    return action, work.half_range * action


def random_action(work: Work, key: Array, num_envs: int) -> Array:
    """As the environment takes them, uniform."""
    if work.half_range is None:
        return jax.random.randint(key, (num_envs,), 0, work.num_actions)
    return jax.random.uniform(key, (num_envs, work.num_actions), minval=-work.half_range, maxval=work.half_range)


def log_prob_and_entropy(work: Work, params: Params, output: Array, action: Array) -> tuple[Array, Array]:
    """Of actions as drawn, `[...]` each; the entropy of a normal policy is the same everywhere, `[]`."""
    if work.half_range is None:
        # A mask: a gather has a scatter for its gradient, which is slow.
        log_prob = jnp.sum(jax.nn.one_hot(action, output.shape[-1]) * output, axis=-1)
        return log_prob, -(jnp.exp(output) * output).sum(-1)
    log_std = params["log_std"]
    z = (action - output) * jnp.exp(-log_std)
    log_prob = (-0.5 * z * z - log_std - 0.5 * jnp.log(2 * jnp.pi)).sum(-1)
    return log_prob, (log_std + 0.5 * jnp.log(2 * jnp.pi * jnp.e)).sum(-1)


class Adam(NamedTuple):
    """Moments and step count."""

    mu: Params
    nu: Params
    count: Array


def adam_step(work: Work, params: Params, opt: Adam, grads: Params, total_iterations: int) -> tuple[Params, Adam]:
    """Global-norm clip, Adam, learning rate falling linearly per iteration (not per minibatch)."""
    norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
    scale = jnp.where(norm < MAX_GRAD_NORM, 1.0, MAX_GRAD_NORM / norm)
    grads = jax.tree.map(lambda g: g * scale, grads)
    iteration = opt.count // (EPOCHS * work.minibatches)
    rate = work.learning_rate * (1.0 - iteration / total_iterations)
    count = opt.count + 1
    mu = jax.tree.map(lambda m, g: ADAM_B1 * m + (1 - ADAM_B1) * g, opt.mu, grads)
    nu = jax.tree.map(lambda v, g: ADAM_B2 * v + (1 - ADAM_B2) * g * g, opt.nu, grads)
    mu_scale, nu_scale = 1 / (1 - ADAM_B1**count), 1 / (1 - ADAM_B2**count)
    params = jax.tree.map(lambda p, m, v: p - rate * m * mu_scale / (jnp.sqrt(v * nu_scale) + ADAM_EPS), params, mu, nu)
    return params, Adam(mu, nu, count)


# --- PPO --------------------------------------------------------------------------------------------------------------


class Carry(NamedTuple):
    """What one iteration hands to the next."""

    params: Params
    opt: Adam
    env_state: Any
    key: Array


class Transition(NamedTuple):
    """One step of all environments; stacked by the scan to `[T, B, ...]`."""

    observation: Array
    action: Array
    log_prob: Array
    value: Array
    reward: Array
    done: Array
    finished_return: Array


class Episodes(NamedTuple):
    """Sum of the returns of finished episodes, and how many there were."""

    return_sum: Array
    count: Array


def init_carry(work: Work, seed: int, num_envs: int) -> Carry:
    """Parameters, optimizer and environments of one seed."""
    key, params_key, env_key = jax.random.split(jax.random.key(seed), 3)
    params = init_params(work, params_key)
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return Carry(
        params,
        Adam(zeros(params), zeros(params), jnp.int32(0)),
        jax.vmap(work.reset)(jax.random.split(env_key, num_envs)),
        key,
    )


def step_all(work: Work, key: Array, state: Any, action: Array) -> tuple[Any, Array, Array, Array]:
    """`step` of every environment, each with its own key."""
    return jax.vmap(work.step)(jax.random.split(key, action.shape[0]), state, action)


def random_rollout(work: Work, carry: Carry) -> tuple[Carry, Episodes]:
    """T steps with random actions: the environment alone."""

    num_envs = jax.tree.leaves(carry.env_state)[0].shape[0]

    def body(scan_carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Array]:
        state, key = scan_carry
        key, action_key, step_key = jax.random.split(key, 3)
        action = random_action(work, action_key, num_envs)
        state, _, done, finished_return = step_all(work, step_key, state, action)
        return (state, key), jnp.stack([jnp.sum(done * finished_return), jnp.sum(done)])

    (state, key), finished = lax.scan(body, (carry.env_state, carry.key), None, UNROLL_LENGTH)
    return carry._replace(env_state=state, key=key), Episodes(*finished.sum(0))


def rollout(work: Work, carry: Carry) -> tuple[Carry, Transition, Episodes]:
    """T steps with the policy; the trajectory is stored."""

    def body(scan_carry: tuple[Any, Array], _: None) -> tuple[tuple[Any, Array], Transition]:
        state, key = scan_carry
        key, action_key, step_key = jax.random.split(key, 3)
        observation = jax.vmap(work.observe)(state)
        output, value = policy(work, carry.params, observation)
        action, for_env = sample(work, carry.params, action_key, output)
        log_prob, _ = log_prob_and_entropy(work, carry.params, output, action)
        state, reward, done, finished_return = step_all(work, step_key, state, for_env)
        reward = work.reward_scale * reward
        return (state, key), Transition(observation, action, log_prob, value, reward, done, finished_return)

    (state, key), trajectory = lax.scan(body, (carry.env_state, carry.key), None, UNROLL_LENGTH)
    episodes = Episodes(
        jnp.sum(trajectory.done * trajectory.finished_return), jnp.sum(trajectory.done, dtype=jnp.float32)
    )
    return carry._replace(env_state=state, key=key), trajectory, episodes


def gae(trajectory: Transition, last_value: Array, discount: float) -> Array:
    """`[T, B]` advantages, by a backward scan."""

    def body(scan_carry: tuple[Array, Array], t: Transition) -> tuple[tuple[Array, Array], Array]:
        advantage, next_value = scan_carry
        onward = discount * (1.0 - t.done)
        advantage = t.reward + onward * next_value - t.value + onward * GAE_LAMBDA * advantage
        return (advantage, t.value), advantage

    start = (jnp.zeros_like(last_value), last_value)
    return lax.scan(body, start, trajectory, reverse=True, unroll=16)[1]


class Rows(NamedTuple):
    """What the loss reads, flattened to `[T * B, ...]`."""

    observation: Array
    action: Array
    log_prob: Array
    value: Array
    advantage: Array
    target: Array


def loss(params: Params, rows: Rows, work: Work) -> Array:
    """Clipped objective + clipped value loss - entropy, averaged over the rows; advantages are normalised already."""
    output, value = policy(work, params, rows.observation)
    log_prob, entropy = log_prob_and_entropy(work, params, output, rows.action)
    clipped_value = rows.value + jnp.clip(value - rows.value, -CLIP, CLIP)
    value_loss = 0.5 * jnp.maximum((value - rows.target) ** 2, (clipped_value - rows.target) ** 2).mean()
    ratio = jnp.exp(log_prob - rows.log_prob)
    policy_loss = -jnp.minimum(ratio * rows.advantage, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * rows.advantage).mean()
    return policy_loss + VALUE_COST * value_loss - work.entropy_cost * entropy.mean()


def gradient(work: Work, params: Params, rows: Rows) -> Params:
    """The gradient of `loss` on one minibatch, the advantages normalised over all of it; the mean over its chunks."""
    advantage = (rows.advantage - rows.advantage.mean()) / (rows.advantage.std() + 1e-8)
    rows = rows._replace(advantage=advantage)
    size = advantage.shape[0]
    if jax.default_backend() != "cpu" or size <= CHUNK_ROWS or size % CHUNK_ROWS:
        return jax.grad(loss)(params, rows, work)
    chunks = jax.tree.map(lambda x: x.reshape(-1, CHUNK_ROWS, *x.shape[1:]), rows)

    def add(total: Params, chunk: Rows) -> tuple[Params, None]:
        return jax.tree.map(jnp.add, total, jax.grad(loss)(params, chunk, work)), None

    total, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), chunks)
    return jax.tree.map(lambda g: g * (CHUNK_ROWS / size), total)


def permutation(key: Array, shape: tuple[int, ...]) -> Array:
    """Random orders of the last axis: sorts 64-bit words of 32 random bits above the item's number.

    XLA sorts one array of integers four times as fast as pairs, and `jax.random.permutation` sorts pairs twice.
    """
    words = jax.random.bits(key, shape)
    with jax.enable_x64(True):
        words = lax.convert_element_type(words, jnp.uint64) << jnp.uint64(32)
        order = lax.sort(words | lax.broadcasted_iota(jnp.uint64, shape, len(shape) - 1), is_stable=False)
        return lax.convert_element_type(order, jnp.uint32)


def shuffled(key: Array, rows: Rows, minibatches: int, deal: bool) -> Rows:
    """Minibatches `[M, T * B / M, ...]` of rows `[T, B, ...]`.

    All T * B rows are shuffled, as purejaxrl does it; or, with `deal`, each environment deals its own shuffled steps to
    the minibatches, as torchpod does it: fewer words per sort, and rows that lie together.
    """
    length, size = rows.value.shape
    if not deal:
        order = permutation(key, (length * size,))
        flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)
        return jax.tree.map(lambda x: x[order].reshape(minibatches, -1, *x.shape[1:]), flat)
    order = permutation(key, (size, length))

    def pick(x: Array) -> Array:
        x = jax.vmap(lambda steps, own: steps[own])(x.swapaxes(0, 1), order)
        x = x.reshape(size, minibatches, length // minibatches, *x.shape[2:]).swapaxes(0, 1)
        return x.reshape(minibatches, -1, *x.shape[3:])

    return jax.tree.map(pick, rows)


def ppo_iteration(work: Work, carry: Carry, total_iterations: int, deal: bool) -> tuple[Carry, Episodes]:
    """Rollout, advantages, epochs x minibatches."""
    carry, trajectory, episodes = rollout(work, carry)
    _, last_value = policy(work, carry.params, jax.vmap(work.observe)(carry.env_state))
    advantage = gae(trajectory, last_value, work.discount)
    t = trajectory
    rows = Rows(t.observation, t.action, t.log_prob, t.value, advantage, advantage + t.value)

    def minibatch(learner: tuple[Params, Adam], batch: Rows) -> tuple[tuple[Params, Adam], None]:
        params, opt = learner
        return adam_step(work, params, opt, gradient(work, params, batch), total_iterations), None

    def epoch(scan_carry: tuple[Params, Adam, Array], _: None) -> tuple[tuple[Params, Adam, Array], None]:
        params, opt, key = scan_carry
        key, permutation_key = jax.random.split(key)
        (params, opt), _ = lax.scan(minibatch, (params, opt), shuffled(permutation_key, rows, work.minibatches, deal))
        return (params, opt, key), None

    (params, opt, key), _ = lax.scan(epoch, (carry.params, carry.opt, carry.key), None, EPOCHS)
    return carry._replace(params=params, opt=opt, key=key), episodes


def run(
    carry: Carry, work: Work, mode: str, iterations: int, total_iterations: int, deal: bool
) -> tuple[Carry, Transition | None, Episodes]:
    """`iterations` iterations of a mode; the episodes are those of each iteration, `[iterations]`."""

    def body(scan_carry: tuple[Carry, Transition | None], _: None) -> tuple[tuple[Carry, Transition | None], Episodes]:
        carry, trajectory = scan_carry
        if mode == "env_only":
            carry, episodes = random_rollout(work, carry)
        elif mode == "policy":
            # The trajectory is an output, so that XLA cannot leave out storing it.
            carry, trajectory, episodes = rollout(work, carry)
        else:
            carry, episodes = ppo_iteration(work, carry, total_iterations, deal)
        return (carry, trajectory), episodes

    trajectory = None
    if mode == "policy":
        shapes = jax.eval_shape(partial(rollout, work), carry)[1]
        trajectory = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (carry, trajectory), episodes = lax.scan(body, (carry, trajectory), None, iterations)
    return carry, trajectory, episodes


# --- Measuring --------------------------------------------------------------------------------------------------------


class Prepared:
    """A compiled and warm program: measured as often as one likes.

    Args:
      num_envs: environments, B.
      iterations: iterations within one timed call.
      timed_calls: of all measurements together; the learning rate falls to 0 over warm-up and timed iterations.
      mode: "env_only", "policy" or "update".
      warmup: iterations before the first timed one, rounded up to whole calls, at least one call.
      seed: seed of parameters and environments.
      deal: see `shuffled`.
      population: members, of seeds `seed`, `seed + 1`, ..., mapped by `jax.vmap`.
      env: one of `WORK`.
    """

    def __init__(
        self,
        num_envs: int,
        iterations: int,
        timed_calls: int,
        mode: str,
        *,
        warmup: int = 0,
        seed: int = 0,
        deal: bool = False,
        population: int = 1,
        env: str = "cartpole",
    ) -> None:
        warmup_calls = max(1, -(-warmup // iterations))
        self.num_envs, self.iterations, self.mode, self.population, self.env = (
            num_envs,
            iterations,
            mode,
            population,
            env,
        )
        self.total_iterations = total_iterations = iterations * (warmup_calls + timed_calls)
        self.work = work = WORK[env]()
        begin = partial(init_carry, work, num_envs=num_envs)
        train = partial(run, work=work, mode=mode, iterations=iterations, total_iterations=total_iterations, deal=deal)
        if population > 1:
            begin, train = jax.vmap(begin), jax.vmap(train)
        self.carry = jax.block_until_ready(jax.jit(begin)(seed + jnp.arange(population) if population > 1 else seed))
        start = time.perf_counter()
        self.compiled = jax.jit(train, donate_argnums=0).lower(self.carry).compile()
        self.compile_s = time.perf_counter() - start
        for _ in range(warmup_calls):
            self.carry, _, self.episodes = jax.block_until_ready(self.compiled(self.carry))

    def measure(self, repeats: int) -> dict:
        """Times `repeats` calls; the fields of `Measurement` in bench/processes.py."""
        wall_s, cpu_s = [], []
        for _ in range(repeats):
            start, cpu_start = time.perf_counter(), time.process_time()
            self.carry, _, self.episodes = jax.block_until_ready(self.compiled(self.carry))
            wall_s.append(time.perf_counter() - start)
            cpu_s.append(time.process_time() - cpu_start)
        count = float(self.episodes.count.sum())
        env_steps = self.iterations * UNROLL_LENGTH * self.num_envs * self.population
        on_cpu = jax.default_backend() == "cpu"
        return {
            "framework": "jax",
            "mode": self.mode,
            "env": self.env,
            "num_envs": self.num_envs,
            "unroll_length": UNROLL_LENGTH,
            "epochs": EPOCHS,
            "minibatches": self.work.minibatches,
            "batch_rows": UNROLL_LENGTH * self.num_envs,
            "param_count": sum(x.size for x in jax.tree.leaves(self.carry.params)) // self.population,
            "dtype": str(self.carry.params["actor"][0][0].dtype),
            "device": "cpu" if on_cpu else "cuda",
            "tf32": not on_cpu and jax.config.jax_default_matmul_precision is None,  # what XLA does by default
            "memory_bytes": 0 if on_cpu else jax.local_devices()[0].memory_stats()["peak_bytes_in_use"],
            "iterations": self.iterations,
            "total_iterations": self.total_iterations,
            "compile_s": self.compile_s,
            "population": self.population,
            "env_steps": [env_steps] * repeats,
            "wall_s": wall_s,
            "cpu_s": cpu_s,
            "episode_return": float(self.episodes.return_sum.sum()) / count if count else None,
            "episodes": int(count),
            "threads": {"cores": len(os.sched_getaffinity(0)), "flags": os.environ.get("XLA_FLAGS", "")},
            "versions": {"jax": jax.__version__, "jaxlib": jaxlib.__version__, **self.work.versions},
        }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--env", choices=[*WORK], default="cartpole")
    parser.add_argument("--num-envs", type=int, default=1024)
    parser.add_argument("--iterations", type=int, default=4, help="iterations within one timed call")
    parser.add_argument("--repeats", type=int, default=5, help="timed calls")
    parser.add_argument("--rounds", type=int, help="measure so often, whenever a line comes in")
    parser.add_argument("--mode", choices=["env_only", "policy", "update"], default="update")
    parser.add_argument("--warmup", type=int, default=0, help="iterations before timing (at least one call)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--deal", action="store_true", help="each environment deals its own steps, as in torchpod")
    parser.add_argument("--population", type=int, default=1, help="members, aggregate rates")
    parser.add_argument("--threads", type=int, default=1, help="of torch; ignored here, where the cores decide")
    parser.add_argument("--dense", action="store_true", help="ignored here: XLA multiplies zeros like other numbers")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()
    jax.config.update("jax_platforms", args.device)
    prepared = Prepared(
        args.num_envs,
        args.iterations,
        args.repeats * (args.rounds or 1),
        args.mode,
        warmup=args.warmup,
        seed=args.seed,
        deal=args.deal,
        population=args.population,
        env=args.env,
    )
    if args.rounds:
        print(json.dumps({"ready": True}), flush=True)
        for _ in sys.stdin:
            print(json.dumps(prepared.measure(args.repeats)), flush=True)
        print(json.dumps({"details": {}}), flush=True)
        return
    print(json.dumps(prepared.measure(args.repeats)))


if __name__ == "__main__":
    main()
