"""Log records and snapshots in the memory of this process, by branch."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from longtake.state_cache.blobs import names_in
from longtake.state_cache.ids import lineage_of
from longtake.state_cache.protocol import Collected
from longtake.state_cache.records import Arena, ChunkRecord, Span, decode, decode_chunk, encode
from longtake.state_cache.retention import Needed


@dataclass
class Branch:
    """What one session wrote between two of its rewinds, encoded, so that nobody can change it through a reference."""

    records: dict[int, bytes] = field(default_factory=dict)
    snapshots: dict[int, bytes] = field(default_factory=dict)


class MemoryLog:
    """Branches of every lineage; who calls holds the store's lock."""

    def __init__(self) -> None:
        self.branches: dict[str, Branch] = defaultdict(Branch)

    def write(self, branch: str, record: ChunkRecord) -> None:
        """Add a log record."""
        self.branches[branch].records[record.index] = encode(record)

    def attach(self, branch: str, index: int, snapshot: Arena) -> None:
        """Add a snapshot, in place of an earlier one."""
        self.branches[branch].snapshots[index] = encode(snapshot)

    def records(self, path: Iterable[Span]) -> list[ChunkRecord]:
        """Log records of a path, in order. Raises `SchemaError` where one is missing."""
        places = ((self._at(span), index) for span in path for index in range(span.start, span.stop))
        return [decode_chunk(branch.records.get(index), index) for branch, index in places]

    def snapshots(self, path: Iterable[Span]) -> dict[int, Arena]:
        """Snapshots of a path by their chunk, in order."""
        found = {
            index: data
            for span in path
            for index, data in sorted(self._at(span).snapshots.items())
            if span.start <= index < span.stop
        }
        return {index: decode(data, Arena) for index, data in found.items()}

    def snapshots_of(self, lineage: str) -> Mapping[str, list[int]]:
        """Chunks after which there is a snapshot, by branch."""
        return {name: list(branch.snapshots) for name, branch in self._of(lineage)}

    def sweep(self, lineage: str, marked: Needed) -> Collected:
        """Drop what nothing needs; how many records and snapshots went, and how many became stubs."""
        records = expired = snapshots = 0
        for name, branch in list(self._of(lineage)):
            snapshots += _drop(branch.snapshots, (i for i in branch.snapshots if (name, i) not in marked.snapshots))
            records += _drop(branch.records, (i for i in branch.records if not marked.has_record(name, i)))
            expired += _expire(branch, (i for i in branch.records if not marked.has_whole(name, i)))
            if not branch.records and not branch.snapshots:
                del self.branches[name]
        return Collected(records=records, expired=expired, snapshots=snapshots)

    def names(self, lineage: str) -> Iterator[str]:
        """Blobs that the lineage's records and snapshots name."""
        for _, branch in self._of(lineage):
            for data in branch.records.values():
                yield from names_in(decode(data, ChunkRecord))
            for data in branch.snapshots.values():
                yield from names_in(arena=decode(data, Arena))

    def _at(self, span: Span) -> Branch:
        return self.branches.get(span.branch, Branch())

    def _of(self, lineage: str) -> Iterator[tuple[str, Branch]]:
        return (item for item in self.branches.items() if lineage_of(item[0].partition(":")[0]) == lineage)


def _drop(found: dict[int, bytes], gone: Iterable[int]) -> int:
    indices = list(gone)
    for index in indices:
        del found[index]
    return len(indices)


def _expire(branch: Branch, past: Iterable[int]) -> int:
    whole = [record for index in past if not (record := decode(branch.records[index], ChunkRecord)).expired]
    for record in whole:
        branch.records[record.index] = encode(record.stub())
    return len(whole)
