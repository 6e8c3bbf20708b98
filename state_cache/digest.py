"""One short digest for all state tensors, computed where they are: the same value on a CPU and on a GPU."""

import hashlib
from collections.abc import Mapping

import msgspec
import torch
from torch import Tensor
from torch.nn import functional

_BLOCK = 1 << 22  # words hashed at once: bounds the temporary memory


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


_STEP = _signed(0x9E3779B97F4A7C15)
_FIRST = _signed(0xBF58476D1CE4E5B9)
_SECOND = _signed(0x94D049BB133111EB)
_THIRD = _signed(0xD6E8FEB86659FD93)
"""Odd multipliers: the golden ratio step and finaliser of SplitMix64 (Steele, Lea and Flood 2014), and one more."""


def state_digest(tensors: Mapping[str, Tensor]) -> str:
    """`sha256:` and the hex SHA-256 over name, dtype, shape and hash of the bits of every tensor, in layout order.

    The hash is a sum over 8-byte words mixed with their position, so its value depends neither on the device nor on
    how a device splits the sum. It finds damage and divergence; it does not withstand an attacker.

    Args:
        tensors: of any dtype, shape and device; not changed.
    """
    lanes = _to_host({name: _lanes(tensor) for name, tensor in tensors.items()})
    rows = [(name, str(tensor.dtype), tuple(tensor.shape), lanes[name]) for name, tensor in tensors.items()]
    return f"sha256:{hashlib.sha256(msgspec.json.encode(rows)).hexdigest()}"


def _lanes(tensor: Tensor) -> Tensor:
    """Two sums, int64 [2], over the words of a tensor."""
    words = _words(tensor)
    total = torch.zeros(2, dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _BLOCK):
        total += _block_lanes(words[start : start + _BLOCK], start)
    return total


def _block_lanes(words: Tensor, start: int) -> Tensor:
    # every step is a bijection of the 64 bits, so a single changed word always changes the first sum
    mixed = torch.arange(start, start + words.numel(), device=words.device).mul_(_STEP).add_(words)
    mixed = _fold(mixed, 30).mul_(_FIRST)
    mixed = _fold(mixed, 27).mul_(_SECOND)
    first = _fold(mixed, 31)
    second = _fold(first * _THIRD, 32)
    return torch.stack([first.sum(), second.sum()])


def _fold(words: Tensor, bits: int) -> Tensor:
    """`words ^ (words >>> bits)`; torch's own shift copies the sign."""
    return (words >> bits).bitwise_and_((1 << (64 - bits)) - 1).bitwise_xor_(words)


def _words(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int64 words, the last one filled up with zeros."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    if padding := -data.numel() % 8:
        data = functional.pad(data, (0, padding))
    return (data if data.storage_offset() % 8 == 0 else data.clone()).view(torch.int64)


def _to_host(lanes: Mapping[str, Tensor]) -> dict[str, list[int]]:
    """Python integers, with one transfer a device."""
    values: dict[str, list[int]] = {}
    for device in {lane.device for lane in lanes.values()}:
        names = [name for name, lane in lanes.items() if lane.device == device]
        values.update(zip(names, torch.stack([lanes[name] for name in names]).tolist(), strict=True))
    return values
