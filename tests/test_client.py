"""The client against servers that fail in every way: each request is carried out once, and bytes come once."""

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from email.parser import BytesParser
from email.policy import HTTP
from pathlib import Path

import httpx
import numpy as np
import pytest
from client_kinds import KINDS
from pydantic import ValidationError
from server_fixtures import data_url, path, picture

from longtake.api_schemas.problems import PROBLEMS, ProblemError
from longtake.api_schemas.trajectory import TrajectoryOptions
from longtake.client import Client, ReplayError, Retry, ServerProblem

SESSION = "ses_" + "a" * 39
ADVANCED = {"data": [], "pending_poses": 5, "next_chunk": 0, "next_frame": 6}
VIDEO = bytes(range(256)) * 4
STILL = Retry(jitter=lambda: 0.0, clock=lambda: 0.0)

Step = httpx.Response | Exception


class Script:
    """A server that answers with one step after the other and remembers what it was asked."""

    def __init__(self, *steps: Step) -> None:
        self._steps = list(steps)
        self.requests: list[httpx.Request] = []
        self.slept: list[float] = []

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        step = self._steps.pop(0)
        if isinstance(step, Exception):
            raise step
        return step

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)

    async def sleep_async(self, seconds: float) -> None:
        self.slept.append(seconds)

    @property
    def keys(self) -> list[str | None]:
        return [request.headers.get("idempotency-key") for request in self.requests]


Connect = Callable[..., Client]


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest) -> Iterator[Connect]:
    """Makes a client of either kind that talks to a script."""
    opened = []

    def make(script: Script, retry: Retry = STILL, **options: object) -> Client:
        sleep = script.sleep if request.param == "sync" else script.sleep_async
        client = KINDS[request.param](
            "http://server", transport=httpx.MockTransport(script), sleep=sleep, retry=retry, **options
        )
        opened.append(client)
        return client

    yield make
    for client in opened:
        client.__exit__(None, None, None)


class Body(httpx.SyncByteStream, httpx.AsyncByteStream):
    """A body that comes in pieces and may break off."""

    def __init__(self, data: bytes, *, whole: bool = True) -> None:
        self._data = data
        self._whole = whole

    def __iter__(self) -> Iterator[bytes]:
        for start in range(0, len(self._data), 100):
            yield self._data[start : start + 100]
        if not self._whole:
            raise httpx.RemoteProtocolError("peer closed connection")

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            yield piece


def answer(status: int = 201, **fields: object) -> httpx.Response:
    return httpx.Response(status, json=fields or ADVANCED)


def problem(code: str, retry_after: int | None = None) -> httpx.Response:
    body = ProblemError(code, "a detail", "a.field").problem()
    headers = {"content-type": "application/problem+json"}
    if retry_after is not None:
        headers["retry-after"] = str(retry_after)
    return httpx.Response(body.status, content=body.model_dump_json(), headers=headers)


def mp4(data: bytes, *, whole: bool = True, status: int = 200, **headers: str) -> httpx.Response:
    return httpx.Response(status, stream=Body(data, whole=whole), headers={"content-type": "video/mp4", **headers})


def lost() -> httpx.ReadError:
    return httpx.ReadError("connection reset")


def passing() -> dict[str, Step]:
    """Failures that are nobody's last word."""
    return {
        "connection refused": httpx.ConnectError("refused"),
        "reply lost": lost(),
        "no byte in time": httpx.ReadTimeout("timed out"),
        "closed without a reply": httpx.RemoteProtocolError("disconnected"),
        "queue full": problem("queue_full", 2),
        "store away": problem("store_unavailable"),
        "going down": problem("shutting_down", 5),
        "still running": problem("in_progress", 1),
        "taken over": problem("session_fenced", 1),
        "worked on elsewhere": problem("session_busy", 3),
        "a proxy's 502": httpx.Response(502, text="<html>bad gateway</html>"),
    }


