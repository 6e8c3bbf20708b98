"""`render.trace_rays`, the mean of several rays and the rounding to bytes as one Triton kernel.

What it computes is explained there and in `textures`; here are the same formulas, with loops over the slots. Vectors
are tuples of three; a number is either a scalar of the program or has one value for each of its pixels [PIXELS].
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.training import scenes
from longtake.training.render import FAR, NEAR, SAMPLES

PIXELS = 256
"""Pixels of a program."""

_FAR, _NEAR = tl.constexpr(FAR), tl.constexpr(NEAR)
_COLUMNS, _SPHERES = tl.constexpr(scenes.COLUMNS.start), tl.constexpr(scenes.SPHERES.start)
_SLOTS, _GROUND = tl.constexpr(scenes.SLOTS), tl.constexpr(scenes.GROUND)
_ROWS = tl.constexpr(scenes.GROUND + 1)
_SHAPE, _PAINT, _SKY = tl.constexpr(8), tl.constexpr(13), tl.constexpr(scenes.SKY_NUMBERS)
_HALF_PI, _PI, _TURN = tl.constexpr(math.pi / 2), tl.constexpr(math.pi), tl.constexpr(0.5 / math.pi)


@triton.jit
def _clamp(x: tl.tensor) -> tl.tensor:
    """A number limited to 0 … 1."""
    return tl.minimum(tl.maximum(x, 0.0), 1.0)


@triton.jit
def _sign(x: tl.tensor) -> tl.tensor:
    return tl.where(x > 0.0, 1.0, tl.where(x < 0.0, -1.0, 0.0))


@triton.jit
def _dot(a: tl.tuple, b: tl.tuple) -> tl.tensor:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


@triton.jit
def _inverse(x: tl.tensor) -> tl.tensor:
    return 1.0 / tl.where(tl.abs(x) < 1e-6, 1e-6, x)


@triton.jit
def _atan2(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Within 1e-7 of the angle of (x, y) in radians: Abramowitz and Stegun, 4.4.49."""
    a, b = tl.abs(x), tl.abs(y)
    ratio = tl.minimum(a, b) / tl.maximum(tl.maximum(a, b), 1e-30)
    s = ratio * ratio
    series = -0.0752896400 + s * (0.0429096138 + s * (-0.0161657367 + s * 0.0028662257))
    series = 1.0 + s * (-0.3333314528 + s * (0.1999355085 + s * (-0.1420889944 + s * (0.1065626393 + s * series))))
    angle = ratio * series
    angle = tl.where(b > a, _HALF_PI - angle, angle)
    angle = tl.where(x < 0.0, _PI - angle, angle)
    return tl.where(y < 0.0, -angle, angle)


@triton.jit
def _vector(table: tl.tensor) -> tl.tuple:
    """Three consecutive numbers."""
    return tl.load(table), tl.load(table + 1), tl.load(table + 2)


@triton.jit
def _slab(origin: tl.tensor, inverse: tl.tensor, centre: tl.tensor, half: tl.tensor) -> tl.tuple:
    middle, reach = (centre - origin) * inverse, half * tl.abs(inverse)
    return middle - reach, middle + reach


@triton.jit
def _box_span(origin: tl.tuple, direction: tl.tuple, down: tl.tensor, solid: tl.tensor) -> tl.tuple:
    """Distances at which rays enter and leave the box of a row of the shape table; `down` is 1 / their y."""
    cos, sin = tl.load(solid + 6), tl.load(solid + 7)
    x, z = cos * origin[0] - sin * origin[2], sin * origin[0] + cos * origin[2]
    dx, dz = cos * direction[0] - sin * direction[2], sin * direction[0] + cos * direction[2]
    near, far = _slab(x, _inverse(dx), tl.load(solid), tl.load(solid + 3))
    low, high = _slab(origin[1], down, tl.load(solid + 1), tl.load(solid + 4))
    front, back = _slab(z, _inverse(dz), tl.load(solid + 2), tl.load(solid + 5))
    return tl.maximum(tl.maximum(near, low), front), tl.minimum(tl.minimum(far, high), back)


@triton.jit
def _column_span(origin: tl.tuple, direction: tl.tuple, down: tl.tensor, solid: tl.tensor) -> tl.tuple:
    x, z, radius = origin[0] - tl.load(solid), origin[2] - tl.load(solid + 2), tl.load(solid + 3)
    dx, dz = direction[0], direction[2]
    a, b, c = dx * dx + dz * dz, x * dx + z * dz, x * x + z * z - radius * radius
    inverse = 1.0 / (a + 1e-9)
    root = tl.sqrt(tl.maximum(b * b - a * c, 0.0))
    low, high = _slab(origin[1], down, tl.load(solid + 1), tl.load(solid + 4))
    return tl.maximum((-b - root) * inverse, low), tl.minimum((root - b) * inverse, high)


