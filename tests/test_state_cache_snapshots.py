"""Snapshots: attached to chunks of the present branch, on every store."""

import pytest
from store_fixtures import (
    make_session,
    make_snapshot,
    take,
    write,
)

from longtake.state_cache import (
    Arena,
    BlobRef,
    BlobsMissing,
    Fence,
    Fenced,
    HeadConflict,
    Store,
)

FOREIGN = Arena((), (BlobRef("0" * 32, 5),))


def test_a_snapshot_is_attached_to_a_chunk_of_the_present_branch(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    write(any_store, session_id, fence, 3, snapshots=False)
    snapshots = {index: make_snapshot(any_store, session_id, float(index)) for index in (2, 0)}
    before = any_store.read(session_id)
    for index, snapshot in snapshots.items():
        any_store.attach(session_id, fence, 0, index, snapshot)
    assert list(any_store.snapshots(session_id)) == [0, 2]
    assert any_store.snapshots(session_id) == snapshots
    for revision, index in ((0, -1), (0, 3), (1, 2)):
        with pytest.raises(HeadConflict) as conflict:
            any_store.attach(session_id, fence, revision, index, snapshots[2])
        assert (conflict.value.chunk, conflict.value.revision) == (2, 0)
    with pytest.raises(BlobsMissing):
        any_store.attach(session_id, fence, 0, 1, FOREIGN)
    with pytest.raises(Fenced):
        any_store.attach(session_id, Fence(9, ""), 5, 1, FOREIGN)
    assert any_store.snapshots(session_id) == snapshots
    assert any_store.read(session_id) == before


def test_a_snapshot_taken_again_replaces_the_first(any_store: Store) -> None:
    session_id = make_session(any_store)
    fence = take(any_store, session_id)
    write(any_store, session_id, fence, 1)
    second = make_snapshot(any_store, session_id, 2.5)
    any_store.attach(session_id, fence, 0, 0, second)
    assert any_store.snapshots(session_id) == {0: second}
