"""One request for chunks against one session as it stands: what is left to do, and what each step commits."""

from collections.abc import Callable
from dataclasses import dataclass

import xxhash

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Advanced, PostChunks
from longtake.server.engine.branching import rewound
from longtake.server.engine.command import Command
from longtake.server.engine.plan import ChunkPlan, Plan, next_frame, pending_count
from longtake.server.engine.track import SessionCamera
from longtake.state_cache import ChunkRecord, Commit, Cursor, Fence, Head, RequestRecord, SessionRecord, encode


@dataclass(frozen=True)
class Delivery:
    """How a client wants its chunks.

    Attributes:
        on_commit: called with every chunk of the request, in order, as soon as it is durable.
        hurry: let nothing else compute for the request until its first chunk is committed.
    """

    on_commit: Callable[[ChunkRecord], None]
    hurry: bool


AT_THE_END = Delivery(on_commit=lambda _: None, hurry=False)
"""All chunks in one answer."""


@dataclass(frozen=True)
class Outcome:
    """The answer to a request; `commit_ms` is what this attempt spent in commits."""

    answer: Advanced
    replayed: bool = False
    commit_ms: float = 0.0


@dataclass(frozen=True)
class Task:
    """One request against one session as it stands, with what earlier attempts at the request have done."""

    session: SessionRecord
    head: Head
    camera: SessionCamera
    command: Command
    plan: Plan
    key: str | None
    progress: RequestRecord | None

    @property
    def done(self) -> bool:
        """Whether an earlier attempt carried the whole request through."""
        return self.progress is not None and self.progress.done

    @property
    def first_chunk(self) -> int:
        """Index of the request's first chunk."""
        return self.head.chunk + 1 if self.progress is None else self.progress.first_chunk

    def step(self, fence: Fence, offset: int) -> Commit:
        """The commit of planned chunk `offset`, still without its record; past the last one, of the cursor alone."""
        chunks = self.plan.chunks
        plan = chunks[offset] if offset < len(chunks) else self.plan
        head = self.head.chunk + offset
        return Commit(
            session_id=self.session.id,
            fence=fence,
            revision=self.head.revision,
            expected_head=head,
            cursor=plan.cursor,
            key=self.key,
            request=self._progress(min(head + 1, self.head.chunk + len(chunks)), plan, offset),
        )

    def _progress(self, chunk: int, plan: ChunkPlan | Plan, offset: int) -> RequestRecord | None:
        """Progress once `chunk` is the last committed one; nothing without a key."""
        if self.key is None:
            return None
        done = offset >= len(self.plan.chunks) - 1
        return RequestRecord(
            fingerprint=self.command.fingerprint,
            first_chunk=self.first_chunk,
            chunks=chunk + 1 - self.first_chunk,
            frames_used=plan.frames_used,
            done=done,
            revision=self.head.revision,
            pending_poses=pending_count(self.plan.cursor) if done else 0,
            cursor="" if done else cursor_hash(plan.cursor),
        )


def cursor_hash(cursor: Cursor) -> str:
    """Tells one cursor from another."""
    return xxhash.xxh3_128_hexdigest(encode(cursor))


def request_key(key: str | None) -> str | None:
    """The name that a request's key has in its session, beside those of other routes."""
    return None if key is None else f"chunks:{key}"


def check_position(request: PostChunks, head: Head, progress: RequestRecord | None) -> None:
    """Refuse a request that expects the session elsewhere, or a retry whose session has moved on since.

    Raises `chunk_conflict`, `state_rolled_back`, `rewound`.
    """
    next_chunk, pending = head.chunk + 1, pending_count(head.cursor)
    if progress is not None:
        if rewound(progress, head):
            raise ProblemError("rewound", "chunks of this request were rewound away", "Idempotency-Key")
        left = (progress.first_chunk + progress.chunks, progress.revision, progress.cursor)
        if not progress.done and left != (next_chunk, head.revision, cursor_hash(head.cursor)):
            raise _conflict("the session has moved on since this request was cut short", next_chunk, pending)
        return
    if request.expected_chunk is not None and request.expected_chunk > next_chunk and not head.rewinds:
        raise ProblemError(
            "state_rolled_back",
            "the session has never come so far, or its store has lost what was acknowledged",
            "expected_chunk",
            extra={"next_chunk": next_chunk, "next_frame": next_frame(next_chunk, pending)},
        )
    if request.expected_chunk not in (None, next_chunk):
        raise _conflict("expected_chunk is not the session's next chunk", next_chunk, pending)
    if request.expected_frame not in (None, next_frame(next_chunk, pending)):
        raise _conflict("expected_frame is not the session's next frame", next_chunk, pending)


def _conflict(detail: str, next_chunk: int, pending: int) -> ProblemError:
    counters = {"next_chunk": next_chunk, "next_frame": next_frame(next_chunk, pending), "pending_poses": pending}
    return ProblemError("chunk_conflict", detail, extra=counters)
