"""The kernels compile for Hopper where there is no GPU, and right: the interpreter accepts more than the compiler."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from contractions import contracted_sums
from pipelines import overwritten_tiles

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


LOOP = """
%tile = ttg.local_alloc : () -> !ttg.memdesc<SLOTSx64x128xbf16>
%first = ttg.memdesc_index %tile[%c0]
%one = ttg.async_copy_global_to_local %p, %first mask %m
%total = scf.for %i = %c0 to %c9 {
  %here = ttg.memdesc_index %tile[%i]
  %turned = ttg.memdesc_trans %here
  %dot = ttng.warp_group_dot %turned, %here, %sum {isAsync = true}
  %done = ttng.warp_group_dot_wait %dot {pendings = PENDING : i32}
  %next = ttg.memdesc_index %tile[%j]
  %two = ttg.async_copy_global_to_local %p, %next mask %m
  scf.yield %done
"""


@pytest.mark.parametrize(("slots", "pending", "early"), [(1, 1, 1), (2, 1, 0), (1, 0, 0)])
def test_a_load_into_a_tile_that_is_still_read_is_found(slots: int, pending: int, early: int) -> None:
    assert len(overwritten_tiles(LOOP.replace("SLOTS", str(slots)).replace("PENDING", str(pending)))) == early


@pytest.mark.parametrize(("addend", "found"), [("%r4", 1), ("%r9", 0)])
def test_a_sum_that_is_fused_with_a_product_is_found(addend: str, found: int) -> None:
    ptx = f"shfl.sync.bfly.b32 \t%r4, %r3, 16, 31, -1;\nfma.rn.f32 \t%r5, %r1, %r2, {addend};\n"
    assert len(contracted_sums(ptx)) == found
