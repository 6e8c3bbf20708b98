"""What the TTT-linear operator reads, checked."""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.backend import MAX_DIM, OCTET
from longtake.kernels.checks import FLOATS, FP32, require, require_tensor, require_tokens

MIN_CHUNK = 16
LENGTHS = (torch.int64, torch.int32)
LEAST_EPS = torch.finfo(torch.float32).tiny
"""Less may be nothing in fp32, and a padded row has no variance."""


class TttInputs(NamedTuple):
    """Arguments of `ttt_linear`: eta is [B,T,H], scale is given, and both states are or neither is."""

    q: Tensor
    k: Tensor
    v: Tensor
    w: Tensor
    b: Tensor
    eta: Tensor
    initial_state: Tensor | None
    initial_state_bias: Tensor | None
    cu_seqlens: Tensor | None
    scale: float
    eps: float
    chunk_size: int

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """All that may want a gradient."""
        return self.q, self.k, self.v, self.w, self.b, self.eta, self.initial_state, self.initial_state_bias

    @property
    def sequences(self) -> int:
        """How many states there are."""
        return self.q.shape[0] if self.cu_seqlens is None else self.cu_seqlens.shape[0] - 1


def rates(eta: Tensor | float, q: Tensor) -> Tensor:
    """A learning rate for each token, [B,T,H]; of one rate an expanded view.

    Raises:
        ValueError: eta is neither a number nor a float tensor [], [B,T,H] or [B,T,H,1].
    """
    if not isinstance(eta, Tensor):
        if not isinstance(eta, int | float):
            raise ValueError(f"eta must be a number or a tensor, got {type(eta).__name__}")
        return torch.full((), eta, dtype=torch.float32, device=q.device).expand(q.shape[:3])
    require("eta", eta, eta.shape, FLOATS, like=q, contiguous=False)
    if eta.ndim == 4 and eta.shape[3] == 1:
        eta = eta.squeeze(3)
    if eta.ndim and eta.shape != q.shape[:3]:
        raise ValueError(f"eta must be a number, (), {(*q.shape[:3],)} or {(*q.shape[:3], 1)}, got {tuple(eta.shape)}")
    return eta.expand(q.shape[:3])


def check_inputs(x: TttInputs) -> None:
    """Raise `ValueError` unless every argument is as `ttt_linear` takes it; eta has been checked by `rates`."""
    _check_tokens(x)
    _check_numbers(x)
    _check_lengths(x)
    _check_states(x)


def _check_tokens(x: TttInputs) -> None:
    heads, dim = x.q.shape[2:]
    if dim % OCTET or dim > MAX_DIM:
        raise ValueError(f"the head dim of q must be a multiple of {OCTET} up to {MAX_DIM}, got {dim}")
    for name, tokens in (("q", x.q), ("k", x.k), ("v", x.v)):
        require_tokens(name, tokens, x.q)
        require(name, tokens, x.q.shape, (x.q.dtype,), contiguous=False)
    for name, weight in (("w", x.w), ("b", x.b)):
        require(name, weight, (heads, dim), FLOATS, like=x.q)


def _check_numbers(x: TttInputs) -> None:
    for name, number in (("scale", x.scale), ("eps", x.eps)):
        if not 0 < number < math.inf:
            raise ValueError(f"{name} must be finite and positive, got {number}")
    if x.eps < LEAST_EPS:
        raise ValueError(f"eps must be {LEAST_EPS:.3g} at least, got {x.eps}")
    size = x.chunk_size
    if not isinstance(size, int) or size < MIN_CHUNK or size & (size - 1):
        raise ValueError(f"chunk_size must be a power of two, {MIN_CHUNK} at least, got {size}")


def _check_lengths(x: TttInputs) -> None:
    if x.cu_seqlens is None:
        return
    require_tensor("cu_seqlens", x.cu_seqlens)
    if x.cu_seqlens.ndim != 1 or x.cu_seqlens.shape[0] < 2:
        raise ValueError(f"cu_seqlens must be [sequences + 1], got {tuple(x.cu_seqlens.shape)}")
    require("cu_seqlens", x.cu_seqlens, x.cu_seqlens.shape, LENGTHS, like=x.q)
    if x.q.shape[0] != 1:
        raise ValueError(f"cu_seqlens needs a batch of 1, got q {tuple(x.q.shape)}")


def _check_states(x: TttInputs) -> None:
    if (x.initial_state is None) != (x.initial_state_bias is None):
        raise ValueError("initial_state and initial_state_bias come together")
    if x.initial_state is None or x.initial_state_bias is None:
        return
    heads, dim = x.q.shape[2:]
    require("initial_state", x.initial_state, (x.sequences, heads, dim, dim), FP32, like=x.q)
    require("initial_state_bias", x.initial_state_bias, (x.sequences, heads, 1, dim), FP32, like=x.q)
