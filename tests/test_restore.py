"""A session restored from its log: whatever snapshots are left, the state and what follows are the same bits."""

import logging

import msgspec
import numpy as np
import pytest
import torch
from take_fixtures import (
    SMALL_HEIGHT,
    SMALL_WIDTH,
    OtherNumerics,
    Take,
    begin_take,
    resumed,
    small_drift,
)

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.replay import Replay, chunk_camera
from longtake.server.engine.restore import Restored, restore
from longtake.server.model.state import StateLayoutError
from longtake.server.model.world import ChunkOutput, State, WorldModel
from longtake.server.video.images import frames_digest
from longtake.state_cache import (
    Arena,
    BlobRef,
    BlobsMissing,
    ChunkRecord,
    MemoryStore,
    Retention,
    SchemaError,
    encode,
    lineage_of,
    state_digest,
)


@pytest.fixture(scope="module")
def model(small_model: WorldModel) -> WorldModel:
    return small_model


def restored(take: Take, model: WorldModel | None = None, *, exact_required: bool = False) -> Restored:
    session, head, _ = take.store.read(take.id)
    return restore(take.store, model or take.model, session, head, exact_required=exact_required)


def drop_snapshots(store: MemoryStore, *kept: int) -> None:
    for branch in store._log.branches.values():
        branch.snapshots = {index: data for index, data in branch.snapshots.items() if index in kept}


def own_blob(take: Take, index: int) -> BlobRef:
    """A blob of a snapshot that neither another snapshot nor the log names."""
    snapshots = take.store.snapshots(take.id)
    others = {ref.name for i, arena in snapshots.items() if i != index for ref in arena.blobs}
    return next(ref for ref in snapshots[index].blobs if ref.name not in others)


def flip(store: MemoryStore, take: Take, ref: BlobRef) -> None:
    blob = store._blobs.blobs[lineage_of(take.id), ref.name]
    blob.data = bytes([blob.data[0] ^ 1]) + blob.data[1:]


def lose(store: MemoryStore, take: Take, ref: BlobRef) -> None:
    del store._blobs.blobs[lineage_of(take.id), ref.name]


def same(state: State, other: State) -> bool:
    return list(state) == list(other) and all(torch.equal(state[name], other[name]) for name in state)


def next_digests(take: Take, state: State) -> list[tuple[str, str]]:
    """Digests of the chunks that a server would go on with, made in a fork."""
    head = take.head.chunk
    on = take.fork(head)
    on.states[head] = state
    return [(record.frames_digest, record.state_digest) for record in on.post(48)]


def varied(store: MemoryStore, model: WorldModel) -> Take:
    """Prompt changes, observed chunks, uneven requests, a rewind and a fork with seeds of their own."""
    take = begin_take(store, model)
    take.post(7)
    take.post(50, prompt="a storm")
    take.post(24, clip=small_drift(24), discard_pending=True)
    take.post(31)
    take.post(20, prompt="a quay", pad=True)
    take.rewind(4, seed=11)
    take.post(60)
    take = take.fork(5, seed=13)
    take.post(9, prompt="snow")
    take.post(24, clip=small_drift(48)[24:], discard_pending=True)
    take.post(80, prompt="a harbour at night")
    return take


@pytest.fixture(scope="module")
def store() -> MemoryStore:
    return MemoryStore()


@pytest.fixture(scope="module")
def take(store: MemoryStore, model: WorldModel) -> Take:
    take = varied(store, model)
    records = take.records()
    assert len(records) == 10
    assert {record.kind for record in records} == {"generate", "observe"}
    assert {record.seed for record in records} == {7, 11, 13}
    assert len({record.prompt for record in records}) == 4
    assert model.decoder_history < len(records) - 3
    return take


@pytest.fixture(scope="module")
def uncut(take: Take) -> list[tuple[str, str]]:
    """How the take goes on from the state that was never restored."""
    return next_digests(take, take.states[9])


