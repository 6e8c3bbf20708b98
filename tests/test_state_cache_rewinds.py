"""Rewinds: one atomic step back, every refusal, on every store."""

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from store_fixtures import (
    check_whole,
    make_cursor,
    make_request,
    make_rewind,
    make_session,
    make_snapshot,
    make_step,
    seeds,
    take,
    write,
)

from longtake.state_cache import (
    Arena,
    BlobRef,
    BlobsMissing,
    ChunkNotFound,
    Fence,
    Fenced,
    HeadConflict,
    KeyReused,
    RequestDone,
    Rewind,
    SessionNotFound,
    Span,
    Store,
    new_session_id,
)

FOREIGN = Arena((), (BlobRef("0" * 32, 5),))


def test_a_rewind_takes_the_last_chunks_off_the_path(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    write(any_store, session_id, fence, 5)
    rewind = replace(make_rewind(any_store, session_id, fence, 1), key="back", request=make_request("print", done=True))

    any_store.rewind(rewind)

    _, head, in_force = any_store.read(session_id)
    assert (head.chunk, head.revision, head.base, head.rewinds) == (1, 1, 2, (1,))
    assert (head.path, head.cursor, in_force) == ((Span(f"{session_id}:0", 0, 2),), rewind.cursor, fence)
    assert seeds(any_store, session_id) == [0, 1]
    assert list(any_store.snapshots(session_id)) == [0, 1]
    assert any_store.request(session_id, "back") == rewind.request
    with pytest.raises(ChunkNotFound):
        any_store.chunk(session_id, 2)
    with pytest.raises(HeadConflict) as conflict:
        any_store.commit(make_step(any_store, session_id, fence, 2))
    assert (conflict.value.chunk, conflict.value.revision) == (1, 1)
    for revision, index in ((0, 1), (1, 1), (1, 2)):
        with pytest.raises(HeadConflict):
            any_store.attach(session_id, fence, revision, index, make_snapshot(any_store, session_id, 1.0))

    write(any_store, session_id, fence, 2, seeds=100)
    assert seeds(any_store, session_id) == [0, 1, 102, 103]
    check_whole(any_store, session_id)


def test_requests_outlive_a_rewind(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    request = make_request("print", done=True)
    any_store.commit(replace(make_step(any_store, session_id, fence, 0), key="key", request=request))
    any_store.rewind(make_rewind(any_store, session_id, fence, -1))
    assert any_store.request(session_id, "key") == request
    again = replace(make_step(any_store, session_id, fence, 0, revision=1), key="key", request=request)
    with pytest.raises(RequestDone):
        any_store.commit(again)


def test_rewinding_again_and_again(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    for round_, to_chunk in enumerate((3, 3, 1, -1, -1)):
        write(any_store, session_id, fence, 4, seeds=100 * round_)
        any_store.rewind(make_rewind(any_store, session_id, fence, to_chunk))
    assert any_store.read(session_id)[1].rewinds == (3, 3, 1, -1, -1)
    assert seeds(any_store, session_id) == []
    assert any_store.read(session_id)[1].path == ()
    write(any_store, session_id, fence, 2, seeds=900)
    any_store.rewind(make_rewind(any_store, session_id, fence, 0))
    any_store.rewind(make_rewind(any_store, session_id, fence, 0))
    write(any_store, session_id, fence, 1, seeds=1000)
    assert seeds(any_store, session_id) == [900, 1001]


Spoil = Callable[[Rewind], Rewind]
REFUSALS: dict[str, tuple[type[Exception], Spoil]] = {
    "unknown session": (SessionNotFound, lambda rewind: replace(rewind, session_id=new_session_id())),
    "old token": (Fenced, lambda rewind: replace(rewind, fence=Fence(rewind.fence.token - 1, rewind.fence.nonce))),
    "another chunk": (
        HeadConflict,
        lambda rewind: replace(rewind, head=msgspec.structs.replace(rewind.head, chunk=1)),
    ),
    "another revision": (
        HeadConflict,
        lambda rewind: replace(rewind, head=msgspec.structs.replace(rewind.head, revision=1)),
    ),
    "missing blob": (
        BlobsMissing,
        lambda rewind: replace(rewind, cursor=msgspec.structs.replace(rewind.cursor, text=FOREIGN)),
    ),
    "key of another request": (
        KeyReused,
        lambda rewind: replace(rewind, key="done key", request=make_request("other", done=True)),
    ),
    "key of a finished request": (
        RequestDone,
        lambda rewind: replace(rewind, key="done key", request=make_request("print", done=True)),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_rewind_changes_nothing(any_store: Store, name: str) -> None:
    error, spoil = REFUSALS[name]
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    write(any_store, session_id, fence, 2)
    step = make_step(any_store, session_id, fence, 2)
    any_store.commit(replace(step, key="done key", request=make_request("print", done=True)))
    before = any_store.read(session_id)
    rewind = make_rewind(any_store, session_id, fence, 0)
    with pytest.raises(error):
        any_store.rewind(spoil(rewind))
    assert any_store.read(session_id) == before
    assert seeds(any_store, session_id) == [0, 1, 2]
    any_store.rewind(rewind)


def test_refusals_of_a_rewind_come_in_order(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    step = make_step(any_store, session_id, fence, 0)
    any_store.commit(replace(step, key="key", request=make_request("print", done=True)))
    head = any_store.read(session_id)[1]
    late = Rewind(
        session_id=session_id,
        fence=Fence(0, ""),
        head=msgspec.structs.replace(head, revision=3),
        to_chunk=-1,
        cursor=msgspec.structs.replace(make_cursor(), text=FOREIGN),
        key="key",
        request=make_request("other", done=True),
    )
    with pytest.raises(KeyReused):
        any_store.rewind(late)
    with pytest.raises(RequestDone):
        any_store.rewind(replace(late, request=make_request("print", done=True)))
    late = replace(late, key="new")
    with pytest.raises(Fenced):
        any_store.rewind(late)
    late = replace(late, fence=fence)
    with pytest.raises(HeadConflict):
        any_store.rewind(late)
    with pytest.raises(BlobsMissing):
        any_store.rewind(replace(late, head=head))