@triton.jit
def _ball_span(origin: tl.tuple, direction: tl.tuple, solid: tl.tensor) -> tl.tuple:
    x, y, z = origin[0] - tl.load(solid), origin[1] - tl.load(solid + 1), origin[2] - tl.load(solid + 2)
    radius = tl.load(solid + 3)
    along, square = x * direction[0] + y * direction[1] + z * direction[2], x * x + y * y + z * z
    root = tl.sqrt(tl.maximum(along * along - square + radius * radius, 0.0))
    return -along - root, root - along


@triton.jit
def _nearer(span: tl.tuple, here: tl.tensor, distance: tl.tensor, slot: tl.tensor) -> tl.tuple:
    """Distance and slot of the first thing on rays, given that slot `here` spans so much of them."""
    near, far = span
    hit = (near < far) & (near > _NEAR) & (near < distance)
    return tl.where(hit, near, distance), tl.where(hit, here, slot)


@triton.jit
def _closest(origin: tl.tuple, direction: tl.tuple, solids: tl.tensor) -> tl.tuple:
    """Distance, `FAR` for the sky, and slot, int32, of the first thing on each ray."""
    down = _inverse(direction[1])
    distance = tl.where(direction[1] > 1e-4, -origin[1] * down, _FAR)
    slot = tl.zeros_like(distance).to(tl.int32) + _GROUND
    for here in range(_COLUMNS):
        distance, slot = _nearer(_box_span(origin, direction, down, solids + here * _SHAPE), here, distance, slot)
    for here in range(_COLUMNS, _SPHERES):
        distance, slot = _nearer(_column_span(origin, direction, down, solids + here * _SHAPE), here, distance, slot)
    for here in range(_SPHERES, _SLOTS):
        distance, slot = _nearer(_ball_span(origin, direction, solids + here * _SHAPE), here, distance, slot)
    return distance, slot


@triton.jit
def _shaded(span: tl.tuple, lit: tl.tensor) -> tl.tensor:
    near, far = span
    return tl.where((near < far) & (far > _NEAR), 0.0, lit)


@triton.jit
def _lit(origin: tl.tuple, sun: tl.tuple, solids: tl.tensor) -> tl.tensor:
    """1 where nothing stands between a point and the sun, else 0."""
    lit = tl.zeros_like(origin[0]) + 1.0
    down = _inverse(sun[1])
    for here in range(_COLUMNS):
        lit = _shaded(_box_span(origin, sun, down, solids + here * _SHAPE), lit)
    for here in range(_COLUMNS, _SPHERES):
        lit = _shaded(_column_span(origin, sun, down, solids + here * _SHAPE), lit)
    for here in range(_SPHERES, _SLOTS):
        lit = _shaded(_ball_span(origin, sun, solids + here * _SHAPE), lit)
    return lit


@triton.jit
def _local(hit: tl.tuple, row: tl.tensor) -> tl.tuple:
    """Points in the axes of their solids, of rows [PIXELS] of the table, cosine and sine of its turn, and its size."""
    cos, sin = tl.load(row + 6), tl.load(row + 7)
    centre = _vector(row)
    x, z = cos * hit[0] - sin * hit[2] - centre[0], sin * hit[0] + cos * hit[2] - centre[2]
    return (x, hit[1] - centre[1], z), (cos, sin), _vector(row + 3)


@triton.jit
def _surface(local: tl.tuple, size: tl.tuple, slot: tl.tensor, bearing: tl.tensor) -> tl.tuple:
    """Normal in the solid's own axes, and coordinates of the texture's cells."""
    x, y, z = local
    wide, tall, deep = size
    solid = slot < _GROUND
    ball, curved = (slot >= _SPHERES) & solid, (slot >= _COLUMNS) & solid
    across = tl.where(curved, tl.sqrt(x * x + z * z) / wide, tl.abs(x / wide))
    along, up = tl.where(curved, 0.0, tl.abs(z / deep)), tl.abs(y / tall)
    level = (~ball) & (((up > across) & (up > along)) | (~solid))
    rounded, sideways = curved & (~level), (~level) & (~curved) & (across > along)
    facing = ~(level | curved | sideways)
    nx = tl.where(rounded, x / wide, tl.where(sideways, _sign(x), 0.0))
    ny = tl.where(ball, y / wide, tl.where(level, tl.where(solid, _sign(y), -1.0), 0.0))
    nz = tl.where(rounded, z / wide, tl.where(facing, _sign(z), 0.0))
    u = tl.where(level | facing, x, tl.where(curved, bearing * wide, z))
    return (nx, ny, nz), (u, tl.where(level, z, y))


