"""Proof that the suite bites: it finds nothing in the package, and something in every copy with a broken promise."""

import subprocess
import sys
from pathlib import Path

import pytest

from faults.mutants import MUTANTS, Mutant, drilled, plant


def test_nothing_is_found_in_the_package_itself(tmp_path: Path) -> None:
    """The same run on an unchanged copy."""
    found, said = drilled(plant(tmp_path, None))
    assert not found, said


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught(mutant: Mutant, tmp_path: Path) -> None:
    """One promise broken, in the copy that the drill really imports."""
    path = plant(tmp_path, mutant)
    module = f"longtake.{Path(mutant.file).parent.as_posix().replace('/', '.')}"
    imported = subprocess.run(
        [sys.executable, "-c", f"import {module} as m; print(m.__file__)"],
        env={"PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert imported.startswith(str(tmp_path)), imported
    found, said = drilled(path)
    assert found, f"survived: {mutant.name}"
    print(said.splitlines()[0][:300])  # noqa: T201
