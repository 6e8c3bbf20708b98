"""Forks: pointers into a log that stays as it is, on every store."""

from dataclasses import replace

import msgspec
import pytest
import torch
from store_fixtures import (
    check_whole,
    listed,
    make_cursor,
    make_fork,
    make_request,
    make_rewind,
    make_session,
    make_snapshot,
    make_step,
    make_text,
    seeds,
    take,
    write,
)
from store_probes import Probe

from longtake.state_cache import (
    Arena,
    BlobRef,
    BlobsMissing,
    ChunkNotFound,
    Fenced,
    HeadConflict,
    Parent,
    SessionExists,
    SessionNotFound,
    Span,
    Store,
    lineage_of,
    new_session_id,
    save_tensors,
)
from longtake.state_cache.records import Cursor

FOREIGN = Arena((), (BlobRef("0" * 32, 5),))


def test_a_fork_begins_where_its_parent_stood(any_store: Store) -> None:
    parent = make_session(any_store)
    text = make_text(any_store, parent, 1.0)
    write(any_store, parent, take(any_store, parent), 5, text=text)

    child = make_fork(any_store, parent, 2)

    session, head, fence = any_store.read(child)
    assert (session.parent, fence) == (Parent(parent, 2), None)
    assert (head.chunk, head.revision, head.base, head.rewinds) == (2, 0, 3, ())
    assert head.path == (Span(f"{parent}:0", 0, 3),)
    assert head.cursor == any_store.chunk(parent, 2).cursor()
    assert head.cursor.text == text
    assert seeds(any_store, child) == [0, 1, 2]
    assert list(any_store.snapshots(child)) == [0, 1, 2]
    with pytest.raises(ChunkNotFound):
        any_store.chunk(child, 3)
    assert listed(any_store, 9) == sorted((parent, child), reverse=True)


def test_a_fork_and_its_parent_never_see_each_other_again(any_store: Store) -> None:
    parent = make_session(any_store)
    above = take(any_store, parent)
    write(any_store, parent, above, 3)
    child = make_fork(any_store, parent, 1)
    below = take(any_store, child)
    before = any_store.read(parent)

    write(any_store, child, below, 3, seeds=100)
    assert any_store.read(parent) == before
    write(any_store, parent, above, 1)

    assert seeds(any_store, parent) == [0, 1, 2, 3]
    assert seeds(any_store, child) == [0, 1, 102, 103, 104]
    with pytest.raises(Fenced):
        any_store.commit(make_step(any_store, child, above, 5))
    with pytest.raises(HeadConflict):
        any_store.attach(child, below, 0, 1, make_snapshot(any_store, child, 1.0))
    check_whole(any_store, parent)
    check_whole(any_store, child)


def test_a_fork_has_no_requests_of_its_parent(any_store: Store) -> None:
    parent = make_session(any_store)
    step = make_step(any_store, parent, take(any_store, parent), 0)
    any_store.commit(replace(step, key="key", request=make_request("print", done=True)))
    child = make_fork(any_store, parent, 0)
    assert any_store.request(child, "key") is None
    step = make_step(any_store, child, take(any_store, child), 1)
    any_store.commit(replace(step, key="key", request=make_request("other", done=True)))
    assert any_store.request(parent, "key") == make_request("print", done=True)


def test_forks_of_forks_lead_back_to_the_first(any_store: Store) -> None:
    line = [make_session(any_store)]
    for generation in range(1, 5):
        write(any_store, line[-1], take(any_store, line[-1]), 3, seeds=100 * generation)
        line.append(make_fork(any_store, line[-1], any_store.read(line[-1])[1].chunk - 1))
    assert seeds(any_store, line[-1]) == [100, 101, 202, 203, 304, 305, 406, 407]
    assert [span.branch for span in any_store.read(line[-1])[1].path] == [f"{name}:0" for name in line[:-1]]
    assert list(any_store.snapshots(line[-1])) == list(range(8))
    # forked behind the first chunks again: what lies between is no part of it
    short = make_fork(any_store, line[-1], 2)
    assert seeds(any_store, short) == [100, 101, 202]
    assert [record.seed for record in any_store.chunks(line[-1], 1, 5)] == [101, 202, 203, 304]


@pytest.mark.parametrize("chunk", [-1, 4], ids=["nothing", "all"])
def test_a_fork_can_share_nothing_or_all(any_store: Store, chunk: int) -> None:
    parent = make_session(any_store)
    write(any_store, parent, take(any_store, parent), 5)
    child = make_fork(any_store, parent, chunk)
    write(any_store, child, take(any_store, child), 2, seeds=100)
    assert seeds(any_store, child) == [*range(chunk + 1), 101 + chunk, 102 + chunk]
    check_whole(any_store, child)


def test_a_hundred_forks_copy_nothing(probe: Probe) -> None:
    store, parent = probe.store, make_session(probe.store)
    fence = take(store, parent)
    for index in range(32):
        latents = save_tensors(store, parent, {"latents": torch.full((1 << 18,), float(index))})
        step = make_step(store, parent, fence, index)
        assert step.chunk is not None
        store.commit(replace(step, chunk=msgspec.structs.replace(step.chunk, latents=latents)))
    size, keys, blobs = probe.size(), len(probe.keys()), probe.blobs()

    children = [make_fork(store, parent, index % 32) for index in range(100)]

    assert probe.size() - size < size / 100
    assert len(probe.keys()) - keys <= 200
    assert probe.blobs() == blobs
    assert seeds(store, children[-1]) == list(range(4))


