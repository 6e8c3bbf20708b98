"""A prompt may change from request to request: from the next chunk on it is in force, and the log remembers it."""

import httpx
import msgspec
import pytest
import torch
from server_fixtures import begin, client_of, path, post
from server_fixtures import digests as http_digests
from take_fixtures import Take, begin_take, drift

from longtake.api_schemas.resources import PostChunks
from longtake.server.engine.command import Command
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.engine.plan import Plan, plan_request, start_cursor
from longtake.server.engine.prompts import load_text, prompt_in_force, with_prompt
from longtake.server.engine.track import SessionCamera
from longtake.server.model.world import Frames, WorldModel
from longtake.state_cache import Arena, BlobRef, Cursor, Head, MemoryStore, SchemaError, TensorRef


class CountingModel:
    """The served model, which counts the prompts it encodes."""

    def __init__(self, model: WorldModel) -> None:
        self._model = model
        self.encoded: list[str] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def encode_prompt(self, prompt: str) -> tuple[torch.Tensor, torch.Tensor]:
        self.encoded.append(prompt)
        return self._model.encode_prompt(prompt)


@pytest.fixture
def counting(model: WorldModel) -> CountingModel:
    return CountingModel(model)


@pytest.fixture
def take(counting: CountingModel) -> Take:
    return begin_take(MemoryStore(), counting, prompt="a quay")  # type: ignore[arg-type]


def digests(take: Take) -> list[tuple[str, str]]:
    return [(record.frames_digest, record.state_digest) for record in take.records()]


def test_a_new_prompt_makes_another_take_from_its_chunk_on(take: Take, counting: CountingModel) -> None:
    twin = begin_take(MemoryStore(), take.model, prompt="a quay")
    take.post(24)
    twin.post(72)
    take.post(48, prompt="a storm")
    same = [mine == theirs for mine, theirs in zip(digests(take), digests(twin), strict=True)]
    assert same == [True, False, False]
    assert [record.prompt for record in take.records()] == [None, "a storm", "a storm"]
    assert counting.encoded == ["a storm"]
    assert prompt_in_force(take.session, take.head.cursor) == "a storm"


def test_the_prompt_that_is_in_force_changes_nothing(take: Take, counting: CountingModel) -> None:
    take.post(24, prompt="a quay")
    take.post(24, prompt="snow")
    take.post(24, prompt="snow")
    assert [record.prompt for record in take.records()] == [None, "snow", "snow"]
    assert counting.encoded == ["snow"]


def test_back_to_the_first_prompt_is_the_stored_text(take: Take, counting: CountingModel) -> None:
    take.post(24, prompt="snow")
    take.post(24, prompt="a quay")
    last = take.records()[-1]
    assert (last.prompt, last.text) == (None, None)
    text, mask = load_text(take.store, take.session, None)
    expected = take.model.encode_prompt("a quay")
    assert torch.equal(text, expected[0])
    assert torch.equal(mask, expected[1])


def test_the_stored_text_is_what_the_model_encoded(take: Take) -> None:
    take.post(24, prompt="fog and rain")
    text, mask = load_text(take.store, take.session, take.records()[0].text)
    expected = take.model.encode_prompt("fog and rain")
    assert torch.equal(text, expected[0])
    assert torch.equal(mask, expected[1])
    changed = take.model.condition(drift(1)[0], "a quay").with_text(text, mask)
    assert torch.equal(changed.first_latent, take.model.condition(drift(1)[0], "fog and rain").first_latent)
    assert torch.equal(changed.text, expected[0])


def test_a_prompt_waits_with_its_poses(take: Take) -> None:
    whole = begin_take(MemoryStore(), take.model, prompt="a quay")
    take.post(5)
    take.post(6, prompt="night")
    assert (take.head.chunk, take.head.cursor.prompt) == (-1, "night")
    take.post(13)
    whole.post(24, prompt="night")
    assert digests(take) == digests(whole)
    assert [record.prompt for record in take.records()] == ["night"]


