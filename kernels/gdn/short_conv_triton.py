"""Triton kernel of the short convolution; `short_conv` says what it computes."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.backend import OCTET, on_device_of
from longtake.kernels.triton_tiles import aligned, round_to

BLOCK = 128
"""Octets of channels of a program, one a thread for 16-bit x."""


@triton.jit
def _append(items: tl.tuple, x: tl.tensor) -> tl.tuple:
    return items + (x,)  # noqa: RUF005  Triton knows no starred expression


@triton.jit
def _load_taps(
    weight: tl.tensor, octet: tl.tensor, inside: tl.tensor, K: tl.constexpr, BLOCK_K: tl.constexpr
) -> tl.tuple:
    """K taps of every channel, [BLOCK,8] each, in fp32; read as rows, because a tap alone is strided."""
    tap = tl.arange(0, BLOCK_K)[None, None, :]
    channel = octet[:, None] * 8 + tl.arange(0, 8)[None, :]
    rows = tl.load(weight + channel[:, :, None] * K + tap, inside[:, :, None] & (tap < K), 0.0).to(tl.float32)
    taps: tl.tuple = ()
    for j in tl.static_range(K):
        taps = _append(taps, tl.sum(tl.where(tap == j, rows, 0.0), axis=2))
    return taps


@triton.jit(do_not_specialize=["frames", "tokens", "octets", "x_batch", "x_frame", "x_token"])
def _kernel(
    x: tl.tensor,
    weight: tl.tensor,
    tail: tl.tensor,
    y: tl.tensor,
    next_tail: tl.tensor,
    frames: int,
    tokens: int,
    octets: int,
    x_batch: int,
    x_frame: int,
    x_token: int,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """All frames of some octets of channels: a window of 2K − 1 frames goes over them; strides in octets."""
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    batch = tl.program_id(1).to(tl.int64)
    token, octet = (place // octets).to(tl.int64), place % octets
    inside = (token < tokens)[:, None]
    lane = tl.arange(0, 8)[None, :]
    frame_size = tl.cast(tokens, tl.int64) * octets * 8
    x += (batch * x_batch + token * x_token + octet)[:, None] * 8 + lane
    x_step = tl.cast(x_frame, tl.int64) * 8
    dense = place.to(tl.int64)[:, None] * 8 + lane
    y += batch * frames * frame_size + dense
    next_tail += batch * (K - 1) * frame_size + dense
    taps = _load_taps(weight, octet, inside, K, BLOCK_K)

    window: tl.tuple = ()
    for i in tl.static_range(K - 1):
        if tail is None:
            window = _append(window, tl.zeros((BLOCK, 8), tl.float32))
        else:
            past = tl.load(tail + (batch * (K - 1) + i) * frame_size + dense, inside, 0.0)
            window = _append(window, past.to(tl.float32))
    for i in tl.static_range(K - 1):
        window = _append(window, tl.load(x + i * x_step, inside & (i < frames), 0.0).to(tl.float32))
    t = 0
    while t < frames:
        newest = tl.load(x + (t + K - 1) * x_step, inside & (t + K - 1 < frames), 0.0)
        window = _append(window, newest.to(tl.float32))
        total = taps[K - 1] * window[K - 1]
        for j in tl.static_range(K - 1):
            total += taps[j] * (window[j] + window[2 * K - 2 - j])
        tl.store(y + t * frame_size, round_to(total, y.dtype.element_ty), inside)
        window = window[1:]
        t += 1
    for i in tl.static_range(K - 1):
        tl.store(next_tail + i * frame_size, round_to(window[i], y.dtype.element_ty), inside)


@torch.library.custom_op("longtake::short_conv", mutates_args=())
def short_conv(x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    """As `short_conv.short_conv_reference`; x and tail in fp32, bf16 or fp16."""
    batch, frames, tokens, channels = x.shape
    taps = weight.shape[1]
    if channels % OCTET:
        raise ValueError(f"x must have a multiple of {OCTET} channels, got {channels}")
    x = aligned(x)
    y = x.new_empty((batch, frames, tokens, channels))
    next_tail = x.new_empty((batch, taps - 1, tokens, channels))
    octets = channels // OCTET
    strides = [stride // OCTET for stride in x.stride()[:3]]
    grid = (triton.cdiv(tokens * octets, BLOCK), batch)
    arguments = x, weight, tail, y, next_tail, frames, tokens, octets, *strides
    with on_device_of(x):
        _kernel[grid](*arguments, K=taps, BLOCK=BLOCK, BLOCK_K=triton.next_power_of_2(taps), num_warps=4)
    return y, next_tail


@short_conv.register_fake
def _(x: Tensor, weight: Tensor, tail: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, _, tokens, channels = x.shape
    return x.new_empty(x.shape), x.new_empty((batch, weight.shape[1] - 1, tokens, channels))
