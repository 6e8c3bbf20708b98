"""Colours and procedural surface patterns, as arithmetic on tensors of any shape."""

from typing import NamedTuple

from torch import Tensor

COLOURS: dict[str, tuple[float, float, float]] = {
    "red": (0.84, 0.17, 0.15),
    "orange": (0.95, 0.52, 0.13),
    "yellow": (0.96, 0.83, 0.22),
    "green": (0.30, 0.66, 0.25),
    "teal": (0.10, 0.62, 0.60),
    "blue": (0.16, 0.38, 0.86),
    "purple": (0.52, 0.27, 0.72),
    "pink": (0.96, 0.53, 0.67),
    "brown": (0.52, 0.34, 0.21),
    "white": (0.93, 0.92, 0.88),
    "grey": (0.56, 0.57, 0.60),
}


class Texture(NamedTuple):
    """A pattern of cells: their size in scene units, the shift from row to row in cells, the half width of the joints
    in units, and how strongly checks, the cells' own tones and noise mix the second colour in.
    """

    width: float
    height: float
    shift: float
    joint: float
    check: float
    tone: float
    noise: float


_ENDLESS = 1e4

TEXTURES: dict[str, Texture] = {
    "plain": Texture(_ENDLESS, _ENDLESS, 0.0, 0.0, 0.0, 0.0, 0.45),
    "checks": Texture(0.5, 0.5, 0.0, 0.0, 0.8, 0.2, 0.25),
    "tiles": Texture(0.45, 0.45, 0.0, 0.016, 0.0, 0.7, 0.35),
    "bricks": Texture(0.36, 0.16, 0.5, 0.012, 0.0, 0.8, 0.35),
    "planks": Texture(1.3, 0.22, 0.37, 0.010, 0.0, 1.0, 0.3),
    "stripes": Texture(_ENDLESS, 0.16, 0.0, 0.0, 0.9, 0.0, 0.2),
    "grass": Texture(_ENDLESS, _ENDLESS, 0.0, 0.0, 0.0, 0.0, 1.3),
}


class Pattern(NamedTuple):
    """What a texture does at a point: how much of the second colour shows, and how much of a joint."""

    mix: Tensor
    joint: Tensor


def hashed(x: Tensor, y: Tensor, salt: Tensor) -> Tensor:
    """A number in [0, 1) for each lattice point; int32 arguments, which may wrap around, float32 result."""
    bits = x * 374761393 + y * 668265263 + salt * 1274126177
    bits = (bits ^ (bits >> 13)) * 1103515245
    bits = (bits ^ (bits >> 15)) * 362437
    return ((bits >> 8) & 0xFFFF).float() * (1.0 / 65536.0)


def value_noise(u: Tensor, v: Tensor, salt: Tensor) -> Tensor:
    """Noise in [0, 1) of float32 coordinates, smooth over cells of size one; salt int32."""
    column, row = u.floor(), v.floor()
    x, y = column.int(), row.int()
    s, t = _smooth(u - column), _smooth(v - row)
    top = hashed(x, y, salt) * (1 - s) + hashed(x + 1, y, salt) * s
    bottom = hashed(x, y + 1, salt) * (1 - s) + hashed(x + 1, y + 1, salt) * s
    return top * (1 - t) + bottom * t


def surface_noise(u: Tensor, v: Tensor, footprint: Tensor, salt: Tensor) -> Tensor:
    """Two octaves of noise around 0 at scene coordinates; each fades where a pixel covers more than half its cell."""
    coarse, fine = 2.6, 8.0
    blur = (1.6 - footprint * (2 * coarse)).clamp(0, 1)
    detail = (1.6 - footprint * (2 * fine)).clamp(0, 1) * 0.5
    broad = value_noise(u * coarse, v * coarse, salt) - 0.5
    return broad * blur + (value_noise(u * fine, v * fine, salt + 77) - 0.5) * detail


def pattern(u: Tensor, v: Tensor, footprint: Tensor, salt: Tensor, noise: Tensor, texture: list[Tensor]) -> Pattern:
    """A texture at scene coordinates (u, v), `footprint` units of which make one pixel.

    Args:
        texture: the numbers of a `Texture`, each of a shape that broadcasts with the coordinates.
    """
    width, height, shift, joint, check, tone, rough = texture
    row = v / height + 0.5
    column = u / width + row.floor() * shift + 0.5
    blur_u, blur_v = footprint / width, footprint / height
    edge_u, edge_v = _edge(column), _edge(row)
    checks = _square_wave(column, edge_u, blur_u) * _square_wave(row, edge_v, blur_v)
    own = hashed(column.floor().int(), row.floor().int(), salt) - 0.5
    near = (1.5 - 2 * blur_u.maximum(blur_v)).clamp(0, 1)
    mix = 0.5 + check * 0.5 * checks + tone * own * near + rough * noise
    gap = (edge_u * width).minimum(edge_v * height)
    lines = ((joint - gap) / footprint.clamp(min=0.004) + 0.5).clamp(0, 1) * (joint > 0)
    return Pattern(mix.clamp(0, 1), lines * near * (joint / footprint).clamp(0, 1))


def _smooth(x: Tensor) -> Tensor:
    return x * x * (3 - 2 * x)


def _edge(x: Tensor) -> Tensor:
    """Distance to the nearest integer."""
    return 0.5 - (x - x.floor() - 0.5).abs()


def _square_wave(x: Tensor, edge: Tensor, blur: Tensor) -> Tensor:
    """±1 in turn from cell to cell, blurred over `blur` cells."""
    sign = 1 - 2 * (x.floor().int() & 1).float()
    return sign * (edge / blur.clamp(min=1e-3)).clamp(0, 1)
