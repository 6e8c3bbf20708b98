"""Ray maps and Plücker maps against golden vectors and against their own definitions."""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.numpy import load_file

from longtake.server.camera.actions import Controller, parse_actions, walk
from longtake.server.camera.intrinsics import Crop
from longtake.server.camera.rays import ChunkGeometry, chunk_geometry, plucker_map

Golden = dict[str, NDArray[np.float32]]


@pytest.fixture(scope="module")
def golden() -> Golden:
    return load_file(Path(__file__).parent / "data" / "golden" / "camera.safetensors")


def two_chunks(pixel_conditions: NDArray[np.float32]) -> ChunkGeometry:
    """Chunks 0 and 1 of a clip on the 4×6 grid, its last frame repeated up to frame 48, joined along F."""
    clip = pixel_conditions[np.minimum(np.arange(49), len(pixel_conditions) - 1)].astype(np.float64)
    poses, intrinsics = clip[:, :16].reshape(-1, 4, 4), clip[:, 16:] * 32
    first = chunk_geometry(0, poses[1:25], intrinsics[1:25], intrinsics[0], 4, 6)
    second = chunk_geometry(1, poses[25:49], intrinsics[25:49], intrinsics[0], 4, 6)
    return ChunkGeometry(torch.cat([first.raymap, second.raymap]), torch.cat([first.plucker, second.plucker], dim=1))


def assert_close(ours: torch.Tensor, theirs: NDArray[np.float32]) -> None:
    """Within 1e-6 of the largest value."""
    assert ours.dtype == torch.float32
    assert tuple(ours.shape) == theirs.shape
    assert np.abs(ours.numpy() - theirs).max() <= 1e-6 * np.abs(theirs).max()


@pytest.mark.parametrize(("frames", "whole_latents"), [(41, 6), (44, 6), (36, 5)])
def test_golden_packing(golden: Golden, frames: int, whole_latents: int) -> None:
    geometry = two_chunks(golden[f"pack{frames}.pixel_conditions"][0])
    assert_close(geometry.raymap[:whole_latents], golden[f"pack{frames}.latent_conditions"][0, :whole_latents])
    assert_close(geometry.plucker[:, :whole_latents], golden[f"pack{frames}.chunk_plucker"][0, :, :whole_latents])


def test_golden_full_size(golden: Golden) -> None:
    poses = golden["real.poses"].astype(np.float64)
    intrinsics = Crop.fit(1690, 928, 1280, 704).intrinsics(np.tile(golden["real.K_source"].astype(np.float64), (25, 1)))
    following = np.concatenate([poses[1:], np.repeat(poses[-1:], 8, axis=0)])
    geometry = chunk_geometry(0, following, intrinsics[1:], intrinsics[0], 22, 40)
    assert_close(geometry.raymap[:3], golden["real.latent_conditions"][0])
    assert_close(geometry.plucker[:, :3], golden["real.chunk_plucker"][0])


def test_full_size_path_comes_from_the_action_string(golden: Golden) -> None:
    walked = walk(Controller.start(), parse_actions("w-9", "actions"), "sana-legacy")[0]
    walked[:, :3, 3] *= 0.04 / 0.05
    assert np.abs(walked - golden["real.poses"][1:10]).max() < 1e-6


def test_plucker_coordinates_of_one_pixel() -> None:
    c2w = np.tile(np.eye(4), (1, 8, 1, 1))
    c2w[0, 5, :3, 3] = [0.0, 2.0, 0.0]
    rays = plucker_map(c2w, np.full((1, 8, 4), [1.0, 1.0, 1.0, 0.0]), 2, 3)
    assert rays.shape == (48, 1, 2, 3)
    assert rays[30:36, 0, 0, 1].tolist() == [0.0, 0.0, 1.0, 2.0, 0.0, 0.0]
    root = 2**-0.5
    assert torch.allclose(rays[30:36, 0, 0, 2], torch.tensor([root, 0.0, root, 2 * root, 0.0, -2 * root]))


def test_later_chunk_needs_only_its_own_frames() -> None:
    poses = walk(Controller.start(), parse_actions("wd-24", "actions"), "sana-smooth")[0]
    intrinsics = np.tile([40.0, 40.0, 48.0, 32.0], (24, 1))
    later = chunk_geometry(5, poses, intrinsics, np.zeros(4), 2, 3, stride=16)
    first = chunk_geometry(0, poses, intrinsics, intrinsics[0], 2, 3, stride=16)
    assert torch.equal(later.raymap, first.raymap[1:])
    assert torch.equal(later.plucker, first.plucker[:, 1:])
    assert torch.equal(first.raymap[0], torch.cat([torch.eye(4).flatten(), torch.tensor([2.5, 2.5, 3.0, 2.0])]))
    assert torch.equal(later.raymap[1, :16], torch.from_numpy(poses[15]).float().flatten())
