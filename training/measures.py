"""Numbers that tell how good generated frames are. Frames are uint8 [B,T,H,W,3]."""

import math

import torch
from torch import Tensor

from longtake.training.render import render
from longtake.training.scenes import Scenes

WIDEST, NEAREST = math.radians(21.0), math.radians(0.25)
"""Rotations that registration tries, to either side, and how finely it ends. What is farther off ends at the rim."""
TRIED = 7
"""Angles along each axis in every round of registration."""


def psnr(found: Tensor, true: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB over all but the first dim → [B], at most 60."""
    error = (found.float() - true.float()).square().flatten(1).mean(1)
    return 10 * torch.log10(255**2 / error.clamp(min=255**2 * 1e-6))


def sharpness(frames: Tensor) -> Tensor:
    """Mean size of the difference of neighbouring pixels, in levels → [B]."""
    x = frames.float().mean(-1)
    across, down = x.diff(dim=-1).abs().flatten(1), x.diff(dim=-2).abs().flatten(1)
    return (across.mean(1) + down.mean(1)) / 2


def colours(frames: Tensor) -> Tensor:
    """Mean and spread of each channel, in levels → [B,6]."""
    spread, mean = torch.std_mean(frames.float().flatten(1, 3), dim=1)
    return torch.cat([mean, spread], dim=1)


def turned(poses: Tensor, yaw: Tensor, pitch: Tensor) -> Tensor:
    """Poses [B,4,4] with their cameras turned by yaw (right) and pitch (up) [B,K] in radians → [B,K,4,4]."""
    zero, one = torch.zeros_like(yaw), torch.ones_like(yaw)
    across = torch.stack([yaw.cos(), zero, yaw.sin(), zero, one, zero, -yaw.sin(), zero, yaw.cos()], dim=-1)
    down = torch.stack([one, zero, zero, zero, pitch.cos(), -pitch.sin(), zero, pitch.sin(), pitch.cos()], dim=-1)
    found = poses[:, None].repeat(1, yaw.shape[1], 1, 1)
    found[..., :3, :3] = found[..., :3, :3] @ torch.unflatten(across, -1, (3, 3)) @ torch.unflatten(down, -1, (3, 3))
    return found


def known(poses: Tensor, intrinsics: Tensor, height: int, width: int) -> Tensor:
    """How much of each view the first frame shows, going by its directions alone, 0…1 → [B].

    Args:
        poses: [B,4,4] relative to frame 0. intrinsics: [B,4] in pixels.
    """
    fx, fy, cx, cy = (x[:, None, None] for x in intrinsics.unbind(-1))
    v, u = torch.meshgrid(*(torch.arange(n, device=poses.device) + 0.5 for n in (height, width)), indexing="ij")
    rays = torch.stack([(u - cx) / fx, (v - cy) / fy, torch.ones_like(u).expand(len(poses), -1, -1)], dim=-1)
    x, y, z = torch.einsum("bij,bhwj->ibhw", poses[:, :3, :3], rays.to(poses.dtype))
    inside: Tensor = (z > 0) & ((x / z * fx + cx - width / 2).abs() < width / 2)
    inside = inside & ((y / z * fy + cy - height / 2).abs() < height / 2)
    return inside.double().mean((1, 2))


def registered(scenes: Scenes, frames: Tensor, poses: Tensor, intrinsics: Tensor) -> Tensor:
    """Where generated frames look instead of where they should, found by rendering the scene around the true pose.

    The rotation whose render differs least from the frame (mean squared error) is searched on grids of yaw and pitch,
    each a third as wide as the one before and centred on the best so far. The camera's place is taken as true.

    Args:
        scenes: B. frames: uint8 [B,H,W,3], one of each. poses: [B,4,4] float64, true, relative to frame 0.
        intrinsics: [B,4] in pixels.

    Returns:
        Yaw and pitch off the true pose, [B,2] in radians.
    """
    best = torch.zeros(len(frames), 2, dtype=torch.float64, device=frames.device)
    reach = WIDEST
    steps = torch.linspace(-1, 1, TRIED, dtype=torch.float64, device=frames.device)
    grid = torch.cartesian_prod(steps, steps)
    while reach > NEAREST / 2:
        tried = best[:, None] + reach * grid
        seen = turned(poses, tried[..., 0], tried[..., 1])
        made = render(scenes, seen, intrinsics, frames.shape[1], frames.shape[2])
        errors = (made.float() - frames[:, None].float()).square().flatten(2).mean(-1)
        best = tried[torch.arange(len(tried)), errors.argmin(1)]
        reach /= 3
    return best
