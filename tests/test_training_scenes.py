"""The scenes that the small model is trained on, and the ray tracer that shows them."""

import dataclasses

import pytest
import torch
from torch import Tensor

from longtake.training.captions import VOCABULARY, caption
from longtake.training.render import default_intrinsics, render
from longtake.training.scenes import GROUND, SLOTS, SPHERES, Scenes, draw_scenes

WIDTH, HEIGHT = 64, 40


def poses_at(positions: list[tuple[float, float, float]]) -> Tensor:
    """Unturned cameras [1,T,4,4]."""
    poses = torch.eye(4, dtype=torch.float64).repeat(1, len(positions), 1, 1)
    poses[0, :, :3, 3] = torch.tensor(positions, dtype=torch.float64)
    return poses


def turned(degrees: float) -> Tensor:
    """A camera [1,1,4,4] turned to the right."""
    angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    pose = torch.eye(4, dtype=torch.float64)
    pose[0, 0] = pose[2, 2] = angle.cos()
    pose[0, 2], pose[2, 0] = angle.sin(), -angle.sin()
    return pose[None, None]


def shot(scenes: Scenes, poses: Tensor) -> Tensor:
    return render(scenes, poses, default_intrinsics(WIDTH, HEIGHT).expand(len(scenes), 4), HEIGHT, WIDTH, samples=1)


def one_ball(x: float, y: float, z: float, radius: float) -> Scenes:
    """A scene with nothing but a red ball at a position relative to the first camera, on plain green ground at noon."""
    scenes = draw_scenes(1, 0)
    ball = SPHERES.start
    shape, paint, active = scenes.shape.clone(), scenes.paint.clone(), torch.zeros_like(scenes.active)
    shape[0, ball, :3] = torch.tensor([x, y, z]) + scenes.start[0, :3, 3]
    shape[0, ball, 3:6] = radius
    paint[0, :, 6:] = torch.tensor([1e4, 1e4, 0, 0, 0, 0, 0])
    paint[0, ball, :6] = torch.tensor([0.9, 0.05, 0.05] * 2)
    paint[0, GROUND, :6] = torch.tensor([0.1, 0.4, 0.1] * 2)
    active[0, ball] = True
    return dataclasses.replace(scenes, shape=shape, paint=paint, active=active)


def middle_of_ball(frame: Tensor) -> tuple[float, float]:
    """Mean (u, v), in pixels, of the pixels [H,W,3] that are much redder than blue."""
    rows, columns = (frame[..., 0].int() - 1.8 * frame[..., 2] > 10).nonzero(as_tuple=True)
    assert len(rows)
    return columns.float().mean().item() + 0.5, rows.float().mean().item() + 0.5


def test_scenes_do_not_depend_on_their_batch() -> None:
    batch, poses = draw_scenes(5, 40), torch.eye(4).expand(5, 2, 4, 4)
    alone = draw_scenes(1, 43)
    for field in dataclasses.fields(Scenes):
        assert torch.equal(getattr(batch, field.name)[3:4], getattr(alone, field.name)), field.name
    assert torch.equal(shot(batch, poses)[3:4], shot(alone, poses[:1]))


def test_seeds_repeat_and_differ() -> None:
    poses = torch.eye(4).expand(12, 1, 4, 4)
    views = shot(draw_scenes(12, 1_000_000), poses)
    assert torch.equal(views, shot(draw_scenes(12, 1_000_000), poses))
    pairs = (views[:, None].float() - views[None].float()).abs().flatten(2).mean(-1)
    assert pairs[~torch.eye(12, dtype=torch.bool)].min() > 3


def test_scenes_have_content_all_around() -> None:
    scenes = draw_scenes(64, 0)
    bearing = torch.atan2(scenes.shape[:, :SLOTS, 0], scenes.shape[:, :SLOTS, 2]).rad2deg()
    ahead = ((bearing.abs() < 35) & scenes.active).sum(1)
    behind = ((bearing.abs() > 90) & scenes.active).sum(1)
    assert ahead.float().mean() > 3
    assert (ahead > 0).all()
    assert (behind > 0).float().mean() > 0.95


