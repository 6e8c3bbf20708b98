"""TTT-linear as PyTorch operators: schema, gradients where they are asked for, compilation, and what is refused."""

import pytest
import torch
from kernel_checks import BF16, DEVICE, assert_same_bits, poisoned_memory
from torch import Tensor
from ttt_cases import DIFFERENTIABLE, Arguments, Case, differentiated, draw, itself, run

from longtake.kernels import backend as kernel_backend
from longtake.kernels import ttt_linear
from longtake.kernels.backend import BackendError
from longtake.kernels.ttt import ops

SMALL = Case(16, tokens=18)
PACK = Case(16, lengths=(0, 3, 17))
each_case = pytest.mark.parametrize("case", [SMALL, PACK], ids=["batch", "pack"])
each_backend = pytest.mark.parametrize("backend", ["reference", "triton"])


def flat(x: Arguments) -> tuple[object, ...]:
    """Arguments of the custom operators, up to chunk_size."""
    names = (*DIFFERENTIABLE, "cu_seqlens")
    return *(x.get(name) for name in names), 0.25, 1e-6, x["chunk_size"]


def wanting(x: Arguments, *names: str) -> Arguments:
    return x | {name: x[name].detach().requires_grad_() for name in names}


@pytest.mark.parametrize(("case", "states"), [(SMALL, False), (PACK, True)], ids=["batch", "pack"])
def test_operators_are_registered_soundly(case: Case, states: bool) -> None:
    x = draw(case._replace(dtype=BF16), states=states)
    arguments = flat(wanting(x, *(name for name in DIFFERENTIABLE if name in x)))
    torch.library.opcheck(ops.ttt_scan, (*arguments, False, False))
    with torch.no_grad():
        out, state, bias = ops.ttt_scan(*arguments, False, False)
        torch.library.opcheck(ops.ttt_scan, (*arguments, True, False))
    wanted = [y is not None for y in arguments[:8]]
    plain = flat(x)
    torch.library.opcheck(ops.ttt_scan_backward, (*plain, out, state, None, wanted))
    torch.library.opcheck(ops.ttt_scan_backward, (*plain, None, None, bias, [False] * 7 + [states]))


@pytest.mark.parametrize("wanted", [("q",), ("eta", "v"), ("w",), ("initial_state",), ("k", "initial_state_bias")])
@pytest.mark.parametrize("backward", [None, "reference"])
def test_gradients_come_where_they_are_asked_for(wanted: tuple[str, ...], backward: str | None) -> None:
    x = draw(SMALL)
    every = dict(zip(DIFFERENTIABLE, differentiated(x, cotangents=itself, backward=backward)[3:], strict=True))
    asked = wanting(x, *wanted)
    found = run(asked, backward=backward)
    with poisoned_memory():
        torch.autograd.backward(found, itself(found))
    assert_same_bits(tuple(asked[name].grad for name in wanted), tuple(every[name] for name in wanted))


