"""What the plain PyTorch reference makes of a scan with a gradient."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtake.kernels.cam.reference import cam_branch, cam_scan
from longtake.kernels.gdn.reference import GdnState, gdn_scan

if TYPE_CHECKING:
    from longtake.kernels.scan.training import Trained


def reference_results(x: "Trained") -> tuple[Tensor | None, ...]:
    """Numerator, denominator, KV and Z of the scan; None for what it has not."""
    wide = x.v.to(torch.promote_types(x.v.dtype, torch.float32))
    tokens = (x.q, x.k, wide, x.beta, x.decay)
    how: dict[str, Any] = {"direction": x.direction, "chunk_starts": x.starts}
    norms: dict[str, Any] = {"norm": x.norm, "q_weight": x.q_weight, "k_weight": x.k_weight, "norm_eps": x.norm_eps}
    if x.normaliser:
        state = None if x.kv is None or x.z is None else GdnState(x.kv, x.z)
        how |= norms | {"cos": x.cos, "sin": x.sin, "k_scale": x.k_scale, "initial_state": state}
        found = gdn_scan(*tokens, **how)
        return (found.out.to(x.dtype), found.denominator, *(found.state or (None, None)))
    if x.projection is None or x.projection_inverse is None:
        reads = cam_scan(*tokens, initial_state=x.kv, **how)
    else:
        positions = (x.projection, x.projection_inverse, x.cos, x.sin)
        how |= norms | {"discount": x.discount, "output_transform": False, "k_scale": x.k_scale}
        reads = cam_branch(*tokens, *positions, initial_state=x.kv, **how)
    return (reads.out.to(x.dtype), None, reads.state, None)
