"""Triton kernel of the merges; `merge` says what they compute."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import OCTET, on_device_of
from longtake.kernels.triton_tiles import round_to, times_sigmoid

BLOCK = 128
"""Octets of a program, one a thread for 16-bit results."""


@triton.jit(do_not_specialize=["entries", "eps"])
def _kernel(
    first: tl.tensor,
    second: tl.tensor,
    denominator: tl.tensor,
    other_denominator: tl.tensor,
    gate: tl.tensor,
    out: tl.tensor,
    entries: int,
    eps: float,
    D: tl.constexpr,
    WHOLE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """(first + second) / (denominators + eps) · silu(gate) of some octets, without what is None.

    WHOLE: the entries are octets, so that one mask serves 16 bytes.
    """
    octet = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    entry = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
    row_inside = (octet * 8 < entries)[:, None]
    inside = row_inside if WHOLE else entry < entries
    value = tl.load(first + entry, inside, 0.0).to(tl.float32)
    if second is not None:
        value += tl.load(second + entry, inside, 0.0).to(tl.float32)
    if denominator is not None:
        head = octet[:, None] // (D // 8)
        total = tl.load(denominator + head, row_inside, 1.0)
        if other_denominator is not None:
            total += tl.load(other_denominator + head, row_inside, 0.0)
        value = tl.div_rn(value, total + eps)
    if gate is not None:
        g = tl.load(gate + entry, inside, 0.0).to(tl.float32)
        value *= times_sigmoid(g, g)
    tl.store(out + entry, round_to(value, out.dtype.element_ty), inside)


def _launch(
    first: Tensor,
    second: Tensor | None,
    denominators: tuple[Tensor | None, Tensor | None],
    gate: Tensor | None,
    out: Tensor,
    eps: float,
    dim: int,
) -> None:
    entries = first.numel()
    grid = (triton.cdiv(entries, OCTET * BLOCK),)
    arguments = first, second, *denominators, gate, out, entries, eps
    with on_device_of(first):
        _kernel[grid](*arguments, D=dim, WHOLE=entries % OCTET == 0, BLOCK=BLOCK, num_warps=4)


@torch.library.custom_op("longtake::gdn_merge", mutates_args=())
def gdn_merge(
    numerator: Tensor,
    denominator: Tensor,
    other_numerator: Tensor | None,
    other_denominator: Tensor | None,
    gate: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    """As `merge.gdn_merge_reference`, both directions flat."""
    if numerator.shape[-1] % OCTET:
        raise ValueError(f"the head dim must be a multiple of {OCTET}, got {numerator.shape[-1]}")
    out = numerator.new_empty(numerator.shape, dtype=dtype)
    _launch(numerator, other_numerator, (denominator, other_denominator), gate, out, eps, numerator.shape[-1])
    return out


@gdn_merge.register_fake
def _(
    numerator: Tensor,
    denominator: Tensor,
    other_numerator: Tensor | None,
    other_denominator: Tensor | None,
    gate: Tensor | None,
    eps: float,
    dtype: torch.dtype,
) -> Tensor:
    return numerator.new_empty(numerator.shape, dtype=dtype)


@torch.library.custom_op("longtake::gate_merge", mutates_args=())
def gate_merge(main: Tensor, camera: Tensor | None, gate: Tensor) -> Tensor:
    """As `merge.gate_merge_reference`."""
    out = main.new_empty(main.shape)
    _launch(main, camera, (None, None), gate, out, 0.0, OCTET)
    return out


@gate_merge.register_fake
def _(main: Tensor, camera: Tensor | None, gate: Tensor) -> Tensor:
    return main.new_empty(main.shape)
