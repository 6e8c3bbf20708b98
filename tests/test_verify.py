"""Verifying sessions: a sound one passes, and every kind of damage is found and named."""

import copy
from collections.abc import Callable, Iterator

import msgspec
import pytest
import torch
from take_fixtures import OtherNumerics, Take, begin_take, resumed, small_drift

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.restore import restore
from longtake.server.engine.verify import Report, verify
from longtake.server.model.world import WorldModel
from longtake.state_cache import (
    Arena,
    MemoryStore,
    Retention,
    Span,
    encode,
    lineage_of,
    new_session_id,
    save_tensors,
)

CHUNKS = 5


@pytest.fixture(scope="module")
def made(small_model: WorldModel) -> Take:
    """Five chunks and three poses: a fork, a rewind, a prompt, an observed chunk; all snapshots but three are gone."""
    store = MemoryStore()
    take = begin_take(store, small_model).fork(-1)
    take.post(24 * 3, prompt="night")
    take.rewind(1, seed=5)
    take.post(24, clip=small_drift(24))
    take.post(51)
    for branch in store._log.branches.values():
        branch.snapshots = {index: data for index, data in branch.snapshots.items() if index in (1, 3, 4)}
    return take


@pytest.fixture
def take(made: Take) -> Iterator[Take]:
    """The take; whatever happens to it is undone."""
    store = made.store
    assert isinstance(store, MemoryStore)
    kept = copy.deepcopy((store._sessions, store._log.branches, store._blobs.blobs, made.states))
    yield made
    store._sessions, store._log.branches, store._blobs.blobs, made.states = kept


@pytest.fixture
def store(take: Take) -> MemoryStore:
    assert isinstance(take.store, MemoryStore)
    return take.store


def checked(take: Take, model: WorldModel | None = None) -> Report:
    return verify(take.store, model or take.model, take.id)


def flip(store: MemoryStore, take: Take, arena_or_file: object) -> None:
    """Change a blob that nothing else names, if there is one."""
    names = [ref.name for ref in arena_or_file.blobs]  # type: ignore[attr-defined]
    others = [ref.name for arena in take.store.snapshots(take.id).values() for ref in arena.blobs]
    name = next((name for name in names if others.count(name) <= 1), names[0])
    blob = store._blobs.blobs[lineage_of(take.id), name]
    blob.data = bytes([blob.data[0] ^ 1]) + blob.data[1:]


def overwrite(store: MemoryStore, take: Take, at: int, **changes: object) -> None:
    """A record as a bug would have written it."""
    branch = store._log.branches[f"{take.id}:1"]
    branch.records[at] = encode(msgspec.structs.replace(take.store.chunk(take.id, at), **changes))


def change_session(store: MemoryStore, take: Take, **changes: object) -> None:
    store._sessions[take.id].record = encode(msgspec.structs.replace(take.session, **changes))


def test_a_sound_session_passes(take: Take) -> None:
    report = checked(take)
    assert (report.problems, report.notes) == ([], [])
    assert (report.chunks, report.replayed, report.compared, report.expired) == (CHUNKS, CHUNKS, CHUNKS, 0)
    assert report.snapshots == 3
    assert report.blob_bytes > 0
    assert report.summary().endswith("are sound: all is well")


def test_a_session_without_chunks_passes(store: MemoryStore, small_model: WorldModel) -> None:
    report = checked(begin_take(store, small_model))
    assert (report.problems, report.chunks, report.replayed) == ([], 0, 0)


def test_nothing_is_written(take: Take, store: MemoryStore) -> None:
    def everything() -> object:
        return store.read(take.id), dict(store._blobs.blobs), {k: v.records for k, v in store._log.branches.items()}

    before = everything()
    checked(take)
    assert everything() == before