@triton.jit
def _hashed(x: tl.tensor, y: tl.tensor, salt: tl.tensor) -> tl.tensor:
    """A number in [0, 1) for each lattice point, int32; the same as `textures.hashed`."""
    bits = x * 374761393 + y * 668265263 + salt * 1274126177
    bits = (bits ^ (bits >> 13)) * 1103515245
    bits = (bits ^ (bits >> 15)) * 362437
    return ((bits >> 8) & 0xFFFF).to(tl.float32) * (1.0 / 65536.0)


@triton.jit
def _value_noise(u: tl.tensor, v: tl.tensor, salt: tl.tensor) -> tl.tensor:
    column, row = tl.floor(u), tl.floor(v)
    x, y = column.to(tl.int32), row.to(tl.int32)
    s, t = u - column, v - row
    s, t = s * s * (3.0 - 2.0 * s), t * t * (3.0 - 2.0 * t)
    top = _hashed(x, y, salt) * (1.0 - s) + _hashed(x + 1, y, salt) * s
    bottom = _hashed(x, y + 1, salt) * (1.0 - s) + _hashed(x + 1, y + 1, salt) * s
    return top * (1.0 - t) + bottom * t


@triton.jit
def _surface_noise(u: tl.tensor, v: tl.tensor, footprint: tl.tensor, salt: tl.tensor) -> tl.tensor:
    blur = _clamp(1.6 - footprint * 5.2)
    detail = _clamp(1.6 - footprint * 16.0) * 0.5
    broad = _value_noise(u * 2.6, v * 2.6, salt) - 0.5
    return broad * blur + (_value_noise(u * 8.0, v * 8.0, salt + 77) - 0.5) * detail


@triton.jit
def _edge(x: tl.tensor) -> tl.tensor:
    return 0.5 - tl.abs(x - tl.floor(x) - 0.5)


@triton.jit
def _square_wave(x: tl.tensor, edge: tl.tensor, blur: tl.tensor) -> tl.tensor:
    sign = 1.0 - 2.0 * (tl.floor(x).to(tl.int32) & 1).to(tl.float32)
    return sign * _clamp(edge / tl.maximum(blur, 1e-3))


@triton.jit
def _pattern(cell: tl.tuple, footprint: tl.tensor, salt: tl.tensor, noise: tl.tensor, texture: tl.tensor) -> tl.tuple:
    """As `textures.pattern`; `texture` points to the seven numbers of each pixel."""
    width, height, joint = tl.load(texture), tl.load(texture + 1), tl.load(texture + 3)
    row = cell[1] / height + 0.5
    column = cell[0] / width + tl.floor(row) * tl.load(texture + 2) + 0.5
    blur_u, blur_v = footprint / width, footprint / height
    edge_u, edge_v = _edge(column), _edge(row)
    checks = _square_wave(column, edge_u, blur_u) * _square_wave(row, edge_v, blur_v)
    own = _hashed(tl.floor(column).to(tl.int32), tl.floor(row).to(tl.int32), salt) - 0.5
    near = _clamp(1.5 - 2.0 * tl.maximum(blur_u, blur_v))
    mix = 0.5 + tl.load(texture + 4) * 0.5 * checks + tl.load(texture + 5) * own * near + tl.load(texture + 6) * noise
    gap = tl.minimum(edge_u * width, edge_v * height)
    lines = tl.where(joint > 0.0, _clamp((joint - gap) / tl.maximum(footprint, 0.004) + 0.5), 0.0)
    return _clamp(mix), lines * near * _clamp(joint / footprint)


@triton.jit
def _light(hit: tl.tuple, normal: tl.tuple, slot: tl.tensor, solids: tl.tensor, heavens: tl.tensor) -> tl.tuple:
    """How much of the sun's and of the sky's light falls on each point."""
    sun = _vector(heavens + 15)
    above = (hit[0] + 3e-3 * normal[0], hit[1] + 3e-3 * normal[1], hit[2] + 3e-3 * normal[2])
    direct = tl.maximum(_dot(normal, sun), 0.0) * _lit(above, sun, solids)
    contact = tl.where(slot == _GROUND, 1.0, 1.0 - 0.35 * tl.exp(tl.minimum(hit[1] * 8.0, 0.0)))
    return direct, (0.75 - 0.25 * normal[1]) * contact


