"""Noise that depends on nothing but the seed and the absolute latent frame."""

import hashlib

import torch
from torch import Tensor


def latent_noise(seed: int, latent_frame: int, shape: tuple[int, ...]) -> Tensor:
    """Standard normal noise of one latent frame.

    The generator is seeded by SHA-256 of (seed, latent frame), so a frame's noise is the same however the take was cut.

    Args:
        seed: the session's seed, any integer.
        latent_frame: absolute index in the take.
        shape: shape of the result, such as [B,C,h,w].

    Returns:
        fp32 tensor on the CPU.
    """
    digest = hashlib.sha256(f"{seed}:{latent_frame}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(shape, generator=generator)
