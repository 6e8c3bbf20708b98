"""Fork and rewind: sessions go on from any chunk as they would have, and neither sees the other again."""

import asyncio

import httpx
import pytest
from branch_calls import Digest, branch, fork, log, rewind, state
from server_fixtures import MAX_BODY, begin, client_of, digests, path, post

from longtake.server.app import create_app
from longtake.server.doors import ApiKeys, Doors
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import WorldModel
from longtake.state_cache import (
    Holder,
    MemoryStore,
)


async def test_a_fork_goes_on_as_its_parent_would_have(http: httpx.AsyncClient) -> None:
    """From the head, from the middle and from the first frame; with poses pending, which it does not get."""
    whole = digests(await post(http, await begin(http), path(96)))
    parent = await begin(http)
    await post(http, parent, path(53))
    at_head, middle, anew = [await fork(http, parent, chunk) for chunk in (1, 0, -1)]
    assert (await state(http, at_head))["pending_poses"] == 0
    assert digests(await post(http, at_head, path(48, start=49))) == whole[2:]
    assert digests(await post(http, middle, path(72, start=25))) == whole[1:]
    assert digests(await post(http, anew, path(96))) == whole
    assert digests(await post(http, parent, path(43, start=54))) == whole[2:]
    for session in (parent, at_head, middle, anew):
        assert await log(http, session) == whole


async def test_neither_sees_the_other_again(quick: httpx.AsyncClient) -> None:
    parent = await begin(quick)
    shared = digests(await post(quick, parent, path(48)))
    child = await fork(quick, parent, 1)
    ours = digests(await post(quick, parent, "w-24"))
    theirs = digests(await post(quick, child, "a-48"))
    assert ours != theirs[:1]
    assert await log(quick, parent) == shared + ours
    assert await log(quick, child) == shared + theirs
    await rewind(quick, parent, -1)
    assert await log(quick, child) == shared + theirs
    assert (await quick.delete(parent)).status_code == 204
    assert await log(quick, child) == shared + theirs
    assert len(digests(await post(quick, child, "s-24"))) == 1
    video = await quick.get(f"{child}/video")
    assert (video.status_code, len(video.content)) == (200, int(video.headers["content-length"]))


async def test_a_session_tells_its_tree(quick: httpx.AsyncClient) -> None:
    parent = await begin(quick, ttl_s=3600, prompt="a quay")
    await post(quick, parent, path(48))
    first, second = await fork(quick, parent, 1), await fork(quick, parent, -1)
    grandchild = await fork(quick, first, 0)
    ids = {session: (await state(quick, session))["id"] for session in (parent, first, second, grandchild)}
    shown = await state(quick, first)
    assert (shown["parent"], shown["forked_at"], shown["revision"]) == (ids[parent], 1, 0)
    assert (shown["next_chunk"], shown["prompt"], shown["forks"]) == (
        2,
        "a quay",
        [{"id": ids[grandchild], "from_chunk": 0}],
    )
    assert shown["expires_at"] is not None
    assert (await state(quick, second))["forked_at"] == -1
    links = [{"id": ids[second], "from_chunk": -1}, {"id": ids[first], "from_chunk": 1}]
    assert (await state(quick, parent))["forks"] == links
    listed = (await quick.get("/v1/sessions")).json()["data"]
    assert {each["id"]: each["forks"] for each in listed}[ids[parent]] == links
    await quick.delete(second)
    assert (await state(quick, parent))["forks"] == links[1:]


