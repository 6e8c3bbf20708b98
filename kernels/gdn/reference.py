"""Plain PyTorch reference of the frame-wise gated delta rule with a normaliser (SANA-WM, arXiv 2605.15178)."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from longtake.kernels.checks import FLOATS, WEIGHTS, check_memory, check_scan, require, require_eps, require_pair
from longtake.kernels.delta import (
    Direction,
    Frames,
    ReverseInputs,
    ScanInputs,
    accumulation_dtype,
    by_token,
    check_direction,
    check_states,
    delta_scan,
    frames_of,
    load_state,
    restart_mask,
    store_state,
)
from longtake.kernels.gdn.merge import gdn_merge_reference as gdn_merge
from longtake.kernels.rope import pair_tables, rotate

Norm = Literal["none", "head", "full"]
"""RMS norm of q and k: none, over the D entries of each head, or over all H*D entries of a token."""


class GdnState(NamedTuple):
    """Memory after the last absorbed frame, before the next one's decay.

    `kv` [B,H,D,D] rows = key dim, columns = value dim; `z` [B,H,D]. Both fp32.
    """

    kv: Tensor
    z: Tensor


class GdnOutput(NamedTuple):
    """`out` [B,N,H,D]: numerator, or quotient; `denominator` [B,N,H] beside a numerator; `state` unless in reverse."""

    out: Tensor
    denominator: Tensor | None
    state: GdnState | None


def check_norm(
    q: Tensor,
    norm: str,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    norm_eps: float,
    inverse_rms: tuple[Tensor, Tensor] | None,
) -> None:
    """Raise `ValueError` unless weights [H*D] come with a norm, inverse RMS [B,N] with the full one, and eps is one."""
    if norm not in get_args(Norm):
        raise ValueError(f"norm is one of {get_args(Norm)}, got {norm!r}")
    require_eps("norm_eps", norm_eps)
    for name, weight in (("q_weight", q_weight), ("k_weight", k_weight)):
        if weight is None:
            continue
        if norm == "none":
            raise ValueError(f"{name} needs a norm, and norm is 'none'")
        require(name, weight, (q.shape[2] * q.shape[3],), WEIGHTS, like=q)
    if inverse_rms is None:
        return
    if norm != "full":
        raise ValueError(f"inverse_rms needs norm 'full', got {norm!r}")
    for name, scale in zip("qk", require_pair("inverse_rms", inverse_rms, "q and k"), strict=True):
        require(f"inverse_rms of {name}", scale, q.shape[:2], like=q)


def check_quotient(gate: Tensor | None, eps: float | None, q: Tensor) -> None:
    """Raise `ValueError` unless eps, if any, is one, and a gate [B,N,H,D] comes with it: it goes onto a quotient."""
    if eps is not None:
        require_eps("eps", eps)
    if gate is None:
        return
    if eps is None:
        raise ValueError("gate needs eps: it is multiplied onto the quotient")
    require("gate", gate, q.shape, FLOATS, like=q)


def rms_norm(
    x: Tensor, weight: Tensor | None, *, norm: Norm = "full", eps: float, inverse_rms: Tensor | None = None
) -> Tensor:
    """RMS norm x / √(mean(x²) + eps) · weight, over each head or over all heads together.

    Args:
        x: [B,N,H,D], not changed. weight: [H*D], or None for ones.
        eps: added to the mean square. inverse_rms: [B,N], used instead of a computed 1 / √(mean(x²) + eps).

    Returns:
        [B,N,H,D] in fp32 (float64 stays).
    """
    wide = x.to(accumulation_dtype(x))
    if norm == "none":
        return wide
    if inverse_rms is None:
        over = (-2, -1) if norm == "full" else (-1,)
        scale = torch.rsqrt(wide.square().mean(dim=over, keepdim=True) + eps)
    else:
        scale = inverse_rms.to(wide.dtype)[..., None, None]
    wide = wide * scale
    return wide if weight is None else wide * weight.to(wide.dtype).view(x.shape[-2:])


def gdn_prepare(
    q: Tensor,
    k: Tensor,
    *,
    norm: Norm = "full",
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    inverse_rms: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Norm, ReLU, and the key scale: what `gdn_scan` does with its q and k when given the same arguments.

    Args:
        q, k: [B,N,H,D], k after its short convolution; not changed.
        norm, q_weight, k_weight, norm_eps, inverse_rms: as in `gdn_scan`.
        k_scale: multiplied onto k after ReLU; D^−½·S^−½ keeps I − P contractive.

    Returns:
        q, k [B,N,H,D] fp32 (float64 for float64 input).

    Raises:
        ValueError: weights or inverse RMS do not fit q or the norm, or norm_eps is negative or not finite.
    """
    check_norm(q, norm, q_weight, k_weight, norm_eps, inverse_rms)
    q_rms, k_rms = inverse_rms or (None, None)
    q = rms_norm(q, q_weight, norm=norm, eps=norm_eps, inverse_rms=q_rms).relu()
    return q, rms_norm(k, k_weight, norm=norm, eps=norm_eps, inverse_rms=k_rms).relu() * k_scale


