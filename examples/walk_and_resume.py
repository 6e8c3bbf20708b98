"""Walk a path, stop, and go on from another process: the same frames as a walk in one go.

Usage: python examples/walk_and_resume.py [--server http://127.0.0.1:8000]

Each half of the walk is a process of its own that knows nothing but the server's URL and, for the second, the
session's id. Without `--server` a private server is started. A server's key comes from LONGTAKE_API_KEY.
"""

import argparse
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import as_file, files
from pathlib import Path

from longtake.client import Client

TURN = 0.02
"""Radians a frame."""

STEP = 0.03
"""Way forward a frame."""

FRAMES = 48
"""New frames of each half."""


def main() -> None:
    """Walk in two processes and in one call, and compare; with --half, be one of the two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--server", metavar="URL", help="a running server")
    parser.add_argument("--half", metavar="SESSION", help="only walk half the path: of this session, or of a `new` one")
    given = parser.parse_args()
    with server(given.server) as url, connect(url) as client:
        if given.half:
            sys.stdout.write(walk_half(client, given.half))
        else:
            compare(client, url)


def walk_half(client: Client, session: str) -> str:
    """Go on from where the session stands, which is all there is to know; returns its id."""
    session = begin(client) if session == "new" else session
    start = client.session(session).next_frame
    client.generate(session, poses=path(start, FRAMES), expected_frame=start)
    return session


def compare(client: Client, url: str) -> None:
    """A walk of two processes against a walk of one call."""
    session = process(url, "new")
    process(url, session)
    whole = begin(client)
    client.generate(whole, poses=path(1, 2 * FRAMES))
    halves, uncut = digests(client, session), digests(client, whole)
    client.delete(whole)
    if halves != uncut:
        sys.exit("the two walks differ")
    for index, (frames, _) in enumerate(halves):
        sys.stdout.write(f"chunk {index}: {frames}\n")
    sys.stdout.write(f"{session}: two processes or one call, the same digests\n")


def process(url: str, session: str) -> str:
    """Half of the walk in a process of its own, which says the session's id."""
    command = [sys.executable, __file__, "--server", url, "--half", session]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def digests(client: Client, session: str) -> list[tuple[str, str]]:
    """Hashes of the frames and of the state, chunk by chunk."""
    return [(chunk.frames_digest, chunk.state_digest) for chunk in client.chunks(session)]


def begin(client: Client) -> str:
    """A session from the shipped first frame."""
    with as_file(files("longtake.server") / "assets" / "courtyard.png") as image:
        return client.create(image, seed=7).id


def path(start: int, count: int) -> list[list[list[float]]]:
    """Camera-to-world matrices of frames start…start+count-1 on a gentle arc, OpenCV axes."""
    return [pose(frame) for frame in range(start, start + count)]


def pose(frame: int) -> list[list[float]]:
    """The camera of one frame."""
    cos, sin = math.cos(TURN * frame), math.sin(TURN * frame)
    radius = STEP / TURN
    return [
        [cos, 0.0, sin, radius * (1 - cos)],
        [0.0, 1.0, 0.0, 0.0],
        [-sin, 0.0, cos, radius * sin],
        [0.0, 0.0, 0.0, 1.0],
    ]


def connect(url: str) -> Client:
    """A client of the server at `url`."""
    return Client(url, api_key=os.environ.get("LONGTAKE_API_KEY"))


@contextmanager
def server(url: str | None) -> Iterator[str]:
    """The URL of the server given, or of a private one."""
    if url is not None:
        yield url
        return
    from longtake.server.private import private_server

    with tempfile.TemporaryDirectory() as folder, private_server(Path(folder)) as private:
        yield private.url


if __name__ == "__main__":
    main()
