"""First frames that a model can not restore are told apart, and sessions say so."""

import math

import httpx
import numpy as np
import pytest
import torch
from server_fixtures import begin, client_of, first_frame, post

from longtake.server.engine.engine import Engine
from longtake.server.engine.limits import Limits
from longtake.server.model.familiarity import Familiarity, first_frame_warnings, restored_db
from longtake.server.model.vae import TINY_VAE, CausalVideoVAE, init_untrained
from longtake.server.model.world import Frames, WorldModel
from longtake.state_cache import MemoryStore


class Copier:
    """Stands for a VAE that restores everything but a constant error."""

    def __init__(self, error: float) -> None:
        self._error = error
        self.latents_mean = torch.zeros(1)

    def encode(self, frames: torch.Tensor) -> torch.Tensor:
        return frames + self._error / 127.5

    def decode(self, latents: torch.Tensor, cache: None) -> tuple[torch.Tensor, None]:
        return latents + 1e-4, cache


def grey(level: int = 100) -> Frames:
    return np.full((64, 96, 3), level, np.uint8)


@pytest.mark.parametrize(("error", "expected"), [(0, math.inf), (1, 48.13), (-20, 22.11)])
def test_the_ratio_is_that_of_the_bytes(error: float, expected: float) -> None:
    found = restored_db(Copier(error), grey())  # type: ignore[arg-type]
    assert found == pytest.approx(expected, abs=0.01)


def test_a_frame_below_the_limit_is_said_to_be_unlike() -> None:
    vae = Copier(30)
    found = first_frame_warnings(vae, grey(), Familiarity(scenes_db=27.4, limit_db=20))  # type: ignore[arg-type]
    assert found == [
        "the first frame is unlike the scenes this model was trained on (reconstructed at 18.6 dB; its own scenes "
        "reach 27): expect a blurred world"
    ]
    assert first_frame_warnings(vae, grey(), Familiarity(scenes_db=27.4, limit_db=18)) == []  # type: ignore[arg-type]


def test_a_real_vae_is_asked_and_the_frame_left_alone() -> None:
    vae = CausalVideoVAE(TINY_VAE)
    init_untrained(vae, seed=0)
    frame = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    before = frame.copy()
    frame.flags.writeable = False
    assert 4 < restored_db(vae, frame) < 15
    assert (frame == before).all()


class SayingModel:
    """The served model, which says what it was asked about."""

    def __init__(self, model: WorldModel) -> None:
        self._model = model

    def __getattr__(self, name: str) -> object:
        return getattr(self._model, name)

    def warnings(self, first_frame: Frames | None, prompt: str) -> list[str]:
        return [f"{prompt}: {None if first_frame is None else first_frame.shape}"]


@pytest.fixture
def saying(model: WorldModel) -> WorldModel:
    return SayingModel(model)  # type: ignore[return-value]


async def test_a_session_has_the_warnings_of_its_frame_and_prompt(saying: WorldModel) -> None:
    engine = Engine(saying, MemoryStore(), Limits())
    async with client_of(engine) as http:
        request = {"image": first_frame(), "prompt": "a quay", "seed": 1}
        made = (await http.post("/v1/sessions", json=request, headers={"Idempotency-Key": "k"})).json()
        again = (await http.post("/v1/sessions", json=request, headers={"Idempotency-Key": "k"})).json()
        assert made["warnings"][1:] == ["a quay: (192, 320, 3)"]
        assert "60 degrees" in made["warnings"][0]
        assert again == made
        assert (await http.get(made["links"]["self"])).json()["warnings"] == made["warnings"]
    engine.close()


async def test_chunks_of_a_changed_prompt_have_its_warnings(saying: WorldModel) -> None:
    engine = Engine(saying, MemoryStore(), Limits())
    async with client_of(engine) as http:
        session = await begin(http, prompt="a quay")
        for camera, fields in (
            ("w-24", {}),
            ("w-12", {"prompt": "a storm"}),
            ("w-12", {}),
            ("w-24", {"prompt": "a quay"}),
        ):
            answer = await post(http, session, camera, **fields)
            assert answer.status_code == 201
        assert await chunk_warnings(http, session) == [[], ["a storm: None"], []]
    engine.close()


async def chunk_warnings(http: httpx.AsyncClient, session: str) -> list[list[str]]:
    """Warnings of every chunk."""
    return [chunk["warnings"] for chunk in (await http.get(f"{session}/chunks")).json()["data"]]
