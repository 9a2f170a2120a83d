"""Renders docs/benchmarks.md and docs/scaling.md (scaling.py) from bench/results/*.json: `torchpod bench report`.

For each suite and machine: the newest run as a table, with the targets that are set (targets.py), what changed since
the run before it on the same machine, and the history of the ratio by commit.
"""

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torchpod.bench import scaling
from torchpod.bench.compare import LEARNED, TOO_EARLY
from torchpod.bench.harness import FORMAT, RESULTS
from torchpod.bench.processes import ROOT
from torchpod.bench.targets import (
    LESS_IS_BETTER,
    MORE_IS_BETTER,
    Target,
    below_figures,
    beside_stated,
    missed,
    outcome,
    targets_of,
)

DOCS = ROOT / "docs"
HISTORY_LENGTH = 8
# A change of the ratio to the peer that is more than noise between two runs on the same machine.
REGRESSION = 0.1
LEAST_SECONDS = 0.1
OTHER_SPEED = 0.1
"""Of a matrix product, by which a machine differs between two runs."""
# What is read of every result file, of its `hardware` and of each of its rows.
KEYS = ("suite", "date", "hardware", "commit", "calibration_gflops", "load_average", "failures", "rows")
HARDWARE_KEYS = ("name", "cpu", "cores", "gpu")
ROW_KEYS = ("name", "value", "unit", "repeats", "peer", "ratio", "interval", "versions", "note")

HEADER = Path(__file__).with_name("report.md")
"""What the page begins with: how to read it, and what is to be known of single runs."""


def main(results: Path = RESULTS, docs: Path = DOCS) -> int:
    """Writes both pages, that of scaling if it was measured; returns 0."""
    documents = load(results)
    pages = {"benchmarks.md": render(documents)}
    if told := [x for x in documents if x["suite"] == "scaling" and scaling.tells(x)]:
        on_gpu = [x for x in documents if x["suite"] == "gpu" and x["hardware"]["gpu"]]
        same = [x for x in on_gpu if x["hardware"]["name"] == on_gpu[-1]["hardware"]["name"]]
        pages["scaling.md"] = scaling.render(told[-1], _with_parts(same) if same else None)
    docs.mkdir(parents=True, exist_ok=True)
    for name, text in pages.items():
        (docs / name).write_text(text)
        print(f"wrote {docs / name}")
    return 0


def load(results: Path) -> list[dict[str, Any]]:
    """The result files of this format, oldest first; runs with `--quick` measure nothing and are left out.

    Raises:
      ValueError: if a file is no result file of this format.
    """
    documents = []
    for path in sorted(results.glob("*.json")):
        try:
            document = json.loads(path.read_text())
        except ValueError as error:
            raise ValueError(f"{path} is no JSON: {error}; move it out of {results}") from None
        if not isinstance(document, dict) or document.get("format") != FORMAT:
            raise ValueError(f"{path} is no benchmark result of format {FORMAT}; move it out of {results}")
        if lacking := _lacking(document):
            raise ValueError(f"{path} is a benchmark result without {', '.join(lacking)}; move it out of {results}")
        if not document.get("quick"):
            documents.append(document)
    return sorted(documents, key=lambda document: document["date"])


def _lacking(document: Mapping[str, Any]) -> list[str]:
    """What a page needs and a result file has not."""
    wanted = (*KEYS, "sums") if document.get("suite") == "scaling" else KEYS
    found = [key for key in wanted if key not in document]
    found += [f"hardware.{key}" for key in HARDWARE_KEYS if key not in document.get("hardware", HARDWARE_KEYS)]
    return found + [
        f"rows[{i}].{key}" for i, row in enumerate(document.get("rows", ())) for key in ROW_KEYS if key not in row
    ]


