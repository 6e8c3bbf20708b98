"""Triton kernel of the ray matrices; `geometry` says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.cam.geometry import ENTRIES

BLOCK = 128
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _four(numbers: tl.tensor) -> tl.tuple:
    """Four numbers of the frame of every token, in fp32."""
    return (
        tl.load(numbers).to(tl.float32),
        tl.load(numbers + 1).to(tl.float32),
        tl.load(numbers + 2).to(tl.float32),
        tl.load(numbers + 3).to(tl.float32),
    )


@triton.jit
def _unit(x: tl.tensor, y: tl.tensor, z: tl.tensor) -> tl.tuple:
    length = tl.sqrt_rn(x * x + y * y + z * z)
    return tl.div_rn(x, length), tl.div_rn(y, length), tl.div_rn(z, length)


@triton.jit
def _cross(a: tl.tuple, b: tl.tuple) -> tl.tuple:
    return a[1] * b[2] - a[2] * b[1], a[2] * b[0] - a[0] * b[2], a[0] * b[1] - a[1] * b[0]


@triton.jit
def _store_row(
    matrix: tl.tensor, row: tl.tuple, last: tl.tensor, finite: tl.tensor, inside: tl.tensor, ROW: tl.constexpr
) -> None:
    """Row ROW of the matrix of every token, or of the identity where the ray has no finite frame."""
    entries = tl.reshape(tl.join(tl.join(row[0], row[2]), tl.join(row[1], last)), (last.shape[0], 4))
    col = tl.arange(0, 4)[None, :]
    entries = tl.where(finite[:, None], entries, tl.where(col == ROW, 1.0, 0.0))
    tl.store(matrix[:, None] + (4 * ROW + col), entries, inside[:, None])


@triton.jit(do_not_specialize=["count", "height", "width", "patch"], do_not_specialize_on_alignment=["raymap"])
def _rays_kernel(
    raymap: tl.tensor,
    projection: tl.tensor,
    inverse: tl.tensor,
    count: int,
    height: int,
    width: int,
    patch: int,
    BLOCK: tl.constexpr,
    ENTRIES: tl.constexpr,
) -> None:
    """BLOCK tokens, each with the numbers of its frame; beyond the last token its numbers again."""
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = token < count
    token = tl.minimum(token, count - 1)
    numbers = raymap + token // width // height * ENTRIES
    r00, r01, r02, t0 = _four(numbers)
    r10, r11, r12, t1 = _four(numbers + 4)
    r20, r21, r22, t2 = _four(numbers + 8)
    fx, fy, cx, cy = _four(numbers + 16)
    u = tl.div_rn((token % width * patch).to(tl.float32) - cx, fx)
    v = tl.div_rn((token // width % height * patch).to(tl.float32) - cy, fy)
    z = _unit(r00 * u + r01 * v + r02, r10 * u + r11 * v + r12, r20 * u + r21 * v + r22)
    side = _cross((r01, r11, r21), z)
    x = _unit(side[0], side[1], side[2])
    down = _cross(z, x)
    y = _unit(down[0], down[1], down[2])
    px = -(x[0] * t0 + x[1] * t1 + x[2] * t2)
    py = -(y[0] * t0 + y[1] * t1 + y[2] * t2)
    pz = -(z[0] * t0 + z[1] * t1 + z[2] * t2)
    total = x[0] + x[1] + x[2] + y[0] + y[1] + y[2] + z[0] + z[1] + z[2]  # of units: finite if each is
    finite = (tl.abs(total) < INFINITY) & (tl.abs(px) < INFINITY) & (tl.abs(py) < INFINITY) & (tl.abs(pz) < INFINITY)
    zero = tl.zeros((BLOCK,), tl.float32)
    projection += token * 16
    _store_row(projection, x, px, finite, inside, 0)
    _store_row(projection, y, py, finite, inside, 1)
    _store_row(projection, z, pz, finite, inside, 2)
    _store_row(projection, (zero, zero, zero), zero + 1.0, finite, inside, 3)
    inverse += token * 16
    _store_row(inverse, (x[0], y[0], z[0]), t0, finite, inside, 0)
    _store_row(inverse, (x[1], y[1], z[1]), t1, finite, inside, 1)
    _store_row(inverse, (x[2], y[2], z[2]), t2, finite, inside, 2)
    _store_row(inverse, (zero, zero, zero), zero + 1.0, finite, inside, 3)


@torch.library.custom_op("longtake::ray_matrices", mutates_args=())
def ray_matrices(raymap: Tensor, height: int, width: int, patch: int) -> tuple[Tensor, Tensor]:
    """Checked inputs → P and P⁻¹, in fp32."""
    projection, inverse = _empty(raymap, height, width)
    count = projection.numel() // 16
    with on_device_of(raymap):
        _rays_kernel[(triton.cdiv(count, BLOCK),)](
            raymap,
            projection,
            inverse,
            count,
            height,
            width,
            patch,
            BLOCK=BLOCK,
            ENTRIES=ENTRIES,
            num_warps=4,
            enable_fp_fusion=False,  # equal products of a cross product cancel
        )
    return projection, inverse


@ray_matrices.register_fake
def _(raymap: Tensor, height: int, width: int, patch: int) -> tuple[Tensor, Tensor]:
    return _empty(raymap, height, width)


def _empty(raymap: Tensor, height: int, width: int) -> tuple[Tensor, Tensor]:
    shape = (raymap.shape[0], raymap.shape[1] * height * width, 4, 4)
    projection = torch.empty(shape, dtype=torch.float32, device=raymap.device)
    return projection, torch.empty_like(projection)
