"""Inputs of small scans, what they should give, and comparisons."""

from itertools import pairwise, product

import torch
from torch import Tensor

from longtake.kernels.gdn.reference import GdnOutput, GdnState, gdn_prepare
from longtake.kernels.rope import rotate

FRAMES, PER_FRAME, HEADS, DIM = 5, 7, 3, 16
STARTS = [0, 2, 3]
DOUBLE, FP32, BF16 = torch.float64, torch.float32, torch.bfloat16
Inputs = dict[str, Tensor]


def draw(frames: int = FRAMES, per_frame: int = PER_FRAME, dim: int = DIM, dtype: torch.dtype = DOUBLE) -> Inputs:
    """Inputs of a scan, B = 2 and H = 3, with keys small enough for a contractive transition."""
    torch.manual_seed(frames * 10_000 + per_frame * 100 + dim)
    q, k, v = torch.randn(3, 2, frames * per_frame, HEADS, dim, dtype=DOUBLE)
    q, k = gdn_prepare(q, k, k_scale=(dim * per_frame) ** -0.5)
    beta = torch.rand(2, HEADS, frames, per_frame, dtype=DOUBLE)
    decay = 0.9 + 0.1 * torch.rand(2, HEADS, frames, dtype=DOUBLE)
    angles = torch.rand(frames * per_frame, dim // 2, dtype=DOUBLE) * 6
    named = {"q": q, "k": k, "v": v, "beta": beta, "decay": decay, "cos": angles.cos(), "sin": angles.sin()}
    return {name: x.to(dtype) for name, x in named.items()}


def draw_state(dim: int = DIM, dtype: torch.dtype = DOUBLE, rows: int = 2) -> GdnState:
    generator = torch.Generator().manual_seed(dim + rows)
    kv = torch.randn(rows, HEADS, dim, dim, generator=generator, dtype=DOUBLE)
    return GdnState(kv.to(dtype), torch.rand(rows, HEADS, dim, generator=generator, dtype=DOUBLE).to(dtype))


def cut(x: Inputs, start: int, stop: int) -> Inputs:
    """The frames start … stop − 1 of a scan's inputs."""
    per_frame = x["beta"].shape[-1]
    rows = slice(start * per_frame, stop * per_frame)
    tables = {name: x[name][rows] for name in ("cos", "sin") if name in x}
    gates = {name: x[name][:, :, start:stop].contiguous() for name in ("beta", "decay")}
    return {name: x[name][:, rows] for name in "qkv"} | tables | gates


def tensors(found: GdnOutput) -> tuple[Tensor, ...]:
    """Everything a scan gave."""
    return tuple(x for x in (found.out, found.denominator, *(found.state or ())) if x is not None)


def assert_same_bits(ours: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for x, y in zip(ours, other, strict=True):
        assert torch.equal(x, y)


def assert_close(ours: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> None:
    for x, y in zip(ours, other, strict=True):
        assert x.is_contiguous()
        torch.testing.assert_close(x, y, rtol=0, atol=1e-12)


def memories(x: Inputs, b: int, h: int, order: list[int], kv: Tensor, z: Tensor) -> dict[int, tuple[Tensor, Tensor]]:
    """KV and Z of a head after each frame: M ← g·(I − K̃ᵀ·diag(β)·K̃)·M + K̃ᵀ·diag(β)·V."""
    found, per_frame, eye = {}, x["beta"].shape[-1], torch.eye(x["q"].shape[-1], dtype=DOUBLE)
    turned = rotate(x["k"], x["cos"], x["sin"])
    for f in order:
        rows, weighted = slice(f * per_frame, (f + 1) * per_frame), torch.diag(x["beta"][b, h, f])
        rotated, plain, fade = turned[b, rows, h], x["k"][b, rows, h], x["decay"][b, h, f]
        kv = fade * (eye - rotated.T @ weighted @ rotated) @ kv + rotated.T @ weighted @ x["v"][b, rows, h]
        z = fade * (eye - plain.T @ weighted @ plain) @ z + plain.T @ x["beta"][b, h, f]
        found[f] = kv, z
    return found


def explicit(x: Inputs, state: GdnState | None = None, reverse: list[int] | None = None) -> tuple[Tensor, ...]:
    """Numerator, denominator and state of a forward scan; or, of a scan in `reverse` by chunks, the first two."""
    numerator, denominator = torch.empty_like(x["v"]), torch.empty_like(x["v"][..., 0])
    frames, per_frame = x["beta"].shape[2:]
    kv, z = draw_state(x["q"].shape[-1])
    kv, z = (torch.zeros_like(kv), torch.zeros_like(z)) if state is None else (state.kv.clone(), state.z.clone())
    turned = rotate(x["q"], x["cos"], x["sin"])
    for b, h in product(*map(range, kv.shape[:2])):
        for chunk in pairwise([*(reverse or [0]), frames]):
            order = list(range(*chunk))
            found = memories(x, b, h, order if reverse is None else order[::-1], kv[b, h], z[b, h])
            for f in order:
                rows = slice(f * per_frame, (f + 1) * per_frame)
                memory = found[f] if reverse is None else found.get(f + 1, (kv[b, h], z[b, h]))
                numerator[b, rows, h] = turned[b, rows, h] @ memory[0]
                denominator[b, rows, h] = x["q"][b, rows, h] @ memory[1]
        if reverse is None:
            kv[b, h], z[b, h] = found[frames - 1]
    return (numerator, denominator) if reverse else (numerator, denominator, kv, z)


def joined(*parts: GdnOutput) -> tuple[Tensor, ...]:
    """What scans of consecutive frames gave, as one scan would give it."""
    reads = (torch.cat(y, dim=1) for y in zip(*(tensors(part)[:2] for part in parts), strict=True))
    return (*reads, *(parts[-1].state or ()))
