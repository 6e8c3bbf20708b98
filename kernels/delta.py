"""The frame-wise gated delta rule that every branch shares (SANA-WM, arXiv 2605.15178)."""

import torch
from torch import Tensor


def accumulation_dtype(x: Tensor) -> torch.dtype:
    """float64 for float64 input, else fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def by_frame(x: Tensor, frames: int) -> Tensor:
    """[B,F*S,H,D] → [B,H,F,S,D]."""
    return torch.unflatten(x, 1, (frames, -1)).permute(0, 3, 1, 2, 4)


def by_token(x: Tensor) -> Tensor:
    """[B,H,F,S,D] → [B,F*S,H,D], contiguous."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2).contiguous()


def delta_scan(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, state: Tensor, *, reverse: bool
) -> tuple[Tensor, Tensor]:
    """Read q from a memory that absorbs one frame of (k, v) at a time.

    One frame: M ← g·M + Kᵀ·diag(β)·(V − K·g·M), the same as g·(I − Kᵀ·diag(β)·K)·M + Kᵀ·diag(β)·V.
    Forward reads a frame after it is absorbed; reverse walks from the last frame and reads before.

    Args:
        q, k: [B,H,F,S,D]; v: [B,H,F,S,E]; beta: [B,H,F,S]; decay: [B,H,F]; state: [B,H,D,E]. None is changed.

    Returns:
        Reads [B,H,F,S,E] and the memory after the last frame visited, [B,H,D,E].
    """
    reads: list[Tensor] = []
    frames = range(q.shape[2])
    for f in reversed(frames) if reverse else frames:
        if reverse:
            reads.append(q[:, :, f] @ state)
        faded = decay[:, :, f, None, None] * state
        correction = beta[:, :, f, :, None] * (v[:, :, f] - k[:, :, f] @ faded)
        state = faded + k[:, :, f].mT @ correction
        if not reverse:
            reads.append(q[:, :, f] @ state)
    return torch.stack(reads[::-1] if reverse else reads, dim=2), state


def check_scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor) -> None:
    """Raise `ValueError` unless q, k, v are [B,F*S,H,D], beta [B,H,F,S] and decay [B,H,F]."""
    if q.ndim != 4 or beta.ndim != 4:
        raise ValueError(f"q must be [B,N,H,D] and beta [B,H,F,S], got {tuple(q.shape)} and {tuple(beta.shape)}")
    batch, tokens, heads, _ = q.shape
    frames, per_frame = beta.shape[2:]
    if k.shape != q.shape or v.shape != q.shape:
        raise ValueError(f"q, k and v differ in shape: {tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}")
    if tokens != frames * per_frame or beta.shape[:2] != (batch, heads):
        raise ValueError(f"beta {tuple(beta.shape)} does not fit q {tuple(q.shape)}")
    if decay.shape != (batch, heads, frames):
        raise ValueError(f"decay must be {(batch, heads, frames)}, got {tuple(decay.shape)}")


def start_state(state: Tensor | None, shape: tuple[int, ...], like: Tensor, *, reverse: bool) -> Tensor:
    """The given state in the accumulation dtype of `like`, or zeros of `shape`.

    Raises:
        ValueError: the state has another shape, or was given to a reverse scan, which is local to its frames.
    """
    dtype = accumulation_dtype(like)
    if state is None:
        return torch.zeros(shape, dtype=dtype, device=like.device)
    if reverse:
        raise ValueError("a reverse scan takes no initial_state")
    if state.shape != shape:
        raise ValueError(f"initial_state must be {shape}, got {tuple(state.shape)}")
    return state.to(dtype)


def check_tables(cos: Tensor | None, sin: Tensor | None, q: Tensor) -> None:
    """Raise `ValueError` unless cos and sin are [N,D/2] for q [B,N,H,D], or both None."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        raise ValueError("cos and sin come together")
    shape = (q.shape[1], q.shape[-1] // 2)
    if cos.shape != shape or sin.shape != shape:
        raise ValueError(f"cos and sin must be {shape}, got {tuple(cos.shape)} and {tuple(sin.shape)}")
