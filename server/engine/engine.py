"""The engine: everything that a route may ask for. Only the engine touches the session store."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CreateSession, Model, PostChunks, Session
from longtake.server.engine.advance import AT_THE_END, Advancer, Delivery, Outcome
from longtake.server.engine.command import Uploads
from longtake.server.engine.create import Creator
from longtake.server.engine.limits import Limits
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.reads import Reader
from longtake.server.engine.sessions import HotSessions
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.views import model_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import WorldModel
from longtake.state_cache import ChunkRecord, Store


class Engine:
    """One model, one store, one compute thread.

    Args:
        model: what generates.
        store: what keeps sessions.
        limits: how much it takes on.
    """

    def __init__(self, model: WorldModel, store: Store, limits: Limits) -> None:
        self._model = model
        self._store = store
        self._limits = limits
        self._workers = Workers(limits.queue_size)
        self.metrics = Metrics(model.spec, model.device)
        self._calls = StoreCalls(store, self._workers, self.metrics)
        self._hot = HotSessions(limits.hot_sessions)
        self._creator = Creator(model, self._calls, self._workers, limits.ttl_s)
        self._advancer = Advancer(model, self._calls, self._workers, self._hot, limits, self.metrics)
        self.read = Reader(model, self._calls, self._workers, self.metrics)

    @property
    def served_model(self) -> Model:
        """The model, as clients see it."""
        return model_view(self._model)

    @property
    def free_places(self) -> int:
        """Requests that would be admitted now."""
        return self._workers.free_places

    async def create(
        self, request: CreateSession, image: bytes | None, key: str | None, owner: str
    ) -> tuple[Session, bool]:
        """A new session, or the one an earlier request with this key made (then True).

        The first frame comes as a file or as the request's data URL.
        """
        session, replayed = await self._creator.create(request, image, key, owner)
        self.metrics.sessions_created.inc(not replayed)
        return session, replayed

    async def advance(self, session_id: str, request: PostChunks, uploads: Uploads, key: str | None) -> Outcome:
        """Make and commit the chunks that a request makes whole. May be cancelled: committed chunks stay."""
        return await self._advancer.advance(session_id, request, uploads, key, AT_THE_END)

    async def stream(
        self, session_id: str, request: PostChunks, uploads: Uploads, key: str | None
    ) -> AsyncGenerator[bytes, None]:
        """The request's chunks as one fragmented MP4, a piece as soon as each is committed; nothing when there is none.

        Closing or cancelling the generator drops what is not committed yet. Raises what `advance` raises, after the
        pieces that were committed before.
        """
        committed: asyncio.Queue[ChunkRecord | None] = asyncio.Queue()
        delivery = Delivery(committed.put_nowait, hurry=True)
        work = asyncio.create_task(self._advancer.advance(session_id, request, uploads, key, delivery))

        def ended(task: asyncio.Task[Outcome]) -> None:
            if not task.cancelled():
                task.exception()  # looked at here, in case the client has left and nobody else does
            committed.put_nowait(None)

        work.add_done_callback(ended)
        try:
            skip = 0
            while (record := await committed.get()) is not None:
                yield (await self.read.segment(session_id, record))[skip:]
                skip = record.init_size
            await work
        finally:
            work.cancel()

    async def delete(self, session_id: str) -> None:
        """Drop a session and everything it holds, at once: a request that runs on it fails at its next commit."""
        await self._calls.call(self._store.delete, session_id)
        self._hot.drop(session_id)

    def exposition(self) -> bytes:
        """Metrics in Prometheus' text format."""
        self.metrics.queue_capacity.set(self._limits.queue_size)
        self.metrics.queue_depth.set(self._limits.queue_size - self._workers.free_places)
        self.metrics.sessions_hot.set(len(self._hot))
        return self.metrics.exposition()

    async def sweep(self) -> int:
        """Remove sessions whose time is over; returns how many."""
        removed = await self._calls.call(self._store.sweep)
        self.metrics.sessions_expired.inc(removed)
        return removed

    async def sweep_forever(self, pause_s: float = 60.0) -> None:
        """Sweep again and again; a store that does not answer is asked later."""
        while True:
            with suppress(ProblemError):
                await self.sweep()
            await asyncio.sleep(pause_s)

    def drain(self) -> None:
        """Begin to stop: requests that run end at their next chunk with `shutting_down`, new ones are refused."""
        self._workers.drain()

    def close(self) -> None:
        """Wait for what runs; admit nothing more."""
        self._workers.close()
