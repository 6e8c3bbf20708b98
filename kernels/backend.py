"""Which implementation of an operator runs: the PyTorch reference or the Triton kernels."""

import hashlib
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from longtake.kernels.scan.configurations import CONFIGURATIONS, Precision

Backend = Literal["reference", "triton"]
VARIABLE = "LONGTAKE_KERNELS"
OPERAND_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
OCTET, MAX_DIM = 8, 128
"""Head dims that the kernels take: multiples of OCTET up to MAX_DIM."""
TRITON_INSTALLED = find_spec("triton") is not None


class BackendError(ValueError):
    """The backend or precision asked for is unknown, or can not run here or on these tensors."""


def triton_interpreted() -> bool:
    """Whether TRITON_INTERPRET asks Triton to run kernels on the CPU."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes")


def requested(backend: Backend | None, argument: str = "backend") -> Backend | None:
    """The argument of that name, else the environment variable LONGTAKE_KERNELS, else None.

    Raises:
        BackendError: it names no backend.
    """
    name = backend or os.environ.get(VARIABLE)
    if name and name not in get_args(Backend):
        raise BackendError(f"{argument if backend else VARIABLE} must be one of {get_args(Backend)}, got {name!r}")
    return cast(Backend, name) if name else None


def check_precision(precision: str) -> Precision:
    """The precision, if it is one.

    Raises:
        BackendError: it is none.
    """
    if precision not in get_args(Precision):
        raise BackendError(f"precision is one of {get_args(Precision)}, got {precision!r}")
    return cast(Precision, precision)


def tested(device: torch.device) -> bool:
    """Whether the tile sizes of this GPU's architecture are committed."""
    properties = torch.cuda.get_device_properties(device)  # torch.compile folds this, but not get_device_capability
    return (properties.major, properties.minor) in CONFIGURATIONS


def wants_gradient(*tensors: Tensor | None) -> bool:
    """Whether autograd is to follow what is done with any of the tensors."""
    return torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def obstacle(*tensors: Tensor, dim: int = OCTET, trained: Sequence[Tensor] = ()) -> str | None:
    """Why the Triton kernels can not take the tensors, of that head dim; None: they can.

    `trained`: those of them that the kernels give a gradient.
    """
    if not TRITON_INSTALLED:
        return "triton is not installed"
    if dim % OCTET or not 0 < dim <= MAX_DIM:
        return f"the head dim must be a multiple of {OCTET} up to {MAX_DIM}, got {dim}"
    if not tensors[0].is_cuda and not triton_interpreted():
        return f"a tensor on {tensors[0].device} needs TRITON_INTERPRET=1, set before triton is imported"
    for x in tensors:
        if x.dtype not in OPERAND_DTYPES:
            return f"a tensor {tuple(x.shape)} of {x.dtype} is nothing for them: they take fp32, bf16 and fp16"
        if wants_gradient(x) and not any(x is y for y in trained):
            return f"they give no gradient, which a tensor {tuple(x.shape)} wants: take backend='reference'"
    return None


def runs_triton(backend: Backend | None, *tensors: Tensor, dim: int = OCTET, trained: Sequence[Tensor] = ()) -> bool:
    """Whether an operator on the tensors runs its Triton kernels: as requested, else where tested CUDA tensors can.

    `trained`: those of the tensors that the kernels give a gradient. A GPU of an architecture that was never tested
    gets the reference, with a warning, unless Triton is requested.

    Raises:
        BackendError: Triton is requested and can not take the tensors.
    """
    wanted = requested(backend)
    if wanted == "reference" or (wanted is None and not all(x.is_cuda for x in tensors)):
        return False
    reason = obstacle(*tensors, dim=dim, trained=trained)
    if wanted == "triton" and reason:
        asked = "" if backend else f" that {VARIABLE} asks for"
        raise BackendError(f"the triton kernels{asked} can not run: {reason}")
    if reason is None and wanted is None and not tested(tensors[0].device):
        name = torch.cuda.get_device_name(tensors[0].device)
        warnings.warn(f"the kernels were never tested on {name}: the reference computes", stacklevel=3)
        return False
    return reason is None


def check_backward(backward: Backend | None, *, runs: bool) -> None:
    """Raise `BackendError` for a backward pass that is no backend, or on the kernels where the forward pass is not."""
    if backward is not None and requested(backward, "backward") == "triton" and not runs:
        raise BackendError("backward 'triton' goes with the Triton kernels forward, and the reference runs")


@contextmanager
def on_device_of(x: Tensor) -> Iterator[None]:
    """Launch kernels on the GPU that holds `x`, whichever is current.

    Raises:
        BackendError: a kernel takes more shared memory or registers than the GPU has.
    """
    from triton.runtime.errors import OutOfResources

    with torch.cuda.device(x.device) if x.is_cuda else nullcontext():
        try:
            yield
        except OutOfResources as error:
            raise BackendError(f"the kernels do not fit {x.device} with these tile sizes: {error}") from error


def kernel_build(folder: Path = Path(__file__).parent) -> str:
    """Short hash of the sources of this library, tile sizes included: they decide bits."""
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.py")):
        digest.update(file.relative_to(folder).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def numerics(device: torch.device, precision: Precision) -> str:
    """What decides the bits of the operators on `device`, for fingerprints: `reference`, or Triton with all that does.

    That is its version, the precision and the kernels' build.
    """
    if not runs_triton(None, torch.empty(0, device=device)):
        return "reference"
    import triton

    return f"triton {triton.__version__} {precision} {kernel_build()}"
