"""The carried state: never mutated, flat and back, and the same bits after a restore."""

import hashlib
from dataclasses import replace
from functools import cache

import golden
import pytest
import torch
from torch import Tensor

from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.sampler import absorb_chunk, denoise_chunk
from longtake.server.model.state import StateLayoutError, TransformerState
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.weights import build_transformer


@cache
def model(dtype: torch.dtype = torch.float32, **switches: bool) -> SanaWMTransformer:
    return build_transformer(golden.tiny_config(**switches), golden.load("tiny_weights"), dtype=dtype)


def chunk_inputs(net: SanaWMTransformer, start: int, stop: int) -> tuple[Tensor, ChunkCondition]:
    inputs = golden.load("streaming")
    text = net.encode_text(inputs["in.text"], inputs["in.text_mask"])
    camera = (inputs["in.camera_conditions"][:, start:stop], inputs["in.chunk_plucker"][:, :, start:stop])
    return inputs["in.clean_latents"][:, :, start:stop], net.encode_chunk(text, start, (stop - start, 4, 6), *camera)


def state_after(net: SanaWMTransformer, *bounds: int) -> TransformerState:
    state = None
    for start, stop in zip((0, *bounds), bounds, strict=False):
        state = absorb_chunk(net, *chunk_inputs(net, start, stop), state)
    assert state is not None
    return state


def fresh(state: TransformerState, net: SanaWMTransformer) -> TransformerState:
    """The state as a store would give it back: the same values in other memory."""
    copies = {name: torch.empty(x.shape, dtype=x.dtype).copy_(x) for name, x in state.to_tensors().items()}
    return TransformerState.from_tensors(copies, net.config)


def bits(state: TransformerState) -> dict[str, str]:
    flat = {name: x.view(torch.uint8).numpy().tobytes() for name, x in state.to_tensors().items()}
    return {name: hashlib.sha256(data).hexdigest() for name, data in flat.items()}


def test_names_come_in_layout_order() -> None:
    names = list(state_after(model(), 4, 7, 10).to_tensors())
    gdn = ["kv", "z", "cam_kv", "k_tail", "ffn_tail"]
    assert names[:5] == [f"blocks.0.{name}" for name in gdn]
    spans = [f"{place}.{name}" for place in ("sink", "window.0") for name in ("k", "v", "cam_k", "cam_v")]
    assert names[15:] == [f"blocks.3.{name}" for name in (*spans, "ffn_tail")]
    assert list(state_after(model(cache_cam_conv=True), 4).to_tensors())[4] == "blocks.0.cam_k_tail"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_every_tensor_owns_its_memory_with_standard_strides(dtype: torch.dtype) -> None:
    for name, x in state_after(model(dtype), 4, 7, 10).to_tensors().items():
        assert x.stride() == torch.empty(x.shape).stride(), name
        assert x.storage_offset() == 0, name
        assert x.untyped_storage().nbytes() == x.numel() * x.element_size(), name


@pytest.mark.parametrize("switches", [{}, {"cache_cam_conv": True}, {"sink_token": False}], ids=str)
@pytest.mark.parametrize("bounds", [(4,), (4, 7), (4, 7, 10)], ids=len)
def test_state_survives_its_flat_form(bounds: tuple[int, ...], switches: dict[str, bool]) -> None:
    net = model(**switches)
    state = state_after(net, *bounds)
    back = TransformerState.from_tensors(state.to_tensors(), net.config)
    assert list(back.to_tensors()) == list(state.to_tensors())
    assert bits(back) == bits(state)


def test_size_stops_growing_after_the_second_chunk() -> None:
    states = [state_after(model(), *bounds) for bounds in ((4, 7), (4, 7, 10), (4, 7, 10, 13))]
    shapes = [{name: x.shape for name, x in state.to_tensors().items()} for state in states]
    assert shapes[0] == shapes[1] == shapes[2]


def test_the_sink_is_shared_not_copied() -> None:
    first = state_after(model(), 4)
    second = absorb_chunk(model(), *chunk_inputs(model(), 4, 7), first)
    assert second.to_tensors()["blocks.3.sink.k"] is first.to_tensors()["blocks.3.sink.k"]


@torch.no_grad()
def test_reading_and_writing_passes_leave_the_state_alone() -> None:
    state = state_after(model(), 4, 7)
    before = bits(state)
    latents, chunk = chunk_inputs(model(), 7, 10)
    _, nothing = model()(latents, torch.full((1, 3), 889.0), chunk, state)
    written = absorb_chunk(model(), latents, chunk, state)
    assert nothing is None
    assert bits(state) == before
    assert bits(written) != before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_a_restored_state_continues_with_the_same_bits(dtype: torch.dtype) -> None:
    net = model(dtype)
    kept = state_after(net, 4, 7)
    restored = fresh(kept, net)
    for start in (7, 10, 13):
        noise, chunk = chunk_inputs(net, start, start + 3)
        clean, again = (denoise_chunk(net, noise, chunk, state) for state in (kept, restored))
        assert torch.equal(clean, again)
        kept, restored = (absorb_chunk(net, clean, chunk, state) for state in (kept, fresh(restored, net)))
        assert bits(kept) == bits(restored)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_strides_of_the_latents_change_no_bit(dtype: torch.dtype) -> None:
    net = model(dtype)
    latents, chunk = chunk_inputs(net, 0, 4)
    channels_last = latents.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)
    states = [absorb_chunk(net, x, chunk, None) for x in (latents, latents.contiguous(), channels_last)]
    assert bits(states[0]) == bits(states[1]) == bits(states[2])
    with torch.no_grad():
        assert net(channels_last, torch.zeros(1, 4), chunk)[0].is_contiguous()


@pytest.mark.parametrize(
    ("removed", "added", "message"),
    [
        pytest.param("blocks.0.z", None, "blocks.0.z is missing", id="gdn-missing"),
        pytest.param("blocks.3.sink.cam_v", None, "blocks.3.sink.cam_v is missing", id="sink-missing"),
        pytest.param("blocks.3.window.0.v", None, "blocks.3.window.0.v is missing", id="window-missing"),
        pytest.param(None, "blocks.0.cam_k_tail", "unknown state tensor blocks.0.cam_k_tail", id="switch-off"),
        pytest.param(None, "blocks.4.kv", "unknown state tensor blocks.4.kv", id="deeper-model"),
        pytest.param(None, "blocks.3.window.1.k", "unknown state tensor blocks.3.window.1.k", id="longer-window"),
    ],
)
def test_foreign_layouts_are_refused(removed: str | None, added: str | None, message: str) -> None:
    tensors = state_after(model(), 4, 7).to_tensors()
    if removed:
        del tensors[removed]
    if added:
        tensors[added] = torch.zeros(1)
    with pytest.raises(StateLayoutError, match=message):
        TransformerState.from_tensors(tensors, model().config)


def test_strided_tensors_are_refused() -> None:
    tensors = state_after(model(), 4).to_tensors()
    tensors["blocks.0.kv"] = tensors["blocks.0.kv"].mT
    with pytest.raises(StateLayoutError, match=r"blocks\.0\.kv is not contiguous"):
        TransformerState.from_tensors(tensors, model().config)


def test_state_of_another_window_is_refused() -> None:
    tensors = state_after(model(), 4, 7).to_tensors()
    with pytest.raises(StateLayoutError, match="unknown state tensor"):
        TransformerState.from_tensors(tensors, replace(model().config, num_cached_blocks=1))
