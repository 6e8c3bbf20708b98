"""Blobs and snapshots: named by content, kept while a record names them, on every store."""

import threading
from dataclasses import replace

import msgspec
import pytest
from store_fixtures import Probe, RedisProbe, make_chunk, make_cursor, make_session, make_snapshot, make_step

from longtake.state_cache import (
    MAX_BLOB,
    Arena,
    BlobCorrupt,
    BlobsMissing,
    Commit,
    SchemaError,
    Store,
    load_tensors,
    new_session_id,
)


def test_an_orphan_blob_goes_away_and_a_committed_one_stays(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    commit = make_step(store, session_id, store.open(session_id), 0)
    assert commit.chunk is not None
    (ref,) = commit.chunk.segment.blobs
    assert 590 < (probe.lifetime(session_id, ref) or 0) <= 600
    store.commit(commit)
    assert probe.lifetime(session_id, ref) is None
    assert store.put(session_id, [b"segment 0"]) == (ref,)
    assert probe.lifetime(session_id, ref) is None


def test_a_blob_committed_while_it_is_put_again_stays(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = RedisProbe(redis_server)
    store, session_id = probe.store, make_session(probe.store)
    store.commit(make_step(store, session_id, store.open(session_id), 0))
    monkeypatch.setattr(store, "_present", lambda _: [])
    (ref,) = store.put(session_id, [b"segment 0"])
    assert probe.lifetime(session_id, ref) is None
    probe.close()


def test_an_orphan_put_again_lives_longer(probe: Probe) -> None:
    session_id = new_session_id()
    (ref,) = probe.store.put(session_id, [b"orphan"])
    probe.set_lifetime(session_id, ref, 5)
    probe.store.put(session_id, [b"orphan"])
    assert (probe.lifetime(session_id, ref) or 0) > 590


def test_an_expired_orphan_is_missing(probe: Probe) -> None:
    session_id = new_session_id()
    (ref,) = probe.store.put(session_id, [b"orphan"])
    probe.set_lifetime(session_id, ref, 0.001)
    threading.Event().wait(0.01)
    with pytest.raises(BlobsMissing):
        probe.store.get(session_id, [ref])


@pytest.mark.parametrize("damage", [b"", b"segmenT 0", b"segment 0 and more"], ids=["emptied", "changed", "longer"])
def test_a_corrupt_blob_is_detected(probe: Probe, damage: bytes) -> None:
    session_id = new_session_id()
    refs = probe.store.put(session_id, [b"sound", b"segment 0"])
    probe.overwrite(session_id, refs[1], damage)
    with pytest.raises(BlobCorrupt):
        probe.store.get(session_id, refs)
    assert probe.store.get(session_id, refs[:1]) == [b"sound"]


@pytest.mark.parametrize(
    "data",
    [msgspec.msgpack.encode({"schema": 2}), b"", b"\xc1", b"\x91" * 100_000, msgspec.msgpack.encode({"id": 7})],
    ids=["newer", "empty", "garbage", "deep", "mistyped"],
)
def test_a_record_that_can_not_be_understood_is_refused(probe: Probe, data: bytes) -> None:
    session_id = make_session(probe.store)
    probe.overwrite_session(session_id, data)
    with pytest.raises(SchemaError):
        probe.store.read(session_id)


def test_blobs_of_another_lineage_are_out_of_reach(any_store: Store) -> None:
    refs = any_store.put(new_session_id(), [b"secret"])
    with pytest.raises(BlobsMissing):
        any_store.get(new_session_id(), refs)


def test_blobs_are_limited_and_repeatable(any_store: Store) -> None:
    session_id = new_session_id()
    with pytest.raises(ValueError, match="at most"):
        any_store.put(session_id, [bytes(MAX_BLOB + 1)])
    data = [b"", b"twice", bytes(MAX_BLOB), b"twice", *(b"%d" % n for n in range(70))]
    assert any_store.get(session_id, any_store.put(session_id, data)) == data
    assert any_store.put(session_id, []) == ()


def test_pruning_keeps_the_newest_snapshots_and_shared_blobs(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = store.open(session_id)
    # snapshots 0 and 3 are the same bytes, and that of 1 is the same bytes as the latents of chunk 2
    chunk_two = make_chunk(store, session_id, 2)
    arenas = [make_snapshot(store, session_id, value) for value in (5.0, 6.0, 7.0, 5.0)]
    arenas[1] = Arena(chunk_two.latents.tensors, chunk_two.latents.blobs)
    for index, arena in enumerate(arenas):
        store.commit(replace(make_step(store, session_id, fence, index), snapshot=arena))

    store.prune_snapshots(session_id, fence, 1)

    assert store.snapshots(session_id) == {3: arenas[3]}
    for kept in (arenas[3], chunk_two.latents):
        assert load_tensors(store, session_id, kept)
    assert arenas[2].blobs[0].name not in probe.blobs()
    store.prune_snapshots(session_id, fence, 0)
    assert store.snapshots(session_id) == {}
    assert arenas[0].blobs[0].name not in probe.blobs()


def test_pruning_goes_by_number_not_by_spelling(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    for index in range(11):
        snapshot = make_snapshot(any_store, session_id, float(index))
        any_store.commit(replace(make_step(any_store, session_id, fence, index), snapshot=snapshot))
    any_store.prune_snapshots(session_id, fence, 2)
    assert list(any_store.snapshots(session_id)) == [9, 10]


def test_a_snapshot_taken_again_replaces_the_first(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = store.open(session_id)
    first, second = (make_snapshot(store, session_id, value) for value in (1.5, 2.5))
    store.commit(replace(make_step(store, session_id, fence, 0), snapshot=first))
    again = Commit(
        session_id=session_id, fence=fence, revision=0, expected_head=0, cursor=make_cursor(), snapshot=first
    )
    store.commit(again)
    assert load_tensors(store, session_id, first)
    store.commit(replace(again, snapshot=second))
    assert store.snapshots(session_id) == {0: second}
    assert first.blobs[0].name not in probe.blobs()