@pytest.mark.parametrize("failure", passing())
def test_what_may_pass_is_tried_again_as_the_same_request(connect: Connect, failure: str) -> None:
    script = Script(passing()[failure], passing()[failure], answer())
    assert connect(script).generate(SESSION, actions="w-5").pending_poses == 5
    first = script.requests[0]
    assert len(script.requests) == 3
    assert {(request.method, request.url, request.content) for request in script.requests} == {
        ("POST", first.url, b'{"camera":{"actions":"w-5"}}')
    }
    assert set(script.keys) == {first.headers["idempotency-key"]}


def final_codes() -> list[str]:
    busy = {"in_progress", "session_busy", "session_fenced"}
    return [code for code, (status, _) in PROBLEMS.items() if status != 503 and code not in busy]


@pytest.mark.parametrize("code", final_codes())
def test_every_other_problem_is_raised_at_once(connect: Connect, code: str) -> None:
    script = Script(problem(code, 3))
    with pytest.raises(ServerProblem, match=rf"^a.field: a detail \[{code}\]$") as raised:
        connect(script).generate(SESSION, actions="w-5")
    assert (raised.value.code, raised.value.retry_after, script.slept) == (code, 3.0, [])


def test_pauses_double_up_to_a_limit_and_add_what_the_server_asks_for(connect: Connect) -> None:
    retry = Retry(first_delay_s=1, max_delay_s=4, jitter=lambda: 0.5, clock=lambda: 0.0)
    script = Script(lost(), lost(), lost(), lost(), problem("queue_full", 7), answer())
    connect(script, retry).generate(SESSION, pad=True)
    assert script.slept == [0.75, 1.5, 3.0, 3.0, 10.0]


def test_attempts_are_bounded(connect: Connect) -> None:
    script = Script(*[lost() for _ in range(3)])
    with pytest.raises(httpx.ReadError):
        connect(script, Retry(attempts=3, clock=lambda: 0.0)).session(SESSION)
    assert (len(script.requests), len(script.slept)) == (3, 2)


def test_no_attempt_begins_after_the_deadline(connect: Connect) -> None:
    """Every look at the clock is ten seconds later; the first failure starts the count."""
    now = iter(range(0, 1000, 10))
    script = Script(*[problem("queue_full", 5) for _ in range(9)])
    with pytest.raises(ServerProblem):
        connect(script, Retry(deadline_s=30, jitter=lambda: 0.0, clock=lambda: float(next(now)))).session(SESSION)
    assert script.slept == [5.125, 5.25, 5.5]


def test_a_server_that_asks_for_more_than_the_deadline_is_not_waited_for(connect: Connect) -> None:
    script = Script(problem("queue_full", 3600))
    with pytest.raises(ServerProblem) as raised:
        connect(script).session(SESSION)
    assert (raised.value.retry_after, script.slept) == (3600.0, [])


def test_an_answer_from_something_else_has_a_code_too(connect: Connect) -> None:
    script = Script(httpx.Response(401, text="<html>who are you</html>"))
    with pytest.raises(ServerProblem) as raised:
        connect(script).models()
    assert (raised.value.code, raised.value.problem.status) == ("http_401", 401)


def test_every_post_has_a_key_of_its_own_unless_given(connect: Connect) -> None:
    script = Script(*[answer() for _ in range(3)])
    client = connect(script)
    for key in (None, None, "mine"):
        client.generate(SESSION, actions="w-5", key=key)
    assert len(set(script.keys)) == 3
    assert script.keys[2] == "mine"
    assert all(script.keys)


def test_a_session_whose_deletion_was_not_heard_of_is_deleted(connect: Connect) -> None:
    script = Script(lost(), problem("session_not_found"))
    connect(script).delete(SESSION)
    assert len(script.requests) == 2


def test_a_session_that_was_never_there_is_not_deleted(connect: Connect) -> None:
    with pytest.raises(ServerProblem, match="session_not_found"):
        connect(Script(problem("session_not_found"))).delete(SESSION)


