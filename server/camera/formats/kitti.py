"""KITTI odometry: a line a pose, the camera-to-world 3×4 row by row, ten a second."""

from longtake.server.camera.formats.source import FilePoses, Source
from longtake.server.camera.formats.text import data_lines, read_table, with_last_row

LAYOUT = "r00 r01 r02 tx r10 r11 r12 ty r20 r21 r22 tz"
KITTI_FPS = 10.0


def read_kitti(source: Source) -> FilePoses:
    """Poses of the left grey camera, spaced evenly. Raises `ProblemError`."""
    values, places = read_table(data_lines(source), LAYOUT, source)
    assumed = source.options.fps is None
    return FilePoses(
        matrices=with_last_row(values),
        direction="c2w",
        axes="opencv",
        places=places,
        times=source.even_times(len(values), KITTI_FPS),
        warnings=(f"the file has no times: {KITTI_FPS:g} poses a second are assumed",) if assumed else (),
    )
