"""From a request and the session's cursor to whole chunks: which frames each holds and where it leaves the camera."""

from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.camera import Camera
from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CHUNK_FRAMES, PostChunks
from longtake.server.camera.actions import Controller, parse_actions
from longtake.server.camera.intrinsics import Crop, check_intrinsics, scale_intrinsics
from longtake.server.camera.poses import check_poses, pose_warnings, rebase, to_opencv
from longtake.server.model.world import ModelSpec
from longtake.state_cache import Cursor, SessionRecord

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class SessionCamera:
    """What turns a client's camera into the model's: the world's origin and the way to the model's frame.

    `first_pose` c2w [4,4] OpenCV; `given_intrinsics` [4] in pixels of an image of `intrinsics_size`; sizes are
    (width, height).
    """

    first_pose: Matrix
    given_intrinsics: Matrix
    intrinsics_size: tuple[int, int]
    source_size: tuple[int, int]
    crop: Crop

    @classmethod
    def of(cls, session: SessionRecord, spec: ModelSpec) -> Self:
        """The camera of a stored session, for a model's frame."""
        return cls(
            first_pose=np.array(session.first_pose).reshape(4, 4),
            given_intrinsics=np.array(session.intrinsics),
            intrinsics_size=session.intrinsics_size,
            source_size=session.source_size,
            crop=Crop.fit(*session.source_size, spec.width, spec.height),
        )

    @property
    def intrinsics(self) -> Matrix:
        """The session's intrinsics [4] in pixels of the model's frame; also those of frame 0."""
        frame: Matrix = self.to_model(self.given_intrinsics[None])[0]
        return frame

    def to_model(self, intrinsics: Matrix) -> Matrix:
        """Intrinsics [F,4] of the client's image to pixels of the model's frame."""
        return self.crop.intrinsics(scale_intrinsics(intrinsics, self.intrinsics_size, self.source_size))


@dataclass(frozen=True)
class Track:
    """Consecutive frames: c2w [F,4,4] relative to frame 0, intrinsics [F,4], and the controller after each."""

    poses: Matrix
    intrinsics: Matrix
    controllers: tuple[Controller, ...]

    def __len__(self) -> int:
        return len(self.poses)


@dataclass(frozen=True)
class ChunkPlan:
    """One whole chunk of a request; `cursor` is where the session stands once it is committed."""

    poses: Matrix
    intrinsics: Matrix
    cursor: Cursor
    frames_used: int
    warnings: list[str]


@dataclass(frozen=True)
class Plan:
    """What a request comes to: whole chunks, and the cursor at its end with the poses left over."""

    chunks: list[ChunkPlan]
    cursor: Cursor
    frames_used: int


def pending_count(cursor: Cursor) -> int:
    """Poses that wait for a whole chunk."""
    return len(cursor.poses) // (16 * 8)


def start_cursor() -> Cursor:
    """Before the first request: nothing pending, the controller at frame 0."""
    return Cursor(controller=Controller.start().to_dict())


def next_frame(next_chunk: int, pending: int) -> int:
    """Number of the video frame that the next pose belongs to; frame 0 is the uploaded image."""
    return CHUNK_FRAMES * next_chunk + pending + 1


def plan_request(request: PostChunks, cursor: Cursor, camera: SessionCamera, frames_used: int = 0) -> Plan:
    """Cut pending and new frames into whole chunks.

    Args:
        request: the client's request, as first posted.
        cursor: where the session stands now.
        camera: the session's camera.
        frames_used: frames of this request that earlier attempts have committed already.

    Raises `ProblemError` naming the field; changes nothing.
    """
    controller = Controller.from_dict(cursor.controller)
    pending = _pending_track(cursor, controller)
    new = _new_track(request.camera, controller, camera, frames_used)
    track = _join(pending, new)
    if request.pad and len(track) % CHUNK_FRAMES:
        track = _padded(track)
    whole = len(track) // CHUNK_FRAMES * CHUNK_FRAMES
    end = _cursor(track, whole, len(track)) if len(track) else cursor
    chunks = [_chunk(track, start, controller) for start in range(0, whole, CHUNK_FRAMES)]
    used = [frames_used + min(stop - len(pending), len(new)) for stop in range(CHUNK_FRAMES, whole + 1, CHUNK_FRAMES)]
    chunks = [replace(chunk, frames_used=count) for chunk, count in zip(chunks, used, strict=True)]
    if chunks:
        chunks[-1] = replace(chunks[-1], cursor=end)
    return Plan(chunks, end, frames_used + len(new))