@pytest.fixture(autouse=True)
def undamaged(store: MemoryStore) -> object:
    """What a test damages is mended for the next one."""
    branches = {name: dict(branch.snapshots) for name, branch in store._log.branches.items()}
    blobs = {key: blob.data for key, blob in store._blobs.blobs.items()}
    yield
    for name, snapshots in branches.items():
        store._log.branches[name].snapshots = snapshots
    for key, data in blobs.items():
        store._blobs.put(key[0], [BlobRef(key[1], len(data))], [data])
        store._blobs.keep(key[0], [key[1]])
        store._blobs.blobs[key].data = data


def test_the_newest_snapshot_is_enough(take: Take) -> None:
    back = restored(take)
    assert (back.source, back.replayed, back.discarded, back.exact_until) == ("snapshot", 0, 0, None)
    assert same(back.state, take.states[9])


@pytest.mark.parametrize("kept", [-1, 0, 2, 4, 5, 8])
def test_the_log_gives_the_same_bits_from_any_snapshot_and_from_none(
    take: Take, store: MemoryStore, uncut: list[tuple[str, str]], kept: int
) -> None:
    drop_snapshots(store, kept)
    back = restored(take)
    assert (back.source, back.replayed, back.discarded, back.exact_until) == ("replay", 9 - kept, 0, None)
    assert same(back.state, take.states[9])
    assert next_digests(take, back.state) == uncut


def test_the_text_in_force_is_that_of_the_head_even_before_it_has_made_a_chunk(
    store: MemoryStore, model: WorldModel
) -> None:
    take = begin_take(store, model)
    take.post(24)
    take.post(3, prompt="fog")
    text, mask = model.encode_prompt("fog")
    back = restored(take)
    assert torch.equal(back.conditions.text, text)
    assert torch.equal(back.conditions.text_mask, mask)
    assert same(back.state, take.states[0])


def test_a_session_without_chunks(store: MemoryStore, model: WorldModel) -> None:
    back = restored(begin_take(store, model))
    assert (back.state, back.replayed, back.source, back.exact_until) == ({}, 0, "snapshot", None)


@pytest.mark.parametrize("damage", [flip, lose])
def test_a_damaged_snapshot_is_left_for_the_one_before(
    take: Take, store: MemoryStore, caplog: pytest.LogCaptureFixture, damage: object
) -> None:
    damage(store, take, own_blob(take, 9))  # type: ignore[operator]
    back = restored(take)
    assert (back.source, back.replayed, back.discarded) == ("replay", 1, 1)
    assert same(back.state, take.states[9])
    assert "the snapshot after chunk 9 is of no use" in caplog.text


def test_a_snapshot_of_another_chunk_is_found_out(take: Take, store: MemoryStore) -> None:
    take.store.attach(take.id, take.fence, take.head.revision, 9, take.store.snapshots(take.id)[8])
    back = restored(take)
    assert (back.replayed, back.discarded) == (1, 1)
    assert same(back.state, take.states[9])


def test_without_any_sound_snapshot_the_whole_log_is_replayed(take: Take, store: MemoryStore) -> None:
    for index in list(take.store.snapshots(take.id)):
        flip(store, take, own_blob(take, index))
    back = restored(take)
    assert (back.replayed, back.discarded) == (10, 10)
    assert same(back.state, take.states[9])


def test_damaged_latents_are_never_replayed(take: Take, store: MemoryStore) -> None:
    drop_snapshots(store, 4)
    lose(store, take, take.records()[6].latents.blobs[0])
    with pytest.raises(BlobsMissing):
        restored(take)


def test_what_has_expired_is_not_replayed(model: WorldModel) -> None:
    store = MemoryStore()
    take = begin_take(store, model)
    take.post(24 * 4)
    store.collect(lineage_of(take.id), Retention(snapshots=1, chunks=2))
    assert take.head.horizon == 2
    drop_snapshots(store, 1)
    assert same(restored(take).state, take.states[3])
    drop_snapshots(store)
    with pytest.raises(ProblemError) as refused:
        restored(take)
    assert refused.value.code == "state_corrupt"


