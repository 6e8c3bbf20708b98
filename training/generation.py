"""Takes of many scenes at once, made as the server makes them one by one."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.server.model.bundle import Bundle
from longtake.server.model.sampler import absorb_chunk, denoise_chunk
from longtake.server.model.state import BlockState, GdnMemory, TransformerState
from longtake.server.model.vae import to_uint8
from longtake.training.clips import FRAMES_PER_LATENT, LATENTS_PER_CHUNK, clip_geometry, to_pixels

FRAMES_PER_CHUNK = FRAMES_PER_LATENT * LATENTS_PER_CHUNK


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
    forget: bool = False,
) -> Iterator[Tensor]:
    """Frames uint8 [B,24,H,W,3] of one chunk after the other.

    Args:
        model: on the device of the frames. first_frames: uint8 [B,H,W,3].
        path: as long as what is wanted.
        seed: of the noise, for all.
        forget: recurrent memories are zeroed before every chunk; windows and tails stay.
    """
    transformer, vae = model.transformer, model.vae
    text = transformer.encode_text(*model.words.embed(captions))
    first = vae.encode(to_pixels(first_frames[:, None]))
    side = vae.config.space_compression
    raymap, plucker = clip_geometry(path.poses, path.intrinsics, first.shape[3], first.shape[4], side)
    noise = torch.Generator(first.device).manual_seed(seed)
    state: TransformerState | None = None
    cache: dict[str, Tensor] | None = None
    for start in range(1, raymap.shape[1], LATENTS_PER_CHUNK):
        pinned = int(start == 1)
        seen = slice(start - pinned, start + LATENTS_PER_CHUNK)
        shape = (LATENTS_PER_CHUNK + pinned, *first.shape[3:])
        chunk = transformer.encode_chunk(text, seen.start, shape, raymap[:, seen], plucker[:, :, seen])
        latents = torch.randn(len(first), first.shape[1], *shape, generator=noise, device=first.device)
        latents[:, :, :pinned] = first
        state = _forgotten(state) if forget else state
        latents = denoise_chunk(transformer, latents, chunk, state, pinned=pinned)
        state = absorb_chunk(transformer, latents, chunk, state)
        decoded, cache = vae.decode(latents, cache)
        yield torch.stack([to_uint8(video[:, pinned:]) for video in decoded])


def _forgotten(state: TransformerState | None) -> TransformerState | None:
    """The state with zeros for all scans."""
    if state is None:
        return None

    def empty(block: BlockState) -> BlockState:
        memory = block.memory
        if not isinstance(memory, GdnMemory):
            return block
        scans = {name: torch.zeros_like(getattr(memory, name)) for name in ("kv", "z", "cam_kv")}
        return block._replace(memory=memory._replace(**scans))

    return TransformerState(tuple(empty(block) for block in state.blocks))
