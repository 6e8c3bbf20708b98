"""Replicas of a server on one store, and calls to them that try again until the answer is known."""

import io
import json
import random
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import httpx
from PIL import Image

from faults.replica import Replica, Zygote
from faults.toy_model import SMALL_STATE, STATE_BYTES, ToyModel
from longtake.api_schemas.problems import MEDIA_TYPE, PROBLEMS
from longtake.state_cache import RedisStore

LEASE_S = 2
ANSWER_SECONDS = 20.0
"""A server that is left alone answers within this, whatever its store does."""
SERVED_SECONDS = 60.0
"""A call that is repeated is served within this."""

AGAIN = frozenset(
    {"in_progress", "session_fenced", "session_busy", "queue_full", "store_unavailable", "store_full", "shutting_down"}
)
"""Problems that pass."""

NEVER = frozenset({"internal_error", "state_corrupt", "state_diverged", "state_rolled_back", "model_mismatch"})
"""Problems that no test may see unless it damages the store itself."""


@dataclass
class Findings:
    """What went wrong, from several threads."""

    found: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, text: str) -> None:
        """One violation."""
        with self.lock:
            self.found.append(text)

    def count(self, name: str) -> None:
        """One more of something that is not wrong."""
        with self.lock:
            self.counts[name] = self.counts.get(name, 0) + 1

    def expect(self, truth: bool, text: str) -> bool:
        """A violation unless it is true; returns it."""
        if not truth:
            self.add(text)
        return truth


@dataclass(frozen=True)
class Answer:
    """The answer to a call: JSON or bytes. `attempts` counts those it took."""

    status: int
    content: bytes
    headers: Mapping[str, str]
    attempts: int = 1

    @property
    def json(self) -> Any:  # noqa: ANN401
        """The body, parsed."""
        return json.loads(self.content)

    @property
    def code(self) -> str:
        """Of a problem; "" for a success."""
        return str(self.json["code"]) if self.headers.get("content-type") == MEDIA_TYPE else ""

    @property
    def replayed(self) -> bool:
        """Whether it says that it was made before."""
        return self.headers.get("idempotent-replayed") == "true"


class Cluster:
    """Some replicas on one store.

    Args:
        zygote: what forks them.
        urls: store URL of each replica; None for one with a store of its own.
        prefix: of the store's keys.
        environment: settings of every replica.
    """

    def __init__(self, zygote: Zygote, urls: Sequence[str | None], prefix: str = "lt", **environment: str) -> None:
        self.zygote = zygote
        self.prefix = prefix
        self.findings = Findings()
        self.model = ToyModel(state_bytes=int(environment.get(STATE_BYTES, SMALL_STATE)))
        self._urls = urls
        self._environment = environment
        self._http = httpx.Client(
            trust_env=False,
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=40),
            timeout=httpx.Timeout(ANSWER_SECONDS, connect=5.0),
        )
        self.replicas: list[Replica] = [self._forked(place) for place in range(len(urls))]

    def restart(self, place: int, failpoints: str = "", **environment: str) -> Replica:
        """A new replica in this place; the old one is killed if it runs."""
        self.replicas[place].kill()
        self.replicas[place] = self._forked(place, failpoints, **environment)
        return self.replicas[place]

    def usable(self) -> list[Replica]:
        """Replicas that could answer now."""
        return [replica for replica in self.replicas if replica.alive and not replica.frozen]

    def store(self, url: str) -> RedisStore:
        """The store as the servers use it."""
        return RedisStore(url, self.prefix)

    def send(
        self,
        replica: Replica,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        accept: str = "application/json",
        files: list[tuple[str, tuple[str, bytes]]] | None = None,
    ) -> Answer:
        """One attempt. Raises `httpx.TransportError`."""
        headers = {"Accept": accept} | ({} if key is None else {"Idempotency-Key": key})
        url = replica.url + path
        if files:
            answer = self._http.request(method, url, headers=headers, data={"params": json.dumps(body)}, files=files)
        else:
            answer = self._http.request(method, url, headers=headers, json=body)
        return Answer(answer.status_code, answer.content, answer.headers)

    def close(self) -> None:
        """Let the replicas drain, and end."""
        for replica in self.replicas:
            if replica.alive:
                replica.stop()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            for replica in self.replicas:
                replica.kill()
            self._http.close()

    def _forked(self, place: int, failpoints: str = "", **environment: str) -> Replica:
        settings = {"LONGTAKE_KEY_PREFIX": self.prefix, "LONGTAKE_REPLICA_ID": f"replica-{place}"}
        if (url := self._urls[place]) is not None:
            settings["LONGTAKE_STATE_URL"] = url
        return self.zygote.fork(failpoints, **settings | self._environment | environment)


