"""The backward pass of one scan."""

from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.scan.backward.activation import raw_gradients
from longtake.kernels.scan.backward.combine import Combined, combine
from longtake.kernels.scan.backward.keys import KeyGradients, key_gradients
from longtake.kernels.scan.backward.queries import query_gradients
from longtake.kernels.scan.backward.recall import recall
from longtake.kernels.scan.backward.receive import receive
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.launch import Saved
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


def _never_absorbed(scan: Scan, starts: Tensor | None) -> Tensor | None:
    """Frames that no memory absorbs: in a reverse scan the first of every chunk, [C] int64, else None."""
    if scan.direction != "reverse":
        return None
    first = scan.decay.new_zeros(1, dtype=torch.int64)
    return first if starts is None else torch.cat((first, starts.long()))


def _take_back(scan: Scan, frames: Tensor, combined: Combined, keys: KeyGradients) -> None:
    """Zero what came to frames that are never absorbed: a product with NaN, which they may hold, is NaN."""
    for x in (combined.decay, keys.beta):
        x.index_fill_(2, frames, 0)
    keys.v.view(-1, scan.frames, scan.tokens, *keys.v.shape[2:]).index_fill_(1, frames, 0)


def scan_gradients(
    scan: Scan,
    saved: Saved,
    upstream: Upstream,
    *,
    state: Memory | None,
    starts: Tensor | None,
) -> Gradients:
    """Gradients of a scan whose reads were not mapped back into ray frames; its RMS is computed inside."""
    placed, first = saved.placed, _never_absorbed(scan, starts)
    if first is not None:
        scan = scan._replace(decay=scan.decay.index_fill(2, first, 0))
    grad, denominator_grad, final_grad = upstream
    grad = grad.to(scan.configuration.operand)  # once, as products take it twice
    recalled = recall(
        scan,
        saved.transitions,
        receive(scan, placed, grad, denominator_grad),
        saved.snapshots,
        state=state,
        final_grad=final_grad,
        starts=starts,
    )
    combined = combine(scan, recalled, saved, state=state)
    queries = query_gradients(scan, saved, combined.read, grad, denominator_grad)
    keys = key_gradients(scan, saved, recalled, combined, state=state)
    if first is not None:
        _take_back(scan, first, combined, keys)
    # In doubles, as the batch may change the order in which PyTorch adds.
    beta = keys.beta.sum(-1, dtype=torch.float64) if scan.beta.ndim == 3 else keys.beta
    q, q_weight = raw_gradients(scan, 0, queries, placed)
    k, k_weight = raw_gradients(scan, 1, keys.k, placed, combined.growth, first)
    return Gradients(
        q,
        k,
        keys.v,
        beta.to(scan.beta.dtype),
        combined.decay.to(scan.decay.dtype),
        q_weight,
        k_weight,
        recalled.state,
    )
