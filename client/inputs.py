"""What callers give: files, arrays, and the keyword arguments that calls share."""

import base64
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol, TypedDict, runtime_checkable

from longtake.api_schemas.camera import Controls
from longtake.api_schemas.strict import nearest
from longtake.api_schemas.trajectory import Convention, TrajectoryOptions

File = str | os.PathLike[str] | bytes
"""The path of a file, or its bytes."""

Frames = File | Sequence[File]
"""One MP4 or WebM video, or one PNG, JPEG or WebP picture a frame."""


@runtime_checkable
class Array(Protocol):
    """An array of numpy, torch and others."""

    def tolist(self) -> object:
        """The numbers as nested lists."""


Numbers = Array | Sequence[float]
"""fx, fy, cx, cy."""

Matrix = Array | Sequence[Numbers]
"""Camera-to-world matrix [4,4]."""


class Beginning(TypedDict, total=False):
    """How a session begins, besides its first frame; None is as good as left out.

    `prompt`; `model`: an id from `models()`; `seed`: drawn by the server when left out; `intrinsics`: fx, fy, cx, cy in
    pixels of the image or of `intrinsics_size` (width, height); `first_pose`: c2w [4,4] in the axes of `convention`;
    `ttl_s`: seconds without a new chunk or pose after which the session goes; `key`: an `Idempotency-Key` of one's own.
    """

    prompt: str
    model: str | None
    seed: int | None
    intrinsics: Numbers | None
    intrinsics_size: tuple[int, int] | None
    first_pose: Matrix | None
    convention: Convention
    ttl_s: int | None
    key: str | None


class Move(TypedDict, total=False):
    """The camera of the new frames, and on what terms; None is as good as left out.

    One of `poses`: c2w [F,4,4] in the world of the session's `first_pose`, in the axes of `convention`; `actions`:
    `keys-frames` such as `w-24,dw-12`, whose keys `controls` gives a meaning; `trajectory`: a file, read as `options`
    say (`cameras`: COLMAP's cameras.txt beside its images.txt). `intrinsics`: [4], or [F,4] for one a frame.

    `prompt` is in force from the next generated chunk on, also without a camera.

    `pad` holds the last pose until the last chunk is whole; `discard_pending` drops waiting poses before frames are
    observed; `expected_chunk` and `expected_frame` refuse a session that stands elsewhere; `key`: an `Idempotency-Key`
    of one's own, so that another process may repeat the request.
    """

    poses: Array | Sequence[Matrix] | None
    actions: str | None
    trajectory: File | None
    options: TrajectoryOptions | None
    cameras: File | None
    convention: Convention
    controls: Controls
    intrinsics: Numbers | Sequence[Numbers] | None
    prompt: str | None
    pad: bool
    discard_pending: bool
    expected_chunk: int | None
    expected_frame: int | None
    key: str | None


def read(file: File) -> bytes:
    """The bytes of a file. Raises `OSError`."""
    return file if isinstance(file, bytes) else Path(file).read_bytes()


def read_all(frames: Frames | None) -> list[bytes]:
    """The bytes of every file. Raises `OSError`."""
    if frames is None:
        return []
    if isinstance(frames, str | os.PathLike | bytes):
        return [read(frames)]
    return [read(file) for file in frames]


def read_image(image: File) -> bytes:
    """The bytes of an image given as a path, as bytes or as a base64 data URL. Raises `OSError`, `ValueError`."""
    if isinstance(image, str) and (found := re.match(r"data:[^,]*;base64,", image)):
        return base64.b64decode(image[found.end() :], validate=True)
    return read(image)


def plain(value: object) -> object:
    """Arrays as the lists that JSON takes, however deep they lie."""
    if isinstance(value, list | tuple):
        return [plain(each) for each in value]
    if value is None or isinstance(value, str | int | float):
        return value
    return value.tolist() if isinstance(value, Array) else value


def require_known(arguments: Iterable[str], kind: type) -> None:
    """Raises `TypeError` for an argument that a TypedDict of them has not."""
    for name in arguments:
        if name not in kind.__annotations__:
            near = nearest(name, kind.__annotations__)
            raise TypeError(f"unexpected keyword argument {name!r}" + (f"; did you mean {near!r}?" if near else ""))


def given(values: Iterable[tuple[str, object]], names: frozenset[str]) -> dict[str, object]:
    """Those of `names` that were given, as JSON takes them."""
    return {name: plain(value) for name, value in values if name in names and value is not None}
