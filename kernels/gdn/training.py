"""`gdn_scan` where a gradient is wanted: the kernels give numerator and denominator, PyTorch the rest."""

from typing import NamedTuple

import torch
from torch import Tensor

from longtake.kernels.backend import Backend
from longtake.kernels.delta import Direction, ScanInputs
from longtake.kernels.gdn.merge import gdn_merge_reference
from longtake.kernels.gdn.reference import GdnOutput, GdnState
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import Activation, Positions, Scan
from longtake.kernels.scan.remember import Memory
from longtake.kernels.scan.training import scan_with_gradient


class How(NamedTuple):
    """What holds for both directions; `starts` [C]: first frames of chunks; `backward`: backend of the gradients."""

    activation: Activation
    positions: Positions | None
    starts: Tensor | None
    precision: Precision
    backward: Backend | None


def _scan(x: ScanInputs, how: How, direction: Direction, state: GdnState | None) -> GdnOutput:
    """One call of the kernels."""
    scan = Scan(
        *x[:5],
        how.activation,
        how.positions,
        normaliser=True,
        discount=False,
        direction=direction,
        precision=how.precision,
    )
    first = None if state is None else Memory(*state)
    out, denominator, last = scan_with_gradient(scan, first, how.starts, how.backward or "triton")
    return GdnOutput(out, denominator, None if last is None or last.z is None else GdnState(last.kv, last.z))


def gdn_scan(
    inputs: ScanInputs,
    reverse: ScanInputs | None,
    how: How,
    direction: Direction,
    state: GdnState | None,
    slots: Tensor | None,
) -> GdnOutput:
    """Numerator [B,N,H,D], denominator [B,N,H] and fresh state; `reverse`: a reverse scan's own inputs."""
    if state is not None and slots is not None:
        state = GdnState(state.kv[slots], state.z[slots])
    if reverse is None:
        return _scan(inputs, how, direction, state)
    ahead, back = _scan(inputs, how, "forward", state), _scan(reverse, how, "reverse", None)
    assert ahead.denominator is not None
    assert back.denominator is not None
    return GdnOutput(ahead.out + back.out, ahead.denominator + back.denominator, ahead.state)


def finished(found: GdnOutput, eps: float | None, gate: Tensor | None, dtype: torch.dtype) -> GdnOutput:
    """With `eps` the quotient, times silu(gate), in that dtype."""
    if eps is None or found.denominator is None:
        return found
    out = gdn_merge_reference((found.out, found.denominator), eps=eps, gate=gate, dtype=dtype)
    return GdnOutput(out, None, found.state)
