"""`format: auto`: the few files whose syntax nothing else shares."""

from itertools import islice
from typing import get_args

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import TrajectoryFormat
from longtake.server.camera.formats.arrays import NPY_MAGIC, ZIP_MAGIC
from longtake.server.camera.formats.colmap import IMAGES_HEADER
from longtake.server.camera.formats.realestate10k import ADDRESS, LAYOUT
from longtake.server.camera.formats.source import Source
from longtake.server.camera.formats.text import data_lines, numbers

_UNCERTAIN = f"what it is can not be told for certain: give one of {', '.join(get_args(TrajectoryFormat))}"


def detect(source: Source) -> TrajectoryFormat:
    """The format of a file by its first bytes and lines, never by the motion in it.

    Rows of 8 or 12 numbers stay undecided: TUM and KITTI are not the only ones that write them.

    Raises:
        ProblemError: it is not a zip, an npy, a JSON with transform matrices, a COLMAP list of images with its header
            or RealEstate10K with its 19 columns.
    """
    if source.data.startswith(ZIP_MAGIC):
        return "npz"
    if source.data.startswith(NPY_MAGIC):
        return "npy"
    if source.data.lstrip().startswith(b"{") and b'"transform_matrix"' in source.data:
        return "transforms"
    if source.data[: 64 * 1024].lower().lstrip().startswith(IMAGES_HEADER):
        return "colmap"
    if _has_realestate_columns(source):
        return "realestate10k"
    raise source.option_problem("format", _UNCERTAIN)


def _has_realestate_columns(source: Source) -> bool:
    """Whether the first row, after an address or without one, has 19 numbers."""
    try:
        first = [line.text for line in islice(data_lines(source), 2)]
    except ProblemError:
        return False
    rows = [numbers(text) for text in first if ADDRESS not in text]
    return bool(rows) and rows[0] is not None and len(rows[0]) == len(LAYOUT.split())
