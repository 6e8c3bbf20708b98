"""Procedural scenes: one integer seed each, drawn in batches, independent of the batch they are drawn in.

A scene's world has x to the right, y down, z forward, and its ground at y = 0. It has a fixed number of slots for
solids; slots of one kind stand together so that a renderer knows the kind of each slot ahead of time.
"""

import math
from dataclasses import dataclass, fields, replace
from typing import Self

import torch
from torch import Tensor

from longtake.training.draws import Draws, consecutive
from longtake.training.textures import COLOURS, TEXTURES

BOX_GROUPS = (range(4), range(4, 8), range(8, 9), range(9, 10))
"""Slots of boxes that share their turn."""
COLUMNS = range(10, 14)
SPHERES = range(14, 18)
GROUND = 18
SLOTS = 18
"""Slots for solids; row `GROUND` of the tables, the one after them, is the ground."""

_BOXES = slice(0, 8)
_GATHERING = (slice(0, 4), slice(4, 8))
_WALLS = slice(8, 10)
_COLUMNS, _SPHERES = slice(10, 14), slice(14, 18)

NOUNS = ("box", "tower", "wall", "column", "sphere", "stairs", "pyramid", "gate", "tree")
_BOX, _TOWER, _WALL, _COLUMN, _SPHERE, _STAIRS, _PYRAMID, _GATE, _TREE = range(len(NOUNS))

TIMES = ("morning", "noon", "dusk", "night")
GROUNDS = ("tiles", "checks", "planks", "bricks", "grass", "sand")

_GROUND_TEXTURES = ("tiles", "checks", "planks", "bricks", "grass", "grass")
_GROUND_COLOURS = (
    ("grey", "white", "teal", "brown", "pink", "blue"),
    ("grey", "white", "brown", "teal", "purple", "red"),
    ("brown", "brown", "orange", "grey", "white", "brown"),
    ("red", "grey", "brown", "orange", "white", "grey"),
    ("green", "green", "green", "green", "green", "yellow"),
    ("yellow", "white", "orange", "yellow", "pink", "grey"),
)
_OBJECT_TEXTURES = (
    ("plain", "plain", "tiles", "checks", "bricks", "stripes"),
    ("plain", "bricks", "tiles", "bricks", "stripes", "checks"),
    ("plain", "bricks", "bricks", "tiles", "stripes", "planks"),
    ("plain", "plain", "stripes", "stripes", "bricks", "tiles"),
    ("plain", "plain", "plain", "stripes", "stripes", "checks"),
    ("plain", "plain", "bricks", "tiles", "plain", "tiles"),
    ("plain", "bricks", "bricks", "tiles", "stripes", "plain"),
    ("plain", "plain", "bricks", "tiles", "stripes", "planks"),
    ("grass", "grass", "grass", "grass", "grass", "grass"),
)

_SKIES = (  # zenith, horizon, sun, its elevation in degrees from and to
    ((0.36, 0.58, 0.88), (0.95, 0.85, 0.74), (1.00, 0.86, 0.68), (22.0, 38.0)),
    ((0.22, 0.48, 0.90), (0.76, 0.87, 0.95), (1.00, 0.97, 0.90), (42.0, 66.0)),
    ((0.34, 0.30, 0.58), (0.97, 0.68, 0.52), (1.00, 0.76, 0.56), (14.0, 26.0)),
    ((0.08, 0.11, 0.28), (0.27, 0.34, 0.54), (0.64, 0.74, 1.00), (35.0, 60.0)),
)
_TIME_WEIGHTS = (0.25, 0.4, 0.22, 0.13)

SKY_NUMBERS = 24


