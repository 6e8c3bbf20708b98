"""What a session's log holds: msgpack records with a schema version, behind a checksum. Tensors and video are blobs."""

from typing import TypeVar

import msgspec
import xxhash

from longtake.state_cache.errors import SchemaError

SCHEMA = 2
"""Version written into every record; a record of another version is refused, never guessed at."""


class BlobRef(msgspec.Struct, frozen=True):
    """One blob: content-named, at most 1 MiB. `name` is the xxh3-128 hex digest of its bytes, `size` their number."""

    name: str
    size: int


class TensorRef(msgspec.Struct, frozen=True):
    """One tensor inside an arena: safetensors dtype name, shape and byte range."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


class Arena(msgspec.Struct, frozen=True):
    """Named tensors laid end to end in layout order and cut into blobs."""

    tensors: tuple[TensorRef, ...]
    blobs: tuple[BlobRef, ...]
    schema: int = SCHEMA


class File(msgspec.Struct, frozen=True):
    """A byte string cut into blobs."""

    size: int
    blobs: tuple[BlobRef, ...]


class Fingerprint(msgspec.Struct, frozen=True):
    """What decides the bits: `weights` (checkpoint and configuration) and `numerics` (device, libraries, threads)."""

    weights: str
    numerics: str


class Parent(msgspec.Struct, frozen=True):
    """Where a fork began: the session it was forked from, and the last chunk that both share (-1: none)."""

    session_id: str
    chunk: int


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Written once, when the session is created. Matrices are row-major lists of float64.

    `owner` is a hash of the API key that created it, "" where there are no keys; `ttl_s` (at least 1) the seconds
    without activity after which the session may go, None for never. `prompt` and `seed` are those it began with; the
    cursor has those in force.
    """

    id: str
    model: str
    fingerprint: Fingerprint
    prompt: str
    seed: int
    created_at: float
    first_pose: list[float]
    intrinsics: list[float]
    intrinsics_size: tuple[int, int]
    source_size: tuple[int, int]
    conditions: Arena
    warnings: list[str]
    create_key: str | None = None
    owner: str = ""
    ttl_s: int | None = None
    parent: Parent | None = None
    schema: int = SCHEMA


Controller = dict[str, float | str | list[float]]
"""An action controller in its stored form."""


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where the session stands between chunks: poses not yet in a chunk, the action controller, seed and prompt.

    `poses` is float64 little-endian [P,4,4] relative to frame 0, `intrinsics` float64 [P,4] in pixels of the model's
    frame. `prompt` and `text` (its embedding) are None while those of the session record are in force. `exact_until`
    is the last chunk up to which the state was restored to the bit, None when all of it was.
    """

    poses: bytes = b""
    intrinsics: bytes = b""
    controller: Controller
    seed: int
    prompt: str | None = None
    text: Arena | None = None
    exact_until: int | None = None
    schema: int = SCHEMA


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log: what made the chunk, what came out, and how long it took.

    `poses` float64 [24,4,4] relative to frame 0, `intrinsics` float64 [24,4] in pixels of the model's frame, both
    little-endian; `segment` holds the MP4 initialisation (`init_size` bytes) followed by the media of this chunk.
    `controller`, `prompt`, `text` and `exact_until` are those of the cursor after this chunk. An `expired` record lies
    behind the retention horizon: poses, latents and segment are gone; digests, controller and text stay.
    """

    index: int
    kind: str
    poses: bytes
    intrinsics: bytes
    controller: Controller
    seed: int
    prompt: str | None = None
    text: Arena | None = None
    exact_until: int | None = None
    fingerprint: Fingerprint
    latents: Arena
    segment: File
    init_size: int
    frames_digest: str
    state_digest: str
    timings_ms: dict[str, float]
    warnings: list[str]
    created_at: float
    expired: bool = False
    schema: int = SCHEMA

    def cursor(self) -> Cursor:
        """Where the session stood right after this chunk, nothing pending."""
        return Cursor(
            controller=self.controller,
            seed=self.seed,
            prompt=self.prompt,
            text=self.text,
            exact_until=self.exact_until,
        )

    def stub(self) -> "ChunkRecord":
        """What stays of the record behind the retention horizon."""
        nothing = Arena((), ())
        return msgspec.structs.replace(
            self, poses=b"", intrinsics=b"", latents=nothing, segment=File(0, ()), expired=True
        )


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one keyed request: first chunk, chunks committed, frames used; once done, the answer's counters.

    `cursor` is a hash of the cursor that the request left when it was cut: it goes on only where that still stands.
    `answer` is the whole body of an answer that can not be made again from the log.
    """

    fingerprint: str
    first_chunk: int
    chunks: int
    frames_used: int
    done: bool
    revision: int
    pending_poses: int
    cursor: str = ""
    answer: str = ""
    schema: int = SCHEMA


class Span(msgspec.Struct, frozen=True):
    """Log records start…stop-1 of one branch. A branch is written by one session between two of its rewinds."""

    branch: str
    start: int
    stop: int


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Present position of a session: last committed chunk (-1: none), revision (bumped by rewind) and cursor.

    Attributes:
        path: older records, in order, that were written by a parent or before a rewind; immutable.
        base: first chunk of the session's present branch, where `path` ends.
        horizon: first chunk whose record is whole; those before it have expired.
        rewinds: for each revision from 1 on, the last chunk that its rewind kept.
        expires_at: when it expires unless it is used again, in unix seconds of the store's clock; None for never.
    """

    chunk: int
    revision: int
    cursor: Cursor
    path: tuple[Span, ...] = ()
    base: int = 0
    horizon: int = 0
    rewinds: tuple[int, ...] = ()
    expires_at: float | None = None


