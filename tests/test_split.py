"""Split equivalence: however a camera path is cut into requests, frames and states are the same bits."""

import httpx
import pytest
from server_fixtures import begin, client_of, digests, path, post

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.world import WorldModel
from longtake.state_cache import MemoryStore

ACTIONS = "w-30,wd-25,none-9,iw-40,k-24,j-16"


@pytest.fixture(scope="module")
def whole() -> dict[str, list[tuple[int, str, str]]]:
    """Digests of the takes made in one request, filled by the first test that needs them."""
    return {}


async def _in_pieces(http: httpx.AsyncClient, pieces: list[object]) -> list[tuple[int, str, str]]:
    session = await begin(http)
    return [chunk for piece in pieces for chunk in digests(await post(http, session, piece))]


async def _whole(http: httpx.AsyncClient, known: dict[str, list[tuple[int, str, str]]], kind: str) -> object:
    if kind not in known:
        known[kind] = await _in_pieces(http, [path(144) if kind == "poses" else ACTIONS])
        assert [index for index, _, _ in known[kind]] == [0, 1, 2, 3, 4, 5]
    return known[kind]


@pytest.mark.parametrize(
    "sizes",
    [[24] * 6, [7, 50, 31, 1, 55], [1, 143], [23, 2, 119], [120, 24]],
    ids=lambda sizes: "-".join(map(str, sizes)),
)
async def test_poses_in_pieces(
    http: httpx.AsyncClient, whole: dict[str, list[tuple[int, str, str]]], sizes: list[int]
) -> None:
    starts = [1 + sum(sizes[:i]) for i in range(len(sizes))]
    pieces: list[object] = [path(size, start) for size, start in zip(sizes, starts, strict=True)]
    assert await _in_pieces(http, pieces) == await _whole(http, whole, "poses")


@pytest.mark.parametrize(
    "pieces",
    [ACTIONS.split(","), ["w-29", "w-1,wd-25,none-8", "none-1,iw-40,k-12", "k-12,j-16"]],
    ids=["by segment", "inside segments"],
)
async def test_actions_in_pieces(
    http: httpx.AsyncClient, whole: dict[str, list[tuple[int, str, str]]], pieces: list[object]
) -> None:
    assert await _in_pieces(http, pieces) == await _whole(http, whole, "actions")


async def test_a_session_dropped_from_memory_between_requests(
    model: WorldModel, http: httpx.AsyncClient, whole: dict[str, list[tuple[int, str, str]]]
) -> None:
    engine = Engine(model, MemoryStore(), Limits(queue_size=4))
    async with client_of(engine) as small:
        session, other = await begin(small), await begin(small)
        found = []
        for chunk in range(6):
            found += digests(await post(small, session, path(24, 24 * chunk + 1)))
            await post(small, other, path(24, 24 * chunk + 1))
    engine.close()
    assert found == await _whole(http, whole, "poses")


async def test_sessions_side_by_side_do_not_touch_each_other(
    http: httpx.AsyncClient, whole: dict[str, list[tuple[int, str, str]]]
) -> None:
    import asyncio

    expected = await _whole(http, whole, "poses")
    sessions = [await begin(http) for _ in range(3)]
    answers = await asyncio.gather(*(post(http, session, path(144)) for session in sessions))
    assert [digests(answer) for answer in answers] == [expected] * 3
