"""A scan with a gradient, as a custom operator: numerator, denominator and final state, no more.

Quotients, gates, ray frames and sums of two scans are left to PyTorch and its autograd.
"""

from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from longtake.kernels.backend import on_device_of
from longtake.kernels.operators import or_nothing, reference_gradients, refuse_second_gradient, schema
from longtake.kernels.scan.backward.launch import Upstream, scan_gradients
from longtake.kernels.scan.configurations import Precision
from longtake.kernels.scan.inputs import Activation, Direction, Norm, Positions, Scan
from longtake.kernels.scan.launch import Finish, Results, Saved, States, check_device, ready, run
from longtake.kernels.scan.prepare import Placed
from longtake.kernels.scan.remember import Memory, Snapshots
from longtake.kernels.scan.training_reference import reference_results
from longtake.kernels.triton_tiles import aligned, check_operands


class Trained(NamedTuple):
    """Checked arguments of a scan with a gradient, flat; `cos` and `sin` as tables of pairs.

    `rounded`: the numerator is in the dtype of v, not in fp32. `backward`: a backend.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    decay: Tensor
    q_weight: Tensor | None
    k_weight: Tensor | None
    kv: Tensor | None
    z: Tensor | None
    cos: Tensor | None
    sin: Tensor | None
    projection: Tensor | None
    projection_inverse: Tensor | None
    starts: Tensor | None
    norm: str
    norm_eps: float
    relu: bool
    k_scale: float
    normaliser: bool
    discount: bool
    direction: str
    precision: str
    rounded: bool
    backward: str

    @property
    def differentiable(self) -> tuple[Tensor | None, ...]:
        """The first arguments, which have a gradient."""
        return self.q, self.k, self.v, self.beta, self.decay, self.q_weight, self.k_weight, self.kv, self.z

    @property
    def dtype(self) -> torch.dtype:
        """Of the numerator."""
        return self.v.dtype if self.rounded else torch.float32


class Kept(NamedTuple):
    """What a backward pass is given beside the arguments; gradients are None where nothing came, the others empty."""

    placed_q: Tensor
    placed_k: Tensor
    placed_v: Tensor
    q_rms: Tensor
    k_rms: Tensor
    slope: Tensor
    along: Tensor
    transitions: Tensor
    snapshots: Tensor
    z_snapshots: Tensor
    growth: Tensor
    updates: Tensor
    read_denominator: Tensor
    numerator: Tensor | None
    denominator: Tensor | None
    final_kv: Tensor | None
    final_z: Tensor | None


DIFFERENTIABLE, RESULTS, SAVED = 9, 4, Kept._fields.index("read_denominator")
"""How many of the first arguments have a gradient; what the operator returns: results, and what the kernels save."""

Layout = tuple[tuple[int, ...], torch.dtype] | None
"""Of a result: shape and dtype; None where there is none."""


def _scan(x: Trained) -> Scan:
    positions = None
    if x.cos is not None and x.sin is not None:
        matrices = None
        if x.projection is not None and x.projection_inverse is not None:
            matrices = (x.projection, x.projection_inverse)
        positions = Positions((x.cos, x.sin), matrices)
    weights = (x.q_weight, x.k_weight)
    activation = Activation(cast(Norm, x.norm), weights, x.norm_eps, None, relu=x.relu, k_scale=x.k_scale)
    direction, precision = cast(Direction, x.direction), cast(Precision, x.precision)
    tokens = (x.q, x.k, x.v, x.beta, x.decay)
    return Scan(*tokens, activation, positions, x.normaliser, x.discount, direction, precision)


def _memory(kv: Tensor | None, z: Tensor | None) -> Memory | None:
    return None if kv is None else Memory(kv, z)


def _run(*arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Numerator, denominator, KV, Z, and what is saved."""
    x = Trained(*arguments)
    check_operands(x.q, x.k, x.v)
    check_device(cast(Precision, x.precision), x.q.device)
    states, keep = States(_memory(x.kv, x.z), starts=x.starts), x.backward != "reference"
    with on_device_of(x.q):
        found, saved = run(_scan(x), states, Finish(x.dtype), keep=keep)
    kept = (None,) * SAVED if saved is None else _flat(saved, camera=x.projection is not None)
    results = (found.out, found.denominator, *(found.state or (None, None)), *kept)
    return tuple(or_nothing(y, found.out) for y in results)


