"""The Lua scripts that make a step of a session one atomic step of the server, and what their refusals mean."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import cast

from longtake.state_cache.client import Argument, Client
from longtake.state_cache.errors import (
    BlobsMissing,
    Fenced,
    HeadConflict,
    KeyReused,
    LeaseHeld,
    RequestDone,
    SessionExists,
    SessionNotFound,
    StoreError,
)

_FREEING = ("delete", "drop", "expire", "free", "lease", "retire", "roots", "vacate")
_UNCLAIM = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
_POSTPONE = """#!lua flags=allow-oom
return redis.call('ZADD', KEYS[1], 'XX', ARGV[1], ARGV[2])
"""
_MARK = """#!lua flags=allow-oom
return redis.call('ZADD', KEYS[1], ARGV[1], ARGV[2])
"""
_UNMARK = """#!lua flags=allow-oom
local mark = redis.call('ZSCORE', KEYS[1], ARGV[1])
if mark and tonumber(mark) == tonumber(ARGV[2]) then return redis.call('ZREM', KEYS[1], ARGV[1]) end
return 0
"""
_REFUSALS: dict[bytes, tuple[type[StoreError], str]] = {
    b"NOT_FOUND": (SessionNotFound, "there is no such session"),
    b"EXISTS": (SessionExists, "the session exists"),
    b"KEY_REUSED": (KeyReused, "the key belongs to another request"),
    b"DONE": (RequestDone, "the request of this key has finished"),
    b"FENCED": (Fenced, "a later request has taken the session over, here or on another server"),
    b"BLOBS": (BlobsMissing, "blobs of this step are not in the store"),
}


@dataclass(frozen=True)
class Keys:
    """Keys of a lineage and one of its sessions; all lie in the slot of the lineage.

    Args:
        prefix: of every key of this service.
        lineage: of the session.
        session_id: the session; "" where only the lineage matters.
    """

    prefix: str
    lineage: str
    session_id: str = ""

    @property
    def base(self) -> str:
        """What every key of the lineage begins with."""
        return f"{self.prefix}:{{{self.lineage}}}:"

    @property
    def session(self) -> str:
        """The session record."""
        return f"{self.base}s:{self.session_id}"

    @property
    def head(self) -> str:
        """The hash with where the session stands, who may write it, and until when it lives."""
        return f"{self.base}h:{self.session_id}"

    @property
    def requests(self) -> str:
        """The hash of request records by idempotency key."""
        return f"{self.base}q:{self.session_id}"

    @property
    def family(self) -> str:
        """The hash of the lineage's sessions with their parents."""
        return f"{self.base}l"

    @property
    def epoch(self) -> str:
        """The number of markings that have begun."""
        return f"{self.base}e"

    @property
    def named(self) -> str:
        """The sorted set of committed blobs with the epoch in which each was last named."""
        return f"{self.base}z"

    @property
    def blobs(self) -> str:
        """What the keys of blobs begin with."""
        return f"{self.base}b:"

    @property
    def branches(self) -> str:
        """The set of the lineage's branches."""
        return f"{self.base}t"

    def chunks(self, branch: str) -> str:
        """The hash of a branch's log records."""
        return f"{self.base}c:{branch}"

    def snapshots(self, branch: str) -> str:
        """The hash of a branch's snapshots."""
        return f"{self.base}n:{branch}"

    @property
    def names(self) -> list[str]:
        """In the order of lua/prelude.lua."""
        return [
            self.session,
            self.head,
            self.requests,
            self.family,
            self.epoch,
            self.named,
            self.branches,
        ]


class SessionScript:
    """One of the scripts in `lua`. Those that free memory also run when the server has none left."""

    def __init__(self, client: Client, name: str) -> None:
        folder = resources.files("longtake.state_cache") / "lua"
        flags = " flags=allow-oom" if name in _FREEING else ""
        body = "\n".join((folder / file).read_text("utf-8") for file in ("prelude.lua", f"{name}.lua"))
        self._script = client.script(f"#!lua{flags}\n{body}")

    def __call__(self, keys: Keys, *arguments: Argument, more: Sequence[str] = ()) -> list[object]:
        """What the script returned besides OK; `more` keys follow the session's. Raises what its refusal means."""
        code, *rest = cast("list[bytes]", self._script([*keys.names, *more], (keys.base, *arguments)))
        if code == b"OK":
            return list(rest)
        if code == b"HEAD":
            raise HeadConflict(int(rest[0]), int(rest[1]))
        if code == b"HELD":
            raise LeaseHeld(int(rest[0]) / 1000, rest[1].decode())
        kind, message = _REFUSALS[code]
        raise kind(message)


def drop_claim(client: Client, key: str, value: bytes) -> None:
    """Drop a claim unless it has changed since it was read."""
    client.script(_UNCLAIM)([key], [value])


def postpone(client: Client, index: str, member: str, score: float) -> None:
    """Change the score of a sorted set's member; one that is not there stays away."""
    client.script(_POSTPONE)([index], [score, member])


def mark(client: Client, index: str, member: str, score: float) -> None:
    """Put a member into a sorted set, or change its score, also when the server has no memory left."""
    client.script(_MARK)([index], [score, member])


def drop_mark(client: Client, index: str, member: str, score: float) -> None:
    """Take a member out of a sorted set unless its score has changed since it was read."""
    client.script(_UNMARK)([index], [member, score])
