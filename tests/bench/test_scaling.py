"""Suite scaling: speed-ups over one rank, sums over ranks, and the model of these."""

import json
import subprocess
import sys
import textwrap

import pytest
import torch

from torchpod.bench import harness, processes, report, scaling, scaling_worker
from torchpod.bench.processes import Worker
from torchpod.bench.scaling import Network

# K ranks do 0.9 K times the work of one, and their network has 3 us and 2 GB/s.
FAKE = textwrap.dedent(
    """
    import json, sys
    ranks, *arguments = sys.argv[1:]
    options, k, apart = dict(zip(arguments[::2], arguments[1::2])), int(ranks), arguments[-1] == "--apart"
    num_envs, iterations, repeats = (int(options[x]) for x in ("--num-envs", "--iterations", "--repeats"))
    speed_up = k if k == 1 else (0.95 if apart else 0.9) * k
    wall = iterations * 128 * num_envs / (1000.0 * speed_up)
    alone = {n: 2 * (k - 1) * (3e-6 + n / k / 2e9) for n in (8, 32768, 1048576, 16777216)}
    print(json.dumps(dict(
        framework="torchpod", mode="update", num_envs=num_envs, unroll_length=128, epochs=4, minibatches=4,
        batch_rows=128 * num_envs, param_count=9155, dtype="float32", iterations=iterations, total_iterations=8,
        compile_s=1.0, env_steps=[iterations * 128 * num_envs] * repeats, wall_s=[wall] * repeats,
        cpu_s=[0.5 * wall] * repeats, episode_return=1.0, episodes=1, threads={}, versions={},
        ranks=k, sums_per_iteration=0 if apart else 21, bytes_per_iteration=0 if apart else 21 * 36_000,
        share_in_sums=0.0 if apart else 0.02 * k, share_waiting=0.0 if apart else 0.015 * k,
        share_summing=0.0 if apart else 0.005 * k, alone=alone)))
    """
)


@pytest.fixture
def fake(tmp_path, monkeypatch):
    script = tmp_path / "fake.py"
    script.write_text(FAKE)
    monkeypatch.setattr(harness, "calibrate", lambda core: {"2048x64x64": 50.0})
    monkeypatch.setattr(harness, "RESULTS", tmp_path)

    def worker(ranks):
        command = (sys.executable, "-S", str(script), str(ranks))
        return Worker(f"{ranks} ranks", command, missing="no torchrun" if ranks == 3 else None)

    return worker


def test_rows_are_speed_ups_and_the_page_shows_them(tmp_path, fake):
    assert scaling.main(worker=fake) == 0
    (path,) = tmp_path.glob("scaling_*.json")
    document = json.loads(path.read_text())
    rows = {row["name"]: row for row in document["rows"]}
    assert list(rows) == [f"{kind}_ppo_cartpole/{k} ranks" for kind in ("weak", "apart", "strong") for k in (1, 2, 4)]
    for kind, each in (("weak", 0.9), ("apart", 0.95), ("strong", 0.9)):
        ratios = [rows[f"{kind}_ppo_cartpole/{k} ranks"]["ratio"] for k in (1, 2, 4)]
        assert ratios == pytest.approx([1.0, 2 * each, 4 * each])
    report.main(tmp_path, tmp_path / "docs")
    text = (tmp_path / "docs" / "scaling.md").read_text()
    assert "| weak | 2 | 1,800 | 1.80 | 4.0% | 3.0% | 1.0% |" in text and "| strong | 4 | 3,600 | 3.60 | 8.0% |" in text
    assert "| apart | 2 | 1,900 | 1.90 | 0.0% | 0.0% | 0.0% | 0.0% |" in text
    assert "2 processes are 1.90 times as fast as one" in text and "with them 1.80, 95% of that." in text
    assert "3 us and 2.00 GB/s" in text and "gloo on CPUs" in text
    assert "**No efficiency below was measured, and NCCL was never run with several GPUs.**" in text
    assert "| 4 | 16,777,216 | 12,601 us | 12,601 us |" in text
    assert not any(row["note"] for row in rows.values())


def test_a_quick_run_leaves_the_page_alone(tmp_path, fake):
    assert scaling.main(worker=fake, quick=True) == 0
    report.main(tmp_path, tmp_path / "docs")
    assert len([*tmp_path.glob("scaling_*.json")]) == 1 and not (tmp_path / "docs" / "scaling.md").exists()


def test_all_ranks_run_on_one_kind_of_device(monkeypatch):
    for num_gpus, device in ((0, "cpu"), (1, "cpu"), (2, "cuda"), (4, "cuda")):
        monkeypatch.setattr(torch.cuda, "device_count", lambda num_gpus=num_gpus: num_gpus)
        assert scaling.device_for((1, 2, 4)) == device
    assert scaling.real_worker(1, "cpu").command[-2:] == ("--device", "cpu")


