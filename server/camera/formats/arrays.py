"""Arrays of numpy: `.npy` with c2w [F,4,4]; `.npz` of SANA-WM (c2w, intrinsics, fps) or of ViPE (data, inds)."""

import io
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from math import prod
from typing import IO

import numpy as np

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import MAX_FILE_POSES
from longtake.server.camera.formats.source import FilePoses, Matrix, Source
from longtake.server.camera.formats.text import increasing_times
from longtake.server.camera.resample import FPS

NPY_MAGIC = b"\x93NUMPY"
ZIP_MAGIC = b"PK\x03\x04"
MAX_FPS = 1000.0

_HEADER = re.compile(
    rb"\{\s*'descr'\s*:\s*'([<>|=](?:f[248]|[iu][1248]))'\s*,"
    rb"\s*'fortran_order'\s*:\s*(True|False)\s*,"
    rb"\s*'shape'\s*:\s*\(\s*((?:[0-9]{1,9}\s*,\s*)*(?:[0-9]{1,9})?)\s*\)\s*,?\s*\}\s*"
)
_LENGTH_BYTES = {NPY_MAGIC + b"\x01\x00": 2, NPY_MAGIC + b"\x02\x00": 4}
_MAX_HEADER_BYTES = 4096
_MAX_MEMBERS = 64
_MEMBER_MAGIC = b"PK\x01\x02"
# all that zipfile raises for damaged or encrypted archives
_UNREADABLE_ZIP = (zipfile.BadZipFile, zlib.error, struct.error, RuntimeError, OSError, ValueError, EOFError)

Shape = tuple[int, ...]
_POSES_WANTED = f"[F,4,4] with 1 to {MAX_FILE_POSES} poses"


def read_npy(
    file: IO[bytes], fits: Callable[[Shape], bool], wanted: str, problem: Callable[[str], ProblemError]
) -> Matrix:
    """One array of numbers, as float64. Type and shape are settled before any data is read; nothing is unpickled.

    Args:
        file: a `.npy` file of format version 1 or 2, read to its end.
        fits: whether a shape is the wanted one.
        wanted: the wanted shape in words.
        problem: makes the error that is raised.

    Raises:
        ProblemError: the file is something else, cut short or too long, or the shape does not fit.
    """
    not_npy = problem("it is not a complete .npy file of numbers")
    length_bytes = _LENGTH_BYTES.get(file.read(8))
    if length_bytes is None:
        raise not_npy
    length = int.from_bytes(file.read(length_bytes), "little")
    header = _HEADER.fullmatch(file.read(length)) if length <= _MAX_HEADER_BYTES else None
    if header is None:
        raise not_npy
    dtype, fortran_order = np.dtype(header[1].decode()), header[2] == b"True"
    shape = tuple(int(side) for side in header[3].split(b",") if side.strip())
    if not fits(shape):
        raise problem(f"its array must have the shape {wanted}")
    size = prod(shape) * dtype.itemsize
    data = file.read(size + 1)
    if len(data) != size:
        raise not_npy
    array = np.frombuffer(data, dtype).reshape(shape, order="F" if fortran_order else "C")
    with np.errstate(invalid="ignore"):
        return array.astype(np.float64)


def read_matrices(file: IO[bytes], problem: Callable[[str], ProblemError]) -> Matrix:
    """Matrices [F,4,4] float64 of a `.npy` file, 1 ≤ F ≤ 65536. Raises `ProblemError`."""
    return read_npy(file, _are_poses, _POSES_WANTED, problem)


def read_npy_poses(source: Source) -> FilePoses:
    """Camera-to-world poses of a `.npy` file. Raises `ProblemError`."""
    matrices = read_matrices(io.BytesIO(source.data), source.problem)
    return _file_poses(source, matrices, "array", source.even_times(len(matrices)))


def read_npz_poses(source: Source) -> FilePoses:
    """Camera-to-world poses of a `.npz` file: `c2w` with optional `intrinsics` and `fps`, or `data` with `inds`.

    Raises:
        ProblemError: it is no such file, or one of its arrays is not what the name says.
    """
    if source.data.count(_MEMBER_MAGIC) > _MAX_MEMBERS:
        raise source.problem(f"it holds more than {_MAX_MEMBERS} arrays")
    try:
        with zipfile.ZipFile(io.BytesIO(source.data)) as archive:
            names = set(archive.namelist())
            if "c2w.npy" in names:
                return _read_sana(source, archive, names)
            if {"data.npy", "inds.npy"} <= names:
                return _read_vipe(source, archive)
    except _UNREADABLE_ZIP:
        raise source.problem("it is not a complete .npz file") from None
    raise source.problem("it holds neither c2w (SANA-WM) nor data and inds (ViPE)")


