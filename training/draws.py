"""Random numbers that depend on their place alone, so that a scene or path does not depend on those drawn beside it."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF


class Draws:
    """Uniform random numbers that depend on (seed, stream, index) alone: each call takes the next indices.

    Args:
        seeds: [B] int64 on the CPU.
    """

    def __init__(self, seeds: Tensor, stream: int) -> None:
        self._key = _mixed(_mixed(seeds & _MASK) + _mixed(seeds >> 32) + _mixed(torch.tensor(stream)))
        self._taken = 0

    def uniform(self, *shape: int, low: float = 0.0, high: float = 1.0) -> Tensor:
        """[B, *shape] float64 in [low, high)."""
        count = math.prod(shape)
        index = torch.arange(self._taken, self._taken + count)
        self._taken += count
        bits = _mixed(self._key[:, None] ^ _mixed(index))
        return (low + (high - low) * (bits.double() / 2.0**32)).reshape(-1, *shape)

    def integer(self, *shape: int, below: int) -> Tensor:
        """[B, *shape] int64 in 0 … below − 1."""
        return self.uniform(*shape, high=float(below)).long()

    def choice(self, weights: Sequence[float]) -> Tensor:
        """[B] int64, each index as likely as its weight."""
        bounds = torch.tensor(weights, dtype=torch.float64).cumsum(0)
        return torch.searchsorted(bounds[:-1] / bounds[-1], self.uniform(), right=True)


def _mixed(x: Tensor) -> Tensor:
    """A permutation of the 32-bit numbers without visible pattern; int64 in and out, higher bits dropped."""
    x = (x ^ (x >> 16)) & _MASK
    x = (x * 0x7FEB352D) & _MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & _MASK
    return x ^ (x >> 16)


def consecutive(count: int, seed: int) -> Tensor:
    """Seeds of a batch: seed … seed + count − 1, int64."""
    return torch.arange(seed, seed + count)
