"""The other JAX drivers do the work that torchpod does: gymnax's environments, Brax's PPO, and rejax's."""

import importlib.util
import json
import subprocess
import sys

import pytest

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.bench import brax_worker, envs, envs_worker, processes
from torchpod.envs import CartPole

python, missing = processes.peers_python()
has_peers = pytest.mark.skipif(missing is not None, reason=f"peers: {missing}")
has_brax = pytest.mark.skipif(importlib.util.find_spec("brax") is None, reason="the extra `brax` is not installed")


def run(interpreter: str, driver: str, *arguments: object) -> dict:
    """The JSON line of a driver in bench/peers."""
    command = [interpreter, str(processes.ROOT / "bench" / "peers" / driver), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


STANDARD_ERRORS = {
    "cartpole": 0.0,
    "pendulum": 2.8e-2,
    "acrobot": 5.8e-6,
    "mountain_car": 0.0,
    "mountain_car_continuous": 1.7e-4,
    "catch": 3.3e-4,
    "deep_sea": 3.3e-5,
    "memory_chain": 9e-4,
    "four_rooms": 4.1e-5,
    "bernoulli_bandit": 7.4e-4,
    "minatar_asterix": 1.2e-4,
    "minatar_breakout": 2.5e-4,
    "minatar_freeway": 2.2e-5,
    "minatar_seaquest": 8.7e-5,
    "minatar_space_invaders": 4.4e-4,
}
"""Of the mean reward of a step over twice 500 steps of 512 environments, from 12 seeds."""


@has_peers
@pytest.mark.slow
@pytest.mark.parametrize("case", envs.CASES, ids=lambda case: case.name)
def test_random_actions_earn_as_much_in_gymnaxs_environment(case, seed):
    """The mean reward of a step: of resets, actions, rewards and ends that are the same."""
    num_envs, steps = 512, 500
    options = ("--num-envs", num_envs, "--steps", steps, "--repeats", 2, "--seed", seed % 2**31)
    peer = run(python, "jax_envs.py", "--peer", case.peer, json.dumps(case.peer_arguments), *options)
    ours = envs_worker.measure(case.name, case.arguments, num_envs, steps, 2, seed % 2**31)
    assert peer["batch_rows"] == num_envs * steps == ours["batch_rows"]
    within = 5 * 2**0.5 * STANDARD_ERRORS[case.name] + 1e-6  # five of a difference
    assert abs(ours["episode_return"] - peer["episode_return"]) < within


@has_peers
@pytest.mark.slow
def test_rejax_trains_networks_of_the_same_size_on_cartpole(seed):
    found = run(python, "rejax_ppo.py", "--num-envs", 64, "--iterations", 10, "--repeats", 2, "--seed", seed % 2**31)
    assert found["param_count"] == sum(x.numel() for x in PPO(CartPole().spec, PPOConfig()).parameters())
    assert found["batch_rows"] == 64 * 128 and found["env_steps"] == [10 * 64 * 128] * 2
    assert found["episodes"] > 0 and found["episode_return"] > 50  # by chance 22


@pytest.mark.slow
@has_brax
def test_brax_counts_the_steps_and_rewards_of_its_own_loop():
    options = ("--mode", "env_only", "--num-envs", 16, "--iterations", 20, "--repeats", 2)
    found = run(sys.executable, "jax_brax.py", "--env", "inverted_pendulum", *options)
    assert found["episode_return"] == pytest.approx(1.0)  # each step is one
    assert found["env_steps"] == [20 * 16] * 2 and len(found["wall_s"]) == 2 and min(found["wall_s"]) > 0


@has_brax
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Brax's own
def test_ppo_of_brax_trains_networks_of_the_same_size_and_learns(seed):
    options = ("--num-envs", 64, "--iterations", 10, "--repeats", 1, "--warmup", 40, "--learn", "--seed", seed % 2**31)
    found = run(sys.executable, "jax_brax.py", "--env", "inverted_pendulum", *options)
    ours = brax_worker.measure("inverted_pendulum", 64, "update", 1, 1, compiled=False)
    assert {k: found[k] for k in ("param_count", "batch_rows", "epochs", "minibatches")} == {
        k: ours[k] for k in ("param_count", "batch_rows", "epochs", "minibatches")
    }
    assert found["episodes"] == 64 and found["episode_return"] > 25  # by chance some 6
