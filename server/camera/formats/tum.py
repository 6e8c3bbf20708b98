"""TUM RGB-D: a line a pose, time in seconds, position, and quaternion with w last."""

from longtake.server.camera.formats.source import FilePoses, Source
from longtake.server.camera.formats.text import data_lines, increasing_times, quaternion_rotations, read_table, rigid

LAYOUT = "t tx ty tz qx qy qz qw"


def read_tum(source: Source) -> FilePoses:
    """Camera-to-world poses of the optical frame, with times. Raises `ProblemError`."""
    values, places = read_table(data_lines(source), LAYOUT, source)
    return FilePoses(
        matrices=rigid(quaternion_rotations(values[:, 4:], places, source), values[:, 1:4]),
        direction="c2w",
        axes="opencv",
        places=places,
        times=increasing_times(values[:, 0], places, source),
    )
