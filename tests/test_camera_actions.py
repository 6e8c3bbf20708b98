"""Action strings: what they mean, what is refused, and a controller that can be stopped and resumed anywhere."""

import json
from itertools import groupby, pairwise
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from safetensors.numpy import load_file
from scipy.spatial.transform import Rotation

from longtake.api_schemas.camera import Controls
from longtake.api_schemas.problems import ProblemError
from longtake.server.camera.actions import Controller, parse_actions, walk

GOLDEN = Path(__file__).parent / "data" / "golden"
CASES = json.loads((GOLDEN / "camera.json").read_text())
ACTIONS = {case["id"]: case for case in CASES["actions"]}
REFUSED_HERE = {"-5", "w-\u0663"}
BAD = [case["action"] for case in CASES["bad_actions"] if not case["upstream"]["ok"] or case["action"] in REFUSED_HERE]
ODD = [case for case in CASES["bad_actions"] if case["upstream"]["ok"] and case["action"] not in REFUSED_HERE]
LEGACY_SCALE = 0.05 / 0.04


@pytest.fixture(scope="module")
def golden() -> dict[str, NDArray[np.float32]]:
    return load_file(GOLDEN / "camera.safetensors")


def from_start(action: str, controls: Controls) -> NDArray[np.float64]:
    return walk(Controller.start(), parse_actions(action, "actions"), controls)[0]


@pytest.mark.parametrize("case", ACTIONS)
@pytest.mark.parametrize(
    ("variant", "controls", "scale", "bound"),
    [
        pytest.param("upstream_smooth", "sana-smooth", 1.0, 1e-6, id="smooth"),
        pytest.param("sglang_nocoupling", "sana-legacy", LEGACY_SCALE, 1e-6, id="legacy"),
        pytest.param("diffusers", "sana-legacy", 1.0, 3e-6, id="legacy-without-epsilon"),
    ],
)
def test_golden_poses(
    golden: dict[str, NDArray[np.float32]], case: int, variant: str, controls: Controls, scale: float, bound: float
) -> None:
    expected = golden[f"action{case}.{variant}"].astype(np.float64)
    expected[:, :3, 3] *= scale
    poses = from_start(ACTIONS[case]["action"], controls)
    assert np.array_equal(expected[0], Controller.start().pose)
    assert np.abs(poses.astype(np.float32) - expected[1:]).max() < bound


@pytest.mark.parametrize("case", ACTIONS)
def test_golden_parses(case: int) -> None:
    frames = parse_actions(ACTIONS[case]["action"], "actions")
    runs = [[sorted(keys), len(list(run))] for keys, run in groupby(frames)]
    assert len(frames) == ACTIONS[case]["frames"]
    assert runs == ACTIONS[case]["parsed_run_length"]


@pytest.mark.parametrize("case", ODD, ids=lambda case: repr(case["action"]))
def test_odd_but_clear_strings_are_taken(case: dict[str, dict[str, object]]) -> None:
    frames = parse_actions(str(case["action"]), "actions")
    assert len(frames) == case["upstream"]["frames"]
    assert sorted(frames[0]) == case["upstream"]["first"]


@pytest.mark.parametrize(
    "text",
    [
        *BAD,
        "\u212a-3",
        "w-\uff13",
        "w-+3",
        "w-1 2",
        "w-1_0",
        "w\u2011 3",
        "w-4097",
        "w-4000,d-97",
        "w-" + "9" * 5000,
        "w-00",
    ],
    ids=lambda text: ascii(text)[:24],
)
def test_bad_strings_are_refused_by_name(text: str) -> None:
    with pytest.raises(ProblemError) as error:
        parse_actions(text, "camera.actions")
    assert (error.value.code, error.value.field) == ("actions_invalid", "camera.actions")


def test_refusal_counts_segments_and_keeps_the_input_to_itself() -> None:
    with pytest.raises(ProblemError) as error:
        parse_actions("w-3,<b>-2", "actions")
    assert "segment 2" in error.value.detail
    assert "<b>" not in error.value.detail


def test_most_frames_and_leading_zeros_are_taken() -> None:
    assert len(parse_actions("w-4000,none-0096", "actions")) == 4096


def test_opposite_keys_cancel() -> None:
    for controls in ("sana-smooth", "sana-legacy"):
        poses = from_start("wasdijkl-3", controls)
        assert np.array_equal(poses, np.tile(np.eye(4), (3, 1, 1)))


@pytest.mark.parametrize(
    ("action", "controls", "expected"),
    [
        pytest.param("d-1", "sana-smooth", (0.0, 0.0, 0.6), id="smooth-d-turns-right"),
        pytest.param("l-1", "sana-smooth", (0.025, 0.0, 0.0), id="smooth-l-strafes-right"),
        pytest.param("s-1", "sana-smooth", (0.0, -0.025, 0.0), id="smooth-s-goes-back"),
        pytest.param("d-1", "sana-legacy", (0.05, 0.0, 0.0), id="legacy-d-strafes-right"),
        pytest.param("l-1", "sana-legacy", (0.0, 0.0, 1.2), id="legacy-l-turns-right"),
    ],
)
def test_meaning_of_a_key(action: str, controls: Controls, expected: tuple[float, float, float]) -> None:
    pose = from_start(action, controls)[0]
    yaw = np.degrees(np.arctan2(pose[0, 2], pose[2, 2]))
    assert np.allclose([pose[0, 3], pose[2, 3], yaw], expected, rtol=0, atol=1e-6)