@dataclass(frozen=True, eq=False)
class Scenes:
    """A batch of B scenes; all tensors are on one device and none is ever changed in place.

    Attributes:
        seed: [B] int64.
        start: [B,4,4] float32, the first camera's c2w: level, at eye height over the origin, looking along +z.
        shape: [B,19,8] float32, centre (3), half extents (3; a radius where round), cosine and sine of the turn to the
            right about the vertical. The last row, the ground's, is a placeholder.
        paint: [B,19,13] float32, two linear RGB colours and the seven numbers of a `Texture`.
        active: [B,18] bool, slots that hold something.
        group: [B,18] int64, equal where slots make up one object.
        noun: [B,18] int64, index in `NOUNS`.
        colour: [B,19] int64, index in `COLOURS`.
        ground: [B] int64, index in `GROUNDS`.
        time: [B] int64, index in `TIMES`.
        sky: [B,24] float32: linear RGB of zenith, horizon, sun, ambient light and hills (15), unit vector to the sun
            (3), height of the hills, that of their detail, two phases, haze, clouds (6).
    """

    seed: Tensor
    start: Tensor
    shape: Tensor
    paint: Tensor
    active: Tensor
    group: Tensor
    noun: Tensor
    colour: Tensor
    ground: Tensor
    time: Tensor
    sky: Tensor

    def __len__(self) -> int:
        return len(self.seed)

    def __getitem__(self, rows: slice) -> Self:
        """Some of the scenes, as views."""
        return replace(self, **{field.name: getattr(self, field.name)[rows] for field in fields(self)})

    def to(self, device: torch.device | str) -> Self:
        """The scenes on a device."""
        return replace(self, **{field.name: getattr(self, field.name).to(device) for field in fields(self)})


def draw_scenes(count: int, seed: int, device: torch.device | str = "cpu") -> Scenes:
    """Scenes of the seeds seed … seed + count − 1, drawn on the CPU and therefore the same on every device."""
    seeds = consecutive(count, seed)
    draws = Draws(seeds, stream=1)
    solids = _Layout(draws, count)
    time = draws.choice(_TIME_WEIGHTS)
    ground = draws.integer(below=len(GROUNDS))
    colour = _colours(draws, solids.noun, ground)
    return Scenes(
        seed=seeds,
        start=_start(draws, count),
        shape=_shape_table(solids),
        paint=_paint(draws, solids.noun, colour, ground, solids.half[:, COLUMNS.start :, 0]),
        active=solids.active,
        group=solids.group,
        noun=solids.noun,
        colour=colour,
        ground=ground,
        time=time,
        sky=_sky(draws, time),
    ).to(device)


