"""Camera paths of the training data: what each kind keeps to, and that objects make way."""

import math

import pytest
import torch
from torch import Tensor

from longtake.training.paths import KINDS, clear_path, draw_intrinsics, draw_paths
from longtake.training.scenes import SLOTS, Scenes, draw_scenes

FRAMES = 97


@pytest.fixture(scope="module")
def scenes() -> Scenes:
    return draw_scenes(32, 100)


def turns_between(poses: Tensor) -> Tensor:
    """Degrees [B,T−1] between neighbouring frames."""
    change = poses[:, :-1, :3, :3].mT @ poses[:, 1:, :3, :3]
    cosine = (change.diagonal(dim1=-2, dim2=-1).sum(-1) - 1) / 2
    return cosine.clamp(-1, 1).acos().rad2deg()


@pytest.mark.parametrize("kind", [*KINDS, None])
def test_every_path_starts_at_the_identity_and_moves_like_a_camera(scenes: Scenes, kind: str | None) -> None:
    poses = draw_paths(scenes, FRAMES, 5, kind)
    assert poses.shape == (32, FRAMES, 4, 4)
    assert poses.dtype == torch.float64
    assert torch.equal(poses[:, 0], torch.eye(4, dtype=torch.float64).expand(32, 4, 4))
    rotation = poses[..., :3, :3]
    assert torch.allclose(rotation.mT @ rotation, torch.eye(3, dtype=torch.float64), atol=1e-9)
    assert torch.allclose(torch.linalg.det(rotation), torch.ones(32, FRAMES, dtype=torch.float64))
    steps = (poses[:, 1:, :3, 3] - poses[:, :-1, :3, 3]).norm(dim=-1)
    assert steps.max() < 0.12
    if kind not in ("return", None):
        assert turns_between(poses).max() < 4.0


def test_paths_repeat_and_do_not_depend_on_their_batch(scenes: Scenes) -> None:
    batch = draw_paths(scenes, FRAMES, 11)
    assert torch.equal(batch, draw_paths(scenes, FRAMES, 11))
    assert torch.allclose(batch[6:7], draw_paths(scenes[6:7], FRAMES, 17), atol=1e-12)
    assert not torch.equal(batch, draw_paths(scenes, FRAMES, 12))


def test_return_looks_away_and_comes_back_exactly(scenes: Scenes) -> None:
    poses = draw_paths(scenes, FRAMES + 10, 3, "return")
    assert torch.equal(poses[:, 96:], poses[:, 24:25].expand(-1, 11, -1, -1))
    facing = (poses[:, 24:25, :3, 2] * poses[:, :, :3, 2]).sum(-1)
    assert facing[:, 36:73].max() < 1e-6
    longer = draw_paths(scenes, FRAMES + 100, 3, "return")
    assert torch.equal(longer[:, : FRAMES + 10], poses)


def test_look_back_ends_where_it_began(scenes: Scenes) -> None:
    poses = draw_paths(scenes, FRAMES, 3, "look_back")
    assert torch.equal(poses[:, -1], poses[:, 0])
    away = poses[..., 2, 2].clamp(-1, 1).acos().rad2deg().amax(1)
    assert away.min() > 35
    assert away.max() <= 120.001


def test_orbits_look_at_one_point(scenes: Scenes) -> None:
    poses = draw_paths(scenes, FRAMES, 3, "orbit")
    forward, position = poses[..., :3, 2], poses[..., :3, 3]
    radius = (position[:, -1] - position[:, 0]).square().sum(-1) / (2 * position[:, -1, 2])
    target = torch.stack([torch.zeros(32), torch.zeros(32), radius], dim=-1)[:, None]
    assert torch.allclose(position + radius[:, None, None] * forward, target.expand_as(position), atol=1e-6)


def test_wandering_stays_near_and_looks_around() -> None:
    poses = draw_paths(draw_scenes(8, 0), 961, 3, "wander")
    assert poses[..., :3, 3].norm(dim=-1).max() < 2.5
    seen = torch.atan2(poses[..., 0, 2], poses[..., 2, 2])
    assert ((seen.amax(1) - seen.amin(1)) > math.pi / 2).all()


def test_nothing_stands_in_a_cleared_path(scenes: Scenes) -> None:
    poses = draw_paths(scenes, FRAMES, 5)
    cleared = clear_path(scenes, poses, margin=0.3)
    assert 0.4 < cleared.active.sum() / scenes.active.sum() < 1
    assert not (cleared.active & ~scenes.active).any()
    where = scenes.start[:, None, :3, 3] + poses[..., :3, 3].float()
    centre, half = cleared.shape[:, :SLOTS, :3], cleared.shape[:, :SLOTS, 3:6]
    apart = (where[:, :, None] - centre[:, None]).norm(dim=-1).amin(1)
    assert (apart > half.amin(-1) + 0.25)[cleared.active].all()
    torch.testing.assert_close(clear_path(cleared, poses, margin=0.3).active, cleared.active)


def test_objects_go_as_a_whole(scenes: Scenes) -> None:
    cleared = clear_path(scenes, draw_paths(scenes, FRAMES, 5))
    for group, before, after in zip(scenes.group, scenes.active, cleared.active, strict=True):
        for number in group[before].unique():
            assert len(after[before & (group == number)].unique()) == 1


def test_intrinsics_are_square_and_centred() -> None:
    lenses = draw_intrinsics(200, 0, 128, 80)
    assert torch.equal(lenses[:, 0], lenses[:, 1])
    assert torch.equal(lenses[:, 2:], torch.tensor([[64.0, 40.0]]).expand(200, 2))
    degrees = 2 * (64 / lenses[:, 0]).atan().rad2deg()
    assert degrees.min() >= 50
    assert degrees.max() <= 75
    usual = (degrees - 60).abs() < 1e-3
    assert 70 < usual.sum() < 130
    assert torch.equal(lenses[20:21], draw_intrinsics(1, 20, 128, 80))
