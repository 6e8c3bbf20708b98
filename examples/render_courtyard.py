"""Render the courtyard of columns in `server/assets`: a first frame and a camera path, ray by ray in numpy.

Writes courtyard.png and courtyard_path.npy into the folder given on the command line.
"""

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from longtake.server.camera.actions import Controller, parse_actions

WIDTH, HEIGHT = 640, 384
SUN = np.array([-0.45, -0.55, 0.7]) / np.linalg.norm([-0.45, -0.55, 0.7])
COLUMNS = [(x, z, 0.32) for z in (3.5, 6.0, 8.5, 11.0) for x in (-2.4, 2.4)]
Array = NDArray[np.float64]


def render() -> Array:
    """The picture [H,W,3] in 0…1, seen from the origin, eyes 1.6 above the floor, x right, y down, z forward."""
    focal = WIDTH / 2 / np.tan(np.radians(30))
    u, v = np.meshgrid(np.arange(WIDTH) - WIDTH / 2 + 0.5, np.arange(HEIGHT) - HEIGHT / 2 + 0.5)
    rays = np.stack([u / focal, v / focal, np.ones_like(u)], -1)
    rays /= np.linalg.norm(rays, axis=-1, keepdims=True)
    color, depth = sky(rays), np.full(u.shape, np.inf)
    paint(color, depth, *floor(rays))
    for x, z, radius in COLUMNS:
        paint(color, depth, *column(rays, x, z, radius))
    return np.clip(color, 0, 1) ** (1 / 2.2)


def paint(color: Array, depth: Array, distance: Array, shade: Array) -> None:
    """Put a surface in front of what is there, fading into haze; changes `color` and `depth`."""
    nearer = distance < depth
    haze = np.exp(-np.where(np.isfinite(distance), distance, 0) / 22)[..., None]
    shown = shade * haze + np.array([0.62, 0.42, 0.36]) * (1 - haze)
    color[nearer] = shown[nearer]
    depth[nearer] = distance[nearer]


def sky(rays: Array) -> Array:
    """Dusk: orange at the horizon, blue above, a glow around the sun."""
    up = np.clip(-rays[..., 1:2] * 2.2, 0, 1)
    glow = np.clip(rays @ SUN, 0, 1)[..., None] ** 24
    return (
        np.array([0.75, 0.42, 0.28]) * (1 - up) + np.array([0.16, 0.22, 0.45]) * up + glow * np.array([0.5, 0.35, 0.2])
    )


def floor(rays: Array) -> tuple[Array, Array]:
    """Tiles 1.6 below the eye, with the columns' shadows."""
    with np.errstate(divide="ignore", invalid="ignore"):
        distance = np.where(rays[..., 1] > 1e-4, 1.6 / rays[..., 1], np.inf)
    x, z = (np.where(np.isfinite(distance), rays[..., axis] * distance, 0) for axis in (0, 2))
    tile = (np.floor(x / 0.8) + np.floor(z / 0.8)) % 2
    shade = np.stack([0.30 + 0.16 * tile, 0.24 + 0.13 * tile, 0.20 + 0.10 * tile], -1)
    along = np.array([SUN[0], SUN[2]]) / np.hypot(SUN[0], SUN[2])
    for cx, cz, radius in COLUMNS:
        ahead = (x - cx) * -along[0] + (z - cz) * -along[1]
        aside = np.abs((x - cx) * along[1] - (z - cz) * along[0])
        shade[(ahead > 0) & (ahead < 5) & (aside < radius)] *= 0.55
    return distance, shade


def column(rays: Array, x: float, z: float, radius: float) -> tuple[Array, Array]:
    """A round column from the floor to 2.2 above the eye."""
    a = rays[..., 0] ** 2 + rays[..., 2] ** 2
    b = -(rays[..., 0] * x + rays[..., 2] * z)
    root = b**2 - a * (x**2 + z**2 - radius**2)
    distance = np.where(root > 0, (-b - np.sqrt(np.maximum(root, 0))) / a, np.inf)
    y = rays[..., 1] * np.where(np.isfinite(distance), distance, 0)
    distance = np.where((y < 1.6) & (y > -2.2), distance, np.inf)
    hit = rays * np.where(np.isfinite(distance), distance, 0)[..., None]
    normal = np.stack([(hit[..., 0] - x) / radius, (hit[..., 2] - z) / radius], -1)
    light = 0.25 + 0.75 * np.clip(normal @ np.array([SUN[0], SUN[2]]), 0, 1)
    bands = 1 - 0.25 * ((y > 1.35) | (y < -1.9))
    return distance, (light * bands)[..., None] * np.array([0.80, 0.58, 0.42])


def walk() -> Array:
    """Poses [73,4,4]: ahead, then in an arc to the right, then in one to the left."""
    controller, poses = Controller.start(), [np.eye(4)]
    for keys in parse_actions("w-24,wd-24,wa-24", "actions"):
        controller = controller.advance(keys, "sana-smooth")
        poses.append(controller.pose)
    return np.stack(poses)


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    Image.fromarray((render() * 255).astype(np.uint8)).save(folder / "courtyard.png")
    np.save(folder / "courtyard_path.npy", walk().astype(np.float64))
