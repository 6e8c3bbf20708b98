"""Which implementation of an operator runs: the PyTorch reference or the Triton kernels."""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import Literal, cast, get_args

import torch
from torch import Tensor

Backend = Literal["reference", "triton"]
VARIABLE = "LONGTAKE_KERNELS"
OPERAND_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class BackendError(ValueError):
    """The backend asked for is unknown, or can not run here or on these tensors."""


@cache
def triton_installed() -> bool:
    return find_spec("triton") is not None


def triton_interpreted() -> bool:
    """Whether TRITON_INTERPRET asks Triton to run kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def requested(backend: Backend | None) -> Backend | None:
    """The argument, else the environment variable LONGTAKE_KERNELS, else None.

    Raises:
        BackendError: it names no backend.
    """
    name = backend or os.environ.get(VARIABLE)
    for known in get_args(Backend):
        if name == known:
            return cast(Backend, known)
    if name:
        raise BackendError(f"a kernel backend is one of {get_args(Backend)}, got {name!r}")
    return None


def obstacle(*tensors: Tensor) -> str | None:
    """Why the Triton kernels can not take the tensors; None: they can."""
    if not triton_installed():
        return "triton is not installed"
    for x in tensors:
        if not x.is_cuda and not triton_interpreted():
            return f"a tensor on {x.device} needs TRITON_INTERPRET=1, set before triton is imported"
        if x.dtype not in OPERAND_DTYPES:
            return f"{x.dtype} is computed by the reference only"
        if x.requires_grad and torch.is_grad_enabled():
            return "they give no gradient"
    return None


def runs_triton(backend: Backend | None, *tensors: Tensor) -> bool:
    """Whether an operator on the tensors runs its Triton kernels: as requested, else where CUDA tensors can.

    Raises:
        BackendError: Triton is requested and can not take the tensors.
    """
    wanted = requested(backend)
    if wanted == "reference" or (wanted is None and not all(x.is_cuda for x in tensors)):
        return False
    reason = obstacle(*tensors)
    if wanted == "triton" and reason:
        raise BackendError(f"the triton kernels can not run: {reason}")
    return reason is None


def on_device_of(x: Tensor) -> AbstractContextManager[object]:
    """Launch kernels on the GPU that holds `x`, whichever is current."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def numerics(device: torch.device) -> str:
    """What decides the bits of the operators on `device`, for fingerprints: `reference`, or Triton and its version."""
    if not runs_triton(None, torch.empty(0, device=device)):
        return "reference"
    import triton

    return f"triton {triton.__version__}"
