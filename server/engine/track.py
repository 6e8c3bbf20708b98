"""Camera of consecutive frames, as the model takes it: c2w relative to frame 0, intrinsics of the model's frame."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.camera import MAX_POSES, Camera
from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.actions import Controller, parse_actions
from longtake.server.camera.intrinsics import Crop, check_intrinsics, scale_intrinsics
from longtake.server.camera.poses import check_poses, rebase, to_opencv
from longtake.server.camera.trajectory import continue_from
from longtake.server.camera.trajectory_files import TrajectoryFile
from longtake.server.engine.command import Command
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
        frame: Matrix = self.to_model(self.given_intrinsics[None], self.intrinsics_size)[0]
        return frame

    def to_model(self, intrinsics: Matrix, size: tuple[int, int]) -> Matrix:
        """Intrinsics [F,4] in pixels of an image of `size` to pixels of the model's frame."""
        return self.crop.intrinsics(scale_intrinsics(intrinsics, size, self.source_size))


@dataclass(frozen=True)
class Track:
    """Consecutive frames: c2w [F,4,4] relative to frame 0, intrinsics [F,4], and the controller after each."""

    poses: Matrix
    intrinsics: Matrix
    controllers: tuple[Controller, ...]

    def __len__(self) -> int:
        return len(self.poses)

    def __add__(self, other: "Track") -> "Track":
        return Track(
            np.concatenate([self.poses, other.poses]),
            np.concatenate([self.intrinsics, other.intrinsics]),
            self.controllers + other.controllers,
        )

    def held(self, count: int) -> "Track":
        """The last pose for `count` frames more; the controller then stands there."""
        still = Controller.at(self.poses[-1])
        poses, intrinsics = (np.repeat(each[-1:], count, 0) for each in (self.poses, self.intrinsics))
        return self + Track(poses, intrinsics, (still,) * count)

    def cursor(self, before: Cursor, start: int, stop: int) -> Cursor:
        """The cursor after frame `stop - 1`, with the frames from `start` on still pending; the rest as in `before`."""
        return msgspec.structs.replace(
            before,
            poses=self.poses[start:stop].astype("<f8").tobytes(),
            intrinsics=self.intrinsics[start:stop].astype("<f8").tobytes(),
            controller=self.controllers[stop - 1].to_dict(),
        )


NO_POSES = np.empty((0, 4, 4))
NO_FRAMES = Track(NO_POSES, np.empty((0, 4)), ())


def pending_track(cursor: Cursor, controller: Controller) -> Track:
    """The poses that wait; which controller stood between them is not known any more, so all have the last."""
    poses = np.frombuffer(cursor.poses, "<f8").reshape(-1, 4, 4)
    intrinsics = np.frombuffer(cursor.intrinsics, "<f8").reshape(-1, 4)
    return Track(poses, intrinsics, (controller,) * len(poses))


def new_track(command: Command, controller: Controller, session: SessionCamera, start: int, skip: int) -> Track:
    """The frames that a request adds, without those that earlier attempts at it have committed.

    Args:
        command: the request with its files.
        controller: where the session's camera stands now.
        session: the session's camera.
        start: number of the video frame that the request's first new frame belongs to.
        skip: new frames already committed.

    Raises `ProblemError` naming the field.
    """
    camera = command.request.camera
    if camera is None:
        return NO_FRAMES
    if camera.actions is not None:
        keys = parse_actions(camera.actions, "camera.actions")[skip:]
        controllers = _walk(controller, keys, camera)
        poses = np.array([step.pose for step in controllers]).reshape(-1, 4, 4)
    else:
        poses = rebase(_given_poses(camera, command.trajectory, session, start)[skip:], session.first_pose)
        controllers = [Controller.at(pose) for pose in poses]
    intrinsics = _intrinsics(command, session, start, skip + len(poses))[skip:]
    return Track(poses, intrinsics, tuple(controllers))


def _walk(controller: Controller, keys: Sequence[frozenset[str]], camera: Camera) -> list[Controller]:
    controllers = []
    for frame in keys:
        controller = controller.advance(frame, camera.controls)
        controllers.append(controller)
    return controllers


def _given_poses(camera: Camera, file: TrajectoryFile | None, session: SessionCamera, start: int) -> Matrix:
    """Explicit poses in the client's world, OpenCV axes."""
    if camera.poses is not None:
        return to_opencv(check_poses(camera.poses, "camera.poses"), camera.convention)
    assert file is not None
    assert camera.trajectory is not None
    row = _file_row(camera, start)
    frames = camera.trajectory.frames or (MAX_POSES if len(file.poses) - row > MAX_POSES else None)
    return continue_from(file.poses, session.first_pose, row, frames)


def _file_row(camera: Camera, start: int) -> int:
    """Row of a trajectory file that the request's first new frame takes."""
    assert camera.trajectory is not None
    return start if camera.trajectory.start is None else camera.trajectory.start


def _intrinsics(command: Command, session: SessionCamera, start: int, count: int) -> Matrix:
    """Intrinsics [count,4] of the request's new frames, in pixels of the model's frame."""
    camera, file = command.request.camera, command.trajectory
    assert camera is not None
    if camera.intrinsics is not None:
        given = session.to_model(check_intrinsics(camera.intrinsics, "camera.intrinsics"), session.intrinsics_size)
    elif file is not None and file.intrinsics is not None:
        rows = file.intrinsics[_file_row(camera, start) :][:count]
        given = session.to_model(rows, file.intrinsics_size or session.intrinsics_size)
    else:
        given = session.intrinsics[None]
    if len(given) not in (1, count):
        detail = f"there are {count} new frames: give one set of intrinsics or {count}"
        raise ProblemError("intrinsics_invalid", detail, "camera.intrinsics")
    return np.tile(given, (count, 1)) if len(given) == 1 else given
