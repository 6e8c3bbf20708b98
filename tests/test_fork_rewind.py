"""Fork and rewind: sessions go on from any chunk as they would have, and neither sees the other again."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from faults.toy_model import ToyModel
from server_fixtures import MAX_BODY, begin, client_of, digests, path, post

from longtake.server.app import create_app
from longtake.server.doors import ApiKeys, Doors
from longtake.server.engine.branching import rewound
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import WorldModel
from longtake.state_cache import (
    Commit,
    Cursor,
    Head,
    HeadConflict,
    Holder,
    MemoryStore,
    RequestRecord,
    Retention,
    Rewind,
    SessionRecord,
    Store,
    StoreUnavailable,
    lineage_of,
)

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


async def test_a_fork_that_is_repeated_is_made_once(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    """Here and on another server, after it has gone on."""
    parent = await begin(quick)
    await post(quick, parent, path(24))
    first = await branch(quick, parent, "fork", from_chunk=0, seed=9, key="f")
    assert "Idempotent-Replayed" not in first.headers
    await post(quick, first.json()["links"]["self"], path(24, start=25), prompt="a pier")
    await post(quick, parent, path(24, start=25))
    other = Engine(ToyModel(), memory, Limits())
    async with client_of(other) as there:
        for http in (quick, there):
            again = await branch(http, parent, "fork", from_chunk=0, seed=9, key="f")
            assert (again.status_code, again.content) == (201, first.content)
            assert again.headers["Idempotent-Replayed"] == "true"
            refused = await branch(http, parent, "fork", from_chunk=0, seed=8, key="f")
            assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")
    other.close()
    assert len((await quick.get("/v1/sessions")).json()["data"]) == 2
    unkeyed = [await fork(quick, parent, 0) for _ in range(2)]
    elsewhere = await branch(quick, unkeyed[0], "fork", from_chunk=0, seed=9, key="f")
    assert len({*unkeyed, elsewhere.json()["links"]["self"], first.json()["links"]["self"]}) == 4


async def test_a_rewind_that_is_repeated_is_done_once(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    session = await begin(quick)
    await post(quick, session, path(48))
    first = await branch(quick, session, "rewind", to_chunk=0, key="r")
    await post(quick, session, "d-48")
    standing = await state(quick, session)
    other = Engine(ToyModel(), memory, Limits())
    async with client_of(other) as there:
        for http in (quick, there):
            again = await branch(http, session, "rewind", to_chunk=0, key="r")
            assert (again.status_code, again.content) == (200, first.content)
            assert again.headers["Idempotent-Replayed"] == "true"
            refused = await branch(http, session, "rewind", to_chunk=1, key="r")
            assert (refused.status_code, refused.json()["code"]) == (422, "idempotency_key_reused")
    other.close()
    assert await state(quick, session) == standing
    assert digests(await post(quick, session, path(24), key="r"))  # a key of this route is none of another


async def test_a_request_whose_chunks_were_rewound_away(quick: httpx.AsyncClient) -> None:
    session = await begin(quick)
    kept = await post(quick, session, path(24), key="kept")
    await post(quick, session, path(48, start=25), key="gone")
    await post(quick, session, path(24, start=73), key="gone-too")
    await rewind(quick, session, 1)
    assert (await post(quick, session, path(24), key="kept")).content == kept.content
    await post(quick, session, path(72, start=49))
    for key, poses in (("gone", path(48, start=25)), ("gone-too", path(24, start=73))):
        refused = await post(quick, session, poses, key=key)
        assert (refused.status_code, refused.json()["code"]) == (409, "rewound")
    assert (await state(quick, session))["next_chunk"] == 5


def request(first_chunk: int, chunks: int, revision: int) -> RequestRecord:
    return RequestRecord(
        fingerprint="",
        first_chunk=first_chunk,
        chunks=chunks,
        frames_used=0,
        done=True,
        revision=revision,
        pending_poses=0,
    )


@pytest.mark.parametrize(
    ("record", "gone"),
    [
        (request(0, 5, 0), False),
        (request(0, 6, 0), True),
        (request(5, 1, 0), True),
        (request(5, 1, 1), True),
        (request(3, 1, 1), False),
        (request(4, 0, 1), False),
        (request(9, 9, 2), False),
    ],
)
def test_what_a_rewind_takes_away(record: RequestRecord, gone: object) -> None:
    """Two rewinds, to chunks 7 and 4."""
    head = Head(chunk=12, revision=2, cursor=Cursor(controller={}, seed=0), rewinds=(7, 4))
    assert rewound(record, head) == gone


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


class Unlucky(MemoryStore):
    """A store whose sessions move just before they are forked or rewound, or whose answers get lost."""

    conflicts = 0
    lost = 0

    def fork(self, child: SessionRecord, source: Head, cursor: Cursor) -> None:
        self._tick()
        super().fork(child, source, cursor)
        self._lose()

    def rewind(self, rewind: Rewind) -> None:
        self._tick()
        super().rewind(rewind)
        self._lose()

    def commit(self, commit: Commit) -> None:
        super().commit(commit)
        if commit.chunk is None:
            self._lose()

    def _tick(self) -> None:
        if self.conflicts:
            self.conflicts -= 1
            raise HeadConflict(0, 0)

    def _lose(self) -> None:
        if self.lost:
            self.lost -= 1
            raise StoreUnavailable("gone")


@pytest.fixture
def memory() -> MemoryStore:
    return Unlucky()


@pytest.mark.parametrize(("how", "field"), [("fork", "from_chunk"), ("rewind", "to_chunk")])
async def test_a_session_that_moves_meanwhile(quick: httpx.AsyncClient, memory: Unlucky, how: str, field: str) -> None:
    session = await begin(quick)
    await post(quick, session, path(24))
    memory.conflicts = 2
    assert (await branch(quick, session, how, **{field: 0})).is_success
    memory.conflicts = 3
    refused = await branch(quick, session, how, **{field: 0})
    assert (refused.status_code, refused.json()["code"]) == (409, "chunk_conflict")


@pytest.mark.parametrize("lost", [1, 2])
async def test_a_fork_whose_answer_was_lost(quick: httpx.AsyncClient, memory: Unlucky, lost: int) -> None:
    """The child is there already; at the second failure, so is what was to be answered."""
    parent = await begin(quick)
    await post(quick, parent, path(24))
    memory.lost = lost
    for _ in range(lost):
        failed = await branch(quick, parent, "fork", from_chunk=0, key="f")
        assert (failed.status_code, failed.json()["code"]) == (503, "store_unavailable")
    made = await branch(quick, parent, "fork", from_chunk=0, key="f")
    assert (made.status_code, made.json()["next_chunk"]) == (201, 1)
    assert (await state(quick, parent))["forks"] == [{"id": made.json()["id"], "from_chunk": 0}]
    assert (await branch(quick, parent, "fork", from_chunk=0, key="f")).content == made.content


async def test_a_rewind_whose_answer_was_lost(quick: httpx.AsyncClient, memory: Unlucky) -> None:
    session = await begin(quick)
    made = digests(await post(quick, session, path(48)))
    memory.lost = 1
    failed = await branch(quick, session, "rewind", to_chunk=0, key="r")
    assert (failed.status_code, failed.json()["code"]) == (503, "store_unavailable")
    assert digests(await post(quick, session, path(24, start=25))) == made[1:]
    again = await branch(quick, session, "rewind", to_chunk=0, key="r")
    assert (again.status_code, again.json()["revision"], again.headers["Idempotent-Replayed"]) == (200, 1, "true")
    assert (await state(quick, session))["next_chunk"] == 2


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


async def test_many_forks_copy_nothing(quick: httpx.AsyncClient, memory: MemoryStore) -> None:
    parent = await begin(quick)
    await post(quick, parent, path(240))
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


async def test_on_every_store_with_two_servers(any_store: Store) -> None:
    """Two servers take turns; what one was answered, the other answers too."""
    engines = [Engine(ToyModel(), any_store, Limits(retention=Retention(chunks=4))) for _ in range(2)]
    here, there = [client_of(engine) for engine in engines]
    async with here, there:
        parent = await begin(here)
        whole = digests(await post(here, parent, path(96)))
        child = await fork(there, parent, 1, key="f")
        assert await fork(here, parent, 1, key="f") == child
        assert digests(await post(there, child, path(48, start=49))) == whole[2:]
        await post(here, parent, path(24, start=97), key="gone")
        back = await branch(there, parent, "rewind", to_chunk=0, key="r")
        assert (await branch(here, parent, "rewind", to_chunk=0, key="r")).content == back.content
        assert (await post(there, parent, path(24, start=97), key="gone")).json()["code"] == "rewound"
        assert digests(await post(here, parent, path(72, start=25))) == whole[1:]
        await post(here, parent, path(240, start=97))
        for engine in engines:
            await engine.settle()
        any_store.collect(lineage_of(parent.rsplit("/", 1)[1]), Retention(chunks=4))
        oldest = int(str((await state(there, parent))["rewind_from"]))
        assert oldest > 0
        assert (await branch(there, parent, "rewind", to_chunk=oldest - 1)).json()["code"] == "chunk_expired"
        assert await fork(there, parent, oldest)
        assert (await rewind(there, parent, oldest))["next_chunk"] == oldest + 1
        assert await log(here, child) == whole
    for engine in engines:
        engine.close()