def test_a_fork_that_is_refused_leaves_nothing(probe: Probe) -> None:
    store, parent = probe.store, make_session(probe.store)
    fence = take(store, parent)
    write(store, parent, fence, 3)
    session, head, _ = store.read(parent)
    child = msgspec.structs.replace(session, id=new_session_id(lineage_of(parent)), parent=Parent(parent, 1))
    before = probe.keys()
    refusals: list[tuple[type[Exception], Parent, Cursor]] = [
        (SessionNotFound, Parent(new_session_id(lineage_of(parent)), 1), make_cursor()),
        (HeadConflict, Parent(parent, 3), make_cursor()),
        (BlobsMissing, Parent(parent, 1), msgspec.structs.replace(make_cursor(), text=FOREIGN)),
    ]
    for error, of, cursor in refusals:
        with pytest.raises(error):
            store.fork(msgspec.structs.replace(child, parent=of), head, cursor)
    assert probe.keys() == before
    assert listed(store, 9) == [parent]
    assert store.forks(parent) == {}
    with pytest.raises(SessionNotFound):
        store.read(child.id)
    store.fork(child, head, make_cursor())
    with pytest.raises(SessionExists):
        store.fork(child, head, make_cursor("other"))
    assert store.read(child.id)[1].cursor == make_cursor()
    store.delete(parent)
    with pytest.raises(SessionExists):  # whatever has become of the parent: a session that is there stays listed
        store.fork(child, head, make_cursor())
    assert listed(store, 9) == [child.id]


def test_a_fork_of_a_parent_that_was_rewound_since_is_refused(any_store: Store) -> None:
    parent = make_session(any_store)
    fence = take(any_store, parent)
    write(any_store, parent, fence, 3)
    session, head, _ = any_store.read(parent)
    child = msgspec.structs.replace(session, id=new_session_id(lineage_of(parent)), parent=Parent(parent, 1))
    any_store.rewind(make_rewind(any_store, parent, fence, 1))
    write(any_store, parent, fence, 2, seeds=100)
    with pytest.raises(HeadConflict) as conflict:
        any_store.fork(child, head, make_cursor())
    assert (conflict.value.chunk, conflict.value.revision) == (3, 1)


def test_a_fork_of_a_parent_that_went_on_since_is_made(any_store: Store) -> None:
    parent = make_session(any_store)
    fence = take(any_store, parent)
    write(any_store, parent, fence, 3)
    session, head, _ = any_store.read(parent)
    child = msgspec.structs.replace(session, id=new_session_id(lineage_of(parent)), parent=Parent(parent, 2))
    write(any_store, parent, fence, 2)
    any_store.fork(child, head, make_cursor())
    assert seeds(any_store, child.id) == [0, 1, 2]


def test_the_claim_of_a_fork_holds_until_it_is_deleted(any_store: Store) -> None:
    parent = make_session(any_store)
    first, second = (new_session_id(lineage_of(parent)) for _ in range(2))
    assert any_store.claim("fork", "print 1", first) == ("print 1", first)
    make_fork(any_store, parent, -1, first, key="fork")
    assert any_store.claim("fork", "print 2", second) == ("print 1", first)
    any_store.delete(parent)
    assert any_store.claim("fork", "print 2", second) == ("print 1", first)
    any_store.delete(first)
    assert any_store.claim("fork", "print 2", second) == ("print 2", second)


def test_the_forks_of_a_session_are_told(probe: Probe) -> None:
    store, parent = probe.store, make_session(probe.store)
    write(store, parent, take(store, parent), 3)
    assert store.forks(parent) == {}
    children = {make_fork(store, parent, chunk): chunk for chunk in (-1, 1, 2, 1)}
    below = make_fork(store, list(children)[2], 2)
    make_session(store, new_session_id(lineage_of(parent)))
    assert store.forks(parent) == children
    assert store.forks(list(children)[2]) == {below: 2}
    assert store.forks(below) == {}
    gone = next(iter(children))
    store.delete(gone)
    expired = make_fork(store, parent, 0, ttl_s=60)
    assert store.forks(parent) == {name: k for name, k in children.items() if name != gone} | {expired: 0}
    probe.set_expiry(expired, -1)
    assert expired not in store.forks(parent)


def test_a_fork_is_rewound_into_what_its_parent_wrote(any_store: Store) -> None:
    parent = make_session(any_store)
    write(any_store, parent, take(any_store, parent), 5)
    child = make_fork(any_store, parent, 3)
    fence = take(any_store, child)
    write(any_store, child, fence, 2, seeds=100)
    any_store.rewind(make_rewind(any_store, child, fence, 1))
    write(any_store, child, fence, 1, seeds=200)
    assert seeds(any_store, child) == [0, 1, 202]
    assert seeds(any_store, parent) == [0, 1, 2, 3, 4]
    assert any_store.read(child)[1].path == (Span(f"{parent}:0", 0, 2),)


def test_a_rewound_parent_leaves_its_fork_alone(any_store: Store) -> None:
    parent = make_session(any_store)
    fence = take(any_store, parent)
    write(any_store, parent, fence, 5)
    child = make_fork(any_store, parent, 3)
    any_store.rewind(make_rewind(any_store, parent, fence, 0))
    write(any_store, parent, fence, 4, seeds=100)
    assert seeds(any_store, child) == [0, 1, 2, 3]
    assert seeds(any_store, parent) == [0, 101, 102, 103, 104]
