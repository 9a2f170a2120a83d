"""The JAX driver does the work that torchpod does: the same environment, parameters and gradient."""

import importlib.util
import secrets
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from torchpod import random
from torchpod.agent import variables_of
from torchpod.algos.ppo import PPOConfig
from torchpod.bench import processes
from torchpod.bench.anakin_worker import WORK
from torchpod.envs.classic.cartpole import THETA_LIMIT, X_LIMIT, CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.learner import Learner
from torchpod.ops.returns import gae
from torchpod.types import Batch

python, missing = processes.peers_python()
if missing and importlib.util.find_spec("jax"):
    python = sys.executable  # the extra `brax` brings JAX along, and gymnax not
has_jax = pytest.mark.skipif(bool(missing) and python != sys.executable, reason=f"peers: {missing}")
has_gymnax = pytest.mark.skipif(missing is not None, reason=f"peers: {missing}")


def run_jax(code: str, *arguments: object) -> str:
    """Runs code beside jax_ppo.py in the peers' Python; what it printed."""
    command = [python, "-c", textwrap.dedent(code), *map(str, arguments)]
    folder = processes.ROOT / "bench" / "peers"
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@has_gymnax
def test_pendulum_is_gymnaxs_step_for_step_through_resets():
    code = """
        import jax, jax.numpy as jnp, jax_ppo
        from gymnax.environments.classic_control.pendulum import Pendulum
        env = Pendulum()
        params = env.default_params
        keys = jax.random.split(jax.random.key(0), 16)
        ours = jax.vmap(jax_ppo.reset_pendulum)(keys)
        _, theirs = jax.vmap(env.reset, (0, None))(keys, params)

        @jax.jit
        def both(ours, theirs, key):
            keys, action = jax.random.split(key, 16), jax.random.uniform(key, (16, 1), minval=-3.0, maxval=3.0)
            ours, reward, done, _ = jax.vmap(jax_ppo.step_pendulum)(keys, ours, action)
            out = jax.vmap(env.step, (0, 0, 0, None))(keys, theirs, action, params)
            ours_out = jax.vmap(jax_ppo.observe_pendulum)(ours), reward, done
            return ours, out[1], ours_out, (out[0], out[2], out[3] | out[4])

        ends = 0
        for t in range(450):
            ours, theirs, a, b = both(ours, theirs, jax.random.key(t))
            assert all(jnp.allclose(x, y, rtol=1e-5, atol=1e-4) for x, y in zip(a, b)), t
            theirs = theirs.replace(theta=ours.theta, theta_dot=ours.theta_dot)  # rounding must not add up
            ends += int(a[2].sum())
        print(ends)
    """
    assert run_jax(code).split() == ["32"]


@has_jax
def test_cartpole_moves_pays_and_ends_as_ours(tmp_path):
    env, generator, size = CartPole(), np.random.default_rng(), 4096
    state = generator.uniform(-1, 1, (size, 4)).astype(np.float32) * np.float32([2.5, 3.0, 0.22, 3.0])
    action = generator.integers(0, 2, size)
    np.savez(tmp_path / "in.npz", state=state, action=action)
    code = """
        import sys, jax, jax.numpy as jnp, numpy as np, jax_ppo
        given, size = np.load(sys.argv[1] + "/in.npz"), 4096
        state, action = jnp.asarray(given["state"]), jnp.asarray(given["action"])
        keys, zeros = jax.random.split(jax.random.key(0), size), jnp.zeros(size)
        at = jax_ppo.CartPole(*state.T, time=jnp.arange(size) % 500, episode_return=zeros)
        after, reward, done, finished = jax.vmap(jax_ppo.step)(keys, at, action)
        fresh = jax.vmap(jax_ppo.observe)(jax.vmap(jax_ppo.reset)(keys))
        moved = jax.vmap(jax_ppo.observe)(after)
        np.savez(sys.argv[1] + "/out.npz", moved=moved, reward=reward, done=done, finished=finished, fresh=fresh)
    """
    run_jax(code, tmp_path)
    found = np.load(tmp_path / "out.npz")
    keys = random.split(random.key(0), size)
    moved, reward, terminated = env.transition(torch.from_numpy(state), torch.from_numpy(action), keys)
    ended = terminated.numpy() | (np.arange(size) % 500 + 1 >= (env.spec.max_episode_steps or 0))
    near = np.abs(np.abs(moved[:, [0, 2]].numpy()) - [X_LIMIT, THETA_LIMIT]).min(-1) < 1e-5  # rounding decides
    assert (found["done"] == ended)[~near].all() and 100 < ended.sum() < size - 100 and near.sum() < 10
    going = ~ended & ~near
    np.testing.assert_allclose(found["moved"][going], moved.numpy()[going], rtol=1e-5, atol=1e-6)
    assert (found["reward"] == reward.numpy()).all() and (found["finished"] == 1).all()
    for fresh in (found["moved"][found["done"]], found["fresh"], env.reset(keys).numpy()):
        assert np.abs(fresh).max() <= 0.05
        assert np.abs(fresh.mean(0)).max() < 5 * 0.05 / (3 * len(fresh)) ** 0.5  # that of a uniform one, 5 sigma


