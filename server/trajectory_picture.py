"""A camera path as a picture: from above, and its height over time."""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw, ImageFont

from longtake.server.camera.intrinsics import DEFAULT_FIELD_OF_VIEW
from longtake.server.camera.poses import rebase
from longtake.server.camera.resample import FPS

Points = NDArray[np.float64]
Colour = tuple[int, int, int]

WIDTH, PLAN_HEIGHT, PROFILE_HEIGHT = 1000, 720, 240
"""Size of the picture and of its two panels, in pixels."""

_SUPERSAMPLING = 2
_MARGIN, _LEFT, _BELOW = 40, 80, 50
_FRUSTA = 24
_FRUSTUM_SIZE = 0.035
_FIRST, _LAST = (31, 119, 180), (227, 119, 26)
_START, _END = (34, 139, 58), (200, 40, 45)
_INK, _GRID, _PAPER = (60, 60, 60), (228, 228, 228), (255, 255, 255)


class _Panel(NamedTuple):
    """A box of the picture and the range of values it shows, upwards and to the right."""

    box: tuple[float, float, float, float]
    low: tuple[float, float]
    high: tuple[float, float]

    def at(self, points: Points) -> Points:
        """Pixels of points [..., 2]."""
        left, top, right, bottom = self.box
        share = (points - np.array(self.low)) / (np.array(self.high) - np.array(self.low))
        pixels: Points = share * [right - left, top - bottom] + [left, bottom]
        return pixels


def draw_path(poses: Points, title: str, field_of_view: float = DEFAULT_FIELD_OF_VIEW) -> Image.Image:
    """Draw a path as its first camera sees it: x to the right, z forward, height against the y axis.

    Args:
        poses: c2w [F,4,4] float64 at 16 fps, OpenCV axes; not changed.
        title: a line above the picture.
        field_of_view: horizontal degrees of the drawn cameras.

    Returns:
        An RGB picture of 1000×960 pixels.
    """
    relative = rebase(poses, poses[0])
    size = (WIDTH * _SUPERSAMPLING, (PLAN_HEIGHT + PROFILE_HEIGHT) * _SUPERSAMPLING)
    image = Image.new("RGB", size, _PAPER)
    pen = ImageDraw.Draw(image)
    _text(pen, (WIDTH - _MARGIN, _MARGIN - 7), title, "rs")
    _draw_plan(pen, relative, field_of_view)
    _draw_profile(pen, relative)
    return image.resize((WIDTH, PLAN_HEIGHT + PROFILE_HEIGHT), Image.Resampling.LANCZOS)


def _draw_plan(pen: ImageDraw.ImageDraw, poses: Points, field_of_view: float) -> None:
    """The path from above, both axes to the same scale."""
    path = poses[:, [0, 2], 3]
    panel = _equal_panel(path)
    _draw_axes(pen, panel, "x (right)", "z (forward)")
    length = _FRUSTUM_SIZE * (panel.high[0] - panel.low[0])
    colours = _colours(len(poses))
    for frame in np.unique(np.linspace(0, len(poses) - 1, min(_FRUSTA, len(poses))).round().astype(int)):
        corners = _frustum(poses[frame], length, math.tan(math.radians(field_of_view / 2)))
        _line(pen, panel.at(corners), colours[frame], 1)
    _draw_track(pen, panel, path, colours)
    _draw_ends(pen, panel, path)


def _draw_profile(pen: ImageDraw.ImageDraw, poses: Points) -> None:
    """Height over seconds."""
    heights = -poses[:, 1, 3]
    path = np.stack([np.arange(len(poses)) / FPS, heights], axis=1)
    low, high = _widened(float(heights.min()), float(heights.max()))
    top = PLAN_HEIGHT + _MARGIN / 2
    box = _scaled(_LEFT, top, WIDTH - _MARGIN, PLAN_HEIGHT + PROFILE_HEIGHT - _BELOW)
    panel = _Panel(box, (0.0, low), (max(float(path[-1, 0]), 1 / FPS), high))
    _draw_axes(pen, panel, "seconds", "height (up)")
    _draw_track(pen, panel, path, _colours(len(poses)))
    _draw_ends(pen, panel, path)


def _equal_panel(path: Points) -> _Panel:
    """The upper panel around a path [F,2], a unit being as long in both directions."""
    box = _scaled(_LEFT, _MARGIN, WIDTH - _MARGIN, PLAN_HEIGHT - _BELOW)
    sides = np.array([box[2] - box[0], box[3] - box[1]])
    centre, extent = (path.min(axis=0) + path.max(axis=0)) / 2, np.ptp(path, axis=0)
    unit = max(float((extent / sides).max()) * 1.2, 1e-9 * float(np.abs(centre).max()))
    half = sides / 2 * (unit or 1 / sides.max())
    low, high = centre - half, centre + half
    return _Panel(box, (float(low[0]), float(low[1])), (float(high[0]), float(high[1])))


