"""Blobs in Redis or Valkey: plain values under their content's name, moved with the next window already under way."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeVar, cast

from longtake.state_cache.blobs import MAX_BLOB, ORPHAN_SECONDS, describe, verify
from longtake.state_cache.bulk import Bulk, UnexpectedReply
from longtake.state_cache.client import Argument, Client
from longtake.state_cache.errors import BlobsMissing
from longtake.state_cache.failpoints import failpoint
from longtake.state_cache.records import BlobRef

_SENT_UNSEEN = 1 << 18  # bytes that are sent without a look whether they are there: cheaper than a round trip
_LOOK = 256  # names asked for at a time
_TURN = 128  # blobs moved before others may have the connection
_SEND_WINDOW = 8  # blobs sent before the replies to those before are read
_RECEIVE_WINDOW = 2 * MAX_BLOB  # bytes asked for before those asked for earlier have arrived: servers buffer them
_RECEIVE_COUNT = 64

Item = TypeVar("Item")
Blob = tuple[str, memoryview]
Place = tuple[BlobRef, memoryview]


class RedisBlobs:
    """Blobs of a server; `prefix` is that of the keys of a lineage's blobs."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, prefix: str, data: Sequence[bytes | memoryview]) -> tuple[BlobRef, ...]:
        """See `Store.put`."""
        refs = tuple(describe(blob) for blob in data)
        blobs = {prefix + ref.name: memoryview(blob).cast("B") for ref, blob in zip(refs, data, strict=True)}
        if sum(map(len, blobs.values())) > _SENT_UNSEEN:
            for key in self._present(list(blobs)):
                del blobs[key]
        if len(blobs) > _SEND_WINDOW:
            self._put_many(list(blobs.items()))
        elif blobs:
            self._client.run_all([*map(_prolong, blobs), *map(_set, blobs.items())])
            failpoint("put.middle")
        return refs

    def get(self, prefix: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """See `Store.get`."""
        with self._client.bulk() as bulk:
            return [_get(bulk, prefix, ref) for ref in refs]

    def get_into(self, prefix: str, refs: Sequence[BlobRef], buffers: Sequence[memoryview]) -> None:
        """See `Store.get_into`."""
        for turn in _parts(list(zip(refs, buffers, strict=True)), _TURN):
            try:
                with self._client.bulk() as bulk:
                    _receive(bulk, prefix, turn)
            except UnexpectedReply:
                # on another connection, one by one, to find out what it was
                for ref, buffer in turn:
                    buffer[:] = self.get(prefix, [ref])[0]

    def _put_many(self, blobs: Sequence[Blob]) -> None:
        for turn in _parts(blobs, _TURN):
            with self._client.bulk() as bulk:
                _send(bulk, turn)

    def _present(self, keys: Sequence[str]) -> Sequence[str]:
        present = []
        for window in _parts(keys, _LOOK):
            # the lifetime first: what is found afterwards stays long enough; GT leaves committed blobs without one
            replies = self._client.run_all([*map(_prolong, window), *(("EXISTS", key) for key in window)])
            present += [key for key, exists in zip(window, replies[len(window) :], strict=True) if exists]
        return present


def _prolong(key: str) -> Sequence[Argument]:
    return "PEXPIRE", key, ORPHAN_SECONDS * 1000, "GT"


def _set(blob: Blob) -> Sequence[Argument]:
    # NX: an equal blob that was committed meanwhile must not get a time to live again
    return "SET", *blob, "NX", "PX", ORPHAN_SECONDS * 1000


def _send(bulk: Bulk, blobs: Sequence[Blob]) -> None:
    under_way = 0
    for window in _parts(blobs, _SEND_WINDOW):
        bulk.send(map(_set, window))
        _drain(bulk, under_way)
        under_way = len(window)
        failpoint("put.middle")
    _drain(bulk, under_way)


def _drain(bulk: Bulk, replies: int) -> None:
    for _ in range(replies):
        bulk.receive()


def _receive(bulk: Bulk, prefix: str, places: Sequence[Place]) -> None:
    for window, following in pairwise([(), *_windows(places), ()]):
        bulk.send(("GET", prefix + ref.name) for ref, _ in following)
        for ref, buffer in window:
            bulk.receive_into(buffer)
            verify(ref, buffer)


def _get(bulk: Bulk, prefix: str, ref: BlobRef) -> bytes:
    bulk.send([("GET", prefix + ref.name)])
    if (data := cast("bytes | None", bulk.receive())) is None:
        raise BlobsMissing("a blob is not in the store")
    return verify(ref, data)


def _parts(items: Sequence[Item], count: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + count] for start in range(0, len(items), count))


def _windows(places: Iterable[Place]) -> Iterator[Sequence[Place]]:
    window: list[Place] = []
    size = 0
    for place in places:
        if window and (size + len(place[1]) > _RECEIVE_WINDOW or len(window) == _RECEIVE_COUNT):
            yield window
            window, size = [], 0
        window.append(place)
        size += len(place[1])
    if window:
        yield window
