"""What an operator can see: every metric, declared once, in a registry of the engine's own; none names a session."""

from collections.abc import Sequence
from importlib.metadata import version

import torch
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    disable_created_metrics,
    generate_latest,
)

from longtake.server.model.world import ModelSpec

disable_created_metrics()  # type: ignore[no-untyped-call]

NAMESPACE = "longtake"
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30)
STORE_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 3)


class Metrics:
    """Counters and histograms of one engine; times in seconds."""

    def __init__(self, spec: ModelSpec, device: str) -> None:
        self.registry = CollectorRegistry()
        self.sessions_created = self._counter("sessions_created", "Sessions created.")
        self.sessions_expired = self._counter("sessions_expired", "Sessions removed after their time.")
        self.sessions_by_tier = self._gauge("sessions_by_tier", "Sessions whose state is in memory.", "tier")
        self.state_bytes = self._gauge("state_bytes", "Bytes of state in memory.", "tier")
        self.snapshots = self._counter("snapshots", "Snapshots: ok, skipped, or the code of a problem.", "outcome")
        self.snapshot_seconds = self._histogram("snapshot_seconds", "From a copied state to a stored snapshot.")
        self.snapshot_bytes = self._counter("snapshot_bytes", "Bytes of state stored in snapshots.")
        self.snapshots_discarded = self._counter("snapshots_discarded", "Snapshots that a restore could not use.")
        self.restore_seconds = self._histogram("restore_seconds", "Bringing a state back from the store.", "source")
        self.replayed_chunks = self._counter("replayed_chunks", "Chunks replayed from the log to restore a state.")
        self.lease_takeovers = self._counter("lease_takeovers", "Leases that another server had let lapse.")
        self.divergence = self._counter("divergence", "Restores that gave other bits than were committed: must be 0.")
        self.rolled_back = self._counter("rolled_back", "Sessions whose store has lost acknowledged chunks: must be 0.")
        self.collected = self._counter("collected", "What garbage collection freed.", "kind")
        self.collect_seconds = self._histogram("collect_seconds", "One garbage collection of a lineage.")
        self.resumes = self._counter("resumes", "Requests by where their state came from.", "source")
        self.queue_depth = self._gauge("queue_depth", "Requests that wait or run.")
        self.queue_capacity = self._gauge("queue_capacity", "Requests that may wait or run at once.")
        self.problems = self._counter("problems", "Error answers by their code.", "code")
        self.chunks = self._counter("chunks", "Chunks committed.", "kind")
        self.frames = self._counter("frames", "Video frames committed.")
        self.commits = self._counter("commits", "Commits of chunks: ok, or the code of the problem.", "outcome")
        self.stage = self._histogram(
            "stage_seconds",
            "Host time by stage of a chunk; queue is the wait for the compute thread, commit the atomic step.",
            "stage",
        )
        self.chunk_latency = self._histogram(
            "chunk_latency_seconds", "From a chunk's turn on the compute thread to its commit.", "kind"
        )
        self.store_up = self._gauge("store_up", "1 when the last call to the session store was answered.")
        self.store_durability = self._gauge("store_durability", "1 for the store's durability class.", "durability")
        self.store_bytes = self._gauge("store_bytes", "Memory that the session store uses, when last asked.")
        self.store_seconds = self._histogram(
            "store_op_seconds", "Calls to the session store.", "op", buckets=STORE_SECONDS
        )
        build = Info("build", "What runs.", namespace=NAMESPACE, registry=self.registry)
        build.info({"version": version("longtake"), "torch": torch.__version__, "model": spec.id, "device": device})

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, namespace=NAMESPACE, registry=self.registry)

    def _histogram(self, name: str, text: str, *labels: str, buckets: Sequence[float] = SECONDS) -> Histogram:
        return Histogram(name, text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets)

    def chunk(self, kind: str, frames: int, stages_ms: dict[str, float], commit_ms: float) -> None:
        """Count a committed chunk with its stages in milliseconds."""
        self.chunks.labels(kind).inc()
        self.frames.inc(frames)
        for stage, ms in {**stages_ms, "commit": commit_ms}.items():
            self.stage.labels(stage).observe(ms / 1e3)
        working = sum(ms for stage, ms in stages_ms.items() if stage != "queue")
        self.chunk_latency.labels(kind).observe((working + commit_ms) / 1e3)

    def exposition(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
