"""The backward pass of a scan: receive, recall, combine, queries and keys, activation.

With M_t the memory that frame t reads, M_t = g_t·(I − P_t)·M_{t−1} + A_t, and G_t the gradient of what absorbing frame
t leaves: receive sums B_t = Q̃_tᵀ·dN_t over the tokens of a frame, recall walks
G_t = B_t + g_{t+1}·(I − P_{t+1})·G_{t+1}, and for each token, with Y = g_t·M_{t−1}, e = v − Yᵀ·k̃, u = Gᵀ·k̃:

    dq̃ = M_t·dn,   dv = β·u,   dβ = u·e,   dk̃ = β·(G·e − Y·u),   dg_t = ⟨M_{t−1}, (I − P_t)·G_t⟩.

The reverse scan is the same with R_t for M_{t−1}, walked the other way; the normaliser is the same with plain keys and
values of one. Gradients of placed tokens leave the ray frame where they are made.
"""
