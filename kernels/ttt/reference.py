"""Plain PyTorch reference of TTT-linear (Sun et al. 2024, arXiv 2407.04620), chunk by chunk."""

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import layer_norm

from longtake.kernels.delta import accumulation_dtype
from longtake.kernels.ttt.inputs import TttInputs


class TttOutput(NamedTuple):
    """`out` [B,T,H,V] in the dtype of v; `state` [N,H,K,V] and `bias` [N,H,1,V] after the last token, fp32."""

    out: Tensor
    state: Tensor
    bias: Tensor


class Tokens(NamedTuple):
    """Some tokens, heads first: q, k, v [B,H,T,D], q scaled, and eta [B,H,T,1]."""

    q: Tensor
    k: Tensor
    v: Tensor
    eta: Tensor

    def between(self, first: int, last: int) -> "Tokens":
        """Those from `first` up to `last`."""
        return Tokens(*(x[:, :, first:last] for x in self))


class Norm(NamedTuple):
    """The layer norm of the inner model: w, b [H,1,V]."""

    w: Tensor
    b: Tensor
    eps: float


def inner_gradient(z: Tensor, target: Tensor, norm: Norm) -> Tensor:
    """∂/∂z of ½·‖LN(z) − target‖², all [B,H,C,V]."""
    centred = z - z.mean(-1, keepdim=True)
    inverse = torch.rsqrt(centred.square().mean(-1, keepdim=True) + norm.eps)
    normal = centred * inverse
    g = (norm.w * normal + norm.b - target) * norm.w
    return inverse * (g - g.mean(-1, keepdim=True) - normal * (g * normal).mean(-1, keepdim=True))


def learn(x: Tokens, norm: Norm, state: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs [B,H,C,V] of one chunk, and the states after it: one step of gradient descent for all of its tokens."""
    step = inner_gradient(x.k @ state + bias, x.v - x.k, norm)
    seen = (x.q @ x.k.mT + 1).tril()
    out = x.q @ state + bias - x.eta * (seen @ step)
    rate = x.eta[:, :, -1:]
    return out, state - rate * (x.k.mT @ step), bias - rate * step.sum(-2, keepdim=True)


def _sequence(x: Tokens, norm: Norm, state: Tensor, bias: Tensor, chunk_size: int) -> tuple[Tensor, Tensor, Tensor]:
    outs = [x.v[:, :, :0]]
    for first in range(0, x.q.shape[2], chunk_size):
        out, state, bias = learn(x.between(first, first + chunk_size), norm, state, bias)
        outs.append(out)
    return torch.cat(outs, dim=2), state, bias


def _spans(cu_seqlens: Tensor | None, tokens: int) -> list[tuple[slice, int, int]]:
    """Which states go with the tokens from where to where."""
    if cu_seqlens is None:
        return [(slice(None), 0, tokens)]
    bounds: list[int] = cu_seqlens.tolist()
    if bounds != sorted(bounds) or bounds[0] != 0 or bounds[-1] != tokens:
        raise ValueError(f"cu_seqlens must rise from 0 to {tokens}, got {bounds}")
    return [(slice(n, n + 1), first, last) for n, (first, last) in enumerate(pairwise(bounds))]


def ttt_scan(x: TttInputs) -> TttOutput:
    """The specification of the kernels: `ttt_linear` without its output norm. Mutates nothing, reads `cu_seqlens`."""
    dtype = accumulation_dtype(x.q)
    _, _, heads, dim = x.q.shape
    q, k, v, eta = (y.to(dtype).transpose(1, 2) for y in (x.q, x.k, x.v, x.eta[..., None]))
    norm = Norm(x.w.to(dtype)[:, None], x.b.to(dtype)[:, None], x.eps)
    state, bias = x.initial_state, x.initial_state_bias
    state = q.new_zeros(x.sequences, heads, dim, dim) if state is None else state.to(dtype)
    bias = q.new_zeros(x.sequences, heads, 1, dim) if bias is None else bias.to(dtype)
    with torch.autocast(x.q.device.type, enabled=False):
        tokens = Tokens(q * x.scale, k, v, eta)
        parts = [
            _sequence(tokens.between(first, last), norm, state[n], bias[n], x.chunk_size)
            for n, first, last in _spans(x.cu_seqlens, q.shape[2])
        ]
    outs, states, biases = zip(*parts, strict=True)
    out = torch.cat(outs, dim=2).transpose(1, 2).to(x.v.dtype).contiguous()
    return TttOutput(out, torch.cat(states), torch.cat(biases))


def output_norm(out: Tensor, w: Tensor, b: Tensor, eps: float) -> Tensor:
    """Out + LN(out), out of place: the layer norm of every head, [B,T,H,V], with its weights [H,V].

    In fp32 (float64 for float64), rounded once to the dtype of `out`.
    """
    wide = out.to(accumulation_dtype(out))
    with torch.autocast(out.device.type, enabled=False):
        normal = layer_norm(wide, out.shape[-1:], eps=eps)
        return (wide + normal * w.to(wide.dtype) + b.to(wide.dtype)).to(out.dtype)
