"""Reads whose chunks go meanwhile, by a rewind, the retention or a deletion: what became of them is said."""

import asyncio
from collections.abc import Callable, Iterator

import httpx
import pytest
from faults.toy_model import ToyModel
from live_clients import LiveClient
from server_fixtures import begin, path, post

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.state_cache import ChunkRecord, MemoryStore, Retention, Rewind, lineage_of

CHUNKS = 8
GONE = {"rewound": "chunk_not_found", "expired": "chunk_expired", "deleted": "session_not_found"}


class Overtaken(MemoryStore):
    """A store in which something happens between a read of records and that of their blobs."""

    then: Callable[[], None] | None = None

    def chunks(self, session_id: str, start: int, stop: int) -> list[ChunkRecord]:
        """Records, and then what was to happen, once."""
        found = super().chunks(session_id, start, stop)
        if self.then is not None:
            then, self.then = self.then, None
            then()
        return found

    def take_away(self, session_id: str, how: str) -> None:
        """Chunks 0 and 1 go with their blobs."""
        if how == "rewound":
            _, head, fence = self.read(session_id)
            assert fence is not None
            self.rewind(Rewind(session_id=session_id, fence=fence, head=head, to_chunk=-1, cursor=head.cursor))
        elif how == "deleted":
            self.delete(session_id)
        self.collect(lineage_of(session_id), Retention(snapshots=2, chunks=1 if how == "expired" else None))


@pytest.fixture
def memory() -> MemoryStore:
    return Overtaken()


@pytest.fixture
def toy(memory: MemoryStore) -> Iterator[Engine]:
    engine = Engine(ToyModel(), memory, Limits(snapshot_every=1))
    yield engine
    engine.close()


@pytest.fixture
async def session(quick: httpx.AsyncClient, toy: Engine) -> str:
    session = await begin(quick)
    assert (await post(quick, session, path(24 * CHUNKS))).status_code == 201
    await toy.settle()
    return session


@pytest.mark.parametrize("part", ["chunks/1/video", "chunks/1/latents", "chunks/1/frames", "video"])
@pytest.mark.parametrize(("how", "code"), GONE.items(), ids=GONE.keys())
async def test_what_goes_once_its_record_was_read(
    quick: httpx.AsyncClient,
    memory: Overtaken,
    session: str,
    part: str,
    how: str,
    code: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    memory.then = lambda: memory.take_away(session.rpartition("/")[2], how)
    answer = await quick.get(f"{session}/{part}")
    assert answer.json()["code"] == code
    if how == "expired":
        assert answer.json()["rewind_from"] == (await quick.get(session)).json()["rewind_from"]
    assert "state_corrupt" not in caplog.text


async def test_another_chunk_in_its_place(
    quick: httpx.AsyncClient, toy: Engine, memory: Overtaken, session: str
) -> None:
    session_id = session.rpartition("/")[2]
    record = memory.chunk(session_id, 1)
    await quick.post(f"{session}/rewind", json={"to_chunk": 0})
    await post(quick, session, "d-24")
    await toy.settle()
    memory.collect(lineage_of(session_id), Retention(snapshots=2))
    with pytest.raises(ProblemError) as refused:
        await toy.read.segment(session_id, record)
    assert refused.value.code == "chunk_not_found"


@pytest.mark.parametrize("part", ["chunks/1/video", "chunks/1/latents", "chunks/1/frames"])
async def test_blobs_that_are_missing_from_a_record_that_stands(
    quick: httpx.AsyncClient, memory: Overtaken, session: str, part: str
) -> None:
    session_id = session.rpartition("/")[2]
    record = memory.chunk(session_id, 1)
    for ref in (*record.latents.blobs, *record.segment.blobs):
        del memory._blobs.blobs[lineage_of(session_id), ref.name]
    answer = await quick.get(f"{session}/{part}")
    assert (answer.status_code, answer.json()["code"]) == (500, "state_corrupt")


@pytest.mark.parametrize("headers", [{}, {"Range": "bytes=100-"}], ids=["whole", "part"])
@pytest.mark.parametrize(("how", "code"), GONE.items(), ids=GONE.keys())
async def test_a_video_that_is_overtaken_is_cut_and_counted(
    toy: Engine, memory: Overtaken, session: str, how: str, code: str, headers: dict[str, str]
) -> None:
    client = LiveClient(toy, f"{session}/video", b"", headers, method="GET")
    client.messages = asyncio.Queue(1)  # the server is at most two pieces ahead
    assert await client.status() == (206 if headers else 200)
    assert await client.piece()
    memory.take_away(session.rpartition("/")[2], how)
    more = []
    while not client.task.done() or not client.messages.empty():
        try:
            more.append(await asyncio.wait_for(client.messages.get(), 0.5))
        except TimeoutError:
            continue
    await client.task
    assert len(more) < CHUNKS - 1
    assert all(message["more_body"] for message in more)
    assert toy.metrics.registry.get_sample_value("longtake_problems_total", {"code": code}) == 1
