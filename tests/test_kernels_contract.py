"""The scans as PyTorch operators: schema, fake kernels, compilation, and what they refuse."""

from collections.abc import Callable
from importlib import import_module

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, Shape, assert_same_bits, mapped, tensors
from scan_modes import SCANS, Arguments, draw, draw_state, run
from torch import Tensor

from longtake.kernels import GdnState, gdn_scan
from longtake.kernels.backend import BackendError
from longtake.kernels.checks import check_memory

ONE, TWO = Shape(1, 1, 1, 1, 16), Shape(2, 1, 1, 2, 16)
OPERATORS = {"gdn": ("gdn", "gdn_scan"), "cam": ("cam", "cam_scan"), "branch": ("cam", "cam_branch")}
MODES = {
    "gdn": ["both full weights turned state gated", "both given turned-own-doubled pool chunks others", "reverse"],
    "cam": ["both state chunks", "both pool chunks others", "reverse"],
    "branch": ["both weights state chunks", "forward given own pool unturned", "reverse bare ray-frame"],
}
EACH = [(name, features) for name, modes in MODES.items() for features in modes]
each_mode = pytest.mark.parametrize(("name", "features"), EACH)
each_scan = pytest.mark.parametrize("name", MODES)
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


def test_kernels_run_on_the_gpu_or_else_in_the_interpreter() -> None:
    from longtake.kernels.triton_tiles import INTERPRETED, rotate_pairs

    assert bool(INTERPRETED) is not GPU
    assert type(rotate_pairs).__name__ == ("JITFunction" if GPU else "InterpretedFunction")


def writing(x: Arguments) -> Arguments:
    """The same with an `out_state` that is no argument besides."""
    return x | {"out_state": mapped(torch.zeros_like, x["initial_state"])} if "initial_state" in x else x