def test_of_two_gpus_two_ranks_are_measured_and_the_others_told(tmp_path, fake, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert scaling.main(worker=fake, rounds=1, repeats=1) == 1
    (path,) = tmp_path.glob("scaling_*.json")
    document = json.loads(path.read_text())
    assert {row["name"].split("/")[1] for row in document["rows"]} == {"1 ranks", "2 ranks"}
    told = "not measured, for there is no GPU for each."
    assert document["failures"] == [[f"{kind}_ppo_cartpole/4 ranks", told] for kind in ("weak", "apart", "strong")]


def measured(device: str = "cpu") -> dict:
    """A result file: 2 ranks as the model has them, 4 ranks on 2 cores eight times slower with 32 KiB."""
    network = Network(1e-4, 1e9)
    sums = {
        f"{kind}/{k}": {
            "device": device,
            "iteration_s": 0.4,
            "sums_per_iteration": 22,
            "bytes_per_iteration": 589_296,
            "share_in_sums": 0.1,
            "share_waiting": 0.07,
            "share_summing": 0.03,
            "alone": {str(n): network.sum_s(k, n) * (8 if (k, n) == (4, 32_768) else 1) for n in (8, 32_768, 2**24)},
        }
        for kind in ("weak", "strong")
        for k in (1, 2, 4)
    }
    rows = [{"name": name.replace("/", "_ppo_cartpole/") + " ranks", "value": 3e5, "ratio": 1.5} for name in sums]
    return {
        "date": "2030-01-01T00:00:00",
        "commit": "aaa",
        "hardware": {"name": "some-cpu", "cores": 2},
        "sums": sums,
        "failures": [],
        "rows": rows,
    }


def test_the_page_says_where_the_model_is_off_and_why():
    text = scaling.render(measured(), None)
    # a tree of 4 messages, each 100 us and 33
    assert "with 4 ranks and 32,768 bytes: 4,249 us measured, 531 by the model, 8.0 x: 4 ranks share 2 cores" in text
    # 3 % of 400 ms for 22 sums: 545 us each; by the model 2 messages with 100 us and 13, or a tree of 4 with 127
    assert "Inside iterations a sum takes 1.1 to 2.4 x what the model says" in text
    assert "most in weak scaling with 2 ranks. With 2 ranks it is exact at 8 and 16,777,216 bytes by" in text
    # 2 messages, each 100 us and half of 32,768 bytes
    assert (
        "has 27 kB in the mean, and 32,768 bytes were measured: with 2 ranks 233 us, where the model says 233." in text
    )
    assert "16 of gradients, one for each update (4 epochs x 4 minibatches)" in text


def test_the_model_is_not_called_exact_where_it_takes_a_tree():
    """With 4 ranks the fit has 6 messages of a ring, and a tree of 8 bytes takes 4."""
    alone = {str(n): 1e-3 + n / 1e9 for n in (8, 2**24)}
    assert scaling._exact(alone, 4, scaling.fit(alone, 4)) == ""
    assert "by construction" in scaling._exact(alone, 2, scaling.fit(alone, 2))


def test_the_page_names_the_backend_that_was_used():
    text = scaling.render(measured("cuda"), None)
    assert "NCCL on GPUs" in text and "gloo" not in text and "NCCL was never run" not in text


def test_the_prediction_takes_the_iterations_that_a_gpu_was_measured_at():
    rates = {"ppo_cartpole/1024": 47_529_558.0, "ppo_cartpole/4096": None, "ppo_cartpole/65536": 194_579_012.0}
    rows = [{"name": name, "value": value} for name, value in rates.items()]
    gpu = {"date": "2026-11-26T10:53:00", "hardware": {"gpu": "NVIDIA H200"}, "rows": rows}
    text = scaling.render(measured(), gpu)
    # 22 sums by 3 levels up and down, each 5 us and 589,296 / 22 bytes at 50 GB/s: 731 us beside 2,758
    assert "| one 400 Gbit/s link per device | NVIDIA H200 | 1,024 | 2.76 ms | 79.1% |" in text
    assert "| NVIDIA H200 | 65,536 | 43.11 ms |" in text and "| 4,096 |" not in text
    assert "NVIDIA" not in scaling.render(measured(), None)


def test_ranks_that_fail_are_told(tmp_path, fake):
    assert scaling.main(worker=fake, num_ranks=(1, 3), rounds=1) == 1
    (path,) = tmp_path.glob("scaling_*.json")
    assert json.loads(path.read_text())["failures"] == [
        [f"{kind}_ppo_cartpole/3 ranks", "3 ranks: no torchrun"] for kind in ("weak", "apart", "strong")
    ]
    report.main(tmp_path, tmp_path / "docs")
    assert not (tmp_path / "docs" / "scaling.md").exists()  # one rank says nothing of scaling


def test_the_page_is_of_the_newest_run_that_tells_something_and_lists_what_failed(tmp_path, fake):
    page = tmp_path / "docs" / "scaling.md"
    for date, ranks in (("2030-01-01", (1, 2, 3)), ("2030-01-02", (1, 3))):
        scaling.main(str(tmp_path / f"{date}.json"), worker=fake, num_ranks=ranks, rounds=1)
        document = json.loads((tmp_path / f"{date}.json").read_text()) | {"date": f"{date}T00:00:00"}
        (tmp_path / f"{date}.json").write_text(json.dumps(document))
    report.main(tmp_path, page.parent)
    text = page.read_text()
    assert "2030-01-01" in text and "| weak | 2 | 1,800 | 1.80 |" in text and "| weak | 3 |" not in text
    assert "\n- **weak_ppo_cartpole/3 ranks: 3 ranks: no torchrun**\n" in text


def test_a_page_without_what_one_rank_or_two_do_apart(tmp_path):
    document = measured()
    del document["sums"]["strong/1"]
    document["rows"] = [row | {"ratio": None if "strong" in row["name"] else 1.5} for row in document["rows"]]
    document["rows"].append({"name": "apart_ppo_cartpole/2 ranks", "value": None, "ratio": None})
    text = scaling.render(document, None)
    assert "| strong | 2 | 300,000 | - |" in text and "Without any sums" not in text


@pytest.mark.parametrize(("apart", "steps", "seconds"), [(True, 10.0 + 30.0, 40.0 / 11.0), (False, 10.0, 10.0 / 4.0)])
def test_ranks_add_their_own_rates(monkeypatch, apart, steps, seconds):
    """The other does 6 steps/s: apart 30 in 5 s, else its half of 10 in 5 / 1.5 s, beside our 10 in 2 s or 5 in 2 s."""
    other = torch.tensor([[30.0], [6.0]]) if apart else torch.tensor([[5.0], [1.5]])
    monkeypatch.setattr(scaling_worker.Ranks, "sum", lambda self, x: x + other)
    found = scaling_worker.of_all(scaling_worker.Ranks(0, 2), [10.0], [2.0], apart=apart, device=torch.device("cpu"))
    assert found["env_steps"] == [steps] and found["wall_s"] == pytest.approx([seconds])


def test_weak_rows_grow_with_the_ranks_and_strong_ones_do_not():
    assert [scaling.case_arguments("weak", k, 3)[1] for k in (1, 2, 4)] == ["1024", "2048", "4096"]
    assert [scaling.case_arguments("strong", k, 3)[1] for k in (1, 2, 4)] == ["4096"] * 3
    assert scaling.case_arguments("apart", 2, 3) == [*scaling.case_arguments("weak", 2, 3), "--apart"]


def test_a_sum_takes_the_better_of_ring_and_tree():
    network = Network(latency_s=1e-5, bandwidth=1e9)
    assert network.sum_s(1, 1e6) == 0.0
    assert network.sum_s(2, 1e6) == pytest.approx(2 * (1e-5 + 5e-4))
    assert network.sum_s(8, 8e8) == pytest.approx(14 * (1e-5 + 0.1))  # a ring: each sends its share 14 times
    assert network.sum_s(2048, 8.0) == pytest.approx(22 * 1e-5, rel=1e-3)  # a tree: 11 levels, up and down


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_fit_finds_the_network_that_made_the_numbers(ranks):
    network = Network(latency_s=2e-5, bandwidth=3e9)
    alone = {str(n): 2 * (ranks - 1) * (2e-5 + n / ranks / 3e9) for n in (8, 2**20, 2**24)}
    assert scaling.fit(alone, ranks) == pytest.approx(network, rel=1e-3)


def real_ranks(*options):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    worker = ["-m", "torchpod.bench.scaling_worker", "--eager", "--num-envs", "8", "--iterations", "1"]
    done = subprocess.run(
        [*torchrun, *worker, "--repeats", "2", *options],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=processes.ROOT,
    )
    assert done.returncode == 0, done.stderr
    (line,) = (x for x in done.stdout.splitlines() if x.startswith("{"))
    return json.loads(line)


@pytest.mark.slow
def test_two_real_ranks_apart_make_no_sums():
    found = real_ranks("--apart")
    assert (found["ranks"], found["num_envs"], found["sums_per_iteration"], found["share_in_sums"]) == (2, 8, 0, 0.0)
    assert all(0.9 * 1024 < steps <= 1024 for steps in found["env_steps"])


@pytest.mark.slow
def test_two_real_ranks_count_their_steps_and_sums():
    found = real_ranks()
    assert (found["ranks"], found["num_envs"], found["sums_per_iteration"]) == (2, 8, 22)
    assert all(0.9 * 1024 < steps <= 1024 for steps in found["env_steps"])  # of both ranks; some steps are resets
    # 16 gradients with 6 metrics, in whole cache lines; 4 moments of 4 minibatches; 5 sums of episodes and masks; of
    # the metrics before learning 6 sums, and 2 extremes of either rank
    networks = [[4 * 64, 64, 64 * 64, 64, 64 * outputs, 16] for outputs in (2, 1)]
    assert found["bytes_per_iteration"] == 16 * 4 * (sum(map(sum, networks)) + 16) + 4 * 8 * 4 * 3 + 5 * 8 + 10 * 8
    assert 0.0 < found["share_in_sums"] < 1.0 and all(seconds > 0.0 for seconds in found["alone"].values())
