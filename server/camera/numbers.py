"""Numbers from clients and files, as float64 arrays."""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from longtake.api_schemas.problems import ProblemError


def real_numbers(values: ArrayLike, code: str, field: str) -> NDArray[np.float64]:
    """A new float64 array of any shape, infinities and NaN allowed. Raises `ProblemError` with `code`."""
    try:
        array = np.asarray(values)
    except ValueError:
        raise ProblemError(code, "the lists in it are of unequal length", field) from None
    if array.dtype.kind not in "fiu":
        raise ProblemError(code, "it must hold real numbers only", field)
    return array.astype(np.float64)


def refuse(bad: ArrayLike, code: str, detail: str, field: str) -> None:
    """Raise `ProblemError` if `bad` is true: one flag stands for `field`, flags [F] for its rows (`field[3]`)."""
    flags = np.asarray(bad)
    if flags.any():
        raise ProblemError(code, detail, f"{field}[{flags.argmax()}]" if flags.ndim else field)