def render(documents: Sequence[Mapping[str, Any]]) -> str:
    """The page."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for document in documents:
        groups.setdefault((document["suite"], document["hardware"]["name"]), []).append(document)
    parts = [HEADER.read_text(), *(_section(runs) for _, runs in sorted(groups.items()))]
    if not groups:
        parts.append("Nothing has been measured yet.\n")
    return "\n".join(parts)


def regressions(runs: Sequence[Mapping[str, Any]], names: Sequence[str], *, newest_only: bool = False) -> list[str]:
    """One sentence for each row that was better by more than `REGRESSION` when it was measured the last time but one.

    What counts is the ratio to its peer; the number itself, by twice as much, where it was measured without one, as it
    would have been at the newest run's speed of a core. What gets slower little by little is seen in the history alone.

    Args:
      runs: of one suite on one machine, oldest first.
      names: of the rows.
      newest_only: leave out rows that the newest run could not compare.
    """
    found = []
    for name in names:
        rows = [(run, row) for run in runs for row in run["rows"] if row["name"] == name and _can_change(row)]
        measured = [(run, row) for run, row in rows if _has_ratio(row)]
        what, limit, key = "ratio", REGRESSION, "ratio"
        if not measured or measured[-1][0] is not rows[-1][0]:  # the peer was not there
            measured, what, limit, key = rows, "value", 2 * REGRESSION, "value"
        if len(measured) < 2:
            continue
        (before, old), (newest, new) = measured[-2:]
        if newest_only and newest is not runs[-1]:
            continue
        was, now, speed = old[key], new[key], 1.0 if what == "ratio" else _speed(before, newest)
        if new["unit"] in LESS_IS_BETTER:
            worse = now / (was / speed if new["unit"] == "s" else was) - 1
        else:
            worse = 1 - now / (was * speed)
        if worse > limit:
            told = (f"{x:.2f}" if what == "ratio" else _number(x, new["unit"]) for x in (was, now))
            core = f", and the speed of a core to {speed:.2f} x" if round(speed, 2) != 1 else ""
            found.append(f"{name}: the {what} went from {' to '.join(told)} since {before['commit']}{core}.")
    return found


def _speed(before: Mapping[str, Any], newest: Mapping[str, Any]) -> float:
    """Of a core in the newest run over that in one before, by the first product that both have; on a GPU 1."""
    was, now = before["calibration_gflops"], newest["calibration_gflops"]
    product = next((name for name in now if name in was), None)
    return 1.0 if product is None or newest["hardware"]["gpu"] else now[product] / was[product]


def regressed(suite: str, results: Path = RESULTS) -> list[str]:
    """`regressions` of the rows that the newest run of a suite has measured, against those before on such a machine."""
    runs = [run for run in load(results) if run["suite"] == suite]
    runs = [run for run in runs if run["hardware"]["name"] == runs[-1]["hardware"]["name"]]
    return regressions(runs, [row["name"] for row in runs[-1]["rows"]], newest_only=True) if runs else []


def _can_change(row: Mapping[str, Any]) -> bool:
    """Whether it was measured, by something that gets better or worse by a share of it; of seconds, more than once."""
    least = LEAST_SECONDS if row["unit"] == "s" else 0.0
    if row["unit"] == "s" and len(row["repeats"]) < 2:
        return False
    return row["unit"] in LESS_IS_BETTER | MORE_IS_BETTER and (row["value"] or 0.0) > least


def _has_ratio(row: Mapping[str, Any]) -> bool:
    """Whether it says something: a peer that compiles for no time compiles nothing."""
    return row["ratio"] is not None and (row["unit"] != "s" or row["peer"]["value"] >= LEAST_SECONDS)


def _with_parts(runs: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """The newest whole run, with the rows of later runs of a part of the suite (`--only`) in place of its own.

    Without a whole run, the rows of all parts.
    """
    start = max((i for i, run in enumerate(runs) if not run.get("only")), default=0)
    merged, measured_in = {**runs[start], "slow_peers": below_figures(runs[start])}, dict[str, Mapping[str, Any]]()
    for part in runs[start + 1 :]:
        new = {row["name"]: row for row in part["rows"]}
        measured_in |= dict.fromkeys(new, part)
        for row in new.values():
            note = f"measured {part['date'][:10]}, commit {part['commit']}"
            new[row["name"]] = {**row, "note": "; ".join(filter(None, [row["note"], note]))}
        names = {row["name"] for row in merged["rows"]}
        merged["rows"] = [new.get(row["name"], row) for row in merged["rows"]]
        merged["rows"] += [row for name, row in new.items() if name not in names]
        anew = new.keys() | {name for name, _ in part["failures"]}
        for key, told in (("failures", part["failures"]), ("slow_peers", below_figures(part))):
            merged[key] = [x for x in merged[key] if x[0] not in anew] + told
    return {**merged, "parts": [part for part in runs if any(part is x for x in measured_in.values())]}


def _section(runs: Sequence[Mapping[str, Any]]) -> str:
    latest = _with_parts(runs)
    machine = latest["hardware"]
    vectors = machine.get("vectors")  # told since 2026-11-25
    device = ", ".join(filter(None, [machine["cpu"], vectors, f"{machine['cores']} cores", machine["gpu"]]))
    products = ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in latest["calibration_gflops"].items())
    # Each row names those of its own peer; what has two was measured in parts, unless one is the other without "+cpu".
    found = dict.fromkeys(f"{name} {version}" for row in latest["rows"] for name, version in row["versions"].items())
    versions = [x for x in found if not any(y.startswith(f"{x}+") for y in found)]
    took = f", took {latest['wall_s'] / 60:.1f} min" if "wall_s" in latest else ""  # told since 2026-11-26
    part = "A part of the suite, " if latest.get("only") else ""  # there is no whole run
    lines = [
        f"## {latest['suite']} on {machine['name']}",
        "",
        f"{device}. {part}{latest['date'][:10]}, commit {latest['commit']}, "
        + f"load average {latest['load_average'][0]:.2f}{took}"
        + (f"; one core multiplies {products}. " if products else ". ")
        + ", ".join(versions)
        + ".",
        "",
    ]
    if parts := [_part(run, latest["calibration_gflops"]) for run in latest["parts"]]:
        lines += [f"{'Other parts' if part else 'Parts of it since then'}: {'; '.join(parts)}.", ""]
    targets = targets_of(latest)
    if targets:
        lines += ["| row | torchpod | peer | ratio | target | note |", "|---|--:|--:|--:|---|---|"]
    else:
        lines += ["| row | torchpod | peer | ratio | note |", "|---|--:|--:|--:|---|"]
    beside_slow = {name for name, _ in latest["slow_peers"]}
    for row in latest["rows"]:
        cells = _cells(row)
        if targets:
            target = targets.get(row["name"], Target())
            told = ": ".join(filter(None, outcome(target, row)))
            if ": met" in told and row["name"] in beside_slow:
                told += ", beside a peer below its figure"
            cells.insert(-1, ", ".join(filter(None, [told, beside_stated(target, row)])))
        lines.append(f"| {' | '.join(cells)} |")
    failures = [*missed(latest), *latest["failures"], *latest["slow_peers"]]
    problems = [f"{name}: {sentence}" for name, sentence in failures]
    problems += regressions(runs, [row["name"] for row in latest["rows"]])
    bounds = {name: target.bound for name, target in targets.items() if target.bound and target.most is None}
    met = [
        row["name"]
        for row in latest["rows"]
        if row["name"] in bounds and outcome(targets[row["name"]], row)[1].startswith("met")
    ]
    lines += ["", *(f"- **{problem}**" for problem in problems)] if problems else []
    lines += ["", *(f"- {name} is bounded by {bounds[name]}." for name in met)] if met else []
    by_commit = _by_commit(runs)
    if len(by_commit) > 1:
        recent = by_commit[-HISTORY_LENGTH:]
        lines += [
            "",
            "Ratio by commit (of rows without a peer, what was measured):",
            "",
            "| row | " + " | ".join(f"{run['commit']} ({run['date'][:10]})" for run in recent) + " |",
            "|---|" + "--:|" * len(recent),
        ]
        for row in latest["rows"]:
            same = ([r for r in run["rows"] if r["name"] == row["name"]] for run in recent)
            cells = [_in_history(rows[-1]) if rows else "-" for rows in same]
            lines.append(f"| {row['name']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _part(run: Mapping[str, Any], of_whole: Mapping[str, float]) -> str:
    """A run of a part; its first matrix product too, where the machine had another speed than in the whole run."""
    took = f" in {run['wall_s'] / 60:.1f} min" if "wall_s" in run else ""
    told = f"{len(run['rows'])} rows{took}, {run['date'][:10]}, commit {run['commit']}"
    products = [
        f"{name} {rate:.0f} GFLOP/s"
        for name, rate in run["calibration_gflops"].items()
        if abs(rate / of_whole.get(name, rate) - 1) > OTHER_SPEED
    ]
    return ", ".join([told, f"load {run['load_average'][0]:.2f}", *products[:1]])


def _in_history(row: Mapping[str, Any]) -> str:
    """The ratio; what was measured, where the row never has a peer."""
    if _has_ratio(row):
        return f"{row['ratio']:.2f}"
    return "-" if row["peer"] else _number(row["value"], row["unit"])


def _by_commit(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All rows that were measured at a commit, oldest first; of a row measured twice the last counts."""
    found: dict[str, dict[str, Any]] = {}
    for run in runs:
        rows = found.pop(run["commit"], {"rows": []})["rows"]
        found[run["commit"]] = {"commit": run["commit"], "date": run["date"], "rows": [*rows, *run["rows"]]}
    return [*found.values()]


