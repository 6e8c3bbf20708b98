"""Parts of the transformer on golden operator vectors."""

import golden
import pytest
import torch

from longtake.server.model.attention import attend
from longtake.server.model.conditions import CameraCondition, ChunkCondition, TextCondition
from longtake.server.model.rope import axis_pairs, rope_tables
from longtake.server.model.weights import build_transformer

OPS = golden.load("gdn_ops")
CONFIG = golden.tiny_config(cam_downscale_gdn=True, cam_downscale_softmax=True)
MODEL = build_transformer(CONFIG, golden.load("tiny_weights"), dtype=torch.float32)
BOUND = 2e-5
CHUNKS = [("chunk0", 0, 4), ("chunk1", 4, 7)]
X = OPS["x"].view(1, 7, 24, 64)


def condition(start: int, stop: int) -> ChunkCondition:
    """Positions and rays of the frames start … stop − 1 of the golden camera; no text."""
    shape = (stop - start, 4, 6)
    cos, sin, cam_cos, cam_sin = (table.float() for table in rope_tables(start, shape, 16, 10000.0))
    rows = slice(start * 24, stop * 24)
    none = torch.zeros(0)
    camera = CameraCondition(OPS["cam.P"][:, rows], OPS["cam.P_inv"][:, rows], cam_cos, cam_sin, none)
    return ChunkCondition(TextCondition((), (), none), shape, cos, sin, camera)


@pytest.mark.parametrize("start", [0, 7, 121, 1021])
@pytest.mark.parametrize("dim", [16, 112])
def test_rope_tables_match_golden(dim: int, start: int) -> None:
    tables = rope_tables(start, (3, 2, 3), dim, 10000.0)
    for name, ours in tables._asdict().items():
        assert golden.worst(ours, OPS[f"rope{dim}.f{start}_{start + 3}.{name}"]) < 1e-9


def test_rope_at_frame_2000_turns_by_exactly_that_many_radians() -> None:
    tables = rope_tables(2000, (1, 1, 1), 112, 10000.0)
    assert tables.cos[0, 0] == torch.tensor(2000.0, dtype=torch.float64).cos()
    assert tables.cos[0, 20:].eq(1).all()


@pytest.mark.parametrize(("dim", "pairs"), [(112, (20, 18, 18)), (56, (10, 9, 9)), (40, (8, 6, 6)), (16, (4, 2, 2))])
def test_pairs_are_split_over_frame_row_and_column(dim: int, pairs: tuple[int, int, int]) -> None:
    assert axis_pairs(dim) == pairs
    assert 2 * sum(pairs) == dim


def test_gates_match_golden() -> None:
    beta, decay = MODEL.blocks[0].attn.gates(X)
    assert golden.worst(beta, OPS["gates.beta"]) < 1e-6
    assert golden.worst(decay, OPS["gates.decay"]) < 1e-6


def test_time_embedding_matches_golden() -> None:
    embedding = MODEL.t_embedder(OPS["temb.t"][None], torch.float32)
    assert golden.worst(embedding[0], OPS["temb.t_emb"]) < BOUND
    assert golden.worst(MODEL.t_block(embedding)[0], OPS["temb.t6"]) < BOUND


def test_timesteps_are_cut_to_whole_numbers() -> None:
    whole, cut = (MODEL.t_embedder(torch.tensor([[t]]), torch.float32) for t in (889.0, 889.9))
    assert torch.equal(whole, cut)


def test_text_embedding_matches_golden() -> None:
    dense = golden.load("dense")
    assert golden.worst(MODEL.attention_y_norm(MODEL.y_embedder(dense["in.text"])), dense["hidden.y"]) < BOUND


@torch.no_grad()
def test_main_branch_by_chunks_matches_golden() -> None:
    attention, memory = MODEL.blocks[0].attn, None
    for name, start, stop in CHUNKS:
        chunk, h = condition(start, stop), X[:, start:stop]
        out, _, _ = attention.main(h, *attention.gates(h), chunk, memory)
        _, memory = attention(h, chunk, memory, write=True)
        assert golden.worst(out.flatten(2), OPS[f"gdn_main.{name}.out"]) < BOUND
        assert golden.worst(memory.kv.mT, OPS[f"gdn_main.{name}.slot0"]) < BOUND
        assert golden.worst(memory.z[..., None], OPS[f"gdn_main.{name}.slot1"]) < BOUND
        assert golden.worst(memory.k_tail[0].transpose(0, 1), OPS[f"gdn_main.{name}.slot4"]) < BOUND


@torch.no_grad()
def test_softmax_attention_by_chunks_matches_golden() -> None:
    attention, memory = MODEL.blocks[3].attn, None
    for name, start, stop in CHUNKS:
        out, memory = attention(X[:, start:stop], condition(start, stop), memory, write=True)
        for slot, ours in enumerate(memory.spans[-1]):
            assert golden.worst(ours, OPS[f"softmax.{name}.slot{slot}"]) < BOUND
    assert golden.worst(out.flatten(1, 2), OPS["softmax.chunk1.attn_out"]) < BOUND


@torch.no_grad()
def test_ffn_by_chunks_matches_golden() -> None:
    ffn, tail = MODEL.blocks[0].mlp, None
    assert golden.worst(ffn(X, (4, 6), None)[0].flatten(1, 2), OPS["ffn.dense"]) < BOUND
    for name, start, stop in CHUNKS:
        out, tail = ffn(X[:, start:stop], (4, 6), tail)
        assert golden.worst(out.flatten(1, 2), OPS[f"ffn.{name}.out"]) < BOUND
        assert golden.worst(tail.transpose(1, 2)[:, :, None], OPS[f"ffn.{name}.tail"]) < BOUND


@pytest.mark.parametrize(("scale", "output"), [(128**-0.5, "out"), (112**-0.5, "out_scale112")])
def test_window_attention_matches_golden(scale: float, output: str) -> None:
    out = attend(*(OPS[f"sdpa112.{name}"] for name in "qkv"), scale)
    assert golden.worst(out, OPS[f"sdpa112.{output}"]) < BOUND
