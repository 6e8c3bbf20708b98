"""Where a page of sessions ends, as a client sends it back: opaque text, good also when that session has gone."""

import math
import re
import struct

from longtake.api_schemas.problems import ProblemError
from longtake.state_cache import Place, SessionNotFound, Store

_PLACE = re.compile(r"(ses_[a-z2-7]{39})-([0-9a-f]{16})", re.ASCII)


def place_text(place: Place) -> str:
    """A place as text; safe in a URL as it is."""
    return f"{place.session_id}-{struct.pack('>d', place.created_at).hex()}"


def place_of(store: Store, text: str, owner: str) -> Place:
    """The place back from its text, or that of a session whose id is given instead.

    Raises `session_not_found` when the owner has no such session.
    """
    if (match := _PLACE.fullmatch(text)) is not None:
        (created_at,) = struct.unpack(">d", bytes.fromhex(match[2]))
        if math.isfinite(created_at):
            return Place(created_at, match[1])
    try:
        session = store.read(text)[0]
    except SessionNotFound:
        session = None
    if session is None or session.owner != owner:
        raise ProblemError("session_not_found", "there is no such session to list from", "after")
    return Place(session.created_at, session.id)