class _Layout:
    """Where everything stands: centres, half extents and turns of all slots, in float64.

    Every slot has a site of its own around the camera, the denser the nearer to straight ahead. Groups of four boxes
    may gather at their first box's site, a sphere may crown the column of its number.
    """

    def __init__(self, draws: Draws, count: int) -> None:
        self.design = torch.stack([draws.choice((0.36, 0.26, 0.18, 0.2)) for _ in _GATHERING], dim=1)
        self.crown = torch.stack([draws.choice((0.42, 0.4, 0.18)) for _ in SPHERES], dim=1)
        self.bearing, self.distance = _sites(draws, self._sited())
        self.turn = _shared(self.bearing + draws.uniform(SLOTS, low=-0.6, high=0.6))
        self.half = torch.zeros(count, SLOTS, 3, dtype=torch.float64)
        self.centre = torch.zeros(count, SLOTS, 3, dtype=torch.float64)
        self.active = draws.uniform(SLOTS) < 0.93
        self.group = torch.arange(SLOTS).repeat(count, 1)
        self.noun = torch.full((count, SLOTS), _BOX)
        self._place_boxes(draws)
        self._place_walls(draws)
        self._place_round(draws)
        for design, slots in zip(self.design.unbind(1), _GATHERING, strict=True):
            self._gather(draws, slots, design)
        self._crown(draws)

    def _sited(self) -> Tensor:
        """Slots [B,18] that stand at a site of their own."""
        alone = self.design == 0
        first = torch.ones_like(alone)
        boxes = [torch.stack([first[:, i], *[alone[:, i]] * 3], dim=1) for i in range(2)]
        return torch.cat([*boxes, first, torch.ones_like(self.crown, dtype=torch.bool), self.crown == 0], dim=1)

    def _stand(self, slots: slice) -> None:
        """Put solids on the ground at their sites."""
        bearing, distance = self.bearing[:, slots], self.distance[:, slots]
        self.centre[:, slots, 0] = bearing.sin() * distance
        self.centre[:, slots, 1] = -self.half[:, slots, 1]
        self.centre[:, slots, 2] = bearing.cos() * distance

    def _place_boxes(self, draws: Draws) -> None:
        slots = _BOXES
        size = draws.uniform(8, low=0.10, high=0.17) * self.distance[:, slots].sqrt()
        tower = draws.uniform(8) < 0.3
        tall = torch.where(tower, draws.uniform(8, low=2.2, high=4.5), draws.uniform(8, low=0.6, high=1.3))
        self.half[:, slots, 0] = size * draws.uniform(8, low=0.8, high=1.5)
        self.half[:, slots, 1] = size * tall
        self.half[:, slots, 2] = size * draws.uniform(8, low=0.8, high=1.5)
        self.noun[:, slots] = torch.where(tower, _TOWER, _BOX)
        self._stand(slots)

    def _place_walls(self, draws: Draws) -> None:
        self.noun[:, _WALLS] = _WALL
        self.distance[:, _WALLS] = draws.uniform(2, low=4.0, high=6.0)
        self.half[:, _WALLS, 0] = draws.uniform(2, low=1.0, high=2.6)
        self.half[:, _WALLS, 1] = draws.uniform(2, low=0.22, high=0.6)
        self.half[:, _WALLS, 2] = draws.uniform(2, low=0.08, high=0.16)
        self._stand(_WALLS)

    def _place_round(self, draws: Draws) -> None:
        scale = self.distance.sqrt()
        radius = draws.uniform(4, low=0.07, high=0.14) * scale[:, _COLUMNS]
        height = draws.uniform(4, low=0.25, high=0.60) * scale[:, _COLUMNS]
        self.half[:, _COLUMNS] = torch.stack([radius, height, radius], dim=-1)
        ball = draws.uniform(4, low=0.13, high=0.26) * scale[:, _SPHERES]
        self.half[:, _SPHERES] = ball[..., None]
        self.noun[:, _COLUMNS], self.noun[:, _SPHERES] = _COLUMN, _SPHERE
        self._stand(_COLUMNS)
        self._stand(_SPHERES)

    def _gather(self, draws: Draws, slots: slice, kind: Tensor) -> None:
        """Make groups of four boxes, unless their kind [B] is 0, into stairs, a stepped pyramid, or a gate."""
        designs = torch.stack([_stairs(draws), _pyramid(draws), _gate(draws)], dim=1)
        design = designs[torch.arange(len(kind)), (kind - 1).clamp(min=0)]
        quarter = draws.integer(below=4) * (math.pi / 2)
        self.turn[:, slots] += torch.where(kind == 1, quarter, 0.0)[:, None]
        gathered = (kind > 0)[:, None]
        offset = _turned(design[..., :3], self.turn[:, slots])
        leader = self.centre[:, slots.start : slots.start + 1] * torch.tensor([1.0, 0.0, 1.0])
        self.centre[:, slots] = torch.where(gathered[..., None], leader + offset, self.centre[:, slots])
        self.half[:, slots] = torch.where(gathered[..., None], design[..., 3:], self.half[:, slots])
        self.group[:, slots] = torch.where(gathered, slots.start, self.group[:, slots])
        noun = torch.tensor([_BOX, _STAIRS, _PYRAMID, _GATE])[kind][:, None]
        self.noun[:, slots] = torch.where(gathered, noun, self.noun[:, slots])
        self.active[:, slots] |= gathered

    def _crown(self, draws: Draws) -> None:
        """Put some spheres on their columns: as the crowns of trees, or as balls."""
        tree, on_top = self.crown == 1, self.crown > 0
        height = self.distance[:, _COLUMNS].sqrt()
        trunk = torch.stack([0.04 * height, 0.22 * height, 0.04 * height], dim=-1)
        self.half[:, _COLUMNS] = torch.where(tree[..., None], trunk, self.half[:, _COLUMNS])
        self._stand(_COLUMNS)
        shaft = self.half[:, _COLUMNS]
        ball = torch.where(tree, draws.uniform(4, low=0.20, high=0.28) * height, 1.25 * shaft[..., 0])
        self.half[:, _SPHERES] = torch.where(on_top[..., None], ball[..., None], self.half[:, _SPHERES])
        lift = -2 * shaft[..., 1] - torch.where(tree, 0.6, 0.9) * ball
        crowned = torch.stack([self.centre[:, _COLUMNS, 0], lift, self.centre[:, _COLUMNS, 2]], dim=-1)
        self.centre[:, _SPHERES] = torch.where(on_top[..., None], crowned, self.centre[:, _SPHERES])
        for slots in (_COLUMNS, _SPHERES):
            self.noun[:, slots] = torch.where(tree, _TREE, self.noun[:, slots])
            self.active[:, slots] |= on_top
        self.group[:, _SPHERES] = torch.where(on_top, self.group[:, _COLUMNS], self.group[:, _SPHERES])