def test_other_weights_are_refused(take: Take, model: WorldModel) -> None:
    other = OtherNumerics(model, other_bits=False)
    other.weights_fingerprint = "others"  # type: ignore[attr-defined]
    with pytest.raises(ProblemError) as refused:
        restored(take, other)  # type: ignore[arg-type]
    assert refused.value.code == "model_mismatch"


def test_each_pass_takes_its_turn(take: Take, store: MemoryStore) -> None:
    drop_snapshots(store, 5)
    turns: list[str] = []

    def take_turn(function: object) -> ChunkOutput:
        turns.append("")
        return function()  # type: ignore[operator, no-any-return]

    session, head, _ = take.store.read(take.id)
    restore(take.store, take.model, session, head, take_turn=take_turn)  # type: ignore[arg-type]
    assert len(turns) == 4


def overwrite(store: MemoryStore, record: ChunkRecord) -> None:
    branch = next(branch for branch in store._log.branches.values() if record.index in branch.records)
    branch.records[record.index] = encode(record)


class TestNumerics:
    """`there` computes other bits than `model`, and says so."""

    @pytest.fixture
    def store(self) -> MemoryStore:
        return MemoryStore()

    @pytest.fixture
    def there(self, model: WorldModel) -> WorldModel:
        return OtherNumerics(model, other_bits=True)  # type: ignore[return-value]

    @pytest.fixture
    def take(self, store: MemoryStore, model: WorldModel) -> Take:
        take = begin_take(store, model)
        take.post(24 * 3)
        return take

    @pytest.mark.parametrize("kept", [-1, 1])
    def test_other_bits_are_exact_until_the_snapshot(
        self, take: Take, store: MemoryStore, there: WorldModel, kept: int
    ) -> None:
        drop_snapshots(store, kept)
        back = restored(take, there)
        assert (back.exact_until, back.replayed) == (kept, 2 - kept)
        assert state_digest(back.state) != take.records()[-1].state_digest
        with pytest.raises(ProblemError) as refused:
            restored(take, there, exact_required=True)
        assert (refused.value.code, refused.value.extra) == ("exactness_required", {"exact_until": kept})

    def test_with_the_snapshot_of_the_head_it_is_exact_anywhere(self, take: Take, there: WorldModel) -> None:
        assert restored(take, there, exact_required=True).exact_until is None

    def test_the_same_bits_from_other_numerics_are_exact(
        self, take: Take, store: MemoryStore, model: WorldModel
    ) -> None:
        drop_snapshots(store)
        equal = OtherNumerics(model, other_bits=False)
        assert restored(take, equal, exact_required=True).exact_until is None  # type: ignore[arg-type]

    def test_other_bits_from_the_same_numerics_have_diverged(
        self, take: Take, store: MemoryStore, there: WorldModel, model: WorldModel
    ) -> None:
        drop_snapshots(store, 0)
        there.numerics_fingerprint = model.numerics_fingerprint  # type: ignore[misc]
        with pytest.raises(ProblemError) as refused:
            restored(take, there)
        assert refused.value.code == "state_diverged"

    def test_a_changed_log_has_diverged(self, take: Take, store: MemoryStore) -> None:
        drop_snapshots(store, 0)
        first, second, _ = take.records()
        overwrite(store, msgspec.structs.replace(second, latents=first.latents))
        with pytest.raises(ProblemError) as refused:
            restored(take)
        assert refused.value.code == "state_diverged"

    def test_what_was_lost_elsewhere_stays_lost(
        self, take: Take, store: MemoryStore, there: WorldModel, model: WorldModel
    ) -> None:
        drop_snapshots(store, 0)
        back = restored(take, there)
        elsewhere = resumed(take, there, back.state, back.exact_until)
        elsewhere.post(24 * 2)
        assert [record.exact_until for record in elsewhere.records()] == [None, None, None, 0, 0]
        assert restored(elsewhere, model).exact_until == 0
        drop_snapshots(store, 0, 3)
        assert restored(elsewhere, there).exact_until == 0
        again = restored(elsewhere, model)
        assert (again.exact_until, again.replayed) == (0, 1)

    def test_an_approximate_state_in_between_is_no_divergence(
        self, take: Take, store: MemoryStore, there: WorldModel
    ) -> None:
        snapshots = {name: dict(branch.snapshots) for name, branch in store._log.branches.items()}
        drop_snapshots(store, 0)
        back = restored(take, there)
        elsewhere = resumed(take, there, back.state, back.exact_until)
        elsewhere.post(24)
        for name, found in snapshots.items():
            store._log.branches[name].snapshots = {2: found[2]}
        assert restored(elsewhere, there).exact_until == 0


