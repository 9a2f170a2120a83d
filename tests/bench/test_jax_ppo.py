"""The JAX driver does the work that torchpod does: the same environment, parameters and gradient."""

import importlib.util
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch

from torchpod.bench import harness
from torchpod.bench.anakin_worker import WORK
from torchpod.types import Batch

python, missing = harness.peers_python()
if missing and importlib.util.find_spec("jax"):
    python = sys.executable  # the extra `brax` brings JAX along, and gymnax not
has_jax = pytest.mark.skipif(bool(missing) and python != sys.executable, reason=f"peers: {missing}")
has_gymnax = pytest.mark.skipif(missing is not None, reason=f"peers: {missing}")


def run_jax(code: str, *arguments: object) -> str:
    """Runs code beside jax_ppo.py in the peers' Python; what it printed."""
    command = [python, "-c", textwrap.dedent(code), *map(str, arguments)]
    folder = harness.ROOT / "bench" / "peers"
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
@pytest.mark.parametrize(
    ("env", "size"),
    [("cartpole", 4), ("pendulum", 3), pytest.param("minatar_breakout", 400, marks=has_gymnax)],
)
def test_both_sides_have_the_same_parameters_and_take_the_same_gradient(env, size, tmp_path):
    work, generator, rows, discrete = WORK[env](), np.random.default_rng(0), 64, env != "pendulum"
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
    """
    run_jax(code, env, tmp_path)
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
