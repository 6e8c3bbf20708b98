"""COLMAP's text model: two lines a picture in `images.txt`, a camera a line in `cameras.txt`.

An image line is `ID QW QX QY QZ TX TY TZ CAMERA_ID NAME`: world to camera, quaternion with w first. The line after it
lists 2-D points and is often blank, so that blank lines count. Pictures are put in the order of their names.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longtake.api_schemas.trajectory import MAX_FILE_POSES
from longtake.server.camera.formats.names import in_order_of_names
from longtake.server.camera.formats.source import FilePoses, Source
from longtake.server.camera.formats.text import (
    Line,
    all_lines,
    data_lines,
    numbers,
    quaternion_rotations,
    refuse_rows,
    rigid,
    within_limit,
)

IMAGES_HEADER = b"# image list with two lines of data per image"

_LAYOUT = "IMAGE_ID QW QX QY QZ TX TY TZ CAMERA_ID NAME"
_CAMERA_LAYOUT = "CAMERA_ID MODEL WIDTH HEIGHT and the parameters of a pinhole model"
_PARAMETERS = {
    b"SIMPLE_PINHOLE": "f cx cy",
    b"PINHOLE": "fx fy cx cy",
    b"SIMPLE_RADIAL": "f cx cy k",
    b"RADIAL": "f cx cy k1 k2",
    b"OPENCV": "fx fy cx cy k1 k2 p1 p2",
    b"FULL_OPENCV": "fx fy cx cy k1 k2 p1 p2 k3 k4 k5 k6",
}
_INTRINSICS = ("f", "fx", "fy", "cx", "cy")
_MAX_SIDE = 65_536


class _Image(NamedTuple):
    place: str
    quaternion: list[float]
    translation: list[float]
    camera: int
    name: str


@dataclass(frozen=True)
class _Camera:
    size: tuple[int, int]
    intrinsics: tuple[float, float, float, float]
    distortion: tuple[str, ...]


def read_colmap(source: Source) -> FilePoses:
    """Poses in the order of names, with intrinsics in pixels if there is a `cameras.txt`.

    Raises:
        ProblemError: a line is not as above, two pictures have the same name, a camera is missing, distorted or of
            another model, or cameras differ in size.
    """
    images = _read_images(source)
    order = in_order_of_names([image.name for image in images], source)
    images = [images[row] for row in order]
    places = [image.place for image in images]
    quaternions = np.array([image.quaternion for image in images])[:, [1, 2, 3, 0]]
    translations = np.array([image.translation for image in images])
    finite = np.isfinite(quaternions).all(axis=1) & np.isfinite(translations).all(axis=1)
    refuse_rows(~finite, "every number must be finite", places, source)
    cameras = None if source.cameras is None else _used_cameras(images, _read_cameras(source, source.cameras), source)
    return FilePoses(
        matrices=rigid(quaternion_rotations(quaternions, places, source), translations),
        direction="w2c",
        axes="opencv",
        places=places,
        times=source.even_times(len(images)),
        intrinsics=None if cameras is None else np.array([camera.intrinsics for camera in cameras]),
        intrinsics_size=None if cameras is None else cameras[0].size,
        by_name=True,
        warnings=() if cameras is None else _warnings(cameras),
    )


def _read_images(source: Source) -> list[_Image]:
    images = []
    lines = all_lines(source)
    for line in lines:
        if not line.text or line.text.startswith(b"#"):
            continue
        images.append(_read_image(within_limit(line, source), source))
        _skip_points(lines, source)
        if len(images) > MAX_FILE_POSES:
            raise source.problem(f"it holds more than {MAX_FILE_POSES} poses")
    if not images:
        raise source.problem("it holds no poses")
    return images


def _read_image(line: Line, source: Source) -> _Image:
    words = line.text.split(maxsplit=9)
    values = numbers(b" ".join(words[1:8]))
    camera = _whole(words[8]) if len(words) == 10 else None
    if values is None or camera is None or _whole(words[0]) is None:
        raise source.problem(f"it must hold {_LAYOUT}", line.place)
    name = words[9].decode("utf-8", "surrogateescape")
    return _Image(line.place, values[:4], values[4:], camera, name)


def _skip_points(lines: Iterator[Line], source: Source) -> None:
    """Pass over the line of 2-D points: X Y POINT3D_ID, any number of times. It is as long as it likes."""
    line = next(lines, None)
    if line is None or not line.text:
        return
    words = line.text.split()
    if len(words) % 3 or numbers(b" ".join(words[:3])) is None:
        detail = "the line after an image must hold its 2-D points, X Y POINT3D_ID, or be blank"
        raise source.problem(detail, line.place)


def _read_cameras(source: Source, data: bytes) -> dict[int, _Camera]:
    cameras: dict[int, _Camera] = {}
    for line in data_lines(source, data):
        words = line.text.split()
        place = f"cameras.txt, {line.place}"
        number = _whole(words[0])
        if number is None or number in cameras or len(words) < 4:
            raise source.problem(f"it must hold {_CAMERA_LAYOUT}, each camera once", place)
        cameras[number] = _read_camera(words[1:], source, place)
    return cameras


def _read_camera(words: list[bytes], source: Source, place: str) -> _Camera:
    """The camera of MODEL WIDTH HEIGHT and its parameters."""
    names = _PARAMETERS.get(words[0], "").split()
    width, height, values = _whole(words[1]), _whole(words[2]), numbers(b" ".join(words[3:]))
    if not names or values is None or len(values) != len(names):
        raise source.problem(f"it must hold {_CAMERA_LAYOUT}, each camera once", place)
    if not (width and height and max(width, height) <= _MAX_SIDE):
        raise source.problem(f"its sides must be 1 to {_MAX_SIDE} pixels", place)
    parameters = dict(zip(names, values, strict=True))
    bent = tuple(name for name, value in parameters.items() if name not in _INTRINSICS and value != 0)
    if bent and not source.options.ignore_distortion:
        raise source.problem(f"{bent[0]} is not zero: undistort the pictures or give ignore_distortion", place)
    focal = parameters.get("f", 0.0)
    fx, fy = parameters.get("fx", focal), parameters.get("fy", focal)
    return _Camera((width, height), (fx, fy, parameters["cx"], parameters["cy"]), bent)


def _used_cameras(images: list[_Image], cameras: dict[int, _Camera], source: Source) -> list[_Camera]:
    """The camera of each image."""
    for image in images:
        if image.camera not in cameras:
            raise source.problem("its camera is not in cameras.txt", image.place)
        if cameras[image.camera].size != cameras[images[0].camera].size:
            raise source.problem("all pictures must have the same size", image.place)
    return [cameras[image.camera] for image in images]


def _warnings(cameras: list[_Camera]) -> tuple[str, ...]:
    names = sorted({name for camera in cameras for name in camera.distortion})
    return (f"lens distortion ({', '.join(names)}) is left out",) if names else ()


def _whole(word: bytes) -> int | None:
    """A number of at most nine digits; None for anything else."""
    return int(word) if word.isdigit() and len(word) < 10 else None
