"""What the server asks of a session store. Calls block and are thread-safe; records come back decoded and verified."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

from longtake.state_cache.records import (
    Arena,
    BlobRef,
    ChunkRecord,
    Cursor,
    Fence,
    Head,
    Holder,
    Lease,
    RequestRecord,
    SessionRecord,
)
from longtake.state_cache.retention import Retention

Durability = Literal["none", "relaxed", "strict"]
DURABILITIES: tuple[Durability, ...] = ("none", "relaxed", "strict")
"""How well a store keeps what it acknowledged, weakest first."""

CLAIM_SECONDS = 24 * 3600
"""How long a claim waits for its session to be created."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One atomic step of a session. Its blobs were put before.

    Attributes:
        fence: right to commit, from `Store.acquire`.
        revision: revision that the step builds on.
        expected_head: last committed chunk that the step builds on, -1 for none.
        cursor: where the session stands afterwards.
        chunk: the next log record, of index `expected_head + 1`; without one the head stays.
        key: idempotency key of the request that this step is part of, together with `request`.
        request: progress of that request after this step.
    """

    session_id: str
    fence: Fence
    revision: int
    expected_head: int
    cursor: Cursor
    chunk: ChunkRecord | None = None
    key: str | None = None
    request: RequestRecord | None = None

    def __post_init__(self) -> None:
        """A chunk must follow its head, and a key must come with its request."""
        if self.chunk is not None and self.chunk.index != self.expected_head + 1:
            raise ValueError(f"chunk {self.chunk.index} does not follow head {self.expected_head}")
        if (self.key is None) != (self.request is None):
            raise ValueError("an idempotency key and its request record go together")

    @property
    def head(self) -> int:
        """Last committed chunk after this step."""
        return self.expected_head if self.chunk is None else self.chunk.index


@dataclass(frozen=True, kw_only=True)
class Rewind:
    """One atomic step back: chunks after `to_chunk` leave the session's path, its revision goes up by one.

    Attributes:
        fence: right to commit, from `Store.acquire`.
        head: where the session stands, as it was read.
        to_chunk: last chunk kept, from `head.horizon - 1` to `head.chunk`.
        cursor: where the session stands afterwards.
        key: idempotency key of the request, together with `request`.
        request: its record.
    """

    session_id: str
    fence: Fence
    head: Head
    to_chunk: int
    cursor: Cursor
    key: str | None = None
    request: RequestRecord | None = None


class Place(NamedTuple):
    """Where a session is in its owner's listing, newest first; an id decides between those of one moment."""

    created_at: float
    session_id: str


@dataclass(frozen=True, kw_only=True)
class StoreStatus:
    """Who keeps the sessions and how well.

    Attributes:
        server: `redis`, `valkey` or `memory`.
        version: of the server; empty for memory.
        durability: `strict` (on disk before it is acknowledged), `relaxed` (the last seconds may be lost) or `none`.
        policy: what the server does when its memory is full.
        used_bytes: memory in use.
        limit_bytes: memory limit, 0 for none.
    """

    server: str
    version: str
    durability: Durability
    policy: str
    used_bytes: int
    limit_bytes: int


@dataclass(frozen=True, kw_only=True)
class Collected:
    """What a garbage collection freed: log records dropped and expired, snapshots, blobs.

    `complete` is False when another one has begun meanwhile, which then has to free the rest.
    """

    records: int = 0
    expired: int = 0
    snapshots: int = 0
    blobs: int = 0
    complete: bool = True


