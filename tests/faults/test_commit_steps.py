"""A server that dies at a step of a commit: whoever retries gets what an uncut server would have given."""

from collections.abc import Callable

import httpx
import pytest

from faults.cluster import Answer, until
from faults.fixtures import MakeWorld, World, in_thread
from faults.players import IMAGE, Take
from faults.truth import Move, Truth, path
from longtake.state_cache import RedisStore

STEPS = (
    ("lease.acquired", 1),
    ("toy.compute", 1),
    ("toy.compute", 3),
    ("put.middle", 1),
    ("put.middle", 3),
    ("commit.before", 1),
    ("commit.before", 2),
    ("commit.before", 3),
    ("commit.after", 1),
    ("commit.after", 2),
    ("commit.after", 3),
    ("snapshot.before", 1),
    ("snapshot.uploaded", 1),
    ("snapshot.attached", 1),
    ("reply.before", 1),
)
"""Each with the time that a request for three chunks comes by there."""

BIG_STATE = str(3 * 2**19)


def three_chunks(take: Take, turn: float = 0.013) -> Move:
    """Poses of two chunks and a half after half a chunk that waits."""
    return Move(poses=path(60, take.truth.next_frame, turn), pad=False)


def begun(world: World) -> Take:
    """A session with one chunk and half a chunk pending."""
    take = world.player.create()
    world.player.takes.append(take)
    world.player.advance(take, Move(poses=path(36)), "application/json")
    return take


def hurt(world: World, place: int, failpoints: str, call: Callable[[], object], **environment: str) -> None:
    """Let a replica with failpoints serve a call that it does not survive."""
    replica = world.cluster.restart(place, failpoints, **environment)
    with pytest.raises(httpx.TransportError):
        call()
    assert replica.wait() == 137


@pytest.mark.parametrize("elsewhere", [False, True], ids=["restarted", "other replica"])
@pytest.mark.parametrize(("step", "hit"), STEPS)
def test_power_cut_at_a_step_of_a_commit(make_world: MakeWorld, step: str, hit: int, elsewhere: bool) -> None:
    """Faults 1, 2, 3 (before blobs, between blobs and commit, after commit before the reply): kill -9 there,
    retry with the same key on the same or another replica: the same chunk, nothing lost, nothing twice."""
    world = make_world(TOY_STATE_BYTES=BIG_STATE)
    take = begun(world)
    move, key = three_chunks(take), "a-key"
    replica = world.cluster.restart(0, f"{step}=exit@{hit}")
    first = sent_to(world, take, move, key)
    assert first is None or step.startswith("snapshot"), f"the replica did not die at {step}: {first.content!r}"
    assert replica.wait() == 137
    if not elsewhere:
        world.cluster.restart(0)
    retry = world.another(only=int(elsewhere))
    before, take.truth = take.truth, take.truth.moved(move)
    answer = retry.post(take, move, key, "application/json", None)
    assert answer.status == 201, answer.content
    assert first is None or answer.content == first.content
    world.player.check_advanced(take, answer, before)
    again = retry.post(take, move, key, "application/json", None)
    assert (again.content, again.replayed) == (answer.content, True)
    if elsewhere:
        world.cluster.restart(0)
    world.player.advance(take)
    world.settle()


def sent_to(world: World, take: Take, move: Move, key: str) -> Answer | None:
    """What the first replica answers, if it lives so long."""
    try:
        return world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/chunks", move.body(), key=key)
    except httpx.TransportError:
        return None


def claims_last(world: World) -> bool:
    """Whether the keys of all sessions live as long as they do."""
    raw = world.store.raw
    return {raw.ttl(key) for key in raw.keys(f"{world.cluster.prefix}:claim:*")} == {-1}


