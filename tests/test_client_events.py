"""The client listening to servers that cut it off: no event is missed, and none comes twice."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from client_kinds import KINDS

from longtake.api_schemas.events import Failure, Progress, Rewound
from longtake.api_schemas.problems import ProblemError
from longtake.api_schemas.resources import Chunk
from longtake.client import Client, Event, Retry, ServerProblem

SESSION = "ses_" + "a" * 39
BRIEF = Retry(attempts=3, jitter=lambda: 0.0, clock=lambda: 0.0)
END = "event: end\ndata: {}\n\n"


def greeting(position: str) -> str:
    return f"retry: 1000\nid: {position}\n\n"


def chunk(index: int, revision: int = 0) -> str:
    made = Chunk(
        index=index, kind="generate", frame_start=1, frame_count=24, seed=7, prompt=None,
        frames_digest="f", state_digest="s", timings_ms={}, expired=False, links={}, warnings=["a\u2028b"],
    )  # fmt: skip
    return f"event: chunk\nid: {revision}-{index}\ndata: {made.model_dump_json(ensure_ascii=True)}\n\n"


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """Text in small pieces, whose connection may break at its end."""

    def __init__(self, text: str, *, broken: bool) -> None:
        self._data = text.encode()
        self._broken = broken

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._data), 7):
            yield self._data[start : start + 7]
        if self._broken:
            raise httpx.ReadError("reset")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


class Script:
    """A server that answers with one stream after the other, and remembers behind which event it was asked to go on."""

    def __init__(self, *steps: object) -> None:
        self._steps = list(steps)
        self.asked: list[str | None] = []
        self.slept: list[float] = []
        self.timeouts: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request.headers.get("last-event-id"))
        self.timeouts.append(request.extensions["timeout"]["read"])
        step = self._steps.pop(0)
        if isinstance(step, ProblemError):
            body = step.problem()
            headers = {"content-type": "application/problem+json"}
            return httpx.Response(body.status, content=body.model_dump_json(), headers=headers)
        text, broken = step if isinstance(step, tuple) else (step, False)
        return httpx.Response(200, stream=Body(text, broken=broken), headers={"content-type": "text/event-stream"})

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def connect(script: Script, kind: str) -> Client:
    sleep = script.sleep if kind == "sync" else script.sleep_async
    return KINDS[kind]("http://server", transport=httpx.MockTransport(script), sleep=sleep, retry=BRIEF)


def heard(script: Script, kind: str, last_event_id: str | None = None) -> list[Event]:
    with connect(script, kind) as client:
        return list(client.events(SESSION, last_event_id))


def test_events_have_their_own_types(kind: str) -> None:
    script = Script(
        greeting("0-2")
        + 'event: progress\ndata: {"chunk": 3, "stage": "computing"}\n\n'
        + ":\n\n"
        + chunk(3)
        + 'event: error\ndata: {"code": "store_full"}\n\n'
        + 'event: rewound\nid: 1-0\ndata: {"revision": 1, "to_chunk": 0}\n\n'
        + "event: of_a_later_version\ndata: 7\n\n"
        + END
    )
    progress, made, error, rewound, end = heard(script, kind)
    assert progress.data == Progress(chunk=3, stage="computing")
    assert isinstance(made.data, Chunk)
    assert (made.name, made.id, made.data.index, made.data.warnings) == ("chunk", "0-3", 3, ["a\u2028b"])
    assert error.data == Failure(code="store_full")
    assert (rewound.data, rewound.id) == (Rewound(revision=1, to_chunk=0), "1-0")
    assert (end.name, progress.id, error.id, end.id) == ("end", None, None, None)
    assert (script.asked, script.timeouts) == ([None], [60.0])


@pytest.mark.parametrize("broken", [True, False], ids=["reset", "closed"])
def test_a_stream_that_ends_goes_on_behind_its_last_event(kind: str, broken: object) -> None:
    """In the middle of an event, before the first, and after some."""
    script = Script(
        (greeting("0-4") + chunk(5)[:40], broken),
        (greeting("0-4") + chunk(5) + chunk(6), broken),
        (chunk(7)[:9], broken),
        greeting("0-6") + chunk(7) + END,
    )
    assert [event.id for event in heard(script, kind)] == ["0-5", "0-6", "0-7", None]
    assert script.asked == [None, "0-4", "0-6", "0-6"]


def test_a_position_is_where_to_begin(kind: str) -> None:
    script = Script(("", True), greeting("2--1") + chunk(0, revision=2) + END)
    assert [event.id for event in heard(script, kind, "2--1")] == ["2-0", None]
    assert script.asked == ["2--1", "2--1"]


def test_a_server_that_only_greets_is_not_asked_for_ever_without_a_pause(kind: str) -> None:
    """Whatever comes is progress; three ends in a row with nothing between them are the last word."""
    script = Script(*[greeting("0-0") + ":\n\n" for _ in range(5)], "", "")
    with pytest.raises(httpx.RemoteProtocolError):
        heard(script, kind)
    assert len(script.slept) == len(script.asked) - 1 == 6


def test_refusals_are_raised_or_waited_for(kind: str) -> None:
    script = Script(ProblemError("queue_full", "full"), ProblemError("session_not_found", "gone"))
    with pytest.raises(ServerProblem, match="session_not_found"):
        heard(script, kind)
    assert len(script.slept) == 1
