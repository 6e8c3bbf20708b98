"""Gradients of the scans on the Triton kernels: as exact as eager PyTorch, only where wanted, the same every time."""

import gradients
import pytest
import torch
from kernel_checks import BF16, DEVICE, FP16, FP32, GPU, REAL, Shape, assert_as_good, assert_same_bits, mapped, name_of
from scan_modes import SCANS, Arguments, draw, draw_rms
from torch import Tensor

from longtake.kernels import BackendError, Precision
from longtake.kernels.scan import training

SMALL, TINY = Shape(1, 3, 7, 2, 16), Shape(1, 3, 2, 2, 16)
CASES: list[tuple[str, Shape, torch.dtype, Precision, str]] = [
    ("gdn", Shape(1, 1, 1, 47, 16), FP32, "ieee", "forward"),
    ("gdn", SMALL._replace(batch=2), FP32, "ieee", "both full weights turned-own state chunks"),
    ("gdn", Shape(1, 2, 7, 2, 32), BF16, "bf16", "both full weights turned state gated"),
    ("gdn", Shape(1, 3, 7, 1, 40), FP16, "bf16", "forward head k-weight turned-doubled state quotient"),
    ("gdn", Shape(1, 2, 17, 1, 56), BF16, "bf16-snapshot", "both full bf16-weights turned pool"),
    ("gdn", Shape(1, 5, 3, 1, 24), FP32, "tf32", "reverse full turned chunks"),
    ("gdn", SMALL, FP32, "ieee", "both full weights turned state chunks others"),
    ("cam", SMALL, FP32, "ieee", "both state chunks"),
    ("cam", Shape(1, 2, 33, 1, 40), BF16, "bf16", "both pool frame-beta"),
    ("cam", SMALL, FP16, "bf16", "both state chunks others"),
    ("branch", Shape(2, 3, 4, 2, 16), FP32, "ieee", "both weights state chunks frame-beta own"),
    ("branch", Shape(1, 2, 7, 1, 112), BF16, "bf16", "both weights state"),
    ("branch", SMALL, FP32, "tf32", "reverse bare chunks ray-frame unturned"),
    ("branch", SMALL, FP16, "bf16", "forward head weights state raw-beta"),
]
if GPU:
    CASES += [
        (name, REAL._replace(frames=frames), dtype, precision, features)
        for name, features in (
            ("gdn", "both full weights turned state gated"),
            ("gdn", "forward head weights turned state"),
            ("branch", "both weights state"),
            ("cam", "both state chunks"),
        )
        for frames in (3, 11)
        for dtype, precision in ((BF16, "bf16"), (FP32, "ieee"))
    ]
EVERYTHING = {
    "gdn": "both full weights turned state chunks gated",
    "cam": "both state chunks",
    "branch": "both weights state chunks",
}
each_scan = pytest.mark.parametrize("name", SCANS)
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


def wanted(found: dict[str, Tensor], truth: dict[str, Tensor]) -> tuple[Tensor, ...]:
    return tuple(found[key].contiguous() for key in truth)


@pytest.mark.parametrize(("name", "shape", "dtype", "precision", "features"), CASES, ids=name_of)
def test_gradients_are_as_exact_as_those_of_eager_pytorch(
    name: str, shape: Shape, dtype: torch.dtype, precision: Precision, features: str
) -> None:
    x = draw(name, shape, dtype, features)
    truth = gradients.true(name, x)
    ours, eager = gradients.run(name, x, precision), gradients.eager(name, x, precision)
    assert ours.keys() == truth.keys()
    assert_as_good(*(wanted(found, truth) for found in (ours, eager, truth)))


@each_scan
def test_the_reference_can_go_back_alone(name: str) -> None:
    x = draw(name, SMALL, FP32, EVERYTHING[name])
    truth = gradients.true(name, x)
    ours = gradients.run(name, x, "ieee", backward="reference")
    assert_as_good(*(wanted(found, truth) for found in (ours, gradients.eager(name, x, "ieee"), truth)))


@each_scan
def test_a_second_run_has_the_same_bits(name: str) -> None:
    x = draw(name, TINY, BF16, EVERYTHING[name])
    one, other = (gradients.run(name, x, "bf16") for _ in range(2))
    assert_same_bits(tuple(one.values()), tuple(other.values()))