@pytest.mark.parametrize("step", ["create.before", "claim.keep", "create.after"])
def test_power_cut_while_a_session_begins(world: World, step: str) -> None:
    """Fault 3 for creation: one session, however often it is asked for under one key."""
    body = {"image": IMAGE, "seed": 3, "prompt": "a beach"}
    hurt(
        world,
        0,
        f"{step}=exit",
        lambda: world.cluster.send(world.cluster.replicas[0], "POST", "/v1/sessions", body, key="begin"),
    )
    world.cluster.restart(0)
    answers = [world.player.caller.call("POST", "/v1/sessions", body, key="begin") for _ in range(3)]
    assert len({answer.content for answer in answers}) == 1, answers
    assert claims_last(world)
    listed = world.player.caller.call("GET", "/v1/sessions").json["data"]
    assert [each["id"] for each in listed] == [answers[0].json["id"]]
    world.player.takes.append(Take(answers[0].json["id"], Truth.begun("a beach", 3), 0.01))
    world.player.advance(world.player.takes[0])
    world.settle()


@pytest.mark.parametrize("step", ["fork.before", "claim.keep", "fork.after", "commit.before", "commit.after"])
def test_power_cut_while_a_session_is_forked(world: World, step: str) -> None:
    """Fault 3 for forks: one fork, and the parent is left as it was."""
    take = begun(world)
    world.player.advance(take, Move(poses=path(48, take.truth.next_frame)), "application/json")
    body = {"from_chunk": 1, "seed": 5}
    hurt(
        world,
        0,
        f"{step}=exit",
        lambda: world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/fork", body, key="fork"),
    )
    world.cluster.restart(0)
    answers = [world.player.caller.call("POST", f"{take.path}/fork", body, key="fork") for _ in range(3)]
    assert [answer.status for answer in answers] == [201] * 3, answers
    assert len({answer.content for answer in answers}) == 1
    assert claims_last(world)
    child = Take(answers[0].json["id"], take.truth.forked(1, 5), 0.02)
    world.player.takes.append(child)
    parent = world.player.caller.call("GET", take.path).json
    assert parent["forks"] == [{"id": child.id, "from_chunk": 1}]
    world.player.advance(child)
    world.player.advance(take)
    world.settle()


@pytest.mark.parametrize("step", ["rewind.before", "rewind.after"])
def test_power_cut_while_a_session_is_rewound(world: World, step: str) -> None:
    """Fault 3 for rewinds: one rewind, one revision more."""
    take = begun(world)
    world.player.advance(take, Move(poses=path(48, take.truth.next_frame)), "application/json")
    body = {"to_chunk": 0, "seed": 5}
    hurt(
        world,
        0,
        f"{step}=exit",
        lambda: world.cluster.send(world.cluster.replicas[0], "POST", f"{take.path}/rewind", body, key="back"),
    )
    world.cluster.restart(0)
    answers = [world.player.caller.call("POST", f"{take.path}/rewind", body, key="back") for _ in range(3)]
    assert [answer.status for answer in answers] == [200] * 3, answers
    assert len({answer.content for answer in answers}) == 1
    take.truth = take.truth.rewound(0, 5)
    world.player.check_session(take, answers[0])
    world.player.advance(take)
    world.settle()


@pytest.mark.parametrize("step", ["collect.marked", "collect.swept"])
def test_power_cut_while_garbage_is_collected(world: World, step: str) -> None:
    """Fault 36: a collection that ends anywhere takes nothing that is needed, and the next one goes on."""
    take = begun(world)
    replica = world.cluster.restart(0, f"{step}=exit")
    driver = world.another(only=0)
    try:
        for _ in range(20):
            world.cluster.send(
                replica, "POST", f"{take.path}/chunks", Move(poses=path(24, take.truth.next_frame)).body(), key="one"
            )
            driver.caller.call("GET", take.path, patience=1)
            _make_litter(world, take)
    except (httpx.TransportError, TimeoutError):
        pass
    world.cluster.findings.found.clear()
    assert replica.wait() == 137
    world.cluster.restart(0)
    take.truth = take.truth.moved(Move(poses=path(24, take.truth.next_frame)))
    answer = world.player.post(take, Move(poses=path(24, 37)), "one", "application/json", None)
    assert answer.status == 201, answer.content
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.player.advance(take)
    world.settle()


def _make_litter(world: World, take: Take) -> None:
    """Forks with chunks of their own, gone again, through the replica that collects."""
    replica = world.cluster.replicas[0]
    child = world.cluster.send(replica, "POST", f"{take.path}/fork", {"from_chunk": 0}).json["id"]
    world.cluster.send(replica, "POST", f"/v1/sessions/{child}/chunks", Move(poses=path(48)).body())
    world.cluster.send(replica, "DELETE", f"/v1/sessions/{child}")


