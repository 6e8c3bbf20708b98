"""Bad input: an RFC 9457 problem that names the field, never repeats the input, and changes nothing."""

import copy
import json
import struct
import zlib
from collections.abc import Callable

import httpx
import numpy as np
import pytest
from server_fixtures import MAX_BODY, STILL, begin, data_url, first_frame, path, picture, post

from longtake.api_schemas.problems import PROBLEMS, Problem


def changed(edit: Callable[[list[list[list[float]]]], object]) -> list[list[list[float]]]:
    poses = copy.deepcopy(path(24))
    edit(poses)
    return poses


def assigned(frame: int, row: int, column: int, value: float) -> list[list[list[float]]]:
    def edit(poses: list[list[list[float]]]) -> None:
        poses[frame][row][column] = value

    return changed(edit)


MIRRORED = np.diag([-1.0, 1, 1, 1]).tolist()
SKEWED = (np.eye(4) + np.eye(4, k=1) * 0.1).tolist()

CAMERAS: dict[str, tuple[object, str, str]] = {
    "NaN": ({"poses": assigned(3, 0, 1, float("nan"))}, "invalid_request", "camera.poses[3][0][1]"),
    "infinite": ({"poses": assigned(5, 2, 3, float("inf"))}, "invalid_request", "camera.poses[5][2][3]"),
    "far away": ({"poses": assigned(5, 2, 3, 1e30)}, "poses_invalid", "camera.poses[5]"),
    "not orthonormal": ({"poses": [STILL, SKEWED]}, "poses_invalid", "camera.poses[1]"),
    "mirrored": ({"poses": [STILL, STILL, MIRRORED]}, "poses_invalid", "camera.poses[2]"),
    "last row": ({"poses": assigned(7, 3, 0, 0.5)}, "poses_invalid", "camera.poses[7]"),
    "3x4": ({"poses": [STILL[:3]]}, "invalid_request", "camera.poses[0]"),
    "a matrix alone": ({"poses": STILL}, "invalid_request", "camera.poses[0]"),
    "short intrinsics": ({"poses": [STILL], "intrinsics": [100, 100, 160]}, "invalid_request", "camera.intrinsics"),
    "not a matrix": ({"poses": [1, 2]}, "invalid_request", "camera.poses[0]"),
    "words": ({"poses": assigned(0, 0, 0, "secret-word")}, "invalid_request", "camera.poses[0][0][0]"),  # type: ignore[arg-type]
    "no poses": ({"poses": []}, "invalid_request", "camera.poses"),
    "too many": ({"poses": [STILL] * 4097}, "invalid_request", "camera.poses"),
    "poses and actions": ({"poses": path(1), "actions": "w-1"}, "invalid_request", "camera"),
    "neither": ({"convention": "opencv"}, "invalid_request", "camera"),
    "unknown convention": ({"poses": path(1), "convention": "secret-word"}, "invalid_request", "camera.convention"),
    "unknown controls": ({"actions": "w-1", "controls": "secret-word"}, "invalid_request", "camera.controls"),
    "unknown member": ({"actions": "w-1", "secret_word": 1}, "invalid_request", "camera"),
    "truth for a number": ({"poses": assigned(0, 0, 0, True)}, "invalid_request", "camera.poses[0][0][0]"),
    "unknown key": ({"actions": "w-3,x-3"}, "actions_invalid", "camera.actions"),
    "no frames": ({"actions": "w-0"}, "actions_invalid", "camera.actions"),
    "too many frames": ({"actions": "w-99999"}, "actions_invalid", "camera.actions"),
    "other digits": ({"actions": "w-٣"}, "actions_invalid", "camera.actions"),
    "zero focal length": ({"actions": "w-1", "intrinsics": [0, 100, 1, 1]}, "intrinsics_invalid", "camera.intrinsics"),
    "negative focal length": (
        {"actions": "w-1", "intrinsics": [1, -1, 1, 1]},
        "intrinsics_invalid",
        "camera.intrinsics",
    ),
    "intrinsics of another count": (
        {"poses": path(3), "intrinsics": [[100, 100, 160, 96]] * 2},
        "intrinsics_invalid",
        "camera.intrinsics",
    ),
}


