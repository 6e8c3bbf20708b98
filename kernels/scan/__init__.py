"""The scan that GDN and camera branch share, in four kernels.

Prepare: k and v of every token become operands. Absorb: every frame becomes a record of its own, P = Kᵀ·diag(β)·K and
A = Kᵀ·diag(β)·V. Remember: the memory goes from frame to frame, both directions side by side. Read: q · memory, the
directions added before the product.
"""
