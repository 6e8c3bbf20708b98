"""What a session's log holds: msgpack records with a schema version. Tensors and video travel as blobs, never here."""

from typing import TypeVar

import msgspec

from longtake.state_cache.errors import SchemaError

SCHEMA = 1
"""Version written into every record; a record of a newer version is refused, never guessed at."""


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


class SessionRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Written once, when the session is created. Matrices are row-major lists of float64.

    `owner` is a hash of the API key that created it, "" where there are no keys; `ttl_s` (at least 1) the seconds
    without activity after which the session may go, None for never.
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
    schema: int = SCHEMA


class Cursor(msgspec.Struct, frozen=True, kw_only=True):
    """Where the session stands between chunks: poses not yet in a chunk, and the action controller.

    `poses` is float64 little-endian [P,4,4] relative to frame 0, `intrinsics` float64 [P,4] in pixels of the model's
    frame.
    """

    poses: bytes = b""
    intrinsics: bytes = b""
    controller: dict[str, float | str | list[float]]
    schema: int = SCHEMA


class ChunkRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One entry of the log: what made the chunk, what came out, and how long it took.

    `poses` float64 [24,4,4] relative to frame 0, `intrinsics` float64 [24,4] in pixels of the model's frame, both
    little-endian; `segment` holds the MP4 initialisation (`init_size` bytes) followed by the media of this chunk.
    """

    index: int
    kind: str
    poses: bytes
    intrinsics: bytes
    seed: int
    fingerprint: Fingerprint
    latents: Arena
    segment: File
    init_size: int
    frames_digest: str
    state_digest: str
    timings_ms: dict[str, float]
    warnings: list[str]
    created_at: float
    schema: int = SCHEMA


class RequestRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Progress of one keyed request: first chunk, chunks committed, frames used; once done, the answer's counters."""

    fingerprint: str
    first_chunk: int
    chunks: int
    frames_used: int
    done: bool
    revision: int
    pending_poses: int
    schema: int = SCHEMA


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """Present position of a session: last committed chunk (-1: none), revision (bumped by rewind) and cursor.

    `expires_at` is when it expires unless it is used again, in unix seconds of the store's clock; None for never.
    """

    chunk: int
    revision: int
    cursor: Cursor
    expires_at: float | None = None


class Fence(msgspec.Struct, frozen=True):
    """Right to commit: a counter raised at every opening, and a nonce, since a failover can set counters back."""

    token: int
    nonce: str


Record = TypeVar("Record", SessionRecord, Cursor, ChunkRecord, RequestRecord, Arena)


class _Versioned(msgspec.Struct, frozen=True):
    schema: int = SCHEMA


def encode(record: msgspec.Struct) -> bytes:
    """A record as msgpack."""
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[Record]) -> Record:
    """The record back, strictly typed. Raises `SchemaError`."""
    try:
        if (schema := msgspec.msgpack.decode(data, type=_Versioned).schema) > SCHEMA:
            raise SchemaError(f"{kind.__name__} has schema {schema}, this version reads up to {SCHEMA}")
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, RecursionError) as error:
        raise SchemaError(f"{kind.__name__} is damaged") from error
