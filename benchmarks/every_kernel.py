"""Run every Triton kernel once at a small odd shape, for compute-sanitizer.

`PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck python -m benchmarks.every_kernel`, and the same
with racecheck and synccheck.
"""

from functools import partial

import torch

from longtake.kernels import (
    GdnState,
    cam_branch,
    cam_discount,
    cam_output,
    cam_prepare,
    cam_scan,
    frame_gates,
    gate_merge,
    gdn_merge,
    gdn_scan,
    inverse_rms,
    ray_matrices,
    short_conv,
    ttt_linear,
)

BATCH, FRAMES, DIM = 1, 3, 112


def launch_every_kernel(device: torch.device, *, heads: int = 2, height: int = 3, width: int = 5) -> None:
    """Scans with everything that they can be given, then the operators around them."""
    torch.manual_seed(0)
    per_frame = height * width
    tokens = FRAMES * per_frame
    random, uniform = partial(torch.randn, device=device), partial(torch.rand, device=device)
    qkv = random(BATCH, tokens, 3, heads, DIM).bfloat16()
    q, k, v = qkv.unbind(2)
    x = k.unflatten(1, (FRAMES, per_frame)).flatten(3)
    weight = uniform(heads * DIM)
    gates = random(BATCH, FRAMES, per_frame, heads), random(BATCH, FRAMES, heads)
    beta, decay = frame_gates(*gates, uniform(heads), uniform(heads))
    state = GdnState(random(BATCH, heads, DIM, DIM), uniform(BATCH, heads, DIM))
    raymap = random(BATCH, FRAMES, 20)
    places = ray_matrices(raymap, height, width)
    angles = uniform(tokens, DIM // 2)
    turns = {"cos": angles.cos(), "sin": angles.sin()}
    camera = angles[:, : DIM // 4].cos().contiguous(), angles[:, : DIM // 4].sin().contiguous()
    gate = v.contiguous()
    norms = {"q_weight": weight, "k_weight": weight, "k_scale": (DIM * per_frame) ** -0.5}
    common = {"direction": "both", "chunk_starts": [0, 2]}
    for precision in ("bf16", "bf16-snapshot", "tf32", "ieee"):
        how = common | {"precision": precision}
        gdn_scan(q, k, v, beta, decay, norm="full", **norms, **turns, eps=1e-8, gate=gate, initial_state=state, **how)
        gdn_scan(q, k, v, beta, decay, norm="head", **norms, initial_state=state, out_state=state, **how)
        cam_branch(q, k, v, beta, decay, *places, *camera, **norms, initial_state=state.kv, **how)
        cam_scan(q, k, v, beta, decay, initial_state=state.kv, out_state=state.kv, **how)
        leaf = qkv.detach().requires_grad_()
        trained = norms | {"q_weight": weight.clone().requires_grad_()}
        read = gdn_scan(*leaf.unbind(2), beta, decay, norm="full", **trained, **turns, initial_state=state, **how)
        seen = cam_branch(*leaf.unbind(2), beta, decay, *places, *camera, **trained, initial_state=state.kv, **how)
        torch.autograd.backward([read.out, read.denominator, seen.out], [read.out, read.denominator, seen.out])
    prepared = cam_prepare(q, k, v, *places, *camera, **norms)
    cam_discount(beta, prepared.inflation)
    cam_output(prepared.q, places[0], *camera, dtype=torch.bfloat16)
    inverse_rms(q, k, eps=1e-5)
    short_conv(x, random(heads * DIM, 4), None)
    numerator, denominator = prepared.q, uniform(BATCH, tokens, heads) + 1
    gdn_merge((numerator, denominator), (numerator, denominator), eps=1e-8, gate=q.contiguous(), dtype=torch.bfloat16)
    gate_merge(q.contiguous(), k.contiguous(), v.contiguous())
    lengths = torch.tensor([0, 5, 5, tokens], device=device)
    states = random(3, heads, DIM, DIM), random(3, heads, 1, DIM)
    inner = {"w": weight.view(heads, DIM), "b": weight.view(heads, DIM), "eta": uniform(BATCH, tokens, heads) / 8}
    for dtype, pack in ((torch.bfloat16, (*states, lengths)), (torch.float32, (None, None, None))):
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (q, k, v, *inner.values())]
        given = dict(zip(("initial_state", "initial_state_bias", "cu_seqlens"), pack, strict=True))
        with torch.no_grad():
            ttt_linear(*leaves, **given)
        found = ttt_linear(*leaves, **given)
        torch.autograd.backward(found, [y.detach() for y in found])


def main() -> None:
    """On the current GPU."""
    if not torch.cuda.is_available():
        raise SystemExit("the kernels run on a CUDA GPU, and there is none")
    launch_every_kernel(torch.device("cuda"))
    torch.cuda.synchronize()
    print("every kernel ran")


if __name__ == "__main__":
    main()
