"""Triton kernel of TTT-linear forward: a program walks through the chunks of one head of a sequence.

It only learns, since every step waits for the one before, and leaves the states; what tokens read of them comes after.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longtake.kernels.fitting import Fitted
from longtake.kernels.triton_tiles import (
    TRITON_TYPES,
    aligned,
    dense,
    octet_strides,
    padded,
    store_square,
    to_operand,
)
from longtake.kernels.ttt.inputs import TttInputs
from longtake.kernels.ttt.tiles import (
    inner_step,
    load_operand,
    load_rows,
    load_square,
    load_vector,
    product,
    span,
    store_vector,
)

SIZES = [
    "heads", "tokens", "q_batch", "q_token", "q_head", "k_batch", "k_token", "k_head", "v_batch", "v_token", "v_head",
    "eta_batch", "eta_token", "eta_head", "scale", "eps",
]  # fmt: skip


@triton.jit
def _last_rate(eta: tl.tensor, stop: tl.tensor, end: tl.tensor, stride: int) -> tl.tensor:
    """Rate of the last token before `stop`, or of the last of all; a sequence of none has any."""
    last = tl.minimum(stop, end) - 1
    return tl.load(eta + last * stride, last >= 0, 0.0).to(tl.float32)


@triton.jit(do_not_specialize=SIZES)
def _walk_kernel(
    k: tl.tensor,
    v: tl.tensor,
    eta: tl.tensor,
    w: tl.tensor,
    b: tl.tensor,
    initial_state: tl.tensor,
    initial_bias: tl.tensor,
    cu_seqlens: tl.tensor,
    last_state: tl.tensor,
    last_bias: tl.tensor,
    states: tl.tensor,
    biases: tl.tensor,
    heads: int,
    tokens: int,
    q_batch: int,
    q_token: int,
    q_head: int,
    k_batch: int,
    k_token: int,
    k_head: int,
    v_batch: int,
    v_token: int,
    v_head: int,
    eta_batch: int,
    eta_token: int,
    eta_head: int,
    scale: float,
    eps: float,
    D: tl.constexpr,
    SIDE: tl.constexpr,
    CHUNK: tl.constexpr,
    OPERAND: tl.constexpr,
) -> None:
    """The states before every chunk, as operands, and the last ones; strides of k and v in units of 8 entries.

    What the next step of descent waits for is loaded a chunk ahead.
    """
    memory = tl.program_id(0).to(tl.int64)
    sequence, head = memory // heads, memory % heads
    batch, token, end, slot = span(cu_seqlens, sequence, tokens, CHUNK)
    k += (batch * k_batch + head * k_head) * 8
    v += (batch * v_batch + head * v_head) * 8
    eta += batch * eta_batch + head * eta_head
    weight, offset = load_vector(w + head * D, D, SIDE), load_vector(b + head * D, D, SIDE)
    if initial_state is None:
        state, bias = tl.zeros((SIDE, SIDE), tl.float32), tl.zeros((SIDE,), tl.float32)
    else:
        state = load_square(initial_state + memory * D * D, D, SIDE, tl.float32)
        bias = load_vector(initial_bias + memory * D, D, SIDE)
    place = tl.arange(0, CHUNK)
    row = token + place
    key = load_operand(k, row, end, k_token, D, SIDE, OPERAND)
    value = load_rows(v, row, end, v_token, D, SIDE)
    rate = _last_rate(eta, token + CHUNK, end, eta_token)
    while token < end:
        row = token + place  # carried from chunk to chunk, it would change its layout through shared memory
        next_key = load_operand(k, row + CHUNK, end, k_token, D, SIDE, OPERAND)
        next_value = load_rows(v, row + CHUNK, end, v_token, D, SIDE)
        next_rate = _last_rate(eta, token + 2 * CHUNK, end, eta_token)
        model = to_operand(state, OPERAND, "ieee")
        step, _, _, _ = inner_step(key, value, model, bias, weight, offset, row < end, eps, D)
        store_square(states + (slot * heads + head) * D * D, model, D)
        store_vector(biases + (slot * heads + head) * D, bias, D)
        state -= rate * product(tl.trans(key), step, OPERAND)
        bias -= rate * tl.sum(step, axis=0)
        token += CHUNK
        slot += 1
        key, value, rate = next_key, next_value, next_rate
    store_square(last_state + memory * D * D, state, D)
    store_vector(last_bias + memory * D, bias, D)


class Operands(NamedTuple):
    """The arguments as the kernels take them: tokens aligned, weights and states dense in fp32."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor
    w: Tensor
    b: Tensor
    initial_state: Tensor | None
    initial_bias: Tensor | None
    cu_seqlens: Tensor | None
    sequences: int
    scale: float
    eps: float
    chunk: int

    @property
    def slots(self) -> int:
        """Places for the chunks of all sequences; some of a pack's may be left over."""
        batch, tokens = self.q.shape[:2]
        if self.cu_seqlens is None:
            return batch * -(-tokens // self.chunk)
        return tokens // self.chunk + self.sequences

    @property
    def sizes(self) -> tuple[float, ...]:
        """Values for `SIZES`."""
        strides = (*octet_strides(self.q), *octet_strides(self.k), *octet_strides(self.v), *self.eta.stride())
        return self.q.shape[2], self.q.shape[1], *strides, self.scale, self.eps

    @property
    def modes(self) -> dict[str, Any]:
        """What a kernel is compiled for; without fused products, of which the compiler chooses others in a pack."""
        dim = self.q.shape[3]
        modes = {"D": dim, "SIDE": padded(dim), "CHUNK": self.chunk, "OPERAND": TRITON_TYPES[self.q.dtype]}
        few = dim <= 64 and self.chunk <= 32
        warps = (4 if few else 8) * self.q.element_size() // 2  # products of fp32 take twice the registers
        return modes | {"num_warps": warps, "enable_fp_fusion": False}

    def states(self, count: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
        """Room for as many states in a dtype and biases in fp32, uninitialised."""
        heads, dim = self.q.shape[2:]
        state = self.q.new_empty((count, heads, dim, dim), dtype=dtype)
        return state, state.new_empty((count, heads, 1, dim), dtype=torch.float32)


def operands(x: TttInputs) -> Operands:
    """Copies where the kernels need them."""
    state, bias = (None if y is None else dense(y) for y in (x.initial_state, x.initial_state_bias))
    tokens = aligned(x.q), aligned(x.k), aligned(x.v), x.eta, dense(x.w), dense(x.b)
    return Operands(*tokens, state, bias, x.cu_seqlens, x.sequences, x.scale, x.eps, x.chunk_size)


class Walked(NamedTuple):
    """States before every chunk [slots,H,D,D], as operands, biases [slots,H,1,D], and the last ones in fp32."""

    states: Tensor
    biases: Tensor
    last_state: Tensor
    last_bias: Tensor


def walk(x: Operands) -> Walked:
    """All states of all sequences."""
    found = Walked(*x.states(x.slots, x.q.dtype), *x.states(x.sequences))
    last, before = found[2:], found[:2]
    Fitted(_walk_kernel, x.q.device)[(x.sequences * x.q.shape[2],)](*x[1:9], *last, *before, *x.sizes, **x.modes)
    return found
