"""One call of a scan: prepare, absorb, remember and read, in one direction or both."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from longtake.kernels.backend import BackendError
from longtake.kernels.checks import check_memory
from longtake.kernels.gdn.merge_triton import gdn_merge
from longtake.kernels.scan.absorb import absorb
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import Scan
from longtake.kernels.scan.prepare import Placed, prepare
from longtake.kernels.scan.read import read
from longtake.kernels.scan.remember import Memory, Snapshots, remember
from longtake.kernels.triton_tiles import ALIGNMENT, aligned, check_operands

TENSOR_CORES_OF_FP32 = (8, 0)
"""The first compute capability that multiplies bf16 and tf32."""


class States(NamedTuple):
    """Where the forward direction starts from and what takes its last memory; both empty in reverse.

    `out` None: a fresh [B,…]. With `slots` [B] both are pools. `starts` [C]: first frames of the chunks.
    """

    initial: Memory | None = None
    out: Memory | None = None
    slots: Tensor | None = None
    starts: Tensor | None = None


class Finish(NamedTuple):
    """What becomes of reads: the quotient with `eps`, times silu(gate); back into each token's ray frame; `dtype`."""

    dtype: torch.dtype = torch.float32
    eps: float | None = None
    gate: Tensor | None = None
    returned: bool = False


class Results(NamedTuple):
    """Reads [B,N,H,D], denominator [B,N,H] beside a numerator, and a fresh state where none was given to write to."""

    out: Tensor
    denominator: Tensor | None
    state: Memory | None


class Saved(NamedTuple):
    """What a forward pass leaves for its backward pass.

    Its tokens, P of every frame, what every frame read, the denominator [B,N,H]; with a discount the mean growth of
    every frame and its A.
    """

    placed: Placed
    transitions: Tensor
    snapshots: Snapshots
    denominator: Tensor | None
    growth: Tensor | None
    updates: Tensor | None


def check_device(precision: Precision, device: torch.device) -> None:
    """Raise `BackendError` where the GPU has no instructions for the precision."""
    if device.type != "cuda" or precision == "ieee":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < TENSOR_CORES_OF_FP32:
        raise BackendError(
            f"precision {precision!r} needs compute capability {TENSOR_CORES_OF_FP32}, {device} has {capability}"
        )


def launch(scan: Scan, states: States, finish: Finish, reverse: Scan | None = None) -> Results:
    """Run a scan; `reverse`, whose direction is that, is a scan of other inputs whose reads are added.

    Raises:
        ValueError: the kernels do not take the head dim, or the states overlap.
        BackendError: the GPU can not compute in this precision.
    """
    check_operands(scan.q, scan.k, scan.v)
    check_device(scan.precision, scan.q.device)
    check_memory(states.initial, states.out)
    if reverse is None:
        return run(scan, states, finish)[0]
    found, _ = run(scan._replace(direction="forward"), states, Finish())
    other, _ = run(reverse, States(starts=states.starts), Finish())
    return _added(found, other, finish)


def _added(one: Results, other: Results, finish: Finish) -> Results:
    """The sum of two fp32 reads, finished, with the state of the first."""
    if finish.eps is not None:
        reads = one.out, one.denominator, other.out, other.denominator
        return Results(gdn_merge(*reads, finish.gate, finish.eps, finish.dtype), None, one.state)
    if one.denominator is not None and other.denominator is not None:
        one.denominator.add_(other.denominator)
    return Results(one.out.add_(other.out), one.denominator, one.state)


def run(scan: Scan, states: States, finish: Finish, *, keep: bool = False) -> tuple[Results, Saved | None]:
    """One scan, and with `keep` what its backward pass needs; operands and device were checked."""
    scan, finish = ready(scan), based(finish)
    fresh = _empty_state(scan) if states.out is None and scan.direction != "reverse" else None
    final = based(states.out or fresh)
    operands = prepare(scan, keep=keep)
    records = absorb(scan, operands)
    snapshots = remember(
        scan,
        records,
        state=based(states.initial),
        final=final,
        slots=based(states.slots),
        into_slots=states.out is not None and states.slots is not None,
        starts=based(states.starts),
    )
    for given, written in zip(states.out or (), final or (), strict=False):
        if given is not None and given is not written:
            given.copy_(written)
    reads = read(scan, operands, snapshots, **finish._asdict())
    if operands.placed is None:
        return Results(*reads, fresh), None
    updates = records.updates if scan.discount else None
    saved = Saved(operands.placed, records.transitions, snapshots, reads[1], records.growth, updates)
    return Results(*reads, fresh), saved


def ready(scan: Scan) -> Scan:
    """The scan with every tensor as the kernels take it."""
    q, k, v = (aligned(x) for x in (scan.q, scan.k, scan.v))
    return Scan(q, k, v, *based(scan[3:]))


def _empty_state(scan: Scan) -> Memory:
    batch, heads, _ = scan.decay.shape
    kv = scan.q.new_empty((batch, heads, scan.dim, scan.dim), dtype=torch.float32)
    return Memory(kv, kv.new_empty(kv.shape[:-1]) if scan.normaliser else None)


def based(value: Any) -> Any:  # noqa: ANN401
    """The value with each dense tensor in its tuples copied unless it begins at a multiple of 16 bytes.

    Alignment decides how a kernel is compiled, and one compiled kernel must serve every slice.
    """
    if isinstance(value, Tensor):
        fits = value.is_contiguous() and value.data_ptr() % ALIGNMENT == 0
        return value if fits else value.clone(memory_format=torch.contiguous_format)
    if isinstance(value, tuple):
        parts = [based(x) for x in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return value
