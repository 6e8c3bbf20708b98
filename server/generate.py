"""`longtake generate`: walk a session along a trajectory file or a string of actions, chunk by chunk."""

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CHUNK_FRAMES, Session
from longtake.api_schemas.trajectory import TrajectoryOptions
from longtake.client import Beginning, Client, Move
from longtake.server.camera.actions import parse_actions
from longtake.server.camera.intrinsics import check_intrinsics
from longtake.server.camera.trajectory import continue_from
from longtake.server.camera.trajectory_files import read_trajectory

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """What the command line asked for."""

    image: Path | None
    session: str | None
    trajectory: Path | None
    format: str
    actions: str | None
    frames: int | None
    prompt: str | None
    seed: int | None
    intrinsics: str | None
    intrinsics_size: str | None
    pad: bool
    output: Path
    server: str | None
    data_dir: Path | None

    def __post_init__(self) -> None:
        """What does not go together is said before anything is computed."""
        if (self.image is None) == (self.session is None):
            raise _usage("give either an image to begin with or a --session to go on with")
        if self.session is not None and (self.seed is not None or self.intrinsics_size):
            raise _usage("--seed and --intrinsics-size belong to a new session")
        if self.trajectory is not None and self.actions is not None:
            raise _usage("give either --trajectory or --actions")
        alone = self.session and (self.pad or self.prompt is not None)
        if self.trajectory is None and self.actions is None and not alone:
            raise _usage("give --trajectory or --actions; or for a --session --pad to fill what waits, or --prompt")
        if self.output.suffix.lower() != ".mp4" or not self.output.absolute().parent.is_dir():
            raise _usage("give the name of an .mp4 file in a folder that exists", "output")
        for file in (self.image, self.trajectory):
            if file is not None:
                file.stat()  # says which one is not there

    def command(self, session_id: str, *camera: str) -> str:
        """The command line that goes on with a session, from the same place into the same file."""
        options = (("--server", self.server), ("--data-dir", self.data_dir), ("-o", self.output))
        where = [str(word) for option in options if option[1] for word in option]
        return shlex.join(("longtake", "generate", "--session", session_id, *camera, *where))


def _usage(detail: str, field: str | None = None) -> ProblemError:
    return ProblemError("invalid_request", detail, field)


