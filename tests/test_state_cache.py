import contextlib
import select
import socket
import socketserver
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import torch
from redis.connection import PythonRespSerializer
from store_fixtures import Probe, RedisProbe, make_chunk, make_cursor, make_session, make_snapshot

from longtake.state_cache import (
    MAX_BLOB,
    Arena,
    BlobCorrupt,
    BlobRef,
    BlobsMissing,
    ChunkNotFound,
    Commit,
    Fence,
    Fenced,
    File,
    HeadConflict,
    KeyReused,
    MemoryStore,
    RedisStore,
    RequestDone,
    RequestRecord,
    SchemaError,
    SessionExists,
    SessionNotFound,
    Store,
    StoreFull,
    StoreUnavailable,
    StoreUnsuitable,
    TensorRef,
    lineage_of,
    load_file,
    load_tensors,
    new_session_id,
    save_file,
    save_tensors,
)
from longtake.state_cache.client import _to_bytes
from longtake.state_cache.codec import pack, unpack


def step(store: Store, session_id: str, fence: Fence, index: int, *, seed: int | None = None) -> Commit:
    """A commit of chunk `index`, whose blobs are in the store."""
    return Commit(
        session_id=session_id,
        fence=fence,
        revision=0,
        expected_head=index - 1,
        cursor=make_cursor(f"after {index}"),
        chunk=make_chunk(store, session_id, index, seed=seed),
    )


class LosesAnswers(socketserver.BaseRequestHandler):
    """Passes everything on, but closes the connection in place of a script's answer."""

    target: str

    def handle(self) -> None:
        asked = False
        with socket.socket(socket.AF_UNIX) as server:
            server.connect(self.target)
            while data := (source := select.select([self.request, server], [], [])[0][0]).recv(1 << 16):
                asked = asked or (source is self.request and b"EVALSHA" in data)
                if source is server and asked:
                    return
                (server if source is self.request else self.request).sendall(data)


@contextlib.contextmanager
def lossy_proxy(target: str) -> Iterator[str]:
    """Path of a socket that leads to the server at `target`, losing what scripts answer."""
    handler = type("Handler", (LosesAnswers,), {"target": target})
    with (
        tempfile.TemporaryDirectory(prefix="lt-") as folder,
        socketserver.ThreadingUnixStreamServer(f"{folder}/s", handler) as proxy,
    ):
        threading.Thread(target=proxy.serve_forever, args=(0.01,)).start()
        yield f"{folder}/s"
        proxy.shutdown()


def request(fingerprint: str, *, done: bool) -> RequestRecord:
    return RequestRecord(
        fingerprint=fingerprint, first_chunk=0, chunks=1, frames_used=24, done=done, revision=0, pending_poses=0
    )


