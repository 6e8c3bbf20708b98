"""Check a session against itself, without a server: every blob, every record, every snapshot, and the whole replay.

Nothing is written and no lease is taken. What is added meanwhile is left alone; the part up to the head that was read
first is checked.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from longtake.server.engine.errors import store_problems
from longtake.server.engine.plan import pending_count
from longtake.server.engine.replay import Replay, check_contents
from longtake.server.engine.start import open_store
from longtake.server.model.registry import UnloadableError, load_model, require_loadable
from longtake.server.model.state import StateLayoutError
from longtake.server.model.weights import WeightsError
from longtake.server.model.world import ChunkOutput, State, WorldModel
from longtake.server.settings import Settings, StartError
from longtake.server.video.images import frames_digest
from longtake.state_cache import (
    Arena,
    BlobCorrupt,
    BlobRef,
    BlobsMissing,
    ChunkNotFound,
    ChunkRecord,
    DataDirectoryBusy,
    Head,
    SchemaError,
    SessionRecord,
    Store,
    StoreError,
    load_tensors,
    state_digest,
)
from longtake.state_cache.branches import spans

SESSION = -2
"""Where a finding belongs that is of no chunk."""

Progress = Callable[[int, int], object]
"""Hears how many chunks have been checked, and of how many."""

_DAMAGE = (BlobCorrupt, BlobsMissing, ChunkNotFound, SchemaError)
_IMPOSSIBLE = (ArithmeticError, AssertionError, LookupError, RuntimeError, StateLayoutError, TypeError, ValueError)
"""What comes of contents that are as they were written, and could never be right."""


@dataclass
class Report:
    """What was found.

    Attributes:
        problems: what is wrong, one line each.
        notes: what could not be compared, and why; no fault of the session.
        chunks: chunks of the session.
        expired: those of them of which only digests are left.
        replayed: chunks replayed.
        compared: those of them whose digests were the committed ones.
        snapshots: sound snapshots.
        blobs: sound blobs.
        blob_bytes: their bytes.
    """

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    chunks: int = 0
    expired: int = 0
    replayed: int = 0
    compared: int = 0
    snapshots: int = 0
    blobs: int = 0
    blob_bytes: int = 0

    def summary(self) -> str:
        """One line."""
        done = f"{self.chunks} chunks, {self.replayed} replayed, {self.compared} with the digests committed"
        if self.expired:
            done += f", {self.expired} expired"
        done += f"; {self.snapshots} snapshots and {self.blobs} blobs ({self.blob_bytes / 1e6:.1f} MB) are sound"
        wrong = len(self.problems)
        return f"{done}: {f'problems: {wrong}' if wrong else 'all is well'}"


@contextmanager
def opened_for_verifying(settings: Settings, session_id: str, model: str | None) -> Iterator[tuple[Store, WorldModel]]:
    """The store of the settings, and the model that made the session unless another one is named.

    Raises `StartError` when either can not be had, `ProblemError` when there is no such session.
    """
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    with ExitStack() as stack:
        try:
            require_loadable(model or settings.model, settings.device)  # before the store makes a folder
            store = open_store(settings, stack)
            with store_problems():
                name = model or _made_by(store, session_id) or settings.model
            yield store, load_model(name, settings.device)
        except DataDirectoryBusy as error:
            way_out = "stop it first, or give the --state-url of a store that several may use"
            raise StartError(f"{error}: {way_out}") from error
        except (StoreError, UnloadableError, WeightsError) as error:
            raise StartError(str(error)) from error


def _made_by(store: Store, session_id: str) -> str | None:
    """The model of a session, if that can be read."""
    try:
        return store.read(session_id)[0].model
    except SchemaError:
        return None


def verify(store: Store, model: WorldModel, session_id: str, progress: Progress = lambda *_: None) -> Report:
    """Check everything that a session holds, up to its present head.

    Raises `ProblemError` when there is no such session or the store fails.
    """
    with store_problems():
        try:
            session, head, _ = store.read(session_id)
        except SchemaError as error:
            return Report(problems=[f"session: it can not be read: {error}"])
        check = _Check(store, model, session, head)
        check.run(progress)
        return check.report(store.read(session_id)[1])


class _Check:
    """One pass over a session, chunk by chunk; holds one state and one snapshot at a time."""

    def __init__(self, store: Store, model: WorldModel, session: SessionRecord, head: Head) -> None:
        self._store = store
        self._model = model
        self._session = session
        self._head = head
        self._found: list[tuple[int, str]] = []
        self._blobs: dict[str, int] = {}
        self._report = Report(chunks=head.chunk + 1)
        self._replay: Replay | None = None
        self._state: State | None = None  # None where the replay can not go on
        self._stopped = False  # that has been reported
        self._exact = True  # so far the state is the committed one
        self._exact_until: int | None = None
        self._elsewhere = 0

    def run(self, progress: Progress) -> None:
        """Check it all."""
        self._check_head()
        self._open()
        snapshots = self._snapshots()
        for index in range(self._head.chunk + 1):
            progress(index, self._head.chunk + 1)
            record = self._record(index)
            if record is not None and not record.expired:
                self._check_chunk(record)
            else:
                self._state = None
            if index in snapshots:
                self._check_snapshot(index, snapshots[index], record)

    def report(self, now: Head) -> Report:
        """What was found, without what has expired meanwhile; `now` is where the session stands now."""
        report = self._report
        report.blobs, report.blob_bytes = len(self._blobs), sum(self._blobs.values())
        if now.revision != self._head.revision:
            report.problems = ["the session was rewound while it was checked: check it again"]
            return report
        gone = range(-1, now.horizon) if now.horizon > self._head.horizon else ()
        report.problems = [text for index, text in self._found if index not in gone]
        if self._elsewhere:
            report.notes.insert(
                0,
                f"other numerics: {self._elsewhere} chunks were made on other hardware, libraries or threads than this"
                " machine's; where their digests differ here, that is no fault of the session",
            )
        return report

    def _problem(self, index: int, text: str) -> None:
        where = "session" if index == SESSION else f"chunk {index}"
        self._found.append((index, f"{where}: {text}"))

    def _check_head(self) -> None:
        head, end = self._head, 0
        for span in spans(self._session.id, head):
            if span.start != end or span.stop < span.start:
                self._problem(SESSION, f"its path is broken where chunks {span.start} to {span.stop - 1} should follow")
            end = span.stop
        if not 0 <= head.horizon <= head.chunk + 1:
            self._problem(SESSION, f"the retention horizon {head.horizon} lies outside the log")
        if len(head.rewinds) != head.revision:
            self._problem(SESSION, f"revision {head.revision} does not match its {len(head.rewinds)} rewinds")
        if (len(self._session.first_pose), len(self._session.intrinsics)) != (16, 4):
            self._problem(SESSION, "its first pose and intrinsics are no camera")
        pending = pending_count(head.cursor)
        if (len(head.cursor.poses), len(head.cursor.intrinsics)) != (pending * 16 * 8, pending * 4 * 8):
            self._problem(SESSION, "its pending poses and intrinsics do not belong together")
        self._fetch(SESSION, "first frame and text", self._session.conditions.blobs)
        if head.cursor.text is not None:
            self._fetch(SESSION, "text of the present prompt", head.cursor.text.blobs)

    def _open(self) -> None:
        """Get ready to replay, if that is possible."""
        if self._session.fingerprint.weights != self._model.weights_fingerprint:
            self._problem(SESSION, "it was made with other weights than this model's: nothing is replayed")
            return
        try:
            replay = Replay(self._store, self._model, self._session)
            self._state = replay.initial_state() if self._head.horizon == 0 else None
            self._replay = replay
        except (BlobCorrupt, BlobsMissing):
            return  # reported with the blobs
        except (SchemaError, *_IMPOSSIBLE) as error:
            self._problem(SESSION, f"nothing can be replayed: {error}")

    def _snapshots(self) -> dict[int, Arena]:
        try:
            return self._store.snapshots(self._session.id)
        except SchemaError as error:
            self._problem(SESSION, f"its snapshots can not be read: {error}")
            return {}

    def _record(self, index: int) -> ChunkRecord | None:
        try:
            record = self._store.chunk(self._session.id, index)
        except (ChunkNotFound, SchemaError) as error:
            self._problem(index, f"its record can not be read: {error}")
            return None
        if record.index != index:
            self._problem(index, f"its record is that of chunk {record.index}")
            return None
        if record.expired:
            self._report.expired += 1
            if index >= self._head.horizon:
                self._problem(index, "its record has expired, although the log should be whole from here")
        return record

    def _check_chunk(self, record: ChunkRecord) -> None:
        self._fetch(record.index, "latents", record.latents.blobs)
        self._fetch(record.index, "video", record.segment.blobs)
        if record.text is not None:
            self._fetch(record.index, "text", record.text.blobs)
        try:
            check_contents(record, self._session)
        except SchemaError as error:
            self._found.append((record.index, str(error)))
        self._elsewhere += record.fingerprint.numerics != self._model.numerics_fingerprint
        # behind the horizon it is whole for the sake of a fork; what led there may be gone
        if self._replay is not None and (self._state is not None or record.index >= self._head.horizon):
            self._replay_chunk(self._replay, record)

    def _replay_chunk(self, replay: Replay, record: ChunkRecord) -> None:
        try:
            output = None if self._state is None else replay.absorb(record, self._state, decode=True)
        except _DAMAGE:
            output = None
        except _IMPOSSIBLE as error:
            self._problem(record.index, f"the model can not take it: {error}")
            output = None
        if output is None:
            if not self._stopped:
                self._problem(record.index, "it can not be replayed, nor what follows until the next sound snapshot")
            self._state, self._stopped = None, True
            return
        self._state = output.state
        self._report.replayed += 1
        self._compare(record, output)
        self._exact_until = record.exact_until

    def _compare(self, record: ChunkRecord, output: ChunkOutput) -> None:
        digests = {"state": state_digest(output.state), "frames": frames_digest(output.frames)}
        committed = {"state": record.state_digest, "frames": record.frames_digest}
        differ = " and ".join(name for name in digests if digests[name] != committed[name])
        own = record.fingerprint.numerics == self._model.numerics_fingerprint
        if not differ:
            self._report.compared += 1
            self._exact = True
        elif self._exact and own and record.exact_until == self._exact_until:
            self._exact = digests["state"] == committed["state"]
            self._problem(record.index, f"replaying it gives other {differ} than were committed")
        elif self._exact:
            self._exact = False
            note = "replaying it gives other {} here, and so may what follows until the next snapshot"
            self._report.notes.append(f"chunk {record.index}: " + note.format(differ))

    def _check_snapshot(self, index: int, arena: Arena, record: ChunkRecord | None) -> None:
        """Check a snapshot, and go on from it where the replay has come off the committed state."""
        try:
            state = load_tensors(self._store, self._session.id, arena)
        except _DAMAGE as error:
            if index in self._snapshots():  # else it was dropped meanwhile
                self._problem(index, f"snapshot: {error}")
            return
        self._count(arena.blobs)
        if record is None:
            return
        if state_digest(state) != record.state_digest:
            self._problem(index, "snapshot: its digest is not the one committed")
            return
        self._report.snapshots += 1
        if self._replay is not None and (self._state is None or not self._exact):
            self._state, self._stopped = state, False
            self._exact, self._exact_until = True, record.exact_until

    def _fetch(self, index: int, what: str, refs: tuple[BlobRef, ...]) -> None:
        try:
            self._store.get(self._session.id, refs)
        except _DAMAGE as error:
            self._problem(index, f"{what}: {error}")
        else:
            self._count(refs)

    def _count(self, refs: tuple[BlobRef, ...]) -> None:
        self._blobs |= {ref.name: ref.size for ref in refs}
