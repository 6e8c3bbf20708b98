"""Tensors and files as blobs: raw little-endian bytes, described by records. Nothing here can run code on loading."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from longtake.state_cache.blobs import MAX_BLOB
from longtake.state_cache.errors import SchemaError
from longtake.state_cache.landing import DTYPES, Landing
from longtake.state_cache.protocol import Store
from longtake.state_cache.records import Arena, File, TensorRef

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OWN_BLOBS = MAX_BLOB // 4  # a tensor this large shares no blob: unchanged, it keeps its blobs wherever it moves


def pack(tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorRef, ...], list[memoryview]]:
    """Lay tensors end to end, in the mapping's order, and cut that into blobs.

    Args:
        tensors: of any shape and device; dtypes in `DTYPES`.

    Returns:
        Their references, and blobs of at most 1 MiB. Those of a large tensor that is contiguous in host memory are that
        memory, which must not change while they are in use. Raises `ValueError` for another dtype.
    """
    refs: list[TensorRef] = []
    for name, tensor in tensors.items():
        start = refs[-1].stop if refs else 0
        refs.append(TensorRef(name, _dtype_name(tensor), tuple(tensor.shape), start, start + tensor.nbytes))
    blobs: list[memoryview] = []
    for is_large, run in groupby(tensors.values(), lambda tensor: tensor.nbytes >= _OWN_BLOBS):
        parts = [_bytes_of(tensor) for tensor in run]
        for data in parts if is_large else [torch.cat(parts)]:
            view = data.numpy().data
            blobs += [view[start:stop] for start, stop in _slices(0, len(view))]
    return tuple(refs), blobs


def pack_file(data: bytes) -> list[memoryview]:
    """Blobs of at most 1 MiB; none for no bytes."""
    view = memoryview(data)
    return [view[start:stop] for start, stop in _slices(0, len(data))]


def unpack_file(file: File, blobs: Sequence[bytes]) -> bytes:
    """The bytes of a file. Raises `SchemaError` when their number is not the recorded one."""
    data = b"".join(blobs)
    if len(data) != file.size:
        raise SchemaError(f"the blobs hold {len(data)} bytes, the file should have {file.size}")
    return data


def save_tensors(store: Store, session_id: str, tensors: Mapping[str, Tensor], *, mend: bool = False) -> Arena:
    """Put tensors into the store; they stay once a commit names the arena. `mend` as in `Store.put`."""
    refs, blobs = pack(tensors)
    return Arena(refs, store.put(session_id, blobs, mend=mend))


def load_tensors(store: Store, session_id: str, arena: Arena, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors back from the store. Raises `BlobsMissing`, `BlobCorrupt`, `SchemaError`."""
    landing = Landing(arena.tensors, [ref.size for ref in arena.blobs])
    store.get_into(session_id, arena.blobs, landing.buffers)
    return landing.tensors(device)


def save_file(store: Store, session_id: str, data: bytes) -> File:
    """Put a byte string into the store; it stays once a commit names it."""
    return File(len(data), store.put(session_id, pack_file(data)))


def save_both(
    store: Store, session_id: str, tensors: Mapping[str, Tensor], data: bytes, *, mend: bool = False
) -> tuple[Arena, File]:
    """Put tensors and a byte string into the store in one call, which is faster than two. `mend` as in `Store.put`."""
    refs, blobs = pack(tensors)
    names = store.put(session_id, [*blobs, *pack_file(data)], mend=mend)
    return Arena(refs, names[: len(blobs)]), File(len(data), names[len(blobs) :])


def load_file(store: Store, session_id: str, file: File) -> bytes:
    """A byte string back from the store. Raises `BlobsMissing`, `BlobCorrupt`, `SchemaError`."""
    return unpack_file(file, store.get(session_id, file.blobs))


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in host memory, uint8; its own memory where that is possible."""
    return tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8)


def _dtype_name(tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"tensors of {tensor.dtype} can not be stored")
    return _NAMES[tensor.dtype]


def _slices(start: int, stop: int) -> list[tuple[int, int]]:
    return [(low, min(low + MAX_BLOB, stop)) for low in range(start, stop, MAX_BLOB)]
