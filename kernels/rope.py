"""Interleaved rotary embedding."""

import torch
from torch import Tensor


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate neighbouring pairs: y[2i] = x[2i]·cos − x[2i+1]·sin, y[2i+1] = x[2i]·sin + x[2i+1]·cos.

    Args:
        x: [B,N,H,E], E even; not changed.
        cos, sin: [N,E/2], shared by batch and heads. Pass −sin to rotate back.

    Returns:
        [B,N,H,E] in the dtype of `x`; the products are taken in `x.dtype`.
    """
    cos, sin = cos.to(x.dtype)[:, None], sin.to(x.dtype)[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1).flatten(-2)
