"""What a run shows of itself while it trains: a progress bar, or plain lines. Read metrics.py first."""

import collections
import contextlib
import math
import sys
import time
from collections.abc import Callable
from typing import Literal, NamedTuple

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

from torchpod.env import Env
from torchpod.kernels.gxx import cores
from torchpod.metrics import Row, number, short

_RATE_WINDOW_S = 30.0
_BAR_WIDTH = 8


class Advice(NamedTuple):
    """What to change in a run of Sebulba, by what is waited for."""

    environments: str
    turns: str
    """If each side waits for the other."""
    update: str


def advise(
    env: Env,
    *,
    lag: int | Literal["free"],
    max_lag: int | None,
    queue_size: int,
    actors: int,
    pools: int,
    one_stands_still: bool,
    num_epochs: int,
    num_minibatches: int,
) -> Advice:
    """Advice that can be followed.

    Args:
      env: it may know what makes it faster (`Env.advice`), or have threads of its own (EnvPool's `num_threads`).
      lag: of the loop.
      max_lag: the most that the agent takes; None: any.
      queue_size: of the loop. An actor is that many unrolls ahead, and one in its hands: more lag changes nothing.
      actors: threads that act.
      pools: of environments, over all actor threads.
      one_stands_still: whether a GPU decides, and an actor has one pool, whose threads wait for it.
      num_epochs: of the learner.
      num_minibatches: of the learner.
    """
    environments = getattr(env, "advice", "raise loop.num_actor_threads")
    if (num_threads := getattr(env, "num_threads", None)) is not None:
        free = pools * num_threads < cores()
        environments = "they have a thread for every core"
        if (
            actors > 1 and actors >= cores()
        ):  # the learner has none for itself: on CartPole half as fast (docs/loops.md)
            environments = "lower loop.num_actor_threads"
        if one_stands_still:
            environments = "set loop.pools_per_actor=2"
        if free:
            environments = "raise env.num_threads"
    update = "take a smaller network"
    if num_minibatches > 1:
        update = "lower algo.learner.num_minibatches"
    if num_epochs > 1:
        update = "lower algo.learner.num_epochs"
    turns = "raise algo.unroll_length or num_envs"
    if lag == "free" or lag > queue_size + 1:
        turns = "raise loop.queue_size"
    elif max_lag is None or lag < max_lag:
        turns = "raise loop.lag" + (" and loop.queue_size" if lag > queue_size else "")
    return Advice(environments, turns, update)


class UnreadError(BrokenPipeError):
    """Nobody reads what is printed any more."""


