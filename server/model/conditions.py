"""What a pass is conditioned on: text for a session, camera and positions for a chunk, each encoded once."""

from typing import NamedTuple

from torch import Tensor


class TextCondition(NamedTuple):
    """Text of a session: `keys`, `values` of each block's cross-attention [B,L,H,D]; additive `mask` [B,1,1,L]."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    mask: Tensor


class CameraCondition(NamedTuple):
    """Camera of a chunk: P and P⁻¹ [B,N,4,4] fp32, `cos`, `sin` [N,D/4] fp32, Plücker embedding [B,F,S,C]."""

    projection: Tensor
    projection_inverse: Tensor
    cos: Tensor
    sin: Tensor
    plucker: Tensor


class ChunkCondition(NamedTuple):
    """Everything that the passes of one chunk share: rotary tables `cos`, `sin` [N,D/2] fp32; `shape` is (F, h, w)."""

    text: TextCondition
    shape: tuple[int, int, int]
    cos: Tensor
    sin: Tensor
    camera: CameraCondition | None
