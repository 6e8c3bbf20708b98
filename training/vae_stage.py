"""Training of the VAE."""

from pathlib import Path

import torch
from torch import Tensor

from longtake.server.model.bundle import VAE_FILE, build_vae, load_vae, save_vae
from longtake.server.model.familiarity import Familiarity
from longtake.server.model.vae import TINY_WORLD_VAE, CausalVideoVAE, init_untrained, to_uint8
from longtake.server.model.vae_blocks import Carry
from longtake.training.clips import ClipPool, Tensors, draw_clips, first_seed, to_pixels
from longtake.training.graphs import CapturedStep
from longtake.training.losses import vae_loss
from longtake.training.optimiser import MasterWeights
from longtake.training.pictures import save_rows
from longtake.training.stage import Stage

FRAMES = 25
MEASURED = 8
"""Batches from which the statistics of latents and the usual errors come."""
MARGIN_DB = 3.0
"""A first frame is unlike the scenes if it is restored this much worse than the worst of them."""


class VaeStage:
    """A VAE in training.

    Args:
        stage: what to do. weights: folder with the VAE to go on with, if there is one.
        device: where. rank: number of this process among those that train together.
    """

    def __init__(self, stage: Stage, weights: Path, device: torch.device, rank: int) -> None:
        self.vae = _begun(weights).to(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.vae.requires_grad_()
        self.masters = MasterWeights(self.vae.parameters())
        self._device, self._count = device, stage.batch
        self._pool = ClipPool(self._draw, stage.clips, stage.batch, stage.reuse, first_seed(stage.seed, rank))
        self._step = CapturedStep(lambda batch: vae_loss(self.vae, batch), self.masters.buffer.zero_)

    def _draw(self, seed: int) -> Tensors:
        return {"frames": draw_clips(self._count, seed, FRAMES, self._device).frames}

    def step(self, rate: float) -> Tensors:
        """One step; what it found, by name."""
        found = self._step(self._pool.batch())
        norm = self.masters.step(rate)
        return {"loss": found["loss"], "psnr": -10 * torch.log10(found["mse"] / 4), "norm": norm}

    def save(self, folder: Path) -> None:
        """Write the averaged weights with the statistics of their latents."""
        self.finished, first = self._measured(build_vae(TINY_WORLD_VAE, self.masters.averaged(self.vae), self._device))
        known = Familiarity(float(first.mean()), float(first.min()) - MARGIN_DB)
        save_vae(folder, self.finished.state_dict(), known)

    @torch.no_grad()
    def _measured(self, vae: CausalVideoVAE) -> tuple[CausalVideoVAE, Tensor]:
        """The VAE with mean and spread of its latents, and the PSNR of restored first frames, in dB."""
        latents, first = [], []
        for _ in range(MEASURED):
            x = to_pixels(self._pool.batch()["frames"])
            latents.append(vae.encoder(x, Carry(None)))
            shown = vae.decoder(latents[-1][:, :, :1], Carry(None)).clamp(-1, 1)
            first.append(-10 * torch.log10((shown - x[:, :, :1]).square().mean(dim=(1, 2, 3, 4)) / 4))
        spread, mean = torch.std_mean(torch.cat(latents), dim=(0, 2, 3, 4))
        vae.latents_mean.copy_(mean)
        vae.latents_std.copy_(spread)
        return vae, torch.cat(first)

    @torch.no_grad()
    def picture(self, path: Path) -> None:
        """Draw clips above what is restored of them."""
        frames = self._pool.batch()["frames"][:4]
        restored = self.finished.decoder(self.finished.encoder(to_pixels(frames), Carry(None)), Carry(None))
        rows = [(clip[::4], to_uint8(again)[::4]) for clip, again in zip(frames, restored, strict=True)]
        save_rows(path, [row for pair in rows for row in pair])


def _begun(weights: Path) -> CausalVideoVAE:
    """The VAE that lies there, or a new one whose upsamplers begin as plain enlargement."""
    if (weights / VAE_FILE).exists():
        vae, _ = load_vae(weights)
        return vae
    vae = CausalVideoVAE(TINY_WORLD_VAE)
    init_untrained(vae, seed=0)
    return vae
