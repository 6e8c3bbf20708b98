"""Checks of arguments that every operator shares: each misfit is a `ValueError` that names the argument."""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise

import torch
from torch import Tensor

FP32 = (torch.float32, torch.float64)
WEIGHTS = (torch.float32, torch.bfloat16, torch.float64)
FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
INDICES = (torch.int64,)


def require(
    name: str,
    x: Tensor,
    shape: Sequence[int],
    dtypes: Sequence[torch.dtype] = FP32,
    *,
    like: Tensor | None = None,
    contiguous: bool = True,
) -> None:
    """Raise `ValueError` unless `x` has that shape, one of the dtypes, the device of `like`, and dense rows."""
    require_tensor(name, x)
    if tuple(x.shape) != tuple(shape):
        raise ValueError(f"{name} must be {tuple(shape)}, got {tuple(x.shape)}")
    if x.dtype not in dtypes:
        raise ValueError(f"{name} must be one of {tuple(dtypes)}, got {x.dtype}")
    if like is not None and x.device != like.device:
        raise ValueError(f"{name} must be on {like.device}, got {x.device}")
    if contiguous and not x.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got strides {x.stride()}")


def require_tensor(name: str, x: object) -> None:
    """Raise `ValueError` unless `x` is a tensor."""
    if not isinstance(x, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(x).__name__}")


def require_tensors(**named: object) -> None:
    """Raise `ValueError` unless all of them are tensors."""
    for name, x in named.items():
        require_tensor(name, x)


def require_pair(name: str, value: object, parts: str) -> tuple[Tensor, Tensor]:
    """The two tensors of a tuple, which are its `parts`; anything else raises `ValueError`."""
    if not isinstance(value, tuple) or len(value) != 2:
        raise ValueError(f"{name} must be two tensors, {parts}, got {type(value).__name__}")
    if any(x is None for x in value):
        raise ValueError(f"{parts} of {name} come together")
    for x in value:
        require_tensor(name, x)
    return value[0], value[1]


def pair(name: str, value: object, parts: str) -> tuple[Tensor, Tensor] | tuple[None, None]:
    """As `require_pair`, or two None for None."""
    return (None, None) if value is None else require_pair(name, value, parts)


def require_eps(name: str, eps: float) -> None:
    """Raise `ValueError` unless what is added to a divisor is finite and not negative."""
    if not 0 <= eps < math.inf:
        raise ValueError(f"{name} must be finite and not negative, got {eps}")


def require_tokens(name: str, x: Tensor, like: Tensor) -> None:
    """Raise `ValueError` unless `x` is [B,N,H,D] as `like`, of a float dtype, with unit stride in D."""
    require(name, x, like.shape, FLOATS, like=like, contiguous=False)
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} must have unit stride in its last dimension, got strides {x.stride()}")


