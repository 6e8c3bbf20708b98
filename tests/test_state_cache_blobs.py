"""Blobs: named by content, kept while a record names them, on every store."""

import threading

import msgspec
import pytest
import torch
from store_fixtures import check_whole, make_rewind, make_session, make_step, take
from store_probes import Probe, RedisProbe

from longtake.state_cache import (
    MAX_BLOB,
    SCHEMA,
    BlobCorrupt,
    BlobRef,
    BlobsMissing,
    SchemaError,
    Store,
    new_session_id,
    save_both,
)
from longtake.state_cache.records import seal


def test_an_orphan_blob_goes_away_and_a_committed_one_stays(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    commit = make_step(store, session_id, take(store, session_id), 0)
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
    store.commit(make_step(store, session_id, take(store, session_id), 0))
    monkeypatch.setattr(store._blobs, "_present", lambda _: [])
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


BAD_RECORDS = {
    "newer": seal(msgspec.msgpack.encode({"schema": SCHEMA + 1})),
    "older": seal(msgspec.msgpack.encode({"schema": SCHEMA - 1})),
    "of no checksum": msgspec.msgpack.encode({"schema": SCHEMA}),
    "empty": b"",
    "short": b"\xc1",
    "garbage": seal(b"\xc1"),
    "deep": seal(b"\x91" * 100_000),
    "mistyped": seal(msgspec.msgpack.encode({"id": 7})),
}


@pytest.mark.parametrize("data", BAD_RECORDS.values(), ids=BAD_RECORDS)
def test_a_record_that_can_not_be_understood_is_refused(probe: Probe, data: bytes) -> None:
    session_id = make_session(probe.store)
    probe.overwrite_session(session_id, data)
    with pytest.raises(SchemaError):
        probe.store.read(session_id)


@pytest.mark.parametrize("size", [9, 3000, MAX_BLOB], ids=["one", "few", "many"])
def test_a_damaged_blob_is_mended_in_place(probe: Probe, size: int) -> None:
    """`size` decides how it travels: with its command, after a look at what is there, or in windows."""
    store, session_id = probe.store, make_session(probe.store)
    commit = make_step(store, session_id, take(store, session_id), 0)
    store.commit(commit)
    assert commit.chunk is not None
    (kept,) = commit.chunk.segment.blobs
    data = [b"segment 0", *(b"%d" % n + bytes(size - 2) for n in range(12 if size > 9 else 1))]
    refs = store.put(session_id, data)
    assert refs[0] == kept
    for ref in refs:
        probe.overwrite(session_id, ref, b"damaged")
        if ref != kept:
            probe.set_lifetime(session_id, ref, 5)
    assert store.put(session_id, data) == refs
    for ref in refs:
        with pytest.raises(BlobCorrupt):
            store.get(session_id, [ref])
    assert store.put(session_id, data, mend=True) == refs
    assert store.get(session_id, refs) == data
    assert probe.lifetime(session_id, kept) is None
    assert all(590 < (probe.lifetime(session_id, ref) or 0) <= 600 for ref in refs[1:])


def test_a_chunk_acknowledged_again_is_readable(probe: Probe) -> None:
    """An equal chunk after a rewind, over blobs that have been damaged."""
    store, session_id = probe.store, make_session(probe.store)
    fence = take(store, session_id)
    first = make_step(store, session_id, fence, 0)
    store.commit(first)
    assert first.chunk is not None
    for ref in (*first.chunk.latents.blobs, *first.chunk.segment.blobs):
        probe.overwrite(session_id, ref, b"damaged")
    store.rewind(make_rewind(store, session_id, fence, -1))
    latents, segment = save_both(store, session_id, {"latents": torch.zeros(3, 5)}, b"segment 0", mend=True)
    again = make_step(store, session_id, fence, 0, revision=1)
    assert again.chunk is not None
    assert (latents, segment) == (again.chunk.latents, again.chunk.segment)
    store.commit(again)
    check_whole(store, session_id)


def test_a_blob_that_goes_while_it_is_mended_does_not_come_back_for_ever(
    redis_server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe = RedisProbe(redis_server)
    session_id = new_session_id()
    (ref,) = probe.store.put(session_id, [b"orphan"])

    def present(keys: list[str]) -> list[str]:
        assert probe.raw.delete(*keys) == 1
        return keys

    monkeypatch.setattr(probe.store._blobs, "_present", present)
    assert probe.store.put(session_id, [b"orphan"], mend=True) == (ref,)
    assert probe.blobs() == set()
    probe.close()


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


def test_blobs_are_read_into_memory_that_is_given(probe: Probe) -> None:
    store, session_id = probe.store, new_session_id()
    data = [b"first", b"", bytes(range(256)) * 4096, *(b"%d" % n for n in range(20))]
    refs = store.put(session_id, data)
    buffers = [bytearray(len(blob)) for blob in data]
    store.get_into(session_id, refs, [memoryview(buffer) for buffer in buffers])
    assert buffers == data
    probe.overwrite(session_id, refs[0], b"fIrst")
    with pytest.raises(BlobCorrupt):
        store.get_into(session_id, refs[:1], [memoryview(buffers[0])])
    with pytest.raises(BlobsMissing):
        store.get_into(session_id, [BlobRef("0" * 32, 5)], [memoryview(buffers[0])])
    assert store.get(session_id, refs[1:]) == data[1:]
