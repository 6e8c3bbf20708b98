"""A private server under use: time to the first byte of a stream, and many sessions at once; rows for RESULTS.md.

Checks while it measures: streams decode to all their frames, every session gives the digests of a session that was
alone, nothing fails but a full queue, and memory does not grow.
"""

import argparse
import io
import os
import statistics
import tempfile
import threading
import time
from pathlib import Path

import av

from benchmarks.overhead import begin
from benchmarks.results import SERVED, report, row
from longtake.api_schemas.resources import CHUNK_FRAMES
from longtake.client import Client
from longtake.server.private import PrivateServer, private_server

SESSIONS, CHUNKS = 8, 20


def main() -> None:
    """Measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        private_server(Path(folder), *SERVED) as server,
        Client(server.url) as client,
    ):
        rows = [first_byte(client), many_sessions(server, client)]
    report(rows, record=arguments.record)


def first_byte(client: Client, repeats: int = 10) -> str:
    """Time until the first piece of a three-chunk stream, against a request for one chunk."""
    session = begin(client)
    client.generate(session, actions="w-24")
    whole, first = [], []
    for _ in range(repeats):
        started = time.perf_counter()
        client.generate(session, actions="w-24")
        whole.append(time.perf_counter() - started)
        started = time.perf_counter()
        pieces = client.stream(session, actions="w-72")
        received = next(pieces)
        first.append(time.perf_counter() - started)
        check_frames(received + b"".join(pieces), 3 * CHUNK_FRAMES)
    one, early = statistics.median(whole) * 1e3, statistics.median(first) * 1e3
    number = f"{early:.0f} ms, {early / one:.2f} × the {one:.0f} ms of a request for one chunk"
    return row("first MP4 byte of a stream of 3 chunks; tiny-untrained", number, "1 chunk")


def check_frames(data: bytes, expected: int) -> None:
    """The MP4 decodes to exactly this many frames."""
    with av.open(io.BytesIO(data)) as container:
        assert sum(1 for _ in container.decode(video=0)) == expected


def many_sessions(server: PrivateServer, client: Client) -> str:
    """Sessions that post chunk by chunk at the same time, each against the digests of one that was alone."""
    alone = [chunk.state_digest for chunk in client.generate(begin(client), actions=f"w-{CHUNK_FRAMES * CHUNKS}").data]
    failures: list[str] = []
    settled = threading.Barrier(SESSIONS + 1)

    def walk() -> None:
        with Client(server.url) as mine:
            session, made = begin(mine), []
            for chunk in range(CHUNKS):
                made += mine.generate(session, actions=f"w-{CHUNK_FRAMES}").data
                if chunk == CHUNKS // 2:
                    settled.wait()
            if [chunk.state_digest for chunk in made] != alone:
                failures.append(session)

    threads = [threading.Thread(target=walk) for _ in range(SESSIONS)]
    started = time.perf_counter()
    for thread in threads:
        thread.start()
    settled.wait()
    half = resident_mb(server.process.pid)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - started
    grown = resident_mb(server.process.pid) - half
    assert not failures, f"{len(failures)} sessions differ"
    assert grown < 50, f"memory grew by {grown:.0f} MB in the second half"
    number = (
        f"{SESSIONS * CHUNKS / seconds:.1f} chunks/s, no error, no digest wrong, {grown:+.0f} MB in the second half"
    )
    return row(f"{SESSIONS} sessions at once, {CHUNKS} chunks each; tiny-untrained", number, "–")


def resident_mb(pid: int) -> float:
    """Resident memory of a process in MB (Linux)."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    main()
