"""What the engine knows of a model: conditions that last a session, a state that every chunk replaces, frames."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

State = dict[str, Tensor]
"""What a session carries from chunk to chunk, by name in layout order; every tensor contiguous, never mutated."""

Frames = NDArray[np.uint8]
"""Video frames [T,H,W,3], RGB."""


@dataclass(frozen=True)
class ModelSpec:
    """Shape of what a model makes; sizes in pixels."""

    id: str
    description: str
    width: int
    height: int
    fps: int = 16


@dataclass(frozen=True)
class Conditions:
    """Constants of a session: first frame uint8 [H,W,3], its latent [1,C,1,h,w], text [1,L,E] and its mask [1,L]."""

    first_frame: Tensor
    first_latent: Tensor
    text: Tensor
    text_mask: Tensor

    def to_tensors(self) -> dict[str, Tensor]:
        """By name, for storing."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `to_tensors`."""
        return cls(**tensors)

    def with_text(self, text: Tensor, text_mask: Tensor) -> Self:
        """The same with another text."""
        return replace(self, text=text, text_mask=text_mask)


@dataclass(frozen=True)
class ChunkCamera:
    """Camera of one chunk: c2w [24,4,4] relative to frame 0, intrinsics [24,4] in pixels of the model's frame.

    float64; `first_intrinsics` [4] are those of frame 0.
    """

    poses: NDArray[np.float64]
    intrinsics: NDArray[np.float64]
    first_intrinsics: NDArray[np.float64]


@dataclass(frozen=True)
class ChunkOutput:
    """A finished chunk: clean latents [1,C,3,h,w], frames [24,H,W,3], the state after it, and milliseconds by stage.

    Without decoding there are no frames ([0,H,W,3]), and the state only suits `absorb`.
    """

    latents: Tensor
    frames: Frames
    state: State
    timings_ms: dict[str, float]


class WorldModel(Protocol):
    """A model that can be served. Calls come from one thread at a time and mutate none of their arguments."""

    @property
    def spec(self) -> ModelSpec:
        """Shape of what it makes."""

    @property
    def device(self) -> str:
        """Where it runs: `cpu` or `cuda`."""

    @property
    def weights_fingerprint(self) -> str:
        """Changes with the checkpoint or the configuration."""

    @property
    def numerics_fingerprint(self) -> str:
        """Changes with the device, the libraries and the threads; equal ones give equal bits."""

    @property
    def decoder_history(self) -> int:
        """Chunks that the decoder sees, besides the wanted one.

        `decode` needs the latents of as many before to give a chunk's frames bit for bit; of chunks that were absorbed
        without decoding, the last ones to absorb with it, until the state is whole again to the bit.
        """

    def condition(self, first_frame: Frames, prompt: str) -> Conditions:
        """Encode the first frame (uint8 [H,W,3] of the model's size) and the prompt."""

    def warnings(self, first_frame: Frames | None, prompt: str) -> list[str]:
        """What a user should know about what this model makes of them, a sentence each; None: of the prompt alone."""

    def encode_prompt(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Text [1,L,E] of a prompt and its mask [1,L], for `Conditions.with_text`."""

    def initial_state(self, conditions: Conditions) -> State:
        """State before chunk 0."""

    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        """Denoise chunk `index` from `state`, the state after chunk `index - 1`."""

    def observe(
        self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, frames: Frames
    ) -> ChunkOutput:
        """Absorb real frames [24,H,W,3] of the model's size as chunk `index`; its frames are the decoder's view."""

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
        """Absorb clean latents [1,C,3,h,w] as chunk `index`: the state that generating them left, to the bit.

        Without `decode` the state lacks what the decoder carries. With it again, the state is exact after
        `decoder_history` chunks in a row, and so are the frames of those that follow.
        """

    def decode(self, conditions: Conditions, first_index: int, latents: Sequence[Tensor]) -> Frames:
        """Frames of the last of consecutive chunks, from their latents; the first one is chunk `first_index`."""
