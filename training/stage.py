"""What a stage of the training is told: one TOML file each, in the order of their names."""

import tomllib
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

CONFIGS = Path(__file__).parent / "configs"


class Stage(BaseModel):
    """A stage, which begins with the weights that the stages before it left."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    part: Literal["vae", "world"] = Field(description="What is trained.")
    minutes: float = Field(
        gt=0, le=9, allow_inf_nan=False, description="How long it trains on an H200, beside starting and saving."
    )
    batch: int = Field(gt=0, description="Clips a step on each GPU.")
    gpus: int = Field(1, gt=0, description="How many it was made on: with fewer, a step has fewer clips.")
    chunks: int = Field(gt=0, description="Chunks of 24 frames in a clip; the VAE trains on one.")
    rate: float = Field(
        gt=0,
        lt=1,
        allow_inf_nan=False,
        description="Peak of the learning rate, which falls to a twentieth along a cosine.",
    )
    warm_up: float = Field(0.02, ge=0, lt=1, description="Part of the stage in which the rate rises.")
    clips: int = Field(2048, gt=0, description="Clips kept on each GPU.")
    reuse: int = Field(4, gt=0, description="How often a clip is used before a new one takes its place.")
    history: Literal["true", "own"] = Field("true", description="Whose chunks are remembered: true or generated.")
    fused: bool = Field(False, description="Fuse blocks with torch.compile, on a GPU: a quarter less time a step.")
    seed: int = Field(0, ge=0, description="Of the noise and of the scenes, which no other stage sees.")


def read_stage(path: Path) -> Stage:
    """The stage of a TOML file. Raises what pydantic and tomllib raise."""
    return Stage.model_validate(tomllib.loads(path.read_text()))


def all_stages() -> dict[str, Stage]:
    """Every stage of the recipe by name, in order."""
    return {path.stem: read_stage(path) for path in sorted(CONFIGS.glob("*.toml"))}