@pytest.mark.parametrize(("camera", "code", "field"), CAMERAS.values(), ids=CAMERAS.keys())
async def test_a_bad_camera_changes_nothing(http: httpx.AsyncClient, camera: object, code: str, field: str) -> None:
    session = await begin(http)
    await post(http, session, path(29))
    before = (await http.get(session)).json()
    body = json.dumps({"camera": camera}).encode()
    answer = await http.post(f"{session}/chunks", content=body, headers={"content-type": "application/json"})
    problem = check_problem(answer, code)
    assert field in [error.field for error in problem.errors], problem.errors
    assert "secret" not in answer.text
    assert (await http.get(session)).json() == before


REQUESTS: dict[str, tuple[dict[str, object], str]] = {
    "nothing to do": ({}, "body"),
    "pad is no camera": ({"pad": False}, "body"),
    "negative chunk": ({"pad": True, "expected_chunk": -1}, "expected_chunk"),
    "unknown member": ({"pad": True, "framez": 3}, "body"),
    "truth for a number": ({"pad": True, "expected_chunk": True}, "expected_chunk"),
    "word for a number": ({"pad": True, "expected_frame": "1"}, "expected_frame"),
}


@pytest.mark.parametrize(("body", "field"), REQUESTS.values(), ids=REQUESTS.keys())
async def test_a_bad_request_for_chunks(http: httpx.AsyncClient, body: dict[str, object], field: str) -> None:
    session = await begin(http)
    answer = await http.post(f"{session}/chunks", json=body)
    assert field in [error.field for error in check_problem(answer, "invalid_request").errors]
    assert (await http.get(session)).json()["next_frame"] == 1


