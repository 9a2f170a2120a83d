"""The captured iteration on a GPU; and, wherever the tests run, the same code uncaptured."""

import re
from types import SimpleNamespace

import pytest
import torch
from torch.utils import _pytree as pytree

from tests.interop.rows import THERE
from tests.interop.test_fall_back import reading_agent
from tests.marks import with_slow
from tests.replay import test_loops
from tests.replay.agents import AGENTS, CONTINUOUS, WITHOUT_PRIORITIES
from torchpod.algos import torchrl
from torchpod.algos.torchrl import MULTI_AGENT, TorchRLConfig, torchrl_agent
from torchpod.anakin import Anakin, train
from torchpod.bench import anakin_worker, gpu, gpu_checks, kernels
from torchpod.commands import losses
from torchpod.compile import Compiler
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.classic.pendulum import Pendulum
from torchpod.graph import Replay
from torchpod.learner import LearnerConfig
from torchpod.replay import ReplayConfig

pytestmark = pytest.mark.filterwarnings("ignore:.*inline_inbuilt_nn_modules")  # which tensordict asks for

LOSSES = (*THERE, *MULTI_AGENT)
PRIORITISED = tuple(name for name in AGENTS if name not in WITHOUT_PRIORITIES)
FALL_BACK = {
    "DistributionalDQNLoss": r"objectives/dqn\.py:\d+, `.+`, does not compile",
    "reading": r"test_fall_back\.py:\d+, `if data\[\"advantage\"\]\.mean\(\)\.item\(\) > 1e9:`, does not compile",
}
"""What cannot be captured, and what is told of it."""
MAKERS = {
    **AGENTS,
    **{name: lambda spec, name=name: torchrl_agent(spec, TorchRLConfig(name, hidden=(8,))) for name in LOSSES},
    "reading": lambda spec: reading_agent(),
}


def build(env: str, num_envs: int, *, compiled: bool, device: str = "cpu"):
    return anakin_worker.build(env, num_envs, 10, compiler=Compiler(compiled), device=device)


@pytest.fixture(scope="module")
def small_suite():
    return gpu_checks.correctness("cpu", num_envs=8)


@pytest.mark.slow
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


@pytest.mark.slow
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


def anakin_of(name, *, compiled, device, host=False, prioritised=False):
    """A small program of an agent."""
    if name in MULTI_AGENT:
        env = losses.env_for(name)
    else:
        env = (Pendulum if name in (*CONTINUOUS, *torchrl.CONTINUOUS) else CartPole)(max_episode_steps=9)
    return Anakin(
        lambda: MAKERS[name](env.spec),
        env,
        num_envs=16,
        unroll_length=4,
        num_iterations=30,
        learner=LearnerConfig(num_epochs=1, num_minibatches=2, learning_rate=1e-3),
        compiler=Compiler(compiled),
        device=device,
        replay=ReplayConfig(640, batch_size=32, min_size=256, prioritised=prioritised, host=host),
    )


def learned_once(name, *, compiled, device):
    """The program after the first iteration that learns, from the same state on all devices."""
    anakin = anakin_of(name, compiled=compiled, device=device, prioritised=name in PRIORITISED)
    begun, before = anakin.init(0), anakin.replay.buffer.fill_iterations if anakin.replay else 0
    ((report, program),) = train(anakin, begun, until=before + 1)
    assert report.iteration == before + 1 and program.state.learner.healthy
    assert gpu_checks.largest_difference(begun, program.state) > 5e-4
    return program


def require_the_same_update(name, *, compiled, device):
    """As an uncompiled one on the CPU."""
    found, plain = (learned_once(name, compiled=x, device=where) for x, where in ((compiled, device), (False, "cpu")))
    for key, x in plain.state.learner.params.items():
        torch.testing.assert_close(found.state.learner.params[key].cpu(), x, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["KLPENPPOLoss", *AGENTS])
def test_a_compiled_iteration_is_an_uncompiled_one(name):
    require_the_same_update(name, compiled=True, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["ClipPPOLoss", "KLPENPPOLoss", *AGENTS])
