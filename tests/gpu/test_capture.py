"""The captured iteration on a GPU; and, wherever the tests run, the same code uncaptured."""

from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.interop.test_fall_back import reading_agent
from tests.replay.agents import AGENTS, CONTINUOUS, WITHOUT_PRIORITIES
from torchpod.algos.torchrl import TorchRLConfig, torchrl_agent
from torchpod.anakin import Anakin, train
from torchpod.bench import anakin_worker, gpu, gpu_checks, kernels
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.graph import Replay
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig


def build(env: str, num_envs: int, *, compiled: bool, device: str = "cpu"):
    return anakin_worker.build(env, num_envs, 10, compiler=Compiler(compiled), device=device)


@pytest.fixture(scope="module")
def small_suite():
    return gpu_checks.correctness("cpu", num_envs=8)


def test_uncaptured_program_on_cpu_equals_eager_and_compiled_and_resumes(small_suite):
    rows, failures = small_suite
    assert failures == []
    assert [row.name for row in rows] == [
        "difference_eager_compiled/8",
        "difference_compiled_captured/8",
        "different_integers_compiled_captured/8",
        "different_after_resume_across_capture/8",
        "random_words_as_on_cpu/8",
        "kernels_per_replay/8",
        "host_syncs_per_replay/8",
    ]


def test_what_differs_is_found():
    state = build("cartpole", 8, compiled=False).init(0)
    other = state._replace(iteration=state.iteration + 1, episode_return=state.episode_return + 1)
    assert gpu_checks.different(state, state) == []
    assert gpu_checks.different(state, other) == [".episode_return", ".iteration"]
    assert gpu_checks.different(state, other, floats=False) == [".iteration"]


def test_what_runs_on_the_device_and_what_the_host_waits_for_is_found():
    def event(name, start, end, device="CPU"):
        where = SimpleNamespace(name=device)
        return SimpleNamespace(name=name, time_range=SimpleNamespace(start=start, end=end), device_type=where)

    events = [
        event("replay", 0, 20, "CUDA"),  # the range, as the device has it: neither a kernel nor the host's window
        event("cudaDeviceSynchronize", 0, 1),
        event("replay", 2, 9),
        event("cudaGraphLaunch", 3, 4),
        event("cudaStreamSynchronize", 4, 5),
        event("triton_poi_fused_0", 5, 6, "CUDA"),
        event("Memset (Device)", 6, 7, "CUDA"),
        event("Memcpy DtoH (Device -> Pageable)", 10, 11, "CUDA"),
        event("cudaDeviceSynchronize", 12, 13),
    ]
    assert kernels.waits(events) == ["cudaStreamSynchronize", "Memcpy DtoH (Device -> Pageable)"]
    assert kernels.kernels(events) == ["triton_poi_fused_0", "Memset (Device)", "Memcpy DtoH (Device -> Pageable)"]
    head, *rows = kernels.table([*events, event("triton_poi_fused_0", 20, 24, "CUDA")]).splitlines()
    assert head.split() == ["us", "times", "us", "each", "kernel"]
    assert [row.split()[:4] for row in rows[:2]] == [
        ["5", "2", "2.50", "triton_poi_fused_0"],
        ["1", "1", "1.00", "Memset"],
    ]
    assert kernels.table(events[:1]) == head


def test_a_profile_of_a_replay_without_a_gpu_has_no_kernels():
    prepared = anakin_worker.Prepared(build("cartpole", 8, compiled=False), "update", 1, compiler=Compiler(False))
    assert len(prepared.kernel_times().splitlines()) == 1


@pytest.mark.gpu
def test_a_profile_of_a_captured_replay_has_its_kernels():
    anakin = build("cartpole", 16, compiled=True, device="cuda")
    prepared = anakin_worker.Prepared(anakin, "update", 1, compiler=Compiler(True), capture=True)
    head, *rows = prepared.kernel_times().splitlines()
    assert sum(int(row.split()[1]) for row in rows) > 100 and any("triton" in row for row in rows)


def test_a_replay_keeps_its_buffers_where_they_are():
    anakin = build("cartpole", 8, compiled=False)
    replay = Replay(anakin.iterate, anakin.init(0), capture=False)
    before = [leaf.data_ptr() for leaf in pytree.tree_leaves(replay.state)]
    replay()
    assert [leaf.data_ptr() for leaf in pytree.tree_leaves(replay.state)] == before
    assert int(replay.state.iteration) == 1 and replay.capture_s == 0.0


@pytest.mark.gpu
def test_captured_iteration_on_cuda_equals_compiled_and_eager_and_resumes_without_host_syncs():
    rows, failures = gpu_checks.correctness("cuda", num_envs=1024)
    assert failures == [], rows


@pytest.mark.gpu
def test_captured_run_resumes_bit_for_bit():
    anakin = build("cartpole", 256, compiled=True, device="cuda")
    state = anakin.init(0)
    through = Replay(anakin.iterate, state, capture=True)
    for _ in range(4):
        through()
    half = Replay(anakin.iterate, state, capture=True)
    half()
    half()
    rest = Replay(anakin.iterate, pytree.tree_map(torch.clone, half.state), capture=True)
    rest()
    rest()
    assert gpu_checks.different(through.state, rest.state) == []


