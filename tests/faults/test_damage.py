"""Bytes in the store that are not those that were written: named errors or the same bits, never garbage."""

from collections.abc import Callable

import msgspec
import pytest
import redis

from faults.cluster import Answer
from faults.fixtures import MakeWorld, World
from faults.players import Take
from faults.test_commit_steps import begun
from faults.truth import Move, path
from longtake.state_cache import SCHEMA, BlobRef, RedisStore
from longtake.state_cache.records import seal, unseal

Damage = Callable[[redis.Redis, bytes], None]


def _truncate(raw: redis.Redis, key: bytes) -> None:
    raw.set(key, raw.get(key)[:-1], keepttl=True)


def _flip(raw: redis.Redis, key: bytes) -> None:
    data = bytearray(raw.get(key))
    data[len(data) // 2] ^= 1
    raw.set(key, bytes(data), keepttl=True)


def _delete(raw: redis.Redis, key: bytes) -> None:
    raw.delete(key)


def _swap(raw: redis.Redis, key: bytes) -> None:
    """A blob of another session in its place."""
    other = next(each for each in sorted(raw.keys("*:b:*")) if each != key)
    raw.set(key, raw.get(other), keepttl=True)


DAMAGE: dict[str, Damage] = {"truncated": _truncate, "flipped": _flip, "deleted": _delete, "swapped": _swap}


def long_take(world: World) -> Take:
    """A session of five chunks, with a second session beside it."""
    take = begun(world)
    world.player.advance(take, Move(poses=path(84, 37)), "application/json")
    return take


def key_of(world: World, ref: BlobRef) -> bytes:
    """Key of a blob of the only lineage that has it."""
    (key,) = world.store.raw.keys(f"*:b:{ref.name}")
    return bytes(key)


def forget_states(world: World) -> None:
    """New servers: what the old ones had in memory is gone."""
    for place in range(len(world.cluster.replicas)):
        world.cluster.restart(place)


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_snapshot(world: World, kind: str) -> None:
    """Fault 19 (truncated or flipped blob): a snapshot's blob is truncated, flipped, deleted, swapped: the
    server falls back to an older one and the log, and goes on with the same bits."""
    take = long_take(world)
    books = world.cluster.store(world.store.url)
    newest = max(books.snapshots(take.id).items())[1]
    DAMAGE[kind](world.store.raw, key_of(world, newest.blobs[0]))
    books.close()
    forget_states(world)
    world.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
    assert not world.cluster.findings.found, world.cluster.findings.found


def test_without_any_snapshot(world: World) -> None:
    """Issue: resume from the log alone, all snapshots deleted, with prompts and observed chunks: the same bits."""
    take = long_take(world)
    world.player.advance(take, Move(poses=path(24, take.truth.next_frame), prompt="rain"), "application/json")
    for _ in range(4):
        world.player.advance(take, accept="application/json")
    for key in world.store.raw.keys("*:n:*"):
        world.store.raw.delete(key)
    forget_states(world)
    world.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
    world.settle()


@pytest.mark.parametrize("kind", DAMAGE)
@pytest.mark.parametrize("part", ["latents", "segment"])
def test_a_damaged_log(world: World, part: str, kind: str) -> None:
    """Fault 19: a blob of the log itself: `state_corrupt` for whoever needs it, the other chunks as they were, no
    garbage."""
    take = long_take(world)
    books = world.cluster.store(world.store.url)
    record = books.chunk(take.id, 1)
    books.close()
    ref = (record.latents if part == "latents" else record.segment).blobs[0]
    DAMAGE[kind](world.store.raw, key_of(world, ref))
    forget_states(world)
    reads = {"latents": "frames", "segment": "video"}[part]
    replica = world.cluster.replicas[0]
    answer = world.cluster.send(replica, "GET", f"{take.path}/chunks/1/{reads}")
    assert (answer.status, answer.code) == (500, "state_corrupt"), answer.content
    assert world.cluster.send(replica, "GET", f"{take.path}/chunks/0/{reads}").status == 200
    world.player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
    assert not world.cluster.findings.found, world.cluster.findings.found


def test_a_damaged_log_without_a_snapshot(world: World) -> None:
    """Fault 19: a log that can not be replayed and no snapshot: an explicit error, the state is not made up."""
    take = long_take(world)
    books = world.cluster.store(world.store.url)
    _flip(world.store.raw, key_of(world, books.chunk(take.id, 2).latents.blobs[0]))
    books.close()
    for key in world.store.raw.keys("*:n:*"):
        world.store.raw.delete(key)
    forget_states(world)
    answer = _post(world, take)
    assert (answer.status, answer.code) == (500, "state_corrupt"), answer.content
    assert world.cluster.send(world.cluster.replicas[0], "GET", take.path).json["next_chunk"] == take.truth.next_chunk


def _post(world: World, take: Take) -> Answer:
    body = Move(poses=path(24, take.truth.next_frame)).body()
    return world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/chunks", body)


Change = Callable[[bytes], bytes]


def _signed(change: Change) -> Change:
    """Another body with the checksum that belongs to it."""
    return lambda data: seal(change(unseal(data, "the record")))


def _field(**fields: object) -> Change:
    return _signed(lambda body: msgspec.msgpack.encode({**msgspec.msgpack.decode(body), **fields}))


def _arena(**fields: object) -> Change:
    """One tensor of an arena with other fields."""

    def change(body: bytes) -> bytes:
        arena = msgspec.msgpack.decode(body)
        arena["tensors"][0] |= fields
        return msgspec.msgpack.encode(arena)

    return _signed(change)


def _crowded(body: bytes) -> bytes:
    arena = msgspec.msgpack.decode(body)
    return msgspec.msgpack.encode({**arena, "tensors": [arena["tensors"][0]] * 1_000_000})


def _one_bit(data: bytes) -> bytes:
    """In the middle, where numbers lie that any schema allows."""
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


MANIFESTS: dict[str, Change] = {
    "one bit": _one_bit,
    "not msgpack": _signed(lambda body: b"\xc1" + body),
    "cut": lambda data: data[: len(data) // 2],
    "cut and signed": _signed(lambda body: body[: len(body) // 2]),
    "nested": _signed(lambda _: b"\x91" * 100_000),
    "newer schema": _field(schema=SCHEMA + 1),
    "no schema": _field(schema="x"),
    "a million entries": _signed(_crowded),
    "negative size": _arena(start=-8),
    "overflowing shape": _arena(shape=[2**62, 2**62]),
    "negative shape": _arena(shape=[-1, 4]),
    "unknown type": _arena(dtype="F4"),
    "wrong shape": _arena(shape=[1]),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_damaged_snapshot_record(world: World, kind: str) -> None:
    """Fault 20: a snapshot's manifest is bad msgpack, of an unknown schema, of 10⁶ entries, of negative sizes or
    overflowing shapes: rejected in bounded memory and time; the log takes its place."""
    take = long_take(world)
    (key,) = world.store.raw.keys("*:n:*")
    for index, data in world.store.raw.hgetall(key).items():
        world.store.raw.hset(key, index, MANIFESTS[kind](data))
    forget_states(world)
    before = world.cluster.replicas[0].resident_bytes()
    player = world.another(only=0)
    player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
    assert world.cluster.replicas[0].resident_bytes() < before + 400e6
    assert not world.cluster.findings.found, world.cluster.findings.found


@pytest.mark.parametrize("kind", ["one bit", "not msgpack", "cut", "nested", "newer schema", "no schema"])
@pytest.mark.parametrize("where", ["session", "cursor", "chunk"])
def test_a_damaged_record(world: World, where: str, kind: str) -> None:
    """Fault 20 (record of a newer schema): refused by name wherever it is needed, never guessed at; sessions
    beside it are served."""
    take, other = long_take(world), world.player.create()
    world.player.takes.append(other)
    raw, change = world.store.raw, MANIFESTS[kind]
    if where == "session":
        (key,) = raw.keys(f"*:s:{take.id}")
        raw.set(key, change(raw.get(key)))
    elif where == "cursor":
        (key,) = raw.keys(f"*:h:{take.id}")
        raw.hset(key, "cursor", change(raw.hget(key, "cursor")))
    else:
        (key,) = raw.keys(f"*:c:{take.id}*")
        raw.hset(key, "1", change(raw.hget(key, "1")))
    forget_states(world)
    replica = world.cluster.replicas[0]
    address = f"{take.path}/chunks/1" if where == "chunk" else take.path
    answer = world.cluster.send(replica, "GET", address)
    assert (answer.status, answer.code) == (500, "state_corrupt"), answer.content
    listed = world.cluster.send(replica, "GET", "/v1/sessions")
    assert listed.status == 200, f"one damaged session hides all others: {listed.content!r}"
    assert other.id in {each["id"] for each in listed.json["data"]}
    world.player.advance(other)
    assert not world.cluster.findings.found, world.cluster.findings.found
    assert world.cluster.send(replica, "DELETE", take.path).status == 204
    assert world.cluster.send(replica, "GET", take.path).status == 404


PENDING = 13


@pytest.mark.parametrize("change", ["controller", "pending poses", "a record gone"])
def test_no_other_frames_are_committed(world: World, change: str) -> None:
    """One flipped bit in what the next chunk is made from, and a record that is gone: refused, never made up."""
    take = long_take(world)
    world.player.advance(take, Move(poses=path(PENDING, take.truth.next_frame)), "application/json")
    raw = world.store.raw
    (head,), (log,) = raw.keys(f"*:h:{take.id}"), raw.keys(f"*:c:{take.id}*")
    if change == "a record gone":
        raw.hdel(log, "1")
        for key in raw.keys("*:n:*"):
            raw.delete(key)
    else:
        cursor = bytearray(raw.hget(head, "cursor"))
        where = cursor.index(b"controller") + 30 if change == "controller" else cursor.index(b"poses") + 60
        cursor[where] ^= 1
        raw.hset(head, "cursor", bytes(cursor))
    forget_states(world)
    answer = _post(world, take)
    assert (answer.status, answer.code) == (500, "state_corrupt"), answer.content
    replica = world.cluster.replicas[0]
    if change == "a record gone":
        for part in ("video", "chunks", "chunks/1"):
            answer = world.cluster.send(replica, "GET", f"{take.path}/{part}")
            assert (answer.status, answer.code) == (500, "state_corrupt"), answer.content


def test_other_weights(world: World) -> None:
    """Fault 21 (other weights): a session of another checkpoint is readable, not advanceable: 409
    `model_mismatch`, the state untouched."""
    take = long_take(world)
    world.cluster.restart(0, TOY_WEIGHTS="others")
    replica = world.cluster.replicas[0]
    answer = _post(world, take)
    assert (answer.status, answer.code) == (409, "model_mismatch"), answer.content
    assert world.cluster.send(replica, "GET", f"{take.path}/video").status == 200
    world.another(only=0).check_session(take, world.cluster.send(replica, "GET", take.path))
    world.another(only=1).advance(take)
    world.cluster.restart(0)
    world.settle()


def test_other_numerics(make_world: MakeWorld) -> None:
    """Fault 21: other numerics with the same result of a replay: it goes on. A server that asks for exactness refuses
    nothing that is exact."""
    world = make_world()
    take = long_take(world)
    for exact in ("prefer", "require"):
        world.cluster.restart(0, TOY_NUMERICS=f"others {exact}", LONGTAKE_EXACT=exact)
        world.another(only=0).advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
    world.settle()


def test_a_session_that_diverges(world: World) -> None:
    """Fault 19: the log replays to another state than was committed, on the same numerics: `state_diverged`, never
    silent."""
    take = long_take(world)
    raw = world.store.raw
    (key,) = raw.keys(f"*:c:{take.id}*")
    last = str(take.truth.next_chunk - 1)
    raw.hset(key, last, _field(state_digest="sha256:" + "0" * 64)(raw.hget(key, last)))
    forget_states(world)
    answer = _post(world, take)
    assert (answer.status, answer.code) == (409, "state_diverged"), answer.content
    assert _divergence(world) == 1


def _divergence(world: World) -> float:
    text = world.cluster.send(world.cluster.replicas[0], "GET", "/metrics").content.decode()
    return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith("longtake_divergence_total"))


def test_fsck_sees_damage(world: World) -> None:
    """The suite's own books: each kind of damage is found by the check that follows every scenario."""
    from faults.check import fsck
    from faults.cluster import Findings

    take = long_take(world)
    books: RedisStore = world.cluster.store(world.store.url)
    clean = Findings()
    fsck(books, take.id, clean, take.truth)
    assert not clean.found
    _flip(world.store.raw, key_of(world, books.chunk(take.id, 1).latents.blobs[0]))
    found = Findings()
    fsck(books, take.id, found, take.truth)
    assert found.found
    books.close()
