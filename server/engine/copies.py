"""Tensors between a GPU and pinned host memory, on streams of their own, while something else computes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import ParamSpec, Protocol, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")


class InThread(Protocol):
    """`await in_thread(function, …)` keeps the event loop free, as `Workers.io` and `StoreCalls.call` do."""

    async def __call__(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run a blocking function elsewhere and wait for it."""


@dataclass(frozen=True)
class Parked:
    """Tensors in host memory, by name; those in `moved` were on the device, the others are the very same tensors."""

    tensors: dict[str, Tensor]
    moved: frozenset[str]


class Copies(Protocol):
    """How tensors leave the device and come back. Sources must not be mutated; all of this is thread-safe."""

    def leaving(self, tensors: Mapping[str, Tensor]) -> Callable[[], Parked]:
        """A function that copies the tensors to the host and blocks until it is done.

        It waits for what the device had to compute when `leaving` was called, not for what came later, and keeps the
        tensors alive.
        """

    def back(self, parked: Parked) -> dict[str, Tensor]:
        """The tensors on the device again, ready for the compute stream; blocks until they are."""


class GpuCopies:
    """Copies of one GPU.

    Pinned memory is slow to allocate: it comes from torch's caching allocator, which hands out again what was let go.
    Every tensor has memory of its own, since states of one model hold tensors of the same few sizes.

    Args:
        device: the GPU, whose default stream computes.
    """

    def __init__(self, device: torch.device | str = "cuda") -> None:
        self._device = torch.device(device)
        self._compute = torch.cuda.default_stream(self._device)
        self._down = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._up = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def leaving(self, tensors: Mapping[str, Tensor]) -> Callable[[], Parked]:
        """As in `Copies`."""
        computed = self._compute.record_event()

        def copy() -> Parked:
            with torch.cuda.stream(self._down):
                self._down.wait_event(computed)
                parked = {name: _pinned(x) if x.is_cuda else x for name, x in tensors.items()}
                _finish(self._down)
            return Parked(parked, frozenset(name for name, x in tensors.items() if x.is_cuda))

        return copy

    def back(self, parked: Parked) -> dict[str, Tensor]:
        """As in `Copies`."""
        with torch.cuda.stream(self._up):
            tensors = {name: self._raised(x) if name in parked.moved else x for name, x in parked.tensors.items()}
            _finish(self._up)
        return tensors

    def _raised(self, x: Tensor) -> Tensor:
        raised = x.to(self._device, non_blocking=True)
        raised.record_stream(self._compute)  # freed later, its memory is not used again before that stream is past it
        return raised


def memory(tensors: Iterable[Tensor]) -> int:
    """Bytes behind tensors; a storage that several of them share counts once, and wholly."""
    storages = (x.untyped_storage() for x in tensors)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def parked_memory(tensors: Iterable[Tensor]) -> int:
    """Bytes of host memory that tensors take once they are parked: torch pins powers of two."""
    tensors = list(tensors)
    pinned = sum(1 << (x.nbytes - 1).bit_length() for x in tensors if x.is_cuda and x.nbytes)
    return pinned + memory(x for x in tensors if not x.is_cuda)


def _pinned(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)


def _finish(stream: torch.cuda.Stream) -> None:
    """Wait for the stream without spinning."""
    done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
    done.record(stream)
    done.synchronize()
