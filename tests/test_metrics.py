"""Metrics: what they count, that they are documented, and that they name no session."""

import re
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families
from server_fixtures import begin, path, post

from longtake.server.engine.engine import Engine

DOCS = Path(__file__).parents[1] / "docs" / "metrics.md"


async def read(http: httpx.AsyncClient) -> dict[str, float]:
    """Every sample by its name and labels."""
    text = (await http.get("/metrics")).text
    return {
        f"{sample.name}{sorted(sample.labels.items()) or ''}": sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_what_is_counted(http: httpx.AsyncClient, engine: Engine) -> None:
    session = await begin(http)
    await post(http, session, path(50))
    await post(http, session, path(22, start=51))
    await post(http, session, {"actions": "x-1"})
    await http.get("/readyz")
    await engine.settle()
    found = await read(http)
    assert found["longtake_sessions_created_total"] == 1
    assert found["longtake_chunks_total[('kind', 'generate')]"] == 3
    assert found["longtake_frames_total"] == 72
    assert found["longtake_commits_total[('outcome', 'ok')]"] == 3
    assert found["longtake_problems_total[('code', 'actions_invalid')]"] == 1
    assert found["longtake_resumes_total[('source', 'store')]"] == 1
    assert found["longtake_resumes_total[('source', 'memory')]"] == 1
    assert (found["longtake_queue_depth"], found["longtake_queue_capacity"]) == (0, 8)
    assert (found["longtake_sessions_by_tier[('tier', 'host')]"], found["longtake_store_up"]) == (1, 1)
    assert found["longtake_state_bytes[('tier', 'host')]"] > 0
    assert found["longtake_snapshots_total[('outcome', 'ok')]"] == 3
    assert found["longtake_store_durability[('durability', 'none')]"] == 1
    assert (found["longtake_divergence_total"], found["longtake_rolled_back_total"]) == (0, 0)
    for stage in ("queue", "condition", "denoise", "absorb", "decode", "encode", "digest", "upload", "commit"):
        assert found[f"longtake_stage_seconds_count[('stage', '{stage}')]"] == 3
    assert found["longtake_chunk_latency_seconds_count[('kind', 'generate')]"] == 3
    assert found["longtake_store_op_seconds_count[('op', 'publish')]"] == 3


async def test_every_metric_is_documented_and_none_names_a_session(http: httpx.AsyncClient) -> None:
    session = await begin(http)
    await post(http, session, path(24))
    text = (await http.get("/metrics")).text
    families = {family.name for family in text_string_to_metric_families(text)}
    documented = set(re.findall(r"^\| `(longtake_\w+)`", DOCS.read_text(), re.M))
    assert {name.removesuffix("_total") for name in documented} == families
    assert session.rsplit("/", 1)[1] not in text
