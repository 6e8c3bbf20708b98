"""Sessions whose records are damaged or gone, over HTTP: said so, beside others that are served, and deleted."""

import logging

import httpx
import msgspec
import pytest
from server_fixtures import begin, path, post

from longtake.server.engine.engine import Engine
from longtake.state_cache import MemoryStore, encode, lineage_of


def id_of(session: str) -> str:
    return session.rpartition("/")[2]


async def check_corrupt(http: httpx.AsyncClient, address: str) -> None:
    answer = await http.get(address)
    assert (answer.status_code, answer.json()["code"]) == (500, "state_corrupt"), answer.text


@pytest.mark.parametrize("harm", ["damaged", "short first pose", "never"])
async def test_one_damaged_session_is_left_out_of_a_listing_and_can_be_deleted(
    http: httpx.AsyncClient, memory: MemoryStore, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    other, damaged = await begin(http), await begin(http)
    entry, record = memory._sessions[id_of(damaged)], memory.read(id_of(damaged))[0]
    changes = {"damaged": {}, "short first pose": {"first_pose": [1.0]}, "never": {"created_at": float("inf")}}[harm]
    entry.record = b"nothing" if harm == "damaged" else encode(msgspec.structs.replace(record, **changes))
    caplog.set_level(logging.WARNING)
    listed = await http.get("/v1/sessions")
    assert [each["id"] for each in listed.json()["data"]] == [id_of(other)]
    assert "a session can not be listed" in caplog.text
    await check_corrupt(http, damaged)
    assert (await http.delete(damaged)).status_code == 204
    assert (await http.get(damaged)).status_code == 404
    assert (await http.get(other)).status_code == 200


async def test_a_record_that_is_gone_is_not_passed_over(
    http: httpx.AsyncClient, memory: MemoryStore, engine: Engine
) -> None:
    session = await begin(http)
    await post(http, session, path(48))
    await engine.settle()
    del memory._log.branches[f"{id_of(session)}:0"].records[0]
    for part in ("video", "chunks", "chunks/0", "chunks/0/frames", "chunks/1/frames"):
        await check_corrupt(http, f"{session}/{part}")
    assert (await http.get(f"{session}/chunks/1")).json()["index"] == 1
    assert (await http.get(f"{session}/chunks/1/video")).status_code == 200
    assert (await http.get(f"{session}/chunks/2")).json()["code"] == "chunk_not_found"


async def test_an_equal_chunk_is_readable_over_damaged_blobs(
    http: httpx.AsyncClient, memory: MemoryStore, engine: Engine
) -> None:
    session = await begin(http)
    await post(http, session, path(24))
    await engine.settle()
    parts = [f"{session}/chunks/0/{part}" for part in ("video", "latents", "frames")]
    whole = [(await http.get(part)).content for part in parts]
    record = memory.chunk(id_of(session), 0)
    for ref in (*record.latents.blobs, *record.segment.blobs):
        memory._blobs.blobs[lineage_of(id_of(session)), ref.name].data = b"damaged"
    for part in parts:
        await check_corrupt(http, part)
    assert (await http.post(f"{session}/rewind", json={"to_chunk": -1})).status_code == 200
    assert (await post(http, session, path(24))).status_code == 201
    assert [(await http.get(part)).content for part in parts] == whole
