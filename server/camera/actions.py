"""Action strings and the controller that walks a camera by them, one video frame (1/16 s) at a time.

Two meanings of the keys, both published with SANA-WM:

- `sana-smooth`, the newer release: a/d turn and j/l strafe at 0.025 units and 0.6° a frame, pitch within ±60°. A fresh
  press sets the velocity at once; otherwise each part of it eases, with τ = 0.45 s where held and 1 s where coasting.
- `sana-legacy`, the first release: a/d strafe and j/l turn at 0.05 units and 1.2° a frame without easing; a pitch step
  past ±85° is left out. Headings are divided by (norm + 1e-6) as there; ports that divide by the norm differ by 3e-6.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from longtake.api_schemas.camera import MAX_POSES, Controls
from longtake.api_schemas.problems import ProblemError

KEYS = frozenset("wasdijkl")
NONE = "none"

_FRAME_SECONDS = 1 / 16
_HELD_EASING = -math.expm1(-_FRAME_SECONDS / 0.45)
_COAST_EASING = -math.expm1(-_FRAME_SECONDS / 1.0)


class _Scheme(NamedTuple):
    """Meaning of the keys: pairs (positive, negative), units and radians a frame, pitch limit in radians."""

    strafe: tuple[str, str]
    yaw: tuple[str, str]
    step: float
    turn: float
    pitch_limit: float


_SCHEMES: dict[Controls, _Scheme] = {
    "sana-smooth": _Scheme(("l", "j"), ("d", "a"), 0.025, math.radians(0.6), math.radians(60.0)),
    "sana-legacy": _Scheme(("d", "a"), ("l", "j"), 0.05, math.radians(1.2), math.radians(85.0)),
}


class Velocity(NamedTuple):
    """Motion in one frame: units forward and to the right, radians of yaw to the right and of pitch upwards."""

    forward: float = 0.0
    right: float = 0.0
    yaw: float = 0.0
    pitch: float = 0.0


def parse_actions(text: str, field: str) -> list[frozenset[str]]:
    """Keys held in each frame of an action string.

    The string is a list of `keys-frames` parted by commas, for example `w-24, dw-12, none-12`: any of the letters
    w a s d i j k l, or the word none; then a number of frames. Case and spaces around a part do not matter.

    Raises:
        ProblemError: `actions_invalid` for anything else and for more than 4096 frames.
    """
    frames: list[frozenset[str]] = []
    for number, segment in enumerate(text.replace("，", ",").split(","), start=1):
        keys, count = _parse_segment(segment, number, field)
        if len(frames) + count > MAX_POSES:
            raise ProblemError("actions_invalid", f"at most {MAX_POSES} frames are taken at once", field)
        frames.extend([keys] * count)
    return frames


def _parse_segment(segment: str, number: int, field: str) -> tuple[frozenset[str], int]:
    """Keys and frame count of one `keys-frames`. A count of more than nine digits reads as too many frames."""
    keys, dash, count = (part.strip() for part in segment.rpartition("-"))
    if not (dash and keys and count.isascii() and count.isdigit() and count.strip("0")):
        detail = f"segment {number} must be keys-frames with at least one frame, such as w-24 or none-12"
        raise ProblemError("actions_invalid", detail, field)
    held = frozenset() if keys.lower() == NONE else frozenset(keys.lower())
    if not (keys.isascii() and held <= KEYS):
        detail = f"segment {number} has an unknown key; known are w a s d i j k l, or the word none"
        raise ProblemError("actions_invalid", detail, field)
    digits = count.lstrip("0")
    return held, int(digits) if len(digits) < 10 else MAX_POSES + 1


@dataclass(frozen=True, eq=False)
class Controller:
    """A camera under the keys: where it stands and how it moves. Immutable; `advance` gives the next frame's.

    Attributes:
        pose: c2w [4,4] float64, OpenCV axes, in a world whose y axis points down (that of frame 0).
        pitch: radians above the horizon.
        velocity: motion in the last frame.
        held: keys down in the last frame.
    """

    pose: NDArray[np.float64]
    pitch: float
    velocity: Velocity
    held: frozenset[str]

    @classmethod
    def start(cls) -> Self:
        """Standing at frame 0."""
        return cls(np.eye(4), 0.0, Velocity(), frozenset())

    @classmethod
    def at(cls, pose: NDArray[np.float64]) -> Self:
        """Standing still at a pose [4,4], which is copied; its pitch is that of the viewing direction."""
        x, y, z = (float(component) for component in pose[:3, 2])
        return cls(pose.copy(), math.atan2(-y, math.hypot(x, z)), Velocity(), frozenset())

    def advance(self, keys: frozenset[str], controls: Controls) -> Self:
        """The controller one frame later with `keys` held.

        R ← R_y(yaw) · R · R_x(pitch step), then the position moves along the new forward and right axes laid flat.
        """
        scheme = _SCHEMES[controls]
        velocity = _target(keys, scheme)
        if controls == "sana-smooth" and keys <= self.held:
            velocity = _eased(self.velocity, velocity)
        pitch = _limited_pitch(self.pitch, velocity.pitch, scheme.pitch_limit, clamp=controls == "sana-smooth")
        pose = np.eye(4)
        pose[:3, :3] = _turned(self.pose[:3, :3], velocity.yaw, pitch - self.pitch)
        forward, right = _level(pose[:3, 2]), _level(pose[:3, 0])
        pose[:3, 3] = self.pose[:3, 3] + (forward * velocity.forward + right * velocity.right)
        return type(self)(pose, pitch, velocity, keys)

    def to_dict(self) -> dict[str, float | str | list[float]]:
        """Plain values for JSON or msgpack, float64 exact: pose row by row, pitch, velocity, held keys in order."""
        return {
            "pose": [float(value) for value in self.pose.flat],
            "pitch": self.pitch,
            "velocity": list(self.velocity),
            "held": "".join(sorted(self.held)),
        }

    @classmethod
    def from_dict(cls, record: dict[str, float | str | list[float]]) -> Self:
        """The controller `to_dict` was called on."""
        pose, pitch, velocity, held = (record[name] for name in ("pose", "pitch", "velocity", "held"))
        assert isinstance(pose, list)
        assert isinstance(pitch, float)
        assert isinstance(velocity, list)
        assert isinstance(held, str)
        return cls(np.array(pose).reshape(4, 4), pitch, Velocity(*velocity), frozenset(held))


def walk(
    controller: Controller, frames: list[frozenset[str]], controls: Controls
) -> tuple[NDArray[np.float64], Controller]:
    """Poses [F,4,4] float64 after each of F frames of keys, and the controller after the last."""
    poses = np.empty((len(frames), 4, 4))
    for frame, keys in enumerate(frames):
        controller = controller.advance(keys, controls)
        poses[frame] = controller.pose
    return poses, controller


def _target(keys: frozenset[str], scheme: _Scheme) -> Velocity:
    """Velocity the held keys ask for; opposite keys cancel."""

    def pressed(positive: str, negative: str) -> int:
        return (positive in keys) - (negative in keys)

    return Velocity(
        forward=scheme.step * pressed("w", "s"),
        right=scheme.step * pressed(*scheme.strafe),
        yaw=scheme.turn * pressed(*scheme.yaw),
        pitch=scheme.turn * pressed("i", "k"),
    )


def _eased(velocity: Velocity, target: Velocity) -> Velocity:
    """One frame of exponential easing: v + (1 − e^(−dt/τ)) · (target − v), τ longer where nothing is asked for."""
    pairs = zip(velocity, target, strict=True)
    return Velocity(*(v + (_HELD_EASING if goal else _COAST_EASING) * (goal - v) for v, goal in pairs))


def _limited_pitch(pitch: float, step: float, limit: float, *, clamp: bool) -> float:
    """Pitch after a step, clamped to the limit or not taken. From beyond the limit, where only explicit poses lead,
    it may only come back: clamping at once would tear the view round in a single frame.
    """
    bound = max(limit, abs(pitch))
    if clamp:
        return min(max(pitch + step, -bound), bound)
    return pitch + step if abs(pitch + step) <= bound else pitch


def _turned(rotation: NDArray[np.float64], yaw: float, pitch: float) -> NDArray[np.float64]:
    """R_y(yaw) · rotation · R_x(pitch), written out so that no library's matrix product decides the last bit."""
    cos, sin = math.cos(yaw), math.sin(yaw)
    x, y, z = rotation
    rows = np.stack([cos * x + sin * z, y, cos * z - sin * x])
    cos, sin = math.cos(pitch), math.sin(pitch)
    right, down, forward = rows.T
    return np.stack([right, cos * down + sin * forward, cos * forward - sin * down], axis=1)


def _level(axis: NDArray[np.float64]) -> NDArray[np.float64]:
    """An axis [3] laid into the horizontal plane, of about unit length."""
    x, z = float(axis[0]), float(axis[2])
    return np.array([x, 0.0, z]) / (math.hypot(x, z) + 1e-6)
