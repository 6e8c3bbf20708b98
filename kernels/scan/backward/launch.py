"""The backward pass of one scan."""

from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.scan.backward.activation import Growth, RawGradients, activation_gradients
from longtake.kernels.scan.backward.combine import combine
from longtake.kernels.scan.backward.recall import recall
from longtake.kernels.scan.backward.receive import receive
from longtake.kernels.scan.backward.tokens import TokenGradients, token_gradients
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.launch import Saved
from longtake.kernels.scan.prepare import prepare
from longtake.kernels.scan.remember import Memory


class Upstream(NamedTuple):
    """Gradients of numerator [B,N,H,D], aligned, of any dtype, of denominator [B,N,H] and of the final state, fp32."""

    numerator: Tensor
    denominator: Tensor | None
    state: Memory | None


class Gradients(NamedTuple):
    """Gradients of the inputs of a scan, each in its dtype, of the state in fp32; None where there is none."""

    q: Tensor | None
    k: Tensor | None
    v: Tensor | None
    beta: Tensor
    decay: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    state: Memory | None


def scan_gradients(
    scan: Scan,
    saved: Saved,
    upstream: Upstream,
    *,
    state: Memory | None,
    starts: Tensor | None,
) -> Gradients:
    """Gradients of a scan whose reads were not mapped back into ray frames; its RMS is computed inside."""
    if scan.direction == "reverse":  # the first frames of chunks are never absorbed, whatever they hold
        first = scan.decay.new_zeros(1, dtype=torch.int64) if starts is None else starts.long()
        scan = scan._replace(decay=scan.decay.index_fill(2, first, 0))
    operands = prepare(scan, backward=True)
    damped = scan if operands.growth is None else scan._replace(beta=_damped(scan.beta, operands.growth))
    grad, denominator_grad, final_grad = upstream
    grad = grad.to(scan.configuration.operand)  # once, as products take it twice
    received = receive(scan, operands, grad, denominator_grad)
    recalled = recall(
        scan,
        saved.transitions,
        received,
        saved.snapshots,
        state=state,
        final_grad=final_grad,
        starts=starts,
    )
    combined = combine(scan, recalled, saved.transitions, saved.snapshots, state=state)
    found = token_gradients(damped, operands, recalled, combined, saved.snapshots, grad, denominator_grad, state=state)
    beta, growth = found.beta, None
    if operands.growth is not None and scan.positions is not None and scan.positions.matrices is not None:
        beta, growth_grad = _undamped(scan.beta, found.beta, operands.growth)
        growth = Growth(scan.positions.matrices[1], *scan.positions.tables, operands.growth, growth_grad)
    q, k = _raw(scan, found, growth)
    return Gradients(
        q.x,
        k.x,
        found.v,
        (beta.sum(-1) if scan.beta.ndim == 3 else beta).to(scan.beta.dtype),
        combined.decay.to(scan.decay.dtype),
        q.weight,
        k.weight,
        recalled.state,
    )


def _raw(scan: Scan, found: TokenGradients, growth: Growth | None) -> tuple[RawGradients, RawGradients]:
    """Gradients of raw q and k and of the weights of their norms."""
    activation, (q_weight, k_weight) = scan.activation, scan.activation.weights
    q = activation_gradients(scan.q, found.q, q_weight, activation, 1.0)
    return q, activation_gradients(scan.k, found.k, k_weight, activation, activation.k_scale, growth)


def _growth(beta: Tensor, growth: Tensor) -> Tensor:
    """Mean growth of every frame's keys [B,H,F,1]; growth [B,H,N]."""
    return growth.reshape(*beta.shape[:3], -1).mean(-1, keepdim=True)


def _damped(beta: Tensor, growth: Tensor) -> Tensor:
    """β of each token divided by max(1, mean growth of the frame), fp32 [B,H,F,S] or [B,H,F]."""
    mean = _growth(beta, growth).clamp(min=1)
    return beta.float() / (mean if beta.ndim == 4 else mean.squeeze(-1))


def _undamped(beta: Tensor, grad: Tensor, growth: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of β [B,H,F,S] and of the growth of each key [B,N,H], from those of the damped β [B,H,F,S]."""
    mean = _growth(beta, growth)
    floor = mean.clamp(min=1)
    whole = beta.float() if beta.ndim == 4 else beta.float()[..., None]
    mean_grad = -(grad * whole).sum(-1, keepdim=True) / floor.square()
    share = torch.where(mean >= 1, mean_grad / grad.shape[-1], 0.0).expand(grad.shape)
    return grad / floor, share.flatten(2).transpose(1, 2).contiguous()
