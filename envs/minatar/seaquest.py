"""MinAtar's Seaquest: a submarine fetches divers, shoots what comes its way, and must surface for oxygen.

Rules of Young and Tian 2019 (https://arxiv.org/abs/1903.03176), step for step those of the `minatar` package, whose
lists of things are slots here. How many can be needed follows from how often things appear and how long they live.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from torchpod import random
from torchpod.env import TensorEnv
from torchpod.envs.arguments import true_or_false
from torchpod.envs.minatar.board import SIDE, Actions, Board

FRONT, BACK, BULLET, TRAIL, ENEMY_BULLET, FISH, SUBMARINE, OXYGEN, DIVERS, DIVER = range(10)
NOTHING = 0
MAX_OXYGEN, MAX_DIVERS = 200, 6
SPAWN_INTERVAL, MOVE_INTERVAL, SHORTEST_MOVE_INTERVAL = 20, 5, 2
"""Of enemies; both intervals shrink each time the submarine surfaces."""
DIVER_SPAWN_INTERVAL, DIVER_MOVE_INTERVAL = 30, 5
SHOT_INTERVAL, ENEMY_SHOT_INTERVAL = 5, 10
NUM_ENEMIES = 32
"""At the hardest one appears in every step, and has left after 30. A slot is taken again after 32 have appeared."""


class Things(NamedTuple):
    """Whatever moves from side to side, int32 `[B, slots]`."""

    kind: Tensor
    """Its channel, or NOTHING."""
    x: Tensor
    row: Tensor
    right: Tensor
    """1 if it goes to the right, -1 if to the left."""


class SeaquestState(NamedTuple):
    """int32; `[B]` where nothing else is said."""

    enemies: Things
    """`[B, 32]`, fish and submarines. The slot to be taken next is that of the oldest."""
    move_timer: Tensor
    """`[B, 32]`, steps until an enemy moves."""
    shot_timer: Tensor
    """`[B, 32]`, steps until a submarine shoots."""
    enemy_bullets: Things
    """`[B, 32]`, each in the slot of its submarine; the last has gone when the next is shot."""
    next_slot: Tensor
    bullets: Things
    """`[B, 2]`, the older one first. A third cannot be shot before the first has gone."""
    divers: Things
    """`[B, 2]`, the older one first; there are never three."""
    diver_timer: Tensor
    """`[B, 2]`, steps until a diver moves."""
    row: Tensor
    x: Tensor
    right: Tensor
    """Of the submarine: its front, and where that points, 1 or -1."""
    oxygen: Tensor
    num_divers: Tensor
    """On board; below 0 after all six were brought home at once, as in the package."""
    surfaced: Tensor
    """1 while it stays at the surface."""
    reload_timer: Tensor
    spawn_timer: Tensor
    spawn_interval: Tensor
    diver_spawn_timer: Tensor
    move_interval: Tensor
    ramp_index: Tensor
    """How often the game has become harder."""


class Seaquest(TensorEnv):
    """Reward 1 per enemy shot, and up to 10, by the oxygen left, for surfacing with six divers.

    Terminates when an enemy or a bullet meets the submarine, at the end of its oxygen, or when it surfaces without a
    diver. Observation `[B, 10, 10, 10]`: front and back of the submarine, its bullets, where things come from, enemy
    bullets, fish, enemy submarines, oxygen left, divers on board (both in the last row), divers. Actions: 0 stay, 1
    left, 2 up, 3 right, 4 down, 5 fire.

    One case is not the package's: of several enemies of one kind in the same cell, with the same timers, it may step
    one twice.

    Args:
      max_episode_steps: truncate here; None: never.
      minimal_actions: no difference here: all six actions do something.
      ramping: whether the game becomes harder each time the submarine surfaces.
    """

    def __init__(
        self, max_episode_steps: int | None = 1000, minimal_actions: bool = True, ramping: bool = True
    ) -> None:
        true_or_false(ramping=ramping)
        self._actions, self._board, self._ramping = Actions("nlurdf", minimal_actions), Board(10), ramping
        self.spec = self._board.spec("minatar_seaquest", self._actions, max_episode_steps)

    def reset(self, keys: Tensor) -> SeaquestState:
        """At the surface, alone in the sea."""
        zero = torch.zeros(keys.shape[:-1], dtype=torch.int32, device=keys.device)
        enemies, pair = (zero[..., None].expand(*zero.shape, n).contiguous() for n in (NUM_ENEMIES, 2))
        return SeaquestState(
            enemies=Things(enemies, enemies, enemies, enemies),
            move_timer=enemies,
            shot_timer=enemies,
            enemy_bullets=Things(enemies, enemies, enemies, enemies),
            next_slot=zero,
            bullets=Things(pair, pair, pair, pair),
            divers=Things(pair, pair, pair, pair),
            diver_timer=pair,
            row=zero,
            x=zero + 5,
            right=zero - 1,
            oxygen=zero + MAX_OXYGEN,
            num_divers=zero,
            surfaced=zero + 1,
            reload_timer=zero,
            spawn_timer=zero + SPAWN_INTERVAL,
            spawn_interval=zero + SPAWN_INTERVAL,
            diver_spawn_timer=zero + DIVER_SPAWN_INTERVAL,
            move_interval=zero + MOVE_INTERVAL,
            ramp_index=zero,
        )

    def transition(self, state: SeaquestState, action: Tensor, keys: Tensor) -> tuple[SeaquestState, Tensor, Tensor]:
        """What appears, the submarine, its bullets, divers, enemies and their bullets, oxygen, in this order."""
        s = self._steer(_spawn_diver(_spawn_enemy(state, keys), keys), action)
        s, hits = _shoot(s)
        s, more_hits, died = _move_enemies(_move_divers(s))
        s, shot_down = _move_enemy_bullets(s)
        reward, died = hits + more_hits, died | shot_down | (s.oxygen <= 0)

        below = s.row > 0
        surfaces = ~below & (s.surfaced == 0)
        died = died | (surfaces & (s.num_divers == 0))
        surfaces = surfaces & (s.num_divers != 0)
        full = surfaces & (s.num_divers == MAX_DIVERS)
        reward = reward + torch.where(full, s.oxygen * 10 // MAX_OXYGEN, 0)
        num_divers = torch.where(full, 0, s.num_divers) - surfaces.int()
        s = s._replace(
            oxygen=torch.where(surfaces, MAX_OXYGEN, s.oxygen - below.int()),
            num_divers=num_divers,
            surfaced=torch.where(below, 0, torch.where(surfaces, 1, s.surfaced)),
            reload_timer=(s.reload_timer - 1).clamp(min=0),
            spawn_timer=(s.spawn_timer - 1).clamp(min=0),
            diver_spawn_timer=(s.diver_spawn_timer - 1).clamp(min=0),
        )
        return _ramp(s, surfaces) if self._ramping else s, reward.float(), died

    def observe(self, state: SeaquestState) -> Tensor:
        """The board."""
        s, board = state, self._board
        front = board.index(s.row, s.x, FRONT)[..., None]
        cells = [front, board.index(s.row, s.x - s.right, BACK)[..., None]]
        for things in (s.enemies, s.divers, s.bullets, s.enemy_bullets):
            cells.append(board.index(things.row, things.x, things.kind).where(things.kind != NOTHING, front))
        for things in (s.enemies, s.divers):
            behind = things.x - things.right
            leaves_trail = (things.kind != NOTHING) & (behind >= 0) & (behind < SIDE)
            cells.append(board.index(things.row, behind, TRAIL).where(leaves_trail, front))
        row, column, channel = board.cells(front.device)
        oxygen = (row == SIDE - 1) & (channel == OXYGEN)
        divers = (row == SIDE - 1) & (channel == DIVERS) & (column < SIDE - 1)
        full = oxygen & (column < (s.oxygen.clamp(min=0) * 10 // MAX_OXYGEN)[..., None, None])
        on_board = divers & (column >= (SIDE - 1 - s.num_divers)[..., None, None])
        gauges = (full | on_board).float().flatten(-2)
        return gauges.scatter(-1, torch.cat(cells, -1).long(), 1.0).unflatten(-1, (SIDE, SIDE, 10))

    def _steer(self, s: SeaquestState, action: Tensor) -> SeaquestState:
        """Moves the submarine, or shoots from its front."""
        sideways = self._actions.sideways(action)
        fires = self._actions.is_("f", action) & (s.reload_timer == 0)
        x = (s.x + sideways).clamp(0, SIDE - 1)
        row = (s.row + self._actions.vertical(action)).clamp(0, SIDE - 2)
        return s._replace(
            x=x,
            row=row,
            right=torch.where(sideways != 0, sideways, s.right),
            bullets=_append(s.bullets, fires, BULLET, s.x, s.row, s.right),
            reload_timer=torch.where(fires, SHOT_INTERVAL, s.reload_timer),
        )


def _spawn_enemy(s: SeaquestState, keys: Tensor) -> SeaquestState:
    """A fish, or with probability 1/3 a submarine, from either side, unless others come the other way in its row."""
    words = random.bits(keys, 3)
    place = random.to_integer(words[..., 0], 16).int()
    right, row = 1 - 2 * (place >= 8).int(), place % 8 + 1  # a uniform number below 1/2 is the left side
    kind = FISH + (SUBMARINE - FISH) * (random.to_uniform(words[..., 1]) < 1 / 3).int()
    due = s.spawn_timer == 0
    e = s.enemies
    against = (e.kind != NOTHING) & (e.row == row[..., None]) & (e.right != right[..., None])
    appears = due & (against.int().sum(-1) == 0)
    slot = torch.arange(NUM_ENEMIES, dtype=torch.int32, device=row.device) == s.next_slot[..., None]
    slot = slot & appears[..., None]
    return s._replace(
        enemies=_put(e, slot, kind, (SIDE - 1) * (right < 0).int(), row, right),
        move_timer=torch.where(slot, s.move_interval[..., None], s.move_timer),
        shot_timer=torch.where(slot, ENEMY_SHOT_INTERVAL, s.shot_timer),
        next_slot=(s.next_slot + appears.int()) % NUM_ENEMIES,
        spawn_timer=torch.where(due, s.spawn_interval, s.spawn_timer),
    )


def _spawn_diver(s: SeaquestState, keys: Tensor) -> SeaquestState:
    """From either side, in any row."""
    place = random.to_integer(random.bits(keys, 3)[..., 2], 16).int()
    right, row = 1 - 2 * (place >= 8).int(), place % 8 + 1
    due = s.diver_spawn_timer == 0
    return s._replace(
        divers=_append(s.divers, due, DIVER, (SIDE - 1) * (right < 0).int(), row, right),
        diver_timer=_shift(s.diver_timer, due, DIVER_MOVE_INTERVAL),
        diver_spawn_timer=torch.where(due, DIVER_SPAWN_INTERVAL, s.diver_spawn_timer),
    )


def _shoot(s: SeaquestState) -> tuple[SeaquestState, Tensor]:
    """Bullets fly; each hits one thing in its cell, a fish rather than a submarine, the oldest of several."""
    bullets = _drift(s.bullets)
    order = NUM_ENEMIES * (s.enemies.kind == SUBMARINE).int() + _age_rank(s)
    return _collide(s._replace(bullets=bullets), s.enemies.kind != NOTHING, order, newest_first=True)


def _move_divers(s: SeaquestState) -> SeaquestState:
    """Divers are taken on board where the submarine meets them, before or after they move; the newer one first."""
    d, num, kinds, xs, timers = s.divers, s.num_divers, [], [], []
    for i in (1, 0):
        kind, x, timer = d.kind[..., i], d.x[..., i], s.diver_timer[..., i]
        level = (kind != NOTHING) & (d.row[..., i] == s.row)
        moves = timer == 0
        moved = torch.where(moves, x + d.right[..., i], x)
        taken = level & ((x == s.x) | (moved == s.x)) & (num < MAX_DIVERS)
        num = num + taken.int()
        kinds.append(torch.where(taken | (moved < 0) | (moved >= SIDE), NOTHING, kind))
        xs.append(moved)
        timers.append(torch.where(moves, DIVER_MOVE_INTERVAL, timer - 1))
    kind, x, timer = (torch.stack(pair[::-1], -1) for pair in (kinds, xs, timers))
    return s._replace(divers=d._replace(kind=kind, x=x), diver_timer=timer, num_divers=num)


def _move_enemies(s: SeaquestState) -> tuple[SeaquestState, Tensor, Tensor]:
    """Enemies move, into the submarine, into its bullets, or out of sight; submarines shoot."""
    e = s.enemies
    there, moves = e.kind != NOTHING, s.move_timer == 0
    x = torch.where(moves, e.x + e.right, e.x)
    level = there & (e.row == s.row[..., None])
    met = level & (x == s.x[..., None])
    died = (met | (level & (e.x == s.x[..., None]))).int().sum(-1) > 0
    stays = there & (x >= 0) & (x < SIDE)
    shot = (ENEMY_BULLET, x, e.row, e.right)
    shoots = (e.kind == SUBMARINE) & (s.shot_timer == 0)
    s = s._replace(
        enemies=e._replace(kind=torch.where(stays, e.kind, NOTHING), x=x),
        move_timer=torch.where(moves, s.move_interval[..., None], s.move_timer - 1),
        shot_timer=torch.where(s.shot_timer == 0, ENEMY_SHOT_INTERVAL, s.shot_timer - 1),
        enemy_bullets=Things(*(torch.where(shoots, new, old) for new, old in zip(shot, s.enemy_bullets, strict=True))),
    )
    # What moves onto a bullet is hit: submarines first, the newest first.
    order = NUM_ENEMIES * (e.kind == FISH).int() + NUM_ENEMIES - 1 - _age_rank(s)
    s, hits = _collide(s, stays & moves & ~met, order, newest_first=False)
    return s, hits, died


def _move_enemy_bullets(s: SeaquestState) -> tuple[SeaquestState, Tensor]:
    """They hit the submarine where they are, or where they fly to."""
    b = s.enemy_bullets
    level = (b.kind != NOTHING) & (b.row == s.row[..., None])
    hit = level & ((b.x == s.x[..., None]) | (b.x + b.right == s.x[..., None]))
    return s._replace(enemy_bullets=_drift(b)), hit.int().sum(-1) > 0


def _collide(s: SeaquestState, targets: Tensor, order: Tensor, *, newest_first: bool) -> tuple[SeaquestState, Tensor]:
    """Each bullet removes itself and the first of the targets in its cell; counts them, `[B]`."""
    b, e = s.bullets, s.enemies
    kinds, hits = list(b.kind.unbind(-1)), torch.zeros_like(s.row)
    for i in (1, 0) if newest_first else (0, 1):
        here = (e.x == b.x[..., i, None]) & (e.row == b.row[..., i, None])
        key = torch.where(targets & here & (kinds[i] != NOTHING)[..., None], order, 2 * NUM_ENEMIES)
        first = key.amin(-1)
        hit = first < 2 * NUM_ENEMIES
        targets = targets & ~((key == first[..., None]) & hit[..., None])
        e = e._replace(kind=torch.where((key == first[..., None]) & hit[..., None], NOTHING, e.kind))
        kinds[i] = torch.where(hit, NOTHING, kinds[i])
        hits = hits + hit.int()
    return s._replace(enemies=e, bullets=b._replace(kind=torch.stack(kinds, -1))), hits


def _ramp(s: SeaquestState, surfaces: Tensor) -> SeaquestState:
    """Enemies appear more often, and every other time they also move faster."""
    due = surfaces & ((s.spawn_interval > 1) | (s.move_interval > SHORTEST_MOVE_INTERVAL))
    faster = due & (s.move_interval > SHORTEST_MOVE_INTERVAL) & (s.ramp_index % 2 == 1)
    return s._replace(
        move_interval=s.move_interval - faster.int(),
        spawn_interval=s.spawn_interval - (due & (s.spawn_interval > 1)).int(),
        ramp_index=s.ramp_index + due.int(),
    )


def _age_rank(s: SeaquestState) -> Tensor:
    """0 for the slot of the oldest enemy, 31 for that of the newest: int32 `[B, 32]`."""
    slot = torch.arange(NUM_ENEMIES, dtype=torch.int32, device=s.row.device)
    return (slot - s.next_slot[..., None]) % NUM_ENEMIES


def _drift(things: Things) -> Things:
    """One cell further; gone at the side."""
    x = things.x + things.right
    return things._replace(kind=torch.where((x >= 0) & (x < SIDE), things.kind, NOTHING), x=x)


def _put(things: Things, slot: Tensor, *values: Tensor | int) -> Things:
    """Puts one new thing, `[B]` each, where `slot` `[B, slots]` is True."""
    columns = (v[..., None] if isinstance(v, Tensor) else v for v in values)
    return Things(*(torch.where(slot, v, old) for v, old in zip(columns, things, strict=True)))


def _append(things: Things, appears: Tensor, *values: Tensor | int) -> Things:
    """Of two slots, the newer one's content becomes the older, and a new thing comes after it."""
    return Things(*(_shift(old, appears, v) for v, old in zip(values, things, strict=True)))


def _shift(pair: Tensor, appears: Tensor, value: Tensor | int) -> Tensor:
    new = torch.where(appears, value, pair[..., 1])
    return torch.stack([torch.where(appears, pair[..., 1], pair[..., 0]), new], -1)
