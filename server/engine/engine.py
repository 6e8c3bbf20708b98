"""The engine: everything that a route may ask for. Only the engine touches the session store."""

from longtake.api_schemas.resources import CreateSession, Model, PostChunks, Session
from longtake.server.engine.advance import Advancer, Outcome
from longtake.server.engine.create import Creator
from longtake.server.engine.reads import Reader
from longtake.server.engine.sessions import HotSessions
from longtake.server.engine.store_calls import StoreCalls
from longtake.server.engine.views import model_view
from longtake.server.engine.workers import Workers
from longtake.server.model.world import WorldModel
from longtake.state_cache import Store


class Engine:
    """One model, one store, one compute thread.

    Args:
        model: what generates.
        store: what keeps sessions.
        queue_size: requests that may wait or run at once.
        hot_sessions: sessions whose state stays in memory.
        keep_snapshots: newest snapshots kept for each session.
    """

    def __init__(
        self, model: WorldModel, store: Store, queue_size: int, hot_sessions: int, keep_snapshots: int
    ) -> None:
        self._model = model
        self._store = store
        self._workers = Workers(queue_size)
        self._calls = StoreCalls(store, self._workers)
        self._hot = HotSessions(hot_sessions)
        self._creator = Creator(model, self._calls, self._workers)
        self._advancer = Advancer(model, self._calls, self._workers, self._hot, keep_snapshots)
        self.read = Reader(model, self._calls, self._workers)

    @property
    def served_model(self) -> Model:
        """The model, as clients see it."""
        return model_view(self._model)

    @property
    def free_places(self) -> int:
        """Requests that would be admitted now."""
        return self._workers.free_places

    async def create(self, request: CreateSession, key: str | None) -> tuple[Session, bool]:
        """A new session, or the one an earlier request with this key made (then True)."""
        return await self._creator.create(request, key)

    async def advance(self, session_id: str, request: PostChunks, key: str | None) -> Outcome:
        """Generate and commit the chunks that a request makes whole."""
        return await self._advancer.advance(session_id, request, key)

    async def delete(self, session_id: str) -> None:
        """Drop a session and everything it holds, after the request that runs on it."""
        async with self._hot.exclusive(session_id):
            self._hot.drop(session_id)
            await self._calls.call(self._store.delete, session_id)

    def close(self) -> None:
        """Wait for what runs; admit nothing more."""
        self._workers.close()
