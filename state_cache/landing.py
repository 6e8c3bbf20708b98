"""Memory for tensors that are about to arrive as blobs: what lies in one tensor is received in its place."""

import math
import mmap
import sys
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate, count, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longtake.state_cache.blobs import MAX_BLOB
from longtake.state_cache.errors import SchemaError
from longtake.state_cache.records import TensorRef

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

_MOST = 1 << 16  # tensors of an arena, and blobs: 64 GiB
_MOST_SIDES = 16
_LARGEST = 1 << 48  # bytes of a tensor if its empty sides had one element: keeps torch's strides in range
_HUGE = 1 << 22


class _Shared(NamedTuple):
    """A blob that holds parts of several tensors, and where it begins."""

    start: int
    data: memoryview


class Landing:
    """Room for the tensors of an arena and a buffer for each of its blobs.

    A blob within one tensor is received in that tensor's memory; one that several share has a buffer of its own.

    Args:
        refs: the arena's tensors.
        sizes: bytes of its blobs.

    Raises:
        SchemaError: the blobs are not these tensors.

    Attributes:
        buffers: where to put each blob, flat and of its size.
    """

    def __init__(self, refs: Sequence[TensorRef], sizes: Sequence[int]) -> None:
        _check_layout(refs, sizes)
        self._refs = refs
        self._rooms = [_room(ref.stop - ref.start) for ref in refs]
        self._shared: list[_Shared] = []
        self.buffers = self._place(list(accumulate(sizes, initial=0)))

    def tensors(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """The tensors by name, once the buffers are filled; each is contiguous in memory of its own."""
        self._spread()
        return {
            ref.name: room.view(DTYPES[ref.dtype]).reshape(ref.shape).to(device)
            for ref, room in zip(self._refs, self._rooms, strict=True)
        }

    def _place(self, cuts: Sequence[int]) -> list[memoryview]:
        buffers, index = [], 0
        for start, stop in pairwise(cuts):
            while self._refs[index].stop <= start:
                index += 1
            ref = self._refs[index]
            if stop <= ref.stop:
                buffers.append(self._rooms[index].numpy().data[start - ref.start : stop - ref.start])
            else:
                buffers.append(memoryview(bytearray(stop - start)))
                self._shared.append(_Shared(start, buffers[-1]))
        return buffers

    def _spread(self) -> None:
        """Copy what blobs share into the tensors' own memory."""
        index = 0
        for start, data in self._shared:
            stop = start + len(data)
            while self._refs[index].stop <= start:
                index += 1
            for place in count(index):
                ref = self._refs[place]
                low, high = max(start, ref.start), min(stop, ref.stop)
                self._rooms[place].numpy().data[low - ref.start : high - ref.start] = data[low - start : high - start]
                if ref.stop >= stop:
                    break


def _room(size: int) -> Tensor:
    """Uninitialised bytes; many of them on huge pages, which the system hands out several times faster."""
    if size < _HUGE or sys.platform != "linux":
        return torch.empty(size, dtype=torch.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with suppress(OSError):  # a kernel without them
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)


def _check_layout(refs: Sequence[TensorRef], sizes: Sequence[int]) -> None:
    if max(len(refs), len(sizes)) > _MOST:
        raise SchemaError(f"the arena has more than {_MOST} tensors or blobs")
    if not all(0 < size <= MAX_BLOB for size in sizes):
        raise SchemaError("the arena has a blob of an impossible size")
    end = 0
    for ref in refs:
        if ref.start != end or ref.stop - ref.start != _bytes_in(ref):
            raise SchemaError("the arena's shapes and byte ranges do not agree")
        end = ref.stop
    if end != sum(sizes) or len({ref.name for ref in refs}) != len(refs):
        raise SchemaError("the arena does not describe its blobs")


def _bytes_in(ref: TensorRef) -> int:
    if ref.dtype not in DTYPES or len(ref.shape) > _MOST_SIDES or min(ref.shape, default=0) < 0:
        raise SchemaError("the arena holds a tensor of unknown kind")
    item = DTYPES[ref.dtype].itemsize
    if math.prod(max(side, 1) for side in ref.shape) * item > _LARGEST:
        raise SchemaError("the arena holds a tensor that is too large")
    return math.prod(ref.shape) * item
