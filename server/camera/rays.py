"""Camera geometry as the model reads it: ray maps and Plücker maps.

Pixels are on the integer grid of the latent frame (u = 0…w−1, v = 0…h−1, no half-pixel offset), and their directions
are `((u − cx) / fx, (v − cy) / fy, 1)`.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

FRAMES_PER_LATENT = 8
LATENTS_PER_CHUNK = 3


class ChunkGeometry(NamedTuple):
    """Camera inputs of one chunk: raymap [F,20] and Plücker map [48,F,h,w], both fp32 on the CPU."""

    raymap: Tensor
    plucker: Tensor


def raymap(c2w: NDArray[np.float64], intrinsics: NDArray[np.float64]) -> Tensor:
    """Pack poses and intrinsics into the 20 numbers a latent frame has.

    Args:
        c2w: [F,4,4] float64, camera to world, OpenCV axes, relative to frame 0.
        intrinsics: [F,4] float64, fx fy cx cy in latent pixels.

    Returns:
        [F,20] fp32: c2w row by row, then fx fy cx cy.
    """
    return torch.from_numpy(np.concatenate([c2w.reshape(-1, 16), intrinsics], axis=1)).float()


def plucker_map(c2w: NDArray[np.float64], intrinsics: NDArray[np.float64], height: int, width: int) -> Tensor:
    """Plücker coordinates (d, o × d) of every latent pixel, for the eight video frames of each latent frame.

    Args:
        c2w: [F,8,4,4] float64, camera to world, OpenCV axes, relative to frame 0.
        intrinsics: [F,8,4] float64, fx fy cx cy in latent pixels.
        height: h, rows of the latent frame.
        width: w, columns of the latent frame.

    Returns:
        [48,F,h,w] fp32, computed in float64; channel 6·frame + component, unit direction d before moment o × d.
    """
    return plucker_rays(torch.from_numpy(c2w), torch.from_numpy(intrinsics), height, width).float()


def plucker_rays(c2w: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """As `plucker_map`, for tensors [...,F,8,4,4] and [...,F,8,4] on any device → [...,48,F,h,w] in their dtype."""
    directions = _world_rays(c2w, intrinsics, height, width)
    origins = c2w[..., None, None, :3, 3].expand_as(directions)
    rays = torch.cat([directions, torch.linalg.cross(origins, directions)], dim=-1)
    return rays.movedim((-4, -1, -5), (-5, -4, -3)).flatten(-5, -4)


def chunk_geometry(
    index: int,
    poses: NDArray[np.float64],
    intrinsics: NDArray[np.float64],
    first_intrinsics: NDArray[np.float64],
    height: int,
    width: int,
    stride: int = 32,
) -> ChunkGeometry:
    """Camera inputs of chunk `index`: latent frame j takes its pose from video frame 8j and its rays from 8j−7 … 8j.

    Chunk 0 also holds latent frame 0, whose pose is the identity and whose rays are those of video frames 0 … 7.

    Args:
        index: chunk number.
        poses: [24,4,4] float64 of the chunk's video frames, relative to frame 0.
        intrinsics: [24,4] float64 of the same frames, fx fy cx cy in pixels of the model's video frame.
        first_intrinsics: [4] float64 of frame 0, in the same pixels; used by chunk 0 only.
        height: h, rows of the latent frame.
        width: w, columns of the latent frame.
        stride: video pixels a latent pixel spans.

    Returns:
        Geometry of F latent frames, F = 4 for chunk 0 and 3 for every other.
    """
    assert len(poses) == len(intrinsics) == FRAMES_PER_LATENT * LATENTS_PER_CHUNK
    last = np.arange(1, LATENTS_PER_CHUNK + 1) * FRAMES_PER_LATENT - 1
    frames = last[:, None] + np.arange(1 - FRAMES_PER_LATENT, 1)
    if index == 0:
        poses = np.concatenate([np.eye(4)[None], poses])
        intrinsics = np.concatenate([first_intrinsics[None], intrinsics])
        last = np.concatenate([[0], last + 1])
        frames = np.concatenate([np.arange(FRAMES_PER_LATENT)[None], frames + 1])
    intrinsics = intrinsics / stride
    return ChunkGeometry(
        raymap(poses[last], intrinsics[last]),
        plucker_map(poses[frames], intrinsics[frames], height, width),
    )


def _world_rays(c2w: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """Unit directions in the world, [..., h, w, 3], of the pixels of cameras [..., 4, 4] with intrinsics [..., 4]."""
    fx, fy, cx, cy = intrinsics[..., None, None].unbind(-3)
    u = torch.arange(width, dtype=c2w.dtype, device=c2w.device)
    v = torch.arange(height, dtype=c2w.dtype, device=c2w.device)[:, None]
    x = ((u - cx) / fx).expand(*c2w.shape[:-2], height, width)
    y = ((v - cy) / fy).expand_as(x)
    pixels = torch.stack([x, y, torch.ones_like(x)], dim=-1)
    return _unit((c2w[..., None, None, :3, :3] * pixels[..., None, :]).sum(-1))


def _unit(vectors: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length
