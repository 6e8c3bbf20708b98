"""Blobs in Redis or Valkey: plain values under their content's name, moved with the next window already under way."""

from collections.abc import Callable, Iterable, Iterator, Sequence
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
_FEW = 8  # blobs that travel as a command does
_WINDOW = 2 * MAX_BLOB  # bytes under way besides those of the window before: servers buffer what is asked for
_WINDOW_COUNT = 64

Name = TypeVar("Name", str, BlobRef)
Item = TypeVar("Item")
Blob = tuple[str, memoryview]
Place = tuple[BlobRef, memoryview]


class RedisBlobs:
    """Blobs of a server; `prefix` is that of the keys of a lineage's blobs."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, prefix: str, data: Sequence[bytes | memoryview], *, mend: bool = False) -> tuple[BlobRef, ...]:
        """See `Store.put`."""
        refs = tuple(describe(blob) for blob in data)
        blobs = {prefix + ref.name: memoryview(blob).cast("B") for ref, blob in zip(refs, data, strict=True)}
        if not mend and sum(map(len, blobs.values())) > _SENT_UNSEEN:
            for key in self._present(list(blobs)):
                del blobs[key]
        there = self._put(list(blobs.items()), _set)
        if mend and there:
            present = set(self._present([key for key, _ in there]))
            self._put([blob for blob in there if blob[0] in present], _overwrite)
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

    def _put(self, blobs: Sequence[Blob], command: Callable[[Blob], Sequence[Argument]]) -> Sequence[Blob]:
        """Send blobs, a command each; returns those that it did not set."""
        replies: list[object] = []
        if len(blobs) > _FEW:
            for turn in _parts(blobs, _TURN):
                with self._client.bulk() as bulk:
                    replies += _send(bulk, turn, command)
        elif blobs:
            answers = self._client.run_all([*(_prolong(key) for key, _ in blobs), *map(command, blobs)])
            replies = answers[len(blobs) :]
            failpoint("put.middle")
        return [blob for blob, reply in zip(blobs, replies, strict=True) if reply is None]

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


def _overwrite(blob: Blob) -> Sequence[Argument]:
    # XX: one that has gone meanwhile must not come back for ever
    return "SET", *blob, "XX", "KEEPTTL"


def _send(bulk: Bulk, blobs: Sequence[Blob], command: Callable[[Blob], Sequence[Argument]]) -> Sequence[object]:
    """Send blobs, a command each; returns the replies to these."""
    replies: list[object] = []
    under_way = 0
    for window in _windows(blobs):
        # together, for the sake of servers that sync after every command
        bulk.send([("MULTI",), *map(command, window), ("EXEC",)])
        replies += _drain(bulk, under_way)
        under_way = len(window) + 2
        failpoint("put.middle")
    return [*replies, *_drain(bulk, under_way)]


def _drain(bulk: Bulk, replies: int) -> Sequence[object]:
    """Receive what answers a transaction; returns its last reply, which holds those to its commands."""
    received = [bulk.receive() for _ in range(replies)]
    return cast("list[object]", received[-1]) if received else []


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


def _windows(items: Iterable[tuple[Name, memoryview]]) -> Iterator[Sequence[tuple[Name, memoryview]]]:
    window: list[tuple[Name, memoryview]] = []
    size = 0
    for item in items:
        if window and (size + len(item[1]) > _WINDOW or len(window) == _WINDOW_COUNT):
            yield window
            window, size = [], 0
        window.append(item)
        size += len(item[1])
    if window:
        yield window
