"""One session in the memory of this process, and what has to be right for a step of it."""

from dataclasses import dataclass, field
from typing import Self

from longtake.state_cache.errors import Fenced, HeadConflict, KeyReused, RequestDone
from longtake.state_cache.protocol import Commit, Place, Rewind
from longtake.state_cache.records import (
    Fence,
    Head,
    Holder,
    Parent,
    RequestRecord,
    SessionRecord,
    decode,
    encode,
)


@dataclass
class Entry:
    """A session; records are kept encoded, so that nobody can change them through a reference.

    `place`, `owner`, `parent` and `create_key` are those of the record, for when that can not be read.
    """

    record: bytes
    head: Head
    ttl: float | None
    place: Place
    owner: str
    parent: Parent | None
    create_key: str | None
    expires: float | None = None
    fence: Fence | None = None
    holder: Holder | None = None
    leased_until: float | None = None
    requests: dict[str, bytes] = field(default_factory=dict)

    @classmethod
    def of(cls, session: SessionRecord, head: Head) -> Self:
        """A session that begins."""
        place = Place(session.created_at, session.id)
        return cls(encode(session), head, session.ttl_s, place, session.owner, session.parent, session.create_key)

    def prolong(self, now: float) -> None:
        """It was used."""
        if self.ttl is not None:
            self.expires = now + self.ttl

    def move(self, step: Commit | Rewind, head: Head, now: float) -> None:
        """It stands at `head` after a step."""
        self.head = head
        if step.key is not None and step.request is not None:
            self.requests[step.key] = encode(step.request)
        self.prolong(now)

    def check_request(self, step: Commit | Rewind) -> None:
        """Raises `KeyReused`, `RequestDone` when the step's request may not take part in it."""
        if step.key is None or step.request is None or (data := self.requests.get(step.key)) is None:
            return
        known = decode(data, RequestRecord)
        if known.fingerprint != step.request.fingerprint:
            raise KeyReused("the key belongs to another request")
        if known.done:
            raise RequestDone("the request of this key has finished")

    def check_fence(self, fence: Fence) -> None:
        """Raises `Fenced`."""
        if self.fence != fence:
            raise Fenced("a later request has taken the session over, here or on another server")

    def check_head(self, fence: Fence, chunk: int, revision: int) -> None:
        """Raises `Fenced`, `HeadConflict`."""
        self.check_fence(fence)
        if (self.head.chunk, self.head.revision) != (chunk, revision):
            raise HeadConflict(self.head.chunk, self.head.revision)


@dataclass
class Claim:
    """What an idempotency key is bound to, and until when; None once the session of this id was created."""

    fingerprint: str
    session_id: str
    expires: float | None
