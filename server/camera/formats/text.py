"""Lines and rows of numbers in text files, and the rotations they spell."""

import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from longtake.api_schemas.trajectory import MAX_FILE_POSES
from longtake.server.camera.formats.source import Matrix, Source

MAX_LINE_BYTES = 64 * 1024
MAX_LINES = 4 * MAX_FILE_POSES

_NUMBERS = re.compile(rb"[0-9eE+\-.\s]+")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_QUATERNION_TOLERANCE = 1e-2


class Line(NamedTuple):
    """A line without the white space around it, and its number from 1."""

    number: int
    text: bytes

    @property
    def place(self) -> str:
        """Its name in errors."""
        return f"line {self.number}"


class Table(NamedTuple):
    """Rows of numbers [N,columns] float64, all finite, and where each stands."""

    values: Matrix
    places: list[str]


def all_lines(source: Source, data: bytes | None = None) -> Iterator[Line]:
    """Every line of the file (or of `data`), however it ends and whatever is in it.

    Raises:
        ProblemError: there are more than 262144 lines.
    """
    text = source.data if data is None else data
    for number, line in enumerate(io.BytesIO(text.removeprefix(_BYTE_ORDER_MARK)), start=1):
        if number > MAX_LINES:
            raise source.problem(f"it has more than {MAX_LINES} lines")
        yield Line(number, line.strip())


def data_lines(source: Source, data: bytes | None = None) -> Iterator[Line]:
    """Lines of the file (or of `data`) that are neither blank nor comments (#).

    Raises:
        ProblemError: a line is longer than 64 KiB, or there are more than 262144.
    """
    for line in all_lines(source, data):
        if line.text and not line.text.startswith(b"#"):
            yield within_limit(line, source)


def within_limit(line: Line, source: Source) -> Line:
    """The line itself. Raises `ProblemError` if it is longer than 64 KiB."""
    if len(line.text) > MAX_LINE_BYTES:
        raise source.problem(f"it is longer than {MAX_LINE_BYTES // 1024} KiB", line.place)
    return line


def numbers(text: bytes) -> list[float] | None:
    """Numbers parted by white space; None if there is anything else."""
    if not _NUMBERS.fullmatch(text):
        return None
    try:
        return [float(word) for word in text.split()]
    except ValueError:
        return None


def read_table(lines: Iterable[Line], layout: str, source: Source) -> Table:
    """Rows of as many numbers as `layout` has words.

    Raises:
        ProblemError: a line is something else, there are no lines or more than 65536, or a number overflows.
    """
    columns = len(layout.split())
    rows, places = [], []
    for line in lines:
        row = numbers(line.text)
        if row is None or len(row) != columns:
            raise source.problem(f"it must hold {columns} numbers: {layout}", line.place)
        rows.append(row)
        places.append(line.place)
        if len(rows) > MAX_FILE_POSES:
            raise source.problem(f"it holds more than {MAX_FILE_POSES} poses")
    if not rows:
        raise source.problem("it holds no poses")
    values = np.array(rows)
    refuse_rows(~np.isfinite(values).all(axis=1), "every number must be finite", places, source)
    return Table(values, places)


def refuse_rows(bad: NDArray[np.bool_], detail: str, places: Sequence[str], source: Source) -> None:
    """Raise `ProblemError` at the first row whose flag of `bad` [N] is set."""
    if bad.any():
        raise source.problem(detail, places[int(bad.argmax())])


def increasing_times(times: Matrix, places: Sequence[str], source: Source) -> Matrix:
    """Times [N] counted from the first. Raises `ProblemError` where one is not after the one before."""
    seconds: Matrix = times - times[0]
    late = np.concatenate([[True], np.diff(seconds) > 0])
    refuse_rows(~late, "its time must be after the one before", places, source)
    return seconds


def quaternion_rotations(quaternions: Matrix, places: Sequence[str], source: Source) -> Matrix:
    """Rotations [N,3,3] of quaternions [N,4] with w last, renormalised.

    Raises:
        ProblemError: a norm is further than 1e-2 from 1.
    """
    norms = np.linalg.norm(quaternions, axis=1)
    detail = "its quaternion must have the length 1"
    refuse_rows(np.abs(norms - 1) > _QUATERNION_TOLERANCE, detail, places, source)
    matrices: Matrix = Rotation.from_quat(quaternions).as_matrix()
    return matrices


def rigid(rotations: Matrix, translations: Matrix) -> Matrix:
    """Matrices [N,4,4] from [N,3,3] and [N,3]."""
    matrices = np.zeros((len(rotations), 4, 4))
    matrices[:, :3, :3], matrices[:, :3, 3], matrices[:, 3, 3] = rotations, translations, 1.0
    return matrices


def with_last_row(upper: Matrix) -> Matrix:
    """Matrices [N,4,4] from the upper 3×4 given row by row, [N,12]."""
    rows = upper.reshape(-1, 3, 4)
    return rigid(rows[:, :, :3], rows[:, :, 3])
