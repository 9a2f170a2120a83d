"""Drawings that look back: trails, tagged runners that fade, and curves of the episode so far."""

import itertools

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

from torchpod import random
from torchpod.envs import Catch, CovidEconomy, TagContinuous, TagGridWorld
from torchpod.envs.multi_agent.covid_economy import CovidEconomyState
from torchpod.envs.transforms import FrameStack
from torchpod.render import DRAWINGS, Canvas, Drawing, render
from torchpod.render.canvas import _SCALE, BLUE, FLOOR, RED, _font, mix
from torchpod.render.covid import PANELS, STAND_OUT, STATES, _curves
from torchpod.render.curves import LABEL, Named, Panel, draw_curves
from torchpod.render.tag import FADE, GONE

pytest.importorskip("PIL")


def episode(env, actions):
    """States `[t + 1, 1, ...]` and the last timestep, of the same action for all agents, or one per group."""
    keys = random.key(0)[None]
    state, timestep = env.init(keys)
    states = [state]
    for i, action in enumerate(actions, 1):
        state, timestep = env.step(state, action, random.at(keys, torch.tensor(i)))
        states.append(state)
    return pytree.tree_map(lambda *x: torch.stack(x), *states), timestep


def last(states):
    return pytree.tree_map(lambda x: x[-1], states)


