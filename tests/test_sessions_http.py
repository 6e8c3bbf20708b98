"""Sessions and chunks over HTTP: what is made, and what is read back."""

import io
import zipfile
from datetime import datetime
from urllib.parse import quote

import av
import httpx
import numpy as np
from PIL import Image
from server_fixtures import begin, digests, first_frame, path, post

from longtake.api_schemas.resources import Chunk, Session
from longtake.server.video.images import frames_digest


async def test_a_new_session_tells_where_it_stands(http: httpx.AsyncClient) -> None:
    answer = await http.post("/v1/sessions", json={"image": first_frame(), "prompt": "a quay", "seed": 3})
    session = Session.model_validate_json(answer.content)
    assert answer.status_code == 201
    assert answer.headers["Location"] == f"/v1/sessions/{session.id}"
    assert (session.next_chunk, session.next_frame, session.pending_poses, session.revision) == (0, 1, 0, 0)
    assert (session.prompt, session.seed, session.model, session.parent) == ("a quay", 3, "tiny-untrained", None)
    assert (session.forked_at, session.forks, session.rewind_from, session.exact_until) == (None, [], -1, None)
    assert (session.chunk.frames, session.chunk.fps, session.chunk.width, session.chunk.height) == (24, 16, 320, 192)
    assert abs((datetime.now(session.created_at.tzinfo) - session.created_at).total_seconds()) < 60
    assert any("60 degrees" in warning for warning in session.warnings)
    assert (await http.get(answer.headers["Location"])).json() == answer.json()


async def test_a_session_with_a_lifetime_says_when_it_goes(http: httpx.AsyncClient) -> None:
    session = await begin(http, ttl_s=3600)
    before = Session.model_validate_json((await http.get(session)).content)
    assert before.expires_at is not None
    assert abs((before.expires_at - before.created_at).total_seconds() - 3600) < 5
    await post(http, session, path(24))
    after = Session.model_validate_json((await http.get(session)).content)
    assert after.expires_at is not None
    assert after.expires_at > before.expires_at
    made = await http.post("/v1/sessions", json={"image": first_frame(), "ttl_s": 60})
    fresh = Session.model_validate_json(made.content)
    assert fresh.expires_at is not None
    assert (fresh.expires_at - fresh.created_at).total_seconds() == 60
    assert (await http.get(await begin(http))).json()["expires_at"] is None


