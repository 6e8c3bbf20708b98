"""nerfstudio's and instant-ngp's `transforms.json`: a camera-to-world matrix a picture, in OpenGL axes.

Pictures are put in the order of their names. The world stays as it is in the file: `applied_transform` and
`applied_scale` are not undone, the path being relative to its first pose anyway.
"""

import math
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from longtake.api_schemas.camera import Pose
from longtake.api_schemas.strict import Finite
from longtake.api_schemas.trajectory import MAX_FILE_POSES
from longtake.server.camera.formats.names import in_order_of_names
from longtake.server.camera.formats.source import FilePoses, Matrix, Source

_Focal = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Side = Annotated[float, Field(gt=0, le=65_536, multiple_of=1)]
_Angle = Annotated[float, Field(gt=0, lt=math.pi)]

_DISTORTION = ("k1", "k2", "k3", "k4", "p1", "p2")
_PINHOLE_MODELS = {"OPENCV", "PINHOLE", "SIMPLE_PINHOLE", "SIMPLE_RADIAL", "RADIAL"}


class _Lens(BaseModel):
    """Camera of all pictures or of one; lengths in pixels, angles in radians."""

    model_config = ConfigDict(strict=True, frozen=True)

    camera_model: str | None = None
    is_fisheye: bool | None = None
    fl_x: _Focal | None = None
    fl_y: _Focal | None = None
    cx: Finite | None = None
    cy: Finite | None = None
    w: _Side | None = None
    h: _Side | None = None
    camera_angle_x: _Angle | None = None
    camera_angle_y: _Angle | None = None
    k1: Finite | None = None
    k2: Finite | None = None
    k3: Finite | None = None
    k4: Finite | None = None
    p1: Finite | None = None
    p2: Finite | None = None


class _Frame(_Lens):
    file_path: Annotated[str, Field(max_length=4096)]
    transform_matrix: Pose


class _Transforms(_Lens):
    frames: Annotated[list[_Frame], FailFast(), Field(min_length=1, max_length=MAX_FILE_POSES)]
    applied_scale: Finite | None = None


_LENS_FIELDS = set(_Lens.model_fields)


def read_transforms(source: Source) -> FilePoses:
    """Poses in the order of file names, with the intrinsics that the file gives in pixels or as angles.

    Raises:
        ProblemError: it is not such a file, two pictures have the same name, or the lens is distorted or a fisheye.
    """
    file = _parse(source)
    order = in_order_of_names([frame.file_path for frame in file.frames], source)
    places = [f"frames[{row}]" for row in order]
    lenses = _lenses(file, order)
    distortion = _distortion(lenses, places, source)
    intrinsics, size, notes = _intrinsics(lenses, places, source)
    if file.applied_scale not in (None, 1.0):
        notes.append("applied_scale is not undone: give `scale` for lengths in metres")
    return FilePoses(
        matrices=np.array([file.frames[row].transform_matrix for row in order]),
        direction="c2w",
        axes="opengl",
        places=places,
        times=source.even_times(len(order)),
        intrinsics=intrinsics,
        intrinsics_size=size,
        by_name=True,
        warnings=(*distortion, *notes),
    )


def _parse(source: Source) -> _Transforms:
    try:
        return _Transforms.model_validate_json(source.data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        raise source.problem(first["msg"], place.lstrip(".") or None) from None


def _lenses(file: _Transforms, order: list[int]) -> list[_Lens]:
    """The camera of each picture: its own fields over those of the file."""
    fields = file.model_dump(include=_LENS_FIELDS)
    shared = _Lens.model_validate(fields)

    def lens(frame: _Frame) -> _Lens:
        if not frame.model_fields_set & _LENS_FIELDS:
            return shared
        return _Lens.model_validate(fields | frame.model_dump(include=_LENS_FIELDS, exclude_none=True))

    return [lens(file.frames[row]) for row in order]


def _distortion(lenses: list[_Lens], places: list[str], source: Source) -> list[str]:
    """A warning if distortion is left out as the client wants."""
    left_out: set[str] = set()
    for lens, place in zip(lenses, places, strict=True):
        if lens.is_fisheye or (lens.camera_model or "PINHOLE") not in _PINHOLE_MODELS:
            raise source.problem("its camera model is not a pinhole camera", place)
        coefficients = (lens.k1, lens.k2, lens.k3, lens.k4, lens.p1, lens.p2)
        bent = [name for name, value in zip(_DISTORTION, coefficients, strict=True) if value]
        if bent and not source.options.ignore_distortion:
            detail = f"{bent[0]} is not zero: undistort the pictures or give ignore_distortion"
            raise source.problem(detail, place)
        left_out.update(bent)
    return [f"lens distortion ({', '.join(sorted(left_out))}) is left out"] if left_out else []


def _intrinsics(
    lenses: list[_Lens], places: list[str], source: Source
) -> tuple[Matrix | None, tuple[int, int] | None, list[str]]:
    """Intrinsics [N,4], the size they belong to, and what is to be said of them."""
    rows = [_pinhole(lens) for lens in lenses]
    for row, lens, place in zip(rows, lenses, places, strict=True):
        if (row is None) != (rows[0] is None):
            raise source.problem("intrinsics must be given for all frames or none", place)
        if _basis(lens) != _basis(lenses[0]):
            raise source.problem("w and h must be the same for all frames, and angles alone for all or none", place)
    given = [row for row in rows if row is not None]
    if not given:
        incomplete = lenses[0].fl_x is not None or lenses[0].camera_angle_x is not None
        note = "its intrinsics are not used: without w and h they say too little"
        return None, None, [note] if incomplete else []
    width, height, by_angles = _basis(lenses[0])
    if by_angles:
        return np.array(given), (1, 1), []
    return np.array(given), None if width is None or height is None else (int(width), int(height)), []


def _pinhole(lens: _Lens) -> tuple[float, float, float, float] | None:
    """Intrinsics fx fy cx cy in pixels, or as fractions of the size if only angles are known; None if too little is.

    f = size / 2 / tan(angle / 2); pixels are square unless said otherwise, and the centre is that of the picture.
    """
    width, height, by_angles = _basis(lens)
    if by_angles:
        width, height = 1.0, 1.0
    fx = lens.fl_x or _focal(width, lens.camera_angle_x)
    fy = lens.fl_y or _focal(height, lens.camera_angle_y) or fx
    cx = lens.cx if lens.cx is not None or width is None else width / 2
    cy = lens.cy if lens.cy is not None or height is None else height / 2
    if fx is None or fy is None or cx is None or cy is None:
        return None
    return fx, fy, cx, cy


def _basis(lens: _Lens) -> tuple[float | None, float | None, bool]:
    """Width, height, and whether both angles are all that is known."""
    angles = lens.camera_angle_x is not None and lens.camera_angle_y is not None
    lengths = (lens.fl_x, lens.fl_y, lens.cx, lens.cy)
    by_angles = angles and None in (lens.w, lens.h) and all(length is None for length in lengths)
    return lens.w, lens.h, by_angles


def _focal(side: float | None, angle: float | None) -> float | None:
    return None if side is None or angle is None else side / 2 / math.tan(angle / 2)
