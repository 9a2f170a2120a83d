"""Learning curves: `torchpod plot RUN...`. One line per experiment, with what its seeds agree on."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from numpy.typing import NDArray

from torchpod.config import default_experiment
from torchpod.files import replacing
from torchpod.metrics import METRICS_FILE, read_metrics
from torchpod.stats import bootstrap_ci, iqm

Curve = tuple[NDArray[np.float64], NDArray[np.float64]]
"""Environment steps `[n]` and values `[n]`, without NaN."""

NUM_POINTS = 200
# Okabe and Ito's colours, told apart by colour-blind readers too; yellow is left out on white.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_STYLES = ("-", "--", ":", "-.")


def plot(run_dirs: Iterable[Path | str], out: Path | str, metric: str = "episode_return") -> Path:
    """Draws a metric over environment steps: the interquartile mean over seeds with its 95 % bootstrap interval.

    Runs of one experiment (or of one agent and environment, without a name) in one folder, as in
    `runs/<experiment>/<time>-seed<k>`, and all members of a population count as seeds of one line. A line ends where
    the first of its seeds ends. With one seed there is no interval.

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
    groups: dict[str, list[Curve]] = {}
    folders = list(dict.fromkeys(Path(run_dir).resolve() for run_dir in run_dirs))
    if not folders:
        raise ValueError("there is no run to plot; give one or more run folders, e.g. runs/cartpole/*.")
    for folder, name in zip(folders, _experiments(folders), strict=True):
        groups.setdefault(name, []).extend(_curves(folder, metric))
    return _draw({name: _common(curves) for name, curves in groups.items()}, Path(out), metric)


def _experiments(folders: Sequence[Path]) -> list[str]:
    """The name of each run's experiment; as much of its path as tells it from the others."""
    places = [_place(folder) for folder in folders]
    for depth in range(1, max(len(place.parts) for place in places)):
        names = ["/".join(place.parts[-depth:]) for place in places]
        if len(set(names)) == len(set(places)):
            return names
    return [str(place) for place in places]


def _place(folder: Path) -> Path:
    """Where the runs of the same experiment lie, with its name at the end."""
    # A member of a population that was trained on is runs/<experiment>/<run>/members/<p>: a line of its own.
    if folder.parent.name == "members":
        return folder
    path = folder / "config.yaml"
    name = _experiment(path) if path.is_file() else None
    return folder.parent if name in (None, folder.parent.name) else folder.parent / name


def _experiment(path: Path) -> str | None:
    """What the settings in a file call it, if they do."""
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
    return None if name is None else str(name)


def _curves(folder: Path, metric: str) -> list[Curve]:
    """One curve of a run, or one for each member of a population."""
    if not (folder / METRICS_FILE).is_file():
        inside = sorted(path.parent.name for path in folder.glob(f"*/{METRICS_FILE}"))
        repair = f"plot the runs in it: {folder}/*" if inside else "give a folder that torchpod train has made"
        raise FileNotFoundError(f"{folder} is no run folder: expected {METRICS_FILE} in it; {repair}.")
    rows = read_metrics(folder)
    values = [(np.mean(row["env_steps"]), np.atleast_1d(row[metric])) for row in rows if metric in row]
    if not values:
        known = sorted({key for row in rows for key in row} - {"iteration", "env_steps"})
        raise ValueError(f"{folder} has no metric {metric}; it has {', '.join(known) or 'no rows yet'}.")
    steps, table = np.array([s for s, _ in values], dtype=np.float64), np.stack([v for _, v in values])
    curves = [(steps[known], y[known]) for y in table.T if (known := np.isfinite(y)).any()]
    if not curves:
        raise ValueError(f"{folder} has no value of {metric} yet, as when no episode has ended; train it for longer.")
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
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(7.0, 4.2), layout="constrained")
        FigureCanvasAgg(figure)  # No window, and no state shared with the caller's own figures.
        axes = figure.add_subplot()
        for i, (name, (steps, values)) in enumerate(groups.items()):
            colour = _COLOURS[i % len(_COLOURS)]
            line = _STYLES[i // len(_COLOURS) % len(_STYLES)]
            label = f"{name} ({len(values)} seed{'s' if len(values) > 1 else ''})"
            marker = "o" if steps[0] == steps[-1] else None
            axes.plot(steps, iqm(values, axis=0), line, color=colour, label=label, lw=1.8, marker=marker, zorder=3)
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
        axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.16), ncols=1 if len(groups) < 3 else 2)
        if out.suffix.lstrip(".").lower() not in (kinds := figure.canvas.get_supported_filetypes()):
            raise ValueError(f"{out} has the suffix {out.suffix or 'none'!r}; use one of .{', .'.join(sorted(kinds))}.")
        with replacing(out) as part:
            figure.savefig(part, format=out.suffix[1:], dpi=160)
    return out
