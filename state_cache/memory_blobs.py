"""Blobs in the memory of this process, by lineage and name."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from longtake.state_cache.blobs import ORPHAN_SECONDS, verify
from longtake.state_cache.errors import BlobsMissing
from longtake.state_cache.records import BlobRef


@dataclass
class Blob:
    """The bytes, and when they go unless a record names them first; None once one did."""

    data: bytes
    expires: float | None


class MemoryBlobs:
    """Blobs of every lineage; who calls holds the store's lock.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self.blobs: dict[tuple[str, str], Blob] = {}

    def put(
        self, lineage: str, refs: Sequence[BlobRef], data: Sequence[bytes | memoryview], *, mend: bool = False
    ) -> None:
        """Keep copies of these bytes for ten minutes at least; with `mend`, also of those that are there already."""
        self._drop_orphans()
        expires = self._clock() + ORPHAN_SECONDS
        for ref, content in zip(refs, data, strict=True):
            blob = self.blobs.get((lineage, ref.name))
            if blob is None:
                self.blobs[lineage, ref.name] = Blob(bytes(content), expires)
                continue
            if mend:
                blob.data = bytes(content)
            if blob.expires is not None:
                blob.expires = expires

    def get(self, lineage: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """Blobs by reference, each verified. Raises `BlobsMissing`, `BlobCorrupt`."""
        self.require(lineage, [ref.name for ref in refs])
        return [verify(ref, self.blobs[lineage, ref.name].data) for ref in refs]

    def require(self, lineage: str, names: Collection[str]) -> None:
        """Raises `BlobsMissing` unless all are there."""
        self._drop_orphans()
        if missing := [name for name in names if (lineage, name) not in self.blobs]:
            raise BlobsMissing(f"{len(missing)} blobs are not in the store")

    def keep(self, lineage: str, names: Collection[str]) -> None:
        """A record names these now: they stay until `free`."""
        for name in names:
            self.blobs[lineage, name].expires = None

    def free(self, lineage: str, needed: Collection[str]) -> int:
        """Drop what records named and nothing needs any more; returns how many went."""
        gone = [
            key
            for key, blob in self.blobs.items()
            if key[0] == lineage and blob.expires is None and key[1] not in needed
        ]
        for key in gone:
            del self.blobs[key]
        return len(gone)

    def used_bytes(self) -> int:
        """Bytes in use."""
        return sum(len(blob.data) for blob in self.blobs.values())

    def _drop_orphans(self) -> None:
        now = self._clock()
        for key in [key for key, blob in self.blobs.items() if blob.expires is not None and blob.expires <= now]:
            del self.blobs[key]
