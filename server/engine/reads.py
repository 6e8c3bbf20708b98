"""Reading what is committed: sessions, chunks, video, and frames decoded again from their latents."""

from collections.abc import AsyncIterator
from contextlib import suppress

from torch import Tensor

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Chunk, ChunkList, Session, SessionList
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.views import chunk_view, session_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import Conditions, WorldModel
from longtake.server.video.images import frames_digest, png_zip
from longtake.server.video.segments import from_zero
from longtake.state_cache import ChunkRecord, StoreStatus, load_file, load_tensors


class Reader:
    """Reads sessions; changes nothing."""

    def __init__(self, model: WorldModel, calls: StoreCalls, workers: Workers) -> None:
        self._model = model
        self._calls = calls
        self._store = calls.store
        self._workers = workers

    async def session(self, session_id: str) -> Session:
        """Where a session stands."""
        session, head, _ = await self._calls.call(self._store.read, session_id)
        return session_view(session, head, self._model.spec)

    async def sessions(self, limit: int, after: str | None) -> SessionList:
        """Sessions, newest first; one deleted while listing is left out."""
        ids = await self._calls.call(self._store.list, limit, after)
        found: list[Session] = []
        for session_id in ids:
            with suppress(ProblemError):
                found.append(await self.session(session_id))
        return SessionList(data=found, next=ids[-1] if len(ids) == limit else None)

    async def chunk(self, session_id: str, index: int) -> Chunk:
        """One chunk. Raises `chunk_not_found`."""
        return chunk_view(session_id, await self._calls.call(self._store.chunk, session_id, index))

    async def chunks(self, session_id: str, limit: int, after: int) -> ChunkList:
        """Chunks in order, from behind index `after` on."""
        records = await self._calls.call(self._store.chunks, session_id, after + 1, after + 1 + limit)
        data = [chunk_view(session_id, record) for record in records]
        return ChunkList(data=data, next=data[-1].index if len(data) == limit else None)

    async def chunk_video(self, session_id: str, index: int) -> bytes:
        """One chunk as an MP4 that plays by itself."""
        record = await self._calls.call(self._store.chunk, session_id, index)
        return from_zero(await self._segment(session_id, record))

    async def video(self, session_id: str) -> tuple[int, AsyncIterator[bytes]]:
        """Everything so far as one MP4: its size and its pieces. Raises `chunk_not_found` while there is none."""
        head = (await self._calls.call(self._store.read, session_id))[1]
        records = await self._calls.call(self._store.chunks, session_id, 0, head.chunk + 1)
        if not records:
            raise ProblemError("chunk_not_found", "the session has no chunk yet")
        size = records[0].init_size + sum(record.segment.size - record.init_size for record in records)
        return size, self._pieces(session_id, records)

    async def _pieces(self, session_id: str, records: list[ChunkRecord]) -> AsyncIterator[bytes]:
        for record in records:
            segment = await self._segment(session_id, record)
            yield segment if record is records[0] else segment[record.init_size :]

    async def _segment(self, session_id: str, record: ChunkRecord) -> bytes:
        return await self._calls.call(load_file, self._store, session_id, record.segment)

    async def frames(self, session_id: str, index: int) -> bytes:
        """A zip of a chunk's frames as PNG, bit for bit those of `frames_digest`.

        The log keeps latents, not frames: they are decoded again, with as many chunks before as the decoder sees.
        Raises `state_diverged` when this server's decoder gives other bits.
        """
        with self._workers.admitted():
            first = max(0, index - self._model.decoder_history)
            records = await self._calls.call(self._store.chunks, session_id, first, index + 1)
            if not records or records[-1].index != index:
                raise ProblemError("chunk_not_found", "the session has no such chunk", "index")
            conditions, latents = await self._calls.call(self._inputs, session_id, records)
            frames, _ = await self._workers.compute(self._model.decode, conditions, first, latents)
            if frames_digest(frames) != records[-1].frames_digest:
                raise ProblemError("state_diverged", "this server decodes other frames than those committed")
            return await self._workers.io(png_zip, frames, len(frames) * index + 1)

    def _inputs(self, session_id: str, records: list[ChunkRecord]) -> tuple[Conditions, list[Tensor]]:
        session = self._store.read(session_id)[0]
        if session.fingerprint.weights != self._model.weights_fingerprint:
            raise ProblemError(
                "model_mismatch", "the session was made with other weights and its frames can not be decoded"
            )
        conditions = Conditions.from_tensors(load_tensors(self._store, session_id, session.conditions))
        return conditions, [load_tensors(self._store, session_id, record.latents)["latents"] for record in records]

    async def status(self) -> StoreStatus:
        """How the store is."""
        return await self._calls.call(self._store.check)