@pytest.mark.gpu
@pytest.mark.parametrize("env", anakin_worker.WORK)
def test_every_program_of_the_suite_is_captured_and_counted(env):
    prepared = anakin_worker.Prepared(build(env, 64, compiled=True, device="cuda"), "update", 2, capture=True)
    prepared.prepare_env()
    m = prepared.measure(2)
    details = prepared.details(repeats=9)  # the median, for other tests may run beside it
    assert (
        m.get("device") == "cuda"
        and m.get("memory_bytes", 0) > 0
        and all(0 < x <= 2 * m["batch_rows"] for x in m["env_steps"])
    )
    assert details["kernels"] > m["unroll_length"] and details["capture_s"] > 0
    assert 0 < details["env_s"] < details["iteration_s"]


@pytest.mark.gpu
@pytest.mark.parametrize("mode", ["env_only", "policy"])
@pytest.mark.parametrize("env", ["cartpole", "pendulum"])
def test_parts_of_an_iteration_are_captured_and_do_as_many_steps_as_uncaptured_ones(env, mode):
    counts = {}
    for device in ("cpu", "cuda"):
        on_gpu = device == "cuda"
        anakin = build(env, 16, compiled=on_gpu, device=device)
        prepared = anakin_worker.Prepared(anakin, mode, 1, compiler=Compiler(on_gpu), capture=on_gpu)
        counts[device] = [prepared.measure(1)["env_steps"][0] for _ in range(4)]
    # Pendulum's episodes are cut, CartPole's end when floats say so.
    assert counts["cuda"] == (counts["cpu"] if env == "pendulum" else pytest.approx(counts["cpu"], rel=0.02))


@pytest.mark.gpu
def test_the_suite_runs_on_a_gpu(tmp_path):
    cases = (gpu.Case("pendulum", 64), gpu.Case("grid_world", 64))
    assert gpu.main(str(tmp_path / "out.json"), quick=True, cases=cases, only="ppo_pendulum") == 0


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize(("loss", "captured"), [("ClipPPOLoss", True), ("KLPENPPOLoss", True), (None, False)])
def test_a_loss_of_torchrl_is_captured_unless_it_falls_back(loss, captured):
    env = CartPole()
    anakin = Anakin(
        lambda: torchrl_agent(env.spec, TorchRLConfig(loss)) if loss else reading_agent(),
        env,
        num_envs=16,
        unroll_length=8,
        num_iterations=2,
        learner=LearnerConfig(),
        compiler=Compiler(True),
        device="cuda",
    )
    reports = [(report, replay.capture_s > 0) for report, replay in train(anakin, anakin.init(0))]
    assert [report.iteration for report, _ in reports] == [1, 2]
    assert all(was_captured == captured for _, was_captured in reports)


WITH_REPLAY = [
    ("dqn", True, False),
    ("dqn", True, True),
    *((name, False, False) for name in AGENTS),
    *((name, False, True) for name in AGENTS if name not in WITHOUT_PRIORITIES),
]
"""Agents, whether what they learn from lies in the host's memory, and whether it has priorities."""


@pytest.mark.parametrize(("name", "host", "prioritised"), WITH_REPLAY)
def test_replayed_iterations_with_replay_are_those_of_the_loop(name, host, prioritised):
    assert unlike_the_loop(name, host, prioritised, compiled=False, device="cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "host", "prioritised"), WITH_REPLAY)
def test_an_iteration_with_replay_is_captured_and_equals_the_uncaptured_one(name, host, prioritised):
    assert unlike_the_loop(name, host, prioritised, compiled=True, device="cuda") == []


def unlike_the_loop(name, host, prioritised, *, compiled, device):
    """What `train`, which captures on a GPU, leaves otherwise than the same iterations with the ring on the device."""
    env, states = Pendulum(max_episode_steps=9) if name in CONTINUOUS else CartPole(max_episode_steps=9), []
    for trained in (True, False):
        anakin = Anakin(
            lambda: AGENTS[name](env.spec),
            env,
            num_envs=16,
            unroll_length=4,
            num_iterations=30,
            learner=LearnerConfig(num_epochs=1, num_minibatches=2),
            compiler=Compiler(compiled),
            device=device,
            replay=ReplayConfig(640, batch_size=32, min_size=256, prioritised=prioritised, host=host and trained),
        )
        state = anakin.init(0)
        if trained:
            *_, (_, replay) = train(anakin, state)
            assert (replay.capture_s > 0) == (device == "cuda")
            states.append(pytree.tree_map(torch.clone, replay.state))
            assert host or kernels.waits(kernels.profiled(replay)) == []
            continue
        assert anakin.replay is not None
        for i in range(30):
            state, _ = (anakin.fill if i < anakin.replay.buffer.fill_iterations else anakin.iterate)(state)
        states.append(state)
    assert gpu_checks.largest_difference(states[0], anakin.init(0)) > 0
    return gpu_checks.different(*states)