def test_what_a_cut_upload_leaves_goes_by_itself(make_world: MakeWorld) -> None:
    """Fault 2: kill -9 of the replica mid-upload, after k of n blobs: the head is unchanged, orphans go after a
    time."""
    world = make_world(TOY_STATE_BYTES=str(12 * 2**20))
    take = begun(world)
    books = world.cluster.store(world.store.url)
    replica = world.cluster.restart(0, "put.middle=exit@3")
    for n in range(3):  # a snapshot is uploaded beside the chunks that follow
        move = Move(poses=path(24, take.truth.next_frame))
        if sent_to(world, take, move, f"upload-{n}") is None:
            break
        take.truth = take.truth.moved(move)
    assert replica.wait() == 137
    if books.read(take.id)[1].chunk >= take.truth.next_chunk:  # its commit was under way beside the upload
        take.truth = take.truth.moved(move)
    needed = blobs_of(books, take.id)
    orphans = [key for key in world.store.raw.keys("*:b:*") if key.decode().rpartition(":")[2] not in needed]
    assert orphans
    assert all(0 < world.store.raw.ttl(key) <= 600 for key in orphans)
    books.close()
    world.cluster.restart(0)
    world.player.advance(take)
    world.settle()


def blobs_of(store: RedisStore, session_id: str) -> set[str]:
    """Names of all blobs that a session needs."""
    session, head, _ = store.read(session_id)
    found = {ref.name for arena in store.snapshots(session_id).values() for ref in arena.blobs}
    found |= {ref.name for ref in session.conditions.blobs}
    for record in store.chunks(session_id, 0, head.chunk + 1):
        found |= {ref.name for ref in (*record.latents.blobs, *record.segment.blobs)}
    return found


@pytest.mark.parametrize("where", ["commit.before", "put.middle", "toy.compute"])
def test_sigterm_during_a_commit(make_world: MakeWorld, where: str) -> None:
    """Fault 37 (drain): SIGTERM during commit or upload: the commit under way is finished, the lease given
    up, the next replica takes over within a second."""
    world = make_world(TOY_STATE_BYTES=BIG_STATE, LONGTAKE_LEASE_S="30")
    take = begun(world)
    move, key = three_chunks(take), "drained"
    replica = world.cluster.restart(0, f"{where}=sleep:0.4")
    running = in_thread(lambda: world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key=key))
    with pytest.raises(TimeoutError):
        replica.wait(0.2)
    assert replica.stop() == 0
    cut = running.result(10)
    assert cut.status in (201, 503), cut.content
    before, take.truth = take.truth, take.truth.moved(move)
    retry = world.another(only=1)
    answer = retry.caller.call("POST", f"{take.path}/chunks", move.body(), key=key, patience=3)
    assert answer.attempts == 1, "the lease was not given up"
    world.player.check_advanced(take, answer, before)
    world.cluster.restart(0)
    world.settle()


def test_sigterm_with_a_request_that_outlasts_the_grace(make_world: MakeWorld) -> None:
    """Fault 37: a step of the model that takes longer than the server may take to stop: the client hears
    `shutting_down`, not a bare 500, and its retry goes on elsewhere."""
    world = make_world(LONGTAKE_GRACE_S="1")
    take = begun(world)
    replica = world.cluster.restart(0, TOY_DELAY_S="2.5")
    move = Move(poses=path(60, 37))
    running = in_thread(
        lambda: world.cluster.send(replica, "POST", f"{take.path}/chunks", move.body(), key="outlasted")
    )
    until(lambda: world.store.raw.hget(next(iter(world.store.raw.keys(f"*:h:{take.id}"))), "lease") not in (None, b"0"))
    assert replica.stop() == 0
    answer = running.result(10)
    assert (answer.status, answer.code) == (503, "shutting_down"), answer.content
    before, take.truth = take.truth, take.truth.moved(move)
    world.player.check_advanced(
        take, world.another(only=1).post(take, move, "outlasted", "application/json", None), before
    )
    world.cluster.restart(0)
    world.settle()
