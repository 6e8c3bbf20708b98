"""A Hopper GPU to compile for where there is none: kernels are compiled as they are launched, and never run."""

import pkgutil
import sys
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
import triton
from contractions import contracted_sums
from pipelines import overwritten_tiles
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from benchmarks.every_kernel import launch_every_kernel
from longtake import kernels as library
from longtake.kernels import backend

HOPPER = GPUTarget("cuda", 90, 32)


def pretend() -> set[str]:
    """From here on a launch on CPU tensors compiles for Hopper; returns the names of kernels, which grow."""
    compiled: set[str] = set()
    run = JITFunction.run

    def compile_alone(self: Any, *arguments: object, **options: object) -> object:  # noqa: ANN401
        kernel = run(self, *arguments, **options | {"warmup": True})
        name = f"{self.fn.__module__}.{self.fn.__name__}"
        if early := overwritten_tiles(kernel.asm["ttgir"]):
            raise AssertionError(f"{name} {options} overwrites what a product may still read: {early}")
        if unequal := contracted_sums(kernel.asm["ptx"]):
            raise AssertionError(f"{name} {options} has sums that differ between threads: {unequal}")
        in_registers = options.get("OPERAND") is triton.language.float32  # products of fp32 are fused additions
        if ".ttt." in name and not in_registers and "fma.rn.f32" in kernel.asm["ptx"]:
            raise AssertionError(f"{name} {options} fuses products, which a pack and a sequence alone do differently")
        compiled.add(name)
        return kernel

    device = {"get_current_device": lambda: 0, "get_current_stream": lambda _: 0, "get_current_target": lambda: HOPPER}
    driver.set_active(SimpleNamespace(**device))
    JITFunction.run = compile_alone
    backend.triton_interpreted = lambda: True
    return compiled


def kernels() -> set[str]:
    """Names of every kernel of the library."""
    names = (each.name for each in pkgutil.walk_packages(library.__path__, f"{library.__name__}."))
    functions = [f for name in names for f in vars(import_module(name)).values() if isinstance(f, triton.JITFunction)]
    return {f"{f.fn.__module__}.{f.fn.__name__}" for f in functions if f.fn.__name__.endswith("kernel")}


def main() -> None:
    """Compile every kernel at the sizes of a live session; print the names of those that were and those there are."""
    compiled = pretend()
    launch_every_kernel(torch.device("cpu"), heads=20, height=22, width=40)
    for names in (compiled, kernels()):
        sys.stdout.write(" ".join(sorted(names)) + "\n")


if __name__ == "__main__":
    main()