DAMAGE: dict[str, tuple[Callable[[MemoryStore, Take], None], list[str]]] = {
    "latents": (
        lambda store, take: flip(store, take, take.store.chunk(take.id, 2).latents),
        ["chunk 2: latents: blob", "chunk 2: it can not be replayed"],
    ),
    "video": (lambda store, take: flip(store, take, take.store.chunk(take.id, 2).segment), ["chunk 2: video: blob"]),
    "text": (
        lambda store, take: flip(store, take, take.head.cursor.text),
        [
            "session: text of the present prompt",
            *[f"chunk {index}: text: blob" for index in range(CHUNKS)],
            *[f"chunk {index}: it can not be replayed" for index in (0, 2, 4)],  # from snapshots 1 and 3 it is tried
        ],
    ),
    "constants": (
        lambda store, take: flip(store, take, take.session.conditions),
        ["session: first frame and text: blob"],
    ),
    "snapshot": (
        lambda store, take: flip(store, take, take.store.snapshots(take.id)[3]),
        ["chunk 3: snapshot: blob"],
    ),
    "snapshot of another chunk": (
        lambda store, take: take.store.attach(
            take.id, take.fence, 1, 4, save_tensors(take.store, take.id, take.states[3])
        ),
        ["chunk 4: snapshot: its digest is not the one committed"],
    ),
    "state digest": (
        lambda store, take: overwrite(store, take, 2, state_digest="sha256:0"),
        ["chunk 2: replaying it gives other state than"],
    ),
    "frames digest": (
        lambda store, take: overwrite(store, take, 2, frames_digest="sha256:0"),
        ["chunk 2: replaying it gives other frames than"],
    ),
    "latents of another chunk": (
        lambda store, take: overwrite(store, take, 2, latents=take.store.chunk(take.id, 1).latents),
        ["chunk 2: replaying it gives other state and frames than"],
    ),
    "no latents": (
        lambda store, take: overwrite(store, take, 2, latents=Arena((), ())),
        ["chunk 2: its record holds no latents", "chunk 2: it can not be replayed"],
    ),
    "latents of another shape": (
        lambda store, take: overwrite(
            store, take, 2, latents=save_tensors(take.store, take.id, {"latents": torch.zeros(1, 16, 3, 2, 2)})
        ),
        ["chunk 2: its record holds latents of another shape", "chunk 2: it can not be replayed"],
    ),
    "text of another width": (
        lambda store, take: overwrite(
            store,
            take,
            2,
            text=save_tensors(take.store, take.id, {"text": torch.zeros(1, 2, 3), "text_mask": torch.ones(1, 2)}),
        ),
        ["chunk 2: the model can not take it", "chunk 2: it can not be replayed"],
    ),
    "poses of an odd length": (
        lambda store, take: overwrite(store, take, 2, poses=bytes(24 * 16 * 8 - 1)),
        ["chunk 2: its record holds other than 24 poses and intrinsics", "chunk 2: it can not be replayed"],
    ),
    "intrinsics of an odd length": (
        lambda store, take: overwrite(store, take, 2, intrinsics=bytes(5)),
        ["chunk 2: its record holds other than 24 poses and intrinsics", "chunk 2: it can not be replayed"],
    ),
    "a short first pose": (
        lambda store, take: change_session(store, take, first_pose=[1.0]),
        ["session: its first pose and intrinsics are no camera", "session: nothing can be replayed"],
    ),
    "no picture": (
        lambda store, take: change_session(store, take, source_size=(0, 0)),
        ["session: nothing can be replayed: "],
    ),
    "constants of another model": (
        lambda store, take: change_session(
            store, take, conditions=save_tensors(take.store, take.id, {"first": torch.zeros(3)})
        ),
        ["session: nothing can be replayed: ", *[f"chunk {i}: its record holds latents of an" for i in range(CHUNKS)]],
    ),
    "record gone": (
        lambda store, take: store._log.branches[f"{take.id}:1"].records.pop(2) and None,
        ["chunk 2: its record can not be read: log record 2 is missing", "chunk 3: it can not be replayed"],
    ),
    "record damaged": (
        lambda store, take: store._log.branches[f"{take.id}:1"].records.update({2: b"nothing"}),
        ["chunk 2: its record can not be read", "chunk 3: it can not be replayed"],
    ),
    "record of another chunk": (
        lambda store, take: overwrite(store, take, 4, index=3),
        ["chunk 4: its record can not be read: log record 4 is that of chunk 3"],
    ),
    "expired too early": (
        lambda store, take: overwrite(store, take, 2, expired=True),
        ["chunk 2: its record has expired, although", "chunk 3: it can not be replayed"],
    ),
}


