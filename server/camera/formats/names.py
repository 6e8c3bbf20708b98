"""Pictures that have names instead of times: their order, and whether it makes a path.

Photographs of a scene come in the same files as frames of a video, in the order in which someone happened to take them.
In the order of names they are refused as a path when

- a step turns by more than 60°;
- a step is over 10 times as long as the steps beside it and as the median step;
- from five pictures on, positions and directions both change from one to the next as in a random order: the mean square
  of the change is above half of what a random order gives (von Neumann's ratio, δ² / 2s² > ½; Ann. Math. Stat. 12,
  1941). A camera that stays in its place, or that does not turn, is judged by the other of the two.
"""

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from longtake.server.camera.formats.source import Matrix, Source
from longtake.server.camera.poses import steps_and_turns

WIDEST_TURN_DEGREES = 60.0
LONGEST_STEP = 10.0
RANDOM_ORDER = 0.5
FEWEST_FOR_ORDER = 5

_NO_PATH = "these pictures are not the frames of a video in the order of their names"
_DIGITS = re.compile("[0-9]+")


def in_order_of_names(names: list[str], source: Source) -> list[int]:
    """Rows in the order of their names, numbers in names by their value (2 before 10).

    Raises:
        ProblemError: two names are the same.
    """
    if len(set(names)) < len(names):
        raise source.problem("two pictures have the same name")
    return sorted(range(len(names)), key=lambda row: (_natural(names[row]), names[row]))


def refuse_jumps(poses: Matrix, places: Sequence[str], source: Source) -> None:
    """Raise `ProblemError` where camera-to-world poses [N,4,4] make no path."""
    steps, turns = steps_and_turns(poses)
    wide = turns > WIDEST_TURN_DEGREES
    if wide.any():
        rule = f"it turns more than {WIDEST_TURN_DEGREES:g}° from the one before"
        raise source.problem(f"{_NO_PATH}: {rule}", places[int(wide.argmax()) + 1])
    leaps = _leaps(steps)
    if leaps.any():
        rule = f"it lies {LONGEST_STEP:g} times as far from the one before as those beside it"
        raise source.problem(f"{_NO_PATH}: {rule}", places[int(leaps.argmax()) + 1])
    if len(poses) >= FEWEST_FOR_ORDER and _in_random_order(poses):
        raise source.problem(f"{_NO_PATH}: their steps are as long as in a random order")


def _leaps(steps: Matrix) -> NDArray[np.bool_]:
    """Flags [N] of steps far longer than the median step and than the one or two beside them."""
    if len(steps) < 2:
        return np.zeros(len(steps), dtype=bool)
    before, after = np.append(0.0, steps[:-1]), np.append(steps[1:], 0.0)
    usual = np.maximum(np.median(steps), np.maximum(before, after))
    flags: NDArray[np.bool_] = steps > LONGEST_STEP * usual
    return flags


def _in_random_order(poses: Matrix) -> bool:
    """Whether all that changes in the poses [N,4,4] changes from one to the next as from any to any other."""
    parts = (poses[:, :3, 3], poses[:, :3, :3].reshape(-1, 9))
    ratios = [_neumann_ratio(part) for part in parts if (part != part[0]).any()]
    return bool(ratios) and min(ratios) > RANDOM_ORDER


def _neumann_ratio(values: Matrix) -> float:
    """δ² / 2s² of values [N,C] that are not all the same: near 0 along a path, 1 on average in a random order."""
    square_steps = np.square(np.diff(values, axis=0)).sum(axis=1).mean()
    variance = np.square(values - values.mean(axis=0)).sum(axis=1).mean()
    return float(square_steps / (2 * variance)) if variance > 0 else 0.0


def _natural(name: str) -> str:
    """A key that compares runs of digits by their value: each has its length, in digits, put in front."""

    def by_value(digits: re.Match[str]) -> str:
        value = digits[0].lstrip("0")
        return f"{len(value):05}{value}"

    return _DIGITS.sub(by_value, name)
