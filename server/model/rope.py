"""Rotary tables over (frame, row, column), computed in float64 at absolute frames, so that no take is too long."""

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor


class RopeTables(NamedTuple):
    """`cos`, `sin` [N,D/2] for whole heads; `cam_cos`, `cam_sin` [N,D/4] for the second half of camera heads."""

    cos: Tensor
    sin: Tensor
    cam_cos: Tensor
    cam_sin: Tensor


def axis_pairs(dim: int) -> tuple[int, int, int]:
    """Pairs of a head of `dim` entries that rotate with the frame, the row and the column; 112 → (20, 18, 18)."""
    side = dim // 6
    return dim // 2 - 2 * side, side, side


def _axis_angles(positions: Tensor, pairs: int, theta: float) -> Tensor:
    """Angles [P,pairs] of positions [P]: position · theta^(−j/pairs)."""
    exponents = torch.arange(pairs, dtype=torch.float64) / pairs
    return positions.double()[:, None] * theta**-exponents


def rope_tables(start_frame: int, shape: tuple[int, int, int], head_dim: int, theta: float) -> RopeTables:
    """Tables of the latent frames from `start_frame` on.

    Camera heads keep the slowest-index pairs of each axis: the first 10, 9 and 9 of 20, 18 and 18 at D = 112.

    Args:
        start_frame: absolute index of the first latent frame.
        shape: (F, h, w), giving N = F·h·w tokens.
        head_dim: D, a multiple of 8. theta: base of the frequencies.

    Returns:
        float64 tables on the CPU.
    """
    frames, height, width = shape
    starts = (start_frame, 0, 0)
    angles = [
        _axis_angles(torch.arange(start, start + size), pairs, theta)
        for start, size, pairs in zip(starts, shape, axis_pairs(head_dim), strict=True)
    ]

    def table(pairs: tuple[int, int, int]) -> Tensor:
        t, y, x = (axis[:, :n] for axis, n in zip(angles, pairs, strict=True))
        parts = (
            t[:, None, None].expand(-1, height, width, -1),
            y[None, :, None].expand(frames, -1, width, -1),
            x[None, None, :].expand(frames, height, -1, -1),
        )
        return torch.cat(parts, dim=-1).flatten(0, 2)

    main, camera = table(axis_pairs(head_dim)), table(axis_pairs(head_dim // 2))
    return RopeTables(main.cos(), main.sin(), camera.cos(), camera.sin())


@lru_cache(maxsize=32)
def cached_tables(
    start_frame: int, shape: tuple[int, int, int], head_dim: int, theta: float, device: torch.device
) -> RopeTables:
    """`rope_tables` in fp32 on a device; not to be changed. Asked for again nothing is copied to the device."""
    with torch.inference_mode(mode=False):  # what is cached may be part of a training step
        return RopeTables(*(table.float().to(device) for table in rope_tables(start_frame, shape, head_dim, theta)))