@dataclass(frozen=True)
class CameraPath:
    """What was read before anything is asked of the server: poses [F,4,4] of the file, or keys frame by frame."""

    file_poses: Matrix | None
    keys: list[frozenset[str]]
    intrinsics: Matrix | None

    def check_whole(self, session: Session | None, frames: int | None) -> None:
        """Refuse new frames that leave a session, or a new one, still without a whole chunk. Raises `ProblemError`."""
        start, waiting = (1, 0) if session is None else (session.next_frame, session.pending_poses)
        left = len(self.keys) if self.file_poses is None else len(self.file_poses) - start
        count = left if frames is None else min(left, frames)
        if count < 1 or count + waiting >= CHUNK_FRAMES or (session is not None and session.next_chunk):
            return
        have = f"{count + waiting}{' with those that wait' if waiting else ''}"
        image = "" if self.file_poses is None else " (row 0 of a trajectory is the image's)"
        raise _usage(
            f"a chunk takes {CHUNK_FRAMES} poses, one a new frame, and there are {have}{image}: "
            "give more, or --pad to hold the last one"
        )

    def check_waiting(self, session: Session | None) -> None:
        """Refuse to fill a chunk for which no pose waits and none comes. Raises `ProblemError`."""
        if session is not None and not session.pending_poses and self.file_poses is None and not self.keys:
            raise _usage("no poses wait for a whole chunk: there is nothing to fill", "--pad")

    def moves(self, session: Session, frames: int | None, *, pad: bool) -> tuple[list[Move], int]:
        """The camera of the new frames, cut where chunks become whole, and the number of these.

        With `pad` the last chunk is filled.
        """
        start, moves = session.next_frame, list[Move]()
        poses = self._poses(session, start, frames)
        count = len(self.keys[:frames]) if poses is None else len(poses)
        if count:
            cuts = [*range(CHUNK_FRAMES - session.pending_poses, count, CHUNK_FRAMES), count]
            moves = [self._move(poses, first, stop, start) for first, stop in pairwise([0, *cuts])]
        if pad:
            moves[-1:] = [{**(moves[-1] if moves else {}), "pad": True}]
        total = session.pending_poses + count
        return moves, -(-total // CHUNK_FRAMES) if pad else total // CHUNK_FRAMES

    def _poses(self, session: Session, start: int, frames: int | None) -> Matrix | None:
        if self.file_poses is None:
            return None
        if start >= len(self.file_poses):
            detail = (
                f"row k is the pose of frame k: it ends at frame {len(self.file_poses) - 1}, the session is at {start}"
            )
            raise ProblemError("trajectory_exhausted", detail, "trajectory")
        return continue_from(self.file_poses, np.array(session.first_pose), start, frames)

    def _move(self, poses: Matrix | None, first: int, stop: int, start: int) -> Move:
        intrinsics = self._intrinsics(start + first, start + stop)
        if poses is not None:
            return {"poses": poses[first:stop], "intrinsics": intrinsics}
        actions = ",".join(f"{''.join(sorted(keys)) or 'none'}-1" for keys in self.keys[first:stop])
        return {"actions": actions, "intrinsics": intrinsics}

    def _intrinsics(self, first: int, stop: int) -> Matrix | None:
        if self.intrinsics is None or len(self.intrinsics) == 1:
            return None
        if stop > len(self.intrinsics):
            raise ProblemError("intrinsics_invalid", f"the file ends before frame {stop - 1}", "intrinsics")
        return self.intrinsics[first:stop]


def run_walk(client: Client, walk: Walk, console: Console) -> None:
    """Create or find the session, post the camera chunk by chunk, write the video, and say how to go on."""
    path = read_path(walk)
    session = None if walk.session is None else client.session(walk.session)
    if not walk.pad:
        path.check_whole(session, walk.frames)
    elif walk.prompt is None:
        path.check_waiting(session)
    if session is None:
        assert walk.image is not None
        session = client.create(walk.image, **beginning(walk, path.intrinsics))
    console.print(f"session {session.id}", soft_wrap=True)
    for warning in session.warnings if walk.session is None else ():
        console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
    moves, chunks = path.moves(session, walk.frames, pad=walk.pad)
    if walk.session is not None and walk.prompt is not None:
        moves[:1] = [{**(moves[0] if moves else {}), "prompt": walk.prompt}]
    try:
        post_moves(client, session.id, moves, chunks, console)
    finally:
        save_walk(client, session.id, walk, console)
    go_on = walk.command(session.id, "--actions", "w-24")
    console.print(f"go on with: {go_on}", highlight=False, markup=False, soft_wrap=True)


def save_walk(client: Client, session_id: str, walk: Walk, console: Console) -> None:
    """Write everything so far, and say what waits; also when the walk was interrupted."""
    session = client.session(session_id)
    if session.next_chunk:
        client.save_video(session_id, walk.output)
        console.print(f"{walk.output}: {session.next_chunk * CHUNK_FRAMES} frames", highlight=False, soft_wrap=True)
    else:
        console.print("no chunk is whole yet: nothing was written")
    if session.pending_poses:
        waiting = f"{session.pending_poses} poses wait for a whole chunk of {CHUNK_FRAMES}"
        fill = walk.command(session_id, "--pad")
        console.print(f"{waiting}; fill it with: {fill}", highlight=False, markup=False, soft_wrap=True)


def read_path(walk: Walk) -> CameraPath:
    """Read and check the files and strings of the command line. Raises `ProblemError`, `OSError`."""
    keys = [] if walk.actions is None else parse_actions(walk.actions, "actions")
    if keys and walk.frames is not None and len(keys) < walk.frames:
        raise _usage(f"the camera gives {len(keys)} frames", "frames")
    file_poses = None if walk.trajectory is None else read_poses(walk.trajectory, walk.format)
    if file_poses is not None and walk.image is not None and len(file_poses) <= (walk.frames or 1):
        raise _usage(f"row 0 belongs to the image: it has poses for {len(file_poses) - 1} new frames", "trajectory")
    return CameraPath(
        file_poses=file_poses,
        keys=keys,
        intrinsics=None if walk.intrinsics is None else read_intrinsics(walk.intrinsics),
    )


def read_poses(path: Path, syntax: str) -> Matrix:
    """Poses [F,4,4] at 16 fps of a trajectory file. Raises `ProblemError`, `OSError`."""
    options = TrajectoryOptions.model_validate({"format": syntax})
    return read_trajectory(path.read_bytes(), options).poses


def beginning(walk: Walk, intrinsics: Matrix | None) -> Beginning:
    """How the session begins, besides its image."""
    return {
        "prompt": walk.prompt or "",
        "seed": walk.seed,
        "intrinsics": None if intrinsics is None else intrinsics[0],
        "intrinsics_size": None if walk.intrinsics_size is None else read_size(walk.intrinsics_size),
    }


def read_size(text: str) -> tuple[int, int]:
    """`832x480` as (832, 480). Raises `ProblemError`."""
    found = re.fullmatch(r"(\d{1,5})[xX](\d{1,5})", text, re.ASCII)
    if found is None:
        raise ProblemError("invalid_request", "give WIDTHxHEIGHT, such as 832x480", "intrinsics_size")
    return int(found[1]), int(found[2])


def read_intrinsics(text: str) -> Matrix:
    """`fx,fy,cx,cy`, or a `.npy` file of [4] or [F,4], as [F,4]. Raises `ProblemError`, `OSError`."""
    try:
        values = np.load(text, allow_pickle=False) if text.endswith(".npy") else np.array(text.split(","), np.float64)
    except ValueError as error:
        raise ProblemError("intrinsics_invalid", "give fx,fy,cx,cy or a .npy file of numbers", "intrinsics") from error
    return check_intrinsics(np.atleast_2d(values), "intrinsics")


def post_moves(client: Client, session_id: str, moves: Sequence[Move], chunks: int, console: Console) -> None:
    """Post one move after the other, each under a key of its own; shows progress and the time of every chunk."""
    columns = (TextColumn("chunk"), MofNCompleteColumn(), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=chunks)
        said = set[str]()
        for move in moves:
            for chunk in client.generate(session_id, **move).data:
                spent = "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in chunk.timings_ms.items())
                progress.console.print(f"chunk {chunk.index}: {spent}", highlight=False, soft_wrap=True)
                for warning in dict.fromkeys(chunk.warnings):
                    if warning not in said:
                        progress.console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
                said.update(chunk.warnings)
                progress.advance(task)
