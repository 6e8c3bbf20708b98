"""The engine: everything that a route may ask for. Only the engine touches the session store."""

import asyncio
from collections.abc import AsyncGenerator

from longtake.api_schemas.resources import CreateSession, Fork, Model, PostChunks, Rewind, Session
from longtake.server.engine.advance import Advancer
from longtake.server.engine.branching import Brancher
from longtake.server.engine.command import Uploads
from longtake.server.engine.copies import GpuCopies
from longtake.server.engine.create import Creator
from longtake.server.engine.events import Events
from longtake.server.engine.housekeeping import Housekeeper
from longtake.server.engine.leases import Leases
from longtake.server.engine.limits import Limits
from longtake.server.engine.metrics import Metrics
from longtake.server.engine.reads import Reader
from longtake.server.engine.resume import Resumer
from longtake.server.engine.snapshots import SnapshotPolicy, Snapshots, SnapshotWriter
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.task import AT_THE_END, Delivery, Outcome
from longtake.server.engine.tiers import Tiers
from longtake.server.engine.views import model_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import WorldModel
from longtake.state_cache import ChunkRecord, Holder, Store, new_session_id


class Engine:
    """One model, one store, one compute thread.

    Args:
        model: what generates.
        store: what keeps sessions.
        limits: how much it takes on.
        holder: who this server is to others on the same store; a name of its own by default.
    """

    def __init__(self, model: WorldModel, store: Store, limits: Limits, holder: Holder | None = None) -> None:
        self._model = model
        self._store = store
        self._limits = limits
        self._workers = Workers(limits.queue_size)
        self.metrics = Metrics(model.spec, model.device)
        self._calls = calls = StoreCalls(store, self._workers, self.metrics)
        copies = GpuCopies(model.device) if model.device == "cuda" else None
        self._tiers = Tiers(limits.device_state_bytes, limits.host_state_bytes, self._workers.io, copies)
        self._housekeeper = Housekeeper(calls, limits.retention, self.metrics)
        writer = SnapshotWriter(
            store,
            calls.call,
            self._workers.io,
            self._housekeeper.snapshot_ended,
            limit_bytes=limits.host_state_bytes,
            copies=copies,
        )
        self._snapshots = Snapshots(SnapshotPolicy(limits.snapshot_every), writer)
        leases = Leases(calls, holder or Holder(new_session_id()), limits.lease_s, self.metrics)
        resumer = Resumer(model, calls, self._workers, self.metrics, exact_required=limits.exact_required)
        self.read = Reader(model, calls, self._workers, self.metrics)
        self.events = Events(calls)
        self._creator = Creator(model, calls, self._workers, limits.ttl_s)
        self._brancher = Brancher(model.spec, calls, self._workers, self._tiers, leases, self.events)
        self._advancer = Advancer(
            model,
            calls,
            self._workers,
            self._tiers,
            leases,
            resumer,
            self._snapshots,
            self.events,
            limits,
            self.metrics,
        )

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

    async def fork(self, session_id: str, request: Fork, key: str | None, owner: str) -> tuple[Session, bool]:
        """A session that goes on from a chunk of this one; also whether an earlier request with this key made it."""
        session, replayed = await self._brancher.fork(session_id, request, key, owner)
        self.metrics.sessions_created.inc(not replayed)
        return session, replayed

    async def rewind(self, session_id: str, request: Rewind, key: str | None) -> tuple[Session, bool]:
        """The session back after one of its chunks; also whether an earlier request with this key did it."""
        session, replayed = await self._brancher.rewind(session_id, request, key)
        self._housekeeper.collect_soon(session_id)
        return session, replayed

    async def delete(self, session_id: str) -> None:
        """Drop a session and everything it holds, at once: a request that runs on it fails at its next commit."""
        await self._calls.call(self._store.delete, session_id)
        self._tiers.drop(session_id)
        self.events.moved(session_id)
        self._housekeeper.collect_soon(session_id)

    def exposition(self) -> bytes:
        """Metrics in Prometheus' text format."""
        self.metrics.queue_capacity.set(self._limits.queue_size)
        self.metrics.queue_depth.set(self._limits.queue_size - self._workers.free_places)
        for tier, holding in self._tiers.holdings.items():
            self.metrics.sessions_by_tier.labels(tier).set(holding.sessions)
            self.metrics.state_bytes.labels(tier).set(holding.nbytes)
        return self.metrics.exposition()

    async def keep_house(self) -> None:
        """Drop expired sessions and collect garbage, again and again."""
        await self._housekeeper.sweep_forever()

    async def settle(self) -> None:
        """Wait for snapshots and collections under way."""
        await self._snapshots.drain()
        await self._tiers.settled()
        await self._housekeeper.finish()

    def drain(self) -> None:
        """Begin to stop: requests that run end at their next chunk with `shutting_down`, new ones are refused."""
        self._workers.drain()
        self.events.close()

    def close(self) -> None:
        """Wait for what runs; admit nothing more."""
        self._workers.close()
