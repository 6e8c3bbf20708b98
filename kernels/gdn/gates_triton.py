"""Triton kernel of the gates of the gated delta rule; `gates` says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.triton_tiles import padded, times_sigmoid

TOKENS = 32
"""Tokens of a program."""


@triton.jit
def _decay(logit: tl.tensor, a_log: tl.tensor, bias: tl.tensor) -> tl.tensor:
    """exp(−exp(a_log)·softplus(logit + bias)).

    In float64: an error of a decay grows with every frame, and there are few of them.
    """
    x = logit.to(tl.float64) + bias.to(tl.float64)
    softplus = tl.where(x > 20.0, x, tl.log(1.0 + tl.exp(tl.minimum(x, 20.0, propagate_nan=tl.PropagateNan.ALL))))
    return tl.exp(-tl.exp(a_log.to(tl.float64)) * softplus).to(tl.float32)


@triton.jit(do_not_specialize=["heads", "frames", "per_frame"])
def _kernel(
    beta_logits: tl.tensor,
    decay_logits: tl.tensor,
    a_log: tl.tensor,
    dt_bias: tl.tensor,
    beta: tl.tensor,
    decay: tl.tensor,
    heads: int,
    frames: int,
    per_frame: int,
    TOKENS: tl.constexpr,
    BLOCK_H: tl.constexpr,
) -> None:
    """Some tokens of one frame, all heads; the first program of a frame also writes its decay."""
    frame = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * TOKENS + tl.arange(0, TOKENS)
    head = tl.arange(0, BLOCK_H)
    there = head < heads
    inside = (token < per_frame)[:, None] & there[None, :]
    place = (frame // frames * heads + head) * frames + frame % frames

    logit = tl.load(beta_logits + (frame * per_frame + token)[:, None] * heads + head[None, :], inside, 0.0)
    tl.store(beta + place[None, :] * per_frame + token[:, None], times_sigmoid(1.0, logit.to(tl.float32)), inside)

    if tl.program_id(1) == 0:
        gate = tl.load(decay_logits + frame * heads + head, there, 0.0)
        a, bias = tl.load(a_log + head, there, 0.0), tl.load(dt_bias + head, there, 0.0)
        tl.store(decay + place, _decay(gate, a, bias), there)


@torch.library.custom_op("longtake::frame_gates", mutates_args=())
def frame_gates(beta_logits: Tensor, decay_logits: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """As `gates.frame_gates_reference`; arguments contiguous, in fp32, bf16 or fp16, results in fp32."""
    batch, frames, per_frame, heads = beta_logits.shape
    beta = beta_logits.new_empty((batch, heads, frames, per_frame), dtype=torch.float32)
    decay = beta.new_empty((batch, heads, frames))
    grid = (batch * frames, triton.cdiv(per_frame, TOKENS))
    arguments = beta_logits, decay_logits, a_log, dt_bias, beta, decay
    with on_device_of(beta_logits):
        _kernel[grid](*arguments, heads, frames, per_frame, TOKENS=TOKENS, BLOCK_H=padded(heads), num_warps=4)
    return beta, decay


@frame_gates.register_fake
def _(beta_logits: Tensor, decay_logits: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    batch, frames, per_frame, heads = beta_logits.shape
    beta = beta_logits.new_empty((batch, heads, frames, per_frame), dtype=torch.float32)
    return beta, beta.new_empty((batch, heads, frames))
