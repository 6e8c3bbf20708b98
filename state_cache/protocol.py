"""What the server asks of a session store. Calls block and are thread-safe; records come back decoded and verified."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from longtake.state_cache.records import (
    Arena,
    BlobRef,
    ChunkRecord,
    Cursor,
    Fence,
    Head,
    RequestRecord,
    SessionRecord,
)

CLAIM_SECONDS = 24 * 3600
"""How long a claim waits for its session to be created."""


@dataclass(frozen=True, kw_only=True)
class Commit:
    """One atomic step of a session. Its blobs were put before.

    Attributes:
        fence: right to commit, from `Store.open`.
        revision: revision that the step builds on.
        expected_head: last committed chunk that the step builds on, -1 for none.
        cursor: where the session stands afterwards.
        chunk: the next log record, of index `expected_head + 1`; without one the head stays.
        snapshot: full state after the new head; replaces an earlier one of the same chunk.
        key: idempotency key of the request that this step is part of, together with `request`.
        request: progress of that request after this step.
    """

    session_id: str
    fence: Fence
    revision: int
    expected_head: int
    cursor: Cursor
    chunk: ChunkRecord | None = None
    snapshot: Arena | None = None
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
    durability: Literal["strict", "relaxed", "none"]
    policy: str
    used_bytes: int
    limit_bytes: int


class Store(Protocol):
    """Sessions, their logs and their blobs.

    Every call may raise `StoreUnavailable`; every write `StoreFull`; every call with the id of a session that is not
    there `SessionNotFound` (except `put`, `get` and `claim`, which come before it exists); every read of a record
    `SchemaError`.

    A session with a `ttl_s` expires that long after the last `create`, `open` or `commit`, by the store's clock. From
    then on it is not there, although its bytes stay until `sweep` (and its id can not be used again before).
    """

    def create(self, session: SessionRecord, cursor: Cursor) -> None:
        """Begin a session at chunk -1, revision 0. Raises `SessionExists`, `BlobsMissing`."""

    def open(self, session_id: str) -> Fence:
        """Take the right to commit. The last opener wins: earlier fences are worth nothing from here on."""

    def read(self, session_id: str) -> tuple[SessionRecord, Head, Fence | None]:
        """The session, where it stands, and the fence in force (None: never opened)."""

    def commit(self, commit: Commit) -> None:
        """Carry out a step wholly or not at all.

        Raises, in this order of precedence: `SessionNotFound`, `KeyReused`, `RequestDone`, `Fenced`, `HeadConflict`,
        `BlobsMissing`. After `StoreUnavailable` the step may have happened: `read` tells.
        """

    def chunk(self, session_id: str, index: int) -> ChunkRecord:
        """One log record. Raises `ChunkNotFound`."""

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """Those of the log records start…stop-1 that exist, in order."""

    def request(self, session_id: str, key: str) -> RequestRecord | None:
        """Progress of the request with this idempotency key; None when the session never saw it."""

    def snapshots(self, session_id: str) -> dict[int, Arena]:
        """Snapshots by the chunk after which they were taken, oldest first."""

    def prune_snapshots(self, session_id: str, fence: Fence, keep: int) -> None:
        """Drop all but the newest `keep` snapshots, and the blobs that no other record names. Raises `Fenced`."""

    def put(self, session_id: str, data: Sequence[bytes | memoryview]) -> tuple[BlobRef, ...]:
        """Store blobs of at most 1 MiB for this lineage; those already there are not sent again.

        A blob that no record names goes away after ten minutes. The buffers must not change during the call.
        """

    def get(self, session_id: str, refs: Sequence[BlobRef]) -> list[bytes]:
        """Blobs by reference, each verified. Raises `BlobsMissing`, `BlobCorrupt`."""

    def claim(self, route_key: str, fingerprint: str, session_id: str) -> tuple[str, str]:
        """Bind an idempotency key of session creation to a request and a session id, unless it is bound already.

        Returns the pair (fingerprint, session id) in force. It lives until the session of this id whose `create_key`
        is `route_key` is deleted or expires; 24 hours if that is not created.
        """

    def list(self, limit: int, after: str | None = None, owner: str = "") -> list[str]:
        """Ids of an owner's sessions, newest first, at most `limit`, from behind `after` on.

        Raises `SessionNotFound` when `after` is not one of the owner's.
        """

    def delete(self, session_id: str) -> None:
        """Drop a session, its log, its claim, and the blobs that no other session of its lineage names."""

    def sweep(self, limit: int = 100) -> int:
        """Drop at most `limit` expired sessions as `delete` would; returns how many this call dropped.

        Several may sweep at once. Sessions that this version can not read are left alone.
        """

    def check(self) -> StoreStatus:
        """How the store is set up. Raises `StoreUnsuitable` when it could lose sessions by design or is too old."""

    def close(self) -> None:
        """Let go of connections."""
