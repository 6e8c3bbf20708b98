"""The scans on a GPU: graphs, streams, no waiting, one compiled kernel for all sizes, fresh processes, long tensors."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from kernel_checks import BF16, DEVICE, FP32, REAL, Shape, assert_same_bits, mapped, tensors
from scan_modes import SCANS, Arguments, Results, draw
from torch import Tensor

from longtake.kernels import Precision
from longtake.kernels.fitting import Fitted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MODES = {
    "gdn": "both full weights turned state gated",
    "cam": "both state chunks",
    "branch": "both weights state",
}
EVERYTHING = {
    "gdn": "both full bf16-weights turned-own-doubled pool chunks others gated",
    "cam": "both pool chunks others",
    "branch": "both bf16-weights own pool chunks frame-beta",
}
each_scan = pytest.mark.parametrize("name", MODES)
ROUNDS = 20


def call(name: str, x: Arguments, precision: Precision = "bf16") -> Results:
    return tensors(SCANS[name].public(**x, precision=precision, backend="triton"))


def capture(function: Callable[[], Results]) -> tuple[torch.cuda.CUDAGraph, Results]:
    """A graph of the call, which has run before, and the tensors that it fills."""
    graph = torch.cuda.CUDAGraph()
    function()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        results = function()
    return graph, results


@contextmanager
def waiting_refused() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def other_inputs(x: Arguments) -> Arguments:
    """The same shapes with other tokens."""
    return x | {name: x[name].flip(1).contiguous() for name in "qkv"}


@pytest.mark.parametrize("precision", ["bf16", "bf16-snapshot", "tf32", "ieee"])
@each_scan
def test_a_captured_scan_equals_an_eager_one_bitwise(name: str, precision: Precision) -> None:
    x = mapped(Tensor.clone, draw(name, REAL, BF16, MODES[name]))
    graph, results = capture(lambda: call(name, x, precision))
    for given in (x, other_inputs(x)):
        expected = call(name, given, precision)
        for key in "qkv":
            x[key].copy_(given[key])
        for y in results:
            y.fill_(float("nan"))
        graph.replay()
        assert_same_bits(results, expected)


@each_scan
def test_a_captured_scan_goes_on_from_its_own_state(name: str) -> None:
    x = draw(name, REAL, BF16, MODES[name])
    states = [mapped(Tensor.clone, x["initial_state"]) for _ in range(2)]
    graph, _ = capture(lambda: call(name, x | {"initial_state": states[0], "out_state": states[0]}))
    for ours, y in zip(tensors(states[0]), tensors(x["initial_state"]), strict=True):
        ours.copy_(y)
    for _ in range(3):
        graph.replay()
        call(name, x | {"initial_state": states[1], "out_state": states[1]})
    assert_same_bits(tensors(states[0]), tensors(states[1]))


@each_scan
def test_nothing_waits_for_the_gpu(name: str) -> None:
    x = draw(name, REAL, BF16, EVERYTHING[name])
    x |= {"out_state": x["initial_state"]}
    call(name, x)
    with waiting_refused():
        call(name, x)


@each_scan
def test_two_streams_at_once_change_no_bit(name: str) -> None:
    one = draw(name, REAL, BF16, MODES[name])
    inputs = [one, other_inputs(one)]
    expected = [call(name, x) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    found: list[list[Results]] = [[], []]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for x, stream, results in zip(inputs, streams, found, strict=True):
            with torch.cuda.stream(stream):
                results.append(call(name, x))
    torch.cuda.synchronize()
    for results, right in zip(found, expected, strict=True):
        for each in results:
            assert_same_bits(each, right)


@each_scan
def test_two_graphs_at_once_change_no_bit(name: str) -> None:
    one = draw(name, REAL, BF16, MODES[name])
    inputs = [one, other_inputs(one)]
    expected = [call(name, x) for x in inputs]
    captured = [capture(lambda x=x: call(name, x)) for x in inputs]
    streams = [torch.cuda.Stream() for _ in inputs]
    torch.cuda.synchronize()
    for _ in range(ROUNDS):
        for (graph, results), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                for y in results:
                    y.fill_(float("nan"))
                graph.replay()
        torch.cuda.synchronize()
        for (_, results), right in zip(captured, expected, strict=True):
            assert_same_bits(results, right)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_scan
def test_kernels_run_on_the_device_of_the_tensors(name: str) -> None:
    x = draw(name, REAL, BF16, MODES[name])
    there = mapped(lambda y: y.to("cuda:1"), x)
    assert_same_bits(tuple(y.to(DEVICE) for y in call(name, there)), call(name, x))


@contextmanager
def compilations() -> Iterator[list[str]]:
    """Names of the kernels that are compiled meanwhile."""
    from triton import knobs

    names: list[str] = []

    def compiled(*, repr: str, **_: object) -> None:  # noqa: A002
        names.append(repr)

    with knobs.runtime.scope():
        knobs.runtime.jit_post_compile_hook = compiled
        yield names


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@each_scan
def test_other_sizes_compile_nothing(name: str, dtype: torch.dtype) -> None:
    size = Shape(1, 1, 24, 2, 48)
    with compilations() as names:
        call(name, draw(name, size, dtype, MODES[name]))
    assert names
    with compilations() as names:
        for batch, frames in ((1, 2), (3, 1), (2, 5), (16, 16), (1, 33)):
            x = draw(name, size._replace(batch=batch, frames=frames), dtype, MODES[name])
            call(name, x)
            call(name, x | {"v": torch.cat((x["v"], x["v"][..., :5]), dim=-1)[..., :-5]})
    assert not names


DIGEST = """
import hashlib, sys
sys.path.insert(0, sys.argv[1])
from test_gpu_kernels import BF16, MODES, REAL, call, draw
digest = hashlib.sha256()
for name, features in MODES.items():
    for precision in ("bf16", "ieee"):
        for x in call(name, draw(name, REAL, BF16, features), precision):
            digest.update(x.float().cpu().numpy().tobytes())
