"""Reading what is committed: sessions, chunks, video, and frames decoded again from their latents."""

import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager

import safetensors.torch
from torch import Tensor

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Chunk, ChunkList, Session, SessionList
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.places import place_of, place_text
from longtake.server.engine.replay import check_contents
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.views import chunk_view, session_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import Conditions, ModelSpec, WorldModel
from longtake.server.video.images import frames_digest, png_zip
from longtake.server.video.segments import from_zero
from longtake.state_cache import (
    DURABILITIES,
    BlobsMissing,
    ChunkRecord,
    SchemaError,
    SessionNotFound,
    Store,
    StoreStatus,
    load_file,
    load_tensors,
)

log = logging.getLogger(__name__)


class Reader:
    """Reads sessions; changes nothing."""

    def __init__(self, model: WorldModel, calls: StoreCalls, workers: Workers, metrics: Metrics) -> None:
        self._model = model
        self._calls = calls
        self._store = calls.store
        self._workers = workers
        self._metrics = metrics

    async def session(self, session_id: str) -> Session:
        """Where a session stands."""
        return await self._calls.call(read_view, self._store, session_id, self._model.spec)

    async def check_owner(self, session_id: str, owner: str) -> None:
        """Raises `session_not_found` unless the session belongs to `owner`."""
        if await self._calls.call(self._store.owner, session_id) != owner:
            raise ProblemError("session_not_found", "there is no such session", "session_id")

    async def sessions(self, owner: str, limit: int, after: str | None) -> SessionList:
        """An owner's sessions, newest first; one deleted while listing, or that can not be read, is left out.

        `after` is the `next` of another page or the id of a session. Raises `session_not_found` for such an id.
        """

        def read() -> tuple[list[Session], str | None]:
            begin = None if after is None else place_of(self._store, after, owner)
            places = self._store.list(limit, begin, owner)
            found = []
            for place in places:
                try:
                    found.append(read_view(self._store, place.session_id, self._model.spec))
                except SessionNotFound:
                    continue
                except SchemaError as error:
                    log.warning("a session can not be listed: %s", error)
            return found, place_text(places[-1]) if len(places) == limit else None

        found, following = await self._calls.call(read)
        return SessionList(data=found, next=following)

    async def chunk(self, session_id: str, index: int) -> Chunk:
        """One chunk. Raises `chunk_not_found`."""
        return chunk_view(session_id, await self._calls.call(self._store.chunk, session_id, index))

    async def chunks(self, session_id: str, limit: int, after: int) -> ChunkList:
        """Chunks in order, from behind index `after` on."""
        records = await self._calls.call(self._store.chunks, session_id, after + 1, after + 1 + limit)
        data = [chunk_view(session_id, record) for record in records]
        return ChunkList(data=data, next=data[-1].index if len(data) == limit else None)

    async def chunk_video(self, session_id: str, index: int) -> bytes:
        """One chunk as an MP4 that plays by itself. Raises `chunk_not_found`, `chunk_expired`."""
        record = await self._calls.call(self._store.chunk, session_id, index)
        return from_zero(await self.segment(session_id, record))

    async def video(self, session_id: str) -> "Video":
        """Everything so far as one MP4, from the retention horizon on.

        Raises `chunk_not_found` while there is no chunk, `chunk_expired` when none is left.
        """
        head = (await self._calls.call(self._store.read, session_id))[1]
        records = await self._calls.call(self._store.chunks, session_id, head.horizon, head.chunk + 1)
        left = [record for record in records if not record.expired]
        if not left:
            if records or head.horizon:
                raise await self._calls.call(self._expired, session_id, "all chunks so far have expired", None)
            raise ProblemError("chunk_not_found", "the session has no chunk yet")
        return Video(self, session_id, left, f'W/"{head.revision}-{left[0].index}"')

    async def latents(self, session_id: str, index: int) -> bytes:
        """The clean latents [1,C,3,h,w] of a chunk as a safetensors file. Raises `chunk_not_found`, `chunk_expired`."""
        record = await self._calls.call(self._store.chunk, session_id, index)
        tensors = await self._calls.call(self._latents, session_id, record)
        return await self._workers.io(safetensors.torch.save, tensors)

    async def segment(self, session_id: str, record: ChunkRecord) -> bytes:
        """Initialisation and media of one chunk, at its place in the take.

        Raises `chunk_expired`, `chunk_not_found` when a rewind has taken the chunk away.
        """
        return await self._calls.call(self._segment, session_id, record)

    async def frames(self, session_id: str, index: int) -> bytes:
        """A zip of a chunk's frames as PNG, bit for bit those of `frames_digest`.

        The log keeps latents, not frames: they are decoded again, with as many chunks before as the decoder sees.
        Raises `chunk_expired` when one of these is behind the retention horizon, `state_diverged` when this server's
        decoder gives other bits.
        """
        with self._workers.admitted():
            first = max(0, index - self._model.decoder_history)
            records = await self._calls.call(self._store.chunks, session_id, first, index + 1)
            if not records or records[-1].index != index:
                raise ProblemError("chunk_not_found", "the session has no such chunk", "index")
            if any(record.expired for record in records):
                detail = f"the frames need the latents of chunks {first} to {index}, and some have expired"
                raise await self._calls.call(self._expired, session_id, detail)
            conditions, latents = await self._calls.call(self._inputs, session_id, records)
            frames, _ = await self._workers.compute(self._model.decode, conditions, first, latents)
            if frames_digest(frames) != records[-1].frames_digest:
                raise ProblemError("state_diverged", "this server decodes other frames than those committed")
            return await self._workers.io(png_zip, frames, len(frames) * index + 1)

    def _segment(self, session_id: str, record: ChunkRecord) -> bytes:
        with self._whole(session_id, [record]):
            return load_file(self._store, session_id, record.segment)

    def _latents(self, session_id: str, record: ChunkRecord) -> dict[str, Tensor]:
        with self._whole(session_id, [record]):
            return load_tensors(self._store, session_id, record.latents)

    @contextmanager
    def _whole(self, session_id: str, records: list[ChunkRecord]) -> Iterator[None]:
        """For loading what these records name: blobs that are missing are damage only if the records stand as they did.

        Raises `chunk_expired`; `chunk_not_found`, `SessionNotFound` when they were taken away since they were read.
        """
        self._check_whole(session_id, records)
        try:
            yield
        except BlobsMissing:
            present = [self._store.chunk(session_id, record.index) for record in records]
            self._check_whole(session_id, present)
            if present != records:
                raise ProblemError("chunk_not_found", "a rewind has taken the chunk away", "index") from None
            raise

    def _check_whole(self, session_id: str, records: list[ChunkRecord]) -> None:
        for record in records:
            if record.expired:
                raise self._expired(session_id, f"of chunk {record.index} only the digests are left")

    def _expired(self, session_id: str, detail: str, field: str | None = "index") -> ProblemError:
        head = self._store.read(session_id)[1]
        return ProblemError("chunk_expired", detail, field, extra={"rewind_from": head.horizon - 1})

    def _inputs(self, session_id: str, records: list[ChunkRecord]) -> tuple[Conditions, list[Tensor]]:
        session = self._store.read(session_id)[0]
        if session.fingerprint.weights != self._model.weights_fingerprint:
            raise ProblemError(
                "model_mismatch", "the session was made with other weights and its frames can not be decoded"
            )
        for record in records:
            check_contents(record, session)
        with self._whole(session_id, records):
            conditions = Conditions.from_tensors(load_tensors(self._store, session_id, session.conditions))
            return conditions, [load_tensors(self._store, session_id, record.latents)["latents"] for record in records]

    async def status(self) -> StoreStatus:
        """How the store is."""
        status = await self._calls.call(self._store.check)
        self._metrics.store_bytes.set(status.used_bytes)
        for durability in DURABILITIES:
            self._metrics.store_durability.labels(durability).set(durability == status.durability)
        return status


