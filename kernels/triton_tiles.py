"""Parts that the Triton kernels share, and the form in which tensors are handed to them.

One compiled kernel must serve every cut of a take, or the cut would change bits: sizes are never specialised, and
tensors come with aligned rows, so that no layout, and with it no order of a sum, depends on where a slice starts.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import MAX_DIM, OCTET, OPERAND_DTYPES

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
ALIGNMENT = 16
TRITON_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


@triton.jit
def round_to(x: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """fp32 tile → DTYPE, to nearest even.

    The interpreter truncates to bf16 and can not multiply it: there the rounded values stay in fp32.
    """
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
        return bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def to_operand(x: tl.tensor, OPERAND: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """fp32 tile → as it goes into a product, rounded to nearest even; in tf32 too, where hardware would only cut."""
    operand = round_to(x, OPERAND)
    if PRECISION == "tf32":
        bits = x.to(tl.uint32, bitcast=True)
        bits = (bits + 0xFFF + ((bits >> 13) & 1)) & 0xFFFFE000
        operand = tl.where(x == x, bits.to(tl.float32, bitcast=True), x)
    return operand


@triton.jit
def as_operand(x: tl.tensor, OPERAND: tl.constexpr, PRECISION: tl.constexpr) -> tl.tensor:
    """A tile itself if it goes into a product as it is, else rounded."""
    if INTERPRETED or x.dtype != OPERAND or PRECISION == "tf32":
        x = to_operand(x.to(tl.float32), OPERAND, PRECISION)
    return x


@triton.jit
def square_root(x: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """√x in fp32; with 16-bit operands to a rounding or two, which needs no branch."""
    return tl.sqrt_rn(x) if tl.float32 == OPERAND else tl.sqrt(x)


@triton.jit
def quotient(x: tl.tensor, y: tl.tensor, OPERAND: tl.constexpr) -> tl.tensor:
    """x/y in fp32; with 16-bit operands to a rounding or two, which needs no branch."""
    return tl.div_rn(x, y) if tl.float32 == OPERAND else x / y


@triton.jit
def times_sigmoid(y: tl.tensor, x: tl.tensor) -> tl.tensor:
    """Of y: y / (1 + e^−x) in fp32, without an overflow on the way; NaN stays."""
    t = tl.exp(-tl.abs(x))
    return tl.div_rn(y * tl.where(x < 0, t, 1.0), 1.0 + t)


@triton.jit
def add_both(x: tl.tensor, y: tl.tensor, more_x: tl.tensor, more_y: tl.tensor) -> tl.tuple:
    """Of two sums over a tile at once, which then take as many barriers as one."""
    return x + more_x, y + more_y


@triton.jit
def store_square(out: tl.tensor, block: tl.tensor, D: tl.constexpr) -> None:
    """A tile to [D,D]."""
    row = tl.arange(0, block.shape[0])
    inside = (row < D)[:, None] & (row < D)[None, :]
    tl.store(out + row[:, None] * D + row[None, :], block, inside)


@triton.jit
def rotate_pairs(x: tl.tensor, cos: tl.tensor, sin: tl.tensor) -> tl.tensor:
    """Rotate neighbouring pairs of x [R,W] by cos, sin [R,W/2]."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


def aligned(x: Tensor) -> Tensor:
    """[B,N,H,D] itself, or a contiguous copy unless rows are dense and each begins at a multiple of 8 elements."""
    octets = all(size == 1 or stride % OCTET == 0 for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True))
    if x.stride(-1) == 1 and octets and x.data_ptr() % ALIGNMENT == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


def octet_strides(x: Tensor) -> tuple[int, int, int]:
    """Strides of batch, token and head of an aligned tensor, in units of 8 elements."""
    batch, token, head, _ = x.stride()
    return batch // OCTET, token // OCTET, head // OCTET


def dense(x: Tensor) -> Tensor:
    """In fp32, contiguous and aligned; a copy where it is not."""
    x = x.float().contiguous()
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def padded(size: int) -> int:
    """The power of two, 16 at least, that holds `size` entries: the extent of a tile's side."""
    return max(16, 1 << (size - 1).bit_length())


def check_operands(*tensors: Tensor) -> None:
    """Raise `ValueError` unless every [B,N,H,D] tensor has D ≤ 128, a multiple of 8, in fp32, bf16 or fp16."""
    for x in tensors:
        if x.shape[-1] % OCTET or not 0 < x.shape[-1] <= MAX_DIM:
            raise ValueError(f"the head dim must be a multiple of {OCTET} up to {MAX_DIM}, got {x.shape[-1]}")
        if x.dtype not in OPERAND_DTYPES:
            raise ValueError(f"the triton kernels take {OPERAND_DTYPES}, got {x.dtype}")
