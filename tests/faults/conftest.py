"""Fixtures of the fault suite."""

from faults.fixtures import _nothing_is_left, make_world, world, zygote

__all__ = ["_nothing_is_left", "make_world", "world", "zygote"]