def read_view(store: Store, session_id: str, spec: ModelSpec) -> Session:
    """A session where it stands, with its forks. Raises what the store raises; `SchemaError` also for odd contents."""
    session, head, _ = store.read(session_id)
    forks = store.forks(session_id)
    try:
        return session_view(session, head, forks, spec)
    except (ArithmeticError, OSError, ValueError) as error:
        raise SchemaError("the session's record says what can not be") from error


class Video:
    """All whole chunks of a session as one MP4 file, read piece by piece.

    `tag` is an entity tag, the same for as long as the file only grows.
    """

    def __init__(self, reader: Reader, session_id: str, records: list[ChunkRecord], tag: str) -> None:
        self.tag = tag
        self._reader = reader
        self._session_id = session_id
        self._records = records

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(stop - start for _, start, stop in self._parts())

    async def pieces(self, start: int, stop: int) -> AsyncGenerator[bytes, None]:
        """The file's bytes start…stop-1, a chunk at a time."""
        offset = 0
        for record, first, last in self._parts():
            size = last - first
            if offset < stop and start < offset + size:
                segment = (await self._reader.segment(self._session_id, record))[first:last]
                yield segment[max(0, start - offset) : stop - offset]
            offset += size

    def _parts(self) -> Iterator[tuple[ChunkRecord, int, int]]:
        """Each chunk with the range of its segment that the file holds: the first one brings the initialisation."""
        for record in self._records:
            yield record, 0 if record is self._records[0] else record.init_size, record.segment.size
