"""`longtake generate`: walk a session along a trajectory file or a string of actions, chunk by chunk."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import CHUNK_FRAMES, Advanced, Session
from longtake.client import Beginning, Client, Move
from longtake.server.camera.actions import parse_actions
from longtake.server.camera.intrinsics import check_intrinsics
from longtake.server.camera.trajectory import continue_from, load_trajectory

Matrix = NDArray[np.float64]


@dataclass(frozen=True)
class Walk:
    """What the command line asked for."""

    image: Path | None
    session: str | None
    trajectory: Path | None
    actions: str | None
    frames: int | None
    prompt: str
    seed: int | None
    intrinsics: str | None
    intrinsics_size: str | None
    pad: bool
    output: Path

    def __post_init__(self) -> None:
        """One source each for the session and for the camera."""
        if (self.image is None) == (self.session is None):
            raise ProblemError("invalid_request", "give either an image to begin with or a --session to go on with")
        if (self.trajectory is None) == (self.actions is None):
            raise ProblemError("invalid_request", "give either --trajectory or --actions")


@dataclass(frozen=True)
class CameraPath:
    """What was read before anything is asked of the server: poses [F,4,4] of the file, or keys frame by frame."""

    file_poses: Matrix | None
    keys: list[frozenset[str]]
    intrinsics: Matrix | None

    def moves(self, session: Session, frames: int | None) -> list[Move]:
        """The camera of the new frames, cut where chunks become whole."""
        start = session.next_frame
        poses = (
            None
            if self.file_poses is None
            else continue_from(self.file_poses, np.array(session.first_pose), start, frames)
        )
        count = len(self.keys[:frames]) if poses is None else len(poses)
        cuts = [*range(CHUNK_FRAMES - session.pending_poses, count, CHUNK_FRAMES), count]
        return [self._move(poses, first, stop, start) for first, stop in pairwise([0, *cuts])]

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


def run_walk(client: Client, walk: Walk, console: Console) -> str:
    """Create or find the session, post the camera chunk by chunk, and write the video; returns the session's id."""
    path = read_path(walk)
    if walk.image is None:
        assert walk.session is not None
        session = client.session(walk.session)
    else:
        session = client.create(walk.image, **beginning(walk, path.intrinsics))
    console.print(f"session {session.id}", soft_wrap=True)
    for warning in session.warnings:
        console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
    moves = path.moves(session, walk.frames)
    moves[-1]["pad"] = walk.pad
    answer = post_moves(client, session, moves, console)
    if answer.next_chunk:
        client.save_video(session.id, walk.output)
        console.print(f"{walk.output}: {answer.next_chunk * CHUNK_FRAMES} frames", highlight=False)
    if answer.pending_poses:
        console.print(f"{answer.pending_poses} poses wait for a whole chunk of {CHUNK_FRAMES}; --pad fills it")
    return session.id


def read_path(walk: Walk) -> CameraPath:
    """Read and check the files and strings of the command line. Raises `ProblemError`, `OSError`."""
    return CameraPath(
        file_poses=None if walk.trajectory is None else load_trajectory(walk.trajectory),
        keys=[] if walk.actions is None else parse_actions(walk.actions, "actions"),
        intrinsics=None if walk.intrinsics is None else read_intrinsics(walk.intrinsics),
    )


def beginning(walk: Walk, intrinsics: Matrix | None) -> Beginning:
    """How the session begins, besides its image."""
    return {
        "prompt": walk.prompt,
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


def post_moves(client: Client, session: Session, moves: Sequence[Move], console: Console) -> Advanced:
    """Post one move after the other, each under a key of its own; shows progress and the time of every chunk."""
    columns = (
        TextColumn("chunk"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("", total=len(moves))
        for move in moves:
            answer = client.generate(session.id, **move)
            for chunk in answer.data:
                spent = "  ".join(f"{stage} {ms:.0f} ms" for stage, ms in chunk.timings_ms.items())
                progress.console.print(f"chunk {chunk.index}: {spent}", highlight=False, soft_wrap=True)
                for warning in chunk.warnings:
                    progress.console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)
            progress.advance(task)
    return answer
