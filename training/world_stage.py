"""Training of the transformer, in the latents of a finished VAE."""

from pathlib import Path

import torch
from torch import Tensor, nn

from longtake.api_schemas.resources import CHUNK_FRAMES
from longtake.server.model.bundle import TRANSFORMER_FILE, load_bundle, load_vae, save_bundle
from longtake.server.model.config import TINY_WORLD
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.vae_blocks import Carry
from longtake.server.model.weights import WeightsError, untrained_weights
from longtake.training.clips import (
    WORDS,
    ClipPool,
    Tensors,
    clip_geometry,
    draw_clips,
    first_seed,
    late_tables,
    to_pixels,
)
from longtake.training.fusion import fuse
from longtake.training.generation import CameraPath, takes
from longtake.training.graphs import CapturedStep
from longtake.training.losses import WorldLoss
from longtake.training.optimiser import MasterWeights
from longtake.training.pictures import save_rows
from longtake.training.stage import Stage

GATES_AT_FIRST = 0.3
LATE, LATEST = 0.5, 130
"""Part of the steps whose clips have a gap behind their first chunk, and of how many latent frames at most."""
LARGEST_KEY_WEIGHT = 2**0.5
"""Of the norm of keys: with more, a memory could grow from frame to frame (`SanaWMConfig.gdn_norm`)."""
UNCAPTIONED = 0.15
"""Part of the clips whose caption is kept back."""


class WorldStage:
    """A transformer in training; arguments as for `VaeStage`, whose VAE must lie in `weights`."""

    def __init__(self, stage: Stage, weights: Path, device: torch.device, rank: int) -> None:
        self.vae, self._known = load_vae(weights, device)
        tensors, words = _begun(weights)
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.model = SanaWMTransformer(TINY_WORLD)
        self.model.load_state_dict(tensors)
        self.model.to(device, self.dtype)
        self.words = nn.Parameter(words.to(device, self.dtype))
        self.masters = MasterWeights([*self.model.parameters(), self.words])
        self._key_weights = [
            master
            for (name, _), master in zip(self.model.named_parameters(), self.masters.masters, strict=False)
            if name.endswith("attn.k_norm.weight")
        ]
        self._device, self._count = device, stage.batch
        self._frames = 1 + CHUNK_FRAMES * stage.chunks
        self._encoder = self.vae.encoder.to(self.dtype)
        self._pool = ClipPool(self._draw, stage.clips, stage.batch, stage.reuse, first_seed(stage.seed, rank))
        self._chance = torch.Generator().manual_seed(stage.seed + rank)
        if stage.fused and device.type == "cuda":
            fuse(self.model)
        loss = WorldLoss(self.model, self.words, own_history=stage.history == "own")
        self._step = CapturedStep(loss, self.masters.buffer.zero_)

    @torch.no_grad()
    def _draw(self, seed: int) -> Tensors:
        clips = draw_clips(self._count, seed, self._frames, self._device)
        raw = self._encoder(to_pixels(clips.frames).to(self.dtype), Carry(None)).float()
        latents = (raw - self.vae.latents_mean.view(1, -1, 1, 1, 1)) / self.vae.latents_std.view(1, -1, 1, 1, 1)
        side = self.vae.config.space_compression
        raymap, plucker = clip_geometry(clips.poses, clips.intrinsics, latents.shape[3], latents.shape[4], side)
        silent = torch.rand(self._count) < UNCAPTIONED
        captions = ["" if quiet else text for text, quiet in zip(clips.captions, silent, strict=True)]
        rows, mask = (x.to(self._device) for x in WORDS.read(captions))
        return {"latents": latents, "raymap": raymap, "plucker": plucker, "rows": rows, "mask": mask}

    def step(self, rate: float) -> Tensors:
        """One step; what it found, by name."""
        batch = self._pool.batch()
        late = int(torch.rand(1, generator=self._chance) < LATE)
        gap = late * int(torch.randint(1, LATEST, (1,), generator=self._chance))
        frames, height, width = batch["latents"].shape[2:]
        tables = late_tables(gap, (frames, height, width), TINY_WORLD)
        found = self._step(batch | {name: x.to(self._device) for name, x in tables.items()})
        norm = self.masters.step(rate)
        torch._foreach_clamp_max_(self._key_weights, LARGEST_KEY_WEIGHT)
        chunks = {f"chunk{i}": x for i, x in enumerate(found["chunks"])}
        return {"loss": found["loss"], **chunks, "norm": norm}

    def save(self, folder: Path) -> None:
        """Write the averaged weights, and the VAE beside them."""
        averaged = self.masters.averaged(self.model)
        self.vae.to(torch.float32)
        save_bundle(folder, averaged, self.vae.state_dict(), self.masters.average[-1], WORDS.words, self._known)

    def picture(self, path: Path) -> None:
        """Draw clips, two frames a second, above what the saved model makes of their first frames and cameras."""
        clips = draw_clips(4, 0, self._frames, self._device)
        model = load_bundle(path.parent, self._device)
        model.transformer.to(self.dtype)
        made = takes(model, clips.frames[:, 0], CameraPath(clips.poses, clips.intrinsics), clips.captions, seed=0)
        videos = torch.cat([clips.frames[:, :1], *made], dim=1)
        rows = [(true[::8], video[::8]) for true, video in zip(clips.frames, videos, strict=True)]
        save_rows(path, [row for pair in rows for row in pair])


def _begun(weights: Path) -> tuple[dict[str, Tensor], Tensor]:
    """Transformer and word vectors that lie there, or new ones that predict no velocity at first."""
    if (weights / TRANSFORMER_FILE).exists():
        bundle = load_bundle(weights)
        if bundle.words.config != WORDS:
            raise WeightsError(f"the weights in {weights} have another vocabulary than the captions")
        return bundle.transformer.state_dict(), bundle.words.weight
    tensors = untrained_weights(TINY_WORLD, seed=0)
    tensors["final_layer.linear.weight"].zero_()
    for name, table in tensors.items():
        if name.startswith("blocks") and name.endswith("scale_shift_table"):
            table[[2, 5]] += GATES_AT_FIRST
    return tensors, torch.randn(len(WORDS.words), TINY_WORLD.caption_channels)