def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    direction: Direction = "forward",
    norm: Norm = "none",
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    norm_eps: float = 1e-5,
    inverse_rms: tuple[Tensor, Tensor] | None = None,
    k_scale: float = 1.0,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    eps: float | None = None,
    gate: Tensor | None = None,
    initial_state: GdnState | None = None,
    out_state: GdnState | None = None,
    slots: Tensor | None = None,
    chunk_starts: Tensor | Sequence[int] | None = None,
    reverse: ReverseInputs | None = None,
) -> GdnOutput:
    """The specification of `longtake.kernels.gdn_scan`: a loop over frames; arguments and results as there."""
    check_scan(q, k, v, beta, decay)
    inputs = ScanInputs(q, k, v, beta, decay, inverse_rms)
    check_direction(direction, inputs, reverse)
    check_quotient(gate, eps, q)
    check_states(q, direction, initial_state, out_state, slots)
    check_memory(initial_state, out_state)
    tables, restarts = pair_tables(cos, sin, q, q.shape[-1]), restart_mask(chunk_starts, decay.shape[2], q.device)
    prepare = partial(gdn_prepare, norm=norm, q_weight=q_weight, k_weight=k_weight, norm_eps=norm_eps, k_scale=k_scale)
    ahead = _streams(inputs, prepare, tables)
    back = ahead if reverse is None else _streams(inputs.replaced(reverse), prepare, tables)
    kv, z = _start(initial_state, slots, q)
    numerator, last_kv = delta_scan(ahead[0], back[0], kv, direction, restarts)
    denominators, last_z = delta_scan(ahead[1], back[1], z[..., None], direction, restarts)
    out, denominator = by_token(numerator), by_token(denominators).squeeze(-1)
    state = None
    if last_kv is not None and last_z is not None:
        state = _finish(GdnState(last_kv, last_z.squeeze(-1)), out_state, slots)
    if eps is None:
        return GdnOutput(out, denominator, state)
    return GdnOutput(gdn_merge((out, denominator), eps=eps, gate=gate, dtype=v.dtype), None, state)


def _streams(
    x: ScanInputs, prepare: Callable[..., tuple[Tensor, Tensor]], tables: tuple[Tensor, Tensor] | None
) -> tuple[Frames, Frames]:
    """What KV and Z absorb and who reads them: rotated keys with the values, plain keys with ones."""
    q, k = prepare(x.q, x.k, inverse_rms=x.inverse_rms)
    turned = (q, k) if tables is None else (rotate(q, *tables), rotate(k, *tables))
    ones = torch.ones_like(x.v[..., :1])
    return frames_of(*turned, x.v, x.beta, x.decay), frames_of(q, k, ones, x.beta, x.decay)


def _start(state: GdnState | None, slots: Tensor | None, q: Tensor) -> tuple[Tensor, Tensor]:
    """KV [B,H,D,D] and Z [B,H,D] to begin with."""
    batch, _, heads, dim = q.shape
    kv, z = (None, None) if state is None else state
    return load_state(kv, slots, (batch, heads, dim, dim), q), load_state(z, slots, (batch, heads, dim), q)


def _finish(state: GdnState, out: GdnState | None, slots: Tensor | None) -> GdnState:
    """The state, written to `out` if there is one."""
    kv, z = (None, None) if out is None else out
    return GdnState(store_state(state.kv, kv, slots), store_state(state.z, z, slots))
