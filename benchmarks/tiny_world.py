"""How long `tiny-world` takes for a chunk of 24 frames, from request to answer, and what a session of it carries.

Starts a server of its own, checks that a chunk asked for alone has the bits of one asked for with others, then posts
one chunk at a time.
"""

import argparse
import statistics
import tempfile
import time
from importlib.resources import as_file, files
from pathlib import Path

import numpy as np
from PIL import Image

from benchmarks.results import report, row
from longtake.client import Client
from longtake.server.demo import BEGINNING, FIRST_FRAME
from longtake.server.model.registry import load_model
from longtake.server.model.world import ChunkCamera, State
from longtake.server.private import private_server

CHUNKS = 20
REALTIME_MS = 1500


def served(first: bytes) -> list[float]:
    """Milliseconds of requests for one chunk each."""
    with (
        tempfile.TemporaryDirectory() as folder,
        private_server(Path(folder), "--model", "tiny-world") as server,
        Client(server.url) as client,
    ):
        whole = client.generate(client.create(first, **BEGINNING).id, actions="w-48").data
        session, times, digests = client.create(first, **BEGINNING).id, [], []
        for _ in range(CHUNKS):
            started = time.perf_counter()
            digests.append(client.generate(session, actions="w-24").data[0].state_digest)
            times.append((time.perf_counter() - started) * 1e3)
    if digests[:2] != [chunk.state_digest for chunk in whole]:
        raise SystemExit("a chunk asked for alone has other bits")
    return times


def state_after(chunks: int, first: Path) -> State:
    """What a session carries after that many chunks."""
    model, frame = load_model("tiny-world"), np.asarray(Image.open(first).convert("RGB"))
    conditions = model.condition(frame, "")
    state = model.initial_state(conditions)
    lens = np.array(BEGINNING["intrinsics"], dtype=np.float64)
    camera = ChunkCamera(np.tile(np.eye(4), (24, 1, 1)), np.tile(lens, (24, 1)), lens)
    for index in range(chunks):
        state = model.generate(conditions, state, index, camera, seed=0).state
    return state


def main() -> None:
    """Measure and print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    with as_file(files("longtake.server") / "assets" / FIRST_FRAME) as first:
        times = served(first.read_bytes())
        size = sum(x.numel() * x.element_size() for x in state_after(3, first).values())
    rows = [
        row(
            "tiny-world: a chunk of 24 frames over HTTP, request to answer",
            f"p50 {statistics.median(times):.0f} ms, longest {max(times):.0f} ms of {CHUNKS}",
            f"3 s, aim {REALTIME_MS} ms",
        ),
        row("tiny-world: what a session carries", f"{size / 1e6:.2f} MB", "8 MB"),
    ]
    report(rows, record=arguments.record)


if __name__ == "__main__":
    main()