def test_a_missing_record_is_found_out(model: WorldModel) -> None:
    store = MemoryStore()
    take = begin_take(store, model)
    take.post(72)
    drop_snapshots(store)
    del next(iter(store._log.branches.values())).records[1]
    with pytest.raises(SchemaError, match="log record 1 is missing"):
        restored(take)


def test_an_arena_without_latents_is_found_out(model: WorldModel) -> None:
    store = MemoryStore()
    take = begin_take(store, model)
    take.post(24)
    drop_snapshots(store)
    overwrite(store, msgspec.structs.replace(take.records()[0], latents=Arena((), ())))
    with pytest.raises(SchemaError, match="no latents"):
        restored(take)


def test_nothing_is_written(take: Take, store: MemoryStore, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    before = store.read(take.id), dict(store._blobs.blobs), take.store.snapshots(take.id)
    restored(take)
    assert (store.read(take.id), dict(store._blobs.blobs), take.store.snapshots(take.id)) == before
    assert caplog.text == ""


@pytest.fixture(scope="module")
def straight(model: WorldModel) -> Take:
    take = begin_take(MemoryStore(), model)
    take.post(24 * TestAbsorbingWithoutDecoding.CHUNKS)
    return take


class TestAbsorbingWithoutDecoding:
    CHUNKS = 8

    def absorbed(self, take: Take, decoded: int) -> ChunkOutput:
        """All chunks, of which only the last `decoded` are decoded."""
        replay, state = Replay(take.store, take.model, take.session), take.states[-1]
        for record in take.records():
            output = replay.absorb(record, state, decode=record.index >= self.CHUNKS - decoded)
            state = output.state
        return output

    def test_as_many_chunks_as_the_decoder_sees_make_the_state_whole(self, straight: Take) -> None:
        whole = straight.states[self.CHUNKS - 1]
        enough = self.absorbed(straight, straight.model.decoder_history)
        assert same(enough.state, whole)
        assert frames_digest(enough.frames) != straight.records()[-1].frames_digest
        more = self.absorbed(straight, straight.model.decoder_history + 1)
        assert frames_digest(more.frames) == straight.records()[-1].frames_digest
        less = self.absorbed(straight, straight.model.decoder_history - 1)
        assert list(less.state) == list(whole)
        wrong = {name for name in whole if not torch.equal(less.state[name], whole[name])}
        assert wrong
        assert all(name.startswith("decoder.") or name == "last_frame" for name in wrong)

    def test_nothing_decoded_leaves_no_trace_of_the_decoder(self, straight: Take) -> None:
        blind = self.absorbed(straight, 0)
        assert blind.frames.shape == (0, SMALL_HEIGHT, SMALL_WIDTH, 3)
        whole = straight.states[self.CHUNKS - 1]
        assert same(blind.state, {name: x for name, x in whole.items() if name.startswith("blocks.")})
        assert {name for name in whole if not name.startswith(("blocks.", "decoder."))} == {"last_frame"}

    def test_such_a_state_only_absorbs(self, straight: Take) -> None:
        blind, last = self.absorbed(straight, 0).state, straight.records()[-1]
        camera = chunk_camera(last, np.array(straight.session.intrinsics))
        conditions = straight.model.condition(small_drift(1)[0], "a quay")
        with pytest.raises(StateLayoutError, match="only absorb"):
            straight.model.generate(conditions, blind, self.CHUNKS, camera, 7)
        with pytest.raises(StateLayoutError, match="only absorb"):
            straight.model.observe(conditions, blind, self.CHUNKS, camera, small_drift(24))