def _flat(saved: Saved, *, camera: bool) -> tuple[Tensor | None, ...]:
    """Without the denominator, which is a result. `camera`: values are placed, and not those that were given."""
    placed = saved.placed
    v = placed.v.transpose(1, 2) if camera else None
    tokens = (placed.q, placed.k, v, *(placed.rms or (None, None)), placed.slope, placed.along)
    return *tokens, saved.transitions, *saved.snapshots, saved.growth, saved.updates


def _saved(x: Trained, scan: Scan, kept: Kept) -> Saved:
    v = scan.v if x.projection is None else kept.placed_v.transpose(1, 2)
    rms = (kept.q_rms, kept.k_rms) if x.norm == "full" else None
    slope, along, growth, updates = (kept.slope, kept.along, kept.growth, kept.updates) if x.discount else (None,) * 4
    return Saved(
        Placed(kept.placed_q, kept.placed_k, v, rms, slope, along),
        kept.transitions,
        Snapshots(kept.snapshots, kept.z_snapshots if x.normaliser else None),
        kept.read_denominator if x.normaliser else None,
        growth,
        updates,
    )


def _fake(*arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    x = Trained(*arguments)
    scan = _scan(x)
    kept = [None] * SAVED if x.backward == "reference" else _saved_layouts(x, scan)
    layouts = (each or ((0,), torch.float32) for each in (*_result_layouts(x), *kept))
    return tuple(x.q.new_empty(shape, dtype=dtype) for shape, dtype in layouts)


def _result_layouts(x: Trained) -> list[Layout]:
    batch, count, heads, dim = x.q.shape
    fp32, forward = torch.float32, x.direction != "reverse"
    return [
        (x.q.shape, x.dtype),
        ((batch, count, heads), fp32) if x.normaliser else None,
        ((batch, heads, dim, dim), fp32) if forward else None,
        ((batch, heads, dim), fp32) if forward and x.normaliser else None,
    ]


def _saved_layouts(x: Trained, scan: Scan) -> list[Layout]:
    batch, count, heads, dim = x.q.shape
    fp32, config, frames = torch.float32, scan.configuration, scan.memories * scan.frames
    tokens, read = ((batch, heads, count, dim), config.operand), (scan.directions, scan.memories, scan.frames, dim)
    rms = ((batch, count), fp32) if x.norm == "full" else None
    return [
        tokens,
        tokens,
        None if x.projection is None else tokens,
        rms,
        rms,
        (x.k.shape, scan.between(1)) if x.discount else None,
        ((batch, heads, count), fp32) if x.discount else None,
        ((frames, 1 + x.normaliser, dim, dim), config.operand),
        ((*read, dim), torch.bfloat16 if config.bf16_snapshots else fp32),
        (read, fp32) if x.normaliser else None,
        (x.decay.shape, fp32) if x.discount else None,
        ((frames, dim + x.normaliser, dim), fp32) if x.discount else None,
    ]


def _zeros_unless(grad: Tensor | None, like: Tensor, *shape: int) -> Tensor:
    """A gradient as the kernels take it, contiguous; zeros in fp32 where none came."""
    return like.new_zeros(shape, dtype=torch.float32) if grad is None else grad.contiguous()


def _upstream(x: Trained, kept: Kept) -> Upstream:
    batch, _, heads, dim = x.q.shape
    numerator = aligned(_zeros_unless(kept.numerator, x.q, *x.q.shape))
    denominator = _zeros_unless(kept.denominator, x.q, *x.q.shape[:-1]) if x.normaliser else None
    if kept.final_kv is None and kept.final_z is None:
        return Upstream(numerator, denominator, None)
    kv = _zeros_unless(kept.final_kv, x.q, batch, heads, dim, dim)
    z = _zeros_unless(kept.final_z, x.q, batch, heads, dim) if x.normaliser else None
    return Upstream(numerator, denominator, Memory(kv, z))


def _kernel_gradients(x: Trained, kept: Kept) -> tuple[Tensor | None, ...]:
    """Of the differentiable arguments, by the kernels."""
    scan, state = ready(_scan(x)), _memory(x.kv, x.z)
    with on_device_of(x.q):
        found = scan_gradients(scan, _saved(x, scan, kept), _upstream(x, kept), state=state, starts=x.starts)
    states = (None, None) if x.kv is None or found.state is None else found.state
    return (*found[:7], *states)


def _run_backward(*arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    """Gradients of the differentiable arguments."""
    x, kept = Trained(*arguments[: len(Trained._fields)]), Kept(*arguments[len(Trained._fields) :])
    return tuple(or_nothing(grad, x.decay) for grad in _kernel_gradients(x, kept))


def _fake_backward(*arguments: Any) -> tuple[Tensor, ...]:  # noqa: ANN401
    given = arguments[:DIFFERENTIABLE]
    return tuple(arguments[4].new_empty(0) if y is None else torch.empty_like(y).contiguous() for y in given)


_scan_with_gradient = torch.library.custom_op(
    "longtake::scan_with_gradient", _run, schema=schema([Trained], (), RESULTS + SAVED), mutates_args=()
)
_scan_backward = torch.library.custom_op(
    "longtake::scan_backward", _run_backward, schema=schema([Trained, Kept], (), DIFFERENTIABLE), mutates_args=()
)
_scan_with_gradient.register_fake(_fake)
_scan_backward.register_fake(_fake_backward)
refuse_second_gradient(_scan_backward)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:  # noqa: ANN401
    x, saved = Trained(*inputs), (*output[RESULTS:], output[1])
    tensors = [y for y in x if isinstance(y, Tensor)]
    ctx.save_for_backward(*tensors, *saved)
    ctx.others = [None if isinstance(y, Tensor) else (y,) for y in x]
    ctx.mark_non_differentiable(*output[RESULTS:])
    ctx.set_materialize_grads(False)


def _reference(x: Trained, *differentiable: Any) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    """The results of the reference on other differentiable arguments."""
    return reference_results(Trained(*differentiable, *x[DIFFERENTIABLE:]))


def _hand_back(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:  # noqa: ANN401
    tensors = iter(ctx.saved_tensors)
    x = Trained(*(next(tensors) if other is None else other[0] for other in ctx.others))
    kept = Kept(*tensors, *grads[:RESULTS])
    wanted = ctx.needs_input_grad[:DIFFERENTIABLE]
    if x.backward == "reference":
        found = reference_gradients(partial(_reference, x), x.differentiable, grads[:RESULTS], wanted)
    else:
        found = _scan_backward(*x, *kept)
    given = (grad if want else None for grad, want in zip(found, wanted, strict=True))
    return (*given, *[None] * (len(x) - DIFFERENTIABLE))


_scan_with_gradient.register_autograd(_hand_back, setup_context=_keep)


def scan_with_gradient(
    scan: Scan, state: Memory | None, starts: Tensor | None, backward: str, *, rounded: bool = False
) -> Results:
    """Numerator, denominator and fresh final state of a scan, fp32, which autograd follows.

    `scan`: checked, without an inverse RMS; `starts` [C]: first frames of chunks; `rounded`: the numerator comes in the
    dtype of v; `backward`: backend of its gradients.
    """
    activation, positions = scan.activation, scan.positions
    kv, z = state or (None, None)
    weights, matrices = activation.weights, (positions and positions.matrices) or (None, None)
    tables = positions.tables if positions else (None, None)
    norm = (activation.norm, activation.eps, activation.relu, activation.k_scale)
    how = (scan.normaliser, scan.discount, scan.direction, scan.precision, rounded, backward)
    out, denominator, last_kv, last_z, *_ = _scan_with_gradient(
        *scan[:5], *weights, kv, z, *tables, *matrices, starts, *norm, *how
    )
    memory = Memory(last_kv, last_z if scan.normaliser else None)
    return Results(out, denominator if scan.normaliser else None, None if scan.direction == "reverse" else memory)
