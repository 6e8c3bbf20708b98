"""A ray tracer for `Scenes`: closest solid, one shadow ray, procedural texture, haze.

What happens to a ray is arithmetic on tensors that broadcast to [B,T,H,W]. On a GPU the Triton kernel of
`render_triton` computes the same.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.backend import TRITON_INSTALLED
from longtake.training.scenes import BOX_GROUPS, COLUMNS, GROUND, SLOTS, SPHERES, Scenes
from longtake.training.textures import pattern, surface_noise

Vector = tuple[Tensor, Tensor, Tensor]

FAR = 1e4
NEAR = 1e-3
_BURIED = 100.0
SAMPLES = {
    1: ((0.5, 0.5),),
    2: ((0.25, 0.3), (0.75, 0.7)),
    4: ((0.375, 0.125), (0.875, 0.375), (0.125, 0.625), (0.625, 0.875)),
}


class Ray(NamedTuple):
    """Origin and unit direction in the scene's world."""

    origin: Vector
    direction: Vector


class Point(NamedTuple):
    """Where rays end: distance, slot, world normal, coordinates of cells and of noise, bearing about the solid's axis,
    and whether it is the sky, where the noise is clouds and the bearing that of the ray.
    """

    distance: Tensor
    slot: Tensor
    normal: Vector
    u: Tensor
    v: Tensor
    grain: tuple[Tensor, Tensor]
    bearing: Tensor
    sky: Tensor


def default_intrinsics(width: int, height: int, degrees: float = 60.0) -> Tensor:
    """Intrinsics fx fy cx cy [4] float32 in pixels of a centred camera with a horizontal field of view of `degrees`."""
    focal = width / 2 / math.tan(math.radians(degrees) / 2)
    return torch.tensor([focal, focal, width / 2, height / 2])


def render(
    scenes: Scenes,
    poses: Tensor,
    intrinsics: Tensor,
    height: int,
    width: int,
    *,
    samples: int = 2,
    block: int = 32,
) -> Tensor:
    """Video of scenes as cameras see them.

    Args:
        poses: [B,T,4,4] of any float dtype and device, c2w relative to the scene's first camera, OpenCV axes.
        intrinsics: [B,4] or [B,T,4], fx fy cx cy in pixels; the centre of the top left pixel is at (0.5, 0.5).
        samples: rays per pixel, 1, 2 or 4.
        block: frames to work on at once without the kernel, which bounds the memory.

    Returns:
        [B,T,height,width,3] uint8 RGB on the scenes' device.
    """
    device = scenes.seed.device
    cameras = (scenes.start[:, None].double() @ poses.to(device, torch.float64)).float().contiguous()
    lenses = intrinsics.to(device, torch.float32)
    lenses = (lenses[:, None] if lenses.ndim == 2 else lenses).expand(*cameras.shape[:2], 4).contiguous()
    tables = (visible_solids(scenes), scenes.paint.contiguous(), scenes.sky.contiguous())
    if device.type == "cuda" and TRITON_INSTALLED:
        from longtake.training.render_triton import render_frames

        return render_frames(*tables, cameras, lenses, height, width, samples)
    video = torch.empty(*cameras.shape[:2], height, width, 3, dtype=torch.uint8, device=device)
    for rows, frames in _blocks(len(scenes), cameras.shape[1], block):
        shape, paint, sky = (table[rows] for table in tables)
        cut = cameras[rows, frames], lenses[rows, frames]
        video[rows, frames] = trace_image(shape, paint, sky, *cut, height, width, samples)
    return video


def visible_solids(scenes: Scenes) -> Tensor:
    """`Scenes.shape` with centres in the solids' own axes, and unused slots deep under the ground."""
    x, y, z, wide, tall, deep, cos, sin = scenes.shape.unbind(-1)
    y = torch.cat([torch.where(scenes.active, y[:, :SLOTS], _BURIED), y[:, SLOTS:]], dim=1)
    return torch.stack([cos * x - sin * z, y, sin * x + cos * z, wide, tall, deep, cos, sin], dim=-1)


