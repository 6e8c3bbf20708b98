"""Camera paths through scenes, drawn at random: walks, turns, orbits, looks away and back, the server's own actions.

Poses are c2w relative to frame 0, OpenCV axes, units of the scene, one a frame at 16 frames a second. Path i of a batch
depends on scene i and on seed + i alone.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.api_schemas.camera import Controls
from longtake.server.camera.actions import Controller, parse_actions, walk
from longtake.training.draws import Draws, consecutive
from longtake.training.scenes import COLUMNS, SLOTS, SPHERES, Scenes

_CHUNK = 24
_FASTEST_TURN = math.radians(3.5)
_STRINGS = 512
_HELD = ("w", "w", "w", "dw", "aw", "dw", "aw", "d", "a", "s", "j", "l", "jw", "lw", "none", "i", "k", "ds", "as")


class Motion(NamedTuple):
    """Position [B,T,3], yaw to the right and pitch upwards [B,T] in radians; float64."""

    position: Tensor
    yaw: Tensor
    pitch: Tensor


def draw_paths(scenes: Scenes, frames: int, seed: int, kind: str | None = None) -> Tensor:
    """Camera paths for scenes.

    Args:
        kind: one of `KINDS`, or None to draw one for each scene.

    Returns:
        Poses [B,frames,4,4] float64 on the CPU; the first is exactly the identity.
    """
    seeds = consecutive(len(scenes), seed)
    names = list(KINDS)
    chosen = Draws(seeds, stream=2).choice([KINDS[name].weight for name in names])
    if kind is not None:
        chosen = torch.full_like(chosen, names.index(kind))
    poses = torch.empty(len(scenes), frames, 4, 4, dtype=torch.float64)
    ahead = _distance_ahead(scenes)
    for index, name in enumerate(names):
        rows = (chosen == index).nonzero()[:, 0]
        if len(rows):
            poses[rows] = KINDS[name].draw(Draws(seeds[rows], stream=3 + index), frames, ahead[rows])
    return poses


def draw_intrinsics(count: int, seed: int, width: int, height: int) -> Tensor:
    """Square pixels, centred, a horizontal field of view of 60° half of the time, else of 50° to 75°.

    Returns:
        fx fy cx cy [count,4] float32 in pixels.
    """
    draws = Draws(consecutive(count, seed), stream=100)
    degrees = torch.where(draws.uniform() < 0.5, 60.0, draws.uniform(low=50.0, high=75.0))
    focal = width / 2 / (degrees.deg2rad() / 2).tan()
    centre = torch.tensor([width / 2, height / 2], dtype=torch.float64).expand(count, 2)
    return torch.cat([focal[:, None].expand(count, 2), centre], dim=1).float()


def clear_path(scenes: Scenes, poses: Tensor, margin: float = 0.3) -> Scenes:
    """The scenes without the objects that come nearer than `margin` units to their cameras.

    Args:
        poses: [B,T,4,4] relative to the scenes' first cameras, as `draw_paths` gives them.
    """
    device = scenes.seed.device
    cameras = (scenes.start[:, None] @ poses.to(device, torch.float32))[..., :3, 3]
    struck = _clearance(scenes, cameras) < margin
    together = scenes.group[:, :, None] == scenes.group[:, None, :]
    return replace(scenes, active=scenes.active & ~(together & struck[:, None, :]).any(-1))


def _clearance(scenes: Scenes, points: Tensor) -> Tensor:
    """Smallest distance [B,18] of each solid's surface to points [B,T,3]; negative inside round ones."""
    centre, half = scenes.shape[:, :SLOTS, :3], scenes.shape[:, :SLOTS, 3:6]
    cos, sin = scenes.shape[:, :SLOTS, 6:7], scenes.shape[:, :SLOTS, 7:8]
    x, y, z = (points[:, None] - centre[:, :, None]).unbind(-1)
    local = torch.stack([cos * x - sin * z, y, sin * x + cos * z], dim=-1).abs()
    ball, shaft = SPHERES.start, COLUMNS.start
    boxes = (local[:, :shaft] - half[:, :shaft, None]).clamp(min=0).norm(dim=-1)
    flat = local[:, shaft:ball, :, ::2].norm(dim=-1) - half[:, shaft:ball, None, 0]
    above = local[:, shaft:ball, :, 1] - half[:, shaft:ball, None, 1]
    columns = torch.hypot(flat.clamp(min=0), above.clamp(min=0))
    balls = local[:, ball:].norm(dim=-1) - half[:, ball:, None, 0]
    return torch.cat([boxes, columns, balls], dim=1).amin(-1)


def _distance_ahead(scenes: Scenes) -> Tensor:
    """How far ahead of the first camera the object lies that is closest to the middle of the view, [B] float64."""
    centre = scenes.shape[:, :SLOTS, :3].cpu().double()
    aside = torch.atan2(centre[..., 0], centre[..., 2]).abs() + torch.where(scenes.active.cpu(), 0.0, 10.0)
    nearest = aside.argmin(dim=1, keepdim=True)
    return centre[..., 2].gather(1, nearest)[:, 0].clamp(1.4, 4.5)