class Store(Protocol):
    """Sessions, their logs and their blobs.

    Every call may raise `StoreUnavailable`; every write `StoreFull`; every call with the id of a session that is not
    there `SessionNotFound` (except `put`, `get` and `claim`); every read of a record `SchemaError`.

    A session with a `ttl_s` expires that long after the last `create`, `fork`, `acquire`, `renew`, `commit` or
    `rewind`, by the store's clock. From then on it is not there, although its bytes stay until `sweep` (and its id can
    not be used again before).
    """

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """Begin a session at chunk -1, revision 0. Raises `SessionExists`, `BlobsMissing`."""

    def fork(self, child: SessionRecord, source: Head, cursor: Cursor) -> None:
        """Begin a session at chunk `child.parent.chunk` of its parent, revision 0, without copying a record.

        Args:
            child: its id is of the parent's lineage.
            source: head of the parent, as it was read.
            cursor: where the child stands.

        Raises `SessionExists`, `BlobsMissing`; `HeadConflict` when the parent was rewound since or its horizon has
        passed the chunk.
        """

    def acquire(self, session_id: str, holder: Holder, lease_s: float, fence: Fence | None = None) -> Lease:
        """Take the session's lease for `lease_s` seconds of the store's clock.

        When `fence` is still in force it stays so; otherwise a new one is made, and earlier ones are worth nothing from
        here on. Raises `LeaseHeld` while a lease of another holder runs.
        """

    def renew(self, session_id: str, fence: Fence, lease_s: float) -> None:
        """The lease lasts `lease_s` seconds from now. Raises `Fenced`."""

    def release(self, session_id: str, fence: Fence) -> None:
        """Give the lease up; the fence stays in force until the next `acquire` of somebody else. Raises `Fenced`."""

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """The session, where it stands, and the fence in force (None: never acquired)."""

    def commit(self, commit: Commit) -> None:
        """Carry out a step wholly or not at all.

        Raises, in this order of precedence: `SessionNotFound`, `KeyReused`, `RequestDone`, `Fenced`, `HeadConflict`,
        `BlobsMissing`. After `StoreUnavailable` the step may have happened: `read` tells.
        """

    def rewind(self, rewind: Rewind) -> None:
        """Carry out a rewind wholly or not at all; raises as `commit` does."""

    def attach(self, session_id: str, fence: Fence, revision: int, index: int, snapshot: Arena) -> None:
        """Add the full state after chunk `index`, which this fence committed; it replaces an earlier one.

        Raises `Fenced`, `HeadConflict` (another revision, or a chunk that is not in the session's present branch),
        `BlobsMissing`.
        """

    def chunk(self, session_id: str, index: int) -> ChunkRecord:
        """One log record, which may be `expired`. Raises `ChunkNotFound`."""

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """Those of the log records start…stop-1 that the session has come to, in order.

        Raises `SchemaError` when one of them is damaged or not there.
        """

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """Progress of the request with this idempotency key; None when the session never saw it."""

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """Snapshots of the session's path by the chunk after which they were taken, oldest first."""

    def forks(self, session_id: str) -> dict[str, int]:
        """Sessions forked from this one that are there, each with the last chunk that both share."""

    def put(self, session_id: str, data: Sequence[bytes | memoryview], *, mend: bool = False) -> tuple[BlobRef, ...]:
        """Store blobs of at most 1 MiB for this lineage; those already there are not sent again.

        With `mend` these are written over in place, in case they were damaged; what keeps them stays as it is. A blob
        that no record names goes away after ten minutes. The buffers must not change during the call.
        """

    def get(self, session_id: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """Blobs by reference, each verified. Raises `BlobsMissing`, `BlobCorrupt`."""

    def get_into(self, session_id: str, refs: Sequence[BlobRef], buffers: Sequence[memoryview]) -> None:
        """Blobs by reference, each verified, into memory that is given; raises as `get` does.

        Args:
            buffers: one a blob, of its size, writable and flat (format `B`). After an error their contents are
                undefined.
        """

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """Bind an idempotency key that makes a session to a request and a session id, unless it is bound already.

        Returns the pair (fingerprint, session id) in force. It lives until the session of this id whose `create_key`
        is `route_key` is deleted or expires; 24 hours if that is not created.
        """

    def claimed(self, route_key: str) -> bool:
        """Whether `claim` would find this idempotency key bound."""

    def list(self, limit: int, after: Place | None = None, owner: str = "") -> list[Place]:
        """An owner's sessions, newest first, at most `limit`, from behind `after` on, which need not be there."""

    def owner(self, session_id: str) -> str:
        """Whose session it is, "" where there are no keys; also of one that can not be read any more."""

    def delete(self, session_id: str) -> None:
        """Drop a session and its claim. What no other session of its lineage needs goes with `collect`.

        One that can not be read goes too; its claim may stay then.
        """

    def sweep(self, limit: int = 100) -> int:
        """Drop at most `limit` expired sessions as `delete` would; returns how many this call dropped.

        Several may sweep at once. Sessions that this version can not read are left alone.
        """

    def collect(self, lineage: str, retention: Retention) -> Collected:
        """Free what no session of a lineage needs, by mark and sweep, after moving the horizons of its sessions.

        Safe beside writers, forks and other collectors: what they name while it runs stays. It may be stopped at any
        point; the next one goes on.
        """

    def littered(self, limit: int = 100) -> Sequence[str]:
        """Lineages that `collect` has not had since a session there got a new fence, was rewound or dropped."""

    def check(self) -> StoreStatus:
        """How the store is set up. Raises `StoreUnsuitable` when it could lose sessions by design or is too old."""

    def close(self) -> None:
        """Let go of connections."""