@has_jax
def test_pendulum_moves_and_pays_as_ours(tmp_path):
    env, generator, size = Pendulum(), np.random.default_rng(), 4096
    state = generator.uniform(-1, 1, (size, 2)).astype(np.float32) * np.float32([7.0, 8.0])
    action = generator.uniform(-3, 3, (size, 1)).astype(np.float32)
    np.savez(tmp_path / "in.npz", state=state, action=action)
    code = """
        import sys, jax, jax.numpy as jnp, numpy as np, jax_ppo
        given, size = np.load(sys.argv[1] + "/in.npz"), 4096
        keys, zeros = jax.random.split(jax.random.key(0), size), jnp.zeros(size)
        at = jax_ppo.Pendulum(*jnp.asarray(given["state"]).T, time=jnp.arange(size) % 200, episode_return=zeros)
        after, reward, done, _ = jax.vmap(jax_ppo.step_pendulum)(keys, at, jnp.asarray(given["action"]))
        fresh = jax.vmap(jax_ppo.reset_pendulum)(keys)
        seen = jax.vmap(jax_ppo.observe_pendulum)(after)
        moved, fresh = (jnp.stack([x.theta, x.theta_dot], -1) for x in (after, fresh))
        np.savez(sys.argv[1] + "/out.npz", moved=moved, seen=seen, reward=reward, done=done, fresh=fresh)
    """
    run_jax(code, tmp_path)
    found = np.load(tmp_path / "out.npz")
    moved, reward, terminated = env.transition(torch.from_numpy(state), torch.from_numpy(action), random.key(0))
    assert not terminated.any() and env.spec.max_episode_steps == 200
    assert (found["done"] == (np.arange(size) % 200 == 199)).all()
    going, angle = ~found["done"], np.abs(np.remainder(state[:, 0], 2 * np.pi) - np.pi)
    np.testing.assert_allclose(found["moved"][going], moved.numpy()[going], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["seen"][going], env.observe(moved).numpy()[going], rtol=1e-4, atol=1e-4)
    away = angle > 1e-4  # at the bottom rounding decides on the sign, which the square forgets but for its own rounding
    np.testing.assert_allclose(found["reward"][away], reward.numpy()[away], rtol=1e-4, atol=1e-4)
    for fresh in (found["moved"][found["done"]], found["fresh"], env.reset(random.split(random.key(0), size)).numpy()):
        high = np.array([np.pi, 1.0])
        assert (np.abs(fresh) <= high + 1e-6).all()
        assert (np.abs(fresh.mean(0)) < 5 * high / (3 * len(fresh)) ** 0.5).all()  # that of a uniform one, 5 sigma


@has_jax
def test_advantages_are_ours(tmp_path):
    generator, shape = np.random.default_rng(), (128, 32)
    reward, value = (generator.normal(size=shape).astype(np.float32) for _ in range(2))
    done, last_value = generator.random(shape) < 0.05, generator.normal(size=32).astype(np.float32)
    np.savez(tmp_path / "in.npz", reward=reward, value=value, done=done, last_value=last_value)
    code = """
        import sys, jax.numpy as jnp, numpy as np, jax_ppo
        given = {k: jnp.asarray(x) for k, x in np.load(sys.argv[1] + "/in.npz").items()}
        of_steps = {k: given[k] for k in ("reward", "value", "done")}
        trajectory = jax_ppo.Transition(**dict.fromkeys(jax_ppo.Transition._fields) | of_steps)
        np.save(sys.argv[1] + "/out.npy", jax_ppo.gae(trajectory, given["last_value"], 0.99))
    """
    run_jax(code, tmp_path)
    config = PPOConfig()
    v, last = torch.from_numpy(np.concatenate([value, last_value[None]])), torch.from_numpy(done)
    found = gae(torch.from_numpy(reward), config.discount * ~last, last, v[:-1], v[1:], lambda_=config.gae_lambda)
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), found.numpy(), rtol=1e-4, atol=1e-5)


