"""Whether a first frame looks like what a model was trained on: whether its VAE can restore it."""

import math
from dataclasses import dataclass

import torch

from longtake.server.model.vae import CausalVideoVAE, to_uint8
from longtake.server.model.world import Frames


@dataclass(frozen=True)
class Familiarity:
    """How well a VAE restores first frames: peak signal-to-noise ratios in dB.

    Attributes:
        scenes_db: what scenes like those of the training reach, on average.
        limit_db: less than this, and a frame is unlike them.
    """

    scenes_db: float
    limit_db: float


@torch.inference_mode()
def restored_db(vae: CausalVideoVAE, frame: Frames) -> float:
    """Peak signal-to-noise ratio of one frame uint8 [H,W,3] behind encoder and decoder; infinite when all bytes agree.

    Raises `ValueError` for a size that the VAE can not encode.
    """
    pixels = torch.from_numpy(frame.copy())
    clip = (pixels.permute(2, 0, 1).float() / 127.5 - 1)[None, :, None].to(vae.latents_mean.device)
    decoded, _ = vae.decode(vae.encode(clip), None)
    error = (to_uint8(decoded[0])[0].cpu().double() - pixels.double()).square().mean().item()
    return 10 * math.log10(255**2 / error) if error else math.inf


def first_frame_warnings(vae: CausalVideoVAE, first_frame: Frames, known: Familiarity) -> list[str]:
    """A sentence if a first frame uint8 [H,W,3] is unlike what the model knows, else nothing."""
    found = restored_db(vae, first_frame)
    if found >= known.limit_db:
        return []
    reached = f"reconstructed at {found:.1f} dB; its own scenes reach {known.scenes_db:.0f}"
    return [f"the first frame is unlike the scenes this model was trained on ({reached}): expect a blurred world"]