def test_observed_frames_are_read_with_the_prompt_in_force(take: Take) -> None:
    twin = begin_take(MemoryStore(), take.model, prompt="a quay")
    take.post(24, clip=drift(24), prompt="night")
    twin.post(24, clip=drift(24))
    mine, theirs = take.records()[0], twin.records()[0]
    assert mine.prompt == "night"
    assert mine.frames_digest == theirs.frames_digest
    assert mine.state_digest != theirs.state_digest


def test_text_that_is_none_is_refused(take: Take) -> None:
    with pytest.raises(SchemaError, match="no text"):
        load_text(take.store, take.session, Arena((), ()))


TEXT = Arena((TensorRef("text", "F32", (1, 2, 3), 0, 24),), (BlobRef("0" * 32, 24),))


@pytest.fixture
def carried(take: Take) -> Cursor:
    start = start_cursor(take.session)
    assert (start.seed, start.prompt, start.text, start.exact_until, start.poses) == (7, None, None, None, b"")
    return msgspec.structs.replace(start, seed=99, prompt="night", text=TEXT, exact_until=3)


def plan(take: Take, cursor: Cursor, frames: int, clip: Frames | None = None, **fields: object) -> Plan:
    request = PostChunks.model_validate({"camera": {"poses": path(frames)}, **fields})
    head = Head(chunk=4, revision=0, cursor=cursor)
    return plan_request(Command(request, "", clip=clip), head, SessionCamera.of(take.session, take.model.spec))


@pytest.mark.parametrize(
    ("frames", "fields", "chunks", "waiting"),
    [(5, {}, 0, 5), (24, {}, 1, 0), (53, {}, 2, 5), (53, {"pad": True}, 3, 0), (48, {"clip": drift(48)}, 2, 0)],
    ids=["pending", "one", "left over", "padded", "observed"],
)
def test_every_cursor_of_a_plan_carries_seed_prompt_and_exactness(
    take: Take, carried: Cursor, frames: int, fields: dict[str, object], chunks: int, waiting: int
) -> None:
    made = plan(take, carried, frames, **fields)  # type: ignore[arg-type]
    cursors = [*(chunk.cursor for chunk in made.chunks), made.cursor]
    assert len(made.chunks) == chunks
    assert {(each.seed, each.prompt, each.text, each.exact_until) for each in cursors} == {(99, "night", TEXT, 3)}
    assert len(made.cursor.poses) == waiting * 16 * 8
    assert all(not cursor.poses for cursor in cursors[: max(0, chunks - 1)])


def test_a_prompt_in_force_is_not_encoded_again(take: Take, counting: CountingModel, carried: Cursor) -> None:
    assert with_prompt(take.store, take.model, take.session, carried, "night") is carried
    back = with_prompt(take.store, take.model, take.session, carried, "a quay")
    assert back == msgspec.structs.replace(carried, prompt=None, text=None)
    assert counting.encoded == []


async def test_over_http_a_prompt_holds_for_later_requests_and_another_server(
    http: httpx.AsyncClient, model: WorldModel, memory: MemoryStore
) -> None:
    session, twin = await begin(http, prompt="a quay"), await begin(http, prompt="a quay")
    first = http_digests(await post(http, session, path(24)))
    assert (await http.get(session)).json()["prompt"] == "a quay"
    await post(http, session, path(3, 25), prompt="a storm")
    assert (await http.get(session)).json()["prompt"] == "a storm"
    for branch in memory._log.branches.values():
        branch.snapshots.clear()
    other = Engine(model, memory, Limits(queue_size=4))
    async with client_of(other) as elsewhere:
        later = http_digests(await post(elsewhere, session, path(45, 28)))
    other.close()
    uncut = http_digests(await post(http, twin, path(24))) + http_digests(
        await post(http, twin, path(48, 25), prompt="a storm")
    )
    assert first + later == uncut
    chunks = (await http.get(f"{session}/chunks")).json()["data"]
    assert [(chunk["prompt"], chunk["seed"]) for chunk in chunks] == [(None, 7), ("a storm", 7), ("a storm", 7)]
    plain = await begin(http, prompt="a quay")
    assert http_digests(await post(http, plain, path(72)))[1:] != later
