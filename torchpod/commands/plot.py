"""Learning curves: `torchpod plot RUN...`. One line per experiment and settings, with what its seeds agree on."""

import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml
from numpy.typing import NDArray

from torchpod.config import default_experiment
from torchpod.files import replacing
from torchpod.metrics import METRICS_FILE, read_metrics
from torchpod.run.folder import MAY_CHANGE
from torchpod.stats import bootstrap_ci, iqm

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Environment steps `[n]` and values `[n]`, without NaN."""

Settings = Mapping[str, str]
"""What was trained: settings by their dotted names, each as text."""

NUM_POINTS = 200
_LABEL_WIDTH = 66
_SEEDS_DIFFER_IN = (
    *("seed", "run_dir", "resume", "experiment_name", "population", "members"),
    *(name for name in MAY_CHANGE if name != "total_env_steps"),
)
# Okabe and Ito's colours, told apart by colour-blind readers too; yellow is left out on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")


def plot(run_dirs: Iterable[Path | str], out: Path | str, metric: str = "episode_return") -> Path:
    """Draws a metric over environment steps: the interquartile mean over seeds with its 95 % bootstrap interval.

    Runs of one experiment (or of one agent and environment, without a name) in one folder, as in
    `runs/<experiment>/<time>-seed<k>`, and members of a population count as seeds of one line, unless they differ in
    another setting than the seed or what a resumed run may change: then the legend says in which. A line ends where the
    first of its seeds ends. With one seed there is no interval.

    Args:
      run_dirs: run folders.
      out: the file to write, .png, .svg or .pdf; its folder is made if it does not exist.
      metric: a key of metrics.jsonl.

    Returns:
      The file.

    Raises:
      FileNotFoundError: if a folder has no metrics.
      ValueError: if a run has no such metric, or no value of it, or a config.yaml that is damaged.
      ImportError: if the extra is not installed.
      OSError: if the file cannot be written, which it names.
    """
    folders = list(dict.fromkeys(Path(run_dir).resolve() for run_dir in run_dirs))
    if not folders:
        raise ValueError("there is no run to plot; give one or more run folders, e.g. runs/cartpole/*.")
    lines: list[_Line] = []
    for folder in folders:
        place, config = _place(folder)
        for settings, curve in _curves(folder, metric, config):
            same = next((x for x in lines if (x.place, x.settings) == (place, settings)), None)
            if same is None:
                lines.append(same := _Line(place, settings, []))
            same.curves.append(curve)
    names = _names(lines)
    return _draw({name: _common(line.curves) for name, line in zip(names, lines, strict=True)}, Path(out), metric)


class _Line(NamedTuple):
    """Curves that differ in their seeds alone."""

    place: Path
    settings: Settings
    curves: list[Curve]


def _names(lines: Sequence[_Line]) -> list[str]:
    """What the legend calls each line: its experiment, and the settings in which it differs from others of that."""
    experiments, names = _experiments([line.place for line in lines]), []
    for line, experiment in zip(lines, experiments, strict=True):
        others = [other.settings for other in lines if other.place == line.place]
        keys = dict.fromkeys(key for settings in others for key in settings)
        differ = [key for key in keys if len({settings.get(key) for settings in others}) > 1]
        short = [key.rpartition(".")[2] for key in differ]
        shown = [name if short.count(name) == 1 else key for name, key in zip(short, differ, strict=True)]
        told = [f"{name}={line.settings[key]}" for name, key in zip(shown, differ, strict=True) if key in line.settings]
        names.append(" ".join([experiment, *told]))
    return names


def _experiments(places: Sequence[Path]) -> list[str]:
    """The name of each line's experiment; as much of its path as tells it from the others."""
    for depth in range(1, max(len(place.parts) for place in places)):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(set(places)):
            return names
    return [str(place) for place in places]


def _place(folder: Path) -> tuple[Path, dict[str, Any]]:
    """Where the runs of the same experiment lie, with its name at the end; and the settings of this one."""
    path = folder / "config.yaml"
    name, config = _experiment(path) if path.is_file() else (None, {})
    # A member of a population that was trained on is runs/<experiment>/<run>/members/<p>: a line of its own.
    if folder.parent.name == "members":
        return folder, config
    return (folder.parent if name in (None, folder.parent.name) else folder.parent / name), config


def _experiment(path: Path) -> tuple[str | None, dict[str, Any]]:
    """What the settings in a file call it, if they do; and these settings."""
    try:
        config = yaml.safe_load(path.read_text())
        if not isinstance(config, dict):
            raise TypeError("it holds no settings")
        name = config.get("experiment_name")
        if name is None and "algo" in config and "env" in config:
            name = default_experiment(config["algo"]["name"], config["env"])
    except (OSError, UnicodeError, yaml.YAMLError, AttributeError, KeyError, TypeError) as error:
        raise ValueError(
            f"{path} is not ours ({str(error).splitlines()[0]}); leave this run out, or remove the file, and the run "
            "is called as the folder that it is in."
        ) from error
    return None if name is None else str(name), config