def poses_of(motion: Motion) -> Tensor:
    """c2w [B,T,4,4] float64: R_y(yaw) · R_x(pitch), as the server's controller turns."""
    cos, sin = motion.yaw.cos(), motion.yaw.sin()
    up, tilt = motion.pitch.cos(), motion.pitch.sin()
    poses = torch.zeros(*motion.yaw.shape, 4, 4, dtype=torch.float64)
    poses[..., :3, 0] = torch.stack([cos, torch.zeros_like(cos), -sin], dim=-1)
    poses[..., :3, 1] = torch.stack([sin * tilt, up, cos * tilt], dim=-1)
    poses[..., :3, 2] = torch.stack([sin * up, -tilt, cos * up], dim=-1)
    poses[..., :3, 3] = motion.position
    poses[..., 3, 3] = 1
    return poses


def _smooth(x: Tensor) -> Tensor:
    """0 … 1 eased, with flat ends."""
    x = x.clamp(0, 1)
    return x * x * (3 - 2 * x)


def _steps(rate: Tensor) -> Tensor:
    """Running sum of a rate [B,T] per frame, 0 at frame 0."""
    return torch.cat([torch.zeros_like(rate[:, :1]), rate[:, 1:].cumsum(1)], dim=1)


def _swings(draws: Draws, frames: int, shortest: float, longest: float) -> Tensor:
    """Smooth noise [B,T] in −1 … 1: three sine waves with periods between the two, in frames."""
    period = shortest * (longest / shortest) ** draws.uniform(3, 1)
    phase = draws.uniform(3, 1)
    weight = draws.uniform(3, 1, low=0.3)
    time = torch.arange(frames, dtype=torch.float64)
    waves = ((time / period + phase) * (2 * math.pi)).sin()
    return (weight * waves).sum(1) / weight.sum(1)


def _eased_in(draws: Draws, frames: int) -> Tensor:
    """A factor [B,T] that grows to 1, half of the time at once, else within a chunk."""
    length = torch.where(draws.uniform(1) < 0.5, 1.0, draws.uniform(1, low=4.0, high=_CHUNK))
    return _smooth(torch.arange(frames, dtype=torch.float64) / length)


def _travel(heading: Tensor, speed: Tensor) -> Tensor:
    """Positions [B,T,3] of walking with a speed along a heading, both [B,T]."""
    x, z = _steps(heading.sin() * speed), _steps(heading.cos() * speed)
    return torch.stack([x, torch.zeros_like(x), z], dim=-1)


def _sometimes(draws: Draws, chance: float, value: Tensor) -> Tensor:
    """`value` [B,T] in some rows, 0 in the others."""
    return torch.where(draws.uniform(1) < chance, value, 0.0)


def _pitch(draws: Draws, frames: int) -> Tensor:
    """A little nodding, at most about 8°."""
    swing = _swings(draws, frames, 40, 200)
    return _sometimes(draws, 0.4, (swing - swing[:, :1]) * math.radians(4.0))


def _bob(draws: Draws, frames: int, position: Tensor) -> Tensor:
    """Positions that go up and down by up to 0.03 in some rows."""
    time = torch.arange(frames, dtype=torch.float64)
    step = 1 - (time * 2 * math.pi / draws.uniform(1, low=9.0, high=18.0)).cos()
    lift = _sometimes(draws, 0.25, step * draws.uniform(1, low=0.004, high=0.015))
    return torch.stack([position[..., 0], position[..., 1] - lift, position[..., 2]], dim=-1)


def _turn_rate(draws: Draws, fastest: float) -> Tensor:
    """Radians a frame [B,1], to either side."""
    side = 1 - 2 * draws.integer(1, below=2)
    return side * draws.uniform(1, low=0.12, high=1.0) * fastest


def _walk(draws: Draws, frames: int, _: Tensor) -> Tensor:
    ease = _eased_in(draws, frames)
    yaw = _steps(_swings(draws, frames, 40, 240) * _turn_rate(draws, math.radians(1.6)) * ease)
    back = torch.where(draws.uniform(1) < 0.15, -1, 1)
    speed = back * draws.uniform(1, low=0.008, high=0.04) * (1 + 0.3 * _swings(draws, frames, 30, 120)) * ease
    return poses_of(Motion(_bob(draws, frames, _travel(yaw, speed)), yaw, _pitch(draws, frames)))


def _turn(draws: Draws, frames: int, _: Tensor) -> Tensor:
    ease = _eased_in(draws, frames)
    steady = draws.uniform(1) < 0.6
    rate = torch.where(steady, 1.0, _swings(draws, frames, 50, 200)) * _turn_rate(draws, _FASTEST_TURN)
    yaw = _steps(rate * ease)
    return poses_of(Motion(torch.zeros(*yaw.shape, 3, dtype=torch.float64), yaw, _pitch(draws, frames)))