def _cells(row: Mapping[str, Any]) -> list[str]:
    ratio = "-"
    peer = f"{row['peer']['name']} {_number(row['peer']['value'], row['unit'])}" if row["peer"] else "-"
    if _has_ratio(row):
        ratio = f"{row['ratio']:.2f}"
        if row["interval"]:
            low, high = row["interval"]
            ratio += f" [{low:.2f}, {high:.2f}]"
    elif row["ratio"] is not None:
        peer = "-"
    notes = [row["note"].replace("|", "\\|"), _unlearned(row) or _returns(row)]
    note = "; ".join(filter(None, notes))
    return [row["name"], _number(row["value"], row["unit"]), peer, ratio, note]


def _unlearned(row: Mapping[str, Any]) -> str:
    """Which sides did not learn Pendulum; "" if both did, or nothing is known."""
    if not row["name"].startswith("ppo_pendulum/"):
        return ""
    returns = {side: [x["episode_return"] for x in rounds] for side, rounds in row.get("rounds", {}).items()}
    sides = [side for side, xs in returns.items() if None in xs or statistics.mean(xs) < LEARNED["pendulum"]]
    return "neither side learned" if len(sides) == 2 else "".join(f"{side} did not learn" for side in sides)


def _returns(row: Mapping[str, Any]) -> str:
    """Of both sides in the last round, where it is too early to hold them against each other; "" if there are none."""
    ends = [(side, rounds[-1].get("episode_return")) for side, rounds in row.get("rounds", {}).items()]
    if TOO_EARLY not in row["note"] or len(ends) != 2 or any(x is None for _, x in ends):
        return ""
    return "by then " + " and ".join(f"{side} {x:.3g}" for side, x in ends)


def _number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return f"{value:.1f} s" if value >= LEAST_SECONDS else f"{1e3 * value:.0f} ms"
    if unit == "return":
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.2g}"
