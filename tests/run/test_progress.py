import contextlib
import io
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.test_metrics import NAN, row
from torchpod.env import HostEnv
from torchpod.envs.classic.cartpole import CartPole
from torchpod.envs.host import EnvPool, Gymnasium
from torchpod.run import progress
from torchpod.run.progress import Advice, ConsoleSink, UnreadError, _Console, advise

# The console


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def console(total, terminal=False, width=120, num_iterations=None):
    out, clock = io.StringIO(), Clock()
    screen = Console(file=out, force_terminal=terminal, width=width, color_system=None)
    return ConsoleSink(total, num_iterations or total // 100, console=screen, clock=clock), out, clock


def test_plain_lines_show_steps_rate_return_losses_and_time_left():
    sink, out, clock = console(1000)
    sink.write(row(1, episode_return=NAN, loss=0.5))
    clock.now = 10.0
    sink.write(row(3, episode_return=21.5, loss=0.25, policy_loss=-0.01, entropy=0.6))
    sink.close()
    assert out.getvalue().splitlines() == [
        " 10%  100/1k env steps  -/s  return -  loss 0.5  ETA -",
        " 30%  300/1k env steps  20/s  return 21.5  loss 0.25  policy loss -0.01  ETA 0:35",
    ]


def test_progress_and_time_left_go_by_iterations_as_resets_are_no_env_steps():
    for terminal in (False, True):
        sink, out, clock = console(1000, terminal=terminal, num_iterations=4)
        for i, env_steps in enumerate((249, 490, 700, 930), 1):
            clock.now = 10.0 * i
            sink.write({"iteration": i, "env_steps": env_steps})
        sink.close()
        shown = [line for line in out.getvalue().splitlines() if "env steps" in line]
        assert " 75%" in shown[2] and "700/1k env steps" in shown[2] and shown[2].endswith("ETA 0:10")
        assert "100%" in shown[-1] and "930/1k env steps" in shown[-1] and shown[-1].endswith("ETA 0:00")


def test_plain_lines_come_at_most_every_few_seconds_and_the_last_always():
    sink, out, clock = console(10_000)
    for i in range(1, 101):
        clock.now = 0.2 * i
        sink.write(row(i))
    sink.close()
    shown = [line.split()[0] for line in out.getvalue().splitlines()]
    assert shown == ["1%", "26%", "51%", "76%", "100%"]


def test_the_rate_of_the_row_is_shown_and_the_time_left_is_measured_without_compilation():
    sink, out, clock = console(1_000_000, num_iterations=10)
    clock.now = 60.0  # compilation
    sink.write({"iteration": 1, "env_steps": 100_000, "env_steps_per_s": NAN})
    clock.now = 70.0
    sink.write({"iteration": 2, "env_steps": 200_000, "env_steps_per_s": 80_000.0})  # a population of 8
    assert out.getvalue().splitlines()[1].endswith("200k/1M env steps  80k/s  return -  ETA 1:20")


def test_a_population_shows_mean_and_best_of_those_that_have_one():
    sink, out, _ = console(1000)
    sink.write(row(1, episode_return=[10.0, NAN, 20.0], loss=[1.0, 3.0, 2.0]))
    sink.close()
    assert "return 15 (best 20)  loss 2  " in out.getvalue()


def test_the_return_is_that_of_the_newest_episodes():
    sink, out, clock = console(1000)
    for i, value in ((1, 7.5), (2, NAN)):
        sink.write(row(i, episode_return=value))
        clock.now += 10
    assert [x.count("return 7.5") for x in out.getvalue().splitlines()] == [1, 1]


def test_the_return_of_the_newest_evaluation_stays_on_the_line():
    sink, out, clock = console(1000)
    for own in (
        {"episode_return": 7.5},
        {"eval_return": 9.5, "eval_return/red": 4.0, "a/eval_return": 1.0},
        {"episode_return": 7.5},
    ):
        sink.write(row(1, **own))  # an evaluation has a row of its own
        clock.now += 10
    assert [x.count("return 7.5  greedy 9.5 (red 4, policy a 1)  ") for x in out.getvalue().splitlines()] == [0, 1]
    assert "greedy" not in out.getvalue().splitlines()[0]


def test_groups_of_agents_have_a_return_each():
    sink, out, _ = console(1000)
    sink.write(row(1, episode_return=0.5, **{"episode_return/red": -2.0, "episode_return/blue": 2.5}))
    sink.close()
    assert "return 0.5 (red -2, blue 2.5)  " in out.getvalue()


def test_a_policy_named_like_a_group_of_others_is_told_apart():
    sink, out, _ = console(1000)
    sink.write(row(1, episode_return=0.5, **{"episode_return/red": -2.0, "red/episode_return": 1.5}))
    sink.close()
    assert "return 0.5 (red -2, policy red 1.5)  " in out.getvalue()


def test_a_population_without_a_return_shows_a_dash():
    sink, out, _ = console(1000)
    sink.write(row(1, episode_return=[NAN, NAN]))
    assert "return -  ETA" in out.getvalue()


def test_plain_lines_are_not_wrapped_or_taken_for_markup():
    sink, out, _ = console(1000, width=20)
    sink.write(row(1, loss=0.5, value_loss=0.25))
    assert len(out.getvalue().splitlines()) == 1


def test_a_terminal_gets_a_bar_that_ends_with_the_last_row():
    sink, out, clock = console(1000, terminal=True)
    for i in range(1, 11):
        clock.now = 0.01 * i
        sink.write(row(i, episode_return=float(i)))
    sink.close()
    text = out.getvalue()
    assert "compiling" in text and "━" in text
    last = text.splitlines()[-2]
    assert "100%" in last and "return 10" in last
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_narrow_terminal_leaves_out_losses_but_never_the_time_left():
    shown = {}
    for width in (80, 140):
        sink, out, clock = console(500_000, terminal=True, width=width, num_iterations=500)
        losses = {"policy_loss": -0.01234, "value_loss": 1.25, "loss": 0.51234}
        sink.write({"iteration": 100, "env_steps": 100_000, "episode_return": 212.4, **losses})
        clock.now = 10.0
        sink.write({"iteration": 131, "env_steps": 131_072, "episode_return": 212.4, **losses})
        sink.close()
        shown[width] = out.getvalue().splitlines()[-2]
    assert shown[80].endswith("131k/500k env steps  3.11k/s  return 212.4  loss 0.5123  ETA 1:59")
    assert "loss 0.5123  policy loss -0.01234  value loss 1.25  ETA 1:59" in shown[140]
    assert "━" in shown[80] and " 26%" in shown[80]


def test_closing_without_a_row_is_fine():
    for terminal in (False, True):
        sink, out, _ = console(1000, terminal=terminal)
        sink.close()
        assert "return" not in out.getvalue()


def test_a_rate_forgets_what_is_long_ago():
    sink, out, clock = console(10**9)
    for second in range(200):
        clock.now = float(second)
        sink.write({"iteration": second, "env_steps": 1000 * second if second < 100 else 100_000 + 10 * second})
    sink.close()
    assert " 10/s" in out.getvalue().splitlines()[-1]


@pytest.mark.parametrize(
    ("waits", "said"),
    [
        ((0.9, 0.1, 0.7, 0.2), "learner waits 90% for environments: raise env.num_threads  "),
        ((0.9, 0.1, 0.2, 0.7), "learner waits 90% for inference: raise num_envs"),
        ((0.9, 0.1, 0.2, 0.2, 0.5), "learner waits 90% for transfers: raise loop.pools_per_actor"),
        ((0.1, 0.8, 0.1, 0.1), "actors wait 80% for the update: lower algo.learner.num_epochs"),
        ((0.6, 0.6, 0.2, 0.2), "actors and learner take turns: raise loop.lag"),
        ((0.2, 0.2, 0.4, 0.4), "actors and learner keep pace"),
    ],
)
def test_the_line_says_which_side_of_sebulba_starves(waits, said):
    names = ("learner_wait", "actor_wait", "actor_in_environment", "actor_in_inference", "actor_in_transfer")
    out = io.StringIO()
    advice = Advice("raise env.num_threads", "raise loop.lag", "lower algo.learner.num_epochs")
    with contextlib.closing(ConsoleSink(100, 10, advice=advice, console=Console(file=out))) as sink:
        sink.write({"iteration": 1, "env_steps": 10} | dict(zip(names, waits, strict=False)))
    assert said in out.getvalue()


GIVEN = {
    "lag": 1,
    "max_lag": 1,
    "queue_size": 1,
    "actors": 1,
    "pools": 1,
    "one_stands_still": False,
    "num_epochs": 1,
    "num_minibatches": 1,
}


@pytest.mark.parametrize(
    ("lag", "max_lag", "turns"),
    [
        (0, 0, "raise algo.unroll_length or num_envs"),
        (0, 1, "raise loop.lag"),
        (1, 1, "raise algo.unroll_length or num_envs"),
        (1, None, "raise loop.lag"),
        (2, None, "raise loop.lag and loop.queue_size"),
        (3, None, "raise loop.queue_size"),
        (3, 3, "raise loop.queue_size"),
        ("free", None, "raise loop.queue_size"),
    ],
)
def test_a_lag_that_the_agent_refuses_or_the_queue_leaves_without_effect_is_not_advised(lag, max_lag, turns):
    assert advise(HostEnv(CartPole()), **GIVEN | {"lag": lag, "max_lag": max_lag}).turns == turns


@pytest.mark.parametrize(
    ("num_epochs", "num_minibatches", "update"),
    [
        (4, 4, "lower algo.learner.num_epochs"),
        (1, 4, "lower algo.learner.num_minibatches"),
        (1, 1, "take a smaller network"),
    ],
)
def test_what_is_1_is_not_to_be_lowered(num_epochs, num_minibatches, update):
    given = GIVEN | {"num_epochs": num_epochs, "num_minibatches": num_minibatches}
    assert advise(HostEnv(CartPole()), **given).update == update


@pytest.mark.parametrize(
    ("actors", "cpus", "tensor", "pool"),
    [
        (1, 1, "raise loop.num_actor_threads", "they have a thread for every core"),
        (1, 2, "raise loop.num_actor_threads", "raise env.num_threads"),
        (2, 2, "raise loop.num_actor_threads", "lower loop.num_actor_threads"),
        (2, 3, "raise loop.num_actor_threads", "raise env.num_threads"),
        (3, 2, "raise loop.num_actor_threads", "lower loop.num_actor_threads"),
    ],
)
def test_as_many_actors_as_cores_are_too_many(actors, cpus, tensor, pool, monkeypatch):
    monkeypatch.setattr("torchpod.run.progress.cores", lambda: cpus)
    envpool = SimpleNamespace(num_threads=1)
    given = GIVEN | {"actors": actors, "pools": actors}
    assert [advise(env, **given).environments for env in (HostEnv(CartPole()), envpool)] == [tensor, pool]


def test_an_environment_knows_what_makes_it_faster(monkeypatch):
    assert advise(HostEnv(CartPole()), **GIVEN).environments == "raise loop.num_actor_threads"
    assert advise(Gymnasium("CartPole-v1"), **GIVEN).environments == "set env.processes=true"
    monkeypatch.setattr(progress, "cores", lambda: 4)
    env = EnvPool("CartPole-v1", num_threads=2)
    settings = ((1, False), (1, True), (2, False), (2, True))
    told = [advise(env, **GIVEN | {"pools": n, "one_stands_still": waits}).environments for n, waits in settings]
    assert told == [*["raise env.num_threads"] * 2, "they have a thread for every core", "set loop.pools_per_actor=2"]


def test_a_run_that_is_over_does_not_hear_that_nobody_reads():
    """What ended it is to be told, or its evaluation to be done."""

    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

    sink = ConsoleSink(100, 10, console=_Console(file=Closed()))
    with pytest.raises(UnreadError):
        sink.write({"env_steps": 10, "iteration": 1})
    sink.write({"env_steps": 20, "iteration": 2})  # shown by close
    sink.close()
