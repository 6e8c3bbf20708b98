"""The Lua scripts that make a step of a session one atomic step of the server, and what their refusals mean."""

from collections.abc import Sequence
from importlib import resources
from typing import cast

from longtake.state_cache.client import Argument, Client
from longtake.state_cache.errors import (
    BlobsMissing,
    Fenced,
    HeadConflict,
    KeyReused,
    RequestDone,
    SessionExists,
    SessionNotFound,
    StoreError,
)

_FREEING = ("prune", "delete", "sweep")
_UNCLAIM = """#!lua flags=allow-oom
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""
_POSTPONE = """#!lua flags=allow-oom
return redis.call('ZADD', KEYS[1], 'XX', ARGV[1], ARGV[2])
"""
_REFUSALS: dict[bytes, tuple[type[StoreError], str]] = {
    b"NOT_FOUND": (SessionNotFound, "there is no such session"),
    b"EXISTS": (SessionExists, "the session exists"),
    b"KEY_REUSED": (KeyReused, "the key belongs to another request"),
    b"DONE": (RequestDone, "the request of this key has finished"),
    b"FENCED": (Fenced, "another opener has taken the session over"),
    b"BLOBS": (BlobsMissing, "blobs of this step are not in the store"),
}


class SessionScript:
    """One of the scripts create, open, commit, prune, delete and sweep.

    Those that free memory also run when the server has none left.
    """

    def __init__(self, client: Client, name: str) -> None:
        folder = resources.files("longtake.state_cache")
        flags = " flags=allow-oom" if name in _FREEING else ""
        body = "\n".join((folder / file).read_text("utf-8") for file in ("prelude.lua", f"{name}.lua"))
        self._script = client.script(f"#!lua{flags}\n{body}")

    def __call__(self, keys: Sequence[str], blob_prefix: str, *arguments: Argument) -> list[bytes | int]:
        """What the script returned besides OK. Raises the error that its refusal stands for."""
        code, *rest = cast("list[bytes]", self._script(keys, (blob_prefix, *arguments)))
        if code == b"OK":
            return list(rest)
        if code == b"HEAD":
            raise HeadConflict(int(rest[0]), int(rest[1]))
        kind, message = _REFUSALS[code]
        raise kind(message)


def drop_claim(client: Client, key: str, value: bytes) -> None:
    """Drop a claim unless it has changed since it was read."""
    client.script(_UNCLAIM)([key], [value])


def postpone(client: Client, index: str, member: str, score: float) -> None:
    """Change the score of a sorted set's member; one that is not there stays away."""
    client.script(_POSTPONE)([index], [score, member])