def _shared(turn: Tensor) -> Tensor:
    """Turns [B,18] where boxes of one group have that of the first, and round solids none."""
    boxes = [turn[:, slots.start : slots.start + 1].expand(-1, len(slots)) for slots in BOX_GROUPS]
    return torch.cat([*boxes, torch.zeros_like(turn[:, COLUMNS.start :])], dim=1)


def _sites(draws: Draws, used: Tensor) -> tuple[Tensor, Tensor]:
    """Bearing (radians to the right) and distance of each slot's site, both [B,18]; near and far sites alternate."""
    order = torch.where(used, draws.uniform(SLOTS), 2.0)
    rank = order.argsort(dim=1, stable=True).argsort(dim=1)
    share = 2 / used.sum(1, keepdim=True)
    turn = (rank + draws.uniform(SLOTS, low=0.15, high=0.85)) * share - 1
    bearing = math.pi * turn.sign() * turn.abs() ** 1.4
    near = draws.uniform(SLOTS, low=1.5, high=2.8)
    far = draws.uniform(SLOTS, low=2.9, high=5.4)
    return bearing, torch.where(rank % 2 == 0, near, far)


def _stairs(draws: Draws) -> Tensor:
    """Four steps that rise along x: offsets and half extents [B,4,6]."""
    step = torch.arange(4, dtype=torch.float64)
    rise, run, width = (draws.uniform(1, low=low, high=high) for low, high in ((0.13, 0.2), (0.2, 0.34), (0.5, 1.0)))
    tall = (step + 1) * rise / 2
    zero = torch.zeros_like(tall)
    return torch.stack([(step - 1.5) * run, -tall, zero, zero + run / 2, tall, zero + width / 2], dim=-1)


def _pyramid(draws: Draws) -> Tensor:
    """Four square layers: offsets and half extents [B,4,6]."""
    layer = torch.arange(4, dtype=torch.float64)
    base, rise = draws.uniform(1, low=0.5, high=0.85), draws.uniform(1, low=0.18, high=0.3)
    half = base * (1 - 0.24 * layer)
    zero = torch.zeros_like(half)
    return torch.stack([zero, -(layer + 0.5) * rise, zero, half, zero + rise / 2, half], dim=-1)


def _gate(draws: Draws) -> Tensor:
    """Two pillars, a lintel, and a smaller block on it: offsets and half extents [B,4,6]."""
    width, height, depth = (draws.uniform(low=low, high=high) for low, high in ((0.4, 0.7), (0.45, 0.75), (0.09, 0.16)))
    zero = torch.zeros_like(width)
    left = torch.stack([-width, -height, zero, depth, height, depth], dim=-1)
    right = torch.stack([width, -height, zero, depth, height, depth], dim=-1)
    lintel = torch.stack([zero, -2 * height - 0.1, zero, width + 0.25, zero + 0.1, depth * 1.25], dim=-1)
    block = torch.stack([zero, -2 * height - 0.27, zero, width * 0.7, zero + 0.07, depth], dim=-1)
    return torch.stack([left, right, lintel, block], dim=1)


def _turned(offset: Tensor, turn: Tensor) -> Tensor:
    """Offsets [...,3] turned about the vertical by [...] radians to the right."""
    x, y, z = offset.unbind(-1)
    cos, sin = turn.cos(), turn.sin()
    return torch.stack([cos * x + sin * z, y.expand_as(x), cos * z - sin * x], dim=-1)


def _shape_table(solids: _Layout) -> Tensor:
    turn = solids.turn[..., None]
    table = torch.cat([solids.centre, solids.half, turn.cos(), turn.sin()], dim=-1)
    ground = torch.tensor([0.0, 0, 0, 1, 1, 1, 1, 0], dtype=torch.float64).expand(len(table), 1, -1)
    return torch.cat([table, ground], dim=1).float()


def _start(draws: Draws, count: int) -> Tensor:
    start = torch.eye(4).repeat(count, 1, 1)
    start[:, 1, 3] = -draws.uniform(low=0.46, high=0.58).float()
    return start


