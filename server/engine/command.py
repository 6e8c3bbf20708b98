"""A request for chunks with its uploads read: what the engine plans from, and what a repeated key must match."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pydantic import BaseModel

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import PostChunks
from longtake.server.camera.trajectory_files import TrajectoryFile, read_trajectory
from longtake.server.model.world import Frames, ModelSpec
from longtake.server.video.clips import ClipLimits, read_clip


@dataclass(frozen=True)
class Uploads:
    """Files of a multipart request: a trajectory with the cameras that COLMAP keeps apart, and frames to observe."""

    trajectory: bytes | None = None
    cameras: bytes | None = None
    frames: tuple[bytes, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.trajectory is not None or self.cameras is not None or self.frames)

    def parts(self) -> Sequence[bytes]:
        """Every file, in a fixed order; missing ones are empty."""
        return (self.trajectory or b"", self.cameras or b"", *self.frames)


@dataclass(frozen=True)
class Command:
    """A checked request. `clip` [T,H,W,3] has the model's size; with it the request is an observation."""

    request: PostChunks
    fingerprint: str
    trajectory: TrajectoryFile | None = None
    clip: Frames | None = None


def read_command(
    request: PostChunks, uploads: Uploads, spec: ModelSpec, limits: ClipLimits, abandoned: Callable[[], bool]
) -> Command:
    """Read the uploads that belong to a request. Raises `ProblemError` naming the part.

    Blocks while it decodes; gives up once `abandoned` says that nobody waits any more.
    """
    wanted = request.camera is not None and request.camera.trajectory is not None
    if wanted != (uploads.trajectory is not None):
        raise ProblemError("invalid_request", "a trajectory needs camera.trajectory and a file part", "trajectory")
    if uploads.cameras is not None and not wanted:
        raise ProblemError("invalid_request", "cameras belong to a trajectory", "cameras")
    trajectory = None
    if uploads.trajectory is not None:
        assert request.camera is not None
        assert request.camera.trajectory is not None
        options = request.camera.trajectory
        trajectory = read_trajectory(uploads.trajectory, options, "trajectory", uploads.cameras)
    if uploads.frames and (request.camera is None or request.camera.actions is not None):
        raise ProblemError("invalid_request", "observed frames need poses or a trajectory", "camera.actions")
    if request.discard_pending and not uploads.frames:
        raise ProblemError("invalid_request", "only observed frames discard pending poses", "discard_pending")
    clip = read_clip(uploads.frames, spec.width, spec.height, limits, abandoned=abandoned) if uploads.frames else None
    return Command(request, request_fingerprint(request, uploads.parts()), trajectory, clip)


def request_fingerprint(request: BaseModel, files: Sequence[bytes] = ()) -> str:
    """Hash of the parsed parameters and the files' bytes: what a repeated key must match."""
    digest = hashlib.sha256(request.model_dump_json().encode())
    for file in files:
        digest.update(hashlib.sha256(file).digest())
    return digest.hexdigest()
