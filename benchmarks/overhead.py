"""What the server adds to a chunk beyond queue, model, encode, snapshot upload and commit; a row for RESULTS.md.

Starts a server of its own, checks that a resumed take gives the same digests, then posts one chunk at a time.
"""

import argparse
import secrets
import statistics
import tempfile
import time
from importlib.resources import as_file, files
from pathlib import Path

import httpx

from benchmarks.results import SERVED, report, row
from longtake.api_schemas.camera import Camera
from longtake.api_schemas.resources import Advanced, PostChunks
from longtake.client import Client
from longtake.server.private import private_server


def main() -> None:
    """Measure and print; with --record also append the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--chunks", type=int, default=60)
    parser.add_argument("--record", action="store_true", help="append the row to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        private_server(Path(folder), *SERVED) as server,
        Client(server.url) as client,
    ):
        session = begin(client)
        check(client, session)
        overheads, commits = measure(server.url, session, arguments.chunks)
    report([results_row(overheads, commits)], record=arguments.record)


def begin(client: Client) -> str:
    """A session from the shipped first frame."""
    with as_file(files("longtake.server") / "assets") as assets:
        return client.create(assets / "courtyard.png", seed=7).id


def check(client: Client, session: str) -> None:
    """Two chunks in one request and in two are the same bits; otherwise there is nothing to measure."""
    whole = client.generate(session, actions="w-48").data
    other = begin(client)
    halves = [client.generate(other, actions="w-24").data[0] for _ in range(2)]
    assert [chunk.state_digest for chunk in whole] == [chunk.state_digest for chunk in halves]


def measure(url: str, session: str, chunks: int) -> tuple[list[float], list[float]]:
    """Milliseconds beyond the stages, and in the commit, of every request for one chunk."""
    overheads, commits = [], []
    body = PostChunks(camera=Camera.model_validate({"actions": "w-24"})).model_dump_json(exclude_unset=True)
    with httpx.Client(base_url=url, timeout=60) as http:
        for _ in range(chunks):
            headers = {"Content-Type": "application/json", "Idempotency-Key": secrets.token_hex(8)}
            started = time.perf_counter()
            answer = http.post(f"/v1/sessions/{session}/chunks", content=body, headers=headers)
            total = (time.perf_counter() - started) * 1e3
            (chunk,) = Advanced.model_validate_json(answer.content).data
            commit = float(answer.headers["Server-Timing"].split("dur=")[1])
            overheads.append(total - commit - sum(chunk.timings_ms.values()))
            commits.append(commit)
    return overheads, commits


def results_row(overheads: list[float], commits: list[float]) -> str:
    """The measurement as a row."""
    work = "server overhead beyond queue, model, encode, snapshot and commit; tiny-untrained, 1 chunk a request"
    p50, p90 = statistics.median(overheads), statistics.quantiles(overheads, n=10)[-1]
    number = f"p50 {p50:.1f} ms, p90 {p90:.1f} ms (commit p50 {statistics.median(commits):.1f} ms)"
    return row(f"{work}, {len(overheads)} requests", number, "0")


if __name__ == "__main__":
    main()