def _settings(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """What was trained, whatever the seed."""
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in _SEEDS_DIFFER_IN:
            continue
        if isinstance(value, Mapping) and value:
            yield from _settings(value, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else json.dumps(value, default=str)


def _curves(folder: Path, metric: str, config: Mapping[str, Any]) -> list[tuple[Settings, Curve]]:
    """One curve of a run, or one for each member of a population, with what it was trained with."""
    if not (folder / METRICS_FILE).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
        repair = f"plot the runs in it: {folder}/*" if inside else "give a folder that torchpod train has made"
        raise FileNotFoundError(f"{folder} is no run folder: expected {METRICS_FILE} in it; {repair}.")
    rows = read_metrics(folder)
    values = [(np.mean(row["env_steps"]), np.atleast_1d(row[metric])) for row in rows if metric in row]
    if not values:
        known = sorted({key for row in rows for key in row} - {"iteration", "env_steps"})
        repair = " Train with evaluation.every=N for evaluations on the way." if "eval_" in metric else ""
        raise ValueError(f"{folder} has no metric {metric}; it has {', '.join(known) or 'no rows yet'}.{repair}")
    steps, table = np.array([s for s, _ in values], dtype=np.float64), np.stack([v for _, v in values])
    known = np.isfinite(table)
    if not known.any():
        raise ValueError(f"{folder} has no value of {metric} yet, as when no episode has ended; train it for longer.")
    settings, members = dict(_settings(config)), config.get("members") or {}
    # A member's value takes the place of the setting.
    names = {own: [f"algo.agent.{own}", f"algo.learner.{own}", f"members.{own}"] for own in members}
    members = {next((x for x in names[own] if x in settings), names[own][-1]): members[own] for own in members}
    curves = []
    for p in np.flatnonzero(known.any(0)):
        own = {name: json.dumps(column[p]) for name, column in members.items() if len(column) == table.shape[1]}
        curves.append((settings | own, (steps[known[:, p]], table[known[:, p], p])))
    return curves


def _common(curves: list[Curve]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """All curves at the same environment steps, from where all have begun to where the first ends.

    Each point is the mean of its part of the way, so that no row of a long run is skipped.

    Returns:
      Environment steps `[NUM_POINTS]` and values `[curves, NUM_POINTS]`.
    """
    first, last = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if first > last:  # They never overlap: compare the ends.
        first = last
    fine = -(-max(len(x) for x, _ in curves) // NUM_POINTS)
    grid = np.linspace(first, last, NUM_POINTS * fine)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid.reshape(-1, fine).mean(1), values.reshape(len(curves), -1, fine).mean(2)


def _interval(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """95 % bootstrap interval at every point. Whole runs are drawn, so its ends are as smooth as the curves."""
    runs = np.arange(len(values))
    return bootstrap_ci(runs, lambda drawn: iqm(values[drawn.astype(np.int64)], axis=0))


def _draw(groups: dict[str, tuple[NDArray[np.float64], NDArray[np.float64]]], out: Path, metric: str) -> Path:
    try:
        import matplotlib
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
        from matplotlib.ticker import EngFormatter
    except ImportError as error:
        raise ImportError("torchpod plot needs matplotlib: pip install 'torchpod-rl[plot]'.") from error

    style: Any = {
        "font.size": 11,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": "#666666",
        "axes.labelcolor": "#222222",
        "xtick.color": "#666666",
        "ytick.color": "#666666",
        "xtick.labelcolor": "#222222",
        "ytick.labelcolor": "#222222",
        "svg.fonttype": "none",
    }
    seeds = {name: f"{len(values)} seed{'s' if len(values) > 1 else ''}" for name, (_, values) in groups.items()}
    labels = {name: textwrap.fill(f"{name} ({number})", _LABEL_WIDTH) for name, number in seeds.items()}
    columns = 1 if len(groups) < 3 or max(map(len, labels.values())) > _LABEL_WIDTH / 2 else 2
    rows = sum(label.count("\n") + 1 for label in labels.values()) / columns
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.0, 4.2 + max(0.0, 0.25 * (rows - 4))), layout="constrained")
        FigureCanvasAgg(figure)  # No window, and no state shared with the caller's own figures.
        axes = figure.add_subplot()
        for i, (name, (steps, values)) in enumerate(groups.items()):
            colour = _COLOURS[i % len(_COLOURS)]
            line = _STYLES[i // len(_COLOURS) % len(_STYLES)]
            marker = "o" if steps[0] == steps[-1] else None
            axes.plot(
                steps, iqm(values, axis=0), line, color=colour, label=labels[name], lw=1.8, marker=marker, zorder=3
            )
            if len(values) > 1:
                low, high = _interval(values)
                axes.fill_between(steps, low, high, color=colour, alpha=0.2, lw=0, zorder=2)
        interval = any(len(values) > 1 for _, values in groups.values())
        axes.set_xlabel("environment steps")
        axes.set_ylabel(metric.replace("_", " ") + (" (IQM, 95% interval)" if interval else ""))
        axes.set_xlim(left=0)
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.grid(color="#dddddd", lw=0.8)
        axes.set_axisbelow(True)
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=columns)
        if out.suffix.lstrip(".").lower() not in (kinds := figure.canvas.get_supported_filetypes()):
            raise ValueError(f"{out} has the suffix {out.suffix or 'none'!r}; use one of .{', .'.join(sorted(kinds))}.")
        with replacing(out) as part:
            figure.savefig(part, format=out.suffix[1:], dpi=160)
    return out