def test_a_server_that_is_not_ready_is_an_answer(connect: Connect) -> None:
    script = Script(answer(503, ready=False, model="m", store="", durability="none", detail="away"))
    ready = connect(script).ready()
    assert (ready.ready, ready.detail, script.slept) == (False, "away", [])


@pytest.mark.parametrize("cuts", [[0], [1], [250], [100, 250, 990], [250, 100, 250], [1024]])
def test_a_stream_that_breaks_goes_on_where_it_broke(connect: Connect, cuts: list[int]) -> None:
    script = Script(*[mp4(VIDEO[:cut], whole=False) for cut in cuts], mp4(VIDEO))
    assert b"".join(connect(script).stream(SESSION, actions="w-48")) == VIDEO
    assert len(set(script.keys)) == 1
    assert {request.headers["accept"] for request in script.requests} == {"video/mp4"}
    assert not any("range" in request.headers for request in script.requests)


def test_a_stream_is_not_asked_for_before_it_is_read(connect: Connect) -> None:
    script = Script(httpx.Response(204))
    pieces = connect(script).stream(SESSION, actions="w-5")
    assert not script.requests
    assert list(pieces) == []
    assert len(script.requests) == 1


def test_a_stream_that_is_refused_is_a_problem(connect: Connect) -> None:
    script = Script(problem("queue_full", 1), problem("chunk_conflict"))
    with pytest.raises(ServerProblem, match="chunk_conflict"):
        next(iter(connect(script).stream(SESSION, actions="w-5")))
    assert len(script.slept) == 1


REPLAYS = {
    "another byte": (VIDEO[:99] + b"?" + VIDEO[100:], "differs"),
    "another byte at the cut": (VIDEO[:249] + b"?" + VIDEO[250:], "differs"),
    "too short": (VIDEO[:249], "1 bytes before"),
    "empty": (b"", "250 bytes before"),
}


@pytest.mark.parametrize(("replay", "message"), REPLAYS.values(), ids=REPLAYS.keys())
def test_a_replay_that_is_not_the_same_is_refused(connect: Connect, replay: bytes, message: str) -> None:
    script = Script(mp4(VIDEO[:250], whole=False), mp4(replay))
    got: list[bytes] = []
    with pytest.raises(ReplayError, match=message):
        got.extend(connect(script).stream(SESSION, actions="w-48"))
    assert b"".join(got) == VIDEO[:250]


def test_failures_of_a_stream_count_from_its_last_new_byte(connect: Connect) -> None:
    retry = Retry(attempts=2, clock=lambda: 0.0)
    going = [mp4(VIDEO[:stop], whole=False) for stop in range(100, 1000, 100)]
    assert b"".join(connect(Script(*going, mp4(VIDEO)), retry).stream(SESSION, actions="w-48")) == VIDEO
    standing = [mp4(VIDEO[:100], whole=False) for _ in range(2)]
    with pytest.raises(httpx.RemoteProtocolError):
        list(connect(Script(*standing), retry).stream(SESSION, actions="w-48"))


def test_a_stream_left_early_is_closed(connect: Connect) -> None:
    script = Script(mp4(VIDEO, whole=False))
    pieces = connect(script).stream(SESSION, actions="w-48")
    assert next(pieces) == VIDEO[:100]
    pieces.close()
    assert len(script.requests) == 1


def test_a_download_that_breaks_asks_for_the_rest(connect: Connect, tmp_path: Path) -> None:
    rest = mp4(VIDEO[300:], status=206, **{"content-range": f"bytes 300-1023/{len(VIDEO)}"})
    script = Script(mp4(VIDEO[:300], whole=False), rest)
    connect(script).save_video(SESSION, tmp_path / "take.mp4")
    assert (tmp_path / "take.mp4").read_bytes() == VIDEO
    assert [request.headers.get("range") for request in script.requests] == [None, "bytes=300-"]


