"""Pinhole intrinsics fx fy cx cy in pixels, and the resize and crop that carry an image to the model's frame."""

import math
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longtake.api_schemas.camera import MAX_POSES
from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.numbers import real_numbers, refuse

DEFAULT_FIELD_OF_VIEW = 60.0
"""Horizontal degrees assumed when a client gives no intrinsics."""

_CODE = "intrinsics_invalid"
_LARGEST = 1e6
_SHORTEST_FOCAL_LENGTH = 1e-3
_USUAL_FIELD_OF_VIEW = (25.0, 120.0)
_USUAL_CENTRE_OFFSET = 0.1
_MOST_CROPPED = 16


@dataclass(frozen=True)
class Crop:
    """How a source image becomes the model's frame: resized as a whole, then cut. All in pixels.

    The frame is `width` × `height`, cut at (`left`, `top`) out of `resized_width` × `resized_height`.
    """

    source_width: int
    source_height: int
    resized_width: int
    resized_height: int
    left: int
    top: int
    width: int
    height: int

    @classmethod
    def fit(cls, source_width: int, source_height: int, width: int, height: int, field: str = "image") -> Self:
        """The smallest resize that covers the frame, cut at its centre.

        Raises:
            ProblemError: `image_invalid` for an image so long and narrow that over 15/16 of it would be cut away.
        """
        scale = max(width / source_width, height / source_height)
        resized_width, resized_height = round(source_width * scale), round(source_height * scale)
        if resized_width * resized_height > _MOST_CROPPED * width * height:
            raise ProblemError("image_invalid", "the image is too long and narrow for the model's frame", field)
        left, top = (resized_width - width) // 2, (resized_height - height) // 2
        return cls(source_width, source_height, resized_width, resized_height, left, top, width, height)

    def intrinsics(self, intrinsics: NDArray[np.float64]) -> NDArray[np.float64]:
        """Intrinsics [..., 4] of the source image as those of the model's frame."""
        source, resized = (self.source_width, self.source_height), (self.resized_width, self.resized_height)
        moved: NDArray[np.float64] = scale_intrinsics(intrinsics, source, resized) - [0.0, 0.0, self.left, self.top]
        return moved


def default_intrinsics(width: int, height: int) -> NDArray[np.float64]:
    """Intrinsics [4] float64 of a centred camera with square pixels and 60° of horizontal view."""
    focal = width / 2 / math.tan(math.radians(DEFAULT_FIELD_OF_VIEW / 2))
    return np.array([focal, focal, width / 2, height / 2])


def check_intrinsics(values: ArrayLike, field: str, limit: int = MAX_POSES) -> NDArray[np.float64]:
    """Intrinsics as a new float64 array [F,4] of fx fy cx cy in pixels.

    Args:
        values: numbers of shape [4] or [F,4], 1 ≤ F ≤ `limit`; not changed.
        field: name of the input, for errors.
        limit: most rows taken.

    Raises:
        ProblemError: `intrinsics_invalid` for a wrong shape, numbers that are not finite or beyond 1e6 pixels, and a
            focal length below 1e-3 pixels.
    """
    checked = real_numbers(values, _CODE, field)
    if checked.ndim not in (1, 2) or checked.shape[-1] != 4 or len(checked) == 0:
        raise ProblemError(_CODE, "intrinsics must be fx, fy, cx, cy or a list of at least one such row", field)
    if len(checked) > limit:
        raise ProblemError(_CODE, f"at most {limit} intrinsics are taken at once", field)
    refuse(~np.isfinite(checked).all(axis=-1), _CODE, "every number must be finite", field)
    refuse((checked[..., :2] < _SHORTEST_FOCAL_LENGTH).any(axis=-1), _CODE, "focal lengths must be above zero", field)
    refuse((np.abs(checked) > _LARGEST).any(axis=-1), _CODE, f"no number may be beyond {_LARGEST:.0f} pixels", field)
    return np.atleast_2d(checked)


def scale_intrinsics(
    intrinsics: NDArray[np.float64], from_size: tuple[int, int], to_size: tuple[int, int]
) -> NDArray[np.float64]:
    """Intrinsics [..., 4] of an image of `from_size` (width, height) for the same image at `to_size`."""
    x, y = to_size[0] / from_size[0], to_size[1] / from_size[1]
    scaled: NDArray[np.float64] = intrinsics * np.array([x, y, x, y])
    return scaled


def intrinsics_warnings(intrinsics: NDArray[np.float64], width: int, height: int) -> list[str]:
    """What is unusual about intrinsics [F,4] of a width × height image, as when they belong to another resolution.

    Warns of a principal point over 10 % of the image away from its centre and of a field of view outside 25°…120°.
    """
    size = np.array([width, height])
    offset = np.abs(intrinsics[:, 2:] / size - 0.5).max()
    view = np.degrees(2 * np.arctan(size / 2 / intrinsics[:, :2]))
    narrowest, widest = _USUAL_FIELD_OF_VIEW
    warnings = []
    if offset > _USUAL_CENTRE_OFFSET:
        warnings.append(
            f"the principal point is {100 * offset:.0f} % of the image away from its centre: check intrinsics_size"
        )
    if view.min() < narrowest or view.max() > widest:
        warnings.append(
            f"the field of view spans {view.min():.0f}° to {view.max():.0f}°, outside {narrowest:g}° to {widest:g}°"
        )
    return warnings
