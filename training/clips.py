"""Training clips: scenes along camera paths with their captions, and a pool that gives each out a few times."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.server.camera.rays import FRAMES_PER_LATENT, LATENTS_PER_CHUNK, plucker_rays
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.rope import RopeTables, rope_tables
from longtake.server.model.vocabulary import EMPTY, Vocabulary
from longtake.training.captions import VOCABULARY, caption
from longtake.training.paths import clear_path, draw_intrinsics, draw_paths
from longtake.training.render import render
from longtake.training.scenes import Scenes, draw_scenes

WIDTH, HEIGHT = 128, 80
FIRST_TRAINING_SEED = 1_000_000
STAGE_SEEDS = 10_000_000
"""Seeds of scenes that each stage, on each GPU, has to itself."""

WORDS = Vocabulary((EMPTY, *VOCABULARY), 16)
Tensors = dict[str, Tensor]


class Clips(NamedTuple):
    """Rendered clips: `frames` uint8 [B,T,H,W,3], `poses` [B,T,4,4] relative to frame 0, `intrinsics` [B,4] in pixels.

    Only some of the frames may have been rendered.

    Poses and intrinsics are float64 on the device of the frames.
    """

    frames: Tensor
    poses: Tensor
    intrinsics: Tensor
    captions: list[str]
    scenes: Scenes


def draw_clips(
    count: int,
    seed: int,
    frames: int,
    device: torch.device,
    kind: str | None = None,
    shown: Sequence[int] | slice = slice(None),
) -> Clips:
    """Render `count` scenes, the first of seed `seed`, along a path of `frames` poses each.

    `kind`: one of `paths.KINDS`, else any. `shown`: the frames to render.
    """
    scenes = draw_scenes(count, seed, device)
    poses = draw_paths(scenes, frames, seed, kind).to(device, torch.float64)
    scenes = clear_path(scenes, poses)
    intrinsics = draw_intrinsics(count, seed, WIDTH, HEIGHT).to(device, torch.float64)
    pixels = render(scenes, poses[:, shown].float(), intrinsics.float(), HEIGHT, WIDTH)
    return Clips(pixels, poses, intrinsics, caption(scenes), scenes)


def to_pixels(frames: Tensor) -> Tensor:
    """Bytes [B,T,H,W,3] → [B,3,T,H,W] in [-1, 1], fp32."""
    return frames.permute(0, 4, 1, 2, 3).float() / 127.5 - 1


def clip_geometry(poses: Tensor, intrinsics: Tensor, height: int, width: int, side: int) -> tuple[Tensor, Tensor]:
    """Camera inputs of whole clips, as `chunk_geometry` makes them chunk by chunk.

    Args:
        poses: [B,1+8n,4,4] float64. intrinsics: [B,4] float64 in pixels. height, width: of a latent frame.
        side: pixels of a latent pixel.

    Returns:
        raymap [B,1+n,20] and Plücker map [B,48,1+n,h,w], fp32.
    """
    last = torch.arange(0, poses.shape[1], FRAMES_PER_LATENT, device=poses.device)
    steps = torch.arange(1 - FRAMES_PER_LATENT, 1, device=poses.device)
    seen = (last[:, None] + steps).clamp(min=0)
    seen[0] = torch.arange(FRAMES_PER_LATENT, device=poses.device)
    scaled = (intrinsics / side)[:, None].expand(-1, len(last), -1)
    raymap = torch.cat([poses[:, last].flatten(2), scaled], dim=-1).float()
    rays = plucker_rays(poses[:, seen], scaled[:, :, None].expand(-1, -1, FRAMES_PER_LATENT, -1), height, width)
    return raymap, rays.float()


def late_tables(gap: int, shape: tuple[int, int, int], config: SanaWMConfig) -> Tensors:
    """Rotary tables of the latent frames of a clip (F, h, w) whose second chunk begins `gap` frames late, by name.

    Takes are longer than clips: so a short one shows how far away the first chunk can be.
    """
    first = 1 + LATENTS_PER_CHUNK
    parts = [(0, min(first, shape[0])), (first + gap, max(shape[0] - first, 0))]
    tables = [rope_tables(start, (F, *shape[1:]), config.head_dim, config.rope_theta) for start, F in parts]
    return {name: torch.cat([getattr(table, name) for table in tables]).float() for name in RopeTables._fields}


class ClipPool:
    """Clips on a device, each used `reuse` times on average before a new one takes its place.

    Args:
        draw: clips by name, from the seed of the first one.
        count: clips kept, a multiple of `batch`. batch: clips drawn, and given out, at once.
        seed: of the first scene.
    """

    def __init__(self, draw: Callable[[int], Tensors], count: int, batch: int, reuse: int, seed: int) -> None:
        if count % batch:
            raise ValueError(f"{count} clips are no multiple of a batch of {batch}")
        self._draw, self._batch, self._reuse = draw, batch, reuse
        self._seed, self._steps = seed, 0
        blocks = [self._next() for _ in range(count // batch)]
        self._clips = {name: torch.cat([block[name] for block in blocks]) for name in blocks[0]}
        self._count = batch * len(blocks)
        self._order = torch.Generator().manual_seed(seed)

    def _next(self) -> Tensors:
        self._seed += self._batch
        return self._draw(self._seed - self._batch)

    def batch(self) -> Tensors:
        """As many clips as are drawn at once, any of those kept."""
        self._steps += 1
        if self._steps % self._reuse == 0:
            start = self._steps // self._reuse * self._batch % self._count
            for name, x in self._next().items():
                self._clips[name][start : start + self._batch] = x
        chosen = torch.randint(self._count, (self._batch,), generator=self._order)
        return {name: x[chosen.to(x.device)] for name, x in self._clips.items()}


def first_seed(stage_seed: int, rank: int) -> int:
    """Seed of the first scene of a stage on a GPU."""
    return FIRST_TRAINING_SEED + STAGE_SEEDS * (16 * stage_seed + rank)