class _Console(Console):
    """Where nobody reads any more, the run hears of it, and saves what there is; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise UnreadError("nobody reads what is printed")


class ConsoleSink:
    """A progress bar on a terminal, else a plain line every few seconds.

    It shows environment steps, their rate (`env_steps_per_s` of the row, or else measured here), the return of the
    newest iteration in which an episode ended (in a population the mean over members and the best one; with groups of
    agents also that of each) and of the newest evaluation, the losses and the time left.

    Args:
      total_env_steps: of the whole run, as planned; resets take a part of them.
      num_iterations: of the whole run: what the bar, the percentage and the time left go by.
      advice: of a run of Sebulba.
      every_s: seconds between two plain lines.
      console: where to write; standard output if None.
      clock: the time in seconds.
    """

    def __init__(
        self,
        total_env_steps: int,
        num_iterations: int,
        *,
        advice: Advice | None = None,
        every_s: float = 5.0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._total, self._num_iterations = total_env_steps, num_iterations
        self._advice, self._every_s, self._clock = advice, every_s, clock
        self._console = console or _Console(file=sys.stdout)
        self._history: collections.deque[tuple[float, int, int]] = collections.deque()
        self._shown_at, self._unshown = -math.inf, None
        self._return = self._greedy = "-"
        self._progress: Progress | None = None
        if self._console.is_terminal:
            # Redrawn by `write`: a thread of its own would compete with training for the cores.
            columns = (
                BarColumn(bar_width=_BAR_WIDTH),
                TaskProgressColumn(),
                TextColumn("{task.fields[text]}", markup=False),
            )
            self._progress = Progress(*columns, console=self._console, auto_refresh=False)
            self._task = self._progress.add_task("train", total=num_iterations, text="compiling")
            self._progress.start()

    def write(self, row: Row) -> None:
        if (newest := _show_return(row.get("eval_return", math.nan))) != "-":  # a row of its own
            self._greedy = newest + _show_parts(row, "eval_return")
            return
        now = self._clock()
        self._history.append((now, int(number(row["env_steps"])), int(number(row["iteration"]))))
        while len(self._history) > 2 and now - self._history[1][0] >= _RATE_WINDOW_S:
            self._history.popleft()
        self._unshown = row
        if (newest := _show_return(row.get("episode_return", math.nan))) != "-":
            self._return = newest + _show_parts(row, "episode_return")
        if now - self._shown_at >= (0.1 if self._progress else self._every_s):
            self._show(row, now)

    def close(self) -> None:
        with contextlib.suppress(UnreadError):  # the run is over, and has other things to say
            if self._unshown is not None:
                self._show(self._unshown, self._clock())
            if self._progress is not None:
                self._progress.stop()

    def _show(self, row: Row, now: float) -> None:
        self._shown_at, self._unshown = now, None
        text, iteration = self._text(row), self._history[-1][2]
        if self._progress is not None:
            self._progress.update(self._task, completed=iteration, text=text, refresh=True)
        else:
            percent = 100 * iteration // self._num_iterations
            self._console.print(f"{percent:3d}%  {text}", soft_wrap=True, markup=False, highlight=False)

    def _text(self, row: Row) -> str:
        # From the first row on: what came before it is compilation.
        (then, steps_then, iteration_then), (now, env_steps, iteration) = self._history[0], self._history[-1]
        shown_rate = number(row.get("env_steps_per_s", math.nan))
        if math.isnan(shown_rate) and now > then:
            shown_rate = (env_steps - steps_then) / (now - then)
        iterations_left, done = self._num_iterations - iteration, iteration - iteration_then
        left_s = iterations_left * (now - then) / done if done > 0 and now > then else math.nan
        head = [
            f"{_compact(env_steps)}/{_compact(self._total)} env steps",
            f"{_compact(shown_rate)}/s",
            f"return {self._return}",
            *([] if self._greedy == "-" else [f"greedy {self._greedy}"]),
        ]
        losses = [f"{key.replace('_', ' ')} {short(number(row[key]))}" for key in row if _is_loss(key)]
        losses.sort(key=lambda text: not text.startswith("loss "))
        starving = [_starving(row, self._advice)] if self._advice else []
        tail = [*starving, f"ETA {_show_duration(left_s)}"]
        # What does not fit beside the bar and the percentage is left out, but never the time left.
        while losses and self._progress and len("  ".join(head + losses + tail)) > self._console.width - _BAR_WIDTH - 6:
            losses.pop()
        return "  ".join(head + losses + tail)


def _starving(row: Row, advice: Advice) -> str:
    """Which side the other waits for, and what to change (docs/loops.md)."""
    learner, actor, in_env, in_inference, in_transfer = (
        number(row.get(name, 0.0))
        for name in ("learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference", "actor_in_transfer")
    )
    if learner > 0.5 and actor > 0.5:
        return f"actors and learner take turns: {advice.turns}"
    if learner > 0.5:
        sides = {
            f"environments: {advice.environments}": in_env,
            "inference: raise num_envs": in_inference,
            "transfers: raise loop.pools_per_actor": in_transfer,
        }
        return f"learner waits {learner:.0%} for {max(sides, key=lambda side: sides[side])}"
    if actor > 0.5:
        return f"actors wait {actor:.0%} for the update: {advice.update}"
    return "actors and learner keep pace"


def _is_loss(key: str) -> bool:
    return key == "loss" or key.startswith("loss/") or key.endswith("_loss")


def _show_return(value: float | int | list[float]) -> str:
    best = max((x for x in value if not math.isnan(x)), default=math.nan) if isinstance(value, list) else math.nan
    return short(number(value)) + ("" if math.isnan(best) else f" (best {short(best)})")


def _show_parts(row: Row, name: str) -> str:
    """Of groups, and of policies that are none: the sum of all says nothing where one loses what another wins."""
    parts = {key: key.removeprefix(f"{name}/") for key in row if key.startswith(f"{name}/")}
    parts |= {key: f"policy {key.removesuffix(f'/{name}')}" for key in row if key.endswith(f"/{name}")}
    told = [f"{part} {short(number(row[key]))}" for key, part in parts.items()]
    return f" ({', '.join(told)})" if told else ""


def _compact(value: float) -> str:
    """12, 1.23k, 61.4k, 500k, 1.25M."""
    if math.isnan(value):
        return "-"
    for scale, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g}{unit}" if value < 999.5 * scale else f"{value / scale:.0f}{unit}"
    return f"{value:.0f}"


def _show_duration(seconds: float) -> str:
    if math.isnan(seconds):
        return "-"
    minutes, whole = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{whole:02d}" if hours else f"{minutes}:{whole:02d}"
