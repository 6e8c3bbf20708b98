"""Who computes an operator: the reference or the Triton kernels."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import pytest
import torch
from torch import Tensor

from longtake.kernels import backend, cam, gdn
from longtake.kernels.backend import (
    TRITON_INSTALLED,
    BackendError,
    Precision,
    check_backward,
    kernel_build,
    numerics,
    on_device_of,
    requested,
    runs_triton,
)
from longtake.kernels.cam import reference as cam_reference
from longtake.kernels.fitting import Fitted
from longtake.kernels.gdn import reference as gdn_reference

pytestmark = pytest.mark.skipif(not TRITON_INSTALLED, reason="triton is not installed")
KERNELS = Path(backend.__file__).parent
GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")


@pytest.fixture(autouse=True)
def without_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LONGTAKE_KERNELS", raising=False)
    if not GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")


def scan_inputs(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    tokens = torch.rand(3, 1, 2, 1, 16, dtype=dtype, device=DEVICE)
    gates = torch.rand(2, 1, 1, 2, 1, dtype=dtype, device=DEVICE)
    return dict(zip("qkv", tokens, strict=True)) | {"beta": gates[0], "decay": gates[1, ..., 0]}


def test_cuda_tensors_run_triton_and_others_the_reference() -> None:
    x = scan_inputs()
    assert runs_triton(None, *x.values()) is GPU
    chosen = gdn.gdn_scan(**x)
    expected = gdn.gdn_scan(**x, backend="triton") if GPU else gdn_reference.gdn_scan(**x)
    assert torch.equal(chosen.out, expected.out)


def test_the_environment_chooses_and_the_argument_overrules_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(1, device=DEVICE)
    monkeypatch.setenv("LONGTAKE_KERNELS", "reference")
    assert not runs_triton(None, x)
    assert runs_triton("triton", x)
    assert numerics(DEVICE, "bf16") == "reference"
    monkeypatch.setenv("LONGTAKE_KERNELS", "triton")
    assert runs_triton(None, x)
    assert not runs_triton("reference", x)
    assert numerics(DEVICE, "bf16").startswith("triton 3")


def test_an_unknown_backend_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LONGTAKE_KERNELS", "cuda")
    with pytest.raises(BackendError, match="LONGTAKE_KERNELS must be one of"):
        requested(None)
    with pytest.raises(BackendError, match="backward must be one of"):
        check_backward("foo", runs=True)  # type: ignore[arg-type]
    monkeypatch.setenv("LONGTAKE_KERNELS", "triton")
    with pytest.raises(BackendError, match="that LONGTAKE_KERNELS asks for can not run"):
        runs_triton(None, scan_inputs(torch.float64)["q"])


def test_only_the_reference_takes_float64() -> None:
    assert not runs_triton(None, scan_inputs(torch.float64)["q"])
    with pytest.raises(BackendError, match="float64"):
        gdn.gdn_scan(**scan_inputs(torch.float64), backend="triton")


def test_only_the_reference_gives_gradients_that_are_not_of_a_scan() -> None:
    x = scan_inputs()
    x["v"].requires_grad_()
    assert not runs_triton(None, *x.values())
    with pytest.raises(BackendError, match="they give no gradient"):
        runs_triton("triton", *x.values())
    assert runs_triton("triton", *x.values(), trained=[x["v"]])
    with torch.no_grad():
        assert runs_triton("triton", *x.values())


def test_kernels_that_do_not_fit_are_a_backend_error() -> None:
    from triton.runtime.errors import OutOfResources

    with pytest.raises(BackendError, match="do not fit"), on_device_of(torch.empty(0, device=DEVICE)):
        raise OutOfResources(262144, 232448, "shared memory")


class Crowded:
    """A kernel that fits with four warps, or with none."""

    def __init__(self, most: int) -> None:
        self.most, self.tried = most, list[int]()
        self.fn = self.__init__

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: int, num_warps: int, **modes: int) -> None:
            from triton.runtime.errors import OutOfResources

            self.tried.append(num_warps)
            if num_warps > self.most:
                raise OutOfResources(32 * num_warps, 32 * self.most, "threads")

        return launch


def test_fewer_warps_are_decided_once_for_what_is_compiled_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Crowded(most=4)
    for mode in (1, 1, 2):
        Fitted(kernel, DEVICE)[2, 1](7, D=mode, size=mode, num_warps=16)
    assert kernel.tried == [16, 8, 4, 4, 16, 8, 4]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * 4
    assert "with 4 warps" in caplog.messages[1]


def test_a_kernel_for_which_no_warps_are_few_enough_is_a_backend_error() -> None:
    kernel = Crowded(most=0)
    with pytest.raises(BackendError, match="do not fit"), on_device_of(torch.empty(0, device=DEVICE)):
        Fitted(kernel, DEVICE)[(1,)](num_warps=4)
    assert kernel.tried == [4, 2, 1]


def test_downscale_always_runs_the_reference() -> None:
    x = [scan_inputs()[name] for name in "qkv"]
    place = torch.eye(4, device=DEVICE).expand(1, 2, 4, 4)
    table = torch.ones(2, 4, device=DEVICE)
    place = place.contiguous()
    settings = {"downscale": True}
    ours = cam.cam_prepare(*x, place, place, table, table, **settings, backend="triton")
    expected = cam_reference.cam_prepare(*x, place, place, table, table, **settings)
    assert all(map(torch.equal, ours, expected))


def test_numerics_tell_precision_and_build_apart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LONGTAKE_KERNELS", "triton")
    seen = {numerics(DEVICE, precision) for precision in get_args(Precision)}
    assert len(seen) == 4
    assert all(each.endswith(f" {kernel_build(KERNELS)}") for each in seen)
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy)
    assert kernel_build(copy) == kernel_build(KERNELS)
    table = copy / "scan" / "configurations.py"
    table.write_text(table.read_text().replace("warps=8", "warps=4"))
    assert kernel_build(copy) != kernel_build(KERNELS)


def test_an_untested_architecture_gets_the_reference_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "tested", lambda device: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a new GPU")
    fake = SimpleNamespace(is_cuda=True, dtype=torch.float32, requires_grad=False, device=torch.device("cuda"))
    with pytest.warns(UserWarning, match="never tested on a new GPU: the reference computes"):
        assert not runs_triton(None, fake)
    assert runs_triton("triton", fake)


def test_a_cpu_tensor_needs_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(BackendError, match="TRITON_INTERPRET=1"):
        cam.cam_discount(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1), backend="triton")
