"""Triton kernel of the inverse RMS of queries and keys; the reference says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import OCTET, on_device_of
from longtake.kernels.triton_tiles import aligned, check_operands, octet_strides, padded

WARP_OCTETS = 128
"""Octets that a warp takes: 32 entries a thread."""


@triton.jit
def _load_heads(
    x: tl.tensor, first: tl.tensor, stride: int, heads: int, D: tl.constexpr, BLOCK: tl.constexpr
) -> tl.tensor:
    """All heads of one token as octets [BLOCK,8] in fp32, zero beyond them; its first octet and the stride of heads."""
    octet = tl.arange(0, BLOCK)
    head, part = (octet // (D // 8)).to(tl.int64), octet % (D // 8)
    at = first + head * stride + part
    return tl.load(x + at[:, None] * 8 + tl.arange(0, 8)[None, :], (head < heads)[:, None], 0.0).to(tl.float32)


@triton.jit
def _inverse(x: tl.tensor, width: tl.tensor, eps: tl.tensor) -> tl.tensor:
    mean = tl.div_rn(tl.sum(tl.sum(x * x, axis=1), axis=0), width)
    return tl.div_rn(1.0, tl.sqrt_rn(mean + eps))


@triton.jit(
    do_not_specialize=["heads", "tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "eps"]
)
def _kernel(
    q: tl.tensor,
    k: tl.tensor,
    q_inverse: tl.tensor,
    k_inverse: tl.tensor,
    heads: int,
    tokens: int,
    q_batch: int,
    q_token: int,
    q_head: int,
    k_batch: int,
    k_token: int,
    k_head: int,
    eps: float,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token of q and k; strides in units of 8 entries."""
    row = tl.program_id(0).to(tl.int64)
    batch, token = row // tokens, row % tokens
    x = _load_heads(q, batch * q_batch + token * q_token, q_head, heads, D, BLOCK)
    y = _load_heads(k, batch * k_batch + token * k_token, k_head, heads, D, BLOCK)
    width = heads * D * 1.0
    tl.store(q_inverse + row, _inverse(x, width, eps))
    tl.store(k_inverse + row, _inverse(y, width, eps))


@torch.library.custom_op("longtake::inverse_rms", mutates_args=())
def inverse_rms(q: Tensor, k: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """As `reference.inverse_rms`; q, k in fp32, bf16 or fp16, results in fp32."""
    check_operands(q, k)
    q, k = aligned(q), aligned(k)
    batch, tokens, heads, dim = q.shape
    q_inverse, k_inverse = (q.new_empty((batch, tokens), dtype=torch.float32) for _ in range(2))
    block = padded(heads * dim // OCTET)
    warps = min(max(block // WARP_OCTETS, 1), 16)
    strides = (*octet_strides(q), *octet_strides(k))
    with on_device_of(q):
        _kernel[(batch * tokens,)](
            q, k, q_inverse, k_inverse, heads, tokens, *strides, eps, D=dim, BLOCK=block, num_warps=warps
        )
    return q_inverse, k_inverse


@inverse_rms.register_fake
def _(q: Tensor, k: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    shape = q.shape[:2]
    return q.new_empty(shape, dtype=torch.float32), q.new_empty(shape, dtype=torch.float32)
