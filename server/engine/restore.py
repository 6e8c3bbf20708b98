"""Bring a session's state back: from the nearest snapshot that is sound, then by replaying the log up to its head."""

import logging
from dataclasses import dataclass
from typing import Literal

from longtake.api_schemas.problems import ProblemError
from longtake.server.engine.prompts import TakeTurn, at_once
from longtake.server.engine.replay import Replay, whole_records
from longtake.server.model.world import Conditions, State, WorldModel
from longtake.state_cache import (
    Arena,
    BlobCorrupt,
    BlobsMissing,
    ChunkNotFound,
    Fingerprint,
    Head,
    SchemaError,
    SessionRecord,
    Store,
    load_tensors,
    state_digest,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Restored:
    """A session as its head has it.

    Attributes:
        conditions: its constants, with the text in force at the head.
        state: after the head's chunk.
        exact_until: what its cursor has to say from here on, see `Cursor.exact_until`.
        source: `snapshot` when nothing had to be replayed.
        replayed: chunks replayed.
        discarded: snapshots that were damaged, incomplete or not those of their chunk.
    """

    conditions: Conditions
    state: State
    exact_until: int | None
    source: Literal["snapshot", "replay"]
    replayed: int
    discarded: int


@dataclass(frozen=True)
class Start:
    """Where a replay begins: after chunk `index` (-1: before the first), with its state and `exact_until`."""

    index: int
    state: State
    exact_until: int | None


def restore(
    store: Store,
    model: WorldModel,
    session: SessionRecord,
    head: Head,
    *,
    exact_required: bool = False,
    take_turn: TakeTurn = at_once,
) -> Restored:
    """Constants and state of a session as its head has them; changes nothing.

    Args:
        store: where the session is.
        model: what it goes on with.
        session: its record.
        head: where it stands.
        exact_required: refuse a state that is not the committed one to the bit.
        take_turn: how each replayed chunk gets at the model; what it raises ends the restoring.

    Raises:
        ProblemError: `model_mismatch` when other weights made the session; `state_corrupt` when neither a snapshot nor
            the whole log is left; `state_diverged` when a replay on the numerics that made the chunks gives other bits;
            `exactness_required` when one on other numerics does and `exact_required` is set.
        BlobsMissing, BlobCorrupt, SchemaError: the log itself is damaged.
    """
    if session.fingerprint.weights != model.weights_fingerprint:
        raise ProblemError("model_mismatch", "the session was made with other weights and can only be read")
    replay = Replay(store, model, session, take_turn)
    start, discarded = _start(store, replay, session.id, head)
    if start.index == head.chunk:
        state, exact_until = start.state, start.exact_until
    else:
        state, exact_until = _replayed(store, model, replay, session.id, head, start, exact_required=exact_required)
    return Restored(
        conditions=replay.conditions(head.cursor.text),
        state=state,
        exact_until=exact_until,
        source="snapshot" if start.index == head.chunk else "replay",
        replayed=head.chunk - start.index,
        discarded=discarded,
    )


def _start(store: Store, replay: Replay, session_id: str, head: Head) -> tuple[Start, int]:
    """The nearest sound snapshot before the head, else the beginning; and how many snapshots were of no use."""
    discarded = 0
    for index, arena in sorted(_snapshots(store, session_id).items(), reverse=True):
        if not head.horizon - 1 <= index <= head.chunk:
            continue
        try:
            return _load(store, session_id, index, arena), discarded
        except (BlobsMissing, BlobCorrupt, ChunkNotFound, SchemaError) as error:
            log.warning("the snapshot after chunk %d is of no use: %s", index, error)
            discarded += 1
    if head.horizon > 0:
        raise ProblemError("state_corrupt", "no snapshot is left, and the log does not reach back to the first chunk")
    return Start(-1, replay.initial_state(), None), discarded


def _snapshots(store: Store, session_id: str) -> dict[int, Arena]:
    try:
        return store.snapshots(session_id)
    except SchemaError as error:
        log.warning("the snapshots can not be read: %s", error)
        return {}


def _load(store: Store, session_id: str, index: int, arena: Arena) -> Start:
    """The state after chunk `index` from its snapshot. Raises `SchemaError` when it is not that chunk's."""
    state = load_tensors(store, session_id, arena)
    record = store.chunk(session_id, index)
    if state_digest(state) != record.state_digest:
        raise SchemaError("its digest is not the one committed")
    return Start(index, state, record.exact_until)


def _replayed(
    store: Store,
    model: WorldModel,
    replay: Replay,
    session_id: str,
    head: Head,
    start: Start,
    *,
    exact_required: bool,
) -> tuple[State, int | None]:
    """The state after the head's chunk, computed from `start`, and `exact_until` for it."""
    here = Fingerprint(model.weights_fingerprint, model.numerics_fingerprint)
    state, same_bits = start.state, True
    for record in whole_records(store, session_id, start.index + 1, head.chunk + 1):
        # where `exact_until` changes, a server went on from a state that it could only restore approximately
        same_bits &= record.fingerprint == here and record.exact_until == start.exact_until
        decode = record.index > head.chunk - model.decoder_history
        state = replay.absorb(record, state, decode=decode).state
    if state_digest(state) == record.state_digest:
        return state, record.exact_until
    if same_bits:
        log.error("replaying chunks %d to %d gives another state than was committed", start.index + 1, head.chunk)
        raise ProblemError("state_diverged", "the restored state is not the one that was committed")
    exact_until = start.index if record.exact_until is None else min(start.index, record.exact_until)
    if exact_required:
        detail = (
            "the session was made on other numerics, where alone it goes on to the bit, and this server asks for that"
        )
        raise ProblemError("exactness_required", detail, extra={"exact_until": exact_until})
    log.warning("chunks made on other numerics were replayed: the state is exact until chunk %d", exact_until)
    return state, exact_until
