"""Words that a model knows, and what it says of those that it does not."""

import pytest
import torch

from longtake.server.model.fingerprint import weights_fingerprint
from longtake.server.model.vocabulary import Vocabulary, WordEmbedder

WORDS = ("", "a", "room", "with", "red", "walls")


def embedder(words: tuple[str, ...] = WORDS, length: int = 4, seed: int = 0) -> WordEmbedder:
    weight = torch.randn(len(words), 8, generator=torch.Generator().manual_seed(seed))
    return WordEmbedder(Vocabulary(words, length), weight).requires_grad_(requires_grad=False)


def test_a_prompt_is_the_vectors_of_its_words_in_order() -> None:
    words = embedder()
    text, mask = words("Red, red ROOM!")
    assert (text.shape, text.dtype, mask.dtype) == ((1, 4, 8), torch.float32, torch.int64)
    assert mask.tolist() == [[1, 1, 1, 0]]
    assert text[0, :3].equal(words.weight[[4, 4, 2]])
    assert not text[0, 3].any()


def test_unknown_words_leave_no_gap() -> None:
    words = embedder()
    text, mask = words("red haunted room")
    assert text.equal(words("red room")[0])
    assert mask.equal(words("red room")[1])
    assert words.unknown("a haunted castle, a HAUNTED room") == ["haunted", "castle"]


@pytest.mark.parametrize("prompt", ["", "  …", "castle"])
def test_without_a_known_word_there_is_the_empty_one(prompt: str) -> None:
    words = embedder()
    text, mask = words(prompt)
    assert mask.tolist() == [[1, 0, 0, 0]]
    assert text[0, 0].equal(words.weight[0])


def test_many_prompts_at_once_are_each_as_alone() -> None:
    words, prompts = embedder(), ["a red room", "", "walls walls walls walls walls"]
    text, mask = words.embed(prompts)
    assert text.equal(torch.cat([words(prompt)[0] for prompt in prompts]))
    assert mask.equal(torch.cat([words(prompt)[1] for prompt in prompts]))


def test_words_learn_where_a_gradient_is_wanted() -> None:
    words = embedder().requires_grad_(requires_grad=True)
    words("red walls")[0].sum().backward()
    assert words.weight.grad is not None
    assert words.weight.grad.sum(1).tolist() == [0, 0, 0, 0, 8, 8]


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a red room", []),
        ("", []),
        ("a castle", ['the prompt\'s word "castle" is not known to this model and is ignored']),
        (
            "castle of a dragon",
            ['the prompt\'s words "castle", "of", "dragon" are not known to this model and are ignored'],
        ),
        (
            "q w e r t y u",
            ['the prompt\'s words "q", "w", "e", "r", "t" and 2 more are not known to this model and are ignored'],
        ),
        ("x" * 4000, [f'the prompt\'s word "{"x" * 24}…" is not known to this model and is ignored']),
        ("a room with red walls", ["this model reads 4 words of a prompt: the last 1 are ignored"]),
    ],
    ids=["known", "nothing", "one", "some", "many", "long", "too many"],
)
def test_what_is_ignored_is_said(prompt: str, expected: list[str]) -> None:
    assert embedder().warnings(prompt) == expected


@pytest.mark.parametrize(
    "words", [("a", "b"), (), ("", "a", "a"), ("", ""), ("", "A"), ("", "two words"), ("", "…")], ids=repr
)
def test_what_is_no_vocabulary_is_refused(words: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="word"):
        Vocabulary(words, 4)


def test_every_word_has_a_vector() -> None:
    with pytest.raises(ValueError, match="6 words"):
        WordEmbedder(Vocabulary(WORDS, 4), torch.zeros(5, 8))


def test_the_fingerprint_covers_words_vectors_and_length() -> None:
    others = [
        embedder(),
        embedder(("", "a", "room", "with", "red", "roofs")),
        embedder(("", "room", "a", "with", "red", "walls")),
        embedder(length=5),
        embedder(seed=1),
    ]
    prints = [weights_fingerprint("m", words) for words in others]
    assert len(set(prints)) == len(others)
    assert prints[0] == weights_fingerprint("m", embedder())


def test_a_prompt_without_words_is_said_to_be_ignored() -> None:
    words = embedder()
    assert words.warnings("🌲 … !") == ["the prompt has no words, and is ignored"]
    assert words.warnings("") == words.warnings(" ") == words.warnings("a red room") == []