@triton.jit
def _hills(bearing: tl.tensor, heavens: tl.tensor) -> tl.tuple:
    """Height of the hills' ridge at a bearing in turns, as a sine, and how dark their slope is there."""
    a, b = bearing * 5.0 + tl.load(heavens + 20), bearing * 14.0 + tl.load(heavens + 21)
    a, b = a - tl.floor(a) - 0.5, b - tl.floor(b) - 0.5
    height, detail = tl.load(heavens + 18), tl.load(heavens + 19)
    ridge = height * (1.0 - 2.0 * tl.abs(a)) + detail * (1.0 - 2.0 * tl.abs(b)) + 0.01
    return ridge, 1.0 + (tl.where(a > 0.0, 0.12, -0.12) + tl.where(b > 0.0, 0.08, -0.08))


@triton.jit
def _backdrop_weights(
    direction: tl.tuple, heavens: tl.tensor, bearing: tl.tensor, grain: tl.tensor, focal: tl.tensor
) -> tl.tuple:
    """How much of a ray's sky is zenith, the sun's glare and cloud, how much hills, and how much of those no mist."""
    up = -direction[1]
    aside = _dot(direction, _vector(heavens + 15)) - 1.0
    glare = 0.35 * tl.exp(24.0 * aside) + 1.5 * tl.exp(900.0 * aside)
    cloud = tl.minimum(tl.maximum((grain + 0.08) * 1.8, 0.0), 0.6) * tl.load(heavens + 23) * _clamp(up * 4.0)
    hill, slope = _hills(bearing * _TURN, heavens)
    return tl.sqrt(_clamp(up)), glare, cloud, _clamp((hill - up) * focal + 0.5), _clamp(up / hill) * 0.8 * slope


@triton.jit
def _backdrop(weights: tl.tuple, heavens: tl.tensor) -> tl.tensor:
    """One colour of the sky with sun, clouds and hills; `heavens` points to that of the zenith."""
    rise, glare, cloud, ridge, mist = weights
    zenith, horizon, light = tl.load(heavens), tl.load(heavens + 3), tl.load(heavens + 6)
    heaven = horizon + (zenith - horizon) * rise
    heaven = heaven + (horizon * 0.7 + 0.3 * light - heaven) * cloud + light * glare
    return heaven + (horizon + (tl.load(heavens + 12) - horizon) * mist - heaven) * ridge


@triton.jit
def _colour(
    paint: tl.tensor,
    cells: tl.tuple,
    light: tl.tuple,
    heavens: tl.tensor,
    weights: tl.tuple,
    clear: tl.tensor,
    sky: tl.tensor,
) -> tl.tensor:
    """One colour of each ray; `paint` and `heavens` point to the first number of that colour."""
    first, horizon = tl.load(paint), tl.load(heavens + 3)
    albedo = (first + (tl.load(paint + 3) - first) * cells[0]) * (1.0 - 0.45 * cells[1])
    lit = tl.load(heavens + 6) * light[0] + tl.load(heavens + 9) * light[1]
    behind = tl.where(sky, _backdrop(weights, heavens), horizon)
    return tl.sqrt(_clamp(albedo * lit * clear + behind * (1.0 - clear)))


@triton.jit
def _direction(camera: tl.tensor, lens: tl.tensor, u: tl.tensor, v: tl.tensor) -> tl.tuple:
    """Unit vectors of the rays through places (u, v) in the image, in pixels."""
    x, y = (u - tl.load(lens + 2)) / tl.load(lens), (v - tl.load(lens + 3)) / tl.load(lens + 1)
    scale = tl.rsqrt(x * x + y * y + 1.0)
    a = tl.load(camera) * x + tl.load(camera + 1) * y + tl.load(camera + 2)
    b = tl.load(camera + 4) * x + tl.load(camera + 5) * y + tl.load(camera + 6)
    c = tl.load(camera + 8) * x + tl.load(camera + 9) * y + tl.load(camera + 10)
    return a * scale, b * scale, c * scale


