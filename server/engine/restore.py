"""Bring a session's state back: the snapshot of its last chunk, checked against the digest committed with it."""

from longtake.api_schemas.problems import ProblemError
from longtake.server.model.world import Conditions, State, WorldModel
from longtake.state_cache import Head, SessionRecord, Store, load_tensors, state_digest


def restore(store: Store, model: WorldModel, session: SessionRecord, head: Head) -> tuple[Conditions, State]:
    """Constants and state of a session as its head has them.

    Raises `model_mismatch` when other weights made the session, `state_corrupt` when no snapshot of the head is left
    (replaying the log from an older one belongs here), `state_diverged` when the bits are not those committed.
    """
    if session.fingerprint.weights != model.weights_fingerprint:
        raise ProblemError("model_mismatch", "the session was made with other weights and can only be read")
    conditions = Conditions.from_tensors(load_tensors(store, session.id, session.conditions))
    if head.chunk < 0:
        return conditions, model.initial_state(conditions)
    snapshot = store.snapshots(session.id).get(head.chunk)
    if snapshot is None:
        raise ProblemError("state_corrupt", "the snapshot of the last chunk is gone")
    state = load_tensors(store, session.id, snapshot)
    if state_digest(state) != store.chunk(session.id, head.chunk).state_digest:
        raise ProblemError("state_diverged", "the restored state is not the one that was committed")
    return conditions, state
