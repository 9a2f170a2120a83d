"""Drawing of CovidEconomy: a map with a tile per state, the country's numbers, and curves of both."""

import datetime

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from torchpod.envs.multi_agent.covid_economy import (
    DEATH,
    INTEREST,
    RECOVERY,
    CovidEconomy,
    CovidEconomyState,
    level_of,
)
from torchpod.render.canvas import AMBER, BLUE, DARK, FLOOR, GREEN, GREY, INK, LIGHT, PAPER, PINK, RED, Canvas, mix
from torchpod.render.curves import Named, Panel, draw_curves
from torchpod.types import Tree

MAP = """
AK .. .. .. .. .. .. .. .. .. .. ME
.. .. .. .. .. .. WI .. .. .. VT NH
.. WA ID MT ND MN IL MI .. NY MA ..
.. OR NV WY SD IA IN OH PA NJ CT RI
.. CA UT CO NE MO KY WV VA MD DE ..
.. .. AZ NM KS AR TN NC SC DC .. ..
.. .. .. .. OK LA MS AL GA .. .. ..
HI .. .. .. TX .. .. .. FL .. .. ..
"""
STATES = """AL AK AZ AR CA CO CT DE DC FL GA HI ID IL IN IA KS KY LA ME MD MA MI MN MS MO MT NE NV NH NJ NM NY NC ND OH
OK OR PA RI SC SD TN TX UT VT VA WA WV WI WY""".split()
"""In the order of the environment, that of their whole names."""
TILES = {name: (x, y) for y, row in enumerate(MAP.split("\n")[1:-1]) for x, name in enumerate(row.split())}
MOST_INFECTED = 0.05
"""With so many of its people infected the bar of a state is full."""

PANELS = (
    ("infected", "infected", 0.0, 0.1),
    ("deaths", "have died", 0.0, 0.02),
    ("unemployed", "unemployed", 0.0, 0.3),
    ("stringency", "stringency", 0.0, 10.0),
    ("health", "health index", -1.0, 1.25),
    ("economy", "economic index", -1.1, 4.5),
)
"""Curve, title, and what is at the bottom and at the top: no state's economic index leaves its panel."""
STAND_OUT = (RED, BLUE, GREEN, PINK)
"""Colours of as many states, those where the largest share of the people has died."""


def draw_covid_economy(canvas: Canvas, env: CovidEconomy, states: CovidEconomyState, observation: Tree) -> None:
    """A map, where stringency is how dark a tile is and its bar how many are infected; the country's numbers; curves.

    The bold curve is the country, faint ones are its states, of which a few stand out. Of the indices 0 and 1 are what
    the two extreme policies reach on average.
    """
    now: CovidEconomyState = pytree.tree_map(lambda x: x[-1], states)
    date = datetime.date(2020, 3, 22) + datetime.timedelta(days=int(now.day))
    canvas.text((20, 22), f"{date:%d %B %Y}", INK, 16)
    canvas.text((canvas.width - 20, 22), f"subsidy {int(now.subsidy)} of 20", DARK, 14, "rm")
    _draw_map(canvas, now)
    legend = "bold: the country, faint: its states, in colour: where most have died"
    canvas.text((canvas.width - 20, 326), legend, GREY, 11, "rm")
    curves = _curves(env, states)
    _draw_bars(canvas, curves)
    length = env.spec.max_episode_steps or env.max_episode_steps
    width = (canvas.width - 20) / 3
    most = sorted(curves["deaths"][1][-1].argsort()[-len(STAND_OUT) :].tolist())
    for i, (name, title, low, high) in enumerate(PANELS):
        bold, thin = curves[name]
        is_share = name in ("infected", "deaths", "unemployed")
        value = f"{100 * bold[-1]:.1f} %" if is_share else f"{bold[-1]:.2f}"
        panel = Panel(20 + width * (i % 3), 348 + 118 * (i // 3), width - 20, 106, title, INK, low, high)
        named = [Named(STATES[k], colour, thin[:, k]) for k, colour in zip(most, STAND_OUT, strict=True)]
        draw_curves(canvas, panel, bold, length, thin=thin, named=named, value=value)


def _draw_map(canvas: Canvas, state: CovidEconomyState) -> None:
    width, height = 43.0, 35.0
    for name, level, infected in zip(STATES, level_of(state).tolist(), state.infected.tolist(), strict=True):
        x, y = 18 + TILES[name][0] * width, 46 + TILES[name][1] * height
        canvas.rectangle((x + 2, y + 2), (x + width - 2, y + height - 2), mix(LIGHT, BLUE, level / 10), 5)
        canvas.text((x + width / 2 - 4, y + height / 2), name, PAPER if level > 4 else INK, 12, "mm")
        bottom, top = y + height - 6, y + 6
        canvas.rectangle((x + width - 10, top), (x + width - 6, bottom), FLOOR, 2)
        full = min(infected / MOST_INFECTED, 1.0)
        canvas.rectangle((x + width - 10, bottom - (bottom - top) * full), (x + width - 6, bottom), RED)


def _draw_bars(canvas: Canvas, curves: dict[str, tuple[NDArray[np.floating], NDArray[np.floating]]]) -> None:
    """Numbers of the country, right of the map."""
    bars = [
        ("infected", "infected", MOST_INFECTED, RED),
        ("have died", "deaths", 0.02, DARK),
        ("vaccinated", "vaccinated", 1.0, GREEN),
        ("unemployed", "unemployed", 0.3, AMBER),
        ("output and subsidies", "production", 1.3, BLUE),
    ]
    left, right = 566.0, canvas.width - 20.0
    for i, (label, name, largest, colour) in enumerate(bars):
        y, value = 66.0 + 54 * i, float(curves[name][0][-1])
        canvas.text((left, y), label, DARK, 13)
        canvas.text((right, y), f"{100 * value:.1f} %", colour, 13, "rm")
        canvas.rectangle((left, y + 14), (right, y + 24), LIGHT, 3)
        canvas.rectangle((left, y + 14), (left + (right - left) * min(value / largest, 1.0), y + 24), colour, 3)


def _curves(env: CovidEconomy, s: CovidEconomyState) -> dict[str, tuple[NDArray[np.floating], NDArray[np.floating]]]:
    """Of the country `[t + 1]` and of the states `[t + 1, 51]`. Before the first day nothing is produced or paid."""
    t = env.tables
    ended = torch.cat([s.infected[:1], s.infected[:-1]]) * RECOVERY
    health = -(DEATH * ended * t.value).float()
    paid = s.subsidy[:, None] * t.subsidy
    output = torch.where(s.day[:, None] == 0, 1.0, s.output)
    country = env.indices((t.share * health).sum(-1), (t.share * (output - (1 + INTEREST) * paid)).sum(-1), env.planner)
    indices = zip(country, env.indices(health, output, env.governor), strict=True)
    shares = {
        "infected": s.infected,
        "deaths": DEATH * s.removed,
        "vaccinated": s.vaccinated,
        "unemployed": s.unemployed,
        "stringency": level_of(s),
    }
    found = {name: ((t.people * x).sum(-1), x) for name, x in shares.items()}
    found |= {"production": ((t.share * output).sum(-1), output)} | dict(
        zip(("health", "economy"), indices, strict=True)
    )
    return {name: (bold.double().numpy(), thin.double().numpy()) for name, (bold, thin) in found.items()}
