"""Hands inside the stores under test: what the protocol does not show, and what takes long to happen by itself."""

import itertools
from typing import Protocol

import redis

from longtake.state_cache import BlobRef, MemoryStore, RedisStore, Store, encode
from longtake.state_cache.memory_blobs import Blob

_prefixes = (f"t{n}" for n in itertools.count())


class Probe(Protocol):
    """A store, and hands inside it."""

    store: Store

    def keys(self) -> set[str]: ...
    def size(self) -> int: ...
    def blobs(self) -> set[str]: ...
    def lifetime(self, session_id: str, ref: BlobRef) -> float | None: ...
    def set_lifetime(self, session_id: str, ref: BlobRef, seconds: float) -> None: ...
    def set_expiry(self, session_id: str, seconds: float) -> None: ...
    def claim_lifetime(self, route_key: str) -> float | None: ...
    def set_claim_lifetime(self, route_key: str, seconds: float) -> None: ...
    def overwrite(self, session_id: str, ref: BlobRef, data: bytes) -> None: ...
    def overwrite_session(self, session_id: str, data: bytes) -> None: ...
    def record(self, session_id: str, index: int) -> bytes: ...
    def overwrite_record(self, session_id: str, index: int, data: bytes | None) -> None: ...


class MemoryProbe:
    def __init__(self) -> None:
        self.store = MemoryStore()

    def keys(self) -> set[str]:
        store = self.store
        return {*store._sessions, *self.blobs(), *store._claims, *store._litter, *store._log.branches}

    def size(self) -> int:
        store = self.store
        heads = sum(len(session.record) + len(encode(session.head)) for session in store._sessions.values())
        logs = [[*branch.records.values(), *branch.snapshots.values()] for branch in store._log.branches.values()]
        return heads + sum(len(data) for log in logs for data in log) + store._blobs.used_bytes()

    def blobs(self) -> set[str]:
        return {name for _, name in self._blobs}

    def lifetime(self, session_id: str, ref: BlobRef) -> float | None:
        expires = self._blobs[session_id[4:17], ref.name].expires
        return None if expires is None else expires - self.store._clock()

    def set_lifetime(self, session_id: str, ref: BlobRef, seconds: float) -> None:
        self._blobs[session_id[4:17], ref.name].expires = self.store._clock() + seconds

    def set_expiry(self, session_id: str, seconds: float) -> None:
        self.store._sessions[session_id].expires = self.store._clock() + seconds

    def claim_lifetime(self, route_key: str) -> float | None:
        expires = self.store._claims[route_key].expires
        return None if expires is None else expires - self.store._clock()

    def set_claim_lifetime(self, route_key: str, seconds: float) -> None:
        self.store._claims[route_key].expires = self.store._clock() + seconds

    def overwrite(self, session_id: str, ref: BlobRef, data: bytes) -> None:
        self._blobs[session_id[4:17], ref.name].data = data

    def overwrite_session(self, session_id: str, data: bytes) -> None:
        self.store._sessions[session_id].record = data

    def record(self, session_id: str, index: int) -> bytes:
        return self.store._log.branches[f"{session_id}:0"].records[index]

    def overwrite_record(self, session_id: str, index: int, data: bytes | None) -> None:
        records = self.store._log.branches[f"{session_id}:0"].records
        records.update({} if data is None else {index: data})
        if data is None:
            del records[index]

    @property
    def _blobs(self) -> dict[tuple[str, str], Blob]:
        return self.store._blobs.blobs


class RedisProbe:
    def __init__(self, url: str) -> None:
        self.prefix = next(_prefixes)
        self.store = RedisStore(url, self.prefix)
        self.raw = redis.Redis.from_url(url)

    def close(self) -> None:
        self.store.close()
        self.raw.close()

    def keys(self) -> set[str]:
        return {key.decode() for key in self.raw.keys(f"{self.prefix}:*")}

    def size(self) -> int:
        return sum(int(self.raw.memory_usage(key, samples=0)) for key in self.keys())

    def blobs(self) -> set[str]:
        return {key.rsplit(":", 1)[1] for key in self.keys() if ":b:" in key}

    def lifetime(self, session_id: str, ref: BlobRef) -> float | None:
        left = self.raw.pttl(self._blob(session_id, ref))
        assert left != -2, "the blob is not there"
        return None if left == -1 else left / 1000

    def set_lifetime(self, session_id: str, ref: BlobRef, seconds: float) -> None:
        assert self.raw.pexpire(self._blob(session_id, ref), int(seconds * 1000))

    def set_expiry(self, session_id: str, seconds: float) -> None:
        expires = self.milliseconds() + int(seconds * 1000)
        assert self.raw.hset(self.head(session_id), "expires", expires) == 0, "the session never expires"
        self.set_due(session_id, expires)

    def set_due(self, session_id: str, milliseconds: float) -> None:
        assert self.raw.zadd(f"{self.prefix}:expiries", {session_id: milliseconds}) == 0, "the session is never due"

    def due(self, session_id: str) -> float | None:
        return self.raw.zscore(f"{self.prefix}:expiries", session_id)

    def milliseconds(self) -> int:
        seconds, microseconds = self.raw.time()
        return seconds * 1000 + microseconds // 1000

    def claim_lifetime(self, route_key: str) -> float | None:
        left = self.raw.pttl(self.store._directory._claim_key(route_key))
        assert left != -2, "the claim is not there"
        return None if left == -1 else left / 1000

    def set_claim_lifetime(self, route_key: str, seconds: float) -> None:
        assert self.raw.pexpire(self.store._directory._claim_key(route_key), int(seconds * 1000))

    def session(self, session_id: str) -> str:
        return f"{self.prefix}:{{{session_id[4:17]}}}:s:{session_id}"

    def head(self, session_id: str) -> str:
        return f"{self.prefix}:{{{session_id[4:17]}}}:h:{session_id}"

    def overwrite(self, session_id: str, ref: BlobRef, data: bytes) -> None:
        self.raw.set(self._blob(session_id, ref), data, keepttl=True)

    def overwrite_session(self, session_id: str, data: bytes) -> None:
        self.raw.set(self.session(session_id), data)

    def record(self, session_id: str, index: int) -> bytes:
        found = self.raw.hget(self._chunks(session_id), str(index))
        assert isinstance(found, bytes)
        return found

    def overwrite_record(self, session_id: str, index: int, data: bytes | None) -> None:
        """A log record of the session's first branch; None takes it away."""
        key, field = self._chunks(session_id), str(index)
        assert (self.raw.hdel(key, field) == 1) if data is None else (self.raw.hset(key, field, data) == 0)

    def _chunks(self, session_id: str) -> str:
        return f"{self.prefix}:{{{session_id[4:17]}}}:c:{session_id}:0"

    def _blob(self, session_id: str, ref: BlobRef) -> str:
        return f"{self.prefix}:{{{session_id[4:17]}}}:b:{ref.name}"
