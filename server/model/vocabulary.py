"""A text encoder over the words of a model's captions: one trained vector for each, and no other words."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from longtake.server.model.text import words_of

EMPTY = ""
"""The first word of every vocabulary: what a prompt without any known word consists of."""

NAMED = 5
"""Unknown words that a warning names."""

WORD_SHOWN = 24
"""Characters of an unknown word that a warning shows."""


@dataclass(frozen=True)
class Vocabulary:
    """Words in the order of their vectors, the empty one first; `length` of them are read of a prompt.

    Raises:
        ValueError: the first word is not the empty one, or a word could not be one of a prompt, or stands twice.
    """

    words: tuple[str, ...]
    length: int
    rows: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", {word: row for row, word in enumerate(self.words)})
        if self.words[:1] != (EMPTY,) or len(self.rows) != len(self.words):
            raise ValueError("a vocabulary begins with the empty word and has every word once")
        if odd := [word for word in self.words[1:] if words_of(word) != [word]]:
            raise ValueError(f"{odd[0]!r} is no word in lower case")

    def known(self, prompt: str) -> list[str]:
        """Words of a prompt that are in the vocabulary, in order."""
        return [word for word in words_of(prompt) if word in self.rows]

    def read(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Rows [B,L] int64 of the words that are read of prompts, and their masks [B,L]; on the CPU.

        A prompt without any known word has the row of the empty one.
        """
        index = torch.zeros(len(prompts), self.length, dtype=torch.int64)
        mask = torch.zeros_like(index)
        for line, prompt in enumerate(prompts):
            found = [self.rows[word] for word in self.known(prompt)[: self.length]] or [0]
            index[line, : len(found)] = torch.tensor(found)
            mask[line, : len(found)] = 1
        return index, mask


class WordEmbedder(nn.Module):
    """Prompts to text: the vectors of the words it knows, in order. It has no other parameter than `weight`.

    Args:
        vocabulary: the words that it knows.
        weight: [words, E], the vector of each. Kept as it is, not copied.

    Raises:
        ValueError: there are more or fewer vectors than words.
    """

    def __init__(self, vocabulary: Vocabulary, weight: Tensor) -> None:
        super().__init__()
        if weight.ndim != 2 or len(weight) != len(vocabulary.words):
            raise ValueError(f"{len(vocabulary.words)} words have vectors of shape {tuple(weight.shape)}")
        self.config = vocabulary
        self.weight = nn.Parameter(weight)

    def forward(self, prompt: str) -> tuple[Tensor, Tensor]:
        """Text [1,L,E] of a prompt, zeros behind its end, and its mask [1,L] int64."""
        return self.embed([prompt])

    def embed(self, prompts: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Texts [B,L,E] in the dtype of the weight, zeros behind their ends, and masks [B,L] int64."""
        index, mask = (x.to(self.weight.device) for x in self.config.read(prompts))
        return self.weight[index] * mask[..., None], mask

    def unknown(self, prompt: str) -> list[str]:
        """Words of a prompt that are not in the vocabulary, each once, in order."""
        return [word for word in dict.fromkeys(words_of(prompt)) if word not in self.config.rows]

    def warnings(self, prompt: str) -> list[str]:
        """What is ignored of a prompt, a sentence each."""
        warnings, unknown = [], self.unknown(prompt)
        if unknown:
            words, are = ("word", "is") if len(unknown) == 1 else ("words", "are")
            warnings.append(f"the prompt's {words} {_listed(unknown)} {are} not known to this model and {are} ignored")
        known, length = len(self.config.known(prompt)), self.config.length
        if prompt.strip() and not known and not unknown:
            warnings.append("the prompt has no words, and is ignored")
        if known > length:
            warnings.append(f"this model reads {length} words of a prompt: the last {known - length} are ignored")
        return warnings


def _listed(words: Sequence[str]) -> str:
    """The first few words in quotes, and how many more there are."""
    shown = [f'"{word[:WORD_SHOWN]}{"…" * (len(word) > WORD_SHOWN)}"' for word in words[:NAMED]]
    return ", ".join(shown) + (f" and {len(words) - NAMED} more" if len(words) > NAMED else "")