def _frustum(pose: Points, length: float, spread: float) -> Points:
    """The outline [4,2] of what a camera sees, from above: a triangle from its centre."""
    centre, right, forward = pose[[0, 2], 3], pose[[0, 2], 0], pose[[0, 2], 2]
    edges = [forward + side * spread * right for side in (-1, 1)]
    return np.stack([centre, centre + length * edges[0], centre + length * edges[1], centre])


def _draw_axes(pen: ImageDraw.ImageDraw, panel: _Panel, across: str, up: str) -> None:
    """Frame, grid and numbers of a panel."""
    left, top, right, bottom = panel.box
    for value in _ticks(panel.low[0], panel.high[0]):
        x = float(panel.at(np.array([value, panel.low[1]]))[0])
        pen.line([(x, top), (x, bottom)], _GRID, _SUPERSAMPLING)
        _text(pen, (x / _SUPERSAMPLING, bottom / _SUPERSAMPLING + 5), f"{value:g}", "ma")
    for value in _ticks(panel.low[1], panel.high[1]):
        y = float(panel.at(np.array([panel.low[0], value]))[1])
        pen.line([(left, y), (right, y)], _GRID, _SUPERSAMPLING)
        _text(pen, (left / _SUPERSAMPLING - 6, y / _SUPERSAMPLING), f"{value:g}", "rm")
    pen.rectangle(panel.box, outline=_INK, width=_SUPERSAMPLING)
    _text(pen, ((left + right) / 2 / _SUPERSAMPLING, bottom / _SUPERSAMPLING + 24), across, "ma")
    _text(pen, (left / _SUPERSAMPLING, top / _SUPERSAMPLING - 7), up, "ls")


def _draw_track(pen: ImageDraw.ImageDraw, panel: _Panel, path: Points, colours: list[Colour]) -> None:
    """A path [F,2] whose colour tells the time."""
    pixels = panel.at(path)
    for frame in range(len(path) - 1):
        _line(pen, pixels[frame : frame + 2], colours[frame], 2)


def _draw_ends(pen: ImageDraw.ImageDraw, panel: _Panel, path: Points) -> None:
    """A green disc where the path starts and a red square where it ends."""
    (x, y), (u, v) = (panel.at(path[frame]) for frame in (0, -1))
    radius = 6 * _SUPERSAMPLING
    pen.rectangle([u - radius, v - radius, u + radius, v + radius], outline=_END, width=2 * _SUPERSAMPLING)
    radius = 5 * _SUPERSAMPLING
    pen.ellipse([x - radius, y - radius, x + radius, y + radius], fill=_START)
    _text(pen, (x / _SUPERSAMPLING + 10, y / _SUPERSAMPLING - 10), "start", "ls", _START)
    _text(pen, (u / _SUPERSAMPLING - 10, v / _SUPERSAMPLING + 10), "end", "rt", _END)


def _ticks(low: float, high: float) -> Iterable[float]:
    """Round numbers, 1, 2 or 5 times a power of ten apart, between two values."""
    rough = (high - low) / 7
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * (1 - 1e-9))
    return [round(number * step, 12) for number in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _widened(low: float, high: float) -> tuple[float, float]:
    """A range with some room around it, and never empty."""
    room = max((high - low) * 0.15, 1e-9 * max(abs(low), abs(high))) or 0.5
    return low - room, high + room


def _colours(count: int) -> list[Colour]:
    """A colour for each of `count` frames, from that of the first to that of the last."""
    mixed = np.linspace(_FIRST, _LAST, max(count, 2)).round().astype(int)
    return [(int(red), int(green), int(blue)) for red, green, blue in mixed]


def _scaled(left: float, top: float, right: float, bottom: float) -> tuple[float, float, float, float]:
    return left * _SUPERSAMPLING, top * _SUPERSAMPLING, right * _SUPERSAMPLING, bottom * _SUPERSAMPLING


def _line(pen: ImageDraw.ImageDraw, pixels: Points, colour: Colour, width: int) -> None:
    pen.line([(float(x), float(y)) for x, y in pixels], colour, width * _SUPERSAMPLING, joint="curve")


def _text(
    pen: ImageDraw.ImageDraw, at: tuple[float, float], text: str, anchor: str = "la", colour: Colour = _INK
) -> None:
    font = ImageFont.load_default(14 * _SUPERSAMPLING)
    place = (at[0] * _SUPERSAMPLING, at[1] * _SUPERSAMPLING)
    pen.text(place, text, colour, font, anchor, stroke_width=2 * _SUPERSAMPLING, stroke_fill=_PAPER)