def _colours(draws: Draws, noun: Tensor, ground: Tensor) -> Tensor:
    """Palette indices of all slots and the ground [B,19]. A scene has a colour for each noun, which most things take;
    parts of one object agree because they take it always.
    """
    names = list(COLOURS)
    usual = draws.integer(len(NOUNS), below=len(names)).gather(1, noun)
    other = draws.integer(SLOTS, below=len(names))
    own = (draws.uniform(SLOTS) < 0.5) & (noun <= _SPHERE)
    colour = torch.where(own, other, usual)
    crowns = torch.tensor([names.index(name) for name in ("green", "green", "green", "orange", "pink", "teal")])
    leaf = crowns[draws.integer(below=len(crowns))][:, None]
    colour = torch.where(noun == _TREE, leaf, colour)
    grounds = torch.tensor([[names.index(name) for name in row] for row in _GROUND_COLOURS])
    return torch.cat([colour, grounds[ground, draws.integer(below=6)][:, None]], dim=1)


def _paint(draws: Draws, noun: Tensor, colour: Tensor, ground: Tensor, radius: Tensor) -> Tensor:
    names = list(TEXTURES)
    objects = torch.tensor([[names.index(name) for name in row] for row in _OBJECT_TEXTURES])
    grounds = torch.tensor([names.index(name) for name in _GROUND_TEXTURES])
    texture = torch.cat([objects[noun, _per_noun(draws, noun)], grounds[ground][:, None]], dim=1)
    cells = torch.tensor(list(TEXTURES.values()), dtype=torch.float64)[texture]
    cells[..., :2] *= draws.uniform(SLOTS + 1, 1, low=0.8, high=1.25)
    cells[:, COLUMNS.start : GROUND, 0] = _closed(cells[:, COLUMNS.start : GROUND, 0], radius)
    palette = torch.tensor(list(COLOURS.values()), dtype=torch.float64)
    first = palette[colour]
    trunk = (noun[:, _COLUMNS] == _TREE)[..., None]
    first[:, _COLUMNS] = torch.where(trunk, palette[_palette_index("brown")], first[:, _COLUMNS])
    first = first * draws.uniform(SLOTS + 1, 1, low=0.88, high=1.04)
    first[:, GROUND] = first[:, GROUND] * 0.55 + 0.33 * first[:, GROUND].mean(-1, keepdim=True)
    light = draws.uniform(SLOTS + 1, 1) < 0.4
    second = torch.where(light, first * 0.55 + 0.42, first * 0.66)
    second[:, GROUND] = first[:, GROUND] * draws.uniform(1, low=0.66, high=0.8)
    return torch.cat([first.clamp(0, 1) ** 2, second.clamp(0, 1) ** 2, cells], dim=-1).float()


def _palette_index(name: str) -> int:
    """Index of a colour's name in `COLOURS`."""
    return list(COLOURS).index(name)


def _closed(width: Tensor, radius: Tensor) -> Tensor:
    """Cell widths near `width` that go round a solid an odd number of times, so that they meet at a joint."""
    around = 2 * math.pi * radius
    return around / (2 * ((around / width - 1) / 2).round().clamp(min=0) + 1)


def _per_noun(draws: Draws, noun: Tensor) -> Tensor:
    """One of six textures for each slot [B,18], the same for all of one noun in a scene."""
    return draws.integer(len(NOUNS), below=6).gather(1, noun)


def _sky(draws: Draws, time: Tensor) -> Tensor:
    zenith, horizon, sun = (
        torch.tensor([row[part] for row in _SKIES], dtype=torch.float64)[time] ** 2 for part in range(3)
    )
    low, high = torch.tensor([row[3] for row in _SKIES], dtype=torch.float64)[time].deg2rad().unbind(-1)
    elevation = low + (high - low) * draws.uniform()
    azimuth = draws.uniform(high=2 * math.pi)
    flat = elevation.cos()
    direction = torch.stack([azimuth.sin() * flat, -elevation.sin(), azimuth.cos() * flat], dim=-1)
    tint = draws.uniform(3, low=0.9, high=1.1)
    night = (time == TIMES.index("night"))[:, None]
    sky = 0.5 * zenith + 0.5 * horizon
    ambient = 0.35 * sky + 0.25 * sky.mean(1, keepdim=True) + 0.10
    hills = horizon * 0.55 + draws.uniform(3, low=0.02, high=0.14) * torch.where(night, 0.3, 1.0)
    colours = [zenith * tint, horizon, sun * torch.where(night, 0.75, 1.15), ambient, hills]
    ridge = draws.uniform(6) * torch.tensor([0.16, 0.07, 1, 1, 0.06, 1]) + torch.tensor([0.03, 0.01, 0, 0, 0.06, 0])
    return torch.cat([*colours, direction, ridge], dim=-1).float()
