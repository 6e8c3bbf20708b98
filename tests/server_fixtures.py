"""A server in this process for the HTTP tests, and what they post to it."""

import base64
import io
from collections.abc import AsyncIterator, Iterator

import httpx
import numpy as np
import pytest
from PIL import Image

from longtake.server.app import create_app
from longtake.server.doors import Doors
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.registry import load_model
from longtake.server.model.world import WorldModel
from longtake.state_cache import MemoryStore

MAX_BODY = 4 * 2**20
STILL = np.eye(4).tolist()


@pytest.fixture(scope="session")
def model() -> WorldModel:
    """The served model."""
    return load_model("tiny-untrained")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def memory() -> MemoryStore:
    return MemoryStore()


@pytest.fixture
def engine(model: WorldModel, memory: MemoryStore) -> Iterator[Engine]:
    engine = Engine(model, memory, Limits(queue_size=8))
    yield engine
    engine.close()


@pytest.fixture
async def http(engine: Engine) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(engine) as client:
        yield client


def client_of(engine: Engine) -> httpx.AsyncClient:
    """HTTP to an engine in this process; a crash becomes the answer that a client would see."""
    transport = httpx.ASGITransport(create_app(engine, MAX_BODY, Doors()), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")


async def begin(http: httpx.AsyncClient, **fields: object) -> str:
    """A new session with seed 7; returns the path of its resource."""
    answer = await http.post("/v1/sessions", json={"image": first_frame(), "seed": 7, **fields})
    assert answer.status_code == 201, answer.text
    return str(answer.json()["links"]["self"])


async def post(http: httpx.AsyncClient, session: str, camera: object = None, **fields: object) -> httpx.Response:
    """Post to a session's chunks; `camera` may be given as keys, as poses or as the whole object."""
    headers = {"Idempotency-Key": str(fields.pop("key"))} if "key" in fields else {}
    if isinstance(camera, str):
        camera = {"actions": camera}
    elif isinstance(camera, list):
        camera = {"poses": camera}
    body = fields if camera is None else {"camera": camera, **fields}
    return await http.post(f"{session}/chunks", json=body, headers=headers)


def digests(answer: httpx.Response) -> list[tuple[int, str, str]]:
    """Index and both digests of every chunk in an answer."""
    assert answer.status_code == 201, answer.text
    return [(chunk["index"], chunk["frames_digest"], chunk["state_digest"]) for chunk in answer.json()["data"]]


def picture(width: int = 320, height: int = 192, kind: str = "PNG") -> bytes:
    """A small picture with some structure."""
    x, y = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    buffer = io.BytesIO()
    Image.fromarray(np.stack([x, y, 255 - x], -1).astype(np.uint8)).save(buffer, kind)
    return buffer.getvalue()


def data_url(data: bytes, kind: str = "png") -> str:
    """Bytes as the API takes an image."""
    return f"data:image/{kind};base64,{base64.b64encode(data).decode()}"


def first_frame() -> str:
    """A first frame as the API takes it."""
    return data_url(picture())


def path(frames: int, start: int = 1) -> list[list[list[float]]]:
    """Poses of the video frames from `start` on along one smooth path, the same however it is cut."""
    return [_pose(frame).tolist() for frame in range(start, start + frames)]


def _pose(frame: int) -> np.ndarray:
    angle = 0.01 * frame
    pose = np.eye(4)
    pose[:3, :3] = [[np.cos(angle), 0, np.sin(angle)], [0, 1, 0], [-np.sin(angle), 0, np.cos(angle)]]
    pose[:3, 3] = [0.01 * frame, 0, 0.02 * frame]
    return pose
