"""Trajectory files as clients send them, and what a server understood of one."""

from typing import Literal

from pydantic import BaseModel, Field

from longtake.api_schemas.strict import Finite, RequestModel, Whole

Convention = Literal["opencv", "opengl"]
"""Camera axes: opencv = x right, y down, z forward; opengl = x right, y up, z backward."""

MAX_FILE_BYTES = 16 * 1024 * 1024
"""Size of a trajectory file at most."""

MAX_FILE_POSES = 65_536
"""Poses a file may hold, and frames it may give at 16 fps: over an hour."""

TrajectoryFormat = Literal["npy", "npz", "realestate10k", "tum", "kitti", "transforms", "colmap"]
"""Syntax of a trajectory file, which settles direction, axes, units and times as `docs/trajectories.md` lists them."""

FormatChoice = Literal["auto", TrajectoryFormat]
"""A syntax, or `auto` for those that nothing else looks like."""

Direction = Literal["c2w", "w2c"]
"""What the matrices of a file map: camera to world or world to camera."""


class TrajectoryOptions(RequestModel):
    """How to read a trajectory file."""

    format: FormatChoice = Field(
        "auto", description="Syntax of the file. `auto` takes only those that nothing else looks like."
    )
    start: Whole | None = Field(
        None,
        ge=0,
        le=2**31,
        description="Video frame to begin with, 0 being the file's first; the session's next when left out.",
    )
    frames: Whole | None = Field(
        None,
        ge=1,
        le=4096,
        description="New frames to take from the file; all that are left, up to 4096, when left out.",
    )
    fps: Finite | None = Field(
        None,
        ge=1e-4,
        le=1000,
        description="Poses a second, for files without times. Left out: one pose a video frame (KITTI: 10 a second).",
    )
    scale: Finite | None = Field(None, gt=0, le=1e6, description="Factor from the file's units to metres.")
    convention: Convention | None = Field(None, description="Camera axes, npy and npz only; opencv when left out.")
    ignore_distortion: bool = Field(
        False, description="Leave lens distortion out instead of refusing it, transforms and colmap only."
    )


class ResolvedTrajectory(BaseModel):
    """What was understood of a trajectory file. Lengths are in its units times `scale`."""

    format: TrajectoryFormat
    axes: Convention = Field(description="Camera axes the file was read with.")
    direction: Direction = Field(description="Direction the file was read with.")
    file_poses: int = Field(description="Poses in the file.")
    frames: int = Field(description="Poses at 16 fps, the first one included.")
    duration_s: float = Field(description="Seconds from the first frame to the last.")
    path_length: float = Field(description="Length of the path from frame to frame.")
    max_step: float = Field(description="Longest way from one frame to the next.")
    max_turn_degrees: float = Field(description="Widest turn from one frame to the next.")
    intrinsics: Literal["file", "none"] = Field(description="Whether the file brought intrinsics.")
    warnings: list[str]
