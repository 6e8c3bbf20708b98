"""Observing real frames: absorbed as a pure function of the log, then generation goes on."""

import io
import json

import av
import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from server_fixtures import begin, digests, path, post

from longtake.api_schemas.problems import Problem
from longtake.server.model.world import ChunkCamera, WorldModel


def clip(frames: int, width: int = 320, height: int = 192) -> np.ndarray:
    """A smooth picture that drifts, uint8 [T,H,W,3]."""
    t, y, x, c = np.ogrid[:frames, :height, :width, :3]
    return np.round(127 + 100 * np.sin(x / 40 + t / 9 + c) * np.cos(y / 35 - t / 14)).astype(np.uint8)


def mp4(frames: np.ndarray) -> bytes:
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=16, options={"crf": "10"})
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def png(frame: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(frame).save(file, "PNG")
    return file.getvalue()


async def observe(
    http: httpx.AsyncClient,
    session: str,
    files: list[bytes],
    poses: list[object],
    key: str | None = None,
    **fields: object,
) -> httpx.Response:
    params = json.dumps({"camera": {"poses": poses}, **fields})
    parts = [("params", (None, params)), *(("frames", (f"{i}", file)) for i, file in enumerate(files))]
    return await http.post(f"{session}/chunks", files=parts, headers={"Idempotency-Key": key} if key else {})


async def test_a_clip_is_absorbed_and_generation_goes_on(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    answer = await observe(http, session, [mp4(clip(53))], path(53))
    assert answer.status_code == 201, answer.text
    body = answer.json()
    assert [chunk["kind"] for chunk in body["data"]] == ["observe", "observe"]
    assert (body["frames_used"], body["frames_unused"]) == (48, 5)
    assert (body["pending_poses"], body["next_chunk"], body["next_frame"]) == (0, 2, 49)
    generated = await post(http, session, path(24, start=49))
    assert generated.json()["data"][0]["kind"] == "generate"
    other = await begin(http)
    await post(http, other, path(48))
    assert digests(await post(http, other, path(24, start=49))) != digests(generated)


async def test_pictures_one_a_frame_are_a_clip_too(http: httpx.AsyncClient) -> None:
    frames = clip(24)
    first, second = await begin(http), await begin(http)
    made = await observe(http, first, [png(frame) for frame in frames], path(24))
    assert digests(made) == digests(await observe(http, second, [png(frame) for frame in frames], path(24)))
    assert made.json()["data"][0]["kind"] == "observe"


async def test_a_clip_is_not_resampled_with_its_trajectory(http: httpx.AsyncClient) -> None:
    rows = b"".join(b"%.6f %.6f 0 0 0 0 0 1\n" % (row / 32, row / 100) for row in range(60))
    params = json.dumps({"camera": {"trajectory": {"format": "tum", "start": 0}}})
    files = [("params", (None, params)), ("trajectory", ("path.txt", rows))]
    files += [("frames", (f"{i}", png(frame))) for i, frame in enumerate(clip(60))]
    refused = await http.post(f"{await begin(http)}/chunks", files=files)
    problem = Problem.model_validate_json(refused.content)
    assert (problem.code, problem.errors[0].field) == ("frames_invalid", "frames")
    assert problem.detail.startswith(
        "there are 60 frames and 30 poses: give one pose a frame; the 60 poses of the file"
    )
    assert "became 30 at 16 fps" in problem.detail


async def test_in_one_request_or_two_the_state_is_the_same(http: httpx.AsyncClient) -> None:
    files = [png(frame) for frame in clip(48)]
    whole = digests(await observe(http, await begin(http), files, path(48)))
    session = await begin(http)
    halves = digests(await observe(http, session, files[:24], path(24)))
    halves += digests(await observe(http, session, files[24:], path(24, start=25)))
    assert halves == whole


async def test_an_observed_chunk_is_read_back_like_any_other(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    (chunk,) = (await observe(http, session, [mp4(clip(24))], path(24))).json()["data"]
    assert (await http.get(chunk["links"]["self"])).json() == chunk
    assert (await http.get(chunk["links"]["frames"])).status_code == 200
    with av.open(io.BytesIO((await http.get(chunk["links"]["video"])).content)) as container:
        assert sum(1 for _ in container.decode(video=0)) == 24


async def test_a_repeated_observation_is_carried_out_once(http: httpx.AsyncClient) -> None:
    session, file = await begin(http), mp4(clip(30))
    first = await observe(http, session, [file], path(30), key="clip")
    again = await observe(http, session, [file], path(30), key="clip")
    assert (again.status_code, again.content) == (201, first.content)
    other = await observe(http, session, [mp4(clip(31))], path(31), key="clip")
    assert other.json()["code"] == "idempotency_key_reused"


async def test_pending_poses_are_in_the_way_unless_discarded(http: httpx.AsyncClient) -> None:
    session, file = await begin(http), mp4(clip(24))
    await post(http, session, path(7))
    refused = await observe(http, session, [file], path(24))
    assert (refused.status_code, refused.json()["code"], refused.json()["pending_poses"]) == (
        409,
        "pending_conflict",
        7,
    )
    assert (await http.get(session)).json()["pending_poses"] == 7
    accepted = await observe(http, session, [file], path(24), discard_pending=True)
    assert digests(accepted) == digests(await observe(http, await begin(http), [file], path(24)))
    assert (await http.get(session)).json()["next_frame"] == 25


async def test_what_does_not_fit_is_refused_and_changes_nothing(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    before = (await http.get(session)).json()
    cases = {
        "frames_invalid": await observe(http, session, [mp4(clip(24))], path(23)),
        "frames_too_large": await observe(http, session, [mp4(clip(241))], path(241)),
    }
    short = await observe(http, session, [mp4(clip(23))], path(23))
    playlist = await observe(http, session, [b"ffconcat version 1.0\nfile /etc/hostname\n"], path(24))
    for code, answer in [*cases.items(), ("frames_invalid", short), ("frames_invalid", playlist)]:
        problem = Problem.model_validate_json(answer.content)
        assert problem.code == code, answer.text
        assert [error.field.split("[")[0] for error in problem.errors] == ["frames"]
    keys = {"camera": {"actions": "w-24"}}
    parts = [("params", (None, json.dumps(keys))), ("frames", ("a.mp4", mp4(clip(24))))]
    walked = await http.post(f"{session}/chunks", files=parts)
    assert [error["field"] for error in walked.json()["errors"]] == ["camera.actions"]
    stray = await post(http, session, path(24), discard_pending=True)
    assert [error["field"] for error in stray.json()["errors"]] == ["discard_pending"]
    assert (await http.get(session)).json() == before


@pytest.mark.parametrize("chunks", [1, 3])
def test_absorbing_what_was_generated_leaves_the_same_bits(model: WorldModel, chunks: int) -> None:
    conditions = model.condition(clip(1)[0], "a quay")
    intrinsics = np.array([277.0, 277.0, 160.0, 96.0])
    state = model.initial_state(conditions)
    for index in range(chunks):
        poses = np.array(path(24, 24 * index + 1))
        camera = ChunkCamera(poses, np.tile(intrinsics, (24, 1)), intrinsics)
        made = model.generate(conditions, state, index, camera, seed=7)
        absorbed = model.absorb(conditions, state, index, camera, made.latents.clone())
        assert list(absorbed.state) == list(made.state)
        assert all(torch.equal(absorbed.state[name], made.state[name]) for name in made.state)
        assert (absorbed.frames == made.frames).all()
        state = made.state
