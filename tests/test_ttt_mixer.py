"""A model whose mixer is TTT-linear is served like any other: its state has the interface of the gated delta rule's."""

import pytest
import torch
from server_fixtures import begin, client_of, digests, path, post
from torch import Tensor

from longtake.kernels import GdnState, ttt_linear
from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.conditions import ChunkCondition
from longtake.server.model.gdn_attention import GdnAttention
from longtake.server.model.registry import load_model
from longtake.server.model.state import GdnMemory
from longtake.state_cache import Store

pytestmark = pytest.mark.anyio
CHUNKS = 4
Digests = list[tuple[int, str, str]]


def ttt_main(
    self: GdnAttention, h: Tensor, beta: Tensor, decay: Tensor, chunk: ChunkCondition, memory: GdnMemory | None
) -> tuple[Tensor, GdnState, Tensor]:
    """Main branch by TTT-linear: h in the place of KV, hb in that of Z, β as learning rate."""
    q, k, v = self.qkv(h).chunk(3, dim=-1)
    k, k_tail = self.conv_k(k, None if memory is None else memory.k_tail)
    heads, dim = self.heads
    found = ttt_linear(
        self.tokens(self.q_norm(q)),
        self.tokens(self.k_norm(k)),
        self.tokens(v),
        torch.ones(heads, dim),
        torch.zeros(heads, dim),
        beta.flatten(2).transpose(1, 2) / dim,
        initial_state=None if memory is None else memory.kv,
        initial_state_bias=None if memory is None else memory.z[:, :, None],
    )
    return found.out, GdnState(found.state, found.bias.squeeze(2)), k_tail


@pytest.fixture
def mixer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GdnAttention, "main", ttt_main)


async def taken(store: Store, chunks: range, session: str | None = None) -> tuple[str, Digests]:
    """Those chunks of a session, by a server of its own."""
    engine = Engine(load_model("tiny-untrained"), store, Limits(queue_size=8))
    try:
        async with client_of(engine) as http:
            session = session or await begin(http)
            answer = await post(http, session, path(24 * len(chunks), 24 * chunks.start + 1))
            return session, digests(answer)
    finally:
        engine.close()


async def test_a_take_goes_on_bit_for_bit_on_another_server(any_store: Store, mixer: None) -> None:
    _, uncut = await taken(any_store, range(CHUNKS))
    session, before = await taken(any_store, range(2))
    _, after = await taken(any_store, range(2, CHUNKS), session)
    assert before + after == uncut


async def test_it_is_another_model(any_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plain = await taken(any_store, range(1))
    monkeypatch.setattr(GdnAttention, "main", ttt_main)
    _, swapped = await taken(any_store, range(1))
    assert plain[0][2] != swapped[0][2]