def row(x: Arguments, batch: int, entry: int) -> Arguments:
    """One entry of the batch."""
    return mapped(lambda y: y[entry : entry + 1] if y.ndim > 1 and y.shape[0] == batch else y, x)


@each_scan
def test_an_entry_of_a_batch_has_the_gradients_of_a_run_of_its_own(name: str) -> None:
    features = EVERYTHING[name].replace("turned", "turned-own").replace("gated", "")
    x = draw(name, TINY._replace(batch=2), BF16, features)
    together = gradients.gradients(name, x, backend="triton")
    for entry in range(2):
        alone = gradients_of_entry(name, x, entry)
        shared = [key for key in alone if not key.endswith("weight")]
        assert_same_bits(tuple(together[key][entry : entry + 1] for key in shared), tuple(alone[key] for key in shared))


def gradients_of_entry(name: str, x: Arguments, entry: int) -> dict[str, Tensor]:
    """As in the batch, with what came back to that entry there."""
    given = gradients.leaves(row(x, 2, entry))
    results = gradients.tensors(SCANS[name].public(**given, backend="triton"))
    back = [gradients.random(90 + i, 2, *y.shape[1:]).to(y.dtype) for i, y in enumerate(results)]
    torch.autograd.backward(results, [y[entry : entry + 1] for y in back])
    found = {key: y for part, value in given.items() for key, y in gradients.named(value, part).items()}
    return {key: y.grad for key, y in found.items() if y.grad is not None}


@each_scan
def test_the_first_frame_of_a_reverse_scan_is_absorbed_by_nobody(name: str) -> None:
    x = draw(name, SMALL, FP32, "reverse")
    if name == "branch":
        x |= {"norm": "none"}
    found = gradients.run(name, x, "ieee")
    first = slice(0, SMALL.per_frame)
    assert not found["k"][:, first].any()
    assert not found["v"][:, first].any()
    assert not found["beta"][:, :, 0].any()
    assert not found["decay"][:, :, 0].any()
    assert found["v"][:, SMALL.per_frame :].any()


def test_a_decay_of_zero_has_a_gradient() -> None:
    x = draw("gdn", SMALL, FP32, "both state")
    x["decay"][:, :, 1] = 0
    truth = gradients.true("gdn", x)
    ours, eager = gradients.run("gdn", x, "ieee"), gradients.eager("gdn", x, "ieee")
    assert truth["decay"][:, :, 1].any()
    assert_as_good(*(wanted(found, truth) for found in (ours, eager, truth)))


@pytest.mark.parametrize("only", ["q", "v", "beta", "decay", "initial_state"])
def test_gradients_come_only_where_they_are_wanted(only: str) -> None:
    x = draw("gdn", TINY, FP32, "both full turned state gated")
    every = gradients.gradients("gdn", x, backend="triton", precision="ieee")
    given = {name: y if name != only else mapped(lambda z: z.clone().requires_grad_(), y) for name, y in x.items()}
    results = gradients.tensors(SCANS["gdn"].public(**given, backend="triton", precision="ieee"))
    torch.autograd.backward(results, [gradients.random(90 + i, *y.shape).to(y.dtype) for i, y in enumerate(results)])
    for key, y in gradients.named(given[only], only).items():
        assert torch.equal(y.grad, every[key])


@pytest.mark.parametrize("result", range(4))
def test_what_nothing_comes_back_to_counts_as_zero(result: int) -> None:
    x = draw("gdn", TINY, FP32, "both full turned state")
    grads = []
    for how in ({"backend": "triton", "precision": "ieee"}, {"backend": "reference"}):
        given = gradients.leaves(x)
        gradients.tensors(SCANS["gdn"].public(**given, **how))[result].square().sum().backward()
        grads.append((given["v"].grad, given["k"].grad, given["decay"].grad))
    for ours, theirs in zip(*grads, strict=True):
        if theirs is None or not theirs.any():
            assert ours is None or not ours.any()
        else:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


GIVEN = [("gdn", "both given"), ("gdn", "both full others"), ("branch", "given")]


@each_backend
@pytest.mark.parametrize(("name", "features"), GIVEN)
def test_an_inverse_rms_is_refused_where_a_gradient_is_wanted(name: str, features: str, backend: str) -> None:
    x = draw(name, TINY, FP32, features)
    if "reverse" in x:
        x["reverse"] = x["reverse"]._replace(inverse_rms=draw_rms(TINY))
    x["q"].requires_grad_()
    with pytest.raises(ValueError, match="inverse_rms is given where a gradient is wanted"):
        SCANS[name].public(**x, backend=backend)
    with torch.no_grad():
        SCANS[name].public(**x, backend=backend)