@triton.jit
def _trace(
    origin: tl.tuple, direction: tl.tuple, solids: tl.tensor, paints: tl.tensor, heavens: tl.tensor, focal: tl.tensor
) -> tl.tuple:
    """Red, green and blue of rays, each [PIXELS] in 0 … 1."""
    distance, slot = _closest(origin, direction, solids)
    sky = distance >= _FAR
    dx, dy, dz = direction
    hit = (origin[0] + distance * dx, origin[1] + distance * dy, origin[2] + distance * dz)
    local, turn, size = _local(hit, solids + slot * _SHAPE)
    bearing = _atan2(tl.where(sky, dx, local[0]), tl.where(sky, -dz, -local[2]))
    own, cell = _surface(local, size, slot, bearing)
    normal = (turn[0] * own[0] + turn[1] * own[2], own[1], turn[0] * own[2] - turn[1] * own[0])
    facing = tl.maximum(tl.abs(_dot(normal, direction)), 0.12)
    footprint = tl.where(sky, 0.02, distance / (focal * facing))
    high = 1.3 / tl.where(sky, 0.18 - dy, 1.0)
    grain_u = tl.where(sky, dx * high, local[0] + 0.4 * local[1])
    grain_v = tl.where(sky, dz * high, local[2] + 0.6 * local[1])
    grain = _surface_noise(grain_u, grain_v, footprint, slot)
    paint = paints + slot * _PAINT
    cells = _pattern(cell, footprint, slot, grain, paint + 6)
    light = _light(hit, normal, slot, solids, heavens)
    weights = _backdrop_weights(direction, heavens, bearing, grain, focal)
    thickness = tl.load(heavens + 22) * distance
    clear = tl.where(sky, 0.0, tl.exp(-thickness * thickness))
    red = _colour(paint, cells, light, heavens, weights, clear, sky)
    green = _colour(paint + 1, cells, light, heavens + 1, weights, clear, sky)
    blue = _colour(paint + 2, cells, light, heavens + 2, weights, clear, sky)
    return red, green, blue


@triton.jit(do_not_specialize=["frames"])
def _kernel(
    shape: tl.tensor,
    paint: tl.tensor,
    sky: tl.tensor,
    cameras: tl.tensor,
    lenses: tl.tensor,
    offsets: tl.tensor,
    video: tl.tensor,
    frames: int,
    HEIGHT: tl.constexpr,
    WIDTH: tl.constexpr,
    SAMPLES: tl.constexpr,
    PIXELS: tl.constexpr,
) -> None:
    """Some pixels of one frame."""
    frame = tl.program_id(0).to(tl.int64)
    scene = frame // frames
    pixel = tl.program_id(1) * PIXELS + tl.arange(0, PIXELS)
    camera, lens = cameras + frame * 16, lenses + frame * 4
    origin = (tl.load(camera + 3), tl.load(camera + 7), tl.load(camera + 11))
    solids, paints, heavens = shape + scene * (_ROWS * _SHAPE), paint + scene * (_ROWS * _PAINT), sky + scene * _SKY
    red = tl.zeros([PIXELS], tl.float32)
    green, blue = red, red
    for sample in range(SAMPLES):
        u = (pixel % WIDTH).to(tl.float32) + tl.load(offsets + 2 * sample)
        v = (pixel // WIDTH).to(tl.float32) + tl.load(offsets + 2 * sample + 1)
        direction = _direction(camera, lens, u, v)
        r, g, b = _trace(origin, direction, solids, paints, heavens, tl.load(lens))
        red, green, blue = red + r, green + g, blue + b
    scale = 255.0 / SAMPLES
    place, inside = video + frame * (HEIGHT * WIDTH * 3) + pixel * 3, pixel < HEIGHT * WIDTH
    tl.store(place, (red * scale + 0.5).to(tl.uint8), inside)
    tl.store(place + 1, (green * scale + 0.5).to(tl.uint8), inside)
    tl.store(place + 2, (blue * scale + 0.5).to(tl.uint8), inside)


def render_frames(
    shape: Tensor, paint: Tensor, sky: Tensor, cameras: Tensor, lenses: Tensor, height: int, width: int, samples: int
) -> Tensor:
    """Video [B,T,height,width,3] uint8 from the mean of `samples` rays a pixel.

    Args:
        shape, paint, sky, cameras, lenses: as for `render.trace_rays`, contiguous.
    """
    batch, frames = cameras.shape[:2]
    assert all(x.is_contiguous() and x.dtype == torch.float32 for x in (shape, paint, sky, cameras, lenses))
    assert len(shape) == len(paint) == len(sky) == batch
    assert lenses.shape[:2] == (batch, frames)
    offsets = torch.tensor(SAMPLES[samples], device=shape.device)
    video = torch.empty(batch, frames, height, width, 3, dtype=torch.uint8, device=shape.device)
    grid = (batch * frames, triton.cdiv(height * width, PIXELS))
    tables = shape, paint, sky, cameras, lenses, offsets
    sizes = {"HEIGHT": height, "WIDTH": width, "PIXELS": PIXELS}
    with on_device_of(shape):
        _kernel[grid](*tables, video, frames, **sizes, SAMPLES=samples, num_warps=4)
    return video
