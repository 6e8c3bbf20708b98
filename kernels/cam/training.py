"""Camera scan and branch where a gradient is wanted: the kernels give the reads, PyTorch what becomes of them."""

from typing import NamedTuple

from torch import Tensor

from longtake.kernels.backend import Backend
from longtake.kernels.cam.prepare_ops import camera_tables
from longtake.kernels.cam.reference import CamOutput
from longtake.kernels.delta import Direction, ScanInputs
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import PLAIN, Activation, Positions, Scan
from longtake.kernels.scan.remember import Memory
from longtake.kernels.scan.training import scan_with_gradient

__all__ = ["Walk", "cam_branch", "cam_scan", "camera_tables"]


class Walk(NamedTuple):
    """How the frames are walked over; `state` [B,H,D,D], or a pool with `slots` [B]; `starts` [C] of chunks."""

    direction: Direction
    state: Tensor | None
    slots: Tensor | None
    starts: Tensor | None
    precision: Precision
    backward: Backend | None


def cam_branch(
    x: ScanInputs,
    activation: Activation,
    positions: Positions | None,
    walk: Walk,
    *,
    discount: bool = False,
    rounded: bool = False,
) -> CamOutput:
    """Reads [B,N,H,D] in the ray frame and fresh state, from raw q, k, v or, as they are, prepared ones.

    Reads are fp32, or `rounded` to the dtype of v.
    """
    scan = Scan(
        *x[:5],
        activation,
        positions,
        normaliser=False,
        discount=discount,
        direction=walk.direction,
        precision=walk.precision,
    )
    state = walk.state if walk.state is None or walk.slots is None else walk.state[walk.slots]
    first = None if state is None else Memory(state, None)
    out, _, last = scan_with_gradient(scan, first, walk.starts, walk.backward or "triton", rounded=rounded)
    return CamOutput(out, None if last is None else last.kv)


def cam_scan(inputs: ScanInputs, reverse: ScanInputs | None, walk: Walk) -> CamOutput:
    """Reads [B,N,H,D] fp32 and fresh state; `reverse`: a reverse scan's own inputs."""
    if reverse is None:
        return cam_branch(inputs, PLAIN, None, walk)
    ahead = cam_branch(inputs, PLAIN, None, walk._replace(direction="forward"))
    back = cam_branch(reverse, PLAIN, None, walk._replace(direction="reverse", state=None))
    return CamOutput(ahead.out + back.out, ahead.state)
