"""Where the time of an iteration goes."""

import time

import pytest
import torch

from torchpod.algos.ppo import PPO, PPOConfig
from torchpod.anakin import Anakin, train
from torchpod.compile import Compiler
from torchpod.envs import CartPole
from torchpod.learner import LearnerConfig
from torchpod.metrics import is_timing
from torchpod.phases import Phases


def test_shares_are_of_the_whole_call_and_of_the_last_one_alone():
    phases = Phases(torch.device("cpu"))
    with phases("rollout"):
        time.sleep(0.5)
    phases.begin()
    for _ in range(2):
        with phases("rollout"):
            time.sleep(0.02)
    with phases("update"):
        time.sleep(0.01)
    found = {name: x.item() for name, x in phases.shares(2, 0.2).items()}
    assert list(found) == ["phase_rollout", "phase_update", "phase_rest"] and all(map(is_timing, found))
    assert 0.2 <= found["phase_rollout"] < 2 and 0.05 <= found["phase_update"] < found["phase_rollout"] + 1
    assert sum(found.values()) == pytest.approx(1)


class Event:
    """Of a device that takes a quarter of a second from event to event."""

    count = 0

    def __init__(self, **options):
        assert options == {"enable_timing": True, "external": True}

    def record(self):
        Event.count += 1
        self.at = Event.count

    def elapsed_time(self, other):
        return 250.0 * (other.at - self.at)


def test_events_on_a_gpu_tell_the_time_of_the_last_iteration(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Event", Event)
    phases = Phases(torch.device("cuda"))
    for _ in range(3):
        with phases("rollout"):
            pass
    phases.begin()
    assert phases.shares(3, 1.5)["phase_rollout"] == pytest.approx(0.5)  # three times a quarter


@pytest.mark.parametrize("on", [False, True])
def test_anakin_tells_of_its_phases_when_asked(on):
    told = shares_of(on, "cpu")
    assert len(told) == 2 and all(len(shares) == (3 if on else 0) for shares in told)
    assert all(0 < share < 1 for shares in told for share in shares)
    assert [sum(shares) for shares in told] == pytest.approx([int(on)] * 2)


@pytest.mark.gpu
def test_a_captured_iteration_tells_of_its_phases():
    told = shares_of(True, "cuda")
    assert all(0 < share < 1 for shares in told for share in shares)
    assert [sum(shares) for shares in told] == pytest.approx([1.0] * 2)


def shares_of(on, device):
    """In each of two reports."""
    learner = LearnerConfig(num_epochs=1, num_minibatches=1)
    env = CartPole()
    anakin = Anakin(
        lambda: PPO(env.spec, PPOConfig(hidden=(4,))),
        env,
        num_envs=4,
        unroll_length=8,
        learner=learner,
        num_iterations=4,
        compiler=Compiler(enabled=device == "cuda"),
        device=device,
        phases=on,
    )
    reports = [report for report, _ in train(anakin, anakin.init(0), iterations_per_call=2)]
    return [[x.item() for name, x in report.metrics.items() if name.startswith("phase_")] for report in reports]
