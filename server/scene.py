"""`longtake scene`: a first frame that `tiny-world` knows its way around, a camera path through it, and its prompt."""

import shlex
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console

from longtake.api_schemas.resources import CHUNK_FRAMES
from longtake.server.camera.actions import Controller, parse_actions, walk
from longtake.server.model.config import TINY_WORLD
from longtake.server.model.vae import TINY_WORLD_VAE
from longtake.training.captions import caption
from longtake.training.paths import clear_path, draw_paths
from longtake.training.render import default_intrinsics, render
from longtake.training.scenes import draw_scenes

HEIGHT, WIDTH = (side * TINY_WORLD_VAE.space_compression for side in TINY_WORLD.latent_hw)


def run_scene(seed: int, path: str | int, folder: Path, console: Console) -> None:
    """Write `scene_SEED.png` and `scene_SEED.npy` into a folder, and print the prompt and how to go on.

    `path`: actions, or how many frames of a path that the seed draws; the pose of the first frame comes before them.
    Nothing stands in its way: it decides, with the seed, what is left of the scene. Raises `ProblemError` for actions
    that are none, `OSError`.
    """
    poses = None if isinstance(path, int) else _walked(path)
    picture, poses, prompt = draw_scene(seed, path if isinstance(path, int) else 0, poses)
    folder.mkdir(parents=True, exist_ok=True)
    image, file = (folder / f"scene_{seed:02d}.{ending}" for ending in ("png", "npy"))
    Image.fromarray(picture).save(image)
    np.save(file, poses, allow_pickle=False)
    lens = ",".join(f"{value:.6g}" for value in default_intrinsics(WIDTH, HEIGHT).tolist())
    words = ("longtake", "generate", str(image), "--trajectory", str(file), "--intrinsics", lens, "--prompt", prompt)
    go_on = shlex.join(words if len(poses) % CHUNK_FRAMES == 1 else (*words, "--pad"))
    for line in (f"{image}: {prompt}", f"{file}: {len(poses)} poses, one a frame", f"walk through it with: {go_on}"):
        console.print(line, highlight=False, markup=False, soft_wrap=True)


def draw_scene(
    seed: int, frames: int, poses: NDArray[np.float64] | None = None
) -> tuple[NDArray[np.uint8], NDArray[np.float64], str]:
    """First frame uint8 [H,W,3] of the model's size, path [F,4,4] relative to it, and prompt of a scene."""
    scenes = draw_scenes(1, seed)
    path = draw_paths(scenes, frames + 1, seed) if poses is None else torch.from_numpy(poses)[None]
    scenes = clear_path(scenes, path)
    lens = default_intrinsics(WIDTH, HEIGHT)[None]
    picture: NDArray[np.uint8] = render(scenes, path[:, :1], lens, HEIGHT, WIDTH)[0, 0].numpy()
    return picture, path[0].numpy(), caption(scenes)[0]


def _walked(actions: str) -> NDArray[np.float64]:
    """Poses [F+1,4,4] of F frames of keys, the identity before them."""
    poses, _ = walk(Controller.start(), parse_actions(actions, "actions"), "sana-smooth")
    return np.concatenate([np.eye(4)[None], poses])
