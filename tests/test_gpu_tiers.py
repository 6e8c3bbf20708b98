"""States between a GPU and pinned memory: beside what computes, never ahead of it, and the same bits."""

import asyncio
import importlib.util
import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from longtake.server.engine.copies import GpuCopies, parked_memory
from longtake.server.engine.tiers import Live, Tiers
from longtake.server.model.world import Conditions

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

MIB = 2**20


def make_state(mib: int = 64) -> dict[str, Tensor]:
    """Tensors of several kinds, among them NaN, nothing, and one that stays on the host."""
    words = torch.randint(-(2**31), 2**31, (mib * MIB // 4,), dtype=torch.int32, device="cuda")
    return {
        "kv": words.view(torch.float32).reshape(2, -1),
        "tail": torch.randn(3, 1001, device="cuda").bfloat16(),
        "empty": torch.empty(0, 4, device="cuda"),
        "flag": torch.tensor([True, False, True], device="cuda"),
        "last_frame": torch.arange(251, dtype=torch.uint8),
    }


def make_live(state: dict[str, Tensor]) -> Live:
    conditions = Conditions(
        first_frame=torch.arange(200, dtype=torch.uint8),
        first_latent=torch.randn(1, 4, 1, 3, 5, device="cuda"),
        text=torch.randn(1, 7, 16, device="cuda"),
        text_mask=torch.ones(1, 7, dtype=torch.bool, device="cuda"),
    )
    return Live(None, 0, 3, conditions, state, exact_until=2)  # type: ignore[arg-type]


def bits(x: Tensor) -> Tensor:
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape) and torch.equal(bits(a[name]), bits(b[name]))
        for name in a
    )


def busy(seconds: float) -> None:
    """Keep the default stream computing for a while."""
    torch.cuda._sleep(int(seconds * 2e9))


@pytest.fixture
def state_digest(monkeypatch: pytest.MonkeyPatch) -> Callable[[dict[str, Tensor]], str]:
    """Out of `state_cache/digest.py` alone: the package asks for clients of stores."""
    if importlib.util.find_spec("msgspec") is None:
        stand_in = SimpleNamespace(json=SimpleNamespace(encode=lambda rows: json.dumps(rows).encode()))
        monkeypatch.setitem(sys.modules, "msgspec", stand_in)
    path = Path(__file__).parents[1] / "state_cache" / "digest.py"
    return runpy.run_path(str(path))["state_digest"]


def test_a_copy_holds_the_same_bits_in_pinned_memory() -> None:
    state = make_state()
    parked = GpuCopies().leaving(state)()
    assert same_bits(parked.tensors, state)
    assert parked.moved == state.keys() - {"last_frame"}
    assert parked.tensors["last_frame"] is state["last_frame"]
    assert all(parked.tensors[name].is_pinned() for name in ("kv", "tail", "flag"))
    assert all(not x.is_cuda for x in parked.tensors.values())


def test_the_digest_is_the_same_on_the_host(state_digest: Callable[[dict[str, Tensor]], str]) -> None:
    state = make_state()
    del state["empty"]
    parked = GpuCopies().leaving(state)()
    assert state_digest(parked.tensors) == state_digest(state)
    state["tail"][0, 0] += 1
    assert state_digest(parked.tensors) != state_digest(state)


def test_bytes_are_those_that_torch_pins() -> None:
    if "active_bytes.allocated" not in torch.cuda.host_memory_stats():
        pytest.skip("this torch does not count them")
    state = {name: torch.zeros(n, dtype=torch.uint8, device="cuda") for name, n in (("a", 5 * MIB), ("b", MIB))}
    before = torch.cuda.host_memory_stats()["active_bytes.allocated"]
    parked = GpuCopies().leaving(state)()
    assert parked_memory(state.values()) == 9 * MIB
    assert torch.cuda.host_memory_stats()["active_bytes.allocated"] - before == 9 * MIB
    assert parked_memory(parked.tensors.values()) == 6 * MIB, "no longer on the device, they are what they are"


def test_pinned_memory_is_used_again() -> None:
    copies, state = GpuCopies(), make_state()
    del state["empty"]
    first = copies.leaving(state)()
    del first
    allocated = torch.cuda.host_memory_stats()["num_host_alloc"]
    second = copies.leaving(state)()
    assert torch.cuda.host_memory_stats()["num_host_alloc"] == allocated
    assert same_bits(second.tensors, state)


