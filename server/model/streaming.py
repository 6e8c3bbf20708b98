"""The streaming model as served: text, transformer and causal VAE behind the `WorldModel` interface."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from longtake.api_schemas.resources import LATENT_FRAMES
from longtake.server.camera.rays import chunk_geometry
from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.fingerprint import numerics_fingerprint, weights_fingerprint
from longtake.server.model.noise import latent_noise
from longtake.server.model.sampler import absorb_chunk, denoise_chunk
from longtake.server.model.state import StateLayoutError, TransformerState
from longtake.server.model.timing import timed
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.vae import CausalVideoVAE, decoder_history_chunks, to_uint8
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, Frames, ModelSpec, State

TextEncoder = Callable[[str], tuple[Tensor, Tensor]]
"""Prompt to text [1,L,E] and mask [1,L]."""

Warn = Callable[[Frames | None, str], list[str]]
"""What a user should know about what a model makes of a first frame (uint8 [H,W,3] of its size) and a prompt."""

_DECODER = "decoder."
_LAST_FRAME = "last_frame"


class StreamingModel:
    """SANA-WM, chunk by chunk. A state holds the transformer's tensors, the decoder's cache and the last frame."""

    def __init__(
        self,
        spec: ModelSpec,
        transformer: SanaWMTransformer,
        vae: CausalVideoVAE,
        encode_text: TextEncoder,
        warn: Warn | None = None,
    ) -> None:
        self.spec = spec
        self.decoder_history = decoder_history_chunks(vae.config)
        words = [encode_text] if isinstance(encode_text, nn.Module) else []
        self.weights_fingerprint = weights_fingerprint(spec.id, transformer, vae, *words)
        self.numerics_fingerprint = numerics_fingerprint(transformer.device, transformer.dtype)
        self.device = transformer.device.type
        self._transformer = transformer
        self._vae = vae
        self._encode_text = encode_text
        self._warn = warn

    @torch.inference_mode()
    def warnings(self, first_frame: Frames | None, prompt: str) -> list[str]:
        """What a user should know about what the model makes of a first frame and a prompt."""
        return self._warn(first_frame, prompt) if self._warn else []

    @torch.inference_mode()
    def condition(self, first_frame: Frames, prompt: str) -> Conditions:
        """Encode the first frame (uint8 [H,W,3] of the model's size) and the prompt."""
        pixels = torch.from_numpy(first_frame.copy())
        text, mask = self.encode_prompt(prompt)
        return Conditions(pixels, self._vae.encode(self._to_pixels(pixels[None])), text, mask)

    @torch.inference_mode()
    def encode_prompt(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Text [1,L,E] of a prompt and its mask [1,L]."""
        return self._encode_text(prompt)

    def initial_state(self, conditions: Conditions) -> State:
        """Nothing is carried into chunk 0: what it needs of the first frame is in the conditions."""
        return {}

    @torch.inference_mode()
    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        """Denoise chunk `index` in a few steps, absorb it at t=0, decode it.

        Raises `StateLayoutError` for a state that was left without decoding.
        """
        _check_decoded(state)
        timings: dict[str, float] = {}
        memory = self._memory(state)
        with timed(timings, "condition"):
            latents = self._noise(conditions, index, seed)
            chunk = self._condition_chunk(conditions, index, camera)
        with timed(timings, "denoise"):
            latents = denoise_chunk(self._transformer, latents, chunk, memory, pinned=int(index == 0))
        return self._absorbed(state, memory, index, chunk, latents, timings)

    @torch.inference_mode()
    def observe(
        self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, frames: Frames
    ) -> ChunkOutput:
        """Encode real frames [24,H,W,3] behind the last one, absorb them, decode what was understood of them.

        Raises `StateLayoutError` for a state that was left without decoding.
        """
        _check_decoded(state)
        timings: dict[str, float] = {}
        with timed(timings, "encode_frames"):
            before = state[_LAST_FRAME] if state else conditions.first_frame
            clip = torch.cat([before.cpu()[None], torch.from_numpy(frames)])
            latents = self._vae.encode(self._to_pixels(clip))[:, :, 1:]
        return self._absorb(conditions, state, index, camera, latents, timings)

    @torch.inference_mode()
    def absorb(
        self,
        conditions: Conditions,
        state: State,
        index: int,
        camera: ChunkCamera,
        latents: Tensor,
        *,
        decode: bool = True,
    ) -> ChunkOutput:
        """Make clean latents [1,C,3,h,w] chunk `index`: what `generate` does after denoising, to the bit.

        Without `decode` the state has neither decoder cache nor last frame. Decoding that begins on such a state joins
        the stream in the middle, from the VAE's unknown cache; after `decoder_history` chunks the state is exact. For
        the first frame behind latent j sees latents back to j+1−H, H = `vae.decoder_history`, and the cache after j
        holds nothing that this frame does not see; the last frame of j lies right before it and sees no further back.
        So cache and last frame are functions of the last H latents: 44 for LTX-2's decoder, which 15 chunks hold
        (14 would be 42); 14 for the tiny one, which 5 hold. Earlier frames of a chunk need one chunk more.
        """
        return self._absorb(conditions, state, index, camera, latents, {}, decode=decode)

    @torch.inference_mode()
    def decode(self, conditions: Conditions, first_index: int, latents: Sequence[Tensor]) -> Frames:
        """Frames of the last of consecutive chunks; exact when `decoder_history` chunks, or all, come before it."""
        chunks = [chunk.to(self._transformer.device) for chunk in latents]
        cache = None if first_index == 0 else self._vae.unknown_cache(chunks[0])
        if first_index == 0:
            chunks[0] = torch.cat([conditions.first_latent.to(chunks[0]), chunks[0]], dim=2)
        for chunk in chunks:
            frames, cache = self._vae.decode(chunk, cache)
        skip = int(first_index == 0 and len(chunks) == 1)
        decoded: Frames = to_uint8(frames[0, :, skip:]).cpu().numpy()
        return decoded

    def _absorb(
        self,
        conditions: Conditions,
        state: State,
        index: int,
        camera: ChunkCamera,
        latents: Tensor,
        timings: dict[str, float],
        *,
        decode: bool = True,
    ) -> ChunkOutput:
        with timed(timings, "condition"):
            chunk = self._condition_chunk(conditions, index, camera)
            latents = latents.to(self._transformer.device).contiguous()
            if index == 0:
                latents = torch.cat([conditions.first_latent.to(latents), latents], dim=2)
        return self._absorbed(state, self._memory(state), index, chunk, latents, timings, decode=decode)

    def _absorbed(
        self,
        state: State,
        memory: TransformerState | None,
        index: int,
        chunk: ChunkCondition,
        latents: Tensor,
        timings: dict[str, float],
        *,
        decode: bool = True,
    ) -> ChunkOutput:
        """One pass at t=0 over all latents of the chunk, [1,C,4,h,w] for chunk 0, then their frames if wanted."""
        with timed(timings, "absorb"):
            after = absorb_chunk(self._transformer, latents, chunk, memory).to_tensors()
        frames: Frames = np.empty((0, self.spec.height, self.spec.width, 3), np.uint8)
        if decode:
            with timed(timings, "decode"):
                frames, decoder = self._decode(state, index, latents)
            after |= decoder
        return ChunkOutput(latents[:, :, -LATENT_FRAMES:].contiguous(), frames, after, timings)

    def _decode(self, state: State, index: int, latents: Tensor) -> tuple[Frames, State]:
        """Frames of a chunk, and what its state carries for the decoder."""
        cache = self._decoder_cache(state)
        if cache is None and index > 0:
            cache = self._vae.unknown_cache(latents)
        decoded, cache = self._vae.decode(latents, cache)
        pixels = to_uint8(decoded[0, :, int(index == 0) :]).cpu()
        return pixels.numpy(), {_DECODER + name: x for name, x in cache.items()} | {_LAST_FRAME: pixels[-1].clone()}

    def _to_pixels(self, clip: Tensor) -> Tensor:
        """Bytes [T,H,W,3] as [1,3,T,H,W] in [-1,1] on the model's device."""
        return (clip.permute(3, 0, 1, 2).float() / 127.5 - 1)[None].to(self._transformer.device)

    def _memory(self, state: State) -> TransformerState | None:
        tensors = {
            name: x.to(self._transformer.device)
            for name, x in state.items()
            if not name.startswith(_DECODER) and name != _LAST_FRAME
        }
        return TransformerState.from_tensors(tensors, self._transformer.config) if tensors else None

    def _decoder_cache(self, state: State) -> dict[str, Tensor] | None:
        device = self._transformer.device
        cache = {name.removeprefix(_DECODER): x.to(device) for name, x in state.items() if name.startswith(_DECODER)}
        return cache or None

    def _noise(self, conditions: Conditions, index: int, seed: int) -> Tensor:
        """Start of the chunk's latents [1,C,F,h,w]; chunk 0 begins with the clean latent of the first frame."""
        B, C, _, h, w = conditions.first_latent.shape
        first = LATENT_FRAMES * index + 1
        noise = [latent_noise(seed, frame, (B, C, h, w)) for frame in range(first, first + LATENT_FRAMES)]
        latents = torch.stack(noise, dim=2).to(self._transformer.device, conditions.first_latent.dtype)
        return torch.cat([conditions.first_latent.to(latents), latents], dim=2) if index == 0 else latents

    def _condition_chunk(self, conditions: Conditions, index: int, camera: ChunkCamera) -> ChunkCondition:
        h, w = conditions.first_latent.shape[3:]
        side = self._vae.config.space_compression
        geometry = chunk_geometry(index, camera.poses, camera.intrinsics, camera.first_intrinsics, h, w, side)
        text = self._transformer.encode_text(conditions.text, conditions.text_mask)
        start = 0 if index == 0 else LATENT_FRAMES * index + 1
        frames = geometry.raymap.shape[0]
        return self._transformer.encode_chunk(
            text, start, (frames, h, w), geometry.raymap[None], geometry.plucker[None]
        )


def _check_decoded(state: State) -> None:
    if state and _LAST_FRAME not in state:
        raise StateLayoutError("the state was absorbed without decoding: it can only absorb")