@has_jax
def test_the_optimizer_takes_the_steps_of_ours(tmp_path):
    """With gradients that are clipped and gradients that are not, from the second of three iterations on."""
    work = WORK["cartpole"]()
    agent, updates, iterations = work.agent(work.env.spec, work.config), 24, 3
    learner = Learner(agent, work.learner, num_iterations=iterations)
    state = learner.init(*variables_of(agent))._replace(num_steps=torch.tensor(16))
    generator = torch.Generator().manual_seed(secrets.randbits(32))
    sizes = [p.numel() for p in state.params.values()]
    scales = torch.rand(updates, 1, generator=generator) / sum(sizes) ** 0.5  # norms from 0 to 1
    gradients = scales * torch.randn(updates, sum(sizes), generator=generator)
    assert {bool(g.norm() > work.learner.max_grad_norm) for g in gradients} == {False, True}
    begun = {name: p.numpy() for name, p in state.params.items()}
    np.savez(tmp_path / "in.npz", gradients=gradients.numpy(), **begun)
    code = """
        import sys, jax, jax.numpy as jnp, numpy as np, jax_ppo
        folder, iterations = sys.argv[1], int(sys.argv[2])
        given = {k: jnp.asarray(x) for k, x in np.load(folder + "/in.npz").items()}
        gradients, work = given.pop("gradients"), jax_ppo.WORK["cartpole"]()
        zeros = jax.tree.map(jnp.zeros_like, given)
        params, opt = given, jax_ppo.Adam(zeros, zeros, jnp.int32(0))
        ends = np.cumsum([0] + [x.size for x in given.values()])
        opt = opt._replace(count=jnp.int32(16))
        for gradient in gradients:
            parts = [gradient[a:b] for a, b in zip(ends, ends[1:])]
            of = {k: x.reshape(given[k].shape) for k, x in zip(given, parts)}
            params, opt = jax_ppo.adam_step(work, params, opt, of, iterations)
        np.savez(folder + "/out.npz", **params)
    """
    run_jax(code, tmp_path, iterations)
    for gradient in gradients:
        parts = dict(zip(state.params, gradient.split(sizes), strict=True))
        own = {name: part.reshape(state.params[name].shape) for name, part in parts.items()}
        state, _ = learner.apply_sum(state, torch.cat([learner.groups.flat(own), torch.tensor([1.0])]), ())
    theirs = np.load(tmp_path / "out.npz")
    assert max(np.abs(theirs[name] - begun[name]).max() for name in begun) > 1e-3  # a single number may come back
    for name, p in state.params.items():
        moved, expected = p.numpy() - begun[name], theirs[name] - begun[name]
        np.testing.assert_allclose(moved, expected, rtol=1e-4, atol=1e-6)


@has_jax
def test_minibatches_have_every_row_once_in_an_order_of_the_key():
    """Rows of 8 steps of 6 environments in 4 minibatches, 12 each: all shuffled, or two steps of every environment."""
    code = """
        import jax, jax.numpy as jnp, numpy as np, jax_ppo
        number = jnp.arange(48.0).reshape(8, 6)
        rows = jax_ppo.Rows(*(jnp.stack([number + i] * 2, -1) if i == 0 else number + i for i in range(6)))
        for deal in (False, True):
            orders = []
            for seed in range(2):
                dealt = jax_ppo.shuffled(jax.random.key(seed), rows, 4, deal)
                value = np.asarray(dealt.value) - 3
                assert all((np.asarray(x) == value + i).all() for i, x in enumerate(dealt) if i > 0)
                assert (np.asarray(dealt.observation) == value[..., None]).all()
                assert value.shape == (4, 12) and sorted(value.ravel()) == list(range(48))
                of_env = [np.bincount(x.astype(int) % 6, minlength=6).tolist() for x in value]
                assert (of_env == [[2] * 6] * 4) == deal
                orders.append(value.ravel().tolist())
            assert orders[0] != orders[1] and orders[0] != sorted(orders[0])
        print("checked")
    """
    assert run_jax(code).split() == ["checked"]