def has(frame, colour):
    return (frame == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(-1)


def test_a_drawing_that_looks_back_gets_all_states_and_others_the_last(monkeypatch):
    env, seen = FrameStack(Catch(), 2), []

    def draw(canvas, env, state, observation):
        seen.append((state.ball_row.tolist(), tuple(observation.shape)))

    states, timestep = episode(env, [torch.tensor([1])] * 3)
    for looks_back in (True, False):
        monkeypatch.setitem(DRAWINGS, Catch, Drawing(draw, history=looks_back))
        render(env, last(states), timestep, history=states)
        render(env, last(states), timestep)
    shape = (*Catch().spec.observation.shape,)
    assert seen == [([0, 1, 2, 3], shape), ([3], shape), (3, shape), (3, shape)]


def test_agents_leave_trails_in_the_colours_of_their_groups():
    env = TagGridWorld(num_taggers=1, grid_length=10)
    actions = [{"tagger": torch.tensor([[1]]), "runner": torch.tensor([[3]])}] * 3
    states, timestep = episode(env, actions)
    without, with_ = (render(env, last(states), timestep, history=x) for x in (None, states))
    newest = {colour: mix(colour, FLOOR, 0.35 + 0.6 / 12) for colour in (RED, BLUE)}
    for colour in newest.values():
        assert has(with_, colour).sum() > 20 and not has(without, colour).any()
    board = with_[:, :460]  # without the legend
    red, blue = (np.argwhere(has(board, c)).mean(0) for c in newest.values())
    now = [np.argwhere(has(board, c)).mean(0) for c in (RED, BLUE)]
    assert red[1] < now[0][1] and abs(red[0] - now[0][0]) < 1  # it went to the right
    assert blue[0] > now[1][0] and abs(blue[1] - now[1][1]) < 1  # it went up


def test_a_tagged_runner_fades_to_grey():
    env = TagContinuous(num_taggers=1, num_runners=2, grid_length=10.0, num_other_agents_observed=1)
    state, timestep = env.init(random.key(0)[None])
    inner, *rest = state
    x, y = torch.tensor([[1.0, 5.0, 8.0]]), torch.tensor([[1.0, 5.0, 8.0]])

    def frame(tagged_for):
        """Of an episode at whose end the first runner has been out for so many states."""
        rows = [inner._replace(x=x, y=y, alive=torch.tensor([[True, i < 20 - tagged_for, True]])) for i in range(20)]
        states = pytree.tree_map(lambda *s: torch.stack(s), *((row, *rest) for row in rows))
        return render(env, last(states), timestep, history=states)[:, :460]

    blue = [has(frame(n), BLUE).sum() for n in (0, 1, FADE)]
    assert blue[0] > 1.5 * blue[1] > 0 and blue[1] == blue[2]
    for age in (1, 3, FADE):
        assert has(frame(age), mix(BLUE, GONE, age / FADE)).sum() > 20
    rings = [has(frame(age), mix(RED, FLOOR, age / FADE)).any() for age in (1, 3)]
    assert all(rings)


def test_runners_that_are_left_are_counted_and_drawn_as_a_curve():
    canvas = Canvas(200, 120)
    panel = Panel(10.0, 10.0, 100.0, 90.0, "runners", BLUE, 0.0, 10.0)
    draw_curves(canvas, panel, np.array([10.0, 10.0, 5.0]), 4)
    rows, columns = np.argwhere(has(canvas.pixels()[28:100, 10:110], BLUE)).T
    assert rows[columns < 20].mean() < 3 and 30 < rows[columns > 48].max() < 40  # from the top to the middle
    assert columns.max() < 55  # half of the time is over


def test_curves_of_the_country_are_what_the_environment_reports():
    env = CovidEconomy(max_episode_steps=40)
    actions = [{"governor": torch.full((1, 51), i % 11), "planner": torch.tensor([[20]])} for i in range(40)]
    states, timestep = episode(env, actions)
    inner: CovidEconomyState = pytree.tree_map(lambda x: x[:, 0], states[0])
    curves, told = _curves(env, inner), timestep.extras["episode"]
    population = float(env.tables.population.sum())
    for name in ("infected", "deaths", "vaccinated"):
        assert curves[name][0][-1] * population == pytest.approx(float(told[name]), rel=1e-5)
    means = {
        "unemployed": "unemployment",
        "stringency": "stringency",
        "health": "health_index",
        "economy": "economic_index",
    }
    for name, report in means.items():
        bold, thin = curves[name]
        assert bold.shape == (41,) and thin.shape == (41, 51)
        assert bold[1:].mean() == pytest.approx(float(told[report]), rel=1e-4)
    assert curves["production"][0][1:].mean() == pytest.approx(float(told["production"] + told["subsidies"]), rel=1e-4)


@pytest.fixture
def written(monkeypatch):
    """What is written on a canvas: the text, its colour, its size, and its box in large pixels."""
    found, write = [], Canvas.text

    def text(canvas, at, text, colour="#000000", size=14.0, anchor="lm"):
        write(canvas, at, text, colour, size, anchor)
        place, font = (at[0] * _SCALE, at[1] * _SCALE), _font(round(size * _SCALE))
        found.append((text, colour, size, canvas._draw.textbbox(place, text, font=font, anchor=anchor)))

    monkeypatch.setattr(Canvas, "text", text)
    return found


def test_curves_that_stand_out_have_their_names_at_their_ends(written):
    panel = Panel(10.0, 10.0, 118.0, 90.0, "dead", BLUE, 0.0, 10.0)
    curves = {"AL": [5.0, 5.0, 5.0], "NY": [5.0, 9.0, 9.0], "AK": [0.0, 2.0, 5.0]}
    named = [Named(name, RED, np.array(curve)) for name, curve in curves.items()]
    canvas = Canvas(200, 120)
    draw_curves(canvas, panel, np.zeros(3), 4, named=named)
    boxes = {text: box for text, _, _, box in written if text in curves}
    assert all(box[0] / _SCALE == pytest.approx(10 + 50 + 3, abs=2) for box in boxes.values())  # half of the time
    ny, al, ak = (sum(boxes[name][1::2]) / 2 / _SCALE for name in ("NY", "AL", "AK"))
    assert ny == pytest.approx(100 - 0.9 * 72, abs=2) and al == pytest.approx(100 - 0.5 * 72, abs=2)
    assert ak - al == pytest.approx(LABEL)
    assert has(canvas.pixels()[28:100, 10:60], RED).sum() > 50


def test_of_the_economy_the_states_where_most_have_died_are_named_in_every_panel(written):
    env = CovidEconomy(max_episode_steps=60)
    action = {"governor": torch.full((1, 51), 9), "planner": torch.zeros(1, 1).long()}
    action["governor"][0, [STATES.index(name) for name in ("VT", "CO", "MI", "TX")]] = 1
    states, timestep = episode(env, [action] * 60)
    frame = render(env, last(states), timestep, history=states)
    dead = states[0].removed[-1, 0].numpy()
    most = [STATES[k] for k in sorted(dead.argsort()[-4:])]
    labels = [(text, colour) for text, colour, size, _ in written if size == LABEL]
    assert sorted(labels) == sorted([*zip(most, STAND_OUT, strict=True)] * len(PANELS))
    assert all(has(frame[366:454, 267:475], colour).sum() > 10 for colour in STAND_OUT)  # curves of deaths


def test_of_the_economy_no_text_lies_on_another_and_no_index_leaves_its_panel(written):
    """With the most that is produced and paid: 20 of subsidies, and everything open."""
    env = CovidEconomy()
    everything_open = {"governor": torch.ones(1, 51).long(), "planner": torch.full((1, 1), 20)}
    states, timestep = episode(env, [everything_open] * 30)
    render(env, last(states), timestep, history=states)
    boxes = sorted(((text, box) for text, _, _, box in written), key=lambda one: one[1][0])
    for (name, a), (other, b) in itertools.combinations(boxes, 2):
        assert a[2] <= b[0] or a[3] <= b[1] or b[3] <= a[1], (name, other)
    curves = _curves(env, pytree.tree_map(lambda x: x[:, 0], states[0]))
    *_, low, high = next(panel for panel in PANELS if panel[0] == "economy")
    assert 4 < curves["economy"][1].max() < high and curves["economy"][1].min() > low