async def test_poses_become_chunks_and_the_rest_waits(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answer = await post(http, session, path(53))
    body = answer.json()
    assert [chunk["index"] for chunk in body["data"]] == [0, 1]
    assert [(chunk["frame_start"], chunk["frame_count"]) for chunk in body["data"]] == [(1, 24), (25, 24)]
    assert (body["pending_poses"], body["next_chunk"], body["next_frame"]) == (5, 2, 54)
    standing = (await http.get(session)).json()
    assert (standing["pending_poses"], standing["next_chunk"], standing["next_frame"]) == (5, 2, 54)
    for stage in ("queue", "condition", "denoise", "decode", "encode", "digest", "upload"):
        assert body["data"][0]["timings_ms"][stage] >= 0


async def test_poses_that_fill_no_chunk_are_kept(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answer = await post(http, session, path(7))
    assert (answer.status_code, answer.json()["data"], answer.json()["pending_poses"]) == (201, [], 7)
    rest = await post(http, session, path(17, start=8))
    whole = await post(http, await begin(http), path(24))
    assert digests(rest) == digests(whole)


async def test_padding_holds_the_last_pose(http: httpx.AsyncClient) -> None:
    padded = await post(http, await begin(http), path(20), pad=True)
    held = await post(http, await begin(http), path(20) + path(1, start=20) * 4)
    assert digests(padded) == digests(held)
    assert padded.json()["pending_poses"] == 0


async def test_padding_alone_fills_what_waits(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    await post(http, session, path(3))
    assert len((await post(http, session, pad=True)).json()["data"]) == 1
    nothing = await post(http, session, pad=True)
    assert (nothing.status_code, nothing.json()["data"], nothing.json()["next_chunk"]) == (201, [], 1)


async def test_the_camera_moves_the_video(http: httpx.AsyncClient) -> None:
    still = digests(await post(http, await begin(http), "none-24"))
    assert digests(await post(http, await begin(http), "w-24")) != still
    assert digests(await post(http, await begin(http, prompt="a red quay"), "none-24")) != still
    assert digests(await post(http, await begin(http, seed=8), "none-24")) != still
    wide = await begin(http, intrinsics=[90, 90, 160, 96])
    assert digests(await post(http, wide, "none-24")) != still


async def test_both_action_schemes_and_both_conventions(http: httpx.AsyncClient) -> None:
    smooth = digests(await post(http, await begin(http), "a-24"))
    legacy = digests(await post(http, await begin(http), {"actions": "a-24", "controls": "sana-legacy"}))
    assert smooth != legacy
    flip = np.diag([1.0, -1.0, -1.0, 1.0])
    turned = [(np.array(pose) @ flip).tolist() for pose in path(24)]
    opengl = await post(http, await begin(http), {"poses": turned, "convention": "opengl"})
    assert digests(opengl) == digests(await post(http, await begin(http), path(24)))


async def test_poses_live_in_the_world_of_the_first_pose(http: httpx.AsyncClient) -> None:
    world = np.eye(4)
    world[:3, :3] = [[0, -1, 0], [1, 0, 0], [0, 0, 1]]
    world[:3, 3] = [4, -8, 16]
    moved = [(world @ np.array(pose)).tolist() for pose in path(24)]
    there = await begin(http, first_pose=world.tolist())
    assert (await http.get(there)).json()["first_pose"] == world.tolist()
    record = (await post(http, there, moved)).json()["data"][0]
    here = (await post(http, await begin(http), path(24))).json()["data"][0]
    assert record["warnings"] == here["warnings"] == []
    frames = [await _frames(http, chunk["links"]["frames"]) for chunk in (record, here)]
    assert np.abs(frames[0].astype(int) - frames[1].astype(int)).mean() < 0.05


async def test_a_long_step_is_a_warning(http: httpx.AsyncClient) -> None:
    jump = path(24)
    jump[11][0][3] += 2.0
    warnings = (await post(http, await begin(http), jump)).json()["data"][0]["warnings"]
    assert len(warnings) == 1
    assert "units a frame" in warnings[0]


async def test_intrinsics_of_every_pose(http: httpx.AsyncClient) -> None:
    one = {"poses": path(24), "intrinsics": [200, 200, 160, 96]}
    each = {"poses": path(24), "intrinsics": [[200, 200, 160, 96]] * 24}
    zoom = {"poses": path(24), "intrinsics": [[200 + frame, 200 + frame, 160, 96] for frame in range(24)]}
    found = [digests(await post(http, await begin(http), camera)) for camera in (one, each, zoom)]
    assert found[0] == found[1] != found[2]


async def test_a_session_tells_the_lens_that_it_goes_on_with(http: httpx.AsyncClient) -> None:
    given = {"intrinsics": [150, 151, 80, 48], "intrinsics_size": [160, 96]}
    session = await begin(http, **given)
    told = (await http.get(session)).json()
    assert {name: told[name] for name in given} == given
    repeated = await post(http, session, {"poses": path(24), "intrinsics": told["intrinsics"]})
    assert digests(repeated) == digests(await post(http, await begin(http, **given), path(24)))
    assert (await http.get(await begin(http))).json()["intrinsics_size"] == [320, 192]


async def test_chunks_are_read_back(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    made = (await post(http, session, path(72))).json()["data"]
    assert (await http.get(f"{session}/chunks")).json() == {"data": made, "next": None}
    page = (await http.get(f"{session}/chunks", params={"limit": 2})).json()
    assert (page["data"], page["next"]) == (made[:2], 1)
    assert (await http.get(f"{session}/chunks", params={"after": 1})).json()["data"] == made[2:]
    assert (await http.get(made[2]["links"]["self"])).json() == made[2]


async def test_video_decodes_to_every_frame(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    made = (await post(http, session, path(48))).json()["data"]
    whole = await http.get(f"{session}/video")
    assert (whole.headers["content-type"], int(whole.headers["content-length"])) == ("video/mp4", len(whole.content))
    decoded = _decode(whole.content)
    assert len(decoded) == 48
    for chunk in made:
        alone = _decode((await http.get(chunk["links"]["video"])).content)
        frames = await _frames(http, chunk["links"]["frames"])
        start = chunk["frame_start"] - 1
        for video in (alone, decoded[start : start + 24]):
            assert len(video) == 24
            assert _psnr(np.stack(video), frames) >= 35


async def test_frames_are_the_lossless_truth(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    made = (await post(http, session, "w-200")).json()["data"]
    for chunk in (made[0], made[1], made[7]):
        answer = await http.get(chunk["links"]["frames"])
        assert answer.headers["content-type"] == "application/zip"
        names = zipfile.ZipFile(io.BytesIO(answer.content)).namelist()
        assert names[0] == f"frame_{chunk['frame_start']:06}.png"
        assert frames_digest(await _frames(http, chunk["links"]["frames"])) == chunk["frames_digest"]


async def test_sessions_are_listed_newest_first_and_dropped(http: httpx.AsyncClient) -> None:
    made = [await begin(http) for _ in range(3)]
    listed = (await http.get("/v1/sessions")).json()
    assert [session["links"]["self"] for session in listed["data"]] == made[::-1]
    page = (await http.get("/v1/sessions", params={"limit": 2})).json()
    rest = (await http.get("/v1/sessions", params={"limit": 2, "after": page["next"]})).json()
    assert [session["id"] for session in page["data"] + rest["data"]] == [each["id"] for each in listed["data"]]
    assert rest["next"] is None
    by_id = (await http.get("/v1/sessions", params={"after": page["data"][-1]["id"]})).json()
    assert by_id == rest
    assert (await http.delete(made[1])).status_code == 204
    assert (await http.get(made[1])).status_code == 404
    assert (await post(http, made[1], "w-24")).json()["code"] == "session_not_found"
    gone = await http.get("/v1/sessions", params={"after": page["data"][-1]["id"]})
    assert (gone.status_code, gone.json()["errors"][0]["field"]) == (404, "after")
    behind = (await http.get("/v1/sessions", params={"after": page["next"]})).json()
    assert behind == rest
    assert quote(page["next"], safe="") == page["next"]
    assert len((await http.get("/v1/sessions")).json()["data"]) == 2


async def test_models_health_and_readiness(http: httpx.AsyncClient) -> None:
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["id"], model["chunk"]["latent_frames"]) == ("tiny-untrained", 3)
    assert (await http.get("/healthz")).json() == {"status": "ok"}
    ready = (await http.get("/readyz")).json()
    assert (ready["ready"], ready["model"], ready["durability"]) == (True, "tiny-untrained", "none")


async def test_the_schema_names_every_route(http: httpx.AsyncClient) -> None:
    schema = (await http.get("/openapi.json")).json()
    operations = {operation["operationId"] for methods in schema["paths"].values() for operation in methods.values()}
    assert operations == {
        "createSession", "listSessions", "getSession", "deleteSession", "getSessionVideo",
        "forkSession", "rewindSession", "getSessionEvents", "getChunkLatents",
        "postChunks", "listChunks", "getChunk", "getChunkVideo", "getChunkFrames",
        "listModels", "health", "readiness", "metrics",
    }  # fmt: skip
    assert schema["components"]["schemas"]["Chunk"]["properties"].keys() == Chunk.model_fields.keys()
    problems = schema["paths"]["/v1/sessions"]["post"]["responses"]["422"]["content"]
    assert problems.keys() == {"application/problem+json"}


async def _frames(http: httpx.AsyncClient, link: str) -> np.ndarray:
    archive = zipfile.ZipFile(io.BytesIO((await http.get(link)).content))
    return np.stack([np.asarray(Image.open(archive.open(name))) for name in archive.namelist()])


def _decode(data: bytes) -> list[np.ndarray]:
    with av.open(io.BytesIO(data)) as container:
        return [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]


def _psnr(a: np.ndarray, b: np.ndarray) -> float:
    return float(10 * np.log10(255**2 / np.mean((a.astype(float) - b.astype(float)) ** 2)))