def test_a_copy_runs_beside_what_computes_next() -> None:
    """It ends while the kernel that was asked for after it was told to leave still runs, both ways."""
    copies, state = GpuCopies(), make_state(256)
    copies.back(copies.leaving(state)())  # memory of both sides is allocated
    torch.cuda.synchronize()
    copy = copies.leaving(state)
    ended = torch.cuda.Event()
    busy(2.0)
    ended.record()
    parked = copy()
    assert not ended.query(), "the copy waited for the next chunk"
    back = copies.back(parked)
    assert not ended.query(), "the way back waited for the next chunk"
    ended.synchronize()
    assert same_bits(back, state)


def test_a_copy_waits_for_what_makes_its_state() -> None:
    copies = GpuCopies()
    source = torch.zeros(64 * MIB, dtype=torch.uint8, device="cuda")
    copies.leaving({"kv": source})()
    busy(0.3)
    made = source + 1
    parked = copies.leaving({"kv": made})()
    assert bool((parked.tensors["kv"] == 1).all())


def test_memory_of_a_state_that_left_is_not_written_during_its_copy() -> None:
    """The next chunks allocate and write while copies run; what they get is never what is still being read."""
    copies = GpuCopies()
    for round_ in range(20):
        state = {f"t{i}": torch.full((16 * MIB,), round_, dtype=torch.uint8, device="cuda") for i in range(8)}
        copy = copies.leaving(state)
        del state
        noise = [torch.full((16 * MIB,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]
        parked = copy()
        assert all(bool((x == round_).all()) for x in parked.tensors.values()), f"round {round_}"
        del noise


def test_memory_of_a_state_that_came_back_is_not_written_while_it_is_read() -> None:
    """Let go while kernels that read it are queued, it is not handed to the next state that comes back."""
    copies = GpuCopies()
    first = copies.leaving({"kv": torch.full((64 * MIB,), 1, dtype=torch.uint8, device="cuda")})()
    second = copies.leaving({"kv": torch.full((64 * MIB,), 2, dtype=torch.uint8, device="cuda")})()
    for parked in (first, second):
        copies.back(parked)  # so that there is memory to use again
    for _ in range(10):
        back = copies.back(first)["kv"]
        busy(0.05)
        read = back.clone()
        del back
        copies.back(second)
        assert bool((read == 1).all())


async def rounds(tiers: Tiers, lives: dict[str, Live]) -> None:
    for name, live in lives.items():
        tiers.put(name, live)
    await tiers.settled()
    for _ in range(3):
        for name, live in lives.items():
            async with tiers.exclusive(name):
                found = await tiers.get(name)
                assert found is not None
                assert same_bits(found.state, live.state)
                assert same_bits(found.conditions.to_tensors(), live.conditions.to_tensors())
                assert {n: x.device for n, x in found.state.items()} == {n: x.device for n, x in live.state.items()}
                assert (found.chunk, found.exact_until) == (3, 2)
                tiers.put(name, found)
            await tiers.settled()


def test_sessions_go_round_the_tiers_to_the_bit() -> None:
    states = {name: make_state(16) for name in "abcd"}
    kept = {name: {key: x.clone() for key, x in state.items()} for name, state in states.items()}
    lives = {name: make_live(state) for name, state in states.items()}
    tiers = Tiers(40 * MIB, 256 * MIB, asyncio.to_thread, GpuCopies())
    asyncio.run(rounds(tiers, lives))
    assert all(same_bits(states[name], kept[name]) for name in states)
    device, host = tiers.holdings["device"], tiers.holdings["host"]
    assert (device.sessions, host.sessions) == (2, 2)
    assert device.nbytes <= 40 * MIB


def test_the_device_is_free_of_a_state_that_left() -> None:
    async def leave() -> None:
        tiers = Tiers(40 * MIB, 1024 * MIB, asyncio.to_thread, GpuCopies())
        base = torch.cuda.memory_allocated()
        for i in range(8):
            tiers.put(str(i), make_live(make_state(32)))
            await tiers.settled()
            assert torch.cuda.memory_allocated() - base < 80 * MIB
        assert tiers.holdings["host"].sessions == 7

    asyncio.run(leave())