def test_release_coasts_and_press_is_instant() -> None:
    frames = from_start("w-2,none-2,w-1", "sana-smooth")[:, 2, 3]
    steps = np.diff(frames, prepend=0.0)
    coast = np.exp(-1 / 16)
    assert np.allclose(steps, 0.025 * np.array([1, 1, coast, coast**2, 1]), rtol=0, atol=1e-7)


def test_smooth_pitch_is_clamped_and_legacy_pitch_stops_short() -> None:
    smooth = walk(Controller.start(), parse_actions("i-160", "actions"), "sana-smooth")[1]
    legacy = walk(Controller.start(), parse_actions("i-160", "actions"), "sana-legacy")[1]
    assert np.degrees(smooth.pitch) == pytest.approx(60.0, abs=1e-9)
    assert np.degrees(legacy.pitch) == pytest.approx(84.0, abs=1e-9)


def test_standing_at_a_pose_recovers_its_pitch() -> None:
    walked = walk(Controller.start(), parse_actions("iw-30,d-25,jk-4", "actions"), "sana-smooth")[1]
    standing = Controller.at(walked.pose)
    assert standing.pitch == pytest.approx(walked.pitch, abs=1e-12)
    assert np.array_equal(standing.pose, walked.pose)
    assert standing.velocity == (0.0, 0.0, 0.0, 0.0)
    assert standing.held == frozenset()
    walked.pose[0, 3] += 1.0
    assert not np.array_equal(standing.pose, walked.pose)


@pytest.mark.parametrize("controls", ["sana-smooth", "sana-legacy"])
@pytest.mark.parametrize("degrees", [88.0, 90.0, -89.0])
def test_steep_explicit_pose_comes_back_without_a_jump(controls: Controls, degrees: float) -> None:
    pose = np.eye(4)
    pose[:3, :3] = Rotation.from_euler("x", degrees, degrees=True).as_matrix()
    back, on = ("k", "i") if degrees > 0 else ("i", "k")
    still = from_pose = Controller.at(pose)
    for keys in (frozenset(), frozenset(on)):
        still = still.advance(keys, controls)
    assert np.abs(still.pose - pose).max() < 1e-12
    pitches = [from_pose.pitch]
    for _ in range(10):
        from_pose = from_pose.advance(frozenset(back), controls)
        pitches.append(from_pose.pitch)
    steps = np.degrees([abs(before) - abs(after) for before, after in pairwise(pitches)])
    assert np.allclose(steps, 0.6 if controls == "sana-smooth" else 1.2, rtol=0, atol=1e-9)


def test_long_walk_stays_rigid() -> None:
    rotation = walk(Controller.start(), parse_actions("wd-900,il-1000,ak-1000,none-100", "a"), "sana-smooth")[1].pose
    assert np.abs(rotation[:3, :3].T @ rotation[:3, :3] - np.eye(3)).max() < 1e-12


keys = st.frozensets(st.sampled_from("wasdijkl"), max_size=3)
runs = st.lists(st.tuples(keys, st.integers(1, 9)), min_size=1, max_size=8)
schemes = st.sampled_from(["sana-smooth", "sana-legacy"])


def spelled(frames: list[frozenset[str]]) -> str:
    return ",".join(f"{''.join(sorted(held)) or 'none'}-{len(list(run))}" for held, run in groupby(frames))


def through_records(controller: Controller) -> Controller:
    as_json = json.loads(json.dumps(controller.to_dict()))
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(controller.to_dict())) == as_json
    return Controller.from_dict(as_json)


@settings(max_examples=60, deadline=None)
@given(runs=runs, controls=schemes, data=st.data())
def test_split_anywhere_gives_the_same_bits(
    runs: list[tuple[frozenset[str], int]], controls: Controls, data: st.DataObject
) -> None:
    frames = [held for held, count in runs for _ in range(count)]
    poses, end = walk(Controller.start(), parse_actions(spelled(frames), "actions"), controls)
    cut = data.draw(st.integers(0, len(frames)))
    controller, parts = Controller.start(), []
    for part in (frames[:cut], frames[cut:]):
        if part:
            some, controller = walk(controller, parse_actions(spelled(part), "actions"), controls)
            parts.append(some)
        controller = through_records(controller)
    assert np.concatenate(parts).tobytes() == poses.tobytes()
    assert controller.to_dict() == end.to_dict()


@settings(max_examples=60, deadline=None)
@given(runs=runs, controls=schemes)
def test_record_is_exact(runs: list[tuple[frozenset[str], int]], controls: Controls) -> None:
    controller = walk(Controller.start(), [held for held, _ in runs], controls)[1]
    restored = through_records(controller)
    assert restored.pose.tobytes() == controller.pose.tobytes()
    assert restored.pose.dtype == np.float64
    assert (restored.pitch, restored.velocity, restored.held) == (
        controller.pitch,
        controller.velocity,
        controller.held,
    )