@pytest.mark.parametrize("position", [(0.0, 0.0, 3.0), (0.7, 0.2, 3.0), (-0.9, -0.3, 4.0)])
def test_projection(position: tuple[float, float, float]) -> None:
    x, y, z = position
    focal = default_intrinsics(WIDTH, HEIGHT)[0].item()
    u, v = middle_of_ball(shot(one_ball(x, y, z, 0.15), poses_at([(0, 0, 0)]))[0, 0])
    assert u == pytest.approx(WIDTH / 2 + focal * x / z, abs=0.6)
    assert v == pytest.approx(HEIGHT / 2 + focal * y / z, abs=0.6)


def test_cameras_that_move_or_turn_right_see_things_move_left() -> None:
    scenes = one_ball(0.0, 0.0, 3.0, 0.2)
    frames = shot(scenes, poses_at([(0, 0, 0), (0.3, 0, 0), (0, 0, 1)]))[0]
    still, moved = middle_of_ball(frames[0]), middle_of_ball(frames[1])
    focal = default_intrinsics(WIDTH, HEIGHT)[0].item()
    assert moved[0] - still[0] == pytest.approx(-focal * 0.1, abs=0.6)
    rotated = middle_of_ball(shot(scenes, turned(6.0))[0, 0])
    assert rotated[0] - still[0] == pytest.approx(-focal * 0.105, abs=0.6)


def test_points_keep_their_colour_from_another_view() -> None:
    """Each pixel looks at a different point of the ground, so shift the picture by whole pixels: walking by a pixel's
    width at the distance of a row moves that row by one pixel.
    """
    scenes = draw_scenes(16, 7)
    scenes = dataclasses.replace(scenes, active=torch.zeros_like(scenes.active))
    focal, row = default_intrinsics(WIDTH, HEIGHT)[0].item(), 32
    depth = -scenes.start[:, 1, 3].double() * focal / (row + 0.5 - HEIGHT / 2)
    poses = torch.eye(4, dtype=torch.float64).repeat(16, 2, 1, 1)
    poses[:, 1, 0, 3] = 5 * depth / focal
    first, second = shot(scenes, poses)[:, :, row].int().unbind(1)
    assert first.float().std() > 10
    assert (first[:, 5:] - second[:, :-5]).abs().float().mean() < 1.5


def test_intrinsics_may_change_from_frame_to_frame() -> None:
    scenes, poses = draw_scenes(2, 3), torch.eye(4).expand(2, 2, 4, 4)
    lenses = torch.stack([default_intrinsics(WIDTH, HEIGHT), default_intrinsics(WIDTH, HEIGHT, 75)])
    changing = render(scenes, poses, lenses.expand(2, 2, 4), HEIGHT, WIDTH, samples=1)
    wide = render(scenes, poses[:, 1:], lenses[1].expand(2, 4), HEIGHT, WIDTH, samples=1)
    assert torch.equal(changing[:, 1:], wide)
    assert torch.equal(changing[:, :1], shot(scenes, poses[:, :1]))


def test_blocks_do_not_change_the_picture() -> None:
    scenes, poses = draw_scenes(2, 3), torch.eye(4).repeat(2, 6, 1, 1)
    poses[..., 2, 3] = torch.arange(6) * 0.1
    whole = shot(scenes, poses)
    lenses = default_intrinsics(WIDTH, HEIGHT).expand(2, 4)
    assert torch.equal(whole, render(scenes, poses, lenses, HEIGHT, WIDTH, samples=1, block=2))


def test_more_samples_soften_edges_only() -> None:
    scenes, poses = draw_scenes(4, 9), torch.eye(4).expand(4, 1, 4, 4)
    lenses = default_intrinsics(WIDTH, HEIGHT).expand(4, 4)
    one, four = (render(scenes, poses, lenses, HEIGHT, WIDTH, samples=n).float() for n in (1, 4))
    assert 0 < (one - four).abs().mean() < 6


def test_captions_are_short_and_in_the_vocabulary() -> None:
    captions = caption(draw_scenes(300, 0))
    words = [line.split() for line in captions]
    assert max(map(len, words)) <= 16
    assert {word for line in words for word in line} <= set(VOCABULARY)
    assert len(VOCABULARY) <= 64
    assert len(set(captions)) > 200


def test_a_caption_without_objects_names_the_ground() -> None:
    scenes = draw_scenes(1, 0)
    empty = dataclasses.replace(scenes, active=torch.zeros_like(scenes.active))
    assert caption(empty)[0].startswith("on ")