def test_a_download_that_only_lost_its_end_is_whole(connect: Connect, tmp_path: Path) -> None:
    beyond = httpx.Response(416, json=json.loads(problem("range_not_satisfiable").content) | {"size": len(VIDEO)})
    beyond.headers["content-type"] = "application/problem+json"
    script = Script(mp4(VIDEO, whole=False), beyond)
    connect(script).save_video(SESSION, tmp_path / "take.mp4")
    assert (tmp_path / "take.mp4").read_bytes() == VIDEO
    assert [request.headers.get("range") for request in script.requests] == [None, f"bytes={len(VIDEO)}-"]


def test_a_download_whose_range_is_ignored_still_gives_each_byte_once(connect: Connect, tmp_path: Path) -> None:
    script = Script(mp4(VIDEO[:300], whole=False), mp4(VIDEO))
    connect(script).save_video(SESSION, str(tmp_path / "take.mp4"))
    assert (tmp_path / "take.mp4").read_bytes() == VIDEO


def test_a_download_that_goes_on_elsewhere_is_refused(connect: Connect) -> None:
    rest = mp4(VIDEO[200:], status=206, **{"content-range": f"bytes 200-1023/{len(VIDEO)}"})
    with pytest.raises(ReplayError, match="at byte 200 instead of 300"):
        list(connect(Script(mp4(VIDEO[:300], whole=False), rest)).video(SESSION))


def test_a_download_does_not_go_on_in_another_video(connect: Connect) -> None:
    """The session was rewound, or its oldest chunks have expired, since the first bytes came."""
    rest = {"status": 206, "content-range": f"bytes 300-1023/{len(VIDEO)}"}
    first, same = (
        mp4(VIDEO[:300], whole=False, etag='W/"0-0"'),
        mp4(VIDEO[300:600], whole=False, etag='W/"0-0"', **rest),
    )
    other = mp4(VIDEO[600:], etag='W/"1-0"', **{**rest, "content-range": f"bytes 600-1023/{len(VIDEO)}"})
    got: list[bytes] = []
    with pytest.raises(ReplayError, match="another"):
        got.extend(connect(Script(first, same, other)).video(SESSION))
    assert b"".join(got) == VIDEO[:600]


def test_a_refused_download_leaves_no_file(connect: Connect, tmp_path: Path) -> None:
    with pytest.raises(ServerProblem, match="chunk_not_found"):
        connect(Script(problem("chunk_not_found"))).save_video(SESSION, tmp_path / "take.mp4")
    assert not list(tmp_path.iterdir())


def test_lists_are_read_page_by_page(connect: Connect) -> None:
    script = Script(answer(200, data=[], next="ses_b"), answer(200, data=[], next=None))
    assert list(connect(script).sessions()) == []
    assert [request.url.query for request in script.requests] == [b"", b"after=ses_b"]


def test_the_key_of_a_caller_goes_with_every_request(connect: Connect) -> None:
    script = Script(answer(200, data=[]), lost(), answer())
    client = connect(script, api_key="secret")
    client.models()
    client.generate(SESSION, pad=True)
    assert [request.headers["authorization"] for request in script.requests] == ["Bearer secret"] * 3


def test_an_id_can_not_lead_elsewhere(connect: Connect) -> None:
    script = Script(problem("session_not_found"))
    with pytest.raises(ServerProblem):
        connect(script).session("../models?x=1")
    assert script.requests[0].url.raw_path == b"/v1/sessions/..%2Fmodels%3Fx%3D1"


def parts(request: httpx.Request) -> list[tuple[str, bytes]]:
    """Name and content of each part of a multipart body."""
    message = BytesParser(policy=HTTP).parsebytes(
        b"Content-Type: " + request.headers["content-type"].encode() + b"\r\n\r\n" + request.content
    )
    found = [(part.get_param("name", header="content-disposition"), part) for part in message.iter_parts()]
    return [(str(name), part.get_payload(decode=True)) for name, part in found]


