"""A model of microseconds a chunk whose every bit can be recomputed: its state is a hash chain.

The parts of a real state are all there: a recurrence over everything so far, a sink, a sliding window, a decoder's
cache that forgets, and the last frame, which observed frames are encoded behind.
"""

import hashlib
import os
import time
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, Frames, ModelSpec, State
from longtake.state_cache.failpoints import failpoint

WIDTH, HEIGHT = 64, 32
FRAMES = 24
WINDOW = 2
HISTORY = 3
"""Chunks that the decoder's cache needs to become known: two latents lie in it, and the last frame shows the third."""

LATENT = (1, 4, 3, 1, 2)
"""Shape of a chunk's latents, [1,C,F,h,w]."""

SMALL_STATE = 4096

DELAY = "TOY_DELAY_S"
WEIGHTS = "TOY_WEIGHTS"
NUMERICS = "TOY_NUMERICS"
STATE_BYTES = "TOY_STATE_BYTES"
FAIL_AT = "TOY_FAIL_AT"
"""Environment variables: seconds a chunk takes, the two fingerprints, bytes of the bulk of a state, and the chunk at
which the device runs out of memory, once."""


class ToyModel:
    """A `WorldModel` of hashes. `delay_s` is what generating or observing a chunk takes."""

    decoder_history = HISTORY
    device = "cpu"
    spec = ModelSpec("toy", "A hash chain that a test can recompute.", WIDTH, HEIGHT)

    def __init__(
        self,
        *,
        delay_s: float = 0.0,
        weights: str = "toy-weights",
        numerics: str = "toy-numerics",
        state_bytes: int = SMALL_STATE,
        fail_at: int | None = None,
    ) -> None:
        self.delay_s = delay_s
        self.weights_fingerprint = weights
        self.numerics_fingerprint = numerics
        self._state_bytes = state_bytes
        self._fail_at = fail_at

    @classmethod
    def from_environment(cls) -> "ToyModel":
        """With what the environment asks for."""
        fail_at = os.environ.get(FAIL_AT)
        return cls(
            delay_s=float(os.environ.get(DELAY, "0")),
            weights=os.environ.get(WEIGHTS, "toy-weights"),
            numerics=os.environ.get(NUMERICS, "toy-numerics"),
            state_bytes=int(os.environ.get(STATE_BYTES, SMALL_STATE)),
            fail_at=None if fail_at is None else int(fail_at),
        )

    def condition(self, first_frame: Frames, prompt: str) -> Conditions:
        """See `WorldModel.condition`."""
        text, mask = self.encode_prompt(prompt)
        latent = _floats(_hash(first_frame), (1, 4, 1, 1, 2))
        return Conditions(torch.from_numpy(first_frame.copy()), latent, text, mask)

    def warnings(self, first_frame: Frames | None, prompt: str) -> list[str]:
        """It takes everything."""
        return []

    def encode_prompt(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Text [1,2,4] and its mask [1,2]."""
        return _floats(_hash(prompt.encode()), (1, 2, 4)), torch.ones(1, 2)

    def initial_state(self, conditions: Conditions) -> State:
        """See `WorldModel.initial_state`."""
        return {}

    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        """See `WorldModel.generate`."""
        self._work(index)
        before = state.get("blocks.0.chain", conditions.first_latent)
        latents = _floats(_hash(before, index, seed, conditions.text, *_arrays(camera)), LATENT)
        return self.absorb(conditions, state, index, camera, latents)

    def observe(
        self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, frames: Frames
    ) -> ChunkOutput:
        """See `WorldModel.observe`."""
        self._work(index)
        before = state["last_frame"] if state else conditions.first_frame
        return self.absorb(conditions, state, index, camera, _floats(_hash(before, frames), LATENT))

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
        """See `WorldModel.absorb`."""
        memory = _remember(conditions, state, index, camera, latents, self._state_bytes)
        cache = state.get("decoder.cache", _first_cache(conditions) if index == 0 else _unknown_cache())
        if not decode:
            return ChunkOutput(latents, np.zeros((0, HEIGHT, WIDTH, 3), np.uint8), memory, {})
        frames = _decode(cache, latents)
        decoder = {"decoder.cache": _pushed(cache, latents), "last_frame": torch.from_numpy(frames[-1].copy())}
        return ChunkOutput(latents, frames, memory | decoder, {"absorb": 0.01, "decode": 0.01})

    def decode(self, conditions: Conditions, first_index: int, latents: Sequence[Tensor]) -> Frames:
        """See `WorldModel.decode`."""
        cache = _first_cache(conditions) if first_index == 0 else _unknown_cache()
        for chunk in latents[:-1]:
            cache = _pushed(cache, chunk)
        return _decode(cache, latents[-1])

    def _work(self, index: int) -> None:
        failpoint("toy.compute")
        if index == self._fail_at:
            self._fail_at = None
            raise torch.OutOfMemoryError("out of device memory, as a test asked for")
        if self.delay_s:
            time.sleep(self.delay_s)


def _remember(
    conditions: Conditions, state: State, index: int, camera: ChunkCamera, latents: Tensor, state_bytes: int
) -> State:
    """The recurrent part of the state: chain int64 [4], bulk uint8 [state_bytes], sink and window float32 [8]."""
    before = state.get("blocks.0.chain", conditions.first_latent)
    chain = _expanded(_hash(before, index, conditions.text, latents, *_arrays(camera)), 32)
    mine = _floats(chain, (8,))
    window = [x for name, x in state.items() if name.startswith("blocks.1.window.")]
    window = [*window, mine][-WINDOW:] if state else []
    after = {
        "blocks.0.chain": torch.from_numpy(np.frombuffer(chain, "<i8").copy()),
        "blocks.0.bulk": torch.from_numpy(np.frombuffer(_expanded(chain, state_bytes), np.uint8).copy()),
        "blocks.1.sink": state.get("blocks.1.sink", mine),
    }
    return after | {f"blocks.1.window.{i}": x for i, x in enumerate(window)}


def _unknown_cache() -> Tensor:
    """The latents of the last chunks, [HISTORY-1,24]: none known."""
    return torch.zeros(HISTORY - 1, int(np.prod(LATENT)))


def _first_cache(conditions: Conditions) -> Tensor:
    """Before chunk 0 there is the first frame."""
    return _pushed(_unknown_cache(), conditions.first_latent.repeat(1, 1, 3, 1, 1))


def _pushed(cache: Tensor, latents: Tensor) -> Tensor:
    return torch.cat([cache[1:], latents.reshape(1, -1)])


def _decode(cache: Tensor, latents: Tensor) -> Frames:
    """Frames [24,32,64,3]: squares of 16 pixels whose colours are a hash of the latents that the decoder sees."""
    colours = np.frombuffer(_expanded(_hash(cache, latents), FRAMES * 2 * 4 * 3), np.uint8).reshape(FRAMES, 2, 4, 3)
    frames: Frames = colours.repeat(16, axis=1).repeat(16, axis=2)
    return frames


def _arrays(camera: ChunkCamera) -> tuple[NDArray[np.float64], ...]:
    return camera.poses, camera.intrinsics, camera.first_intrinsics


def _hash(*parts: Tensor | NDArray[np.generic] | bytes | int) -> bytes:
    digest = hashlib.blake2b(digest_size=32)
    for part in parts:
        if isinstance(part, Tensor):
            part = part.numpy()
        data = part if isinstance(part, bytes) else str(part).encode() if isinstance(part, int) else part.tobytes()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _expanded(seed: bytes, size: int) -> bytes:
    return hashlib.shake_128(seed).digest(size)


def _floats(seed: bytes, shape: tuple[int, ...]) -> Tensor:
    """float32 in [0, 1), multiples of 1/256: exact wherever they are added up."""
    data = np.frombuffer(_expanded(seed, int(np.prod(shape))), np.uint8)
    return torch.from_numpy(data.astype(np.float32) / 256).reshape(shape)


def with_prompt(model: ToyModel, conditions: Conditions, prompt: str) -> Conditions:
    """The conditions under another prompt."""
    text, mask = model.encode_prompt(prompt)
    return replace(conditions, text=text, text_mask=mask)
