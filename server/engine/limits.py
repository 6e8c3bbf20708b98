"""How much an engine takes on."""

from dataclasses import dataclass, field

from longtake.server.video.clips import ClipLimits
from longtake.state_cache import Retention


@dataclass(frozen=True)
class Limits:
    """Bounds of an engine.

    Attributes:
        queue_size: requests that may wait or run at once.
        device_state_bytes: state that stays on the device between requests.
        host_state_bytes: state that stays in host memory between requests.
        snapshot_every: chunks from one snapshot to the next, 0 by size and time of a replay.
        retention: what sessions keep in the store.
        exact_required: refuse to go on from a state that is not the committed one to the bit.
        lease_s: seconds that a lease lasts unless it is renewed.
        ttl_s: seconds without a new chunk or pose after which a session goes, unless it asks for others; None: never.
        clip: what an uploaded clip may hold.
    """

    queue_size: int = 32
    device_state_bytes: int = 8 * 2**30
    host_state_bytes: int = 2 * 2**30
    snapshot_every: int = 0
    retention: Retention = field(default_factory=Retention)
    exact_required: bool = False
    lease_s: float = 10.0
    ttl_s: int | None = None
    clip: ClipLimits = field(default_factory=ClipLimits)
