"""Chunks once more from the log: one pass at t=0 each over their stored latents, nothing is denoised."""

from collections.abc import Iterator

import numpy as np

from longtake.api_schemas.resources import CHUNK_FRAMES, LATENT_FRAMES
from longtake.server.engine.prompts import TakeTurn, at_once, load_text
from longtake.server.engine.track import SessionCamera
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, State, WorldModel
from longtake.state_cache import Arena, ChunkRecord, SchemaError, SessionRecord, Store, load_tensors

_RECORDS_AT_ONCE = 16


class Replay:
    """Replays chunks of one session; holds the latents of one chunk and one text at a time.

    Args:
        store: where the log is.
        model: of the session's weights.
        session: the session.
        take_turn: how each pass gets at the model.
    """

    def __init__(self, store: Store, model: WorldModel, session: SessionRecord, take_turn: TakeTurn = at_once) -> None:
        self._store = store
        self._model = model
        self._session = session
        self._take_turn = take_turn
        self._intrinsics = SessionCamera.of(session, model.spec).intrinsics
        self._conditions = Conditions.from_tensors(load_tensors(store, session.id, session.conditions))
        self._text: Arena | None = None

    def initial_state(self) -> State:
        """State before chunk 0."""
        return self._model.initial_state(self._conditions)

    def conditions(self, text: Arena | None) -> Conditions:
        """The session's constants with a text in force, None for its own."""
        if text != self._text:
            self._conditions = self._conditions.with_text(*load_text(self._store, self._session, text))
            self._text = text
        return self._conditions

    def absorb(self, record: ChunkRecord, state: State, *, decode: bool) -> ChunkOutput:
        """The chunk again, from the state after the one before it; `state` stays.

        Raises `BlobsMissing`, `BlobCorrupt`, `SchemaError` when what the record names is not what was committed.
        """
        check_contents(record, self._session)
        latents = load_tensors(self._store, self._session.id, record.latents)
        camera, conditions = chunk_camera(record, self._intrinsics), self.conditions(record.text)
        return self._take_turn(
            lambda: self._model.absorb(conditions, state, record.index, camera, latents["latents"], decode=decode)
        )


def check_contents(record: ChunkRecord, session: SessionRecord) -> None:
    """Raises `SchemaError` when a record that is whole holds poses, intrinsics or latents of no chunk."""
    if (len(record.poses), len(record.intrinsics)) != (CHUNK_FRAMES * 16 * 8, CHUNK_FRAMES * 4 * 8):
        raise SchemaError(f"chunk {record.index}: its record holds other than {CHUNK_FRAMES} poses and intrinsics")
    shapes = {ref.name: ref.shape for ref in record.latents.tensors}
    if "latents" not in shapes:
        raise SchemaError(f"chunk {record.index}: its record holds no latents")
    frame = next((ref.shape for ref in session.conditions.tensors if ref.name == "first_latent"), ())
    if shapes["latents"] != (*frame[:2], LATENT_FRAMES, *frame[3:]):
        raise SchemaError(f"chunk {record.index}: its record holds latents of another shape")


def chunk_camera(record: ChunkRecord, first_intrinsics: np.ndarray) -> ChunkCamera:
    """The camera that made a chunk; `first_intrinsics` [4] are those of frame 0 in the model's frame."""
    return ChunkCamera(
        poses=np.frombuffer(record.poses, "<f8").reshape(-1, 4, 4),
        intrinsics=np.frombuffer(record.intrinsics, "<f8").reshape(-1, 4),
        first_intrinsics=first_intrinsics,
    )


def whole_records(store: Store, session_id: str, start: int, stop: int) -> Iterator[ChunkRecord]:
    """Log records start…stop-1, a few at a time. Raises `SchemaError` where one is missing or has expired."""
    for first in range(start, stop, _RECORDS_AT_ONCE):
        last = min(first + _RECORDS_AT_ONCE, stop)
        records = store.chunks(session_id, first, last)
        if [record.index for record in records if not record.expired] != list(range(first, last)):
            raise SchemaError(f"the log is not whole between chunks {first} and {last - 1}")
        yield from records
