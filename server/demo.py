"""`longtake demo`: begin a take, kill the server, start it again, go on, and compare with a take that was never cut."""

import shutil
import sys
from collections.abc import Sequence
from importlib.resources import as_file, files
from pathlib import Path

from rich.console import Console

from longtake.api_schemas.resources import Chunk, Session
from longtake.client import Beginning, Client, Move
from longtake.server.private import PrivateServer, start_private_server

FIRST_FRAME = "scene_27.png"
BEGINNING: Beginning = {
    "prompt": "a green tree and a pink box on red bricks at noon",
    "seed": 7,
    "intrinsics": (110.851, 110.851, 64, 40),
}
AWAY: Move = {"actions": "w-48,d-72"}
BACK: Move = {"actions": "a-72,wd-48"}
"""Ahead and to the right before the kill; after it back to what was seen before, and on."""


class DemoFailedError(RuntimeError):
    """The resumed take is not the uninterrupted one."""


def run_demo(out: Path, console: Console) -> None:
    """Run the whole demo into folder `out`, which keeps the video and the store.

    Raises `DemoFailedError` when the resumed take differs.
    """
    out.mkdir(parents=True, exist_ok=True)
    data = out / "data"
    with as_file(files("longtake.server") / "assets" / FIRST_FRAME) as picture:
        first = picture.read_bytes()

    server = _start(data, console)
    with Client(server.url) as client:
        session = client.create(first, **BEGINNING)
        _introduce(session, console)
        taken = client.generate(session.id, **AWAY).data
    _show(taken, console)
    server.kill()
    console.print("killed the server (SIGKILL)")

    server = _start(data, console)
    try:
        with Client(server.url) as client:
            back = client.generate(session.id, **BACK).data
            _show(back, console)
            with console.status("taking it again, without a cut"):
                twin = client.create(first, **BEGINNING)
                uncut = client.generate(twin.id, **AWAY).data + client.generate(twin.id, **BACK).data
            video = out / "take.mp4"
            client.save_video(session.id, video)
            client.delete(twin.id)
    finally:
        server.stop()
    _compare(taken + back, uncut)
    console.print("[green]same digests[/] as of a take that was not cut: it went on as if nothing had happened")
    console.print(f"video: {video}", soft_wrap=True)
    _next_steps(data, session.id, console)


def _start(data: Path, console: Console) -> PrivateServer:
    with console.status("starting a server"):
        server = start_private_server(data)
    console.print(f"a server of our own at {server.url}")
    return server


def _introduce(session: Session, console: Console) -> None:
    console.print(
        f"session {session.id}: {session.model}, {session.chunk.width}x{session.chunk.height}", soft_wrap=True
    )
    for warning in session.warnings:
        console.print(f"[yellow]warning:[/] {warning}", soft_wrap=True)


def _show(chunks: Sequence[Chunk], console: Console) -> None:
    for chunk in chunks:
        frames = f"frames {chunk.frame_start}-{chunk.frame_start + chunk.frame_count - 1}"
        console.print(f"chunk {chunk.index}: {frames}, {chunk.frames_digest[:23]}…", highlight=False)


def _compare(taken: Sequence[Chunk], uncut: Sequence[Chunk]) -> None:
    digests = [[(chunk.index, chunk.frames_digest, chunk.state_digest) for chunk in take] for take in (taken, uncut)]
    if digests[0] != digests[1]:
        raise DemoFailedError("the resumed take differs from the uninterrupted one")


def _next_steps(data: Path, session_id: str, console: Console) -> None:
    command = sys.argv[0] if shutil.which(sys.argv[0]) else "longtake"
    url = "http://127.0.0.1:8000"
    body = '{"camera": {"actions": "w-24"}}'
    console.print("\ngo on with it:", highlight=False)
    for line in (
        f"  {command} serve --data-dir {data}",
        f"  curl {url}/v1/sessions/{session_id}",
        f"  curl {url}/v1/sessions/{session_id}/chunks -H 'content-type: application/json' -d '{body}'",
        f"  curl {url}/v1/sessions/{session_id}/video -o take.mp4",
    ):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