class Fence(msgspec.Struct, frozen=True):
    """Right to commit: a counter raised at every opening, and a nonce, since a failover can set counters back."""

    token: int
    nonce: str


class Holder(msgspec.Struct, frozen=True):
    """Who asks for a lease: the same `id` takes its own lease over at once. `address` is shown to those who wait."""

    id: str
    address: str = ""


class Lease(msgspec.Struct, frozen=True):
    """A lease that was granted; `taken_over` when somebody else held the session before and let it lapse."""

    fence: Fence
    taken_over: bool


_SUM = 8

Record = TypeVar("Record", SessionRecord, Cursor, ChunkRecord, RequestRecord, Arena)


class _Versioned(msgspec.Struct, frozen=True):
    schema: int = SCHEMA


def seal(body: bytes) -> bytes:
    """Bytes with their checksum (xxh3-64, 8 bytes) in front."""
    return xxhash.xxh3_64_digest(body) + body


def unseal(data: bytes, what: str) -> bytes:
    """The bytes behind their checksum. Raises `SchemaError` that `what` is damaged when they are others."""
    body = data[_SUM:]
    if xxhash.xxh3_64_digest(body) != data[:_SUM]:
        raise SchemaError(f"{what} is damaged")
    return body


def encode(record: msgspec.Struct) -> bytes:
    """A record as sealed msgpack; that of a request, which scripts read, goes without a checksum."""
    body = msgspec.msgpack.encode(record)
    return body if isinstance(record, RequestRecord) else seal(body)


def decode(data: bytes, kind: type[Record]) -> Record:
    """The record back, strictly typed. Raises `SchemaError`."""
    body = data if kind is RequestRecord else unseal(data, kind.__name__)
    try:
        if (schema := msgspec.msgpack.decode(body, type=_Versioned).schema) != SCHEMA:
            raise SchemaError(f"{kind.__name__} has schema {schema}, this version reads {SCHEMA}")
        return msgspec.msgpack.decode(body, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"{kind.__name__} is damaged") from error


def decode_session(data: bytes | None) -> SessionRecord:
    """A session's record. Raises `SchemaError`, also when it is not there although the session is."""
    if data is None:
        raise SchemaError("SessionRecord is missing")
    return decode(data, SessionRecord)


def decode_chunk(data: bytes | None, index: int) -> ChunkRecord:
    """The log record of a chunk that a session's path leads to. Raises `SchemaError`, also when it is not there."""
    if data is None:
        raise SchemaError(f"log record {index} is missing")
    if (record := decode(data, ChunkRecord)).index != index:
        raise SchemaError(f"log record {index} is that of chunk {record.index}")
    return record
