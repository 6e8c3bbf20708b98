"""Files beside the JSON: first frames and trajectories in multipart bodies."""

import asyncio
import io
import json
import threading
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from live_clients import body, until
from server_fixtures import STILL, begin, data_url, digests, path, picture, post

from longtake.api_schemas.problems import Problem, ProblemError


async def test_a_session_from_a_multipart_body(http: httpx.AsyncClient) -> None:
    files = {"image": ("first.png", picture(), "image/png"), "params": (None, '{"seed": 7}', "application/json")}
    answer = await http.post("/v1/sessions", files=files)
    assert answer.status_code == 201, answer.text
    session = answer.json()["links"]["self"]
    assert digests(await post(http, session, path(24))) == digests(await post(http, await begin(http), path(24)))


MISTAKES: dict[str, tuple[dict[str, object], str, str]] = {
    "no image": ({"params": (None, "{}")}, "invalid_request", "image"),
    "two images": (
        {"image": ("a.png", picture()), "params": (None, json.dumps({"image": data_url(picture())}))},
        "invalid_request",
        "image",
    ),
    "unknown part": ({"picture": ("a.png", picture())}, "invalid_request", "body"),
    "params that are no JSON": ({"image": ("a.png", picture()), "params": (None, "{")}, "malformed_json", ""),
    "bad params": ({"image": ("a.png", picture()), "params": (None, '{"seed": -1}')}, "invalid_request", "seed"),
    "a playlist": ({"image": ("a.png", b"ffconcat version 1.0\nfile /etc/hostname\n")}, "image_invalid", "image"),
}


@pytest.mark.parametrize(("files", "code", "field"), MISTAKES.values(), ids=MISTAKES.keys())
async def test_bad_multipart_bodies(http: httpx.AsyncClient, files: dict[str, object], code: str, field: str) -> None:
    answer = await http.post("/v1/sessions", files=files)
    problem = Problem.model_validate_json(answer.content)
    assert problem.code == code, answer.text
    assert not field or [error.field for error in problem.errors] == [field]
    assert (await http.get("/v1/sessions")).json()["data"] == []


async def test_a_trajectory_file_continues_where_the_session_stands(http: httpx.AsyncClient) -> None:
    file = io.BytesIO()
    np.save(file, np.array(path(101, start=0)))
    session = await begin(http)
    taken = []
    for frames in (30, None):
        options = {"format": "npy"} | ({"frames": frames} if frames else {})
        params = json.dumps({"camera": {"trajectory": options}})
        files = {"trajectory": ("path.npy", file.getvalue()), "params": (None, params)}
        answer = await http.post(f"{session}/chunks", files=files)
        taken += digests(answer)
        resolved = answer.json()["resolved"]
        assert (resolved["format"], resolved["frames"], resolved["axes"]) == ("npy", 101, "opencv")
    assert answer.json()["pending_poses"] == 4
    assert taken == digests(await post(http, await begin(http), path(100)))
    exhausted = await http.post(f"{session}/chunks", files=files)
    assert (exhausted.status_code, exhausted.json()["code"]) == (422, "trajectory_exhausted")


async def test_a_keyed_trajectory_is_replayed_and_another_file_refused(http: httpx.AsyncClient) -> None:
    session = await begin(http)

    async def send(poses: int) -> httpx.Response:
        file = io.BytesIO()
        np.save(file, np.array(path(poses, start=0)))
        params = json.dumps({"camera": {"trajectory": {"format": "npy"}}})
        files = {"trajectory": ("path.npy", file.getvalue()), "params": (None, params)}
        return await http.post(f"{session}/chunks", files=files, headers={"Idempotency-Key": "file"})

    first = await send(50)
    again = await send(50)
    assert (again.status_code, again.content) == (201, first.content)
    assert (await send(51)).json()["code"] == "idempotency_key_reused"


