"""What the transformer carries from one chunk to the next, and its flat form for storing.

A state is never mutated: a writing pass makes a new one, which may share unchanged tensors (the sink) with the old.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from longtake.server.model.config import SanaWMConfig


class StateLayoutError(Exception):
    """Stored tensors are not the state of this configuration."""


def owned(x: Tensor) -> Tensor:
    """A copy with memory of its own and standard strides, so that a restored state takes the very same code path."""
    return x.clone(memory_format=torch.contiguous_format)


def carried(x: Tensor, config: SanaWMConfig) -> Tensor:
    """Tokens as they are carried to the next chunk: a copy like `owned`, in bf16 if the configuration says so."""
    return owned(x.bfloat16() if config.carry_bf16 else x)


class GdnMemory(NamedTuple):
    """Memory of a gated delta block.

    `kv`, `cam_kv` [B,H,D,D] fp32, rows = key dim; `z` [B,H,D] fp32; `k_tail`, `cam_k_tail` [B,3,S,C]: raw keys of the
    last frames for the short convolutions, as `carried` keeps them (`cam_k_tail` only with `cache_cam_conv`).
    """

    kv: Tensor
    z: Tensor
    cam_kv: Tensor
    k_tail: Tensor
    cam_k_tail: Tensor | None = None

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in layout order."""
        return ((name, x) for name, x in self._asdict().items() if x is not None)


class Span(NamedTuple):
    """Keys and values of one chunk in a softmax block, positions applied: each [B,N,H,D], as `carried` keeps them."""

    k: Tensor
    v: Tensor
    cam_k: Tensor
    cam_v: Tensor


class SoftmaxMemory(NamedTuple):
    """Chunks that a softmax block still sees: chunk 0 if it is kept as sink, then the window, oldest first."""

    sink: Span | None
    window: tuple[Span, ...]

    @property
    def spans(self) -> tuple[Span, ...]:
        """All visible chunks, oldest first."""
        return self.window if self.sink is None else (self.sink, *self.window)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in layout order."""
        if self.sink is not None:
            yield from ((f"sink.{name}", x) for name, x in self.sink._asdict().items())
        for i, span in enumerate(self.window):
            yield from ((f"window.{i}.{name}", x) for name, x in span._asdict().items())


class BlockState(NamedTuple):
    """Memory of a block's attention, and `ffn_tail` [B,S,C]: the last frame before the FFN's temporal convolution."""

    memory: GdnMemory | SoftmaxMemory
    ffn_tail: Tensor


def remember(memory: SoftmaxMemory | None, span: Span, config: SanaWMConfig) -> SoftmaxMemory:
    """The memory after one more chunk: chunk 0 becomes the sink, else the window slides."""
    if memory is None and config.sink_token:
        return SoftmaxMemory(span, ())
    sink, window = (None, ()) if memory is None else memory
    window = (*window, span)
    return SoftmaxMemory(sink, window[max(len(window) - config.window_chunks, 0) :])


@dataclass(frozen=True)
class TransformerState:
    """Everything the transformer remembers after a chunk, block by block."""

    blocks: tuple[BlockState, ...]

    def to_tensors(self) -> dict[str, Tensor]:
        """Flat form in layout order: `blocks.0.kv`, …, `blocks.0.ffn_tail`, …, `blocks.3.sink.k`, …. No copies."""
        tensors: dict[str, Tensor] = {}
        for i, block in enumerate(self.blocks):
            tensors |= {f"blocks.{i}.{name}": x for name, x in block.memory.tensors()}
            tensors[f"blocks.{i}.ffn_tail"] = block.ffn_tail
        return tensors

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], config: SanaWMConfig) -> Self:
        """The inverse of `to_tensors`, without copies.

        Raises:
            StateLayoutError: a tensor is missing, unknown or not contiguous.
        """
        blocks = tuple(_read_block(tensors, i, config) for i in range(config.num_layers))
        state = cls(blocks)
        if unknown := tensors.keys() - state.to_tensors().keys():
            raise StateLayoutError(f"unknown state tensor {min(unknown)}")
        if strided := [name for name, x in tensors.items() if not x.is_contiguous()]:
            raise StateLayoutError(f"state tensor {strided[0]} is not contiguous")
        return state


def _take(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    try:
        return tensors[name]
    except KeyError:
        raise StateLayoutError(f"state tensor {name} is missing") from None


def _read_span(tensors: Mapping[str, Tensor], prefix: str) -> Span:
    return Span(*(_take(tensors, f"{prefix}.{name}") for name in Span._fields))


def _read_block(tensors: Mapping[str, Tensor], index: int, config: SanaWMConfig) -> BlockState:
    prefix = f"blocks.{index}"
    memory: GdnMemory | SoftmaxMemory
    if config.is_softmax(index):
        filled = [i for i in range(config.window_chunks) if f"{prefix}.window.{i}.k" in tensors]
        sink = _read_span(tensors, f"{prefix}.sink") if config.sink_token else None
        memory = SoftmaxMemory(sink, tuple(_read_span(tensors, f"{prefix}.window.{i}") for i in filled))
    else:
        names = GdnMemory._fields if config.cache_cam_conv else GdnMemory._fields[:-1]
        read = [_take(tensors, f"{prefix}.{name}") for name in names]
        memory = GdnMemory(*read)
    return BlockState(memory, _take(tensors, f"{prefix}.ffn_tail"))
