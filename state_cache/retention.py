"""What of a lineage is still needed: the marking half of its garbage collection, free of any store.

A record is needed when the path of a session leads through it; a snapshot when a policy keeps it for one of them; a
blob when a needed record, a needed snapshot, a session or its cursor names it.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from longtake.state_cache.branches import branch_of, spans
from longtake.state_cache.records import Head, SessionRecord, Span

Snapshots = Mapping[str, Iterable[int]]
"""Chunks after which there is a snapshot, by branch."""

_NEVER = 1 << 62


@dataclass(frozen=True)
class Retention:
    """What a session keeps.

    Attributes:
        snapshots: newest snapshots that stay, at least 1.
        chunks: newest log records that stay whole, rounded up to the next snapshot; None: all of them.
    """

    snapshots: int = 2
    chunks: int | None = None

    @property
    def stride(self) -> int | None:
        """How far apart older snapshots stay, so that the horizon always finds one; None: none stay."""
        return None if self.chunks is None else max(1, self.chunks // 4)


@dataclass(frozen=True)
class Root:
    """A session of a lineage, as it stood at one moment."""

    session: SessionRecord
    head: Head

    @property
    def path(self) -> tuple[Span, ...]:
        """Where its log records are."""
        return spans(self.session.id, self.head)

    def snapshots(self, found: Snapshots) -> list[int]:
        """Chunks of its path after which there is a snapshot, in order."""
        return sorted(i for span in self.path for i in found.get(span.branch, ()) if span.start <= i < span.stop)


@dataclass
class Needed:
    """What a lineage needs: snapshots, and of each branch ranges of records, each with the horizon of a session."""

    ranges: dict[str, list[tuple[range, int]]] = field(default_factory=lambda: defaultdict(list))
    snapshots: set[tuple[str, int]] = field(default_factory=set)

    def has_record(self, branch: str, index: int) -> bool:
        """Whether a session leads through this record."""
        return any(index in extent for extent, _ in self.ranges.get(branch, ()))

    def has_whole(self, branch: str, index: int) -> bool:
        """Whether a session needs more of this record than its digests."""
        return any(index in extent and index >= horizon for extent, horizon in self.ranges.get(branch, ()))


def needed(roots: Iterable[Root], snapshots: Snapshots, retention: Retention) -> Needed:
    """What the sessions of a lineage need.

    Everything that a session writes after it was read counts as needed: the range of its own branch is open.
    """
    marked = Needed()
    for root in roots:
        *older, own = root.path
        for span in (*older, Span(own.branch, own.start, _NEVER)):
            marked.ranges[span.branch].append((range(span.start, span.stop), root.head.horizon))
        for index in kept_snapshots(root.snapshots(snapshots), root.head.horizon, retention):
            branch = branch_of(root.path, index)
            assert branch is not None
            marked.snapshots.add((branch, index))
        # written while the marking went on
        marked.snapshots |= {(own.branch, i) for i in snapshots.get(own.branch, ()) if i > root.head.chunk}
    return marked


def kept_snapshots(indices: Sequence[int], horizon: int, retention: Retention) -> list[int]:
    """Those of a session's snapshots (in order) that stay: the newest, the one at the horizon, and one a stride."""
    usable = [index for index in indices if index >= horizon - 1]
    kept = set(usable[-retention.snapshots :])
    if retention.stride is None:
        return sorted(kept | set(usable[:1] if horizon else ()))
    last: int | None = None
    for index in usable:
        if last is None or index >= last + retention.stride:
            kept.add(index)
            last = index
    return sorted(kept)


def next_horizon(
    root: Root, snapshots: Snapshots, retention: Retention, is_sound: Callable[[int], bool] = lambda _: True
) -> int:
    """First chunk that has to stay whole: right behind the newest snapshot that leaves enough chunks after it.

    Nothing before it can be replayed any more, so the snapshot has to be `is_sound`: asked newest first.
    """
    if retention.chunks is None:
        return root.head.horizon
    enough = (i for i in reversed(root.snapshots(snapshots)) if root.head.chunk - i >= retention.chunks)
    better = (i + 1 for i in enough if i + 1 > root.head.horizon)
    return next((horizon for horizon in better if is_sound(horizon - 1)), root.head.horizon)