def _blocks(count: int, frames: int, limit: int) -> list[tuple[slice, slice]]:
    """Blocks of a [B,T] grid with at most `limit` frames in each."""
    columns = max(min(frames, limit), 1)
    rows = max(limit // columns, 1)
    return [
        (slice(row, row + rows), slice(column, column + columns))
        for row in range(0, count, rows)
        for column in range(0, frames, columns)
    ]


def trace_image(
    shape: Tensor, paint: Tensor, sky: Tensor, cameras: Tensor, lenses: Tensor, height: int, width: int, samples: int
) -> Tensor:
    """[B,T,H,W,3] uint8 from the mean of `samples` rays a pixel; arguments as for `trace_rays`."""
    total = cameras.new_zeros(*cameras.shape[:2], height, width, 3)
    for offset in cameras.new_tensor(SAMPLES[samples]):
        total += torch.stack(trace_rays(shape, paint, sky, cameras, lenses, offset, height, width), dim=-1)
    return (total * (255.0 / samples) + 0.5).to(torch.uint8)


def trace_rays(
    shape: Tensor, paint: Tensor, sky: Tensor, cameras: Tensor, lenses: Tensor, offset: Tensor, height: int, width: int
) -> Vector:
    """Red, green and blue, each [B,T,H,W] float32 in 0 … 1, of one ray a pixel.

    Args:
        shape: [B,19,8] float32 as in `Scenes`, but centres in the solids' own axes and unused slots out of sight.
        paint: [B,19,13] float32. sky: [B,24] float32.
        cameras: [B,T,4,4] float32, c2w in the scene's world.
        lenses: [B,T,4] float32, fx fy cx cy in pixels.
        offset: [2] float32, where in the pixel the ray goes through.
    """
    ray = _camera_ray(cameras, lenses, offset, height, width)
    heavens = [number[:, None, None, None] for number in sky.unbind(1)]
    solids = [[shape[:, slot, part, None, None, None] for part in range(8)] for slot in range(SLOTS)]
    point = _surface(ray, shape, *_closest(ray, solids))
    sun: Vector = (heavens[15], heavens[16], heavens[17])
    footprint = point.distance / (lenses[..., 0, None, None] * _dot(point.normal, ray.direction).abs().clamp(min=0.12))
    footprint = torch.where(point.sky, 0.02, footprint)
    grain = surface_noise(*point.grain, footprint, point.slot)
    albedo = _albedo(point, paint, footprint, grain)
    light = _light(ray, point, solids, heavens, sun)
    backdrop = _backdrop(ray.direction, heavens, sun, point.bearing, grain, lenses[..., 0, None, None])
    thickness = heavens[22] * point.distance
    clear = torch.where(point.sky, 0.0, (-thickness * thickness).exp())
    red, green, blue = (
        (a * b * clear + c * (1 - clear)).clamp(0, 1).sqrt()
        for a, b, c in zip(albedo, light, _hazy(backdrop, heavens, point.sky), strict=True)
    )
    return red, green, blue


def _camera_ray(cameras: Tensor, lenses: Tensor, offset: Tensor, height: int, width: int) -> Ray:
    fx, fy, cx, cy = (number[..., None, None] for number in lenses.unbind(-1))
    u = torch.arange(width, device=cameras.device, dtype=torch.float32) + offset[0]
    v = torch.arange(height, device=cameras.device, dtype=torch.float32)[:, None] + offset[1]
    x, y = (u - cx) / fx, (v - cy) / fy
    rows = [[cameras[..., row, column, None, None] for column in range(4)] for row in range(3)]
    scale = (x * x + y * y + 1).rsqrt()
    a, b, c = ((row[0] * x + row[1] * y + row[2]) * scale for row in rows)
    return Ray((rows[0][3], rows[1][3], rows[2][3]), (a, b, c))


def _dot(a: Vector, b: Vector) -> Tensor:
    return a[0] * b[0] + a[1] * b[1] + a[2] * b[2]


def _inverse(x: Tensor) -> Tensor:
    return 1 / torch.where(x.abs() < 1e-6, 1e-6, x)


def _larger(a: Tensor, b: Tensor) -> Tensor:
    """The maximum of numbers that are never NaN."""
    return torch.where(a > b, a, b)


def _smaller(a: Tensor, b: Tensor) -> Tensor:
    return torch.where(a < b, a, b)


def _spans(ray: Ray, solids: list[list[Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Distances [B,T,H,W] at which a ray enters and leaves each solid; it misses those it does not enter before."""
    spans = []
    for slots in BOX_GROUPS:
        turned = _turned(ray, *solids[slots[0]][6:])
        spans += [_box_span(turned, solids[slot]) for slot in slots]
    spans += [_column_span(ray, solids[slot]) for slot in COLUMNS]
    return spans + [_ball_span(ray, solids[slot]) for slot in SPHERES]


def _turned(ray: Ray, cos: Tensor, sin: Tensor) -> Ray:
    """A ray in axes turned about the vertical."""
    (x, y, z), (dx, dy, dz) = ray
    return Ray((cos * x - sin * z, y, sin * x + cos * z), (cos * dx - sin * dz, dy, sin * dx + cos * dz))


def _box_span(ray: Ray, solid: list[Tensor]) -> tuple[Tensor, Tensor]:
    (near, far), low, deep = (_slab(ray, solid, axis) for axis in range(3))
    return _larger(_larger(near, low[0]), deep[0]), _smaller(_smaller(far, low[1]), deep[1])


def _column_span(ray: Ray, solid: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, z = ray.origin[0] - solid[0], ray.origin[2] - solid[2]
    dx, _, dz = ray.direction
    near, far = _roots(dx * dx + dz * dz, x * dx + z * dz, x * x + z * z - solid[3] * solid[3])
    low, high = _slab(ray, solid, 1)
    return _larger(near, low), _smaller(far, high)


def _ball_span(ray: Ray, solid: list[Tensor]) -> tuple[Tensor, Tensor]:
    x, y, z = (origin - centre for origin, centre in zip(ray.origin, solid[:3], strict=True))
    dx, dy, dz = ray.direction
    along, square = x * dx + y * dy + z * dz, x * x + y * y + z * z
    root = _larger(along * along - square + solid[3] * solid[3], torch.zeros_like(square)).sqrt()
    return -along - root, root - along


def _slab(ray: Ray, solid: list[Tensor], axis: int) -> tuple[Tensor, Tensor]:
    inverse = _inverse(ray.direction[axis])
    middle, reach = (solid[axis] - ray.origin[axis]) * inverse, solid[3 + axis] * inverse.abs()
    return middle - reach, middle + reach


def _roots(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    """Roots of a·t² + 2·b·t + c; equal where there are none."""
    inverse = 1 / (a + 1e-9)
    root = _larger(b * b - a * c, torch.zeros_like(c)).sqrt()
    return (-b - root) * inverse, (root - b) * inverse


def _closest(ray: Ray, solids: list[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """Distance, `FAR` for the sky, and slot, int32, of the first thing on a ray."""
    down = ray.direction[1]
    distance = torch.where(down > 1e-4, -ray.origin[1] * _inverse(down), FAR)
    slot = torch.full_like(distance, GROUND, dtype=torch.int32)
    for index, (near, far) in enumerate(_spans(ray, solids)):
        hit = (near < far) & (near > NEAR) & (near < distance)
        distance = torch.where(hit, near, distance)
        slot = torch.where(hit, index, slot)
    return distance, slot


def _surface(ray: Ray, shape: Tensor, distance: Tensor, slot: Tensor) -> Point:
    sky = distance >= FAR
    local, turn, size = _local(ray, shape, distance, slot)
    (x, y, z), (wide, tall, deep) = local, size
    solid = slot < GROUND
    ball, curved = (slot >= SPHERES.start) & solid, (slot >= COLUMNS.start) & solid
    across = torch.where(curved, (x * x + z * z).sqrt() / wide, (x / wide).abs())
    along, up = torch.where(curved, 0.0, (z / deep).abs()), (y / tall).abs()
    level = ~ball & (((up > across) & (up > along)) | ~solid)
    round_, sideways = curved & ~level, ~level & ~curved & (across > along)
    facing = ~(level | curved | sideways)
    nx = torch.where(round_, x / wide, torch.where(sideways, x.sign(), 0.0))
    ny = torch.where(ball, y / wide, torch.where(level, torch.where(solid, y.sign(), -1.0), 0.0))
    nz = torch.where(round_, z / wide, torch.where(facing, z.sign(), 0.0))
    dx, dy, dz = ray.direction
    bearing = torch.atan2(torch.where(sky, dx, x), torch.where(sky, -dz, -z))
    high = 1.3 / (0.18 - dy)
    grain = torch.where(sky, dx * high, x + 0.4 * y), torch.where(sky, dz * high, z + 0.6 * y)
    u = torch.where(level | facing, x, torch.where(curved, bearing * wide, z))
    v = torch.where(level, z, y)
    cos, sin = turn
    return Point(distance, slot, (cos * nx + sin * nz, ny, cos * nz - sin * nx), u, v, grain, bearing, sky)


def _local(
    ray: Ray, shape: Tensor, distance: Tensor, slot: Tensor
) -> tuple[Vector, tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Where rays end in the axes of the solid, cosine and sine of its turn, and its half extents."""
    centre_x, centre_y, centre_z, wide, tall, deep, cos, sin = _looked_up(shape, slot)
    x, y, z = (o + distance * d for o, d in zip(ray.origin, ray.direction, strict=True))
    local = cos * x - sin * z - centre_x, y - centre_y, sin * x + cos * z - centre_z
    return local, (cos, sin), (wide, tall, deep)


def _looked_up(table: Tensor, slot: Tensor) -> list[Tensor]:
    """The numbers of each ray's slot, from a table [B,19,n]."""
    batch = torch.arange(len(table), device=table.device)[:, None, None, None]
    return [table[:, :, part][batch, slot] for part in range(table.shape[2])]


def _albedo(point: Point, paint: Tensor, footprint: Tensor, grain: Tensor) -> Vector:
    numbers = _looked_up(paint, point.slot)
    cells = pattern(point.u, point.v, footprint, point.slot, grain, numbers[6:])
    shade = 1 - 0.45 * cells.joint
    red, green, blue = ((numbers[i] + (numbers[i + 3] - numbers[i]) * cells.mix) * shade for i in range(3))
    return red, green, blue


def _light(ray: Ray, point: Point, solids: list[list[Tensor]], heavens: list[Tensor], sun: Vector) -> Vector:
    """Light that falls on each point: of the sun unless something stands between, and of the sky."""
    distance = torch.where(point.sky, 1.0, point.distance)
    hit: Vector = tuple(o + distance * d for o, d in zip(ray.origin, ray.direction, strict=True))  # type: ignore[assignment]
    ox, oy, oz = (p + 3e-3 * n for p, n in zip(hit, point.normal, strict=True))
    towards = Ray((ox, oy, oz), sun)
    shadow = torch.zeros_like(point.sky)
    for near, far in _spans(towards, solids):
        shadow = shadow | ((near < far) & (far > NEAR))
    direct = _dot(point.normal, sun).clamp(min=0) * torch.where(shadow, 0.0, 1.0)
    contact = torch.where(point.slot == GROUND, 1.0, 1 - 0.35 * (hit[1] * 8).clamp(max=0).exp())
    ambient = (0.75 - 0.25 * point.normal[1]) * contact
    red, green, blue = (heavens[6 + i] * direct + heavens[9 + i] * ambient for i in range(3))
    return red, green, blue


def _backdrop(
    direction: Vector, heavens: list[Tensor], sun: Vector, bearing: Tensor, grain: Tensor, focal: Tensor
) -> Vector:
    """Sky with sun, clouds and a ring of hills."""
    up = -direction[1]
    rise = up.clamp(0, 1).sqrt()
    aside = _dot(direction, sun) - 1
    glare = 0.35 * (24 * aside).exp() + 1.5 * (900 * aside).exp()
    cloud = ((grain + 0.08) * 1.8).clamp(0, 0.6) * heavens[23] * (up * 4).clamp(0, 1)
    hill, slope = _hills(bearing * (0.5 / math.pi), heavens)
    ridge = ((hill - up) * focal + 0.5).clamp(0, 1)
    mist = (up / hill).clamp(0, 1) * 0.8 * slope
    colours = []
    for i in range(3):
        zenith, horizon, light, mound = heavens[i], heavens[3 + i], heavens[6 + i], heavens[12 + i]
        heaven = horizon + (zenith - horizon) * rise
        heaven = heaven + (horizon * 0.7 + 0.3 * light - heaven) * cloud + light * glare
        colours.append(heaven + (horizon + (mound - horizon) * mist - heaven) * ridge)
    return colours[0], colours[1], colours[2]


def _hills(bearing: Tensor, heavens: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Height of the hills' ridge at a bearing in turns, as a sine, and how dark their slope is there."""
    height, detail, first, second = heavens[18:22]
    a, b = bearing * 5 + first, bearing * 14 + second
    a, b = a - a.floor() - 0.5, b - b.floor() - 0.5
    ridge = height * (1 - 2 * a.abs()) + detail * (1 - 2 * b.abs()) + 0.01
    steep = torch.where(a > 0, 0.12, -0.12) + torch.where(b > 0, 0.08, -0.08)
    return ridge, 1 + steep


def _hazy(backdrop: Vector, heavens: list[Tensor], sky: Tensor) -> Vector:
    """What shines through haze: the backdrop itself where there is nothing else, elsewhere the horizon's colour."""
    red, green, blue = (torch.where(sky, backdrop[i], heavens[3 + i]) for i in range(3))
    return red, green, blue
