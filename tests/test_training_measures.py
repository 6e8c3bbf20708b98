"""What tells how good generated frames are."""

import math

import pytest
import torch

from longtake.training.measures import NEAREST, colours, known, psnr, registered, sharpness, turned
from longtake.training.paths import clear_path
from longtake.training.render import default_intrinsics, render
from longtake.training.scenes import draw_scenes


def test_psnr_of_known_errors() -> None:
    black = torch.zeros(2, 3, 4, 4, 3, dtype=torch.uint8)
    other = black.clone()
    other[1] = 255
    assert psnr(black, other).tolist() == pytest.approx([60, 0])
    other[1] = 25
    assert float(psnr(black, other)[1]) == pytest.approx(20 * math.log10(255 / 25))


def test_sharpness_and_colours_of_stripes() -> None:
    stripes = torch.zeros(1, 2, 4, 4, 3, dtype=torch.uint8)
    stripes[..., ::2, :] = 100
    assert float(sharpness(stripes)) == 50
    assert colours(stripes)[0, :3].tolist() == [50, 50, 50]
    assert colours(stripes)[0, 3:].tolist() == pytest.approx([50.8, 50.8, 50.8], abs=0.1)


@pytest.mark.parametrize(("yaw", "pitch"), [(0.0, 0.0), (-15.0, 3.0)])
def test_registration_finds_where_a_camera_looked_instead(yaw: float, pitch: float) -> None:
    scenes = draw_scenes(1, 3)
    poses = torch.eye(4, dtype=torch.float64).expand(1, 1, 4, 4)
    scenes = clear_path(scenes, poses)
    lens = default_intrinsics(32, 20).double().expand(1, 4)
    off = torch.tensor([[yaw, pitch]], dtype=torch.float64).deg2rad()
    seen = turned(poses[:, 0], off[:, :1], off[:, 1:])
    frames = render(scenes, seen, lens, 20, 32)[:, 0]
    found = registered(scenes, frames, poses[:, 0], lens)
    assert (found - off).abs().max() < 4 * NEAREST


def test_a_view_is_known_as_far_as_the_first_frame_shows_it() -> None:
    lens = default_intrinsics(32, 20).double().expand(1, 4)
    width = 2 * math.atan(16 / float(lens[0, 0]))
    yaw = torch.tensor([[0.0, width / 2, width, math.pi]], dtype=torch.float64)
    seen = turned(torch.eye(4, dtype=torch.float64)[None], yaw, torch.zeros_like(yaw))[0]
    shares = known(seen, lens.expand(4, 4), 20, 32).tolist()
    assert shares[0] == 1
    assert 0.4 < shares[1] <= 0.5
    assert shares[2:] == [0, 0]
