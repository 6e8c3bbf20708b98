"""Ray-relative camera geometry (UCPE): the rigid frame of every token's ray.

Products are written out element by element: under autocast or with TF32 a matrix product would fall below fp32.
"""

import torch
from torch import Tensor

from longtake.kernels.backend import Backend, runs_triton
from longtake.kernels.checks import FLOATS, require
from longtake.kernels.delta import accumulation_dtype

ENTRIES = 20
"""Numbers of a frame in a raymap."""


def ray_matrices(
    raymap: Tensor, height: int, width: int, *, patch: int = 1, backend: Backend | None = None
) -> tuple[Tensor, Tensor]:
    """World-to-ray transforms of every token and their inverses (UCPE, pinhole).

    The token in row i, column j looks through pixel (u, v) = (patch·j, patch·i) of the latent frame, on the integer
    grid (no half-pixel offset): the published model divides the intrinsics by its patch size instead, which is the
    same. The ray frame has z along the ray ((u − cx) / fx, (v − cy) / fy, 1), x = y_camera × z and y = z × x, all of
    unit length, and sits at the camera centre t: P = [[R, −R t], [0, 1]] and P⁻¹ = [[Rᵀ, t], [0, 1]]. A ray without a
    finite frame gets the identity twice.

    Args:
        raymap: [B,F,20] of any float dtype: camera to world, row by row (OpenCV axes), then fx fy cx cy in latent
            pixels. Not changed.
        height, width: h and w, rows and columns of tokens in a frame. patch: latent pixels from token to token.

    Returns:
        P and P⁻¹, each [B,F·h·w,4,4], frame by frame, row by row; contiguous, fp32 (float64 for float64 input, which
        only the reference takes).

    Raises:
        ValueError: an argument does not fit; it is named.
        BackendError: `backend` can not run.
    """
    if raymap.ndim != 3:
        raise ValueError(f"raymap must be [B,F,{ENTRIES}], got {tuple(raymap.shape)}")
    require("raymap", raymap, (*raymap.shape[:2], ENTRIES), FLOATS)
    for name, size in (("height", height), ("width", width), ("patch", patch)):
        if size < 1:
            raise ValueError(f"{name} must be positive, got {size}")
    if not runs_triton(backend, raymap):
        return ray_matrices_reference(raymap, height, width, patch)
    from longtake.kernels.cam import geometry_triton

    matrices: tuple[Tensor, Tensor] = geometry_triton.ray_matrices(raymap, height, width, patch)
    return matrices


def ray_matrices_reference(raymap: Tensor, height: int, width: int, patch: int) -> tuple[Tensor, Tensor]:
    """As `ray_matrices`, in PyTorch."""
    packed = raymap.to(accumulation_dtype(raymap))
    c2w = torch.unflatten(packed[..., None, None, :16], -1, (4, 4))
    z = _unit((c2w[..., :3, :3] * _pixels(packed[..., 16:], height, width, patch)[..., None, :]).sum(-1))
    x = _unit(torch.linalg.cross(c2w[..., :3, 1].expand_as(z), z))
    rotation = torch.stack([x, _unit(torch.linalg.cross(z, x)), z], dim=-2)
    centre = c2w[..., :3, 3].expand_as(z)
    projection = _rigid(rotation, -(rotation * centre[..., None, :]).sum(-1))
    inverse = _rigid(rotation.mT, centre)
    finite = projection.isfinite().all(-1).all(-1)[..., None, None]
    identity = torch.eye(4, dtype=packed.dtype, device=packed.device)
    return (
        torch.where(finite, projection, identity).flatten(1, 3),
        torch.where(finite, inverse, identity).flatten(1, 3),
    )


def _pixels(intrinsics: Tensor, height: int, width: int, patch: int) -> Tensor:
    """Directions in the camera, [B,F,h,w,3], of the tokens of cameras with intrinsics [B,F,4]."""
    fx, fy, cx, cy = intrinsics[..., None, None].unbind(-3)
    u = patch * torch.arange(width, dtype=intrinsics.dtype, device=intrinsics.device)
    v = patch * torch.arange(height, dtype=intrinsics.dtype, device=intrinsics.device)[:, None]
    x = ((u - cx) / fx).expand(-1, -1, height, -1)
    return torch.stack([x, ((v - cy) / fy).expand_as(x), torch.ones_like(x)], dim=-1)


def _unit(vectors: Tensor) -> Tensor:
    length: Tensor = torch.linalg.vector_norm(vectors, dim=-1, keepdim=True)
    return vectors / length


def _rigid(rotation: Tensor, translation: Tensor) -> Tensor:
    """[..., 4, 4] from a rotation [..., 3, 3] and a translation [..., 3]."""
    matrices = translation.new_zeros(*translation.shape[:-1], 4, 4)
    matrices[..., :3, :3] = rotation
    matrices[..., :3, 3] = translation
    matrices[..., 3, 3] = 1.0
    return matrices
