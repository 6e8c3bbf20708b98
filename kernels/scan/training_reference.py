"""The backward pass of a scan by the autograd of its plain PyTorch reference."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longtake.kernels.cam.reference import cam_branch, cam_scan
from longtake.kernels.gdn.reference import GdnState, gdn_scan

if TYPE_CHECKING:
    from longtake.kernels.scan.training import Kept, Trained


def _results(x: "Trained") -> tuple[Tensor | None, ...]:
    """Numerator, denominator, KV and Z of the scan; None for what it has not."""
    wide = x.v.to(torch.promote_types(x.v.dtype, torch.float32))
    tokens = (x.q, x.k, wide, x.beta, x.decay)
    how: dict[str, Any] = {"direction": x.direction, "chunk_starts": x.starts}
    norms: dict[str, Any] = {"norm": x.norm, "q_weight": x.q_weight, "k_weight": x.k_weight, "norm_eps": x.norm_eps}
    if x.normaliser:
        state = None if x.kv is None or x.z is None else GdnState(x.kv, x.z)
        how |= norms | {"cos": x.cos, "sin": x.sin, "k_scale": x.k_scale, "initial_state": state}
        found = gdn_scan(*tokens, **how)
        return (found.out, found.denominator, *(found.state or (None, None)))
    if x.projection is None or x.projection_inverse is None:
        reads = cam_scan(*tokens, initial_state=x.kv, **how)
    else:
        positions = (x.projection, x.projection_inverse, x.cos, x.sin)
        how |= norms | {"discount": x.discount, "output_transform": False, "k_scale": x.k_scale}
        reads = cam_branch(*tokens, *positions, initial_state=x.kv, **how)
    return (reads.out, None, reads.state, None)


def reference_gradients(x: "Trained", kept: "Kept", differentiable: int) -> tuple[Tensor | None, ...]:
    """Gradients of the first arguments, None for those that are None."""
    given = dict(list(x._asdict().items())[:differentiable])
    leaves: dict[str, Any] = {name: y if y is None else y.detach().requires_grad_() for name, y in given.items()}
    with torch.enable_grad():
        results = _results(x._replace(**leaves))
    grads = (kept.numerator, kept.denominator, kept.final_kv, kept.final_z)
    pairs = [(y, grad) for y, grad in zip(results, grads, strict=True) if y is not None and grad is not None]
    wanted = [leaf for leaf in leaves.values() if leaf is not None]
    outputs, upstream = zip(*pairs, strict=True)
    found = iter(torch.autograd.grad(outputs, wanted, upstream, allow_unused=True, materialize_grads=True))
    return tuple(None if leaf is None else next(found) for leaf in leaves.values())