print(digest.hexdigest())
"""


def test_fresh_processes_agree_to_the_bit(tmp_path: Path) -> None:
    """One of them compiles the kernels anew."""
    digests = set()
    for cache in (tmp_path, None):
        environment = dict(os.environ) | ({"TRITON_CACHE_DIR": str(cache)} if cache else {})
        command = [sys.executable, "-W", "ignore", "-c", DIGEST, str(Path(__file__).parent)]
        digests.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(digests) == 1
    assert len(digests.pop().strip()) == 64


@pytest.mark.parametrize("name", ["gdn", "branch"])
def test_tensors_of_more_than_2_31_elements(name: str) -> None:
    """The last of eight clips of 121 frames in one projection's output equals a run of its own."""
    shape = REAL._replace(batch=8, frames=121)
    features = {"gdn": "both full weights turned gated", "branch": "both weights"}[name]
    x = draw(name, shape._replace(batch=1), BF16, features)
    generator = torch.Generator(DEVICE).manual_seed(0)
    qkv = torch.empty(shape.batch, shape.tokens[1], 3, *shape.tokens[2:], dtype=BF16, device=DEVICE)
    assert qkv[:-1].numel() > 2**31
    for b in range(shape.batch):
        qkv[b].normal_(generator=generator)
    batched = [key for key in ("beta", "decay", "gate", "projection", "projection_inverse") if key in x]
    whole = {key: x[key].expand(8, *x[key].shape[1:]).contiguous() for key in batched}
    whole |= dict(zip("qkv", qkv.unbind(2), strict=True))
    found = call(name, x | whole)
    alone = call(name, x | {key: y[-1:] for key, y in whole.items()})
    assert_same_bits(tuple(y[-1:] for y in found), alone)


def test_a_kernel_with_too_many_registers_gets_fewer_warps(caplog: pytest.LogCaptureFixture) -> None:
    from hungry_kernel import hungry_kernel  # no import of triton before it is to interpret

    x = torch.randint(0, 3, (256, 256), device=DEVICE).float()
    out = torch.empty_like(x)
    Fitted(hungry_kernel, DEVICE)[(1,)](x, out, SIDE=256, num_warps=16, maxnreg=255)
    assert "hungry_kernel does not fit" in caplog.messages[0]
    assert torch.equal(out, x * x.sum())
