"""Camera scan and camera branch as custom operators that launch Triton kernels."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.cam.prepare_ops import camera_tables
from longtake.kernels.delta import Direction
from longtake.kernels.gdn.reference import Norm
from longtake.kernels.operators import operator, or_nothing
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import PLAIN, Activation, Positions, Scan
from longtake.kernels.scan.launch import Finish, Results, States, launch
from longtake.kernels.scan.remember import Memory


class ScanArguments(NamedTuple):
    """Checked arguments of `cam_scan`, flat."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    initial_state: Tensor | None
    out_state: Tensor | None
    slots: Tensor | None
    starts: Tensor | None
    reverse_q: Tensor | None
    reverse_k: Tensor | None
    reverse_v: Tensor | None
    reverse_beta: Tensor | None
    reverse_decay: Tensor | None
    direction: str
    apart: bool
    precision: str


class BranchArguments(NamedTuple):
    """Checked arguments of `cam_branch`, flat; `cos` and `sin` as `pair_tables` gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    projection: Tensor
    projection_inverse: Tensor
    cos: Tensor | None
    sin: Tensor | None
    norm: str
    q_weight: Tensor | None
    k_weight: Tensor | None
    norm_eps: float
    q_rms: Tensor | None
    k_rms: Tensor | None
    k_scale: float
    initial_state: Tensor | None
    out_state: Tensor | None
    slots: Tensor | None
    starts: Tensor | None
    direction: str
    discount: bool
    output_transform: bool
    precision: str


Arguments = ScanArguments | BranchArguments


def _states(x: Arguments) -> States:
    initial, out = (None if state is None else Memory(state, None) for state in (x.initial_state, x.out_state))
    return States(initial, out, x.slots, x.starts)


def _prepared_scan(x: ScanArguments) -> Scan:
    return Scan(
        x.q,
        x.k,
        x.v,
        x.beta,
        x.decay,
        PLAIN,
        None,
        normaliser=False,
        discount=False,
        direction=cast(Direction, x.direction),
        precision=cast(Precision, x.precision),
    )


def _reverse(x: ScanArguments) -> ScanArguments:
    """What the reverse scan reads when it reads something else."""
    given = {name: getattr(x, f"reverse_{name}") for name in ("q", "k", "v", "beta", "decay")}
    return x._replace(**{name: y for name, y in given.items() if y is not None}, direction="reverse")


def _branch(x: BranchArguments) -> Scan:
    rms = None if x.q_rms is None or x.k_rms is None else (x.q_rms, x.k_rms)
    return Scan(
        x.q,
        x.k,
        x.v,
        x.beta,
        x.decay,
        Activation(cast(Norm, x.norm), (x.q_weight, x.k_weight), x.norm_eps, rms, relu=True, k_scale=x.k_scale),
        Positions(camera_tables(x.cos, x.sin, x.q), (x.projection, x.projection_inverse)),
        normaliser=False,
        discount=x.discount,
        direction=cast(Direction, x.direction),
        precision=cast(Precision, x.precision),
    )


def _returned(found: Results) -> tuple[Tensor, Tensor]:
    return found.out, or_nothing(None if found.state is None else found.state.kv, found.out)


def _fake(x: Arguments, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    batch, _, heads, dim = x.q.shape
    fresh = x.direction != "reverse" and x.out_state is None
    state = x.q.new_empty((batch, heads, dim, dim) if fresh else (0,), dtype=torch.float32)
    return x.q.new_empty(x.q.shape, dtype=dtype), state


def _run_scan(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    x = ScanArguments(*arguments)
    reverse = _prepared_scan(_reverse(x)) if x.apart else None
    with on_device_of(x.q):
        return _returned(launch(_prepared_scan(x), _states(x), Finish(), reverse))


def _fake_scan(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    return _fake(ScanArguments(*arguments), torch.float32)


def _run_branch(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    x = BranchArguments(*arguments)
    with on_device_of(x.q):
        return _returned(launch(_branch(x), _states(x), Finish(x.v.dtype, returned=x.output_transform)))


def _fake_branch(*arguments: Any) -> tuple[Tensor, Tensor]:  # noqa: ANN401
    x = BranchArguments(*arguments)
    return _fake(x, x.v.dtype)


cam_scan = operator("cam_scan", ScanArguments, ("out_state",), 2, _run_scan, _fake_scan)
cam_branch = operator("cam_branch", BranchArguments, ("out_state",), 2, _run_branch, _fake_branch)
