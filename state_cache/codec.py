"""Tensors and files as blobs: raw little-endian bytes, described by records. Nothing here can run code on loading."""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from longtake.state_cache.blobs import MAX_BLOB
from longtake.state_cache.errors import SchemaError
from longtake.state_cache.protocol import Store
from longtake.state_cache.records import Arena, File, TensorRef

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Element types by their safetensors name."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_OWN_BLOBS = MAX_BLOB // 4  # a tensor this large shares no blob: unchanged, it keeps its blobs wherever it moves


def pack(tensors: Mapping[str, Tensor]) -> tuple[tuple[TensorRef, ...], list[memoryview]]:
    """Lay tensors end to end, in the mapping's order, in one private buffer and cut that into blobs.

    Args:
        tensors: of any shape and device; dtypes in `DTYPES`.

    Returns:
        Their references, and blobs of at most 1 MiB. Raises `ValueError` for another dtype.
    """
    refs: list[TensorRef] = []
    for name, tensor in tensors.items():
        start = refs[-1].stop if refs else 0
        refs.append(TensorRef(name, _dtype_name(tensor), tuple(tensor.shape), start, start + tensor.nbytes))
    buffer = torch.empty(refs[-1].stop if refs else 0, dtype=torch.uint8)
    for ref, tensor in zip(refs, tensors.values(), strict=True):
        buffer[ref.start : ref.stop].copy_(tensor.detach().contiguous().reshape(-1).view(torch.uint8))
    data = buffer.numpy().data
    return tuple(refs), [data[start:stop] for start, stop in _cuts(refs)]


def unpack(arena: Arena, blobs: Sequence[bytes], device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """The tensors of an arena in layout order, each contiguous in memory of its own.

    Args:
        arena: what to make of the bytes.
        blobs: those of `arena.blobs`, in order.
        device: where the tensors go.

    Raises:
        SchemaError: the arena does not describe these bytes.
    """
    _check_layout(arena.tensors, sum(len(blob) for blob in blobs))
    source = _Reader(blobs)
    return {ref.name: _read_tensor(source, ref).to(device) for ref in arena.tensors}


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


def save_tensors(store: Store, session_id: str, tensors: Mapping[str, Tensor]) -> Arena:
    """Put tensors into the store; they stay once a commit names the arena."""
    refs, blobs = pack(tensors)
    return Arena(refs, store.put(session_id, blobs))


def load_tensors(store: Store, session_id: str, arena: Arena, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Tensors back from the store. Raises `BlobsMissing`, `BlobCorrupt`, `SchemaError`."""
    return unpack(arena, store.get(session_id, arena.blobs), device)


def save_file(store: Store, session_id: str, data: bytes) -> File:
    """Put a byte string into the store; it stays once a commit names it."""
    return File(len(data), store.put(session_id, pack_file(data)))


def load_file(store: Store, session_id: str, file: File) -> bytes:
    """A byte string back from the store. Raises `BlobsMissing`, `BlobCorrupt`, `SchemaError`."""
    return unpack_file(file, store.get(session_id, file.blobs))


class _Reader:
    """Reads blobs one after the other into memory that is given."""

    def __init__(self, blobs: Sequence[bytes]) -> None:
        self._rest = [memoryview(blob) for blob in reversed(blobs)]

    def fill(self, target: memoryview) -> None:
        while target:
            blob = self._rest.pop()
            count = min(len(blob), len(target))
            target[:count] = blob[:count]
            target = target[count:]
            if count < len(blob):
                self._rest.append(blob[count:])


def _read_tensor(source: _Reader, ref: TensorRef) -> Tensor:
    data = torch.empty(ref.stop - ref.start, dtype=torch.uint8)
    source.fill(data.numpy().data)
    return data.view(DTYPES[ref.dtype]).reshape(ref.shape)


def _dtype_name(tensor: Tensor) -> str:
    if tensor.dtype not in _NAMES:
        raise ValueError(f"tensors of {tensor.dtype} can not be stored")
    return _NAMES[tensor.dtype]


def _check_layout(refs: Sequence[TensorRef], size: int) -> None:
    end = 0
    for ref in refs:
        if ref.dtype not in DTYPES or min(ref.shape, default=0) < 0:
            raise SchemaError("the arena holds a tensor of unknown kind")
        if ref.start != end or ref.stop - ref.start != math.prod(ref.shape) * DTYPES[ref.dtype].itemsize:
            raise SchemaError("the arena's shapes and byte ranges do not agree")
        end = ref.stop
    if end != size or len({ref.name for ref in refs}) != len(refs):
        raise SchemaError("the arena does not describe its blobs")


def _cuts(refs: Sequence[TensorRef]) -> list[tuple[int, int]]:
    """Byte ranges of the blobs: large tensors begin and end at a cut, small ones share."""
    ends = [0]
    for ref in refs:
        if ref.stop - ref.start >= _OWN_BLOBS:
            ends += [ref.start, ref.stop]
    if refs:
        ends.append(refs[-1].stop)
    return [cut for start, stop in pairwise(ends) for cut in _slices(start, stop)]


def _slices(start: int, stop: int) -> list[tuple[int, int]]:
    return [(low, min(low + MAX_BLOB, stop)) for low in range(start, stop, MAX_BLOB)]
