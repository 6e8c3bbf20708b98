"""RealEstate10K: the video's address, then a line a frame: time in µs, intrinsics, and the world-to-camera 3×4."""

from itertools import dropwhile

import numpy as np

from longtake.server.camera.formats.source import FilePoses, Source
from longtake.server.camera.formats.text import data_lines, increasing_times, read_table, refuse_rows, with_last_row

LAYOUT = "t_us fx fy cx cy k1 k2 r00 r01 r02 tx r10 r11 r12 ty r20 r21 r22 tz"
ADDRESS = b"://"


def read_realestate10k(source: Source) -> FilePoses:
    """Poses with times and with intrinsics as fractions of width and height. Raises `ProblemError`."""
    lines = dropwhile(lambda line: ADDRESS in line.text, data_lines(source))
    values, places = read_table(lines, LAYOUT, source)
    for column, name in ((5, "k1"), (6, "k2")):
        detail = f"{name} is not zero: lens distortion can not be followed"
        refuse_rows(values[:, column] != 0, detail, places, source)
    return FilePoses(
        matrices=with_last_row(values[:, 7:]),
        direction="w2c",
        axes="opencv",
        places=places,
        times=increasing_times(values[:, 0] / 1e6, places, source),
        intrinsics=np.ascontiguousarray(values[:, 1:5]),
        intrinsics_size=(1, 1),
    )