@has_jax
@pytest.mark.parametrize(
    ("env", "size", "rows"),
    [
        pytest.param("cartpole", 4, 64, marks=pytest.mark.slow),
        ("cartpole", 4, 6144),  # in three chunks
        pytest.param("pendulum", 3, 64, marks=pytest.mark.slow),
        pytest.param("minatar_breakout", 400, 64, marks=[has_gymnax, pytest.mark.slow]),
    ],
)
def test_both_sides_have_the_same_parameters_and_take_the_same_gradient(env, size, rows, tmp_path):
    work, generator, discrete = WORK[env](), np.random.default_rng(0), env != "pendulum"
    agent = work.agent(work.env.spec, work.config)
    steps = {
        "observation": generator.normal(size=(rows, size)),
        "action": generator.integers(0, 2, rows) if discrete else generator.normal(size=(rows, 1)),
        "log_prob": generator.normal(size=rows) - 1,
        "value": generator.normal(size=rows),
        "advantage": generator.normal(size=rows),
        "target": generator.normal(size=rows),
    }
    steps = {name: x if x.dtype.kind == "i" else x.astype(np.float32) for name, x in steps.items()}
    params = {name: p.detach().numpy() for name, p in agent.named_parameters()}
    np.savez(tmp_path / "in.npz", **{f"row {k}": x for k, x in steps.items()}, **params)
    code = """
        import sys, jax, jax.numpy as jnp, numpy as np, jax_ppo
        env, folder = sys.argv[1:]
        work, given = jax_ppo.WORK[env](), np.load(folder + "/in.npz")
        rows = jax_ppo.Rows(*(jnp.asarray(given["row " + name]) for name in jax_ppo.Rows._fields))
        heads = {"actor": ("encoder", "policy"), "critic": ("value_encoder", "value")}
        weights = [k[:-7] for k in given if k.endswith(".weight")]
        names = {k: [x for x in weights if x.startswith(e + ".")] + [head] for k, (e, head) in heads.items()}
        params = {k: [(given[x + ".weight"].T, given[x + ".bias"]) for x in layers] for k, layers in names.items()}
        if "head.log_std" in given:
            params["log_std"] = given["head.log_std"]
        fresh = jax_ppo.init_params(work, jax.random.key(0))
        assert jax.tree.map(jnp.shape, fresh) == jax.tree.map(jnp.shape, params)
        gradient = jax_ppo.gradient(work, params, rows)
        out = {"head.log_std": gradient["log_std"]} if "log_std" in gradient else {}
        for k, layers in names.items():
            for x, (weight, bias) in zip(layers, gradient[k]):
                out |= {x + ".weight": weight.T, x + ".bias": bias}
        np.savez(folder + "/out.npz", **out)
        print(work.discount, work.reward_scale, work.entropy_cost, work.learning_rate, work.minibatches)
    """
    config, learner = work.config, work.learner
    ours = (config.discount, config.reward_scale, config.entropy_coefficient)
    assert [*map(float, run_jax(code, env, tmp_path).split())] == [
        *ours,
        learner.learning_rate,
        learner.num_minibatches,
    ]
    columns = {name: torch.from_numpy(x) for name, x in steps.items()}
    advantage = columns["advantage"]
    batch = {
        "observation": columns["observation"].reshape(rows, *work.env.spec.observation.shape),
        "first": torch.zeros(rows, dtype=torch.bool),
        "action": columns["action"] if discrete else 2 * columns["action"],  # N m; JAX's are half ranges
        "action_log_prob": columns["log_prob"],
        "state_value": columns["value"],
        "advantage": (advantage - advantage.mean()) / (advantage.std(correction=0) + 1e-8),
        "value_target": columns["target"],
        "weight": torch.full((rows,), 1 / rows),
    }
    agent.loss(Batch(batch, ()), torch.zeros(0), None).loss.backward()
    theirs = np.load(tmp_path / "out.npz")
    assert set(theirs) == set(params)
    for name, p in agent.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(p.grad, torch.from_numpy(theirs[name].copy()), rtol=1e-4, atol=1e-6)
