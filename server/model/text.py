"""A text encoder for models that were never trained on text: every word is a fixed random vector."""

import hashlib
import re

import torch
from torch import Tensor

_WORD = re.compile(r"\w+")


def words_of(prompt: str) -> list[str]:
    """The words of a prompt in lower case, in order."""
    return _WORD.findall(prompt.lower())


def embed_words(prompt: str, length: int, width: int) -> tuple[Tensor, Tensor]:
    """The first `length` words of a prompt as vectors that depend on the word alone.

    Returns:
        text [1,length,width] fp32, padded with zeros, and its mask [1,length] int64. Without any word the first
        position holds the vector of the empty word, so that attention always has something to look at.
    """
    words = words_of(prompt)[:length] or [""]
    text = torch.zeros(1, length, width)
    for position, word in enumerate(words):
        text[0, position] = _vector(word, width)
    mask = torch.zeros(1, length, dtype=torch.int64)
    mask[0, : len(words)] = 1
    return text, mask


def _vector(word: str, width: int) -> Tensor:
    digest = hashlib.sha256(word.encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    return torch.randn(width, generator=generator)
