"""What must hold after every scenario: the store's own books (fsck), and that nothing is left of what was deleted."""

from collections.abc import Iterable

from faults.cluster import Findings
from faults.truth import Truth
from longtake.state_cache import RedisStore, StoreError, load_file, load_tensors, state_digest

ORPHAN_SECONDS = 600


def fsck(store: RedisStore, session_id: str, findings: Findings, truth: Truth | None = None) -> None:
    """I1–I3: the log has no gap, every blob that a record names is there and whole, every snapshot is its chunk's."""
    try:
        _fsck(store, session_id, findings, truth)
    except (StoreError, ValueError) as error:
        findings.add(f"fsck {session_id}: {type(error).__name__}: {error}")


def _fsck(store: RedisStore, session_id: str, findings: Findings, truth: Truth | None) -> None:
    session, head, _ = store.read(session_id)
    load_tensors(store, session_id, session.conditions)
    records = store.chunks(session_id, 0, head.chunk + 1)
    indices = [record.index for record in records]
    findings.expect(indices == list(range(head.chunk + 1)), f"fsck {session_id}: chunks {indices}, head {head.chunk}")
    for record in records:
        if not getattr(record, "expired", False):
            load_tensors(store, session_id, record.latents)
            load_file(store, session_id, record.segment)
    for index, arena in store.snapshots(session_id).items():
        digest = state_digest(load_tensors(store, session_id, arena))
        whole = index <= head.chunk and digest == records[index].state_digest
        findings.expect(whole, f"fsck {session_id}: the snapshot after chunk {index} is not that chunk's")
    if truth is not None:
        found = [(record.frames_digest, record.state_digest) for record in records]
        must = [(made.frames_digest, made.state_digest) for made in truth.log]
        findings.expect(found == must, f"fsck {session_id}: the log is not the truth: {differing(found, must)}")
        findings.expect(head.revision == truth.revision, f"fsck {session_id}: revision {head.revision}")


def differing(found: list[tuple[str, str]], must: list[tuple[str, str]]) -> str:
    """Where two logs part."""
    for index, (one, other) in enumerate(zip(found, must, strict=False)):
        if one != other:
            return f"at chunk {index} of {len(found)} and {len(must)}"
    return f"{len(found)} chunks instead of {len(must)}"


def collect_all(store: RedisStore, findings: Findings) -> None:
    """Collect every lineage that has litter, until none has."""
    from longtake.state_cache.retention import Retention

    for _ in range(100):
        if not (lineages := store.littered(100)):
            return
        for lineage in lineages:
            store.collect(lineage, Retention())
    findings.add(f"lineages stay littered however often they are collected: {store.littered(5)}")


def lasting(store: RedisStore, keys: Iterable[bytes | str]) -> list[str]:
    """Those of a store's keys that belong to a lineage and will not go by themselves within ten minutes."""
    raw = store._client._redis
    names = [name for key in keys if "{" in (name := key.decode() if isinstance(key, bytes) else key)]
    pipeline = raw.pipeline(transaction=False)
    for name in names:
        pipeline.pttl(name)
    lifetimes = pipeline.execute()
    return [
        name for name, left in zip(names, lifetimes, strict=True) if left == -1 or left > (ORPHAN_SECONDS + 1) * 1000
    ]