@each_backend
@each_scan
def test_an_out_state_is_refused_where_a_gradient_is_wanted(name: str, backend: str) -> None:
    x = draw(name, TINY, FP32, "both state")
    x |= {"q": x["q"].requires_grad_(), "out_state": mapped(torch.zeros_like, x["initial_state"])}
    with pytest.raises(ValueError, match="out_state is written in place"):
        SCANS[name].public(**x, backend=backend)
    assert not any(y.any() for y in gradients.tensors(x["out_state"]))


def test_gradients_of_tables_come_from_the_reference_alone() -> None:
    x = draw("gdn", TINY, FP32, "both full turned state")
    x["cos"].requires_grad_()
    for backward in (None, "reference"):
        with pytest.raises(BackendError, match="they give no gradient"):
            SCANS["gdn"].public(**x, backend="triton", backward=backward)
    SCANS["gdn"].public(**x, backward="reference").out.sum().backward()
    assert x["cos"].grad is not None


@each_scan
def test_a_backward_that_there_is_not_is_refused(name: str) -> None:
    x = draw(name, TINY, FP32, "forward")
    with pytest.raises(BackendError, match="'cuda'"):
        SCANS[name].public(**x, backward="cuda")
    with pytest.raises(BackendError, match="goes with the Triton kernels"):
        SCANS[name].public(**x, backend="reference", backward="triton")


def operator_arguments(monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[object, ...]]:
    """What a scan with a gradient calls its operators with: forward, backward."""
    calls: list[tuple[object, ...]] = []
    for operator in ("_scan_with_gradient", "_scan_backward"):
        original = getattr(training, operator)

        def record(*arguments: object, original: object = original) -> object:
            calls.append(arguments)
            return original(*arguments)

        monkeypatch.setattr(training, operator, record)
    gradients.gradients(name, draw(name, TINY, FP32, EVERYTHING[name]), backend="triton")
    monkeypatch.undo()
    return calls


@each_scan
def test_the_operators_keep_their_promises(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = operator_arguments(monkeypatch, name)
    plain = tuple(y.detach() if isinstance(y, Tensor) else y for y in backward)
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(training._scan_with_gradient, forward, test_utils=tests)
    torch.library.opcheck(training._scan_backward, plain, test_utils=tests[:2])


@each_scan
def test_what_is_kept_changes_no_bit_and_the_reference_keeps_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = training.Trained(*operator_arguments(monkeypatch, name)[0])
    for_kernels, for_reference = (given._replace(backward=backward) for backward in ("triton", "reference"))
    kept, bare = (training._scan_with_gradient(*x) for x in (for_kernels, for_reference))
    assert_same_bits(kept[: training.RESULTS], bare[: training.RESULTS])
    assert not any(y.numel() for y in bare[training.RESULTS :])
    torch.library.opcheck(training._scan_with_gradient, for_reference, test_utils="test_faketensor")


SELDOM = [("gdn", "both full turned others"), ("cam", "both state others"), ("branch", "both bare unturned pool")]


@pytest.mark.parametrize(("name", "features"), [*EVERYTHING.items(), *SELDOM])
def test_a_compiled_training_step_has_the_bits_of_an_eager_one(name: str, features: str) -> None:
    x = draw(name, TINY, FP32, features)

    def step(given: Arguments) -> Tensor:
        found = SCANS[name].public(**given, backend="triton", precision="ieee")
        return torch.stack([y.square().sum() for y in gradients.tensors(found)]).sum()

    torch.compiler.reset()
    grads = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        given = gradients.leaves(x)
        function(given).backward()
        grads.append(tuple(y.grad for part in given.values() for y in gradients.named(part, "x").values()))
    assert len(grads[0]) >= 5
    assert_same_bits(*grads)


def test_autocast_changes_nothing() -> None:
    x = draw("gdn", TINY, FP32, "both full turned")
    plain = gradients.gradients("gdn", x, backend="triton", precision="ieee")
    with torch.autocast(DEVICE.type, BF16):
        cast = gradients.gradients("gdn", x, backend="triton", precision="ieee")
    assert_same_bits(tuple(plain.values()), tuple(cast.values()))
