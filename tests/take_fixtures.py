"""A take made straight on a store, as the engine makes it, with every state along its path still at hand."""

import time
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from server_fixtures import path

from longtake.api_schemas.resources import PostChunks
from longtake.server.engine.command import Command
from longtake.server.engine.plan import next_frame, pending_count, plan_request, start_cursor
from longtake.server.engine.prompts import load_text, with_prompt
from longtake.server.engine.track import SessionCamera
from longtake.server.model import registry
from longtake.server.model.world import ChunkCamera, ChunkOutput, Conditions, Frames, State, WorldModel
from longtake.server.video.images import frames_digest
from longtake.state_cache import (
    ChunkRecord,
    Commit,
    Cursor,
    Fence,
    Fingerprint,
    Head,
    Holder,
    Parent,
    Rewind,
    SessionRecord,
    Store,
    lineage_of,
    load_tensors,
    new_session_id,
    save_file,
    save_tensors,
    state_digest,
)

SMALL_HEIGHT, SMALL_WIDTH = 64, 96


@pytest.fixture(scope="session")
def small_model() -> WorldModel:
    """The model of `server_fixtures` with frames of a tenth of the pixels, for takes of many chunks."""
    with pytest.MonkeyPatch.context() as smaller:
        latent_hw = SMALL_HEIGHT // 32, SMALL_WIDTH // 32
        smaller.setattr(registry, "TINY_UNTRAINED", replace(registry.TINY_UNTRAINED, latent_hw=latent_hw))
        return registry.load_model("tiny-untrained")


class OtherNumerics:
    """The same model as another machine would run it: another fingerprint and, if asked for, other last bits."""

    def __init__(self, model: WorldModel, *, other_bits: bool) -> None:
        self._model = model
        self._other_bits = other_bits
        self.numerics_fingerprint = "elsewhere"

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def generate(self, *args: object) -> ChunkOutput:
        return self._moved(self._model.generate(*args))  # type: ignore[arg-type]

    def absorb(self, *args: object, **options: object) -> ChunkOutput:
        return self._moved(self._model.absorb(*args, **options))  # type: ignore[arg-type]

    def _moved(self, made: ChunkOutput) -> ChunkOutput:
        if not self._other_bits:
            return made
        return replace(made, state=made.state | {"blocks.0.kv": made.state["blocks.0.kv"] * (1 + 2**-20)})


