"""Faults that sessions have to survive: real server processes, real stores, a model whose truth can be recomputed."""
