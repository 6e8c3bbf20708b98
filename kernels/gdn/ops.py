"""The scan of the gated delta rule as a custom operator that launches Triton kernels."""

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.delta import Direction
from longtake.kernels.gdn.reference import Norm
from longtake.kernels.operators import operator, or_nothing
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import Activation, Positions, Scan
from longtake.kernels.scan.launch import Finish, States, launch
from longtake.kernels.scan.remember import Memory


class GdnArguments(NamedTuple):
    """Checked arguments of `gdn_scan`, flat; `cos` and `sin` as `pair_tables` gives them."""

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    norm: str
    q_weight: Tensor | None
    k_weight: Tensor | None
    norm_eps: float
    q_rms: Tensor | None
    k_rms: Tensor | None
    k_scale: float
    cos: Tensor | None
    sin: Tensor | None
    eps: float | None
    gate: Tensor | None
    kv: Tensor | None
    z: Tensor | None
    out_kv: Tensor | None
    out_z: Tensor | None
    slots: Tensor | None
    starts: Tensor | None
    reverse_q: Tensor | None
    reverse_k: Tensor | None
    reverse_v: Tensor | None
    reverse_beta: Tensor | None
    reverse_decay: Tensor | None
    reverse_q_rms: Tensor | None
    reverse_k_rms: Tensor | None
    direction: str
    apart: bool
    precision: str

    @property
    def fresh(self) -> bool:
        """Whether a state is made rather than written to."""
        return self.direction != "reverse" and self.out_kv is None

    @property
    def dtype(self) -> torch.dtype:
        """Of the reads."""
        return torch.float32 if self.eps is None else self.v.dtype


def _scan(x: GdnArguments) -> Scan:
    rms = None if x.q_rms is None or x.k_rms is None else (x.q_rms, x.k_rms)
    return Scan(
        x.q,
        x.k,
        x.v,
        x.beta,
        x.decay,
        Activation(cast(Norm, x.norm), (x.q_weight, x.k_weight), x.norm_eps, rms, relu=True, k_scale=x.k_scale),
        None if x.cos is None or x.sin is None else Positions((x.cos, x.sin), None),
        normaliser=True,
        discount=False,
        direction=cast(Direction, x.direction),
        precision=cast(Precision, x.precision),
    )


def _reverse(x: GdnArguments) -> GdnArguments:
    """What the reverse scan reads when it reads something else."""
    names = ("q", "k", "v", "beta", "decay", "q_rms", "k_rms")
    given = {name: getattr(x, f"reverse_{name}") for name in names}
    return x._replace(**{name: y for name, y in given.items() if y is not None}, direction="reverse")


def _memory(kv: Tensor | None, z: Tensor | None) -> Memory | None:
    return None if kv is None else Memory(kv, z)


Returned = tuple[Tensor, Tensor, Tensor, Tensor]


def _run(*arguments: Any) -> Returned:  # noqa: ANN401
    """Reads, denominator, KV and Z."""
    x = GdnArguments(*arguments)
    states = States(_memory(x.kv, x.z), _memory(x.out_kv, x.out_z), x.slots, x.starts)
    with on_device_of(x.q):
        found = launch(_scan(x), states, Finish(x.dtype, x.eps, x.gate), _scan(_reverse(x)) if x.apart else None)
    kv, z = found.state or (None, None)
    return found.out, or_nothing(found.denominator, x.q), or_nothing(kv, x.q), or_nothing(z, x.q)


def _fake(*arguments: Any) -> Returned:  # noqa: ANN401
    x = GdnArguments(*arguments)
    batch, _, heads, dim = x.q.shape
    denominator = x.q.new_empty(x.q.shape[:-1] if x.eps is None else (0,), dtype=torch.float32)
    kv = x.q.new_empty((batch, heads, dim, dim) if x.fresh else (0,), dtype=torch.float32)
    z = x.q.new_empty((batch, heads, dim) if x.fresh else (0,), dtype=torch.float32)
    return x.q.new_empty(x.q.shape, dtype=x.dtype), denominator, kv, z


gdn_scan = operator("gdn_scan", GdnArguments, ("out_kv", "out_z"), 4, _run, _fake)