def _chunk(track: Track, start: int, controller: Controller) -> ChunkPlan:
    """The chunk of frames `start`…; its cursor leaves nothing pending."""
    stop = start + CHUNK_FRAMES
    previous = track.poses[start - 1] if start else controller.pose
    known = start or track.controllers[0] is not controller
    path = np.concatenate([previous[None], track.poses[start:stop]]) if known else track.poses[start:stop]
    return ChunkPlan(
        poses=track.poses[start:stop],
        intrinsics=track.intrinsics[start:stop],
        cursor=_cursor(track, stop, stop),
        frames_used=0,
        warnings=pose_warnings(path),
    )


def _pending_track(cursor: Cursor, controller: Controller) -> Track:
    poses = np.frombuffer(cursor.poses, "<f8").reshape(-1, 4, 4)
    intrinsics = np.frombuffer(cursor.intrinsics, "<f8").reshape(-1, 4)
    return Track(poses, intrinsics, (controller,) * len(poses))


def _new_track(camera: Camera | None, controller: Controller, session: SessionCamera, skip: int) -> Track:
    if camera is None:
        return Track(np.empty((0, 4, 4)), np.empty((0, 4)), ())
    if camera.poses is None:
        controllers = _walk(controller, camera, skip)
        poses = np.stack([step.pose for step in controllers]) if controllers else np.empty((0, 4, 4))
    else:
        given = to_opencv(check_poses(camera.poses, "camera.poses"), camera.convention)
        poses = rebase(given, session.first_pose)[skip:]
        controllers = [Controller.at(pose) for pose in poses]
    return Track(poses, _intrinsics(camera, session, len(poses) + skip)[skip:], tuple(controllers))


def _walk(controller: Controller, camera: Camera, skip: int) -> list[Controller]:
    controllers = []
    for keys in parse_actions(camera.actions or "", "camera.actions")[skip:]:
        controller = controller.advance(keys, camera.controls)
        controllers.append(controller)
    return controllers


def _intrinsics(camera: Camera, session: SessionCamera, count: int) -> Matrix:
    if camera.intrinsics is None:
        return np.tile(session.intrinsics, (count, 1))
    given = session.to_model(check_intrinsics(camera.intrinsics, "camera.intrinsics"))
    if len(given) == 1:
        return np.tile(given, (count, 1))
    if len(given) != count:
        raise ProblemError(
            "intrinsics_invalid",
            f"there are {count} new frames: give one set of intrinsics or {count}",
            "camera.intrinsics",
        )
    return given


def _join(first: Track, second: Track) -> Track:
    return Track(
        np.concatenate([first.poses, second.poses]),
        np.concatenate([first.intrinsics, second.intrinsics]),
        first.controllers + second.controllers,
    )


def _padded(track: Track) -> Track:
    """Hold the last pose to the end of the chunk; the controller then stands there."""
    count = -len(track) % CHUNK_FRAMES
    still = Controller.at(track.poses[-1])
    hold = Track(np.repeat(track.poses[-1:], count, 0), np.repeat(track.intrinsics[-1:], count, 0), (still,) * count)
    return _join(track, hold)


def _cursor(track: Track, start: int, stop: int) -> Cursor:
    """The cursor after frame `stop - 1`, with the frames from `start` on still pending."""
    return Cursor(
        poses=track.poses[start:stop].astype("<f8").tobytes(),
        intrinsics=track.intrinsics[start:stop].astype("<f8").tobytes(),
        controller=track.controllers[stop - 1].to_dict(),
    )
