"""Garbage collection: what no session needs goes, what one needs stays, on every store."""

from dataclasses import replace

import msgspec
import pytest
from store_fixtures import (
    HOLDER,
    check_whole,
    furnish,
    make_chunk,
    make_cursor,
    make_fork,
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
    SCHEMA,
    Arena,
    BlobsMissing,
    ChunkRecord,
    Collected,
    HeadConflict,
    Parent,
    Retention,
    SchemaError,
    SessionRecord,
    Store,
    encode,
    lineage_of,
    load_tensors,
    new_session_id,
)
from longtake.state_cache.records import seal

ALL = Retention(snapshots=1 << 40)


def collect(store: Store, session_id: str, retention: Retention = ALL) -> Collected:
    return store.collect(lineage_of(session_id), retention)


def names(*records: ChunkRecord | Arena) -> set[str]:
    blobs = [
        (*each.latents.blobs, *each.segment.blobs) if isinstance(each, ChunkRecord) else each.blobs for each in records
    ]
    return {ref.name for refs in blobs for ref in refs}


def test_there_is_nothing_to_collect_of_a_plain_session(probe: Probe) -> None:
    store, session_id = probe.store, furnish(probe.store)
    before = probe.blobs()
    assert collect(store, session_id) == Collected()
    assert probe.blobs() == before
    check_whole(store, session_id)
    assert collect(store, new_session_id()) == Collected()


