"""Inputs of a scan as the Triton kernels take them, and the fixed tile sizes of those kernels.

The gated delta rule (recurrence as in `longtake.kernels.delta`) runs in three steps. Absorb: every frame becomes a
record of its own. Remember: the memory goes from frame to frame, both directions side by side. Read: q · memory, the
directions added before the product.
"""

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from longtake.kernels.triton_tiles import aligned, dense


class Tiles(NamedTuple):
    """Fixed tile sizes, warps and pipeline stages for one operand dtype; `precision` is that of P·(g·M)."""

    operand: tl.dtype
    precision: str
    absorb_rows: int
    absorb_warps: int
    absorb_stages: int
    value_columns: int
    read_rows: int
    read_depth: int
    read_warps: int


FP32 = Tiles(
    operand=tl.float32,
    precision="ieee",
    absorb_rows=16,
    absorb_warps=8,
    absorb_stages=2,
    value_columns=32,
    read_rows=32,
    read_depth=16,
    read_warps=4,
)
BF16 = Tiles(
    operand=tl.bfloat16,
    precision="tf32x3",
    absorb_rows=128,
    absorb_warps=8,
    absorb_stages=1,  # with more, Triton 3.6 refills the one buffer of k while an unfinished product still reads it
    value_columns=32,
    read_rows=64,
    read_depth=16,
    read_warps=4,
)
FP16 = BF16._replace(operand=tl.float16)
TILES = {torch.float32: FP32, torch.bfloat16: BF16, torch.float16: FP16}


class Scan(NamedTuple):
    """Checked inputs of a scan: q, k, v aligned; beta, decay, cos, sin dense fp32; no tables: no rotation."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    tables: tuple[Tensor, Tensor] | None
    normaliser: bool

    @property
    def memories(self) -> int:
        """B·H, each with a memory of its own."""
        return self.beta.shape[0] * self.beta.shape[1]

    @property
    def frames(self) -> int:
        return self.beta.shape[2]

    @property
    def kv_shape(self) -> tuple[int, ...]:
        """[B,H,D,D]."""
        return (*self.beta.shape[:2], self.q.shape[-1], self.q.shape[-1])

    @property
    def tiles(self) -> Tiles:
        """16-bit operands when q, k and v all have that dtype, else fp32."""
        same = self.q.dtype == self.k.dtype == self.v.dtype
        return TILES[self.q.dtype] if same else FP32

    @property
    def rotation(self) -> tuple[Tensor, Tensor]:
        """The tables, or stand-ins that no kernel reads."""
        return self.tables or (self.beta, self.beta)


def prepare(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    tables: tuple[Tensor, Tensor] | None,
    *,
    normaliser: bool,
) -> Scan:
    """Bring the inputs of a scan, checked for shapes, into the form that the kernels take."""
    dense_tables = None if tables is None else (dense(tables[0]), dense(tables[1]))
    return Scan(aligned(q), aligned(k), aligned(v), dense(beta), dense(decay), dense_tables, normaliser)
