"""Why a store refuses. Every failure of a store is one of these; none of them leaves half a change behind."""


class StoreError(Exception):
    """Anything a session store refuses or fails at."""


class SessionNotFound(StoreError):
    """There is no session with this id (malformed ids included)."""


class SessionExists(StoreError):
    """A session with this id was created before."""


class ChunkNotFound(StoreError):
    """The session has no chunk with this index."""


class Fenced(StoreError):
    """A later holder of the lease, here or on another server, has another fence: this one is worth nothing any more."""


class LeaseHeld(StoreError):
    """Another server holds the session's lease. Carries how long at most, unless it is renewed, and who it is.

    Args:
        left_s: seconds until the lease lapses.
        address: where the holder can be reached, "" when it did not say.
    """

    def __init__(self, left_s: float, address: str) -> None:
        super().__init__("another server holds the session")
        self.left_s = left_s
        self.address = address


class HeadConflict(StoreError):
    """The session stands elsewhere than the commit expects. Carries where it stands.

    Args:
        chunk: last committed chunk, -1 for none.
        revision: present revision.
    """

    def __init__(self, chunk: int, revision: int) -> None:
        super().__init__(f"the session stands at chunk {chunk}, revision {revision}")
        self.chunk = chunk
        self.revision = revision


class KeyReused(StoreError):
    """The idempotency key belongs to a request with another fingerprint."""


class RequestDone(StoreError):
    """The request of this idempotency key has finished: read its record and answer from that."""


class BlobsMissing(StoreError):
    """A blob is not in the store (never put, expired, or dropped with its last record): put it again."""


class BlobCorrupt(StoreError):
    """A blob's bytes are not the ones it is named after."""


class StoreUnavailable(StoreError):
    """The store does not answer, or can not serve now. A write may have happened: read before repeating it."""


class StoreFull(StoreError):
    """The store has no memory left for a write."""


class StoreUnsuitable(StoreError):
    """The server is too old, or set up in a way that would lose sessions."""


class SchemaError(StoreError):
    """A record is damaged or was written by a newer version."""