@pytest.mark.parametrize("used", [0, 1, 2])
@pytest.mark.parametrize("backward", [None, "reference"])
def test_results_that_are_not_used_count_as_zeros(used: int, backward: str | None) -> None:
    x = draw(SMALL)

    def only(found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return tuple(y.detach() if n == used else torch.zeros_like(y) for n, y in enumerate(found))

    expected = differentiated(x, cotangents=only, backward=backward)[3:]
    leaves = wanting(x, *DIFFERENTIABLE)
    result = run(leaves, backward=backward)[used]
    inputs = [leaves[name] for name in DIFFERENTIABLE]
    with poisoned_memory():
        found = torch.autograd.grad(result, inputs, result.detach(), materialize_grads=True)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_a_gradient_that_is_seen_too_late_is_that_of_the_reference() -> None:
    def grad(backend: str) -> Tensor:
        x = draw(SMALL)
        w, cotangent = x["w"].requires_grad_(), torch.ones_like(x["v"])

        def weighted(cotangent: Tensor) -> Tensor:  # hides that w wants a gradient
            return (run(x | {"w": w * 1}, backend=backend)[0] * cotangent).sum()

        torch.func.grad(weighted)(cotangent).square().sum().backward()
        return w.grad

    torch.testing.assert_close(grad("triton"), grad("reference"), rtol=1e-4, atol=1e-4)


@each_case
def test_the_backward_of_the_reference_can_be_asked_for(case: Case) -> None:
    x = draw(case)
    ours, reference = differentiated(x, backward="reference"), differentiated(x, backend="reference")
    assert_same_bits(ours[:3], differentiated(x)[:3])
    for a, b in zip(ours, reference, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_nothing_wants_a_gradient_of_what_is_not_differentiated() -> None:
    assert not any(y.requires_grad for y in run(draw(SMALL)))
    with torch.no_grad():
        assert not any(y.requires_grad for y in run(wanting(draw(SMALL), "q")))


@each_backend
def test_arguments_stay_as_they_are(backend: str) -> None:
    x = draw(SMALL)
    before = {name: y.clone() for name, y in x.items() if isinstance(y, Tensor)}
    differentiated(x, backend=backend)
    assert all(torch.equal(x[name], y) for name, y in before.items())


@each_backend
def test_under_autocast_inputs_are_taken_as_they_are(backend: str) -> None:
    x = wanting(draw(SMALL), *DIFFERENTIABLE)
    expected = differentiated(x, backend=backend, cotangents=itself)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        found = run(x, backend=backend)
    torch.autograd.backward(found, itself(found))
    assert_same_bits((*found, *(x[name].grad for name in DIFFERENTIABLE)), expected)


@pytest.mark.parametrize(("backend", "backward"), [("reference", None), ("triton", None), ("triton", "reference")])
def test_it_compiles_without_a_break(backend: str, backward: str | None) -> None:
    def differentiate(**x: object) -> tuple[Tensor, ...]:
        leaves = {name: y for name, y in x.items() if name in DIFFERENTIABLE}
        found = compiled(**x | leaves, backend=backend, backward=backward)
        return *itself(found), *torch.autograd.grad(found, list(leaves.values()), itself(found))

    torch.compiler.reset()
    compiled = torch.compile(ttt_linear, fullgraph=True, backend="aot_eager")
    x = draw(SMALL._replace(dtype=BF16))
    expected = differentiated(x, cotangents=itself, backend=backend, backward=backward)
    assert_same_bits(differentiate(**wanting(x, *DIFFERENTIABLE)), expected)


def test_a_pack_compiles_without_a_break() -> None:
    torch.compiler.reset()
    compiled = torch.compile(ttt_linear, fullgraph=True, backend="aot_eager")
    x = draw(PACK)
    assert_same_bits(tuple(compiled(**x, backend="triton")), run(x))


def test_float64_runs_the_reference_only() -> None:
    x = draw(SMALL._replace(dtype=torch.float64))
    assert all(y.dtype == torch.float64 for y in ttt_linear(**x))
    with pytest.raises(BackendError, match="float64"):
        ttt_linear(**x, backend="triton")


@pytest.mark.parametrize(("case", "longest"), [(Case(16, BF16), 64), (Case(64), 32), (Case(72), 16)])
def test_chunks_that_do_not_fit_are_refused(case: Case, longest: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = draw(case._replace(tokens=1)) | {"chunk_size": 2 * longest}
    with pytest.raises(BackendError, match=f"chunk_size up to {longest}"):
        ttt_linear(**x, backend="triton")
    monkeypatch.setenv(kernel_backend.VARIABLE, "triton")
    with pytest.raises(BackendError, match=f"chunk_size up to {longest}"):
        ttt_linear(**x)
    assert ttt_linear(**x, backend="reference").out.shape == x["q"].shape


GOOD = draw(SMALL)
Q, H, HB = GOOD["q"], GOOD["initial_state"], GOOD["initial_state_bias"]
LENGTHS = torch.tensor([0, 18], device=DEVICE)
MISFITS = {
    "q-of-three-dimensions": ({"q": Q[0]}, "q must be .B,T,H,D."),
    "no-heads": ({"q": Q[:, :, :0]}, "q must be .B,T,H,D."),
    "q-of-integers": ({"q": Q.long()}, "q must be one of"),
    "strided-q": ({"q": Q.repeat(1, 1, 1, 2)[..., ::2]}, "q must have unit stride"),
    "short-k": ({"k": Q[:, 1:]}, "k must be"),
    "k-of-another-dtype": ({"k": Q.bfloat16()}, "k must be one of"),
    "wide-v": ({"v": torch.cat((Q, Q), -1)}, "v must be"),
    "v-elsewhere": ({"v": Q.to("meta")}, "v must be on"),
    "short-w": ({"w": Q[0, 0, :, :8]}, "w must be"),
    "flat-b": ({"b": Q[0, 0, 0]}, "b must be"),
    "eta-of-text": ({"eta": "1"}, "eta must be a number or a tensor"),
    "eta-by-head": ({"eta": Q[:, 0, :, 0]}, "eta must be a number, "),
    "eta-by-entry": ({"eta": Q}, "eta must be a number, "),
    "eta-of-integers": ({"eta": Q[..., 0].long()}, "eta must be one of"),
    "no-scale": ({"scale": 0.0}, "scale must be finite and positive"),
    "endless-scale": ({"scale": float("inf")}, "scale must be finite and positive"),
    **{
        f"eps-of-{eps}": ({"eps": eps}, "eps must be finite and positive")
        for eps in (0.0, -1e-6, float("nan"), float("inf"))
    },
    "eps-of-nothing": ({"eps": 1e-46}, "eps must be 1.18e-38 at least"),
    "short-chunks": ({"chunk_size": 8}, "chunk_size must be a power of two"),
    "odd-chunks": ({"chunk_size": 48}, "chunk_size must be a power of two"),
    "one-state": ({"initial_state_bias": None}, "come together"),
    "state-of-two-sequences": ({"initial_state": H.repeat(2, 1, 1, 1)}, "initial_state must be"),
    "bf16-state": ({"initial_state": H.bfloat16()}, "initial_state must be one of"),
    "transposed-state": ({"initial_state": H.mT}, "initial_state must be contiguous"),
    "flat-bias": ({"initial_state_bias": HB[:, :, 0]}, "initial_state_bias must be"),
    "lengths-as-list": ({"cu_seqlens": [0, 18]}, "cu_seqlens must be a tensor"),
    "no-sequence": ({"cu_seqlens": LENGTHS[:1]}, "cu_seqlens must be .sequences . 1."),
    "float-lengths": ({"cu_seqlens": LENGTHS.float()}, "cu_seqlens must be one of"),
    "lengths-of-a-batch": (
        {name: y.repeat(2, 1, 1, 1) for name, y in GOOD.items() if name in "qkv"}
        | {"eta": 0.1, "cu_seqlens": torch.tensor([0, 9, 18], device=DEVICE)},
        "cu_seqlens needs a batch of 1",
    ),
    "states-of-one-of-two": ({"cu_seqlens": torch.tensor([0, 9, 18], device=DEVICE)}, "initial_state must be"),
    "backward": ({"backward": "cuda"}, "backward must be one of"),
}


@pytest.mark.parametrize(("changes", "message"), MISFITS.values(), ids=MISFITS.keys())
@each_backend
def test_misfits_are_refused(backend: str, changes: Arguments, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ttt_linear(**GOOD | changes, backend=backend)


@pytest.mark.parametrize("dim", [12, 136])
@each_backend
def test_head_dims_beyond_the_kernels_are_refused(backend: str, dim: int) -> None:
    x = torch.zeros(1, 1, 1, dim, device=DEVICE)
    with pytest.raises(ValueError, match="the head dim of q must be a multiple of 8 up to 128"):
        ttt_linear(x, x, x, x[0, 0], x[0, 0], 0.1, backend=backend)


def test_the_reference_has_no_kernel_to_differentiate_it() -> None:
    with pytest.raises(BackendError, match="goes with the Triton kernels"):
        ttt_linear(**GOOD, backend="reference", backward="triton")


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(BackendError, match="backend must be one of"):
        ttt_linear(**GOOD, backend="cuda")