def check_scan(q: Tensor, k: Tensor, v: Tensor, beta: Tensor, decay: Tensor, *, frame_beta: bool = False) -> None:
    """Raise `ValueError` unless q, k, v are [B,F*S,H,D], beta [B,H,F,S] and decay [B,H,F] on one device.

    With `frame_beta` beta may also be [B,H,F].
    """
    require_tensor("q", q)
    if q.ndim != 4 or not q.numel() or q.shape[-1] % 2:
        raise ValueError(f"q must be [B,N,H,D], none of them 0 and D even, got {tuple(q.shape)}")
    for name, x in (("q", q), ("k", k), ("v", v)):
        require_tokens(name, x, q)
    batch, tokens, heads, _ = q.shape
    if decay.ndim != 3:
        raise ValueError(f"decay must be [B,H,F], got {tuple(decay.shape)}")
    frames = decay.shape[2]
    if frames == 0 or tokens % frames or tokens == 0:
        raise ValueError(f"decay {tuple(decay.shape)} does not fit the {tokens} tokens of q")
    require("decay", decay, (batch, heads, frames), FLOATS, like=q)
    if beta.shape[2:3] != decay.shape[2:] and _fits(beta, tokens, frame_beta=frame_beta):
        fitting = (batch, heads, beta.shape[2])
        raise ValueError(f"decay must be {fitting} beside beta {tuple(beta.shape)}, got {tuple(decay.shape)}")
    whole = (batch, heads, frames) if frame_beta and beta.ndim == 3 else (batch, heads, frames, tokens // frames)
    require("beta", beta, whole, FLOATS, like=q)


def _fits(beta: Tensor, tokens: int, *, frame_beta: bool) -> bool:
    """Whether so many tokens can be those of beta [B,H,F,S] or, with `frame_beta`, [B,H,F]."""
    size = beta.shape[2:].numel()
    return size == tokens if beta.ndim == 4 else frame_beta and beta.ndim == 3 and size > 0 and tokens % size == 0


def check_state(
    name: str, kv: Tensor, z: Tensor | None, q: Tensor, *, slots: Tensor | None = None, reverse: bool = False
) -> None:
    """Raise `ValueError` unless kv is [B,H,D,D] and z, if any, [B,H,D] for q [B,N,H,D].

    With `slots` [B] both are pools. A reverse scan is local to its frames: it takes and gives no state.
    """
    if reverse:
        raise ValueError(f"a reverse scan takes no {name}")
    batch, _, heads, dim = q.shape
    rows = batch if slots is None else max(1, kv.shape[0] if kv.ndim else 0)
    if slots is not None:
        require("slots", slots, (batch,), INDICES, like=q)
    require(name if z is None else f"{name} kv", kv, (rows, heads, dim, dim), like=q)
    if z is not None:
        require(f"{name} z", z, (rows, heads, dim), like=q)


def check_memory(initial: Sequence[Tensor | None] | None, out: Sequence[Tensor | None] | None) -> None:
    """Raise `ValueError` unless `out_state` is `initial_state` itself or apart from it, and its parts from each other.

    Both were checked: they are contiguous. While PyTorch compiles there are no addresses: operators look at run time.
    """
    given = [x for x in out or () if x is not None]
    if not given or torch.compiler.is_compiling():
        return
    read, written = ([_addresses(x) for x in state if x is not None] for state in (initial or (), given))
    if any(_overlap(x, y) for x, y in combinations(written, 2)):
        raise ValueError("kv and z of out_state must share no memory")
    crossing = ((x, y) for i, x in enumerate(read) for j, y in enumerate(written) if i != j or x != y)
    if any(_overlap(x, y) for x, y in crossing):
        raise ValueError("out_state may be initial_state itself or share no memory with it")


def _addresses(x: Tensor) -> range:
    """Of the bytes of a contiguous tensor; none of a meta or fake tensor, which has no memory."""
    first = x.data_ptr()
    return range(first, first + x.nbytes if first else 0)


def _overlap(x: range, y: range) -> bool:
    return max(x.start, y.start) < min(x.stop, y.stop)


def starts(chunk_starts: Tensor | Sequence[int] | None, frames: int, device: torch.device) -> Tensor | None:
    """First frames of the chunks as int64 [C] on `device`; a tensor is not read.

    Raises:
        ValueError: the numbers do not rise from 0 within the frames, or a tensor is no int64 [C] on the device.
    """
    if chunk_starts is None:
        return None
    if isinstance(chunk_starts, Tensor):
        if chunk_starts.ndim != 1:
            raise ValueError(f"chunk_starts must be [C], got {tuple(chunk_starts.shape)}")
        if chunk_starts.device != device:
            raise ValueError(f"chunk_starts must be on {device}, got {chunk_starts.device}")
        require("chunk_starts", chunk_starts, chunk_starts.shape, INDICES)
        return chunk_starts
    numbers = list(chunk_starts)
    if not all(isinstance(n, int) for n in numbers):
        raise ValueError(f"chunk_starts must be whole numbers, got {numbers}")
    rising = all(a < b for a, b in pairwise(numbers))
    if not numbers or numbers[0] != 0 or not rising or numbers[-1] >= frames:
        raise ValueError(f"chunk_starts must rise from 0 below {frames}, got {numbers}")
    return torch.tensor(numbers, dtype=torch.int64).to(device, non_blocking=True)


def check_trained(inverse_rms: tuple[tuple[Tensor, Tensor] | None, ...], out_state: object) -> None:
    """Raise `ValueError` for what a scan does not take where a gradient is wanted."""
    if any(rms is not None for rms in inverse_rms):
        raise ValueError("inverse_rms is given where a gradient is wanted, which has to pass through it: leave it out")
    if out_state is not None:
        raise ValueError("out_state is written in place, which no gradient passes: leave it out")
