"""Plain PyTorch reference of the inverse RMS of queries and keys."""

import torch
from torch import Tensor

from longtake.kernels.delta import accumulation_dtype


def inverse_rms(q: Tensor, k: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """1 / √(mean(x²) + eps) over all H*D entries of a token, for x = q and x = k.

    Args:
        q, k: [B,N,H,D]; not changed. eps: added to the mean square.

    Returns:
        One scale a token for q and one for k, [B,N] each, fp32 (float64 for float64 input).
    """
    squares = [x.to(accumulation_dtype(x)).square() for x in (q, k)]
    q_inverse, k_inverse = (torch.rsqrt(x.mean(dim=(-2, -1)) + eps) for x in squares)
    return q_inverse, k_inverse