def test_an_image_is_a_path_bytes_or_a_data_url(connect: Connect, tmp_path: Path) -> None:
    image = picture(32, 24)
    (tmp_path / "first.png").write_bytes(image)
    script = Script(*[problem("image_invalid") for _ in range(4)])
    client = connect(script)
    for given in (image, tmp_path / "first.png", str(tmp_path / "first.png"), data_url(image)):
        with pytest.raises(ServerProblem):
            client.create(given, seed=7, intrinsics=np.array([10.0, 10, 16, 12]), first_pose=np.eye(4), ttl_s=None)
    for request in script.requests:
        params, file = parts(request)
        assert json.loads(params[1]) == {
            "seed": 7,
            "intrinsics": [10.0, 10.0, 16.0, 12.0],
            "first_pose": np.eye(4).tolist(),
        }
        assert file == ("image", image)


def test_poses_are_arrays_or_lists_to_the_last_bit(connect: Connect) -> None:
    poses = path(3)
    script = Script(*[answer() for _ in range(3)])
    client = connect(script)
    for given in (poses, np.array(poses), [np.array(pose) for pose in poses]):
        client.generate(SESSION, poses=given, intrinsics=[np.ones(4, np.float32)] * 3, convention="opengl")
    for request in script.requests:
        camera = json.loads(request.content)["camera"]
        assert camera == {"poses": poses, "intrinsics": [[1.0] * 4] * 3, "convention": "opengl"}


def test_files_go_beside_the_parameters(connect: Connect, tmp_path: Path) -> None:
    (tmp_path / "images.txt").write_bytes(b"path")
    script = Script(answer(), answer())
    client = connect(script)
    options = TrajectoryOptions(format="colmap", frames=2)
    client.observe(
        SESSION, [b"one", b"two"], trajectory=tmp_path / "images.txt", options=options, cameras=b"cameras", pad=True
    )
    client.observe(SESSION, b"clip", poses=path(24), discard_pending=True, expected_chunk=1)
    (name, params), *files = parts(script.requests[0])
    assert name == "params"
    assert json.loads(params) == {"camera": {"trajectory": {"format": "colmap", "frames": 2}}, "pad": True}
    assert files == [("frames", b"one"), ("frames", b"two"), ("trajectory", b"path"), ("cameras", b"cameras")]
    (_, params), file = parts(script.requests[1])
    assert json.loads(params) == {"camera": {"poses": path(24)}, "discard_pending": True, "expected_chunk": 1}
    assert file == ("frames", b"clip")


@pytest.mark.parametrize(
    "move", [{}, {"poses": [np.full((4, 4), np.nan)]}, {"poses": path(1), "actions": "w-1"}, {"poses": np.eye(4)}]
)
def test_what_no_server_takes_is_not_sent(connect: Connect, move: dict[str, object]) -> None:
    script = Script()
    with pytest.raises(ValidationError):
        connect(script).generate(SESSION, **move)
    assert not script.requests


@pytest.mark.parametrize(
    ("move", "message"),
    [
        ({"actions": "w-24", "seed": 3}, "argument 'seed'$"),
        ({"actions": "w-24", "promt": "a tower"}, "'promt'; did you mean 'prompt'?"),
        ({"actions": "w-24", "options": TrajectoryOptions(start=0)}, "options say how a trajectory is read"),
    ],
)
def test_an_argument_that_would_be_ignored_is_refused(connect: Connect, move: dict[str, object], message: str) -> None:
    script = Script()
    client = connect(script)
    for call in (client.generate, lambda *a, **b: list(client.stream(*a, **b))):
        with pytest.raises(TypeError, match=message):
            call(SESSION, **move)
    with pytest.raises(TypeError, match="'promt'"):
        client.create(b"", promt="a tower")
    assert not script.requests


def test_the_client_imports_nothing_of_the_server() -> None:
    code = "import sys, longtake.client; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    heavy = {"torch", "redis", "fastapi", "starlette", "numpy", "longtake.server", "longtake.state_cache"}
    assert "longtake.client" in loaded
    assert not heavy & set(loaded)
