"""Triton kernels of the frame-wise gated delta rule with a normaliser; the reference says what they compute."""

from torch import Tensor

from longtake.kernels.delta import check_scan, check_tables, start_state
from longtake.kernels.gdn.reference import GdnState
from longtake.kernels.triton_absorb import absorb
from longtake.kernels.triton_read import read
from longtake.kernels.triton_remember import Memory, remember
from longtake.kernels.triton_scan import Scan, prepare
from longtake.kernels.triton_tiles import check_operands, dense


def _prepare(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, cos: Tensor | None, sin: Tensor | None
) -> Scan:
    check_scan(q, k, v, beta, decay)
    check_operands(q, k, v)
    check_tables(cos, sin, q)
    tables = None if cos is None or sin is None else (cos, sin)
    return prepare(q, k, v, beta, decay, tables, normaliser=True)


def _state(state: GdnState | None, scan: Scan, *, reverse: bool) -> Memory | None:
    if state is None:
        return None
    kv = start_state(state.kv, scan.kv_shape, scan.beta, reverse=reverse)
    return Memory(dense(kv), dense(start_state(state.z, scan.kv_shape[:-1], scan.beta, reverse=reverse)))


def _final(state: Memory | None) -> GdnState | None:
    if state is None:
        return None
    assert state.z is not None
    return GdnState(state.kv, state.z)


def gdn_scan(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    initial_state: GdnState | None = None,
    reverse: bool = False,
) -> tuple[Tensor, Tensor, GdnState | None]:
    """As `reference.gdn_scan`; q, k, v in fp32, bf16 or fp16, everything else and all results in fp32."""
    scan = _prepare(q, k, v, beta, decay, cos, sin)
    state = _state(initial_state, scan, reverse=reverse)
    boundaries, final = remember(scan, absorb(scan), state, "reverse" if reverse else "forward")
    numerator, denominator = read(scan, boundaries)
    assert denominator is not None
    return numerator, denominator, _final(final)


def gdn_bidirectional(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    decay: Tensor,
    *,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    initial_state: GdnState | None = None,
    eps: float,
) -> tuple[Tensor, GdnState]:
    """As `reference.gdn_bidirectional`, from one record of each frame and one read of q."""
    scan = _prepare(q, k, v, beta, decay, cos, sin)
    state = _state(initial_state, scan, reverse=False)
    boundaries, final = remember(scan, absorb(scan), state, "both")
    out, _ = read(scan, boundaries, eps)
    final_state = _final(final)
    assert final_state is not None
    return out, final_state