def test_a_commit_is_read_back_whole(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    commit = replace(
        step(any_store, session_id, fence, 0),
        snapshot=make_snapshot(any_store, session_id, 1.0),
        key="key 1",
        request=request("print", done=False),
    )
    any_store.commit(commit)

    record, head, in_force = any_store.read(session_id)
    assert (record.prompt, head.chunk, head.revision, head.cursor) == ("a beach", 0, 0, commit.cursor)
    assert in_force == fence
    assert any_store.chunk(session_id, 0) == commit.chunk
    assert any_store.snapshots(session_id) == {0: commit.snapshot}
    assert any_store.request(session_id, "key 1") == commit.request
    assert any_store.request(session_id, "key 2") is None
    assert load_file(any_store, session_id, any_store.chunk(session_id, 0).segment) == b"segment 0"
    state = load_tensors(any_store, session_id, any_store.snapshots(session_id)[0])
    assert torch.equal(state["blocks.0.kv"], torch.full((2, 3), 1.0))


def test_a_commit_without_chunk_moves_the_cursor_only(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    any_store.commit(
        Commit(session_id=session_id, fence=fence, revision=0, expected_head=-1, cursor=make_cursor("moved"))
    )
    assert any_store.read(session_id)[1].chunk == -1
    assert any_store.read(session_id)[1].cursor == make_cursor("moved")


def test_chunks_are_listed_by_range(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    for index in range(12):
        any_store.commit(step(any_store, session_id, fence, index))
    assert [chunk.index for chunk in any_store.chunks(session_id, 0, 1 << 40)] == list(range(12))
    assert [chunk.index for chunk in any_store.chunks(session_id, 9, 11)] == [9, 10]
    assert any_store.chunks(session_id, 12, 20) == []
    with pytest.raises(ChunkNotFound):
        any_store.chunk(session_id, 12)


Spoil = Callable[[Commit], Commit]
FOREIGN = BlobRef("0" * 32, 5)
REFUSALS: dict[str, tuple[type[Exception], Spoil]] = {
    "unknown session": (SessionNotFound, lambda commit: replace(commit, session_id=new_session_id())),
    "malformed session": (SessionNotFound, lambda commit: replace(commit, session_id="ses_{x}:\r\n")),
    "old token": (Fenced, lambda commit: replace(commit, fence=Fence(commit.fence.token - 1, commit.fence.nonce))),
    "other nonce, same token": (Fenced, lambda commit: replace(commit, fence=Fence(commit.fence.token, "0" * 32))),
    "wrong head": (HeadConflict, lambda commit: replace(commit, chunk=None, expected_head=5)),
    "wrong revision": (HeadConflict, lambda commit: replace(commit, revision=1)),
    "missing blob": (BlobsMissing, lambda commit: replace(commit, snapshot=Arena((), (FOREIGN,)))),
    "key of another request": (
        KeyReused,
        lambda commit: replace(commit, key="open key", request=request("other", done=False)),
    ),
    "key of a finished request": (
        RequestDone,
        lambda commit: replace(commit, key="done key", request=request("print", done=True)),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refused_commit_changes_nothing(any_store: Store, name: str) -> None:
    error, spoil = REFUSALS[name]
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    for index, (key, done) in enumerate([("open key", False), ("done key", True)]):
        known = step(any_store, session_id, fence, index)
        any_store.commit(replace(known, key=key, request=request("print", done=done)))
    before = (any_store.read(session_id), any_store.snapshots(session_id), any_store.chunks(session_id, 0, 9))

    commit = replace(step(any_store, session_id, fence, 2), snapshot=make_snapshot(any_store, session_id, 2.0))
    with pytest.raises(error):
        any_store.commit(spoil(commit))

    assert (any_store.read(session_id), any_store.snapshots(session_id), any_store.chunks(session_id, 0, 9)) == before
    assert any_store.request(session_id, "open key") == request("print", done=False)
    any_store.commit(commit)


def test_a_conflict_says_where_the_session_stands(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    any_store.commit(step(any_store, session_id, fence, 0))
    with pytest.raises(HeadConflict) as conflict:
        any_store.commit(step(any_store, session_id, fence, 0))
    assert (conflict.value.chunk, conflict.value.revision) == (0, 0)


def test_refusals_come_in_order(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    any_store.commit(replace(step(any_store, session_id, fence, 0), key="key", request=request("print", done=True)))
    late = Commit(
        session_id=session_id, fence=Fence(0, ""), revision=3, expected_head=8, cursor=make_cursor(),
        snapshot=Arena((), (FOREIGN,)), key="key", request=request("print", done=True),
    )  # fmt: skip
    with pytest.raises(RequestDone):
        any_store.commit(late)
    with pytest.raises(Fenced):
        any_store.commit(replace(late, key="new"))
    with pytest.raises(HeadConflict):
        any_store.commit(replace(late, key="new", fence=fence))


def test_a_keyed_request_goes_on_until_done(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    any_store.commit(replace(step(any_store, session_id, fence, 0), key="key", request=request("print", done=False)))
    last = request("print", done=True)
    any_store.commit(replace(step(any_store, session_id, fence, 1), key="key", request=last))
    assert any_store.request(session_id, "key") == last


def test_the_last_opener_wins(any_store: Store) -> None:
    session_id = make_session(any_store)
    assert any_store.read(session_id)[2] is None
    first, second = any_store.open(session_id), any_store.open(session_id)
    assert (second.token, len(second.nonce)) == (first.token + 1, 32)
    with pytest.raises(Fenced):
        any_store.commit(step(any_store, session_id, first, 0))
    with pytest.raises(Fenced):
        any_store.prune_snapshots(session_id, first, 0)
    any_store.commit(step(any_store, session_id, second, 0))


def test_rival_committers_have_one_winner_a_chunk(any_store: Store) -> None:
    session_id = make_session(any_store)
    rivals, rounds = 4, 6
    barrier = threading.Barrier(rivals)

    def compete(rival: int) -> list[tuple[int, int]]:
        won = []
        for index in range(rounds):
            commit = step(any_store, session_id, any_store.open(session_id), index, seed=100 * rival + index)
            barrier.wait(10)
            try:
                any_store.commit(commit)
                won.append((index, commit.chunk.seed if commit.chunk else -1))
            except Fenced:
                pass
            barrier.wait(10)
        return won

    with ThreadPoolExecutor(rivals) as pool:
        wins = sorted(win for won in pool.map(compete, range(rivals)) for win in won)
    assert [index for index, _ in wins] == list(range(rounds))
    assert [(chunk.index, chunk.seed) for chunk in any_store.chunks(session_id, 0, rounds)] == wins


def test_rivals_with_one_fence_have_one_winner(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = any_store.open(session_id)
    commits = [step(any_store, session_id, fence, 0, seed=seed) for seed in range(8)]

    def attempt(commit: Commit) -> bool:
        try:
            any_store.commit(commit)
        except HeadConflict:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(attempt, commits)) == 1


def test_an_orphan_blob_goes_away_and_a_committed_one_stays(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    commit = step(store, session_id, store.open(session_id), 0)
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
    store.commit(step(store, session_id, store.open(session_id), 0))
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
        store.commit(replace(step(store, session_id, fence, index), snapshot=arena))

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
        any_store.commit(replace(step(any_store, session_id, fence, index), snapshot=snapshot))
    any_store.prune_snapshots(session_id, fence, 2)
    assert list(any_store.snapshots(session_id)) == [9, 10]


def test_a_snapshot_taken_again_replaces_the_first(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    fence = store.open(session_id)
    first, second = (make_snapshot(store, session_id, value) for value in (1.5, 2.5))
    store.commit(replace(step(store, session_id, fence, 0), snapshot=first))
    again = Commit(
        session_id=session_id, fence=fence, revision=0, expected_head=0, cursor=make_cursor(), snapshot=first
    )
    store.commit(again)
    assert load_tensors(store, session_id, first)
    store.commit(replace(again, snapshot=second))
    assert store.snapshots(session_id) == {0: second}
    assert first.blobs[0].name not in probe.blobs()


def test_creating_twice_or_without_blobs_is_refused(probe: Probe) -> None:
    store, session_id = probe.store, make_session(probe.store)
    store.open(session_id)
    record = store.read(session_id)[0]
    with pytest.raises(SessionExists):
        store.create(record, make_cursor("other"))
    assert store.read(session_id)[1].cursor == make_cursor()

    orphan = msgspec.structs.replace(record, id=new_session_id())
    with pytest.raises(BlobsMissing):
        store.create(orphan, make_cursor())
    with pytest.raises(SessionNotFound):
        store.read(orphan.id)
    assert store.list(9) == [session_id]


def test_a_claim_holds_until_its_session_is_deleted(any_store: Store) -> None:
    first, second = new_session_id(), new_session_id()
    assert any_store.claim("create café", "print 1", first) == ("print 1", first)
    assert any_store.claim("create café", "print 2", second) == ("print 1", first)
    make_session(any_store, first, key="create café")
    make_session(any_store, second, key="create café")
    any_store.delete(second)
    assert any_store.claim("create café", "print 2", second) == ("print 1", first)
    any_store.delete(first)
    assert any_store.claim("create café", "print 2", second) == ("print 2", second)


def test_sessions_are_listed_newest_first(any_store: Store) -> None:
    made = [make_session(any_store, created_at=1.8e9 + age) for age in (0.001, 30, 10, 20)]
    newest = [made[1], made[3], made[2], made[0]]
    assert any_store.list(10) == newest
    assert any_store.list(2) == newest[:2]
    assert any_store.list(2, newest[1]) == newest[2:]
    assert any_store.list(2, newest[3]) == []
    with pytest.raises(SessionNotFound):
        any_store.list(2, new_session_id())


def test_a_listing_passes_over_sessions_that_were_never_finished(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    made = [make_session(probe.store, created_at=age) for age in (1, 2, 3, 4)]
    for lost in made[1:3]:
        probe.raw.delete(f"{probe.prefix}:{{{lineage_of(lost)}}}:s:{lost}", probe.head(lost))
    assert probe.store.list(2) == [made[3], made[0]]
    probe.close()


def test_each_owner_sees_their_own_sessions(any_store: Store) -> None:
    made = [
        make_session(any_store, created_at=age, owner=owner) for age, owner in enumerate(["", "ada", "bob", "ada", ""])
    ]
    assert any_store.list(9) == [made[4], made[0]]
    assert any_store.list(9, owner="ada") == [made[3], made[1]]
    assert any_store.list(9, made[3], "ada") == [made[1]]
    assert any_store.list(9, owner="bob") == [made[2]]
    assert any_store.list(9, owner="eve") == []
    with pytest.raises(SessionNotFound):
        any_store.list(9, made[3], "bob")
    assert any_store.read(made[3])[0].owner == "ada"
    any_store.delete(made[3])
    assert any_store.list(9, owner="ada") == [made[1]]


def test_an_id_that_is_taken_is_listed_for_its_first_owner_only(any_store: Store) -> None:
    session_id = make_session(any_store, owner="ada")
    with pytest.raises(SessionExists):
        make_session(any_store, session_id, owner="bob")
    assert any_store.list(9, owner="bob") == []
    assert any_store.list(9, owner="ada") == [session_id]


def furnish(store: Store, session_id: str | None = None, *, owner: str = "", ttl_s: int | None = None) -> str:
    """A session with all that one can have: a claim, chunks, snapshots and requests; returns its id."""
    session_id = session_id or new_session_id()
    store.claim(session_id, "print", session_id)
    make_session(store, session_id, key=session_id, owner=owner, ttl_s=ttl_s)
    fence = store.open(session_id)
    for index in range(3):
        commit = replace(step(store, session_id, fence, index), snapshot=make_snapshot(store, session_id, float(index)))
        store.commit(replace(commit, key=f"key {index}", request=request("print", done=True)))
    return session_id


@pytest.mark.parametrize(("owner", "ttl_s"), [("", None), ("ada", 60)], ids=["plain", "owned, expires"])
def test_deleting_leaves_nothing_behind(probe: Probe, owner: str, ttl_s: int | None) -> None:
    store = probe.store
    session_id = furnish(store, owner=owner, ttl_s=ttl_s)
    assert probe.keys()
    store.delete(session_id)
    assert probe.keys() == set()
    assert store.list(9, owner=owner) == []


def test_deleting_spares_the_blobs_of_a_sibling(probe: Probe) -> None:
    store = probe.store
    parent = make_session(store)
    fork = make_session(store, new_session_id(lineage_of(parent)))
    for session_id in (parent, fork):
        store.commit(step(store, session_id, store.open(session_id), 0))
    store.delete(parent)
    assert load_file(store, fork, store.chunk(fork, 0).segment) == b"segment 0"
    store.delete(fork)
    assert probe.keys() == set()


CALLS: dict[str, Callable[[Store, str], object]] = {
    "open": lambda store, session_id: store.open(session_id),
    "read": lambda store, session_id: store.read(session_id),
    "chunk": lambda store, session_id: store.chunk(session_id, 0),
    "chunks": lambda store, session_id: store.chunks(session_id, 0, 9),
    "request": lambda store, session_id: store.request(session_id, "key"),
    "snapshots": lambda store, session_id: store.snapshots(session_id),
    "prune": lambda store, session_id: store.prune_snapshots(session_id, Fence(1, ""), 1),
    "delete": lambda store, session_id: store.delete(session_id),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    "session_id",
    ["ses_" + "a" * 39, "", "ses_" + "a" * 39 + "\n", "ses_" + "1" * 39],
    ids=["absent", "empty", "newline", "alphabet"],
)
def test_every_call_names_an_unknown_session(any_store: Store, call: str, session_id: str) -> None:
    with pytest.raises(SessionNotFound):
        CALLS[call](any_store, session_id)


def seconds_left(store: Store, session_id: str) -> float:
    expires_at = store.read(session_id)[1].expires_at
    assert expires_at is not None
    return expires_at - time.time()


def test_a_session_without_a_lifetime_never_expires(probe: Probe) -> None:
    session_id = furnish(probe.store)
    assert probe.store.read(session_id)[1].expires_at is None
    assert probe.store.sweep() == 0
    assert probe.store.list(9) == [session_id]


USES: dict[str, Callable[[Store, str, Fence], object]] = {
    "open": lambda store, session_id, _: store.open(session_id),
    "commit a chunk": lambda store, session_id, fence: store.commit(step(store, session_id, fence, 0)),
    "commit a cursor": lambda store, session_id, fence: store.commit(
        replace(step(store, session_id, fence, 0), chunk=None)
    ),
}


@pytest.mark.parametrize("use", USES)
def test_using_a_session_puts_its_expiry_off(probe: Probe, use: str) -> None:
    session_id = make_session(probe.store, ttl_s=3600)
    assert seconds_left(probe.store, session_id) == pytest.approx(3600, abs=60)
    fence = probe.store.open(session_id)
    probe.set_expiry(session_id, 60)
    USES[use](probe.store, session_id, fence)
    assert seconds_left(probe.store, session_id) == pytest.approx(3600, abs=60)


def test_reading_and_failing_do_not_put_the_expiry_off(probe: Probe) -> None:
    store, session_id = probe.store, furnish(probe.store, ttl_s=3600)
    probe.set_expiry(session_id, 60)
    before = store.read(session_id)[1].expires_at
    for call in ("read", "chunk", "chunks", "request", "snapshots"):
        CALLS[call](store, session_id)
    with pytest.raises(Fenced):
        store.commit(step(store, session_id, Fence(9, ""), 3))
    with pytest.raises(SessionExists):
        make_session(store, session_id, ttl_s=3600)
    store.list(9)
    store.sweep()
    assert store.read(session_id)[1].expires_at == before


@pytest.mark.parametrize("swept", [False, True], ids=["not swept yet", "swept"])
def test_an_expired_session_is_not_there(probe: Probe, *, swept: bool) -> None:
    store, session_id = probe.store, furnish(probe.store, ttl_s=60)
    other = make_session(store)
    commit = step(store, session_id, Fence(1, ""), 3)
    probe.set_expiry(session_id, -0.001)
    assert not swept or store.sweep() == 1
    for call in CALLS.values():
        with pytest.raises(SessionNotFound):
            call(store, session_id)
    with pytest.raises(SessionNotFound):
        store.commit(commit)
    assert store.list(9) == [other]


def test_a_lifetime_passes_by_the_clock_of_the_store(probe: Probe) -> None:
    session_id = make_session(probe.store, ttl_s=1)
    probe.set_expiry(session_id, 0.05)
    threading.Event().wait(0.06)
    with pytest.raises(SessionNotFound):
        probe.store.open(session_id)
    assert probe.store.sweep() == 1


def test_a_lifetime_in_memory_passes_by_the_given_clock() -> None:
    now = 50.0
    store = MemoryStore(lambda: now)
    session_id = make_session(store, ttl_s=10)
    now = 59.0
    fence = store.open(session_id)
    now = 68.0
    store.commit(step(store, session_id, fence, 0))
    now = 77.9
    assert (store.sweep(), store.list(9)) == (0, [session_id])
    now = 78.0
    with pytest.raises(SessionNotFound):
        store.commit(step(store, session_id, fence, 1))
    assert (store.sweep(), store.list(9)) == (1, [])


@pytest.mark.parametrize("owner", ["", "ada"])
def test_sweeping_leaves_nothing_behind(probe: Probe, owner: str) -> None:
    session_id = furnish(probe.store, owner=owner, ttl_s=60)
    probe.set_expiry(session_id, -1)
    assert probe.store.sweep() == 1
    assert probe.keys() == set()
    assert probe.store.sweep() == 0


def test_sweeping_takes_as_many_as_asked(probe: Probe) -> None:
    made = [make_session(probe.store, ttl_s=60) for _ in range(5)]
    for session_id in made[:4]:
        probe.set_expiry(session_id, -1)
    assert [probe.store.sweep(limit=3) for _ in range(3)] == [3, 1, 0]
    assert probe.store.list(9) == made[4:]


@pytest.mark.parametrize("expired", ["parent", "fork"])
def test_sweeping_spares_the_blobs_of_a_sibling(probe: Probe, expired: str) -> None:
    store = probe.store
    parent = furnish(store, ttl_s=60)
    fork = furnish(store, new_session_id(lineage_of(parent)), ttl_s=60)
    gone, kept = (parent, fork) if expired == "parent" else (fork, parent)
    probe.set_expiry(gone, -1)
    assert store.sweep() == 1
    for chunk in store.chunks(kept, 0, 3):
        assert load_file(store, kept, chunk.segment) == b"segment %d" % chunk.index
    assert all(load_tensors(store, kept, arena) for arena in store.snapshots(kept).values())
    assert load_tensors(store, kept, store.read(kept)[0].conditions)
    probe.set_expiry(kept, -1)
    assert store.sweep() == 1
    assert probe.keys() == set()


def test_sweepers_at_once_drop_each_session_once(probe: Probe) -> None:
    store, lineages = probe.store, [new_session_id() for _ in range(10)]
    made = [furnish(store, new_session_id(lineage_of(name)), ttl_s=60) for name in lineages * 2]
    for session_id in made:
        probe.set_expiry(session_id, -1)
    barrier = threading.Barrier(4)

    def sweep(_: int) -> int:
        barrier.wait(10)
        return store.sweep() + store.sweep()

    with ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(sweep, range(4))) == len(made)
    assert probe.keys() == set()


def test_a_commit_against_a_sweep_wins_or_finds_nothing(probe: Probe) -> None:
    store = probe.store
    barrier = threading.Barrier(2)

    def sweep() -> int:
        barrier.wait(10)
        return sum(store.sweep() for _ in range(20))

    with ThreadPoolExecutor(1) as pool:
        for round_ in range(20):
            session_id = make_session(store, ttl_s=60)
            commit = step(store, session_id, store.open(session_id), 0)
            sweeping = pool.submit(sweep)
            probe.set_expiry(session_id, 0.001 * (round_ % 4))
            barrier.wait(10)
            try:
                store.commit(commit)
            except SessionNotFound:
                assert sweeping.result(30) + store.sweep() == 1
                assert session_id not in " ".join(probe.keys())
            else:
                assert sweeping.result(30) == 0
                assert load_file(store, session_id, store.chunk(session_id, 0).segment) == b"segment 0"
                store.delete(session_id)


def test_a_session_used_since_it_was_noted_is_left_alone(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store, ttl_s=60)
    probe.set_due(session_id, 1)
    assert probe.store.sweep() == 0
    assert (probe.due(session_id) or 0) / 1000 == probe.store.read(session_id)[1].expires_at
    probe.close()


def test_what_decides_a_sweep_is_the_script(redis_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    probe = RedisProbe(redis_server)
    session_id = furnish(probe.store, ttl_s=60)
    probe.set_expiry(session_id, -1)
    monkeypatch.setattr(probe.store._directory, "drop_claim", lambda session: probe.set_expiry(session.id, 50))
    assert probe.store.sweep() == 0
    assert probe.store.chunk(session_id, 2).index == 2
    assert probe.store.list(9) == [session_id]
    probe.close()


def test_a_session_noted_but_never_created_is_forgotten(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store, ttl_s=60)
    probe.set_due(session_id, 1)
    probe.raw.delete(f"{probe.prefix}:{{{lineage_of(session_id)}}}:s:{session_id}", probe.head(session_id))
    assert probe.store.sweep() == 0
    assert probe.due(session_id) is None
    probe.store._directory.postpone(session_id, 5.0)  # a slower sweeper, who had seen it before
    assert probe.due(session_id) is None
    probe.close()


def test_an_expired_session_that_can_not_be_read_is_left_alone(probe: Probe) -> None:
    damaged, other = (make_session(probe.store, ttl_s=60) for _ in range(2))
    probe.set_expiry(damaged, -2)
    probe.set_expiry(other, -1)
    probe.overwrite_session(damaged, msgspec.msgpack.encode({"schema": 2}))
    assert probe.store.sweep() == 1
    names = " ".join(probe.keys())
    assert damaged in names
    assert other not in names


def test_a_session_that_can_not_be_read_does_not_hold_sweeping_up(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    damaged, other = (make_session(probe.store, ttl_s=60) for _ in range(2))
    probe.set_expiry(damaged, -2)
    probe.set_expiry(other, -1)
    probe.overwrite_session(damaged, b"")
    assert [probe.store.sweep(limit=1) for _ in range(3)] == [0, 1, 0]
    probe.close()


def test_a_claim_lapses_unless_its_session_is_created(probe: Probe) -> None:
    store, first, second = probe.store, new_session_id(), new_session_id()
    store.claim("create", "print 1", first)
    assert probe.claim_lifetime("create") == pytest.approx(24 * 3600, abs=60)
    probe.set_claim_lifetime("create", 0.001)
    threading.Event().wait(0.01)
    assert store.claim("create", "print 2", second) == ("print 2", second)
    make_session(store, first, key="create")
    assert probe.claim_lifetime("create") is not None
    make_session(store, second, key="create")
    assert probe.claim_lifetime("create") is None
    assert store.claim("create", "print 1", first) == ("print 2", second)


def test_the_claim_of_an_expired_session_is_free(probe: Probe) -> None:
    store, new = probe.store, new_session_id()
    old = furnish(store, ttl_s=60)
    assert store.claim(old, "other", new) == ("print", old)
    probe.set_expiry(old, -1)
    assert store.claim(old, "other", new) == ("other", new)
    make_session(store, new, key=old)
    assert store.sweep() == 0
    assert store.claim(old, "third", new_session_id()) == ("other", new)
    store.delete(new)
    assert probe.keys() == set()


def test_sessions_of_earlier_versions_go_on(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    store, session_id = probe.store, make_session(probe.store)
    record = msgspec.to_builtins(store.read(session_id)[0])
    probe.overwrite_session(session_id, msgspec.msgpack.encode(without(record, "owner", "ttl_s")))
    probe.raw.hdel(probe.head(session_id), "owner")
    session, head, _ = store.read(session_id)
    assert (session.owner, session.ttl_s, head.expires_at) == ("", None, None)
    store.commit(step(store, session_id, store.open(session_id), 0))
    assert (store.sweep(), store.list(9)) == (0, [session_id])
    store.delete(session_id)
    assert probe.keys() == set()
    probe.close()


def without(record: dict[str, object], *names: str) -> dict[str, object]:
    assert record.keys() >= set(names)
    return {name: value for name, value in record.items() if name not in names}


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


def test_a_full_server_refuses_writes_and_still_frees(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    store = probe.store
    session_id = make_session(store)
    fence = store.open(session_id)
    commit = replace(step(store, session_id, fence, 0), snapshot=make_snapshot(store, session_id, 1.0))
    store.commit(commit)
    expired, alive = (make_session(store, ttl_s=60) for _ in range(2))
    probe.set_expiry(expired, -1)
    probe.set_due(alive, 1)
    try:
        probe.raw.config_set("maxmemory", 1)
        assert store.sweep() == 1
        store.delete(alive)
        with pytest.raises(StoreFull):
            store.put(session_id, [b"more"])
        with pytest.raises(StoreFull):
            store.commit(Commit(session_id=session_id, fence=fence, revision=0, expected_head=0, cursor=make_cursor()))
        assert store.chunk(session_id, 0) == commit.chunk
        store.prune_snapshots(session_id, fence, 0)
        store.delete(session_id)
    finally:
        probe.raw.config_set("maxmemory", 0)
    assert probe.keys() == set()
    probe.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_server_that_evicts_is_unsuitable(redis_server: str, policy: str) -> None:
    probe = RedisProbe(redis_server)
    try:
        probe.raw.config_set("maxmemory-policy", policy)
        with pytest.raises(StoreUnsuitable, match=policy):
            probe.store.check()
    finally:
        probe.raw.config_set("maxmemory-policy", "noeviction")
    assert probe.store.check().server == "redis"
    probe.close()


@pytest.mark.parametrize(
    ("appendonly", "fsync", "durability"),
    [("yes", "always", "strict"), ("yes", "everysec", "relaxed"), ("no", "always", "none")],
)
def test_durability_is_told_as_it_is(redis_server: str, appendonly: str, fsync: str, durability: str) -> None:
    probe = RedisProbe(redis_server)
    try:
        probe.raw.config_set("appendonly", appendonly)
        probe.raw.config_set("appendfsync", fsync)
        assert probe.store.check().durability == durability
    finally:
        probe.raw.config_set("appendonly", "no")
    probe.close()


def test_a_server_that_is_not_there_is_unavailable(tmp_path: Path) -> None:
    store = RedisStore(f"unix://{tmp_path}/none", timeout=0.5)
    with pytest.raises(StoreUnavailable):
        store.read(new_session_id())
    with pytest.raises(StoreUnavailable):
        store.put(new_session_id(), [b"data"])


def test_scripts_survive_being_flushed(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store)
    probe.raw.script_flush()
    probe.store.commit(step(probe.store, session_id, probe.store.open(session_id), 0))
    assert probe.store.read(session_id)[1].chunk == 0
    probe.close()


def test_a_closed_connection_is_replaced(redis_server: str) -> None:
    probe = RedisProbe(redis_server)
    session_id = make_session(probe.store)
    probe.raw.client_kill_filter(_type="normal", skipme=True)
    assert probe.store.read(session_id)[0].id == session_id
    probe.close()


def test_a_step_whose_answer_is_lost_is_not_repeated(redis_server: str) -> None:
    direct = RedisProbe(redis_server)
    session_id = make_session(direct.store)
    assert direct.store.open(session_id).token == 1
    with lossy_proxy(redis_server.removeprefix("unix://")) as proxy:
        store = RedisStore(f"unix://{proxy}", direct.prefix)
        with pytest.raises(StoreUnavailable):
            store.open(session_id)
        store.close()
    assert direct.store.open(session_id).token == 3
    direct.close()


def test_large_values_are_sent_without_a_copy() -> None:
    data = memoryview(bytearray(10_000))
    packed = PythonRespSerializer(6000, _to_bytes).pack("SET", "key", data, "PX", 600)
    assert any(part is data for part in packed)
    assert b"".join(packed).startswith(b"*5\r\n$3\r\nSET\r\n$3\r\nkey\r\n$10000\r\n")


TENSORS = {
    "blocks.0.kv": torch.randn(2, 3, 5),
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 1).half(),
    "brain": torch.randn(5).bfloat16(),
    "count": torch.tensor(-(2**60)),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor([True, False, True]),
    "view": torch.randn(4, 6).T[1:],
    "large": torch.randint(0, 255, (MAX_BLOB + 17,), dtype=torch.uint8),
    "last": torch.randn(1).double(),
}


def test_tensors_come_back_bit_by_bit(any_store: Store) -> None:
    session_id = new_session_id()
    arena = save_tensors(any_store, session_id, TENSORS)
    found = load_tensors(any_store, session_id, arena)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor)
    assert load_tensors(any_store, session_id, save_tensors(any_store, session_id, {})) == {}


def test_loaded_tensors_share_no_memory(any_store: Store) -> None:
    session_id = new_session_id()
    arena = save_tensors(any_store, session_id, {"a": torch.zeros(3), "b": torch.zeros(3)})
    found = load_tensors(any_store, session_id, arena)
    found["a"].fill_(7)
    assert torch.equal(found["b"], torch.zeros(3))
    assert torch.equal(load_tensors(any_store, session_id, arena)["a"], torch.zeros(3))


def test_packing_takes_a_copy() -> None:
    tensor = torch.zeros(4)
    refs, blobs = pack({"a": tensor})
    tensor.fill_(1)
    assert torch.equal(unpack(Arena(refs, ()), [bytes(blob) for blob in blobs])["a"], torch.zeros(4))


def test_a_large_tensor_keeps_its_blobs_wherever_it_moves() -> None:
    store, session_id = MemoryStore(), new_session_id()
    small, frame = torch.randn(3), torch.randn(MAX_BLOB // 2)
    first = save_tensors(store, session_id, {"window.1.k": small, "window.2.k": frame})
    moved = save_tensors(store, session_id, {"window.1.k": frame, "window.2.k": small.double()})
    assert set(first.blobs[1:]) == set(moved.blobs[:-1])


@pytest.mark.parametrize("size", [0, 1, MAX_BLOB, MAX_BLOB + 1])
def test_files_of_any_size_come_back(any_store: Store, size: int) -> None:
    session_id, data = new_session_id(), (b"0123456789a" * (size // 11 + 1))[:size]
    assert load_file(any_store, session_id, save_file(any_store, session_id, data)) == data


def test_a_file_of_another_size_is_refused(any_store: Store) -> None:
    session_id = new_session_id()
    file = save_file(any_store, session_id, b"media")
    with pytest.raises(SchemaError):
        load_file(any_store, session_id, File(6, file.blobs))


def ref(dtype: str = "F32", shape: tuple[int, ...] = (2,), start: int = 0, stop: int = 8) -> TensorRef:
    return TensorRef("a", dtype, shape, start, stop)


BAD_LAYOUTS = {
    "unknown dtype": (ref("F8"),),
    "negative sides": (ref(shape=(-1, -2)),),
    "shape too large": (ref(shape=(1 << 40, 1 << 40)),),
    "range too short": (ref(stop=4),),
    "range elsewhere": (ref(start=8, stop=16),),
    "gap": (ref("U8", (2,), 0, 2), ref("U8", (4,), 4, 8)),
    "bytes left over": (ref("U8", (4,), 0, 4),),
    "same name twice": (ref("U8", (4,), 0, 4), ref("U8", (4,), 4, 8)),
    "nothing": (),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_an_arena_that_does_not_fit_its_bytes_is_refused(name: str) -> None:
    with pytest.raises(SchemaError):
        unpack(Arena(BAD_LAYOUTS[name], ()), [bytes(8)])


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="complex64"):
        pack({"a": torch.zeros(2, dtype=torch.complex64)})
