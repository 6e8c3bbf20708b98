from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from longtake.state_cache import digest, state_digest

DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8, torch.int64, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip


def state() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "blocks.0.kv": torch.randn(1, 2, 5, 5, generator=generator),
        "blocks.0.k_tail": torch.randn(1, 3, 7, generator=generator).bfloat16(),
        "last_frame": torch.randint(0, 255, (3, 5, 3), generator=generator, dtype=torch.uint8),
    }


def flip(tensor: Tensor, byte: int, bit: int) -> Tensor:
    data = tensor.clone()
    data.view(-1).view(torch.uint8)[byte] ^= 1 << bit
    return data


def test_the_value_is_fixed() -> None:
    tensors = {"a": torch.arange(11, dtype=torch.float32), "b": torch.tensor([1, 2, 3], dtype=torch.uint8)}
    assert state_digest(tensors) == "sha256:cb711c390f692f751485030a5e66336fb7bcd71c665138dbe29b38570865dec6"
    assert state_digest({}) == "sha256:4f53cda18c2baa0c0354bb5f9a3ecbe5ed12ab4d8e11ba873c2f11161202b945"


def test_the_hash_is_the_documented_sum() -> None:
    words = [3, -5, 1 << 62]
    mask = (1 << 64) - 1
    first = second = 0
    for position, word in enumerate(words):
        mixed = (word + position * 0x9E3779B97F4A7C15) & mask
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & mask
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & mask
        mixed ^= mixed >> 31
        first += mixed
        mixed = mixed * 0xD6E8FEB86659FD93 & mask
        second += mixed ^ mixed >> 32
    lanes = digest._lanes(torch.tensor(words))
    assert [lane & mask for lane in lanes.tolist()] == [first & mask, second & mask]


def test_every_single_bit_counts() -> None:
    tensor = state()["blocks.0.k_tail"]
    digests = {state_digest({"a": flip(tensor, byte, bit)}) for byte in range(tensor.nbytes) for bit in range(8)}
    assert len(digests | {state_digest({"a": tensor})}) == tensor.nbytes * 8 + 1


def test_every_exchange_of_two_elements_counts() -> None:
    tensor = torch.arange(40, dtype=torch.float32)
    digests = set()
    for low in range(40):
        for high in range(low + 1, 40):
            swapped = tensor.clone()
            swapped[[low, high]] = tensor[[high, low]]
            digests.add(state_digest({"a": swapped}))
    assert len(digests) == 40 * 39 // 2


CHANGES: dict[str, Callable[[dict[str, Tensor]], dict[str, Tensor]]] = {
    "renamed": lambda tensors: {("x" if name == "last_frame" else name): t for name, t in tensors.items()},
    "reordered": lambda tensors: dict(reversed(tensors.items())),
    "reshaped": lambda tensors: tensors | {"last_frame": tensors["last_frame"].reshape(5, 9)},
    "other dtype, same bits": lambda tensors: tensors | {"last_frame": tensors["last_frame"].view(torch.int8)},
    "dropped": lambda tensors: dict(list(tensors.items())[:-1]),
    "empty tensor added": lambda tensors: tensors | {"empty": torch.empty(0)},
    "negative zero": lambda tensors: tensors | {"last_frame": -torch.zeros(3, 5, 3)},
    "zero": lambda tensors: tensors | {"last_frame": torch.zeros(3, 5, 3)},
    "a zero byte more": lambda tensors: (
        tensors | {"last_frame": torch.cat([tensors["last_frame"].view(-1), torch.zeros(1, dtype=torch.uint8)])}
    ),
}


def test_all_changes_are_seen() -> None:
    tensors = state()
    digests = {name: state_digest(change(tensors)) for name, change in CHANGES.items()}
    assert len({*digests.values(), state_digest(tensors)}) == len(CHANGES) + 1


def test_memory_layout_does_not_count() -> None:
    tensor = torch.randn(6, 4)
    same = {
        "copy": tensor.clone(),
        "column major": tensor.T.contiguous().T,
        "at an odd address": torch.cat([torch.zeros(1), tensor.view(-1)])[1:].view(6, 4),
    }
    assert {state_digest({"a": other}) for other in same.values()} == {state_digest({"a": tensor})}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [1, 3, 8, 13])
def test_every_dtype_and_odd_size_is_taken(dtype: torch.dtype, count: int) -> None:
    tensor = torch.arange(1, count + 1).to(dtype)
    before = tensor.clone()
    found = state_digest({"a": tensor})
    assert found != state_digest({"a": flip(tensor, tensor.nbytes - 1, 0)})
    assert torch.equal(tensor.view(torch.uint8), before.view(torch.uint8))


def test_scalars_differ_from_vectors_of_one() -> None:
    assert state_digest({"a": torch.tensor(2.0)}) != state_digest({"a": torch.tensor([2.0])})


def test_the_value_does_not_depend_on_how_the_sum_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(1001)
    whole = state_digest({"a": tensor})
    monkeypatch.setattr(digest, "_BLOCK", 64)
    assert state_digest({"a": tensor}) == whole


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_finds_the_same_value() -> None:
    tensors = state() | {"odd": torch.arange(13, dtype=torch.uint8), "large": torch.randn(1 << 20)}
    moved = {name: tensor.cuda() for name, tensor in tensors.items()}
    assert state_digest(moved) == state_digest(tensors)
    assert state_digest(tensors | {"odd": moved["odd"]}) == state_digest(tensors)
