"""How long a session takes to go on at another server: rows for RESULTS.md.

Two servers share a Redis of this command's own (AOF always). Every session gets three chunks at the first; then a
request of one pose, which makes no chunk, is timed at the second: lease, snapshot, digest and commit; once when the
snapshots are stored, and once right after the answer, when the last chunk is replayed. The next chunk there has to be
that of a session which never moved, to the bit.
"""

import argparse
import shutil
import statistics
import subprocess
import tempfile
import time
from importlib.resources import as_file, files
from pathlib import Path

from benchmarks.results import SERVED, report, row
from longtake.client import Client
from longtake.server.private import private_server
from longtake.state_cache import RedisStore, StoreUnavailable, packaged_binary

CHUNKS = 3
BAR = "100 ms"


def main() -> None:
    """Measure and print; with --record also append the row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sessions", type=int, default=20)
    parser.add_argument("--record", action="store_true", help="append the row to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="lt-") as folder:
        url = f"unix://{folder}/s"
        redis = start_redis(Path(folder))
        try:
            options = ("--state-url", url, *SERVED)
            with private_server(None, *options) as first, private_server(None, *options) as second:
                found = {
                    rests: measure(first.url, second.url, arguments.sessions, rests=rests) for rests in (True, False)
                }
        finally:
            redis.kill()
            redis.wait()
    report([results_row(times, rests=rests) for rests, times in found.items()], record=arguments.record)


def results_row(times: list[float], *, rests: bool) -> str:
    """One row for RESULTS.md."""
    when = "its snapshot stored" if rests else "right after the answer, the last chunk replayed"
    work = f"a session of {CHUNKS} chunks goes on at another server, {when}; tiny-untrained, AOF always"
    return row(work, f"p50 {statistics.median(times):.0f} ms, longest {max(times):.0f} ms", BAR if rests else "–")


def start_redis(folder: Path) -> subprocess.Popen[bytes]:
    """A server in this folder, once it answers."""
    binary = shutil.which("redis-server") or packaged_binary()
    assert binary is not None, "there is no redis-server"
    places = ["--port", "0", "--unixsocket", folder / "s", "--dir", folder, "--logfile", "log"]
    redis = subprocess.Popen([binary, *places, "--save", "", "--appendonly", "yes", "--appendfsync", "always"])
    store = RedisStore(f"unix://{folder}/s")
    while True:
        try:
            assert store.check().durability == "strict"
            return redis
        except StoreUnavailable:
            time.sleep(0.05)
        finally:
            store.close()


def measure(first: str, second: str, count: int, *, rests: bool) -> list[float]:
    """Milliseconds of the first request of each session at the second server."""
    times = []
    with Client(first) as here, Client(second) as there:
        twin = begin(here)
        expected = here.generate(twin, actions=f"w-{24 * CHUNKS + 24}").data[-1]
        begin(there)  # the second server has done something before
        for _ in range(count):
            session = begin(here)
            here.generate(session, actions=f"w-{24 * CHUNKS}")
            if rests:
                time.sleep(0.5)
            started = time.perf_counter()
            there.generate(session, actions="w-1")
            times.append((time.perf_counter() - started) * 1e3)
            (chunk,) = there.generate(session, actions="w-23").data
            assert (chunk.index, chunk.state_digest) == (CHUNKS, expected.state_digest)
    return times


def begin(client: Client) -> str:
    """A session from the shipped first frame."""
    with as_file(files("longtake.server") / "assets") as assets:
        return client.create(assets / "courtyard.png", seed=7).id


if __name__ == "__main__":
    main()
