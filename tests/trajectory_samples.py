"""One short path in every syntax of trajectory files, and files made of any poses."""

import io
import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.spatial.transform import Rotation

from longtake.api_schemas.trajectory import TrajectoryOptions
from longtake.server.camera.trajectory_files import TrajectoryFile, read_trajectory

DATA = Path(__file__).parent / "data" / "trajectories"
FILES = {
    "tum": "turn_tum.txt",
    "realestate10k": "turn_realestate10k.txt",
    "kitti": "turn_kitti.txt",
    "transforms": "turn_transforms.json",
    "colmap": "turn_images.txt",
}
CAMERAS = (DATA / "turn_cameras.txt").read_bytes()

# two units forward, then one to the right and half a unit up while turning right by the angle of a 3-4-5 triangle
TURN = np.array(
    [
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]],
        [[1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 1, 2], [0, 0, 0, 1]],
        [[0.8, 0, 0.6, 1], [0, 1, 0, -0.5], [-0.6, 0, 0.8, 2], [0, 0, 0, 1]],
    ]
)
TURN_DEGREES = float(np.degrees(np.arcsin(0.6)))

Poses = NDArray[np.float64]


def read(data: bytes, name: str = "auto", cameras: bytes | None = None, **options: object) -> TrajectoryFile:
    return read_trajectory(data, TrajectoryOptions.model_validate({"format": name, **options}), cameras=cameras)


def content(name: str) -> bytes:
    return (DATA / FILES[name]).read_bytes()


def npy(array: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return file.getvalue()


def npz(**arrays: object) -> bytes:
    file = io.BytesIO()
    np.savez_compressed(file, **{name: np.asarray(array) for name, array in arrays.items()})
    return file.getvalue()


def transforms(frames: list[dict[str, object]], **fields: object) -> bytes:
    return json.dumps({**fields, "frames": frames}).encode()


def frame(number: int, pose: Poses | None = None, **fields: object) -> dict[str, object]:
    """A frame of transforms.json that stands at a c2w pose in OpenCV axes."""
    matrix = (TURN[0] if pose is None else pose) * np.array([1, -1, -1, 1])
    return {"file_path": f"{number}.png", "transform_matrix": matrix.tolist(), **fields}


def colmap(poses: Poses) -> bytes:
    """An images.txt, without points, of c2w poses in the order of their names."""
    lines = ["# Image list with two lines of data per image:"]
    for number, pose in enumerate(poses):
        x, y, z, w = Rotation.from_matrix(pose[:3, :3].T).as_quat().tolist()
        tx, ty, tz = (-pose[:3, :3].T @ pose[:3, 3]).tolist()
        lines += [f"{number} {w} {x} {y} {z} {tx} {ty} {tz} 1 {number}.png", ""]
    return "\n".join(lines).encode()


def tripod(count: int) -> Poses:
    """A camera that only turns, up to the noise of its estimated position."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = Rotation.from_euler("y", np.linspace(0, 40, count)[:, None], degrees=True).as_matrix()
    poses[:, :3, 3] = np.random.default_rng(3).normal(size=(count, 3)) * 1e-3
    return poses


def orbit(count: int, degrees: float) -> Poses:
    """Cameras on a circle of radius 4, all looking at its centre."""
    poses = np.tile(np.eye(4), (count, 1, 1))
    poses[:, :3, :3] = Rotation.from_euler("y", np.linspace(0, degrees, count)[:, None], degrees=True).as_matrix()
    poses[:, :3, 3] = -4 * poses[:, :3, 2]
    return poses
