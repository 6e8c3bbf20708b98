"""Takes of many scenes at once, made as the server makes them one by one."""

from collections.abc import Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longtake.server.camera.rays import LATENTS_PER_CHUNK
from longtake.server.model.bundle import Bundle
from longtake.server.model.config import SanaWMConfig
from longtake.server.model.noise import latent_noise
from longtake.server.model.sampler import absorb_chunk, denoise_chunk
from longtake.server.model.state import TransformerState
from longtake.server.model.vae import to_uint8
from longtake.training.clips import clip_geometry, to_pixels

Forget = Literal["scans", "everything"]
SCANS = (".kv", ".z", ".cam_kv")


class CameraPath(NamedTuple):
    """What a take follows: `poses` [B,1+24K,4,4] relative to frame 0 and `intrinsics` [B,4] in pixels, float64."""

    poses: Tensor
    intrinsics: Tensor


@torch.no_grad()
def takes(
    model: Bundle,
    first_frames: Tensor,
    path: CameraPath,
    captions: list[str],
    seed: int,
    *,
    forget: Forget | None = None,
) -> Iterator[Tensor]:
    """Frames uint8 [B,24,H,W,3] of one chunk after the other.

    Args:
        model: on the device of the frames. first_frames: uint8 [B,H,W,3].
        path: as long as what is wanted.
        seed: of the noise of the first; the others have the seeds after it.
        forget: what of the state is zeroed before every chunk, the scans or everything.
    """
    transformer, vae = model.transformer, model.vae
    text = transformer.encode_text(*model.words.embed(captions))
    first = vae.encode(to_pixels(first_frames[:, None]))
    side = vae.config.space_compression
    raymap, plucker = clip_geometry(path.poses, path.intrinsics, first.shape[3], first.shape[4], side)
    state: TransformerState | None = None
    cache: dict[str, Tensor] | None = None
    for start in range(1, raymap.shape[1], LATENTS_PER_CHUNK):
        pinned = int(start == 1)
        seen = slice(start - pinned, start + LATENTS_PER_CHUNK)
        shape = (LATENTS_PER_CHUNK + pinned, *first.shape[3:])
        chunk = transformer.encode_chunk(text, seen.start, shape, raymap[:, seen], plucker[:, :, seen])
        latents = torch.cat((first[:, :, :pinned], _noise(seed, start, first)), dim=2)
        state = state if state is None or forget is None else _forgotten(state, forget, transformer.config)
        latents = denoise_chunk(transformer, latents, chunk, state, pinned=pinned)
        state = absorb_chunk(transformer, latents, chunk, state)
        decoded, cache = vae.decode(latents, cache)
        yield torch.stack([to_uint8(video[:, pinned:]) for video in decoded])


def _noise(seed: int, start: int, like: Tensor) -> Tensor:
    """Noise [B,C,3,h,w] of the latent frames from `start` on, as `StreamingModel` draws it for one."""
    frames = range(start, start + LATENTS_PER_CHUNK)
    shape = (like.shape[1], *like.shape[3:])
    drawn = [torch.stack([latent_noise(seed + i, frame, shape) for frame in frames], 1) for i in range(len(like))]
    return torch.stack(drawn).to(like.device)


def _forgotten(state: TransformerState, what: Forget, config: SanaWMConfig) -> TransformerState:
    """The state with zeros in place of its scans, or of everything."""
    tensors = {
        name: torch.zeros_like(x) if what == "everything" or name.endswith(SCANS) else x
        for name, x in state.to_tensors().items()
    }
    return TransformerState.from_tensors(tensors, config)
