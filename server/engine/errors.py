"""Store failures as the problems that a client sees."""

import math
from collections.abc import Iterator
from contextlib import contextmanager

from longtake.api_schemas.problems import ProblemError
from longtake.state_cache import (
    BlobCorrupt,
    BlobsMissing,
    ChunkNotFound,
    Fenced,
    HeadConflict,
    KeyReused,
    LeaseHeld,
    RequestDone,
    SchemaError,
    SessionNotFound,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
)


@contextmanager
def store_problems() -> Iterator[None]:
    """Turn the store's exceptions into `ProblemError`s."""
    try:
        yield
    except SessionNotFound as error:
        raise ProblemError("session_not_found", "there is no such session", "session_id") from error
    except ChunkNotFound as error:
        raise ProblemError("chunk_not_found", "the session has no such chunk", "index") from error
    except LeaseHeld as error:
        raise _session_busy(error) from error
    except Fenced as error:
        raise ProblemError("session_fenced", f"{error}; ask again", retry_after=1) from error
    except HeadConflict as error:
        raise ProblemError(
            "chunk_conflict", "the session has moved on", extra={"next_chunk": error.chunk + 1}
        ) from error
    except KeyReused as error:
        raise ProblemError(
            "idempotency_key_reused", "this key was used with another request", "Idempotency-Key"
        ) from error
    except RequestDone as error:
        raise ProblemError(
            "in_progress", "another server has just finished this request; ask again", retry_after=1
        ) from error
    except StoreUnsuitable as error:
        raise ProblemError(
            "store_unavailable", f"the session store is not fit to serve: {error}", retry_after=30
        ) from error
    except StoreUnavailable as error:
        raise ProblemError("store_unavailable", "the session store can not serve now", retry_after=2) from error
    except StoreFull as error:
        raise ProblemError("store_full", "the session store has no room left", retry_after=30) from error
    except (BlobCorrupt, BlobsMissing, SchemaError) as error:
        raise ProblemError("state_corrupt", "stored data of this session is missing or damaged") from error


def _session_busy(error: LeaseHeld) -> ProblemError:
    """Who holds the session, when that is known, and when to ask again: a holder that works renews its lease."""
    return ProblemError(
        "session_busy",
        "another server works on this session; ask again, or ask that one",
        retry_after=max(1, math.ceil(error.left_s)),
        extra={"owner_address": error.address} if error.address else None,
    )
