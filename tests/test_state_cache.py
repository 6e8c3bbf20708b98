"""Commits and requests: one atomic step, every refusal, on every store."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import msgspec
import pytest
import torch
from store_fixtures import make_chunk, make_cursor, make_request, make_session, make_step, make_text, take

from longtake.state_cache import (
    Arena,
    BlobRef,
    BlobsMissing,
    ChunkNotFound,
    ChunkRecord,
    Commit,
    Cursor,
    Fence,
    Fenced,
    HeadConflict,
    KeyReused,
    MemoryStore,
    RequestDone,
    SessionNotFound,
    Store,
    lineage_of,
    load_file,
    load_tensors,
    new_session_id,
)


def test_a_commit_is_read_back_whole(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    text = make_text(any_store, session_id, 1.0)
    step = make_step(any_store, session_id, fence, 0, text=text)
    commit = replace(step, key="key 1", request=make_request("print", done=False))
    any_store.commit(commit)

    record, head, in_force = any_store.read(session_id)
    assert (record.prompt, head.chunk, head.revision, head.cursor) == ("a beach", 0, 0, commit.cursor)
    assert in_force == fence
    assert any_store.chunk(session_id, 0) == commit.chunk
    assert any_store.snapshots(session_id) == {}
    assert any_store.request(session_id, "key 1") == commit.request
    assert any_store.request(session_id, "key 2") is None
    assert load_file(any_store, session_id, any_store.chunk(session_id, 0).segment) == b"segment 0"
    assert head.cursor.text == text
    assert torch.equal(load_tensors(any_store, session_id, text)["text"], torch.full((2, 4), 1.0))


def test_a_commit_without_chunk_moves_the_cursor_only(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    any_store.commit(
        Commit(session_id=session_id, fence=fence, revision=0, expected_head=-1, cursor=make_cursor("moved"))
    )
    assert any_store.read(session_id)[1].chunk == -1
    assert any_store.read(session_id)[1].cursor == make_cursor("moved")


def test_chunks_are_listed_by_range(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    for index in range(12):
        any_store.commit(make_step(any_store, session_id, fence, index))
    assert [chunk.index for chunk in any_store.chunks(session_id, 0, 1 << 40)] == list(range(12))
    assert [chunk.index for chunk in any_store.chunks(session_id, 9, 11)] == [9, 10]
    assert [chunk.index for chunk in any_store.chunks(session_id, -5, 2)] == [0, 1]
    assert any_store.chunks(session_id, 12, 20) == []
    for index in (-1, 12):
        with pytest.raises(ChunkNotFound):
            any_store.chunk(session_id, index)


Spoil = Callable[[Commit], Commit]
FOREIGN = BlobRef("0" * 32, 5)


def with_foreign_latents(commit: Commit) -> ChunkRecord:
    assert commit.chunk is not None
    return msgspec.structs.replace(commit.chunk, latents=Arena((), (FOREIGN,)))


def with_foreign_text(cursor: Cursor) -> Cursor:
    return msgspec.structs.replace(cursor, text=Arena((), (FOREIGN,)))


REFUSALS: dict[str, tuple[type[Exception], Spoil]] = {
    "unknown session": (SessionNotFound, lambda commit: replace(commit, session_id=new_session_id())),
    "malformed session": (SessionNotFound, lambda commit: replace(commit, session_id="ses_{x}:\r\n")),
    "old token": (Fenced, lambda commit: replace(commit, fence=Fence(commit.fence.token - 1, commit.fence.nonce))),
    "other nonce, same token": (Fenced, lambda commit: replace(commit, fence=Fence(commit.fence.token, "0" * 32))),
    "wrong head": (HeadConflict, lambda commit: replace(commit, chunk=None, expected_head=5)),
    "wrong revision": (HeadConflict, lambda commit: replace(commit, revision=1)),
    "missing blob": (BlobsMissing, lambda commit: replace(commit, chunk=with_foreign_latents(commit))),
    "missing text": (BlobsMissing, lambda commit: replace(commit, cursor=with_foreign_text(commit.cursor))),
    "key of another request": (
        KeyReused,
        lambda commit: replace(commit, key="open key", request=make_request("other", done=False)),
    ),
    "key of a finished request": (
        RequestDone,
        lambda commit: replace(commit, key="done key", request=make_request("print", done=True)),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_commit_changes_nothing(any_store: Store, name: str) -> None:
    error, spoil = REFUSALS[name]
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    for index, (key, done) in enumerate([("open key", False), ("done key", True)]):
        known = make_step(any_store, session_id, fence, index)
        any_store.commit(replace(known, key=key, request=make_request("print", done=done)))
    before = (any_store.read(session_id), any_store.chunks(session_id, 0, 9))

    commit = make_step(any_store, session_id, fence, 2)
    with pytest.raises(error):
        any_store.commit(spoil(commit))

    assert (any_store.read(session_id), any_store.chunks(session_id, 0, 9)) == before
    assert any_store.request(session_id, "open key") == make_request("print", done=False)
    any_store.commit(commit)


def test_a_conflict_says_where_the_session_stands(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    any_store.commit(make_step(any_store, session_id, fence, 0))
    with pytest.raises(HeadConflict) as conflict:
        any_store.commit(make_step(any_store, session_id, fence, 0))
    assert (conflict.value.chunk, conflict.value.revision) == (0, 0)


def test_refusals_come_in_order(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    any_store.commit(
        replace(make_step(any_store, session_id, fence, 0), key="key", request=make_request("print", done=True))
    )
    late = Commit(
        session_id=session_id, fence=Fence(0, ""), revision=3, expected_head=8, cursor=with_foreign_text(make_cursor()),
        key="key", request=make_request("other", done=True),
    )  # fmt: skip
    with pytest.raises(KeyReused):
        any_store.commit(late)
    with pytest.raises(RequestDone):
        any_store.commit(replace(late, request=make_request("print", done=True)))
    late = replace(late, key="new")
    with pytest.raises(Fenced):
        any_store.commit(late)
    late = replace(late, fence=fence)
    with pytest.raises(HeadConflict):
        any_store.commit(late)
    with pytest.raises(BlobsMissing):
        any_store.commit(replace(late, revision=0, expected_head=0))


def test_a_keyed_request_goes_on_until_done(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    any_store.commit(
        replace(make_step(any_store, session_id, fence, 0), key="key", request=make_request("print", done=False))
    )
    last = make_request("print", done=True)
    any_store.commit(replace(make_step(any_store, session_id, fence, 1), key="key", request=last))
    assert any_store.request(session_id, "key") == last


def test_rivals_with_one_fence_have_one_winner(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    commits = [make_step(any_store, session_id, fence, 0, seed=seed) for seed in range(8)]

    def attempt(commit: Commit) -> bool:
        try:
            any_store.commit(commit)
        except HeadConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, commits)) == 1


def test_a_commit_must_make_sense() -> None:
    commit = Commit(session_id="", fence=Fence(1, ""), revision=0, expected_head=3, cursor=make_cursor())
    with pytest.raises(ValueError, match="go together"):
        replace(commit, key="key")
    with pytest.raises(ValueError, match="does not follow"):
        replace(commit, chunk=make_chunk(MemoryStore(), new_session_id(), 3))


def test_session_ids_are_distinct_and_carry_their_lineage() -> None:
    ids = {new_session_id() for _ in range(100)}
    assert len({lineage_of(session_id) for session_id in ids}) == 100
    parent = ids.pop()
    assert lineage_of(new_session_id(lineage_of(parent))) == lineage_of(parent)


def test_records_can_not_be_changed_from_outside(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    chunk = make_chunk(any_store, session_id, 0)
    any_store.commit(replace(make_step(any_store, session_id, fence, 0), chunk=chunk, cursor=chunk.cursor()))
    for controller in (chunk.controller, any_store.read(session_id)[1].cursor.controller):
        controller["name"] = "changed"
    assert any_store.read(session_id)[1].cursor.controller["name"] == "after 0"
    assert any_store.chunk(session_id, 0).controller["name"] == "after 0"