@each_mode
def test_operators_are_registered_soundly(name: str, features: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, operator_name = OPERATORS[name]
    ops = import_module(f"longtake.kernels.{folder}.ops")
    operator, calls = getattr(ops, operator_name), []

    def heard(*arguments: object, writes: bool) -> object:
        calls.append((operator.into if writes else operator.fresh, arguments))
        return operator(*arguments, writes=writes)

    monkeypatch.setattr(ops, operator_name, heard)
    x = draw(name, ONE, BF16, features)
    run(name, writing(x) if "pool" in features else x)
    torch.library.opcheck(*calls[0])


COMPILERS = [("reference", "aot_eager"), ("triton", "aot_eager"), *[("triton", "inductor"), (None, "aot_eager")] * GPU]


@pytest.mark.parametrize(("backend", "compiler"), COMPILERS)
@each_mode
def test_scans_compile_without_a_break(name: str, features: str, backend: str | None, compiler: str) -> None:
    torch.compiler.reset()
    public, x = SCANS[name].public, draw(name, ONE, BF16, features)
    compiled = torch.compile(public, fullgraph=True, backend=compiler)
    assert_same_bits(tensors(compiled(**x, backend=backend)), tensors(public(**x, backend=backend)))


@each_scan
def test_a_compiled_scan_writes_its_state_in_place(name: str) -> None:
    public, x = SCANS[name].public, draw(name, ONE, BF16, MODES[name][0])
    expected = run(name, x)
    x |= {"out_state": x["initial_state"]}
    torch.compiler.reset()
    found = torch.compile(public, fullgraph=True, backend="aot_eager")(**x, backend="triton")
    assert_same_bits(tensors(found), expected)
    state = tensors(x["initial_state"])
    assert_same_bits(state, expected[-len(state) :])


@pytest.mark.parametrize("dim", [12, 136])
@each_scan
def test_head_dims_beyond_the_kernels_are_refused(name: str, dim: int) -> None:
    x = draw(name, ONE._replace(dim=dim), FP32, "forward")
    with pytest.raises(ValueError, match=r"head dim must be|q must be .* multiple of 8"):
        SCANS[name].public(**x, backend="triton")


@each_backend
@each_scan
def test_an_unknown_precision_is_refused(name: str, backend: str) -> None:
    with pytest.raises(BackendError, match="precision is one of"):
        SCANS[name].public(**draw(name, ONE, FP32, "forward"), precision="fp8", backend=backend)


@pytest.mark.parametrize(("capability", "refused"), [((7, 5), True), ((8, 0), False), ((9, 0), False)])
def test_a_precision_that_a_gpu_lacks_is_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from longtake.kernels.scan.launch import check_device

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    check_device("ieee", torch.device("cuda"))
    if refused:
        with pytest.raises(BackendError, match="'bf16' needs compute capability"):
            check_device("bf16", torch.device("cuda"))
    else:
        check_device("bf16", torch.device("cuda"))


@each_scan
def test_only_the_reference_takes_float64(name: str) -> None:
    x = draw(name, ONE, FP32, MODES[name][0])
    wide = mapped(lambda y: y.double() if y.is_floating_point() else y, x)
    for some in (wide, x | {"initial_state": wide["initial_state"]}, x | {"beta": wide["beta"]}):
        with pytest.raises(BackendError, match="float64"):
            SCANS[name].public(**some, backend="triton")
        assert all(y.isfinite().all() for y in tensors(SCANS[name].public(**some)))
    assert all(y.dtype == torch.float64 for y in tensors(SCANS[name].public(**wide)))


@pytest.mark.parametrize("dtype", [BF16, FP16])
@each_scan
def test_gates_may_be_of_any_float(name: str, dtype: torch.dtype) -> None:
    x = draw(name, TWO, FP32, "both")
    gates = {key: x[key].to(dtype) for key in ("beta", "decay")}
    assert_same_bits(run(name, x | gates), run(name, x | mapped(Tensor.float, gates)))


Change = Callable[[Arguments], Arguments]
MISFITS: dict[str, tuple[str, Change, str]] = {
    "direction": ("both", lambda x: {"direction": "backward"}, "direction is one of"),
    "short-k": ("both", lambda x: {"k": x["k"][:, 1:]}, "k must be"),
    "k-without-unit-stride": ("both", lambda x: {"k": x["k"].mT.contiguous().mT}, "k must have unit stride"),
    "v-elsewhere": ("both", lambda x: {"v": x["v"].to("meta")}, f"v must be on {DEVICE.type}"),
    "beta-of-other-tokens": ("both", lambda x: {"beta": torch.zeros(2, 2, 1, 3, device=DEVICE)}, "beta must be"),
    "decay-of-other-heads": ("both", lambda x: {"decay": x["decay"][:, 1:].contiguous()}, "decay must be"),
    "decay-not-contiguous": ("both", lambda x: {"decay": x["decay"].transpose(0, 1)}, "decay must be contiguous"),
    "state-in-reverse": ("reverse", lambda x: {"initial_state": x["initial_state"]}, "takes no initial_state"),
    "out-state-in-reverse": (
        "reverse",
        lambda x: {"initial_state": None, "out_state": x["initial_state"]},
        "takes no out_state",
    ),
    "state-of-one-row": ("both", lambda x: {"initial_state": mapped(lambda y: y[:1], x["initial_state"])}, "must be"),
    "state-in-bf16": ("both", lambda x: {"initial_state": mapped(Tensor.bfloat16, x["initial_state"])}, "must be"),
    "slots-of-int32": ("both", lambda x: {"slots": torch.tensor([0, 1], device=DEVICE).int()}, "slots must be one of"),
    "one-slot": ("both", lambda x: {"slots": torch.tensor([0], device=DEVICE)}, "slots must be"),
    "chunks-from-one": ("both", lambda x: {"chunk_starts": [1]}, "chunk_starts must rise from 0"),
    "chunks-of-int32": (
        "both",
        lambda x: {"chunk_starts": torch.tensor([0], device=DEVICE).int()},
        "chunk_starts must be one of",
    ),
}


@each_backend
@pytest.mark.parametrize("misfit", MISFITS)
@each_scan
def test_misfits_are_refused_by_name(name: str, misfit: str, backend: str) -> None:
    direction, change, message = MISFITS[misfit]
    x = draw(name, TWO, FP32, "state")
    with pytest.raises(ValueError, match=message):
        SCANS[name].public(**(x | {"direction": direction} | change(x)), backend=backend)


@pytest.mark.parametrize(
    ("name", "features"), [("gdn", ""), ("cam", ""), ("cam", "frame-beta"), ("branch", ""), ("branch", "frame-beta")]
)
@each_backend
def test_a_decay_of_too_many_frames_is_named(name: str, features: str, backend: str) -> None:
    x = draw(name, Shape(1, 2, 3, 1, 16), FP32, features)
    with pytest.raises(ValueError, match=r"decay must be \(1, 1, 2\) beside beta"):
        SCANS[name].public(**x | {"decay": torch.ones(1, 1, 6, device=DEVICE)}, backend=backend)


def rows_of_one_pool(name: str) -> tuple[object, object, object]:
    """Five rows of a state, the first two of them, and the last two but one."""
    pool = draw_state(TWO, 5)
    parts = pool if name == "gdn" else pool.kv
    return parts, mapped(lambda y: y[:2], parts), mapped(lambda y: y[1:3], parts)


@each_backend
@each_scan
def test_states_that_overlap_in_part_are_refused_and_not_written(name: str, backend: str) -> None:
    pool, initial, out = rows_of_one_pool(name)
    before = mapped(Tensor.clone, pool)
    x = draw(name, TWO, FP32, "both") | {"initial_state": initial, "out_state": out}
    with pytest.raises(ValueError, match="out_state may be initial_state itself or share no memory with it"):
        SCANS[name].public(**x, backend=backend)
    assert_same_bits(tensors(pool), tensors(before))


@each_backend
@each_scan
def test_states_may_be_neighbours_or_the_same_rows(name: str, backend: str) -> None:
    pool, initial, _ = rows_of_one_pool(name)
    x = draw(name, TWO, FP32, "both") | {"initial_state": initial}
    expected = tensors(SCANS[name].public(**x, backend=backend))
    for rows in (slice(2, 4), slice(0, 2)):
        x["out_state"] = mapped(lambda y, rows=rows: y[rows], pool)
        assert_same_bits(tensors(SCANS[name].public(**x, backend=backend)), expected)


@each_backend
def test_the_parts_of_a_state_share_no_memory(backend: str) -> None:
    x, (kv, z) = draw("gdn", TWO, FP32, "both"), draw_state(TWO)
    inside = kv.flatten()[-z.numel() :].view_as(z)
    with pytest.raises(ValueError, match="kv and z of out_state must share no memory"):
        gdn_scan(**x, out_state=GdnState(kv, inside), backend=backend)
    with pytest.raises(ValueError, match="out_state may be initial_state itself"):
        gdn_scan(**x, initial_state=GdnState(kv, inside), out_state=GdnState(kv, z), backend=backend)


def test_states_without_memory_do_not_overlap() -> None:
    initial, out = (mapped(lambda y: y.to("meta"), draw_state(TWO)) for _ in range(2))
    check_memory(initial, out)


NO_EPS = (-1e-8, float("nan"), float("inf"))
GDN_MISFITS: dict[str, tuple[Change, str]] = {
    "norm": (lambda x: {"norm": "layer"}, "norm is one of"),
    "weight-without-norm": (lambda x: {"q_weight": torch.ones(32, device=DEVICE)}, "q_weight needs a norm"),
    "inverse-rms-without-norm": (
        lambda x: {"inverse_rms": (torch.ones(2, 1, device=DEVICE),) * 2},
        "inverse_rms needs norm 'full'",
    ),
    "cos-without-sin": (lambda x: {"cos": torch.ones(1, 8, device=DEVICE)}, "together"),
    "short-tables": (lambda x: dict.fromkeys(("cos", "sin"), torch.ones(2, 8, device=DEVICE)), "cos must be"),
    "gate-without-eps": (lambda x: {"gate": x["v"]}, "gate needs eps"),
    "gate-of-another-shape": (lambda x: {"gate": x["v"][:1], "eps": 1.0}, "gate must be"),
    **{f"eps-of-{eps}": (lambda x, eps=eps: {"eps": eps}, "eps must be finite") for eps in NO_EPS},
    "kv-without-z": (
        lambda x: {"initial_state": x["initial_state"]._replace(z=None)},
        "kv and z of initial_state come together",
    ),
}


@each_backend
@pytest.mark.parametrize("misfit", GDN_MISFITS)
def test_misfits_of_the_gated_delta_rule_are_refused_by_name(misfit: str, backend: str) -> None:
    change, message = GDN_MISFITS[misfit]
    x = draw("gdn", TWO, FP32, "both state")
    with pytest.raises(ValueError, match=message):
        SCANS["gdn"].public(**(x | change(x)), backend=backend)


@pytest.mark.parametrize("eps", NO_EPS)
@each_backend
@pytest.mark.parametrize(("name", "features"), [("gdn", "both"), ("gdn", "both full"), ("branch", "both")])
def test_a_norm_refuses_an_eps_that_is_not_finite_or_negative(
    name: str, features: str, backend: str, eps: float
) -> None:
    with pytest.raises(ValueError, match="norm_eps must be finite and not negative"):
        SCANS[name].public(**draw(name, ONE, FP32, features), norm_eps=eps, backend=backend)
