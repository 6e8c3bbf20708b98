"""Two servers, one session: which of them may write, and what the other one hears."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from faults.cluster import Answer
from faults.fixtures import MakeWorld, World, in_thread
from faults.test_commit_steps import begun
from faults.truth import Move, path

OWN = ("session_fenced", "session_busy", "chunk_conflict")


@pytest.mark.parametrize("step", ["commit.before", "toy.compute", "put.middle", "reply.before"])
def test_a_replica_frozen_past_its_lease(world: World, step: str) -> None:
    """Fault 7 (a lease expiring during a chunk): SIGSTOP of a replica past its lease, then SIGCONT: its
    commit is fenced, the client gets 409, nothing changes."""
    take = begun(world)
    zombie = world.cluster.restart(0, f"{step}=stop")
    first = Move(poses=path(24, 37, 0.002))
    stale = in_thread(lambda: world.cluster.send(zombie, "POST", f"{take.path}/chunks", first.body(), key="stale"))
    zombie.wait_frozen()
    here = world.another(only=1)
    mine = Move(poses=path(36, 37, 0.003))
    if step == "reply.before":  # it was committed
        take.truth = take.truth.moved(first)
        mine = Move(poses=path(36, 61, 0.003))
    here.advance(take, mine, "application/json")
    stands = world.cluster.send(world.cluster.replicas[1], "GET", take.path).json
    zombie.thaw()
    answer = stale.result(10)
    assert (answer.status == 201) if step == "reply.before" else (answer.code in OWN), answer.content
    assert world.cluster.send(zombie, "GET", take.path).json == stands
    world.player.advance(take)
    world.settle()


def test_a_zombie_can_not_attach_its_snapshot(world: World) -> None:
    """Fault 7 for snapshots: what a zombie uploads after a rewind by somebody else is not taken for the new chunk's
    state."""
    take = begun(world)
    zombie = world.cluster.restart(0, "snapshot.uploaded=stop")
    move = Move(poses=path(24, 37))
    running = in_thread(lambda: world.cluster.send(zombie, "POST", f"{take.path}/chunks", move.body(), key="a"))
    zombie.wait_frozen()
    take.truth = take.truth.moved(move)
    here = world.another(only=1)
    here.rewind(take, 0, 99)
    here.advance(take, Move(poses=path(24, 25, 0.004)), "application/json")
    zombie.thaw()
    assert running.result(10).status == 201, "its chunk was committed before the rewind"
    assert zombie.stop() == 0
    world.cluster.restart(0)
    world.another(only=0).advance(take, Move(poses=path(24, 49, 0.004)), "application/json")
    world.settle()


def test_a_chunk_that_takes_longer_than_a_lease(make_world: MakeWorld) -> None:
    """A lease expiring during a chunk: the lease is renewed while its holder works, so nobody else gets
    in."""
    world = make_world(TOY_DELAY_S="2.5", LONGTAKE_REPLICA_ADDRESS="http://here")
    take = world.player.create()
    world.player.takes.append(take)
    replica = world.cluster.replicas[0]
    slow = in_thread(
        lambda: world.cluster.send(replica, "POST", f"{take.path}/chunks", Move(poses=path(24)).body(), key="slow")
    )
    seen: list[Answer] = []
    while not slow.done():
        other = world.cluster.replicas[1]
        seen.append(world.cluster.send(other, "POST", f"{take.path}/chunks", {"prompt": "rain"}, key="other"))
        if seen[-1].status == 201:
            break
        time.sleep(0.1)
    assert slow.result(10).status == 201
    busy = [answer for answer in seen if answer.code == "session_busy"]
    assert len(busy) > 5, [answer.code for answer in seen]
    assert int(busy[-1].headers["retry-after"]) >= 1
    assert busy[-1].json["owner_address"] == "http://here"
    take.truth = take.truth.moved(Move(poses=path(24)))
    if seen[-1].status == 201:
        take.truth = take.truth.moved(Move(prompt="rain"))
    world.settle()


def test_two_replicas_and_one_key_at_once(world: World) -> None:
    """Fault 8: the same key on two replicas at once: one executes, the other replays or refuses (I4, I5)."""
    take = begun(world)
    for round_ in range(5):
        move, key = Move(poses=path(24, take.truth.next_frame, 0.001 + 0.001 * round_)), f"both-{round_}"
        clients = [world.another(only=place) for place in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            answers = list(pool.map(lambda c: c.post(take, move, key, "application/json", None), clients))  # noqa: B023
        assert [answer.status for answer in answers] == [201, 201]
        assert answers[0].content == answers[1].content
        before, take.truth = take.truth, take.truth.moved(move)
        world.player.check_advanced(take, answers[0], before)
    world.settle()


def test_two_clients_and_one_position(world: World) -> None:
    """Fault 9 (two replicas racing for a session): different keys, same `expected_chunk`: one 201, one
    409."""
    take = begun(world)
    world.player.advance(take, Move(pad=True), "application/json")
    for _ in range(5):
        moves = [Move(poses=path(24, take.truth.next_frame, turn)) for turn in (0.005, 0.006)]
        clients = [world.another(only=place) for place in (0, 1)]
        expected = take.truth.next_chunk
        with ThreadPoolExecutor(2) as pool:
            jobs = [
                pool.submit(client.post, take, move, client.caller.key(), "application/json", expected)
                for client, move in zip(clients, moves, strict=True)
            ]
        answers = [job.result() for job in jobs]
        assert sorted(answer.status for answer in answers) == [201, 409], [answer.content for answer in answers]
        won = next(n for n, answer in enumerate(answers) if answer.status == 201)
        assert answers[1 - won].code == "chunk_conflict"
        assert answers[1 - won].json["next_chunk"] == expected + 1
        before, take.truth = take.truth, take.truth.moved(moves[won])
        world.player.check_advanced(take, answers[won], before)
    world.settle()


def test_a_hundred_duplicates(make_world: MakeWorld) -> None:
    """Fault 10 (duplicate POST): ×100 in parallel under one key: one step of the model, one answer."""
    world = make_world(TOY_DELAY_S="0.05", LONGTAKE_QUEUE_SIZE="64")
    take = begun(world)
    move = Move(poses=path(24, 37))
    clients = [world.another() for _ in range(100)]
    made = chunks_made(world)
    with ThreadPoolExecutor(100) as pool:
        answers = list(pool.map(lambda c: c.post(take, move, "again", "application/json", None), clients))
    assert {answer.status for answer in answers} == {201}
    assert len({answer.content for answer in answers}) == 1
    assert chunks_made(world) == made + 1
    before, take.truth = take.truth, take.truth.moved(move)
    world.player.check_advanced(take, answers[0], before)
    world.settle()


def chunks_made(world: World) -> int:
    """Chunks that the models of all replicas have made."""
    total = 0
    for replica in world.cluster.replicas:
        for line in world.cluster.send(replica, "GET", "/metrics").content.decode().splitlines():
            if line.startswith("longtake_chunks_total"):
                total += int(float(line.split()[-1]))
    return total


def test_one_key_for_two_requests(world: World) -> None:
    """Fault 11: same key, different poses: 422, the state untouched, on either replica."""
    take = begun(world)
    move = Move(poses=path(24, 37))
    before, take.truth = take.truth, take.truth.moved(move)
    answer = world.player.post(take, move, "mine", "application/json", None)
    world.player.check_advanced(take, answer, before)
    for place in (0, 1):
        other = Move(poses=path(24, 37, 0.02))
        refused = world.another(only=place).post(take, other, "mine", "application/json", None)
        assert (refused.status, refused.code) == (422, "idempotency_key_reused")
    world.player.check_session(take, world.player.caller.call("GET", take.path))
    world.settle()


@pytest.mark.parametrize("hours", [-1, 1])
def test_a_replica_whose_clock_is_wrong(make_world: MakeWorld, hours: int) -> None:
    """Fault 22 (clock skew): ±1 h on a replica: leases by the store's clock stay safe, nothing expires
    early."""
    world = make_world()
    world.cluster.restart(0, TOY_CLOCK_SKEW_S=str(3600 * hours))
    take = begun(world)
    wrong, right = world.another(only=0), world.another(only=1)
    for player in (wrong, right, wrong):
        player.advance(take, Move(poses=path(24, take.truth.next_frame)), "application/json")
    zombie = world.cluster.restart(0, "commit.before=stop", TOY_CLOCK_SKEW_S=str(3600 * hours))
    move = Move(poses=path(24, take.truth.next_frame))
    stale = in_thread(lambda: world.cluster.send(zombie, "POST", f"{take.path}/chunks", move.body(), key="x"))
    zombie.wait_frozen()
    refused = world.cluster.send(world.cluster.replicas[1], "POST", f"{take.path}/chunks", {"prompt": "rain"}, key="y")
    assert refused.code == "session_busy"
    right.advance(take, Move(poses=path(24, take.truth.next_frame, 0.02)), "application/json")
    zombie.thaw()
    assert stale.result(10).code in OWN
    world.settle()


def test_clients_that_hop(world: World) -> None:
    """Two servers on one store with a client that asks another one each time: the same take, bit for bit."""
    take = begun(world)
    players = [world.another(only=place) for place in (0, 1)]
    for n in range(30):
        players[n % 2].advance(take, accept="application/json")
    assert world.cluster.findings.counts.get("session_busy", 0) == 0, "a lease was kept after its request"
    world.settle()