@pytest.mark.parametrize(("damage", "expected"), DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(
    take: Take, store: MemoryStore, damage: Callable[[MemoryStore, Take], None], expected: list[str]
) -> None:
    damage(store, take)
    report = checked(take)
    for beginning in expected:
        assert any(problem.startswith(beginning) for problem in report.problems), report.problems
    assert len(report.problems) == len(expected)
    assert report.summary().endswith(f"problems: {len(report.problems)}")


def test_a_broken_head_is_named(take: Take, store: MemoryStore) -> None:
    head = take.head
    broken = msgspec.structs.replace(
        head,
        path=(Span(f"{take.id}:0", 1, 2),),
        horizon=9,
        rewinds=(),
        cursor=msgspec.structs.replace(head.cursor, intrinsics=b""),
    )
    store._sessions[take.id].head = broken
    problems = "\n".join(checked(take).problems)
    for part in ("path is broken", "horizon 9", "revision 1 does not match its 0", "do not belong together"):
        assert part in problems


def test_after_a_gap_it_goes_on_from_the_next_snapshot(take: Take, store: MemoryStore) -> None:
    flip(store, take, take.store.chunk(take.id, 2).latents)
    report = checked(take)
    assert (report.replayed, report.compared) == (3, 3)  # 0, 1 and 4


def test_behind_the_horizon_only_digests_are_left(take: Take, store: MemoryStore) -> None:
    store.collect(lineage_of(take.id), Retention(snapshots=2, chunks=2))
    assert take.head.horizon == 2
    report = checked(take)
    assert (report.problems, report.expired, report.replayed) == ([], 2, 3)
    for branch in store._log.branches.values():
        branch.snapshots.pop(1, None)
    assert checked(take).problems == ["chunk 2: it can not be replayed, nor what follows until the next sound snapshot"]


def test_chunks_behind_the_horizon_that_a_fork_needs(take: Take, store: MemoryStore) -> None:
    fork = take.fork(2)
    store.collect(lineage_of(take.id), Retention(snapshots=2, chunks=2))
    assert (take.head.horizon, fork.head.horizon) == (2, 0)
    report = checked(take)
    assert (report.problems, report.expired, report.replayed) == ([], 0, 3)  # 2, 3 and 4
    report = checked(fork)
    assert (report.problems, report.expired, report.replayed) == ([], 0, 3)  # 0, 1 and 2
    flip(store, take, take.store.chunk(take.id, 0).latents)
    (problem,) = checked(take).problems
    assert problem.startswith("chunk 0: latents: blob")


def test_it_says_how_far_it_is(take: Take) -> None:
    heard: list[tuple[int, int]] = []
    verify(take.store, take.model, take.id, lambda done, total: heard.append((done, total)))
    assert heard == [(index, CHUNKS) for index in range(CHUNKS)]


def test_other_weights_are_a_problem_but_blobs_are_checked(take: Take, small_model: WorldModel) -> None:
    other = OtherNumerics(small_model, other_bits=False)
    other.weights_fingerprint = "others"  # type: ignore[attr-defined]
    report = checked(take, other)  # type: ignore[arg-type]
    assert (len(report.problems), report.replayed, report.snapshots) == (1, 0, 3)
    assert "other weights" in report.problems[0]


class TestNumerics:
    @pytest.fixture
    def there(self, small_model: WorldModel) -> WorldModel:
        return OtherNumerics(small_model, other_bits=True)  # type: ignore[return-value]

    def test_other_bits_on_other_numerics_are_told_and_not_failed(self, take: Take, there: WorldModel) -> None:
        report = checked(take, there)
        assert report.problems == []
        assert report.notes[0].startswith("other numerics: 5 chunks")
        assert [note.partition(":")[0] for note in report.notes[1:]] == ["chunk 0", "chunk 2", "chunk 4"]
        assert (report.replayed, report.compared) == (CHUNKS, 0)

    def test_the_same_bits_on_other_numerics(self, take: Take, small_model: WorldModel) -> None:
        report = checked(take, OtherNumerics(small_model, other_bits=False))  # type: ignore[arg-type]
        assert (len(report.notes), report.compared) == (1, CHUNKS)

    def test_a_session_that_went_on_elsewhere_from_an_approximate_state(
        self, take: Take, store: MemoryStore, there: WorldModel
    ) -> None:
        for branch in store._log.branches.values():
            branch.snapshots.clear()
        session, head, _ = store.read(take.id)
        back = restore(store, there, session, head)
        elsewhere = resumed(take, there, back.state, back.exact_until)
        elsewhere.post(48)
        report = checked(elsewhere, take.model)
        assert (report.problems, report.compared) == ([], CHUNKS)
        assert report.notes[0].startswith("other numerics: 2 chunks")
        assert checked(elsewhere, there).problems == []


def test_what_is_written_meanwhile_is_left_alone(take: Take, store: MemoryStore, small_model: WorldModel) -> None:
    class Busy(OtherNumerics):
        """Something happens to the session while its third chunk is replayed."""

        def __init__(self, happens: Callable[[], object]) -> None:
            super().__init__(small_model, other_bits=False)
            self.numerics_fingerprint = small_model.numerics_fingerprint
            self._happens = [happens]

        def absorb(self, *args: object, **options: object) -> object:  # type: ignore[override]
            if args[2] == 2 and self._happens:
                self._happens.pop()()
            return super().absorb(*args, **options)

    report = checked(take, Busy(lambda: take.post(24)))  # type: ignore[arg-type]
    assert (report.problems, report.chunks) == ([], CHUNKS)
    report = checked(take, Busy(lambda: take.rewind(3)))  # type: ignore[arg-type]
    assert report.problems == ["the session was rewound while it was checked: check it again"]
    collected = Busy(lambda: store.collect(lineage_of(take.id), Retention(snapshots=1, chunks=1)))
    assert checked(take, collected).problems == []  # type: ignore[arg-type]
    assert take.head.horizon == 2


@pytest.mark.parametrize("record", [b"nothing", None])
def test_a_session_record_that_can_not_be_read(take: Take, store: MemoryStore, record: bytes | None) -> None:
    store._sessions[take.id].record = record  # type: ignore[assignment]
    (problem,) = checked(take).problems
    assert problem.startswith("session: it can not be read: SessionRecord is ")


def test_no_such_session(small_model: WorldModel) -> None:
    with pytest.raises(ProblemError) as refused:
        verify(MemoryStore(), small_model, new_session_id())
    assert refused.value.code == "session_not_found"