def _orbit(draws: Draws, frames: int, ahead: Tensor) -> Tensor:
    """Around the point `ahead` on the optical axis, which stays in the middle of the view."""
    radius = ahead[:, None]
    rate = _turn_rate(draws, 0.05) / radius
    yaw = _steps(rate * _eased_in(draws, frames))
    x, z = -radius * yaw.sin(), radius - radius * yaw.cos()
    return poses_of(Motion(torch.stack([x, torch.zeros_like(x), z], dim=-1), yaw, torch.zeros_like(yaw)))


def _look_back(draws: Draws, frames: int, _: Tensor) -> Tensor:
    """Turn away by up to 120°, wait, and turn back to the first pose, as fast as the time allows."""
    out, wait = (frames - 1) * draws.uniform(1, low=0.25, high=0.42), (frames - 1) * 0.12
    side = 1 - 2 * draws.integer(1, below=2)
    angle = draws.uniform(1, low=math.radians(40), high=math.radians(120)).minimum(out * (_FASTEST_TURN / 1.5))
    time = torch.arange(frames, dtype=torch.float64)
    yaw = side * angle * (_smooth(time / out) - _smooth((time - out - wait) / out))
    return poses_of(Motion(torch.zeros(*yaw.shape, 3, dtype=torch.float64), yaw, torch.zeros_like(yaw)))


def _strafe(draws: Draws, frames: int, _: Tensor) -> Tensor:
    """Sideways, back and forth, or along any heading without turning."""
    ease = _eased_in(draws, frames)
    heading = draws.uniform(1, low=-math.pi, high=math.pi).expand(-1, frames)
    swing = torch.where(draws.uniform(1) < 0.6, 1.0, _swings(draws, frames, 50, 200))
    position = _travel(heading, swing * draws.uniform(1, low=0.008, high=0.04) * ease)
    yaw = torch.zeros(position.shape[:2], dtype=torch.float64)
    return poses_of(Motion(_bob(draws, frames, position), yaw, _pitch(draws, frames)))


def _wander(draws: Draws, frames: int, _: Tensor) -> Tensor:
    """About the origin without end: never farther than about 1.5 units, looking all around."""
    x, z = (_swings(draws, frames, 280, 900) for _ in range(2))
    x, z = x - x[:, :1], z - z[:, :1]
    ease = _eased_in(draws, frames)
    drift = _turn_rate(draws, math.radians(0.8))
    yaw = _steps((drift + _swings(draws, frames, 90, 400) * math.radians(0.9)) * ease)
    position = torch.stack([x, torch.zeros_like(x), z], dim=-1) * (0.75 * ease[..., None])
    return poses_of(Motion(position, yaw, _pitch(draws, frames) * ease))


def _return(draws: Draws, frames: int, _: Tensor) -> Tensor:
    """Walk for a chunk, look 90° away in chunks 1 and 2, and look back by the end of chunk 3.

    The pose of frame 96 and of later ones is exactly that of frame 24.
    """
    time = torch.arange(frames, dtype=torch.float64)
    before = time.clamp(max=_CHUNK)
    pace = draws.uniform(1, low=0.0, high=0.03)
    bend = _turn_rate(draws, math.radians(0.6))
    turn = bend * before
    position = _travel(turn, pace * (time <= _CHUNK))
    side = 1 - 2 * draws.integer(1, below=2)
    away = _smooth((time - _CHUNK) / 12) - _smooth((time - 3 * _CHUNK) / _CHUNK)
    return poses_of(Motion(position, turn + side * (math.pi / 2) * away, torch.zeros_like(turn)))


@lru_cache(maxsize=2 * _STRINGS)
def _action_path(number: int, frames: int) -> Tensor:
    """Poses [T,4,4] of a random action string walked by the server's controller."""
    draws = Draws(torch.tensor([number]), stream=50)
    controls: Controls = "sana-smooth" if number % 4 else "sana-legacy"
    text, length = [], 0
    while length < frames:
        held = _HELD[int(draws.integer(below=len(_HELD)))]
        count = int(draws.integer(below=4) + 1) * (4 if held in ("i", "k") else 12)
        text.append(f"{held}-{count}")
        length += count
    poses, _ = walk(Controller.start(), parse_actions(",".join(text), "actions")[: frames - 1], controls)
    return torch.cat([torch.eye(4, dtype=torch.float64)[None], torch.from_numpy(poses)])


def _actions(draws: Draws, frames: int, _: Tensor) -> Tensor:
    """Strings from a fixed number of them, because the controller goes frame by frame."""
    numbers = draws.integer(below=_STRINGS).tolist()
    return torch.stack([_action_path(number, frames) for number in numbers])


class Kind(NamedTuple):
    """A way to move, and how often it is drawn."""

    weight: float
    draw: Callable[[Draws, int, Tensor], Tensor]


KINDS: dict[str, Kind] = {
    "walk": Kind(0.22, _walk),
    "turn": Kind(0.12, _turn),
    "orbit": Kind(0.1, _orbit),
    "look_back": Kind(0.1, _look_back),
    "strafe": Kind(0.1, _strafe),
    "actions": Kind(0.24, _actions),
    "wander": Kind(0.06, _wander),
    "return": Kind(0.06, _return),
}
