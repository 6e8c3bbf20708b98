"""Session ids: unguessable, and safe inside a store key by their alphabet alone."""

import re
import secrets

from longtake.state_cache.errors import SessionNotFound

_ALPHABET = "abcdefghijklmnopqrstuvwxyz234567"
_LINEAGE_LENGTH = 13
_OWN_LENGTH = 26
_SESSION_ID = re.compile(r"ses_[a-z2-7]{39}")


def new_session_id(lineage: str | None = None) -> str:
    """`ses_` and 39 random characters: 13 of the lineage (65 bits) and 26 of the session's own (130 bits).

    Args:
        lineage: that of the parent for a fork, so that both share blobs; a fresh one by default.
    """
    own = _random(_OWN_LENGTH)
    return f"ses_{_random(_LINEAGE_LENGTH) if lineage is None else lineage}{own}"


def lineage_of(session_id: str) -> str:
    """The 13 characters that a session shares with its forks. Raises `SessionNotFound` for what is no session id."""
    if not _SESSION_ID.fullmatch(session_id):
        raise SessionNotFound("this is not a session id")
    return session_id[4 : 4 + _LINEAGE_LENGTH]


def _random(length: int) -> str:
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))
