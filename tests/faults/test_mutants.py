"""Proof that the suite bites: it finds nothing in the package, and something in every copy with a broken promise."""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from faults.mutants import MUTANTS, Mutant, drilled, plant

Result = tuple[bool, str]
AT_ONCE = 3
"""Drills mostly wait."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, "Future[Result]"]]:
    """What the drill finds in each copy, by the mutant's name; "" is the package itself."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {"": pool.submit(drilled, plant(tmp_path_factory.mktemp("package"), None))}
        for mutant in MUTANTS:
            path = plant(_folder(tmp_path_factory, mutant), mutant)
            running[mutant.name] = pool.submit(drilled, path, mutant.caught_by)
        yield running


def test_nothing_is_found_in_the_package_itself(results: Mapping[str, "Future[Result]"]) -> None:
    """Every exercise, on an unchanged copy."""
    found, said = results[""].result()
    assert not found, said


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, results: Mapping[str, "Future[Result]"]) -> None:
    """One promise broken, and the exercise that is aimed at it."""
    found, said = results[mutant.name].result()
    assert found, f"survived: {mutant.name}"
    assert f"found by {mutant.caught_by}" in said, f"found, but not by {mutant.caught_by}: {said}"


def _folder(factory: pytest.TempPathFactory, mutant: Mutant) -> Path:
    return factory.mktemp(mutant.name.replace(" ", "-"))
