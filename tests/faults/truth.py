"""What a session must hold, computed without a server: poses, seed and prompt in; digests out."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from faults.toy_model import FRAMES, HEIGHT, WIDTH, ToyModel, with_prompt
from longtake.server.camera.actions import Controller, parse_actions
from longtake.server.camera.intrinsics import default_intrinsics
from longtake.server.camera.poses import check_poses, rebase
from longtake.server.model.world import ChunkCamera, Conditions, Frames, State
from longtake.server.video.images import frames_digest
from longtake.state_cache import state_digest

Poses = list[list[list[float]]]
INTRINSICS = default_intrinsics(WIDTH, HEIGHT)
PICTURE: Frames = np.stack(
    [*np.meshgrid(np.linspace(0, 255, WIDTH), np.linspace(0, 255, HEIGHT)), np.full((HEIGHT, WIDTH), 90.0)], -1
).astype(np.uint8)
"""The first frame of every session, of the model's own size, so that it is used as it is."""


@dataclass(frozen=True)
class Made:
    """A chunk as it must be, the state after it, and the frames that it shows."""

    index: int
    frames_digest: str
    state_digest: str
    state: State = field(repr=False)
    controller: Controller = field(repr=False)
    seed: int
    prompt: str


@dataclass(frozen=True)
class Move:
    """What a request adds: poses or keys, or frames with poses; a prompt; padding."""

    poses: Poses | None = None
    actions: str | None = None
    frames: Frames | None = field(default=None, repr=False)
    prompt: str | None = None
    pad: bool = False

    def summary(self) -> str:
        """In a few words."""
        kind = self.actions or f"{len(self.poses or [])} {'poses' if self.frames is None else 'frames'}"
        return kind + (f" prompt {self.prompt}" if self.prompt else "") + (" padded" if self.pad else "")

    def body(self) -> dict[str, object]:
        """As JSON for `POST …/chunks`; frames travel beside it."""
        found: dict[str, object] = {}
        if self.poses is not None or self.actions is not None:
            found["camera"] = {"actions": self.actions} if self.poses is None else {"poses": self.poses}
        if self.prompt is not None:
            found["prompt"] = self.prompt
        if self.pad:
            found["pad"] = True
        if self.frames is not None:
            found["discard_pending"] = True
        return found


@dataclass(frozen=True)
class Truth:
    """A session as it must stand. Nothing is changed in place: what a request would lead to is another truth."""

    prompt: str
    seed: int
    log: tuple[Made, ...] = ()
    pending: tuple[NDArray[np.float64], ...] = ()
    controller: Controller = field(default_factory=Controller.start)
    revision: int = 0
    model: ToyModel = field(default_factory=ToyModel)

    @classmethod
    def begun(cls, prompt: str, seed: int, model: ToyModel | None = None) -> "Truth":
        """A new session."""
        return cls(prompt, seed, model=model or ToyModel())

    @property
    def next_chunk(self) -> int:
        """Index that the next chunk has."""
        return len(self.log)

    @property
    def next_frame(self) -> int:
        """Number of the video frame that the next pose belongs to."""
        return FRAMES * len(self.log) + len(self.pending) + 1

    def moved(self, move: Move) -> "Truth":
        """After a request was carried through."""
        if move.frames is not None:
            return replace(self, pending=())._moved(move)
        return self._moved(move)

    def _moved(self, move: Move) -> "Truth":
        steps = _steps(move, self.controller)
        track = [*self.pending, *(step.pose for step in steps)]
        controller = steps[-1] if steps else self.controller
        if move.pad and len(track) % FRAMES:
            track += [track[-1]] * (-len(track) % FRAMES)
            controller = Controller.at(track[-1])
        after = self if move.prompt is None else replace(self, prompt=move.prompt)
        whole = len(track) // FRAMES * FRAMES
        for start in range(0, whole, FRAMES):
            clip = None if move.frames is None else move.frames[start : start + FRAMES]
            stop = start + FRAMES
            # inside a request the controller is that after the frame, at its end that of the whole request
            used = stop - len(self.pending)
            stands = controller if stop == whole == len(track) else steps[max(0, used - 1)]
            after = after.appended(track[start:stop], stands, clip)
        return replace(after, pending=tuple(track[whole:]), controller=controller)

    def appended(
        self, poses: Sequence[NDArray[np.float64]], controller: Controller, clip: Frames | None = None
    ) -> "Truth":
        """After one more chunk."""
        conditions, state = self.conditions(), self.log[-1].state if self.log else {}
        camera = ChunkCamera(np.stack(poses), np.tile(INTRINSICS, (FRAMES, 1)), INTRINSICS)
        index = len(self.log)
        output = (
            self.model.generate(conditions, state, index, camera, self.seed)
            if clip is None
            else self.model.observe(conditions, state, index, camera, clip)
        )
        shown, digest = frames_digest(output.frames), state_digest(output.state)
        made = Made(index, shown, digest, output.state, controller, self.seed, self.prompt)
        return replace(self, log=(*self.log, made), pending=(), controller=controller)

    def forked(self, last: int, seed: int | None) -> "Truth":
        """A fork that shares the chunks up to `last`."""
        return replace(self._at(last, seed), revision=0)

    def rewound(self, last: int, seed: int | None) -> "Truth":
        """After a rewind that kept the chunks up to `last`."""
        return replace(self._at(last, seed), revision=self.revision + 1)

    def conditions(self) -> Conditions:
        """Those in force."""
        return with_prompt(self.model, self.model.condition(PICTURE, ""), self.prompt)

    def _at(self, last: int, seed: int | None) -> "Truth":
        log = self.log[: last + 1]
        prompt, kept = self.prompt, self.seed
        if last < len(self.log) - 1:  # those of the chunk; in front of all of them, those that chunk 0 was made with
            made = self.log[max(last, 0)]
            prompt, kept = made.prompt, made.seed
        controller = log[-1].controller if log else Controller.start()
        return replace(
            self, log=log, pending=(), controller=controller, prompt=prompt, seed=kept if seed is None else seed
        )


def _steps(move: Move, controller: Controller) -> list[Controller]:
    """The camera after each new frame."""
    if move.poses is not None:
        poses = rebase(check_poses(move.poses, "poses"), np.eye(4))
        return [Controller.at(pose) for pose in poses]
    found = []
    for keys in [] if move.actions is None else parse_actions(move.actions, "actions"):
        controller = controller.advance(keys, "sana-smooth")
        found.append(controller)
    return found


def path(frames: int, start: int = 1, turn: float = 0.01) -> Poses:
    """Poses of the video frames from `start` on along a smooth path that `turn` tells apart from others."""
    return [_pose(frame, turn).tolist() for frame in range(start, start + frames)]


def _pose(frame: int, turn: float) -> NDArray[np.float64]:
    angle = turn * frame
    pose = np.eye(4)
    pose[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    pose[:3, 3] = [0.01 * frame, 0, 0.02 * frame]
    return pose