def test_a_captured_iteration_is_an_uncompiled_one_on_the_cpu(name):
    require_the_same_update(name, compiled=True, device="cuda")


@pytest.mark.parametrize("name", [*LOSSES, "reading"])
def test_losses_of_torchrl_learn_uncaptured(name):
    assert learned_once(name, compiled=False, device="cpu").capture_s == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*LOSSES, "reading"])
def test_a_loss_of_torchrl_is_captured_unless_it_falls_back(name, recwarn):
    program = learned_once(name, compiled=True, device="cuda")
    told = [str(w.message) for w in recwarn if "runs uncompiled" in str(w.message)]
    expected = [FALL_BACK[name]] if name in FALL_BACK else []
    assert len(told) == len(expected) and all(map(re.search, expected, told)), told
    assert (program.capture_s > 0) == (not told)


WITH_REPLAY = [
    ("dqn", True, False),
    ("dqn", True, True),
    *((name, False, False) for name in AGENTS),
    *((name, False, True) for name in PRIORITISED),
]
"""Agents, whether what they learn from lies in the host's memory, and whether it has priorities."""


@pytest.mark.parametrize(
    ("name", "host", "prioritised"),
    with_slow(WITH_REPLAY, [x for x in WITH_REPLAY if x[0] not in ("dqn", "r2d2", "sac")]),
)
def test_replayed_iterations_with_replay_are_those_of_the_loop(name, host, prioritised):
    assert unlike_the_loop(name, host, prioritised, compiled=False, device="cpu") == []


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "host", "prioritised"), WITH_REPLAY)
def test_an_iteration_with_replay_is_captured_and_equals_the_uncaptured_one(name, host, prioritised):
    assert unlike_the_loop(name, host, prioritised, compiled=True, device="cuda") == []


def unlike_the_loop(name, host, prioritised, *, compiled, device):
    """What `train`, which captures on a GPU, leaves otherwise than the same iterations with the ring on the device."""
    settings = {"compiled": compiled, "device": device, "prioritised": prioritised}
    trained, stepped = anakin_of(name, host=host, **settings), anakin_of(name, **settings)
    begun = trained.init(0)
    *_, (_, program) = train(trained, begun)
    assert (program.capture_s > 0) == (device == "cuda")
    end = pytree.tree_map(torch.clone, program.state)
    assert kernels.waits(kernels.profiled(program)) == []
    assert stepped.replay is not None
    state = stepped.init(0)
    for i in range(30):
        state, _ = (stepped.fill if i < stepped.replay.buffer.fill_iterations else stepped.iterate)(state)
    assert gpu_checks.largest_difference(end, begun) > 0
    return gpu_checks.different(end, state)


def resumed(folder, loop, host, *, device):
    """Requires that a run that is resumed, in a new program, ends as one that is not."""
    lag = ["loop.lag=1"] if loop == "sebulba" else []
    own = [*lag, f"loop={loop}", f"device={device}", f"algo.replay.host={host}", f"compile={device == 'cuda'}"]
    test_loops.require_equal_runs(folder, [*(x for x in test_loops.SMALL if x != "compile=false"), *own], stop=14)


@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
def test_a_run_whose_ring_lies_on_the_host_is_resumed(tmp_path, loop):
    resumed(tmp_path, loop, True, device="cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("loop", ["anakin", "sebulba"])
def test_a_captured_run_with_replay_is_resumed_to_the_bit(tmp_path, loop, host):
    resumed(tmp_path, loop, host, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize(("host", "where"), [(False, r"cuda:\d"), (True, "cpu")])
def test_a_ring_that_does_not_fit_a_gpu_is_refused(tmp_path, monkeypatch, host, where):
    own = ["device=cuda", f"algo.replay.host={host}"]
    test_loops.require_refusal(tmp_path, monkeypatch, own, rf"36,000.00 GB, .* and {where} has [\d.,]+ GB left; use ")
