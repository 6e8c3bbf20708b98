"""Behind the retention horizon: digests stay, what is gone says so, and everything else goes on."""

import io
from collections.abc import Iterator

import av
import httpx
import pytest
import safetensors.torch
import torch
from faults.toy_model import HISTORY, LATENT, ToyModel
from server_fixtures import begin, digests, path, post

from longtake.client import pngs
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.state_cache import MemoryStore, Retention, lineage_of, load_tensors

CHUNKS, KEPT = 20, 8


@pytest.fixture
def toy(memory: MemoryStore) -> Iterator[Engine]:
    engine = Engine(ToyModel(), memory, Limits(snapshot_every=1, retention=Retention(snapshots=2, chunks=KEPT)))
    yield engine
    engine.close()


class Walked:
    """A session of twenty chunks, and the same before its oldest were collected."""

    def __init__(self, http: httpx.AsyncClient, session: str, horizon: int, before: list[dict[str, object]]) -> None:
        self.http = http
        self.session = session
        self.horizon = horizon
        self.before = before

    async def get(self, address: str) -> httpx.Response:
        return await self.http.get(f"{self.session}/{address}")


@pytest.fixture
async def walked(quick: httpx.AsyncClient, toy: Engine, memory: MemoryStore) -> Walked:
    session = await begin(quick)
    before = (await post(quick, session, path(24 * CHUNKS), key="walk")).json()["data"]
    await toy.settle()
    memory.collect(lineage_of(session.rsplit("/", 1)[1]), Retention(snapshots=2, chunks=KEPT))
    horizon = (await quick.get(session)).json()["rewind_from"] + 1
    assert 0 < horizon <= CHUNKS - KEPT
    return Walked(quick, session, horizon, before)


async def test_chunks_are_listed_with_what_is_left_of_them(walked: Walked) -> None:
    listed = (await walked.get("chunks")).json()["data"]
    assert [chunk["expired"] for chunk in listed] == [index < walked.horizon for index in range(CHUNKS)]
    assert [{**chunk, "expired": False} for chunk in listed] == walked.before
    assert (await walked.get(f"chunks/{walked.horizon - 1}")).json() == listed[walked.horizon - 1]


@pytest.mark.parametrize("kind", ["video", "latents"])
async def test_what_has_expired_says_so(walked: Walked, kind: str) -> None:
    for index in (0, walked.horizon - 1):
        gone = await walked.get(f"chunks/{index}/{kind}")
        assert (gone.status_code, gone.json()["code"]) == (410, "chunk_expired")
        assert gone.json()["rewind_from"] == walked.horizon - 1
    for index in (walked.horizon, CHUNKS - 1):
        assert (await walked.get(f"chunks/{index}/{kind}")).status_code == 200
    assert (await walked.get(f"chunks/{CHUNKS}/{kind}")).json()["code"] == "chunk_not_found"


async def test_frames_need_what_the_decoder_sees(walked: Walked) -> None:
    first = walked.horizon + HISTORY
    for index in (0, walked.horizon - 1, walked.horizon, first - 1):
        gone = await walked.get(f"chunks/{index}/frames")
        assert (gone.status_code, gone.json()["code"]) == (410, "chunk_expired"), index
        assert gone.json()["rewind_from"] == walked.horizon - 1
    for index in (first, CHUNKS - 1):
        assert len(list(pngs((await walked.get(f"chunks/{index}/frames")).content))) == 24, index


async def test_the_video_begins_at_the_horizon(walked: Walked) -> None:
    answer = await walked.get("video")
    with av.open(io.BytesIO(answer.content)) as container:
        frames = list(container.decode(video=0))
    assert len(frames) == 24 * (CHUNKS - walked.horizon)
    assert frames[0].time == pytest.approx(24 * walked.horizon / 16)
    again = await walked.get("video")
    assert again.headers["ETag"] == answer.headers["ETag"]


async def test_the_tag_of_a_video_changes_when_it_does_more_than_grow(walked: Walked) -> None:
    async def tag() -> str:
        return str((await walked.get("video")).headers["ETag"])

    first = await tag()
    await post(walked.http, walked.session, "w-24")
    assert await tag() == first
    await walked.http.post(f"{walked.session}/rewind", json={"to_chunk": CHUNKS - 1})
    assert await tag() != first


@pytest.mark.parametrize(("how", "field"), [("fork", "from_chunk"), ("rewind", "to_chunk")])
async def test_back_to_the_horizon_and_no_further(walked: Walked, how: str, field: str) -> None:
    oldest = walked.horizon - 1
    for index in (-1, oldest - 1):
        gone = await walked.http.post(f"{walked.session}/{how}", json={field: index})
        assert (gone.status_code, gone.json()["code"]) == (410, "chunk_expired")
        assert gone.json()["errors"][0]["field"] == field
        assert gone.json()["rewind_from"] == oldest
    back = await walked.http.post(f"{walked.session}/{how}", json={field: oldest})
    assert (back.json()["next_chunk"], back.json()["rewind_from"]) == (walked.horizon, oldest)
    there = back.json()["links"]["self"]
    none_left = await walked.http.get(f"{there}/video")
    assert (none_left.status_code, none_left.json()["code"]) == (410, "chunk_expired")
    assert (none_left.json()["rewind_from"], none_left.json()["errors"]) == (oldest, [])
    assert (await walked.http.head(f"{there}/video")).status_code == 410
    again = digests(await post(walked.http, there, path(48, start=24 * walked.horizon + 1)))
    whole = [(c["index"], c["frames_digest"], c["state_digest"]) for c in walked.before]
    assert again == whole[walked.horizon : walked.horizon + 2]


async def test_a_repeated_request_answers_from_what_is_left(walked: Walked) -> None:
    again = await post(walked.http, walked.session, path(24 * CHUNKS), key="walk")
    assert [{**chunk, "expired": False} for chunk in again.json()["data"]] == walked.before
    body, headers = {"camera": {"poses": path(24 * CHUNKS)}}, {"Idempotency-Key": "walk", "Accept": "video/mp4"}
    gone = await walked.http.post(f"{walked.session}/chunks", json=body, headers=headers)
    assert (gone.status_code, gone.json()["code"]) == (410, "chunk_expired")


async def test_latents_are_those_of_the_log(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    session = await begin(quick)
    (chunk,) = (await post(quick, session, path(24))).json()["data"]
    answer = await quick.get(chunk["links"]["latents"])
    assert answer.headers["content-type"] == "application/octet-stream"
    latents = safetensors.torch.load(answer.content)["latents"]
    session_id = session.rsplit("/", 1)[1]
    stored = load_tensors(memory, session_id, memory.chunk(session_id, 0).latents)["latents"]
    assert latents.shape == LATENT
    assert torch.equal(latents, stored)


async def test_the_size_of_a_video_without_it(quick: httpx.AsyncClient) -> None:
    session = await begin(quick)
    await post(quick, session, path(48))
    whole, head = await quick.get(f"{session}/video"), await quick.head(f"{session}/video")
    assert (head.status_code, head.headers["content-length"]) == (200, str(len(whole.content)))
    part = await quick.head(f"{session}/video", headers={"Range": "bytes=5-14"})
    assert (part.status_code, part.headers["content-length"]) == (206, "10")
    beyond = await quick.get(f"{session}/video", headers={"Range": f"bytes={len(whole.content)}-"})
    assert (beyond.status_code, beyond.headers["Content-Range"]) == (416, f"bytes */{len(whole.content)}")
