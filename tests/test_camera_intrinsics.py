"""Intrinsics: defaults, refusals, and the way from the uploaded image to the model's frame."""

import json
from pathlib import Path

import numpy as np
import pytest

from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.intrinsics import (
    Crop,
    check_intrinsics,
    default_intrinsics,
    intrinsics_warnings,
    scale_intrinsics,
)

CROPS = json.loads((Path(__file__).parent / "data" / "golden" / "camera.json").read_text())["resize_crop"]
GOOD = [500.0, 510.0, 320.0, 240.0]


@pytest.mark.parametrize("case", CROPS, ids=lambda case: "x".join(map(str, case["source_wh"])))
def test_golden_resize_and_crop(case: dict[str, list[float]]) -> None:
    crop = Crop.fit(*map(int, case["source_wh"]), 1280, 704)
    assert [crop.resized_width, crop.resized_height] == case["resized_wh"]
    assert [crop.left, crop.top] == case["crop_left_top"]
    cropped = crop.intrinsics(np.array(case["K_source"]))
    assert np.allclose(cropped, case["K_cropped"], rtol=2e-7, atol=0)
    assert np.allclose(cropped / 32, case["K_latent"], rtol=2e-7, atol=0)


@pytest.mark.parametrize("size", [(1, 1), (7, 5), (333, 1000), (4999, 4001)])
def test_crop_lies_inside_the_resized_image(size: tuple[int, int]) -> None:
    crop = Crop.fit(*size, 192, 128)
    assert 0 <= crop.left <= crop.resized_width - 192
    assert 0 <= crop.top <= crop.resized_height - 128
    assert crop.resized_width == 192 or crop.resized_height == 128


@pytest.mark.parametrize("size", [(8192, 1), (1, 8192), (8192, 200)])
def test_image_far_too_narrow_is_refused_by_name(size: tuple[int, int]) -> None:
    with pytest.raises(ProblemError) as error:
        Crop.fit(*size, 1280, 704, "first_frame")
    assert (error.value.code, error.value.field) == ("image_invalid", "first_frame")


def test_default_sees_sixty_degrees() -> None:
    fx, fy, cx, cy = default_intrinsics(1690, 928)
    assert np.degrees(2 * np.arctan(1690 / 2 / fx)) == pytest.approx(60.0, abs=1e-12)
    assert (fy, cx, cy) == (fx, 845.0, 464.0)


def test_one_row_and_many_become_rows() -> None:
    assert check_intrinsics(GOOD, "k").tolist() == [GOOD]
    assert check_intrinsics([GOOD] * 3, "k").tolist() == [GOOD] * 3
    assert check_intrinsics(np.float32([GOOD] * 4), "k").dtype == np.float64


@pytest.mark.parametrize(
    ("values", "field"),
    [
        pytest.param([0.0, 500, 320, 240], "camera.intrinsics", id="zero-fx"),
        pytest.param([500.0, -1, 320, 240], "camera.intrinsics", id="negative-fy"),
        pytest.param([np.nan, 500, 320, 240], "camera.intrinsics", id="nan"),
        pytest.param([500, 500, 320, np.inf], "camera.intrinsics", id="infinite"),
        pytest.param([500, 500, -2e6, 240], "camera.intrinsics", id="absurd"),
        pytest.param([GOOD, GOOD, [500, 0, 320, 240]], "camera.intrinsics[2]", id="zero-fy-in-a-row"),
        pytest.param([GOOD, [1, 2, np.nan, 4]], "camera.intrinsics[1]", id="nan-in-a-row"),
        pytest.param(GOOD[:3], "camera.intrinsics", id="three"),
        pytest.param(np.eye(3), "camera.intrinsics", id="3x3"),
        pytest.param([], "camera.intrinsics", id="empty"),
        pytest.param(np.zeros((0, 4)), "camera.intrinsics", id="no-rows"),
        pytest.param(np.ones((2, 3, 4)), "camera.intrinsics", id="three-axes"),
        pytest.param([GOOD, GOOD[:2]], "camera.intrinsics", id="ragged"),
        pytest.param(5.0, "camera.intrinsics", id="scalar"),
        pytest.param(["a", "b", "c", "d"], "camera.intrinsics", id="text"),
        pytest.param([GOOD] * 4097, "camera.intrinsics", id="too-many"),
    ],
)
def test_bad_intrinsics_are_refused_by_name(values: object, field: str) -> None:
    with pytest.raises(ProblemError) as error:
        check_intrinsics(values, "camera.intrinsics")  # type: ignore[arg-type]
    assert (error.value.code, error.value.field) == ("intrinsics_invalid", field)


def test_scaling_to_another_resolution() -> None:
    scaled = scale_intrinsics(np.array([GOOD, GOOD]), (640, 480), (1280, 720))
    assert scaled.tolist() == [[1000.0, 765.0, 640.0, 360.0]] * 2


@pytest.mark.parametrize(
    ("intrinsics", "words"),
    [
        pytest.param([1108.5, 1108.5, 640.0, 360.0], [], id="usual"),
        pytest.param([502.9, 503.1, 415.8, 239.8], ["principal point"], id="another-resolution"),
        pytest.param([300.0, 700.0, 640.0, 360.0], ["field of view"], id="very-wide"),
        pytest.param([4000.0, 4000.0, 100.0, 360.0], ["principal point", "field of view"], id="narrow-and-off"),
    ],
)
def test_warnings(intrinsics: list[float], words: list[str]) -> None:
    warnings = intrinsics_warnings(np.array([intrinsics, intrinsics]), 1280, 720)
    assert len(warnings) == len(words)
    assert all(word in warning for word, warning in zip(words, warnings, strict=True))
