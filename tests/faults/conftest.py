"""Fixtures of the fault suite."""

from faults.fixtures import _no_test_hangs, _nothing_is_left, make_world, world, zygote

__all__ = ["_no_test_hangs", "_nothing_is_left", "make_world", "world", "zygote"]