async def test_a_rewind_goes_back_and_on_again(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    made = digests(await post(http, session, path(77)))
    back = await rewind(http, session, 0)
    assert (back["revision"], back["next_chunk"], back["next_frame"], back["pending_poses"]) == (1, 1, 25, 0)
    assert await state(http, session) == back
    assert await log(http, session) == made[:1]
    assert (await http.get(f"{session}/chunks/1")).json()["code"] == "chunk_not_found"
    assert digests(await post(http, session, path(48, start=25))) == made[1:]
    assert (await rewind(http, session, -1))["revision"] == 2
    assert (await http.get(f"{session}/video")).json()["code"] == "chunk_not_found"
    assert digests(await post(http, session, path(72))) == made


async def test_a_rewind_to_the_head_drops_what_waits(quick: httpx.AsyncClient) -> None:
    session = await begin(quick)
    whole = digests(await post(quick, await begin(quick), path(48)))
    await post(quick, session, path(24))
    for poses in (5, 0):
        if poses:
            await post(quick, session, "d-5")
        back = await rewind(quick, session, 0)
        assert (back["next_chunk"], back["pending_poses"]) == (1, 0)
    assert back["revision"] == 2
    assert digests(await post(quick, session, path(24, start=25))) == whole[1:]


async def test_the_start_is_as_chunk_0_had_it(quick: httpx.AsyncClient) -> None:
    """A rewind to −1 without a seed repeats the take, whatever seed and prompt chunk 0 was made with."""
    session = await begin(quick)
    await rewind(quick, session, -1, seed=1234)
    await post(quick, session, "w-24", prompt="a pier")
    first = await log(quick, session)
    await rewind(quick, session, -1)
    await post(quick, session, "w-24")
    assert await log(quick, session) == first


@pytest.mark.parametrize("how", ["fork", "rewind"])
@pytest.mark.parametrize("chunk", [-1, 0, 1])
async def test_another_seed_gives_another_take(quick: httpx.AsyncClient, how: str, chunk: int) -> None:
    """Left out, it stays the one that was in force there: the same take again."""

    async def again(**seed: int) -> tuple[list[Digest], object]:
        session = await begin(quick)
        await post(quick, session, path(48))
        if how == "fork":
            session = await fork(quick, session, chunk, **seed)
        else:
            await rewind(quick, session, chunk, **seed)
        await post(quick, session, path(48, start=24 * chunk + 25))
        return await log(quick, session), (await state(quick, session))["seed"]

    same, other, third = [await again(**seed) for seed in ({}, {"seed": 8}, {"seed": 9})]
    kept = chunk + 1
    assert same[0][:kept] == other[0][:kept] == third[0][:kept]
    assert (same[1], other[1], third[1]) == (7, 8, 9)
    for index in range(kept, kept + 2):
        assert len({take[index] for take, _ in (same, other, third)}) == 3
    assert (same, other) == (await again(seed=7), await again(seed=8))


async def test_a_fork_at_the_head_has_the_seed_and_prompt_that_are_in_force(quick: httpx.AsyncClient) -> None:
    """Although no chunk has been made with them yet."""
    parent = await begin(quick, prompt="a quay")
    await post(quick, parent, path(48))
    await rewind(quick, parent, 0, seed=9)
    await post(quick, parent, prompt="a pier")
    child = await fork(quick, parent, 0)
    shown = await state(quick, child)
    assert (shown["seed"], shown["prompt"]) == (9, "a pier")
    assert digests(await post(quick, child, path(24, start=25))) == digests(
        await post(quick, parent, path(24, start=25))
    )
    earlier = await state(quick, await fork(quick, parent, -1))
    assert (earlier["seed"], earlier["prompt"]) == (7, "a quay")


async def test_the_prompt_goes_back_with_the_chunks(http: httpx.AsyncClient) -> None:
    session = await begin(http, prompt="a quay")
    await post(http, session, path(24))
    made = digests(await post(http, session, path(24, start=25), prompt="a red pier"))
    later = await fork(http, session, 1)
    await post(http, session, path(24, start=49), prompt="")
    assert (await rewind(http, session, 1))["prompt"] == "a red pier"
    assert digests(await post(http, session, path(24, start=49))) == digests(
        await post(http, later, path(24, start=49))
    )
    assert (await rewind(http, session, 0))["prompt"] == "a quay"
    assert digests(await post(http, session, path(24, start=25))) != made
    await rewind(http, session, 0)
    assert digests(await post(http, session, path(24, start=25), prompt="a red pier")) == made


@pytest.mark.parametrize(("how", "field"), [("fork", "from_chunk"), ("rewind", "to_chunk")])
async def test_where_one_can_not_go(quick: httpx.AsyncClient, how: str, field: str) -> None:
    session = await begin(quick)
    await post(quick, session, path(24))
    standing = await state(quick, session)
    beyond = await branch(quick, session, how, **{field: 1})
    assert (beyond.status_code, beyond.json()["code"]) == (404, "chunk_not_found")
    assert beyond.json()["errors"][0]["field"] == field
    for body in ({field: -2}, {field: "0"}, {field: 0.5}, {}, {field: 0, "seed": -1}, {field: 0, "chunk": 0}):
        refused = await branch(quick, session, how, **body)
        assert (refused.status_code, refused.json()["code"]) == (422, "invalid_request"), body
    for address in ("/v1/sessions/ses_" + "a" * 39, "/v1/sessions/x"):
        assert (await branch(quick, address, how, **{field: 0})).json()["code"] == "session_not_found"
    assert (await quick.post(f"{session}/{how}", content="{")).status_code == 415
    assert await state(quick, session) == standing


async def test_a_session_that_another_server_works_on(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    """It can not be rewound, but forked."""
    session = await begin(quick)
    await post(quick, session, path(24))
    rival = Holder("another", "http://another:8000")
    session_id = session.rsplit("/", 1)[1]
    fence = memory.acquire(session_id, rival, 7.5).fence
    refused = await branch(quick, session, "rewind", to_chunk=-1)
    assert (refused.status_code, refused.json()["code"]) == (409, "session_busy")
    assert refused.json()["owner_address"] == "http://another:8000"
    assert refused.headers["Retry-After"] == "8"
    assert len(digests(await post(quick, await fork(quick, session, 0), path(24, start=25)))) == 1
    memory.release(session_id, fence)
    assert (await rewind(quick, session, -1))["next_chunk"] == 0


async def test_a_fork_belongs_to_the_key_of_its_parent(toy: Engine) -> None:
    app = create_app(toy, MAX_BODY, Doors(ApiKeys(["mine", "yours"])))
    transport = httpx.ASGITransport(app)
    mine, yours = [
        httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", headers={"Authorization": f"Bearer {key}"})
        for key in ("mine", "yours")
    ]
    async with mine, yours:
        parent = await begin(mine)
        for how, field in (("fork", "from_chunk"), ("rewind", "to_chunk")):
            assert (await branch(yours, parent, how, **{field: -1})).json()["code"] == "session_not_found"
        child = await fork(mine, parent, -1)
        assert (await yours.get(child)).status_code == 404
        assert (await yours.get(f"{child}/events")).status_code == 404
        assert [len((await who.get("/v1/sessions")).json()["data"]) for who in (mine, yours)] == [2, 0]


async def test_a_rewind_waits_for_what_runs_here(quick: httpx.AsyncClient) -> None:
    session = await begin(quick)
    advance = asyncio.create_task(post(quick, session, path(240)))
    while not (await state(quick, session))["next_chunk"]:
        assert not advance.done()
    back = await rewind(quick, session, 0)
    assert len(digests(await advance)) == 10
    assert (back["revision"], back["next_chunk"]) == (1, 1)


async def test_many_forks_copy_nothing(quick: httpx.AsyncClient, toy: Engine, memory: MemoryStore) -> None:
    parent = await begin(quick)
    await post(quick, parent, path(240))
    await toy.settle()  # snapshots are stored behind the answer
    used = memory.check().used_bytes
    forks = [await fork(quick, parent, index % 10) for index in range(100)]
    assert memory.check().used_bytes - used <= used // 100
    assert len(set(forks)) == 100


async def test_a_fork_of_the_served_model_has_the_frames_of_its_parent(model: WorldModel, memory: MemoryStore) -> None:
    engine = Engine(model, memory, Limits())
    async with client_of(engine) as http:
        parent = await begin(http)
        await post(http, parent, path(48))
        child = await fork(http, parent, 1)
        await http.delete(parent)
        for kind in ("frames", "video", "latents"):
            assert (await http.get(f"{child}/chunks/1/{kind}")).status_code == 200
    engine.close()
