"""Tiers of state: bytes within their budgets, sessions in use left alone, the same bits wherever a state was."""

import asyncio
import threading
from collections.abc import Callable, Mapping

import pytest
import torch
from store_fixtures import make_cursor
from torch import Tensor

from longtake.server.engine.copies import Parked, memory
from longtake.server.engine.tiers import Live, Tiers
from longtake.server.model.world import Conditions
from longtake.state_cache import Fence, Head

KIB = 1024
FENCE = Fence(3, "nonce")


class HostAsDevice:
    """Copies as a GPU makes them, between host memory and host memory; each waits for `go`."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.go.set()
        self.left = 0
        self.came_back = 0

    def leaving(self, tensors: Mapping[str, Tensor]) -> Callable[[], Parked]:
        def copy() -> Parked:
            assert self.go.wait(30)
            self.left += 1
            return Parked({name: x.clone() for name, x in tensors.items()}, frozenset(tensors))

        return copy

    def back(self, parked: Parked) -> dict[str, Tensor]:
        assert self.go.wait(30)
        self.came_back += 1
        assert parked.moved == parked.tensors.keys()
        return {name: x.clone() for name, x in parked.tensors.items()}


class BrokenCopies(HostAsDevice):
    def leaving(self, tensors: Mapping[str, Tensor]) -> Callable[[], Parked]:
        def copy() -> Parked:
            raise RuntimeError("no pinned memory")

        return copy


def make_live(value: int = 0, kib: int = 2, chunk: int = 0) -> Live:
    """A session of `kib` KiB, 1 KiB of which are its conditions."""
    frame = torch.full((256,), value, dtype=torch.uint8)
    conditions = Conditions(frame, frame.clone(), frame.clone(), frame.clone())
    state = {
        "kv": torch.full(((kib - 1) * KIB - 8,), value, dtype=torch.uint8),
        "z": torch.tensor([float("nan")], dtype=torch.float64),
    }
    return Live(FENCE, 0, chunk, conditions, state)


def same_bits(a: Live, b: Live) -> bool:
    pairs = [(a.state, b.state), (a.conditions.to_tensors(), b.conditions.to_tensors())]
    return all(
        list(x) == list(y) and all(torch.equal(x[name].view(torch.uint8), y[name].view(torch.uint8)) for name in x)
        for x, y in pairs
    )


def one_tier(kib: int) -> Tiers:
    return Tiers(0, kib * KIB, asyncio.to_thread)


def two_tiers(device_kib: int, host_kib: int, copies: HostAsDevice) -> Tiers:
    return Tiers(device_kib * KIB, host_kib * KIB, asyncio.to_thread, copies)


def test_a_session_stands_where_it_was_left() -> None:
    live = make_live(chunk=4)
    head = Head(chunk=4, revision=0, cursor=make_cursor())
    assert live.stands_at(FENCE, head)
    assert not live.stands_at(None, head)
    assert not live.stands_at(Fence(3, "other"), head)
    assert not live.stands_at(FENCE, Head(chunk=5, revision=0, cursor=make_cursor()))
    assert not live.stands_at(FENCE, Head(chunk=4, revision=1, cursor=make_cursor()))


def test_a_storage_counts_once_and_wholly() -> None:
    whole = torch.zeros(1000, dtype=torch.uint8)
    assert memory([whole, whole[:10], whole[500:]]) == 1000
    assert memory([whole[:10]]) == 1000
    assert memory([whole, whole.clone()]) == 2000
    assert memory([]) == 0
    assert memory([torch.zeros(0)]) == 0


async def test_on_a_cpu_the_least_recently_used_goes() -> None:
    tiers = one_tier(6)
    lives = {name: make_live(i) for i, name in enumerate("abcd")}
    for name in "abc":
        tiers.put(name, lives[name])
    assert tiers.holdings == {"device": (0, 0), "host": (3, 6 * KIB)}
    assert await tiers.get("a") is lives["a"]
    tiers.put("d", lives["d"])
    assert [name for name in "abcd" if await tiers.get(name) is lives[name]] == ["a", "c", "d"]
    assert tiers.holdings["host"] == (3, 6 * KIB)
    tiers.put("d", make_live(kib=4))
    assert await tiers.get("a") is None
    assert tiers.holdings["host"] == (2, 6 * KIB)
    tiers.drop("d")
    tiers.drop("never there")
    assert tiers.holdings["host"] == (1, 2 * KIB)


async def test_a_session_in_use_counts_and_stays() -> None:
    tiers = one_tier(4)
    async with tiers.exclusive("a"):
        tiers.put("a", make_live(kib=5))
        tiers.put("b", make_live())
        assert await tiers.get("a") is not None
        assert await tiers.get("b") is None
        assert tiers.holdings["host"] == (1, 5 * KIB)
    assert await tiers.get("a") is None, "over the budget, and idle"


async def test_requests_take_turns_in_the_order_of_asking() -> None:
    tiers, order = one_tier(4), []
    go = asyncio.Event()

    async def use(number: int) -> None:
        async with tiers.exclusive("a"):
            order.append(number)
            await go.wait()

    async def other() -> None:
        async with tiers.exclusive("b"):
            order.append(-1)
            go.set()

    await asyncio.gather(*(use(i) for i in range(4)), other())
    assert order == [0, -1, 1, 2, 3]


async def test_a_state_leaves_the_device_and_comes_back_the_same_bits() -> None:
    copies = HostAsDevice()
    tiers = two_tiers(4, 4, copies)
    lives = {name: make_live(i) for i, name in enumerate("abc")}
    for name in "abc":
        tiers.put(name, lives[name])
    await tiers.settled()
    assert copies.left == 1
    assert tiers.holdings == {"device": (2, 4 * KIB), "host": (1, 2 * KIB)}
    back = await tiers.get("a")
    assert back is not None
    assert same_bits(back, lives["a"])
    assert back.state["kv"].data_ptr() != lives["a"].state["kv"].data_ptr()
    assert (back.fence, back.revision, back.chunk) == (FENCE, 0, 0)
    await tiers.settled()
    assert copies.came_back == 1
    assert tiers.holdings == {"device": (2, 4 * KIB), "host": (1, 2 * KIB)}
    assert await tiers.get("c") is lives["c"]
    again = await tiers.get("b")
    assert again is not None
    assert same_bits(again, lives["b"])
    await tiers.settled()
    assert await tiers.get("b") is again, "on the device, with nothing to copy"
    assert copies.came_back == 2


async def test_past_both_budgets_a_state_is_dropped() -> None:
    copies = HostAsDevice()
    tiers = two_tiers(2, 4, copies)
    for i, name in enumerate("abcde"):
        tiers.put(name, make_live(i))
        await tiers.settled()
    assert tiers.holdings == {"device": (1, 2 * KIB), "host": (2, 4 * KIB)}
    assert [name for name in "ab" if await tiers.get(name) is not None] == []
    tiers.put("large", make_live(kib=5))
    await tiers.settled()
    assert await tiers.get("large") is None
    assert copies.left == 5, "what the host has no room for is not copied"


async def test_a_session_used_while_it_leaves_stays() -> None:
    copies = HostAsDevice()
    tiers = two_tiers(2, 8, copies)
    first, newer = make_live(1), make_live(2, chunk=1)
    copies.go.clear()
    tiers.put("a", first)
    tiers.put("b", make_live())
    assert await tiers.get("a") is first
    tiers.put("c", make_live(4))
    tiers.put("b", newer)
    copies.go.set()
    await tiers.settled()
    found = await tiers.get("b")
    assert found is not None
    assert found.chunk == 1
    assert same_bits(found, newer), "the copy of the older state came to nothing"


@pytest.mark.parametrize("waiting", ["leaving", "back"])
async def test_a_session_dropped_during_a_copy_is_gone(waiting: str) -> None:
    copies = HostAsDevice()
    tiers = two_tiers(2, 8, copies)
    tiers.put("a", make_live())
    if waiting == "leaving":
        copies.go.clear()
        tiers.put("b", make_live())
        tiers.drop("a")
    else:
        tiers.put("b", make_live())
        await tiers.settled()
        copies.go.clear()
        getting = asyncio.create_task(tiers.get("a"))
        await asyncio.sleep(0)
        tiers.drop("a")
        copies.go.set()
        assert await getting is not None
    copies.go.set()
    await tiers.settled()
    assert await tiers.get("a") is None
    assert sum(holding.sessions for holding in tiers.holdings.values()) == 1


async def test_a_session_in_use_never_leaves_the_device() -> None:
    copies = HostAsDevice()
    tiers = two_tiers(2, 8, copies)
    async with tiers.exclusive("a"):
        live = make_live(1)
        tiers.put("a", live)
        tiers.put("b", make_live())
        tiers.put("c", make_live())
        await tiers.settled()
        assert await tiers.get("a") is live
        assert tiers.holdings == {"device": (1, 2 * KIB), "host": (2, 4 * KIB)}
        copies.go.clear()
    tiers.put("b", make_live())
    async with tiers.exclusive("a"):  # it has begun to leave, but its next request has come
        copies.go.set()
        await tiers.settled()
        assert await tiers.get("a") is live
    await tiers.settled()
    assert tiers.holdings["device"].nbytes <= 2 * KIB, "the budget holds again once it is idle"


async def test_a_copy_that_fails_costs_only_the_memory(caplog: pytest.LogCaptureFixture) -> None:
    tiers = two_tiers(2, 8, BrokenCopies())
    tiers.put("a", make_live())
    tiers.put("b", make_live())
    await tiers.settled()
    assert tiers.holdings == {"device": (1, 2 * KIB), "host": (0, 0)}
    assert await tiers.get("a") is None
    assert "no pinned memory" in caplog.text
