"""What a reader is given and what it gives back."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.trajectory import Convention, Direction, TrajectoryOptions
from longtake.server.camera.resample import FPS

Matrix = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Source:
    """A file and how to read it.

    Attributes:
        data: content of the file.
        options: what the client said of it.
        field: name of the input, for errors.
        cameras: content of COLMAP's cameras.txt.
    """

    data: bytes
    options: TrajectoryOptions
    field: str = "trajectory"
    cameras: bytes | None = None

    def problem(self, detail: str, place: str | None = None) -> ProblemError:
        """The error `trajectory_invalid`, at a place of the file such as `line 7`."""
        return ProblemError("trajectory_invalid", detail if place is None else f"{place}: {detail}", self.field)

    def option_problem(self, option: str, detail: str) -> ProblemError:
        """The error `trajectory_invalid` of an option."""
        return ProblemError("trajectory_invalid", detail, f"{self.field}.{option}")

    def even_times(self, count: int, default_fps: float = FPS) -> Matrix | None:
        """Seconds [count] of poses in a file without times; None if they are one a video frame."""
        fps = default_fps if self.options.fps is None else self.options.fps
        return None if fps == FPS else np.arange(count) / fps


@dataclass(frozen=True, eq=False)
class FilePoses:
    """Poses as they stand in a file, not yet checked to be rigid.

    Attributes:
        matrices: [N,4,4] float64.
        direction: what the matrices map.
        axes: camera axes of the matrices.
        places: where each pose stands, for errors.
        times: [N] float64 seconds, finite and increasing; None for one pose a video frame.
        intrinsics: [N,4] float64 fx fy cx cy in pixels of `intrinsics_size`.
        intrinsics_size: width and height the intrinsics belong to, (1, 1) for fractions of them; None when unknown.
        by_name: the order is that of file names, which may be no path at all.
        warnings: what the client should know.
    """

    matrices: Matrix
    direction: Direction
    axes: Convention
    places: Sequence[str]
    times: Matrix | None = None
    intrinsics: Matrix | None = None
    intrinsics_size: tuple[int, int] | None = None
    by_name: bool = False
    warnings: tuple[str, ...] = ()
