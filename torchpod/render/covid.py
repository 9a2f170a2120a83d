"""Drawing of CovidEconomy: a map with a tile per state, and the country's numbers."""

import datetime

from torchpod.envs.multi_agent.covid_economy import CovidEconomy, CovidEconomyState, level_of
from torchpod.render.canvas import AMBER, BLUE, DARK, FLOOR, GREEN, GREY, INK, LIGHT, PAPER, RED, Canvas, mix
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


def draw_covid_economy(canvas: Canvas, env: CovidEconomy, state: CovidEconomyState, observation: Tree) -> None:
    """Stringency is how dark a tile is, and the bar in it how many are infected; below, shares of the country."""
    date = datetime.date(2020, 3, 22) + datetime.timedelta(days=int(state.day))
    canvas.text((20, 22), f"{date:%d %B %Y}", INK, 16)
    canvas.text((canvas.width - 20, 22), f"subsidy {int(state.subsidy)} of 20", DARK, 14, "rm")
    width, height = (canvas.width - 40) / 12, 38.0
    for name, level, infected in zip(STATES, level_of(state).tolist(), state.infected.tolist(), strict=True):
        x, y = 20 + TILES[name][0] * width, 42 + TILES[name][1] * height
        canvas.rectangle((x + 2, y + 2), (x + width - 2, y + height - 2), mix(LIGHT, BLUE, level / 10), 5)
        canvas.text((x + width / 2 - 4, y + height / 2), name, PAPER if level > 4 else INK, 13, "mm")
        bottom, top = y + height - 6, y + 6
        canvas.rectangle((x + width - 11, top), (x + width - 6, bottom), FLOOR, 2)
        full = min(infected / MOST_INFECTED, 1.0)
        canvas.rectangle((x + width - 11, bottom - (bottom - top) * full), (x + width - 6, bottom), RED)

    share = env.tables.population / env.tables.population.sum()
    good_times = env.tables.share
    bars = [
        ("infected", state.infected @ share, MOST_INFECTED, RED),
        ("have died", 0.02 * state.removed @ share, 0.02, DARK),
        ("vaccinated", state.vaccinated @ share, 1.0, GREEN),
        ("unemployed", state.unemployed.double() @ share, 0.3, AMBER),
        ("production", state.output @ good_times, 1.3, BLUE),
    ]
    step, y = (canvas.width - 40) / len(bars), canvas.height - 44.0
    for i, (label, value, largest, colour) in enumerate(bars):
        x = 20 + step * i
        canvas.text((x, y), label, DARK, 12)
        canvas.text((x + step - 14, y), f"{100 * float(value):.1f} %", GREY, 12, "rm")
        end = x + (step - 14) * min(float(value) / largest, 1.0)
        canvas.rectangle((x, y + 14), (x + step - 14, y + 24), LIGHT, 3)
        canvas.rectangle((x, y + 14), (end, y + 24), colour, 3)
