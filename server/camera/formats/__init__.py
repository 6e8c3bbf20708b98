"""Syntaxes of trajectory files, one module a family.

A reader takes a `Source` and gives its poses as they stand in the file, named by direction and axes; checking, turning
and resampling them is the same for all and happens in `trajectory_files`. Readers see bytes only: nothing here opens
a path, unpickles or evaluates, and everything wrong is a `ProblemError` that names the place.
"""
