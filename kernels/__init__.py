"""Operators of streaming world models: frame-wise gated delta rule (`gdn`) and its camera branch (`cam`).

Layouts everywhere: tokens [B,N,H,D] with N = F*S, frames first; gates beta [B,H,F,S] and decay [B,H,F];
states [B,H,D,D] with rows = key dim and columns = value dim. References compute in fp32, or in float64 when
given float64.
"""