async def test_a_part_without_its_options_and_options_without_their_part(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    stray = {"trajectory": ("path.npy", b""), "params": (None, json.dumps({"camera": {"poses": [STILL]}}))}
    assert (await http.post(f"{session}/chunks", files=stray)).json()["code"] == "invalid_request"
    missing = await post(http, session, {"trajectory": {"format": "npy"}})
    assert [error["field"] for error in missing.json()["errors"]] == ["trajectory"]


async def test_params_are_given_once(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    parts = [("params", ("a.json", body(24))), ("params", ("b.json", body(24)))]
    answer = await http.post(f"{session}/chunks", files=parts)
    assert [error["field"] for error in answer.json()["errors"]] == ["params"]
    broken = await http.post(f"{session}/chunks", content=b"x", headers={"content-type": "multipart/form-data"})
    assert (broken.status_code, broken.json()["code"]) == (400, "malformed_body")


def form(*parts: tuple[str, bytes], closed: bytes = b"--x--\r\n") -> bytes:
    """A multipart body of the boundary x; each part has the parameters of its disposition and its bytes."""
    head = b"--x\r\nContent-Disposition: form-data; "
    return b"".join(head + disposition.encode() + b"\r\n\r\n" + data + b"\r\n" for disposition, data in parts) + closed


async def send(http: httpx.AsyncClient, address: str, content: bytes, charset: str = "") -> httpx.Response:
    kind = "multipart/form-data; boundary=x" + (f"; charset={charset}" if charset else "")
    return await http.post(address, content=content, headers={"content-type": kind})


PARAMS = ('name="params"', b'{"camera": {"trajectory": {"format": "tum", "start": 0, "frames": 2}}}')
TRAJECTORY = ('name="trajectory"; filename="a"', b"0 0 0 0 0 0 0 1\n1 0 0 0 0 0 0 1\n")


@pytest.mark.parametrize("parts", [(PARAMS, TRAJECTORY), (TRAJECTORY, PARAMS)], ids=["params first", "params last"])
async def test_a_body_without_its_end_changes_nothing(
    http: httpx.AsyncClient, parts: tuple[tuple[str, bytes], ...]
) -> None:
    session, whole = await begin(http), form(*parts, closed=b"--x--")
    before = (await http.get(session)).json()
    for size in range(len(whole)):
        answer = await send(http, f"{session}/chunks", whole[:size])
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body"), whole[:size]
    assert (await http.get(session)).json() == before
    for end in (b"", b"\r\n"):
        assert (await send(http, f"{session}/chunks", whole + end)).status_code == 201


async def test_an_image_without_its_end_makes_no_session(http: httpx.AsyncClient) -> None:
    whole = form(('name="params"', b"{}"), ('name="image"; filename="a"', picture()))
    for size in (len(whole) - 3, len(whole) // 2, 0):
        answer = await send(http, "/v1/sessions", whole[:size])
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_body")
    assert (await http.get("/v1/sessions")).json()["data"] == []


@pytest.mark.parametrize("charset", ["", "utf-8", "latin-1", "utf-16", "undefined", "idna", "rot13", "unknown"])
async def test_params_are_utf_8_whatever_charset_is_named(http: httpx.AsyncClient, charset: str) -> None:
    session = await begin(http)
    for disposition in ('name="params"', 'name="params"; filename="a"'):
        content = form((disposition, '{"prompt": "é 庭"}'.encode()))
        assert (await send(http, f"{session}/chunks", content, charset)).status_code == 201
        assert (await http.get(session)).json()["prompt"] == "é 庭"
        broken = form((disposition, b'{"prompt": "\xc3\xa9\xff"}'))
        answer = await send(http, f"{session}/chunks", broken, charset)
        assert (answer.status_code, answer.json()["code"]) == (400, "malformed_json")
    assert (await http.get(session)).json()["prompt"] == "é 庭"


NUMBERS = {
    "times past any clock": ("tum", b"0 0 0 0 0 0 0 1\n1e308 0 0 0 0 0 0 1\n", {}),
    "times that overflow": ("tum", b"-1e308 0 0 0 0 0 0 1\n1e308 0 0 0 0 0 0 1\n", {}),
    "slow beyond reason": ("kitti", b"1 0 0 0 0 1 0 0 0 0 1 0\n" * 30, {"fps": 1e-4, "frames": 1}),
    "a lens without width": (
        "transforms",
        json.dumps(
            {"camera_angle_x": 5e-324, "w": 65536, "h": 65536}
            | {"frames": [{"file_path": f"{i}.png", "transform_matrix": STILL} for i in range(3)]}
        ).encode(),
        {},
    ),
}


@pytest.mark.parametrize(("syntax", "data", "options"), NUMBERS.values(), ids=NUMBERS.keys())
async def test_numbers_of_a_file_that_nothing_can_be_computed_from(
    http: httpx.AsyncClient, syntax: str, data: bytes, options: dict[str, float]
) -> None:
    session = await begin(http)
    params = json.dumps({"camera": {"trajectory": {"format": syntax, **options}}})
    answer = await http.post(f"{session}/chunks", files={"trajectory": ("a", data), "params": (None, params)})
    assert (answer.status_code, answer.json()["code"]) in ((422, "trajectory_invalid"), (422, "intrinsics_invalid")), (
        answer.text
    )


async def test_plain_requests_do_not_wait_for_a_clip_and_a_clip_nobody_waits_for_ends(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, ended = threading.Event(), threading.Event()

    def slow(*_: object, abandoned: Callable[[], bool]) -> object:
        reading.set()
        while not abandoned():
            threading.Event().wait(0.01)
        ended.set()
        raise ProblemError("frames_invalid", "nobody waits", "frames")

    monkeypatch.setattr("longtake.server.engine.command.read_clip", slow)
    session = await begin(http)
    parts = [("params", (None, body(24))), ("frames", ("a.mp4", b"x"))]
    clip = asyncio.create_task(http.post(f"{session}/chunks", files=parts))
    await until(reading.is_set)
    other = await begin(http)
    assert (await post(http, other, path(24))).status_code == 201
    assert not ended.is_set()
    clip.cancel()
    await until(ended.is_set)
