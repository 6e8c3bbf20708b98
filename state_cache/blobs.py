"""Blobs: immutable byte strings named by their content."""

from collections.abc import Sequence
from typing import TypeVar

import xxhash

from longtake.state_cache.errors import BlobCorrupt
from longtake.state_cache.records import Arena, BlobRef, ChunkRecord

MAX_BLOB = 1 << 20
"""Largest blob in bytes: past 1-2 MiB servers and clients slow down."""

ORPHAN_SECONDS = 600
"""How long a blob that no record names stays in a store."""

Data = TypeVar("Data", bytes, memoryview)


def describe(data: bytes | memoryview) -> BlobRef:
    """Name and size of a blob. Raises `ValueError` above 1 MiB."""
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if size > MAX_BLOB:
        raise ValueError(f"a blob holds at most {MAX_BLOB} bytes, this one has {size}")
    return BlobRef(xxhash.xxh3_128_hexdigest(data), size)


def verify(ref: BlobRef, data: Data) -> Data:
    """The bytes themselves, flat, once they match their name. Raises `BlobCorrupt`."""
    if len(data) != ref.size or xxhash.xxh3_128_hexdigest(data) != ref.name:
        raise BlobCorrupt(f"blob {ref.name} does not hold the bytes it is named after")
    return data


def names_in(chunk: ChunkRecord | None = None, arena: Arena | None = None) -> Sequence[str]:
    """Blobs that a chunk record and an arena name, repeats included."""
    arenas = [each for each in (arena, *((chunk.latents, chunk.text) if chunk else ())) if each is not None]
    refs = [ref for each in arenas for ref in each.blobs]
    return [ref.name for ref in (*refs, *(chunk.segment.blobs if chunk else ()))]
