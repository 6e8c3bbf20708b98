"""The frame-wise gated delta rule that every branch shares (SANA-WM, arXiv 2605.15178)."""

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from longtake.kernels.checks import FLOATS, check_state, require, require_tokens, starts

Direction = Literal["forward", "reverse", "both"]
"""`forward`: every frame is absorbed, then read, and a state goes in and out. `reverse`: from the last frame back, read
before it is absorbed, without a state. `both`: their sum."""


class ReverseInputs(NamedTuple):
    """What the reverse scan of a call in both directions reads instead of the forward scan's; None: the same."""

    q: Tensor | None = None
    k: Tensor | None = None
    v: Tensor | None = None
    beta: Tensor | None = None
    decay: Tensor | None = None
    inverse_rms: tuple[Tensor, Tensor] | None = None


class ScanInputs(NamedTuple):
    """What one direction reads: q, k, v [B,N,H,D], beta [B,H,F,S] or [B,H,F], decay [B,H,F], two inverse RMS [B,N]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    inverse_rms: tuple[Tensor, Tensor] | None = None

    def replaced(self, reverse: ReverseInputs | None) -> "ScanInputs":
        """These inputs, but for those given in `reverse`."""
        given = {} if reverse is None else reverse._asdict()
        return self._replace(**{name: x for name, x in given.items() if x is not None})


class Frames(NamedTuple):
    """What a memory absorbs and who reads it: q, k [B,H,F,S,D], v [B,H,F,S,E], beta [B,H,F,S], decay [B,H,F]."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 input, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def frames_of(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> Frames:
    """q, k, v [B,F*S,H,·], beta [B,H,F,S] or [B,H,F] and decay [B,H,F] by frames, in the accumulation dtype of q."""
    dtype = accumulation_dtype(q)
    q, k, v = (torch.unflatten(x.to(dtype), 1, (decay.shape[2], -1)).permute(0, 3, 1, 2, 4) for x in (q, k, v))
    beta = beta if beta.ndim == 4 else beta[..., None].expand(q.shape[:-1])
    return Frames(q, k, v, beta.to(dtype), decay.to(dtype))


def by_token(x: Tensor) -> Tensor:
    """[B,H,F,S,E] → [B,F*S,H,E], contiguous."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2).contiguous()


def absorb(memory: Tensor, x: Frames, f: int) -> Tensor:
    """M ← g·M + Kᵀ·diag(β)·(V − K·g·M) with frame f, the same as g·(I − Kᵀ·diag(β)·K)·M + Kᵀ·diag(β)·V."""
    k, faded = x.k[:, :, f], x.decay[:, :, f, None, None] * memory
    return faded + k.mT @ (x.beta[:, :, f, :, None] * (x.v[:, :, f] - k @ faded))


def forward_scan(x: Frames, memory: Tensor) -> tuple[Tensor, Tensor]:
    """Absorb and then read each frame: reads [B,H,F,S,E] and the last memory [B,H,D,E]."""
    reads = []
    for f in range(x.q.shape[2]):
        memory = absorb(memory, x, f)
        reads.append(x.q[:, :, f] @ memory)
    return torch.stack(reads, dim=2), memory


def reverse_scan(x: Frames, restarts: Tensor | None) -> Tensor:
    """Read and then absorb each frame from the last one back: reads [B,H,F,S,E].

    restarts: bool [F], where a chunk starts: what was absorbed up to such a frame, itself included, is forgotten.
    """
    batch, heads, frames, _, dim = x.q.shape
    memory, reads = x.v.new_zeros(batch, heads, dim, x.v.shape[-1]), []
    for f in reversed(range(frames)):
        reads.append(x.q[:, :, f] @ memory)
        memory = absorb(memory, x, f)
        if restarts is not None:
            memory = memory.masked_fill(restarts[f], 0)
    return torch.stack(reads[::-1], dim=2)


def delta_scan(
    forward: Frames, reverse: Frames, memory: Tensor, direction: Direction, restarts: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Reads [B,H,F,S,E] of one direction or the sum of both, and the forward scan's last memory; mutates nothing."""
    with torch.autocast(memory.device.type, enabled=False):
        if direction == "reverse":
            return reverse_scan(reverse, restarts), None
        reads, memory = forward_scan(forward, memory)
        return reads if direction == "forward" else reads + reverse_scan(reverse, restarts), memory