def test_what_was_rewound_away_goes(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    write(store, session_id, fence, 5)
    dead = names(*store.chunks(session_id, 2, 5), *[store.snapshots(session_id)[index] for index in (2, 3, 4)])
    store.rewind(make_rewind(store, session_id, fence, 1))
    write(store, session_id, fence, 2, seeds=100)
    assert dead <= probe.blobs()

    assert collect(store, session_id) == Collected(records=3, snapshots=3, blobs=len(dead))

    assert not dead & probe.blobs()
    check_whole(store, session_id)
    assert list(store.snapshots(session_id)) == [0, 1, 2, 3]
    assert collect(store, session_id) == Collected()


def test_a_fork_keeps_what_its_parent_rewound_away(probe: Probe) -> None:
    store, parent = probe.store, make_session(probe.store)
    fence = take(store, parent)
    write(store, parent, fence, 5)
    child = make_fork(store, parent, 3)
    store.rewind(make_rewind(store, parent, fence, 0))
    write(store, parent, fence, 1, seeds=100)
    # records 1…3 stay for the child, record 4 was nobody's
    assert collect(store, parent) == Collected(records=1, snapshots=1, blobs=3)
    check_whole(store, child)
    assert list(store.snapshots(child)) == [0, 1, 2, 3]
    store.delete(child)
    assert collect(store, parent) == Collected(records=3, snapshots=3, blobs=9)
    check_whole(store, parent)


def test_a_fork_outlives_its_parent(probe: Probe) -> None:
    store, parent = probe.store, make_session(probe.store)
    write(store, parent, take(store, parent), 4)
    child = make_fork(store, parent, 2)
    grandchild = make_fork(store, child, 1)
    store.delete(parent)
    assert collect(store, parent) == Collected(records=1, snapshots=1, blobs=3)
    store.delete(child)
    assert collect(store, parent) == Collected(records=1, snapshots=1, blobs=3)
    check_whole(store, grandchild)
    assert seeds(store, grandchild) == [0, 1]


def test_the_last_session_takes_its_lineage_with_it(probe: Probe) -> None:
    store, other = probe.store, make_session(probe.store)
    write(store, other, take(store, other), 2)
    collect(store, other)
    before = probe.keys()
    session_id = furnish(store)
    fork = make_fork(store, session_id, 1)
    write(store, fork, take(store, fork), 1, seeds=100)
    for each in (session_id, fork):
        store.delete(each)
    collect(store, fork)
    assert probe.keys() == before
    check_whole(store, other)


def test_the_horizon_moves_to_a_snapshot_only(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    write(any_store, session_id, fence, 10, snapshots=False)
    keep = Retention(snapshots=2, chunks=4)
    assert collect(any_store, session_id, keep) == Collected()
    assert any_store.read(session_id)[1].horizon == 0

    for index in (1, 4, 7):
        any_store.attach(session_id, fence, 0, index, make_snapshot(any_store, session_id, float(index)))
    whole = any_store.chunks(session_id, 0, 10)
    # four chunks have to stay behind the snapshot: that after 4 leaves five
    assert collect(any_store, session_id, keep) == Collected(expired=5, snapshots=1, blobs=11)
    assert any_store.read(session_id)[1].horizon == 5
    assert list(any_store.snapshots(session_id)) == [4, 7]
    found = any_store.chunks(session_id, 0, 10)
    assert [record.expired for record in found] == [True] * 5 + [False] * 5
    assert found[5:] == whole[5:]
    assert found[:5] == [record.stub() for record in whole[:5]]
    assert [record.frames_digest for record in found] == [f"sha256:frames {index}" for index in range(10)]
    check_whole(any_store, session_id)
    assert collect(any_store, session_id, keep) == Collected()


def test_the_horizon_goes_on_with_the_session(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence, keep, sizes = take(store, session_id), Retention(snapshots=2, chunks=8), []
    for _ in range(10):
        write(store, session_id, fence, 8)
        collect(store, session_id, keep)
        check_whole(store, session_id)
        sizes.append(len(probe.blobs()))
    head = store.read(session_id)[1]
    assert head.chunk - 8 - 2 <= head.horizon - 1 <= head.chunk - 8
    assert len(set(sizes[2:])) == 1
    assert list(store.snapshots(session_id)) == [71, 73, 75, 77, 78, 79]


def test_a_rewind_to_the_horizon_and_no_further(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    text = make_text(any_store, session_id, 3.0)
    write(any_store, session_id, fence, 10, text=text)
    collect(any_store, session_id, Retention(chunks=4))
    head = any_store.read(session_id)[1]
    assert head.horizon == 6
    before = any_store.read(session_id)
    with pytest.raises(HeadConflict):
        any_store.rewind(make_rewind(any_store, session_id, fence, 4))
    assert any_store.read(session_id) == before
    any_store.rewind(make_rewind(any_store, session_id, fence, 5))
    collect(any_store, session_id, Retention(chunks=4))
    assert any_store.read(session_id)[1].cursor.text == text
    assert any_store.read(session_id)[1].horizon == 6
    check_whole(any_store, session_id)
    write(any_store, session_id, fence, 5, seeds=100, text=text)
    collect(any_store, session_id, Retention(chunks=4))
    check_whole(any_store, session_id)
    assert any_store.read(session_id)[1].horizon == 7


def test_a_fork_to_the_horizon_and_no_further(any_store: Store) -> None:
    parent = make_session(any_store)
    fence = take(any_store, parent)
    text = make_text(any_store, parent, 3.0)
    write(any_store, parent, fence, 10, text=text)
    before = any_store.read(parent)[1]
    collect(any_store, parent, Retention(chunks=4))
    session = any_store.read(parent)[0]
    late = msgspec.structs.replace(session, id=new_session_id(lineage_of(parent)), parent=Parent(parent, 4))
    with pytest.raises(HeadConflict):  # by a reader who does not know yet
        any_store.fork(late, before, make_cursor())
    child = make_fork(any_store, parent, 5)
    head = any_store.read(child)[1]
    assert (head.horizon, head.cursor.text) == (6, text)
    write(any_store, parent, fence, 10, seeds=100)
    collect(any_store, parent, Retention(chunks=4))
    assert any_store.read(parent)[1].horizon == 16
    assert list(any_store.snapshots(child)) == [5]
    check_whole(any_store, child)
    check_whole(any_store, parent)


def test_a_fork_keeps_records_whole_that_its_parent_needs_no_more(any_store: Store) -> None:
    parent = make_session(any_store)
    fence = take(any_store, parent)
    write(any_store, parent, fence, 4)
    child = make_fork(any_store, parent, 3)
    write(any_store, parent, fence, 10)
    freed = collect(any_store, parent, Retention(chunks=4))
    assert (any_store.read(parent)[1].horizon, freed.expired) == (10, 6)
    assert any_store.read(child)[1].horizon == 0
    check_whole(any_store, child)
    any_store.delete(child)
    assert collect(any_store, parent, Retention(chunks=4)).expired == 4
    check_whole(any_store, parent)


def test_the_newest_snapshots_stay_by_number_not_by_spelling(any_store: Store) -> None:
    session_id = make_session(any_store)
    write(any_store, session_id, take(any_store, session_id), 11)
    assert collect(any_store, session_id, Retention(snapshots=2)) == Collected(snapshots=9, blobs=9)
    assert list(any_store.snapshots(session_id)) == [9, 10]


def test_blobs_that_are_shared_stay(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    # snapshots 0 and 3 are the same bytes, and that of 1 is the same bytes as the latents of chunk 2
    latents = make_chunk(store, session_id, 2).latents
    arenas = [latents if value == 6.0 else make_snapshot(store, session_id, value) for value in (5.0, 6.0, 7.0, 5.0)]
    write(store, session_id, fence, 4, snapshots=False)
    for index, arena in enumerate(arenas):
        store.attach(session_id, fence, 0, index, arena)

    assert collect(store, session_id, Retention(snapshots=1)) == Collected(snapshots=3, blobs=1)

    assert store.snapshots(session_id) == {3: arenas[3]}
    for kept in (arenas[3], latents):
        assert load_tensors(store, session_id, kept)
    assert not names(arenas[2]) & probe.blobs()


def test_a_snapshot_that_was_replaced_goes(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    write(store, session_id, fence, 1, snapshots=False)
    first, second = (make_snapshot(store, session_id, value) for value in (1.5, 2.5))
    for arena in (first, second, first, second):
        store.attach(session_id, fence, 0, 0, arena)
    assert collect(store, session_id) == Collected(blobs=1)
    assert store.snapshots(session_id) == {0: second}
    assert not names(first) & probe.blobs()
    assert load_tensors(store, session_id, second)


def test_embeddings_go_with_the_last_record_that_names_them(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    texts = [make_text(store, session_id, value) for value in (1.0, 2.0, 3.0, 4.0)]
    for text in texts:
        write(store, session_id, fence, 5, text=text)
    # expired records keep theirs: a rewind to the last of them goes on with it
    assert collect(store, session_id, Retention(chunks=5)).expired == 15
    assert [names(text) <= probe.blobs() for text in texts] == [True, True, True, True]
    store.rewind(make_rewind(store, session_id, fence, 14))
    collect(store, session_id, Retention(chunks=5))
    assert [names(text) <= probe.blobs() for text in texts] == [True, True, True, False]
    assert store.read(session_id)[1].cursor.text == texts[2]
    check_whole(store, session_id)


def test_an_embedding_that_only_the_cursor_names_stays(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence, text = take(store, session_id), make_text(store, session_id, 1.0)
    step = make_step(store, session_id, fence, 0)
    cursor = msgspec.structs.replace(step.cursor, text=text, prompt="a forest")
    store.commit(replace(step, cursor=cursor, chunk=None))
    assert collect(store, session_id).blobs == 0
    check_whole(store, session_id)
    store.commit(replace(step, chunk=None))
    assert collect(store, session_id).blobs == 1
    assert not names(text) & probe.blobs()


def test_blobs_on_their_way_into_a_commit_stay(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    step = make_step(store, session_id, take(store, session_id), 0)
    assert collect(store, session_id) == Collected()
    store.commit(step)
    check_whole(store, session_id)


def test_a_blob_that_went_is_put_again(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    write(any_store, session_id, fence, 2, snapshots=False)
    any_store.rewind(make_rewind(any_store, session_id, fence, 0))
    step = make_step(any_store, session_id, fence, 1, revision=1)  # all its blobs are there
    collect(any_store, session_id)
    with pytest.raises(BlobsMissing):
        any_store.commit(step)
    assert make_step(any_store, session_id, fence, 1, revision=1) == step
    any_store.commit(step)
    check_whole(any_store, session_id)


def test_a_lineage_with_a_session_that_can_not_be_read_is_left_alone(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    write(store, session_id, fence, 3)
    store.rewind(make_rewind(store, session_id, fence, 0))
    fork = make_fork(store, session_id, 0)
    record = msgspec.to_builtins(store.read(fork)[0])
    before = probe.blobs()
    probe.overwrite_session(fork, seal(msgspec.msgpack.encode(record | {"schema": SCHEMA + 1})))
    with pytest.raises(SchemaError):
        collect(store, session_id)
    assert probe.blobs() == before
    probe.overwrite_session(fork, encode(msgspec.convert(record, SessionRecord)))
    assert collect(store, session_id).records == 2
    check_whole(store, fork)


def test_lineages_to_collect_are_told(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store, ttl_s=60)
    lineage = lineage_of(session_id)
    assert store.littered() == []
    fence = take(store, session_id)
    write(store, session_id, fence, 2)
    assert store.littered() == [lineage]
    collect(store, session_id)
    assert store.littered() == []
    store.rewind(make_rewind(store, session_id, fence, 0))
    assert store.littered() == [lineage]
    collect(store, session_id)
    # who keeps a fence collects what it writes
    assert store.acquire(session_id, HOLDER, 60, fence).fence == fence
    assert store.littered() == []
    other = make_session(store)
    store.delete(other)
    probe.set_expiry(session_id, -1)
    assert store.sweep() == 1
    assert sorted(store.littered()) == sorted((lineage, lineage_of(other)))
    assert len(store.littered(limit=1)) == 1
    for each in (session_id, other):
        collect(store, each)
    assert store.littered() == []
    assert probe.keys() == set()


def test_a_damaged_snapshot_never_becomes_the_horizon(probe: Probe) -> None:
    """Behind a horizon nothing can be replayed: the snapshot in front of it has to be sound, every byte."""
    store, session_id = probe.store, make_session(probe.store)
    fence, retention = take(store, session_id), Retention(snapshots=1, chunks=4)
    write(store, session_id, fence, 3)
    damaged = store.snapshots(session_id)[2].blobs[0]
    probe.overwrite(session_id, damaged, bytes(damaged.size))
    write(store, session_id, fence, 4)
    collect(store, session_id, retention)
    assert store.read(session_id)[1].horizon == 2
    assert 1 in store.snapshots(session_id)
    write(store, session_id, fence, 3)
    collect(store, session_id, retention)
    assert store.read(session_id)[1].horizon == 6
    check_whole(store, session_id)


def test_a_snapshot_of_another_chunk_never_becomes_the_horizon(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    write(store, session_id, fence, 4, snapshots=False)
    store.attach(session_id, fence, 0, 1, make_snapshot(store, session_id, 0.0))
    collect(store, session_id, Retention(chunks=2))
    assert store.read(session_id)[1].horizon == 0