class Take:
    """One session; `states` holds the state after each chunk as it was computed, never restored."""

    def __init__(
        self, store: Store, model: WorldModel, session: SessionRecord, conditions: Conditions, states: dict[int, State]
    ) -> None:
        self.store = store
        self.model = model
        self.session = session
        self.states = states
        self._conditions = conditions
        self.fence: Fence = store.acquire(session.id, Holder("test"), 60).fence

    @property
    def id(self) -> str:
        return self.session.id

    @property
    def head(self) -> Head:
        return self.store.read(self.id)[1]

    def records(self) -> list[ChunkRecord]:
        return self.store.chunks(self.id, 0, self.head.chunk + 1)

    def post(
        self, frames: int, prompt: str | None = None, clip: Frames | None = None, **fields: object
    ) -> list[ChunkRecord]:
        """Go on along the path of `server_fixtures`; returns the chunks that became whole."""
        head = self.head
        if prompt is not None:
            cursor = with_prompt(self.store, self.model, self.session, head.cursor, prompt)
            head = msgspec.structs.replace(head, cursor=cursor)
        start = next_frame(head.chunk + 1, 0 if clip is not None else pending_count(head.cursor))
        request = PostChunks.model_validate({"camera": {"poses": path(frames, start)}, **fields})
        camera = SessionCamera.of(self.session, self.model.spec)
        plan = plan_request(Command(request, "", clip=clip), head, camera)
        for index, step in enumerate(plan.chunks, head.chunk + 1):
            here = ChunkCamera(step.poses, step.intrinsics, camera.intrinsics)
            made = self.make(index, step.cursor, here, step.clip)
            kind = "generate" if step.clip is None else "observe"
            self._commit(index, step.cursor, self._record(index, kind, step.cursor, here, made))
            self._attach(index, made.state)
        if not plan.chunks:
            self._commit(head.chunk + 1, plan.cursor, None)
        return self.store.chunks(self.id, head.chunk + 1, self.head.chunk + 1)

    def make(self, index: int, cursor: Cursor, camera: ChunkCamera, clip: Frames | None = None) -> ChunkOutput:
        """Chunk `index` from the state before it."""
        conditions = self._conditions.with_text(*load_text(self.store, self.session, cursor.text))
        state = self.states[index - 1]
        if clip is not None:
            made = self.model.observe(conditions, state, index, camera, clip)
        else:
            made = self.model.generate(conditions, state, index, camera, cursor.seed)
        self.states[index] = made.state
        return made

    def rewind(self, to: int, seed: int | None = None) -> None:
        """Drop what came after chunk `to`."""
        cursor = self._cursor_at(to, seed)
        step = Rewind(session_id=self.id, fence=self.fence, head=self.head, to_chunk=to, cursor=cursor)
        self.store.rewind(step)
        self.states = {index: state for index, state in self.states.items() if index <= to}

    def fork(self, at: int, seed: int | None = None) -> "Take":
        """A new session that shares the chunks up to `at`."""
        child = msgspec.structs.replace(
            self.session, id=new_session_id(lineage_of(self.id)), parent=Parent(self.id, at), create_key=None
        )
        self.store.fork(child, self.head, self._cursor_at(at, seed))
        states = {index: state for index, state in self.states.items() if index <= at}
        return Take(self.store, self.model, child, self._conditions, states)

    def _cursor_at(self, chunk: int, seed: int | None) -> Cursor:
        cursor = start_cursor(self.session) if chunk < 0 else self.store.chunk(self.id, chunk).cursor()
        return cursor if seed is None else msgspec.structs.replace(cursor, seed=seed)

    def _record(self, index: int, kind: str, cursor: Cursor, camera: ChunkCamera, made: ChunkOutput) -> ChunkRecord:
        return ChunkRecord(
            index=index,
            kind=kind,
            poses=camera.poses.astype("<f8").tobytes(),
            intrinsics=camera.intrinsics.astype("<f8").tobytes(),
            controller=cursor.controller,
            seed=cursor.seed,
            prompt=cursor.prompt,
            text=cursor.text,
            exact_until=cursor.exact_until,
            fingerprint=Fingerprint(self.model.weights_fingerprint, self.model.numerics_fingerprint),
            latents=save_tensors(self.store, self.id, {"latents": made.latents}),
            segment=save_file(self.store, self.id, f"the video of chunk {index} of {self.id}".encode()),
            init_size=4,
            frames_digest=frames_digest(made.frames),
            state_digest=state_digest(made.state),
            timings_ms={},
            warnings=[],
            created_at=time.time(),
        )

    def _commit(self, index: int, cursor: Cursor, record: ChunkRecord | None) -> None:
        step = Commit(
            session_id=self.id,
            fence=self.fence,
            revision=self.head.revision,
            expected_head=index - 1,
            cursor=cursor,
            chunk=record,
        )
        self.store.commit(step)

    def _attach(self, index: int, state: State) -> None:
        snapshot = save_tensors(self.store, self.id, state)
        self.store.attach(self.id, self.fence, self.head.revision, index, snapshot)


def begin_take(store: Store, model: WorldModel, prompt: str = "a quay", seed: int = 7) -> Take:
    """A new session at its first frame."""
    session_id, spec = new_session_id(), model.spec
    conditions = model.condition(drift(1, spec.height, spec.width)[0], prompt)
    session = SessionRecord(
        id=session_id,
        model=spec.id,
        fingerprint=Fingerprint(model.weights_fingerprint, model.numerics_fingerprint),
        prompt=prompt,
        seed=seed,
        created_at=time.time(),
        first_pose=np.eye(4).ravel().tolist(),
        intrinsics=[277.0, 277.0, spec.width / 2, spec.height / 2],
        intrinsics_size=(spec.width, spec.height),
        source_size=(spec.width, spec.height),
        conditions=save_tensors(store, session_id, conditions.to_tensors()),
        warnings=[],
    )
    store.create(session, start_cursor(session))
    return Take(store, model, session, conditions, {-1: model.initial_state(conditions)})


def resumed(take: Take, model: WorldModel, state: State, exact_until: int | None) -> Take:
    """The same session on another server, which goes on from `state`."""
    stored = load_tensors(take.store, take.id, take.session.conditions)
    other = Take(take.store, model, take.session, Conditions.from_tensors(stored), {take.head.chunk: state})
    cursor = msgspec.structs.replace(take.head.cursor, exact_until=exact_until)
    other._commit(take.head.chunk + 1, cursor, None)
    return other


def drift(frames: int, height: int = 192, width: int = 320) -> Frames:
    """A smooth picture that drifts, uint8 [T,H,W,3]."""
    t, y, x, c = np.ogrid[:frames, :height, :width, :3]
    return np.round(127 + 100 * np.sin(x / 40 + t / 9 + c) * np.cos(y / 35 - t / 14)).astype(np.uint8)


def small_drift(frames: int) -> Frames:
    return drift(frames, SMALL_HEIGHT, SMALL_WIDTH)
