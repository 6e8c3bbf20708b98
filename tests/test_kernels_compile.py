"""The kernels of a scan compile for Hopper where there is no GPU: the interpreter accepts more than the compiler."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from longtake.kernels.backend import TRITON_INSTALLED
from longtake.kernels.scan.configurations import CONFIGURATIONS, Configuration, Precision

pytestmark = pytest.mark.skipif(not TRITON_INSTALLED, reason="triton is not installed")

DIM, HEADS, TOKENS = 112, 20, 880
WIDTH, SIDE = 64, 128
SIXTEEN_BIT = {"q", "k", "v", "gate", "out"}
OPERANDS = {"q_out", "k_out", "plain_out", "v_out", "plain", "transitions"}
INDICES = {"starts", "slots"}
NORMALISED = {"NORMALISER": True, "DISCOUNT": False, "POSITIONS": 1, "RETURNED": False, "MERGED": True, "GATED": True}
CAMERA = {"NORMALISER": False, "DISCOUNT": True, "POSITIONS": 2, "RETURNED": True, "MERGED": False, "GATED": False}
EVERY: list[tuple[str, str, Precision]] = [
    (kernel, mode, precision)
    for precision in CONFIGURATIONS[9, 0]
    for kernel in ("prepare", "absorb", "remember", "read")
    for mode in ("gdn", "camera")
]


def constants(kernel: str, mode: str, config: Configuration) -> dict[str, Any]:
    """Values of every constexpr that a kernel may have."""
    from longtake.kernels.triton_tiles import TRITON_TYPES

    camera_read = kernel == "read" and mode == "camera"
    rows, tiles = config.read_without_normaliser if mode == "camera" else config.read
    if kernel == "absorb":
        rows, tiles = config.absorb_rows, -(-TOKENS // config.absorb_rows)
    modes = NORMALISED if mode == "gdn" else CAMERA
    sizes = {"D": DIM, "WIDTH": WIDTH, "SIDE": SIDE, "ROWS": rows, "TILES": tiles, "COLUMNS": config.value_columns}
    heads = {"HEADS": config.prepare_heads, "GROUPS": HEADS // config.prepare_heads, "STAGES": config.absorb_stages}
    weights = {"WEIGHTED": not camera_read, "Q_WEIGHTED": True, "K_WEIGHTED": True, "RELU": not camera_read}
    how = {"OPERAND": TRITON_TYPES[config.operand], "PRECISION": config.dot, "DIRECTIONS": 2, "GIVEN": False}
    prepared = {"NORM": 0 if camera_read else 2} | ({"POSITIONS": 0} if camera_read else {})
    return modes | sizes | heads | weights | how | prepared


def pointer(name: str, kernel: str, mode: str, operand: str) -> str:
    prepared = kernel == "absorb" or (kernel == "read" and mode == "camera")
    if name in OPERANDS or (prepared and name in ("q", "k", "v")):
        return operand
    return "*bf16" if name in SIXTEEN_BIT else "*i64" if name in INDICES else "*fp32"


def compile_for_hopper(kernel: str, mode: str, precision: Precision) -> None:
    """Raise what the compiler says of one variant."""
    import importlib

    import triton
    from triton.backends.compiler import GPUTarget

    config = CONFIGURATIONS[9, 0][precision]
    function = getattr(importlib.import_module(f"longtake.kernels.scan.{kernel}"), f"_{kernel}_kernel")
    values = constants(kernel, mode, config)
    operand = "*bf16" if config.operand == torch.bfloat16 else "*fp32"
    signature, known, aligned = {}, {}, {}
    for i, parameter in enumerate(function.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], known[i,] = "constexpr", values[name]
        elif parameter.annotation in ("i32", "fp32"):
            signature[name] = parameter.annotation
        else:
            signature[name] = pointer(name, kernel, mode, operand)
            aligned[i,] = [["tt.divisibility", 16]]
    source = triton.compiler.ASTSource(fn=function, signature=signature, constexprs=known, attrs=aligned)
    warps = getattr(config, f"{kernel}_warps")
    triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps, "num_stages": 1})


def test_every_kernel_of_a_scan_compiles_for_hopper() -> None:
    """In a process of its own: under the interpreter there is nothing to compile."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import test_kernels_compile as t\n"
    code += "for each in t.EVERY: t.compile_for_hopper(*each); print(*each)"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(done.stdout.splitlines()) == len(EVERY)
