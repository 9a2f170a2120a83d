"""Suite `brax`: environments of Brax through torchpod's door, beside Brax's own loop and brax.training's PPO.

    torchpod bench brax [--json FILE] [--quick] [--only NAME]

Rows `stepping_<env>/<num_envs>`: random actions, one call of XLA for each step of the door, beside one `lax.scan` of
all steps. Rows `ppo_<env>/<num_envs>`: PPO in Sebulba beside `brax.training.agents.ppo.train`. Equal are the batch of
32 steps of all environments, 4 epochs of 4 minibatches, two 2x64 tanh networks with one log std per action, float32,
Adam, and every coefficient; both sides begin episodes in the environment's first state. What is not:

- Brax's minibatch is whole unrolls of some environments, torchpod's some steps of each environment.
- Brax computes advantages anew in each minibatch, with the values of that moment; torchpod once per batch.
- Networks begin with LeCun's weights in Brax, orthogonal ones in torchpod.
- torchpod's step after an episode's last one only resets, and is not counted; Brax resets in the last one.
- torchpod acts with parameters that are one update old, while it learns; Brax acts and learns in turn.

Both sides have all cores: pinned to fewer than its pool has threads, XLA stalls. Read harness.py first.
"""

import dataclasses
import sys
from collections.abc import Sequence
from typing import NamedTuple

from torchpod.bench import compare, harness, processes
from torchpod.bench.anakin import compile_rows, describe, noted
from torchpod.bench.compare import TOO_EARLY, RowMaker
from torchpod.bench.harness import Record
from torchpod.bench.processes import Worker


class Case(NamedTuple):
    """What is measured on both sides."""

    env: str
    num_envs: int
    iterations: int
    """Within a timed call, some seconds; of stepping, steps."""
    mode: str = "env_only"
    """env_only or update."""
    backend: str | None = "spring"
    """The quickest; None where an environment has none."""
    learn: int = 0
    """Iterations before timing; then an episode in each environment says whether both sides learned. 0: neither."""

    @property
    def name(self) -> str:
        """Of its row."""
        return f"{'ppo' if self.mode == 'update' else 'stepping'}_{self.env}/{self.num_envs}"


CASES = (
    Case("fast", 1024, 2000, backend=None),
    Case("inverted_pendulum", 1024, 200),
    Case("ant", 256, 60),
    Case("inverted_pendulum", 256, 10, "update", learn=40),
    Case("ant", 256, 2, "update"),
)
NOTES = {
    "env_only": "all cores, unpinned; a call of XLA per step beside one for all steps",
    "update": "all cores, unpinned; Brax's minibatches are whole unrolls, with advantages of their own",
}


def main(
    json_path: str | None = None,
    *,
    quick: bool = False,
    cases: Sequence[Case] = CASES,
    rounds: int = 3,
    repeats: int = 3,
    workers: tuple[Worker, Worker] | None = None,
    only: str | None = None,
) -> int:
    """Measures, writes the result file, prints the rows.

    Args:
      json_path: where the rows go; None for bench/results/.
      quick: stepping `fast`, and a little PPO on it, two rounds of one call: whether everything works.
      cases: what to measure.
      rounds: times that each side runs, in turn; the first compiles cold.
      repeats: timed calls in a round.
      workers: torchpod's and the peer's; None for the real ones.
      only: measure the rows whose names begin with this; the page then shows this run in their place.

    Returns:
      0, or 1 if the work was unequal, a side learned nothing or much less than the other, or failed.
    """
    if quick:
        cases, rounds, repeats = (Case("fast", 64, 100, backend=None), Case("fast", 64, 2, "update", None)), 2, 1
    ours, peer = workers or default_workers()
    make = RowMaker()
    extra = {"rounds": rounds, "repeats_per_round": repeats, "quick": quick, "only": only}
    with Record("brax", json_path, **extra) as record:
        record.calibrate(None)
        for case in harness.chosen(cases, only, "brax"):
            arguments = [case_arguments(case, repeats, seed=i) for i in range(rounds)]
            results = processes.interleave((ours, peer), arguments, core=None)
            a, b = results[ours.name], results[peer.name]
            new = [make.rate(case.name, a, b, peer_name=peer.name)]
            told = TOO_EARLY if case.mode == "update" else ""
            if case.learn:
                told = compare.returned((a, b))
                record.failures += compare.untrained(case.name, case.env, (a, b))
            new[0] = noted(new[0], told)
            if case.mode == "update":
                new += compile_rows(make, case.name, (ours, peer), [results])
            for row in new:
                record.rows.append(dataclasses.replace(row, note="; ".join(filter(None, [NOTES[case.mode], row.note]))))
                print(describe(record.rows[-1]), flush=True)
            record.failures += compare.problems(case.name, a, b, returns=case.learn > 0)
    return record.status


def default_workers() -> tuple[Worker, Worker]:
    """Torchpod in this Python, Brax in that of `.venv-peers`."""
    python, missing = processes.peers_python()
    return (
        Worker("torchpod", (sys.executable, "-m", "torchpod.bench.brax_worker")),
        Worker("brax", (python, str(processes.ROOT / "bench" / "peers" / "jax_brax.py")), missing=missing),
    )


def case_arguments(case: Case, repeats: int, *, seed: int) -> list[str]:
    """The arguments of one run of a worker; the same for both sides."""
    arguments = ["--env", case.env, "--num-envs", case.num_envs, "--mode", case.mode]
    arguments += ["--iterations", case.iterations, "--repeats", repeats, "--warmup", case.learn, "--seed", seed]
    arguments += ["--backend", case.backend] if case.backend else []
    return [str(x) for x in (*arguments, *(["--learn"] if case.learn else []))]
