"""An ASGI client that reads while the server writes and may leave, and a model that waits to be let go on."""

import asyncio
import io
import json
import threading
from collections.abc import Callable

import av
import httpx
import pytest
from server_fixtures import MAX_BODY, begin, path

from longtake.server.app import create_app
from longtake.server.doors import Doors
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State, WorldModel
from longtake.state_cache import MemoryStore

MP4 = {"Accept": "video/mp4", "Content-Type": "application/json"}


def body(frames: int, start: int = 1, **fields: object) -> bytes:
    return json.dumps({"camera": {"poses": path(frames, start)}, **fields}).encode()


def decoded(data: bytes) -> int:
    with av.open(io.BytesIO(data)) as container:
        return sum(1 for _ in container.decode(video=0))


class StepModel:
    """The served model, which waits for a permit before every chunk."""

    def __init__(self, model: WorldModel) -> None:
        self._model = model
        self.permits = threading.Semaphore(0)
        self.waiting = False

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def generate(self, conditions: Conditions, state: State, index: int, camera: ChunkCamera, seed: int) -> ChunkOutput:
        self.waiting = True
        assert self.permits.acquire(timeout=30)
        self.waiting = False
        return self._model.generate(conditions, state, index, camera, seed)


class LiveClient:
    """An ASGI client that reads an answer piece by piece while it is produced, and can leave at any time."""

    def __init__(
        self,
        engine: Engine,
        address: str,
        content: bytes,
        headers: dict[str, str],
        http_version: str = "1.1",
        method: str = "POST",
    ) -> None:
        self._app = create_app(engine, MAX_BODY, Doors())
        self._scope = {
            "type": "http",
            "method": method,
            "path": address.partition("?")[0],
            "raw_path": address.encode(),
            "query_string": address.partition("?")[2].encode(),
            "scheme": "http",
            "http_version": http_version,
            "server": ("127.0.0.1", 80),
            "client": ("127.0.0.1", 1),
            "headers": [(b"host", b"127.0.0.1"), *((k.lower().encode(), v.encode()) for k, v in headers.items())],
        }
        self._body: list[dict[str, object]] = [{"type": "http.request", "body": content, "more_body": False}]
        self._left = asyncio.Event()
        self.messages: asyncio.Queue[dict[str, object]] = asyncio.Queue()
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> None:
        await self._app(self._scope, self._receive, self.messages.put)

    async def _receive(self) -> dict[str, object]:
        if self._body:
            return self._body.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    def leave(self) -> None:
        self._left.set()

    async def status(self) -> int:
        message = await asyncio.wait_for(self.messages.get(), 30)
        assert message["type"] == "http.response.start"
        assert isinstance(message["status"], int)
        return message["status"]

    async def piece(self) -> bytes:
        message = await asyncio.wait_for(self.messages.get(), 30)
        assert isinstance(message["body"], bytes)
        return message["body"]


@pytest.fixture
def stepped(model: WorldModel, memory: MemoryStore) -> object:
    step = StepModel(model)
    engine = Engine(step, memory, Limits(queue_size=4))  # type: ignore[arg-type]
    yield engine, step
    step.permits.release(100)
    engine.close()


async def begin_on(engine: Engine) -> str:
    transport = httpx.ASGITransport(create_app(engine, MAX_BODY, Doors()))
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        return await begin(http)


def head_of(memory: MemoryStore, session: str) -> int:
    return memory.read(session.rsplit("/", 1)[1])[1].chunk


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(20):
        while not true():
            await asyncio.sleep(0.002)