def _read_sana(source: Source, archive: zipfile.ZipFile, names: set[str]) -> FilePoses:
    """SANA-WM's export: `c2w` [F,4,4], `intrinsics` [4], [3,3], [F,4] or [F,3,3] in pixels, `fps` a number."""
    matrices = _member(source, archive, "c2w", _are_poses, _POSES_WANTED)
    count = len(matrices)
    if "fps.npy" not in names:
        times = source.even_times(count)
    elif source.options.fps is not None:
        raise source.option_problem("fps", "the file has its own")
    else:
        times = _times_at(
            source, count, _member(source, archive, "fps", lambda shape: shape in ((), (1,)), "[]").item()
        )
    intrinsics = None
    if "intrinsics.npy" in names:
        shapes: tuple[Shape, ...] = ((4,), (3, 3), (count, 4), (count, 3, 3))
        wanted = "[4], [3,3], [F,4] or [F,3,3], with F as in c2w"
        values = _member(source, archive, "intrinsics", lambda shape: shape in shapes, wanted)
        intrinsics = np.broadcast_to(_pinhole(source, values), (count, 4)).copy()
    return _file_poses(source, matrices, "c2w", times, intrinsics)


def _read_vipe(source: Source, archive: zipfile.ZipFile) -> FilePoses:
    """ViPE's poses: `data` [N,4,4] at the video frames `inds` [N], which may have gaps."""
    matrices = _member(source, archive, "data", _are_poses, _POSES_WANTED)
    count = len(matrices)
    frames = _member(source, archive, "inds", lambda shape: shape == (count,), "[F], with F as in data")
    if not np.isfinite(frames).all():
        raise source.problem("every number must be finite", "inds")
    elapsed = increasing_times(frames, [f"inds[{row}]" for row in range(count)], source)
    if source.options.fps in (None, FPS) and np.array_equal(elapsed, np.arange(count)):
        return _file_poses(source, matrices, "data", None)
    return _file_poses(source, matrices, "data", elapsed / (source.options.fps or FPS))


def _member(source: Source, archive: zipfile.ZipFile, name: str, fits: Callable[[Shape], bool], wanted: str) -> Matrix:
    """One array of the archive, read no further than its announced size."""
    info = archive.getinfo(f"{name}.npy")
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        raise source.problem("its compression is not deflate", name)
    with archive.open(info) as file:
        return read_npy(file, fits, wanted, lambda detail: source.problem(detail, name))


def _times_at(source: Source, count: int, fps: float) -> Matrix | None:
    """Seconds [count] at a rate the file names."""
    if not 0 < fps <= MAX_FPS:
        raise source.problem(f"it must be above 0 and at most {MAX_FPS:g}", "fps")
    return None if fps == FPS else np.arange(count) / fps


def _pinhole(source: Source, values: Matrix) -> Matrix:
    """Intrinsics fx fy cx cy, [4] or [F,4], of what may be 3×3 matrices, [3,3] or [F,3,3]."""
    if values.shape[-1] == 4:
        return values
    rest = values.copy()
    rest[..., (0, 1, 0, 1), (0, 1, 2, 2)] = 0.0
    if (rest != [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0], [0.0, 0.0, 1.0]]).any():
        raise source.problem("its matrices must be fx 0 cx, 0 fy cy, 0 0 1", "intrinsics")
    return values[..., (0, 1, 0, 1), (0, 1, 2, 2)]


def _are_poses(shape: Shape) -> bool:
    return len(shape) == 3 and shape[1:] == (4, 4) and 0 < shape[0] <= MAX_FILE_POSES


def _file_poses(
    source: Source, matrices: Matrix, name: str, times: Matrix | None, intrinsics: Matrix | None = None
) -> FilePoses:
    return FilePoses(
        matrices=matrices,
        direction="c2w",
        axes=source.options.convention or "opencv",
        places=[f"{name}[{row}]" for row in range(len(matrices))],
        times=times,
        intrinsics=intrinsics,
    )