def huge_png(width: int, height: int) -> bytes:
    """A PNG that declares a size and holds nothing."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def bare_palette_png() -> bytes:
    """A PNG of one pixel that names colour 0 of a palette which is not there."""
    header = struct.pack(">IIBBBBB", 1, 1, 8, 3, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(b"\0\0")), (b"IEND", b"")]
    parts = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


CREATIONS: dict[str, tuple[dict[str, object], str, str]] = {
    "no image": ({"image": None}, "invalid_request", "image"),
    "empty image": ({"image": data_url(b"")}, "image_invalid", "image"),
    "truncated image": ({"image": data_url(picture()[:300])}, "image_invalid", "image"),
    "truncated JPEG": ({"image": data_url(picture(kind="JPEG")[:900], "jpeg")}, "image_invalid", "image"),
    "not an image": ({"image": data_url(b"ffconcat version 1.0\nfile /etc/passwd\n")}, "image_invalid", "image"),
    "an address": ({"image": "http://127.0.0.1/secret.png"}, "image_invalid", "image"),
    "not base64": ({"image": "data:image/png;base64,@@@"}, "image_invalid", "image"),
    "60,000 by 60,000 pixels": ({"image": data_url(huge_png(60_000, 60_000))}, "image_too_large", "image"),
    "a line of pixels": ({"image": data_url(picture(2000, 1))}, "image_invalid", "image"),
    "zero focal length": ({"intrinsics": [0, 100, 1, 1]}, "intrinsics_invalid", "intrinsics[0]"),
    "infinite focal length": ({"intrinsics": [float("inf"), 1, 1, 1]}, "invalid_request", "intrinsics[0]"),
    "size of nothing": ({"intrinsics_size": [320, 192]}, "invalid_request", "body"),
    "size zero": ({"intrinsics": [1, 1, 1, 1], "intrinsics_size": [0, 9]}, "invalid_request", "intrinsics_size[0]"),
    "mirrored first pose": ({"first_pose": MIRRORED}, "poses_invalid", "first_pose"),
    "another model": ({"model": "secret-model"}, "model_not_found", "model"),
    "negative seed": ({"seed": -1}, "invalid_request", "seed"),
    "huge seed": ({"seed": 2**63}, "invalid_request", "seed"),
    "long prompt": ({"prompt": "secret " * 1000}, "invalid_request", "prompt"),
    "unknown member": ({"hunter2secret": 3}, "invalid_request", "body"),
    "short life": ({"ttl_s": 1}, "invalid_request", "ttl_s"),
    "palette without colours": ({"image": data_url(bare_palette_png())}, "image_invalid", "image"),
    "letters that are not ASCII": ({"image": "data:image/png;base64,é"}, "image_invalid", "image"),
}


@pytest.mark.parametrize(("fields", "code", "field"), CREATIONS.values(), ids=CREATIONS.keys())
async def test_a_bad_creation_creates_nothing(
    http: httpx.AsyncClient, fields: dict[str, object], code: str, field: str
) -> None:
    body = json.dumps({"image": first_frame(), **fields}).encode()
    headers = {"content-type": "application/json", "Idempotency-Key": "k"}
    answer = await http.post("/v1/sessions", content=body, headers=headers)
    found = [error.field for error in check_problem(answer, code).errors]
    assert any(name == field or name.startswith(f"{field}[") for name in found), found
    assert "secret" not in answer.text
    assert (await http.get("/v1/sessions")).json()["data"] == []
    assert (await http.post("/v1/sessions", json={"image": first_frame()}, headers={"Idempotency-Key": "k"})).is_success


UNKNOWN = "/v1/sessions/ses_" + "a" * 39
ADDRESSES: dict[str, tuple[str, str, int, str]] = {
    "unknown session": ("GET", UNKNOWN, 404, "session_not_found"),
    "unknown session's chunks": ("GET", f"{UNKNOWN}/chunks", 404, "session_not_found"),
    "unknown session's video": ("GET", f"{UNKNOWN}/video", 404, "session_not_found"),
    "dropping an unknown session": ("DELETE", UNKNOWN, 404, "session_not_found"),
    "malformed id": ("GET", "/v1/sessions/ses_SECRET", 404, "session_not_found"),
    "path tricks": ("GET", "/v1/sessions/..%2f..%2fetc", 404, "not_found"),
    "braces": ("GET", "/v1/sessions/{ses}", 404, "session_not_found"),
    "line feed": ("GET", UNKNOWN + "%0a", 404, "session_not_found"),
    "NUL": ("DELETE", "/v1/sessions/%00", 404, "session_not_found"),
    "long id": ("GET", "/v1/sessions/" + "a" * 9000, 404, "session_not_found"),
    "chunk that is no number": ("GET", f"{UNKNOWN}/chunks/one", 404, "session_not_found"),
    "negative chunk": ("GET", f"{UNKNOWN}/chunks/-1", 404, "session_not_found"),
    "no such page": ("GET", "/v1/nothing", 404, "not_found"),
    "other method": ("PUT", "/v1/sessions", 405, "method_not_allowed"),
    "limit of nothing": ("GET", "/v1/sessions?limit=0", 422, "invalid_request"),
    "malformed after": ("GET", "/v1/sessions?after=secret", 404, "session_not_found"),
    "after that is no place": ("GET", f"/v1/sessions?after={UNKNOWN[13:]}-7ff8{'0' * 12}", 404, "session_not_found"),
    "unknown after": ("GET", f"/v1/sessions?after={UNKNOWN[13:]}", 404, "session_not_found"),
}


@pytest.mark.parametrize(("method", "address", "status", "code"), ADDRESSES.values(), ids=ADDRESSES.keys())
async def test_bad_addresses(http: httpx.AsyncClient, method: str, address: str, status: int, code: str) -> None:
    answer = await http.request(method, address)
    check_problem(answer, code)
    assert answer.status_code == status
    assert "secret" not in answer.text.lower()


@pytest.mark.parametrize("part", ["", "/video", "/frames"])
async def test_a_chunk_that_is_not_there(http: httpx.AsyncClient, part: str) -> None:
    session = await begin(http)
    check_problem(await http.get(f"{session}/chunks/0{part}"), "chunk_not_found")
    check_problem(await http.get(f"{session}/video"), "chunk_not_found")
    for index in ("one", "-1", "1e3", str(2**40)):
        assert [
            each.field
            for each in check_problem(await http.get(f"{session}/chunks/{index}{part}"), "invalid_request").errors
        ] == ["index"]


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b'{"secret', "malformed_json"),
        (b"[" * 100_000, "malformed_json"),
        (b'"secret"', "invalid_request"),
        (b"", "malformed_json"),
        (b'{"prompt": "\\ud800"}', "malformed_json"),
        (b"\xff\xfe", "malformed_json"),
    ],
    ids=["cut short", "deep", "not an object", "empty", "half a surrogate", "not UTF-8"],
)
async def test_bodies_that_are_no_request(http: httpx.AsyncClient, body: bytes, code: str) -> None:
    answer = await http.post("/v1/sessions", content=body, headers={"content-type": "application/json"})
    check_problem(answer, code)
    assert "secret" not in answer.text


async def test_a_body_of_unknown_members_costs_nothing(http: httpx.AsyncClient) -> None:
    """One error for the first of them, not one for each: hundreds of thousands would take seconds and gigabytes."""
    session = await begin(http)
    body = "{" + ",".join(f'"k{number}":0' for number in range(250_000)) + "}"
    answer = await http.post(f"{session}/chunks", content=body, headers={"content-type": "application/json"})
    assert len(check_problem(answer, "invalid_request").errors) == 1
    assert len(answer.content) < 1000


async def test_a_body_of_endless_lists_is_not_even_parsed(http: httpx.AsyncClient) -> None:
    body = b'{"camera":{"poses":[' + b"[]," * 300_000 + b"[]]}}"
    answer = await http.post(f"{await begin(http)}/chunks", content=body, headers={"content-type": "application/json"})
    assert check_problem(answer, "payload_too_large").model_extra == {"limit_parts": 250_000}


@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", "video/mp4"])
async def test_a_body_of_another_kind(http: httpx.AsyncClient, kind: str) -> None:
    body = json.dumps({"image": first_frame()}).encode()
    check_problem(
        await http.post("/v1/sessions", content=body, headers={"content-type": kind}), "unsupported_media_type"
    )


@pytest.mark.parametrize("declared", [True, False], ids=["declared", "streamed"])
async def test_a_body_over_the_limit(http: httpx.AsyncClient, *, declared: bool) -> None:
    body = json.dumps({"image": "data:image/png;base64," + "A" * MAX_BODY}).encode()

    async def pieces() -> object:
        for start in range(0, len(body), 65536):
            yield body[start : start + 65536]

    headers = {"content-type": "application/json"}
    answer = await http.post("/v1/sessions", content=body if declared else pieces(), headers=headers)  # type: ignore[arg-type]
    assert (answer.status_code, check_problem(answer, "payload_too_large").model_extra) == (
        413,
        {"limit_bytes": MAX_BODY},
    )


@pytest.mark.parametrize(
    "key", ["", "x" * 256, "two words", "café".encode("latin-1")], ids=["empty", "long", "space", "byte"]
)
async def test_a_malformed_key(http: httpx.AsyncClient, key: str | bytes) -> None:
    answer = await http.post("/v1/sessions", json={"image": first_frame()}, headers={"Idempotency-Key": key})  # type: ignore[dict-item]
    assert [error.field for error in check_problem(answer, "invalid_request").errors] == ["Idempotency-Key"]
    assert (await http.get("/v1/sessions")).json()["data"] == []


def check_problem(answer: httpx.Response, code: str) -> Problem:
    """The answer is a problem of this code, in every respect."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem = Problem.model_validate_json(answer.content)
    status, title = PROBLEMS[code]
    assert (problem.code, problem.status, problem.title) == (code, status, title), answer.text
    assert answer.status_code == status
    assert problem.type == f"urn:longtake:problem:{code}"
    assert problem.detail
    return problem
