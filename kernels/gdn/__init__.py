"""Frame-wise gated delta rule with a normaliser, and the short convolution on its keys."""

from longtake.kernels.gdn.reference import GdnState, gdn_bidirectional, gdn_merge, gdn_prepare, gdn_scan
from longtake.kernels.gdn.short_conv import short_conv

__all__ = ["GdnState", "gdn_bidirectional", "gdn_merge", "gdn_prepare", "gdn_scan", "short_conv"]
