"""Forks and rewinds over HTTP, and a server that takes no time."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from faults.toy_model import ToyModel
from server_fixtures import client_of

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.state_cache import MemoryStore

Digest = tuple[int, str, str]


async def fork(http: httpx.AsyncClient, session: str, from_chunk: int, **fields: object) -> str:
    """A fork of a session; returns the path of its resource."""
    answer = await branch(http, session, "fork", from_chunk=from_chunk, **fields)
    assert answer.status_code == 201, answer.text
    assert answer.headers["Location"] == answer.json()["links"]["self"]
    return str(answer.json()["links"]["self"])


async def rewind(http: httpx.AsyncClient, session: str, to_chunk: int, **fields: object) -> dict[str, object]:
    answer = await branch(http, session, "rewind", to_chunk=to_chunk, **fields)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def branch(http: httpx.AsyncClient, session: str, how: str, **fields: object) -> httpx.Response:
    headers = {"Idempotency-Key": str(fields.pop("key"))} if "key" in fields else {}
    return await http.post(f"{session}/{how}", json=fields, headers=headers)


async def log(http: httpx.AsyncClient, session: str) -> list[Digest]:
    chunks = (await http.get(f"{session}/chunks")).json()["data"]
    return [(chunk["index"], chunk["frames_digest"], chunk["state_digest"]) for chunk in chunks]


async def state(http: httpx.AsyncClient, session: str) -> dict[str, object]:
    return dict((await http.get(session)).json())


@pytest.fixture
def toy(memory: MemoryStore) -> Iterator[Engine]:
    engine = Engine(ToyModel(), memory, Limits())
    yield engine
    engine.close()


@pytest.fixture
async def quick(toy: Engine) -> AsyncIterator[httpx.AsyncClient]:
    """HTTP to a model that takes no time."""
    async with client_of(toy) as client:
        yield client
