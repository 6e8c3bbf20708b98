"""What a scene shows, in a few words from a small vocabulary."""

import torch
from torch import Tensor

from longtake.training.scenes import GROUNDS, NOUNS, SLOTS, TIMES, Scenes
from longtake.training.textures import COLOURS

_PLURALS = {
    "box": "boxes",
    "tower": "towers",
    "wall": "walls",
    "column": "columns",
    "sphere": "spheres",
    "stairs": "stairs",
    "pyramid": "pyramids",
    "gate": "gates",
    "tree": "trees",
}
_COUNTS = {2: "two", 3: "three"}
_MANY = "many"
_WHEN = {"morning": "in the morning", "noon": "at noon", "dusk": "at dusk", "night": "at night"}
_MENTIONED = 2


def _words() -> tuple[str, ...]:
    linking = ("a", "an", "and", "at", "in", "on", "the", _MANY, *_COUNTS.values())
    return tuple(sorted({*linking, *COLOURS, *NOUNS, *_PLURALS.values(), *GROUNDS, *TIMES}))


VOCABULARY: tuple[str, ...] = _words()
"""Every word that a caption may hold."""


def caption(scenes: Scenes) -> list[str]:
    """A caption of at most 16 words for each scene, such as `two red columns and a blue sphere on grey tiles at dusk`.

    It names the objects that look largest from the first camera and are still there.
    """
    weights = _prominence(scenes).tolist()
    columns = (scenes.noun, scenes.colour[:, :SLOTS], scenes.group, scenes.ground, scenes.colour[:, -1], scenes.time)
    return [_sentence(weight, *row) for weight, *row in zip(weights, *(c.tolist() for c in columns), strict=True)]


def _prominence(scenes: Scenes) -> Tensor:
    """How much each slot shows, [B,18]: size over distance, less aside of the view, 0 where nothing is."""
    centre, half = scenes.shape[:, :SLOTS, :3], scenes.shape[:, :SLOTS, 3:6]
    x, z = centre[..., 0], centre[..., 2]
    size = (half[..., 0] * half[..., 1]).sqrt() / torch.hypot(x, z).clamp(min=0.5)
    aside = torch.atan2(x, z).abs()
    return torch.where(scenes.active, size * torch.where(aside < 0.55, 1.0, 0.15), 0.0)


def _sentence(
    weights: list[float], nouns: list[int], colours: list[int], groups: list[int], ground: int, soil: int, time: int
) -> str:
    found: dict[tuple[int, int], dict[int, float]] = {}
    for weight, noun, group in zip(weights, nouns, groups, strict=True):
        if weight > 0:
            members = found.setdefault((colours[group], noun), {})
            members[group] = members.get(group, 0.0) + weight
    ranked = sorted(found, key=lambda thing: (-sum(found[thing].values()), thing))[:_MENTIONED]
    things = " and ".join(_phrase(noun, colour, len(found[colour, noun])) for colour, noun in ranked)
    names = list(COLOURS)
    return f"{things} on {names[soil]} {GROUNDS[ground]} {_WHEN[TIMES[time]]}".removeprefix(" ")


def _phrase(noun: int, colour: int, count: int) -> str:
    name, word = list(COLOURS)[colour], NOUNS[noun]
    if count == 1:
        article = "" if word == "stairs" else "an " if name[0] in "aeiou" else "a "
        return f"{article}{name} {word}"
    return f"{_COUNTS.get(count, _MANY)} {name} {_PLURALS[word]}"