def zygote_for(folder: Path, **environment: str) -> Zygote:
    """A forking process for small quick servers."""
    settings = {
        "LONGTAKE_PORT": "0",
        "LONGTAKE_MODEL": "toy",
        "LONGTAKE_THREADS": "1",
        "LONGTAKE_LOG_LEVEL": "info",
        "LONGTAKE_GRACE_S": "5",
        "LONGTAKE_LEASE_S": str(LEASE_S),
    }
    return Zygote(folder, **settings | environment)


class Caller:
    """A client that repeats each call, with the same key and on any replica, until it knows the answer.

    Args:
        cluster: where to.
        rng: picks replicas and pauses.
        only: place of the only replica to call; any of them by default.
    """

    def __init__(self, cluster: Cluster, rng: random.Random, only: int | None = None) -> None:
        self.cluster = cluster
        self.rng = rng
        self.only = only
        self.patience = SERVED_SECONDS
        self._findings = cluster.findings

    def key(self) -> str:
        """A new idempotency key."""
        return f"key-{self.rng.getrandbits(64):016x}"

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        key: str | None = None,
        accept: str = "application/json",
        files: list[tuple[str, tuple[str, bytes]]] | None = None,
        again: frozenset[str] = AGAIN,
        patience: float | None = None,
    ) -> Answer:
        """The answer that is not one of `again`. Raises `TimeoutError` when none comes."""
        patience = self.patience if patience is None else patience
        give_up, attempts, last = time.monotonic() + patience, 0, "no replica was there"
        while time.monotonic() < give_up:
            if (replica := self._replica()) is None:
                time.sleep(0.02)
                continue
            attempts += 1
            disturbed, began = replica.disturbed, time.monotonic()
            try:
                answer = self.cluster.send(replica, method, path, body, key=key, accept=accept, files=files)
            except httpx.TransportError as error:
                last = f"{type(error).__name__} after {time.monotonic() - began:.1f} s"
                self._judge_silence(replica, disturbed, error, f"{method} {path}")
                time.sleep(self.rng.uniform(0.01, 0.05))
                continue
            self._judge(answer, f"{method} {path}")
            if answer.code not in again:
                return Answer(answer.status, answer.content, answer.headers, attempts)
            last = answer.code
            time.sleep(self.rng.uniform(0.02, 0.2))
        self._findings.add(f"{method} {path} was not served in {patience:.0f} s and {attempts} attempts: {last}")
        raise TimeoutError(f"{method} {path}: {last}")

    def _replica(self) -> Replica | None:
        if self.only is not None:
            replica = self.cluster.replicas[self.only]
            return replica if replica.alive else None
        usable = self.cluster.usable()
        return self.rng.choice(usable) if usable else None

    def _judge(self, answer: Answer, what: str) -> None:
        self._findings.count(answer.code or str(answer.status))
        if answer.status >= 500:
            named = answer.headers.get("content-type") == MEDIA_TYPE and answer.code in PROBLEMS
            self._findings.expect(named, f"{what}: {answer.status} without a problem: {answer.content[:200]!r}")
        self._findings.expect(answer.code not in NEVER, f"{what}: {answer.content[:300]!r}")

    def _judge_silence(self, replica: Replica, disturbed: int, error: httpx.TransportError, what: str) -> None:
        """A server that nobody touched has no excuse for not answering."""
        self._findings.count(type(error).__name__)
        touched = replica.disturbed != disturbed or not replica.alive or replica.frozen
        hung = isinstance(error, httpx.ReadTimeout) and not touched
        self._findings.expect(not hung, f"{what}: no answer in {ANSWER_SECONDS:.0f} s; {replica.last_words()[-300:]}")


def png(frame: "object") -> bytes:
    """A frame [H,W,3] as a file."""
    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "PNG", compress_level=1)  # type: ignore[arg-type]
    return buffer.getvalue()


def until(true: Callable[[], object], patience: float = 15.0, what: str = "it") -> None:
    """Wait until something is true. Raises `TimeoutError`."""
    give_up = time.monotonic() + patience
    while not true():
        if time.monotonic() > give_up:
            raise TimeoutError(f"{what} did not happen within {patience:.0f} s")
        time.sleep(0.005)
