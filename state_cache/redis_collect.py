"""Garbage collection on a Redis server: mark outside, free inside short scripts.

The epoch of a lineage goes up when a marking begins. Steps that name a blob note the epoch, so whatever was named after
the marking began is left alone, however long it takes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, cast

from longtake.state_cache.blobs import names_in
from longtake.state_cache.branches import branch_of
from longtake.state_cache.client import Client
from longtake.state_cache.errors import SessionNotFound
from longtake.state_cache.failpoints import failpoint
from longtake.state_cache.protocol import Collected
from longtake.state_cache.records import Arena, ChunkRecord, decode, decode_session, encode
from longtake.state_cache.redis_heads import read_head
from longtake.state_cache.retention import Needed, Retention, Root, needed, next_horizon
from longtake.state_cache.scripts import Keys, SessionScript

T = TypeVar("T")

_BATCH = 256  # records or blobs a round trip


IsSound = Callable[[str, int, Arena], bool]
"""Whether a session's snapshot after a chunk is that chunk's state, every byte of it."""


@dataclass(frozen=True)
class _Lineage:
    """A lineage at the beginning of an epoch: its branches and sessions, and the snapshots of each branch."""

    epoch: int
    branches: Sequence[str]
    roots: Sequence[Root]
    snapshots: Mapping[str, Mapping[int, bytes]]


class Collector:
    """Collects lineages. See `Store.collect`."""

    def __init__(self, client: Client, is_sound: IsSound) -> None:
        self._client = client
        self._is_sound = is_sound
        self._roots = SessionScript(client, "roots")
        self._horizon = SessionScript(client, "horizon")
        self._drop = SessionScript(client, "drop")
        self._expire = SessionScript(client, "expire")
        self._free = SessionScript(client, "free")
        self._retire = SessionScript(client, "retire")
        self._vacate = SessionScript(client, "vacate")

    def collect(self, keys: Keys, retention: Retention) -> Collected:
        """Move horizons, mark, sweep."""
        lineage = self._capture(keys)
        if sum(self._moves_horizon(keys, lineage, root, retention) for root in lineage.roots):
            lineage = self._capture(keys)
        marked = needed(lineage.roots, lineage.snapshots, retention)
        names = {name for root in lineage.roots for name in _names_of(root)}
        freed = self._drop_snapshots(keys, lineage, marked, names)
        for branch in lineage.branches:
            records, expired = self._drop_records(keys, branch, marked, names)
            freed = replace(freed, records=freed.records + records, expired=freed.expired + expired)
        failpoint("collect.marked")
        freed = replace(freed, blobs=self._free_blobs(keys, lineage.epoch, names))
        if not lineage.roots:
            self._vacate(keys)
        last = cast("bytes | None", self._client.run("GET", keys.epoch))
        return replace(freed, complete=last is None or int(last) == lineage.epoch)

    def _capture(self, keys: Keys) -> _Lineage:
        epoch, branches, found = cast("tuple[int, list[bytes], list[list[bytes | None]]]", self._roots(keys))
        roots = []
        for _, record, *fields in found:
            head = read_head([*fields, None, None, None, None])
            roots.append(Root(decode_session(record), head))
        names = [branch.decode() for branch in branches]
        replies = self._client.run_all([("HGETALL", keys.snapshots(branch)) for branch in names])
        snapshots = {
            branch: {int(index): data for index, data in reply.items()}
            for branch, reply in zip(names, cast("list[Mapping[bytes, bytes]]", replies), strict=True)
        }
        return _Lineage(epoch, names, roots, snapshots)

    def _moves_horizon(self, keys: Keys, lineage: _Lineage, root: Root, retention: Retention) -> bool:
        def is_sound(index: int) -> bool:
            branch = branch_of(root.path, index)
            assert branch is not None
            return self._is_sound(root.session.id, index, decode(lineage.snapshots[branch][index], Arena))

        horizon = next_horizon(root, lineage.snapshots, retention, is_sound)
        if horizon == root.head.horizon:
            return False
        own = Keys(keys.prefix, keys.lineage, root.session.id)
        branch = branch_of(root.path, horizon - 1)
        assert branch is not None
        try:
            (moved,) = self._horizon(own, root.head.revision, horizon, branch, lineage.epoch)
        except SessionNotFound:
            return False
        return bool(moved)

    def _drop_snapshots(self, keys: Keys, lineage: _Lineage, marked: Needed, names: set[str]) -> Collected:
        """Drop snapshots that are not needed; adds to `names` what the others name."""
        dropped = 0
        for branch, found in lineage.snapshots.items():
            dead = [index for index in found if (branch, index) not in marked.snapshots]
            for index in found.keys() - set(dead):
                names.update(names_in(arena=decode(found[index], Arena)))
            for batch in _batches(dead):
                (count,) = self._drop(keys, lineage.epoch, branch, *batch)
                dropped += cast("int", count)
        return Collected(snapshots=dropped)

    def _drop_records(self, keys: Keys, branch: str, marked: Needed, names: set[str]) -> tuple[int, int]:
        """Drop a branch's records that no path leads through, empty those behind every horizon; counts of both.

        Adds to `names` what the others name.
        """
        indices = sorted(int(index) for index in cast("list[bytes]", self._client.run("HKEYS", keys.chunks(branch))))
        dead = [index for index in indices if not marked.has_record(branch, index)]
        self._client.run_all([("HDEL", keys.chunks(branch), *batch) for batch in _batches(dead)])
        if len(dead) == len(indices) and not marked.ranges.get(branch):
            self._retire(keys, branch)
        expired = 0
        for record in self._records(keys, branch, [index for index in indices if marked.has_record(branch, index)]):
            if not record.expired and not marked.has_whole(branch, record.index):
                self._expire(keys, branch, record.index, encode(record.stub()))
                names.update(names_in(record.stub()))
                expired += 1
            else:
                names.update(names_in(record))
        return len(dead), expired

    def _records(self, keys: Keys, branch: str, indices: Sequence[int]) -> Iterator[ChunkRecord]:
        for batch in _batches(indices):
            found = cast("list[bytes | None]", self._client.run("HMGET", keys.chunks(branch), *batch))
            yield from (decode(data, ChunkRecord) for data in found if data is not None)

    def _free_blobs(self, keys: Keys, epoch: int, names: set[str]) -> int:
        reply = self._client.run("ZRANGE", keys.named, "-inf", f"({epoch}", "BYSCORE")
        unmarked = [name for name in cast("list[bytes]", reply) if name.decode() not in names]
        freed = 0
        for batch in _batches(unmarked):
            (count,) = self._free(keys, epoch, *batch)
            freed += cast("int", count)
            failpoint("collect.swept")
        return freed


def _names_of(root: Root) -> Iterable[str]:
    return [*names_in(arena=root.session.conditions), *names_in(arena=root.head.cursor.text)]


def _batches(items: Sequence[T]) -> list[Sequence[T]]:
    return [items[start : start + _BATCH] for start in range(0, len(items), _BATCH)]
