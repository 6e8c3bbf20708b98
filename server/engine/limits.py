"""How much an engine takes on."""

from dataclasses import dataclass, field

from longtake.server.video.clips import ClipLimits


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine.

    Attributes:
        queue_size: requests that may wait or run at once.
        hot_sessions: sessions whose state stays in memory between requests.
        keep_snapshots: newest snapshots kept for each session.
        ttl_s: seconds without a new chunk or pose after which a session goes, unless it asks for others; None: never.
        clip: what an uploaded clip may hold.
    """

    queue_size: int = 32
    hot_sessions: int = 8
    keep_snapshots: int = 2
    ttl_s: int | None = None
    clip: ClipLimits = field(default_factory=ClipLimits)
