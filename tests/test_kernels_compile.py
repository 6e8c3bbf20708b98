"""The kernels compile for Hopper where there is no GPU: the interpreter accepts more than the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from longtake.kernels.backend import TRITON_INSTALLED, VARIABLE


@pytest.mark.skipif(not TRITON_INSTALLED, reason="triton is not installed")
def test_every_kernel_compiles_for_hopper(tmp_path: Path) -> None:
    """In a process of its own: under the interpreter there is nothing to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment |= {VARIABLE: "triton", "TRITON_CACHE_DIR": str(tmp_path)}
    here = Path(__file__)
    command = [sys.executable, str(here.with_name("hopper.py"))]
    root = {"PYTHONPATH": os.pathsep.join([str(here.parents[1]), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(command, env=environment | root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    compiled, known = (line.split() for line in done.stdout.splitlines()[-2:])
    assert len(known) > 10
    assert compiled == known
