"""What the three kernels of a scan are given."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longtake.kernels.scan.configurations import Configuration, Precision, configuration

Direction = Literal["forward", "reverse", "both"]
Norm = Literal["none", "head", "full"]
Which = Literal[0, 1]
"""Of a scan: its queries, or its keys."""
NORMS: dict[Norm, int] = {"none": 0, "head": 1, "full": 2}


class Activation(NamedTuple):
    """How q and k are prepared: norm, weights [H*D], eps, `rms` of q and k [B,N] for the full norm, ReLU, key scale."""

    norm: Norm
    weights: tuple[Tensor | None, Tensor | None]
    eps: float
    rms: tuple[Tensor, Tensor] | None
    relu: bool
    k_scale: float


PLAIN = Activation("none", (None, None), 0.0, None, relu=False, k_scale=1.0)
"""Tokens are taken as they are."""


class Positions(NamedTuple):
    """Tables [1,N,P] or [B,N,P] of pairs, contiguous; `matrices` P and P⁻¹ [B,N,4,4] for the camera's first halves."""

    tables: tuple[Tensor, Tensor]
    matrices: tuple[Tensor, Tensor] | None

    @property
    def kind(self) -> int:
        """ROTARY or CAMERA."""
        return 1 if self.matrices is None else 2


class Scan(NamedTuple):
    """Checked inputs: q, k, v aligned; everything else contiguous fp32 or as the kernels convert it."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    activation: Activation
    positions: Positions | None
    normaliser: bool
    discount: bool
    direction: Direction
    precision: Precision

    @property
    def memories(self) -> int:
        """B·H, each with a memory of its own."""
        return self.decay.shape[0] * self.decay.shape[1]

    @property
    def frames(self) -> int:
        return self.decay.shape[2]

    @property
    def tokens(self) -> int:
        """S, of one frame."""
        return self.q.shape[1] // self.frames

    @property
    def dim(self) -> int:
        return self.q.shape[-1]

    @property
    def directions(self) -> int:
        return 2 if self.direction == "both" else 1

    def between(self, which: Which) -> torch.dtype:
        """Of what kernels of the backward pass hand on for queries (0) or keys (1): of operands where these come in it.

        Else fp32: a norm may take most of it away.
        """
        operand = self.configuration.operand
        return operand if self[which].dtype == operand else torch.float32

    @property
    def configuration(self) -> Configuration:
        return configuration(self.precision, self.q.device)
