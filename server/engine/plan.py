"""From a request and the session's cursor to whole chunks: which frames each holds and where it leaves the camera."""

from dataclasses import dataclass, replace

import numpy as np

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CHUNK_FRAMES
from longtake.server.camera.actions import Controller
from longtake.server.camera.poses import pose_warnings
from longtake.server.camera.resample import FPS
from longtake.server.engine.command import Command
from longtake.server.engine.track import NO_POSES, Matrix, SessionCamera, Track, new_track, pending_track
from longtake.server.model.world import Frames
from longtake.state_cache import Cursor, Head, SessionRecord


@dataclass(frozen=True)
class ChunkPlan:
    """One whole chunk of a request; `cursor` is where the session stands once it is committed.

    `controller` is the action controller right after the chunk; that of the cursor stands after poses left pending.
    With `clip` [24,H,W,3] the chunk is observed, else generated. `frames_used` counts the request's new frames up to
    its end.
    """

    poses: Matrix
    intrinsics: Matrix
    cursor: Cursor
    controller: dict[str, float | str | list[float]]
    frames_used: int
    warnings: list[str]
    clip: Frames | None = None


@dataclass(frozen=True)
class Plan:
    """What a request comes to: whole chunks, and the cursor at its end with the poses left over."""

    chunks: list[ChunkPlan]
    cursor: Cursor
    frames_used: int


def pending_count(cursor: Cursor) -> int:
    """Poses that wait for a whole chunk."""
    return len(cursor.poses) // (16 * 8)


def start_cursor(session: SessionRecord) -> Cursor:
    """Before the first request: nothing pending, the controller at frame 0, seed and prompt the session's own."""
    return Cursor(controller=Controller.start().to_dict(), seed=session.seed)


def next_frame(next_chunk: int, pending: int) -> int:
    """Number of the video frame that the next pose belongs to; frame 0 is the uploaded image."""
    return CHUNK_FRAMES * next_chunk + pending + 1


def plan_request(command: Command, head: Head, camera: SessionCamera, frames_used: int = 0) -> Plan:
    """Cut pending and new frames into whole chunks.

    Args:
        command: the request with its files, as first posted.
        head: where the session stands now; its cursor has the seed and prompt of this request, and they stay in force.
        camera: the session's camera.
        frames_used: new frames of this request that earlier attempts have committed already.

    Raises `ProblemError` naming the field; changes nothing.
    """
    controller = Controller.from_dict(head.cursor.controller)
    pending = pending_track(head.cursor, controller)
    if command.clip is not None:
        return _plan_observation(command, head, camera, frames_used)
    start = next_frame(head.chunk + 1, len(pending)) - frames_used
    new = new_track(command, controller, camera, start, frames_used)
    track = pending + new
    if command.request.pad and len(track) % CHUNK_FRAMES:
        track = track.held(-len(track) % CHUNK_FRAMES)
    whole = len(track) // CHUNK_FRAMES * CHUNK_FRAMES
    end = track.cursor(head.cursor, whole, len(track)) if len(track) else head.cursor
    before = NO_POSES if len(pending) else controller.pose[None]
    chunks = [
        replace(_chunk(track, stop, before, head.cursor), frames_used=frames_used + min(stop - len(pending), len(new)))
        for stop in range(CHUNK_FRAMES, whole + 1, CHUNK_FRAMES)
    ]
    if chunks:
        chunks[-1] = replace(chunks[-1], cursor=end)
    return Plan(chunks, end, frames_used + len(new))


def _plan_observation(command: Command, head: Head, camera: SessionCamera, frames_used: int) -> Plan:
    """Real frames with a pose each; those past whole chunks are not kept."""
    assert command.clip is not None
    controller = Controller.from_dict(head.cursor.controller)
    waiting = pending_count(head.cursor)
    if waiting and not command.request.discard_pending:
        detail = "poses are pending: fill or discard them before frames are observed"
        raise ProblemError("pending_conflict", detail, extra={"pending_poses": waiting})
    start = next_frame(head.chunk + 1, 0) - frames_used
    new, clip = new_track(command, controller, camera, start, frames_used), command.clip[frames_used:]
    if len(clip) != len(new):
        detail = f"there are {len(clip) + frames_used} frames and {len(new) + frames_used} poses: give one pose a frame"
        raise ProblemError("frames_invalid", detail + _resampled(command), "frames")
    before = NO_POSES if waiting else controller.pose[None]
    chunks = [
        replace(
            _chunk(new, stop, before, head.cursor),
            frames_used=frames_used + stop,
            clip=clip[stop - CHUNK_FRAMES : stop],
        )
        for stop in range(CHUNK_FRAMES, len(clip) + 1, CHUNK_FRAMES)
    ]
    if not chunks:
        raise ProblemError("frames_invalid", f"give at least {CHUNK_FRAMES} frames", "frames")
    return Plan(chunks, chunks[-1].cursor, chunks[-1].frames_used)


def _resampled(command: Command) -> str:
    """What to add where poses and frames do not match, if the file had another number of poses."""
    if command.trajectory is None or command.trajectory.resolved.frames == command.trajectory.resolved.file_poses:
        return ""
    told = command.trajectory.resolved
    return f"; the {told.file_poses} poses of the file became {told.frames} at {FPS} fps, the clip is taken as it is"


def _chunk(track: Track, stop: int, before: Matrix, cursor: Cursor) -> ChunkPlan:
    """The chunk that ends before frame `stop` of the track; it leaves nothing pending.

    `before` is the pose in front of the track, [1,4,4], or nothing where it is not known; `cursor` is that of the head.
    """
    start = stop - CHUNK_FRAMES
    path = np.concatenate([before, track.poses])[max(0, start + len(before) - 1) : stop + len(before)]
    return ChunkPlan(
        poses=track.poses[start:stop],
        intrinsics=track.intrinsics[start:stop],
        cursor=track.cursor(cursor, stop, stop),
        controller=track.controllers[stop - 1].to_dict(),
        frames_used=0,
        warnings=pose_warnings(path),
    )
