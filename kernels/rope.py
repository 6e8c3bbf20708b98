"""Interleaved rotary embedding."""

import torch
from torch import Tensor

from longtake.kernels.checks import require


def pair_tables(cos: Tensor | None, sin: Tensor | None, q: Tensor, width: int) -> tuple[Tensor, Tensor] | None:
    """Tables of the last `width` entries of each head of q [B,N,H,D], as [1,N,width/2] or [B,N,width/2].

    Args:
        cos, sin: fp32 [N,width/2], or [N,width] whose every second entry counts, or either with a batch in front; not
            changed. Both None: no rotation, and the result is None.

    Raises:
        ValueError: only one of the two is given, or a table does not fit.
    """
    if cos is None and sin is None:
        return None
    if cos is None or sin is None:
        raise ValueError("cos and sin come together")
    batch = max(cos.shape[0] if cos.ndim == 3 else 1, sin.shape[0] if sin.ndim == 3 else 1)
    tables = _pairs("cos", cos, q, width), _pairs("sin", sin, q, width)
    return tables[0].expand(batch, -1, -1), tables[1].expand(batch, -1, -1)


def _pairs(name: str, table: Tensor, q: Tensor, width: int) -> Tensor:
    batch, tokens = q.shape[:2]
    entries = width if table.ndim and table.shape[-1] == width else width // 2
    shape = (batch, tokens, entries) if table.ndim == 3 and table.shape[0] != 1 else (1, tokens, entries)
    require(name, table, shape[-table.ndim :] if table.ndim == 2 else shape, like=q)
    pairs = table if entries == width // 2 else table[..., 1::2]
    return pairs if pairs.ndim == 3 else pairs.unsqueeze(0)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs: y[2i] = x[2i]·cos − x[2i+1]·sin, y[2i+1] = x[2i]·sin + x[2i+1]·cos.

    Args:
        x: [B,N,H,E], E even; not changed.
        cos, sin: [N,E/2], [1,N,E/2] or [B,N,E/2], shared by the heads. Pass −sin to rotate back.

    Returns:
        [B,N,H,E] in the dtype of `x`; the products are taken in `x.dtype`.
    """
    cos, sin = cos.to(x.dtype).unsqueeze(-2), sin.to(x.dtype).unsqueeze(-2)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