def restart_mask(chunk_starts: Tensor | Sequence[int] | None, frames: int, device: torch.device) -> Tensor | None:
    """Where chunks start, bool [F]; None: one chunk.

    Raises:
        ValueError: `chunk_starts` is no ascending list of frames from 0, or no int64 [C] on the device.
    """
    first = starts(chunk_starts, frames, device)
    return None if first is None else (torch.arange(frames, device=device)[:, None] == first).any(1)


def load_state(state: Tensor | None, slots: Tensor | None, shape: tuple[int, ...], like: Tensor) -> Tensor:
    """The state, or the rows `slots` of a pool, or zeros of `shape`, in the accumulation dtype of `like`."""
    dtype = accumulation_dtype(like)
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    return (state if slots is None else state[slots]).to(dtype)


def store_state(state: Tensor, out: Tensor | None, slots: Tensor | None) -> Tensor:
    """Write the state into `out`, or into its rows `slots`, and return `out`; without one, the contiguous state."""
    if out is None:
        return state.contiguous()
    if slots is None:
        return out.copy_(state)
    return out.index_copy_(0, slots, state.to(out.dtype))


def check_reverse(reverse: object) -> None:
    """Raise `ValueError` unless it is `ReverseInputs` or None."""
    if reverse is not None and not isinstance(reverse, ReverseInputs):
        raise ValueError(f"reverse must be ReverseInputs, got {type(reverse).__name__}")


def check_direction(direction: str, x: ScanInputs, reverse: ReverseInputs | None) -> None:
    """Raise `ValueError` unless `direction` is one and reverse inputs, if any, go with "both" and fit the forward ones.

    `x.inverse_rms` and `reverse.inverse_rms` are not looked at.
    """
    if direction not in get_args(Direction):
        raise ValueError(f"direction is one of {get_args(Direction)}, got {direction!r}")
    if reverse is None:
        return
    if direction != "both":
        raise ValueError(f"reverse inputs need direction 'both', got {direction!r}")
    for name in ("q", "k", "v"):
        if (tokens := getattr(reverse, name)) is not None:
            require_tokens(f"reverse {name}", tokens, x.q)
    for name in ("beta", "decay"):
        if (gates := getattr(reverse, name)) is not None:
            require(f"reverse {name}", gates, getattr(x, name).shape, FLOATS, like=x.q)


def check_states(
    q: Tensor,
    direction: Direction,
    initial: tuple[Tensor, ...] | None,
    out: tuple[Tensor, ...] | None,
    slots: Tensor | None,
) -> None:
    """Raise `ValueError` unless states, (KV) or (KV, Z), are whole and fit q and direction, and slots have a pool."""
    for name, state in (("initial_state", initial), ("out_state", out)):
        if state is None:
            continue
        if any(x is None for x in state):
            raise ValueError(f"kv and z of {name} come together")
        kv, z = state if len(state) == 2 else (state[0], None)
        check_state(name, kv, z, q, slots=slots, reverse=direction == "reverse")
        if name == "out_state" and any(x.requires_grad for x in state):
            raise ValueError("out_state is written in place: it can not require grad")
    if slots is None:
        return
    if initial is None and out is None:
        raise ValueError("slots are rows of a state pool: they need initial_state or out_state")
    if initial is not None and out is not None and initial[0].shape != out[0].shape:
        raise ValueError("with slots, initial_state and out_state are pools with the same rows")
