"""Tensors and files to blobs and back, bit by bit."""

import pytest
import torch

from longtake.state_cache import (
    MAX_BLOB,
    Arena,
    File,
    MemoryStore,
    SchemaError,
    Store,
    TensorRef,
    load_file,
    load_tensors,
    new_session_id,
    save_file,
    save_tensors,
)
from longtake.state_cache.codec import pack, unpack

TENSORS = {
    "blocks.0.kv": torch.randn(2, 3, 5),
    "odd": torch.arange(7, dtype=torch.uint8),
    "half": torch.randn(3, 1).half(),
    "brain": torch.randn(5).bfloat16(),
    "count": torch.tensor(-(2**60)),
    "empty": torch.empty(0, 4),
    "flag": torch.tensor([True, False, True]),
    "view": torch.randn(4, 6).T[1:],
    "large": torch.randint(0, 255, (MAX_BLOB + 17,), dtype=torch.uint8),
    "last": torch.randn(1).double(),
}


def test_tensors_come_back_bit_by_bit(any_store: Store) -> None:
    session_id = new_session_id()
    arena = save_tensors(any_store, session_id, TENSORS)
    found = load_tensors(any_store, session_id, arena)
    assert list(found) == list(TENSORS)
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert found[name].is_contiguous()
        assert torch.equal(found[name], tensor)
    assert load_tensors(any_store, session_id, save_tensors(any_store, session_id, {})) == {}


def test_loaded_tensors_share_no_memory(any_store: Store) -> None:
    session_id = new_session_id()
    arena = save_tensors(any_store, session_id, {"a": torch.zeros(3), "b": torch.zeros(3)})
    found = load_tensors(any_store, session_id, arena)
    found["a"].fill_(7)
    assert torch.equal(found["b"], torch.zeros(3))
    assert torch.equal(load_tensors(any_store, session_id, arena)["a"], torch.zeros(3))


def test_packing_takes_a_copy() -> None:
    tensor = torch.zeros(4)
    refs, blobs = pack({"a": tensor})
    tensor.fill_(1)
    assert torch.equal(unpack(Arena(refs, ()), [bytes(blob) for blob in blobs])["a"], torch.zeros(4))


def test_a_large_tensor_keeps_its_blobs_wherever_it_moves() -> None:
    store, session_id = MemoryStore(), new_session_id()
    small, frame = torch.randn(3), torch.randn(MAX_BLOB // 2)
    first = save_tensors(store, session_id, {"window.1.k": small, "window.2.k": frame})
    moved = save_tensors(store, session_id, {"window.1.k": frame, "window.2.k": small.double()})
    assert set(first.blobs[1:]) == set(moved.blobs[:-1])


@pytest.mark.parametrize("size", [0, 1, MAX_BLOB, MAX_BLOB + 1])
def test_files_of_any_size_come_back(any_store: Store, size: int) -> None:
    session_id, data = new_session_id(), (b"0123456789a" * (size // 11 + 1))[:size]
    assert load_file(any_store, session_id, save_file(any_store, session_id, data)) == data


def test_a_file_of_another_size_is_refused(any_store: Store) -> None:
    session_id = new_session_id()
    file = save_file(any_store, session_id, b"media")
    with pytest.raises(SchemaError):
        load_file(any_store, session_id, File(6, file.blobs))


def ref(dtype: str = "F32", shape: tuple[int, ...] = (2,), start: int = 0, stop: int = 8) -> TensorRef:
    return TensorRef("a", dtype, shape, start, stop)


BAD_LAYOUTS = {
    "unknown dtype": (ref("F8"),),
    "negative sides": (ref(shape=(-1, -2)),),
    "shape too large": (ref(shape=(1 << 40, 1 << 40)),),
    "range too short": (ref(stop=4),),
    "range elsewhere": (ref(start=8, stop=16),),
    "gap": (ref("U8", (2,), 0, 2), ref("U8", (4,), 4, 8)),
    "bytes left over": (ref("U8", (4,), 0, 4),),
    "same name twice": (ref("U8", (4,), 0, 4), ref("U8", (4,), 4, 8)),
    "nothing": (),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_an_arena_that_does_not_fit_its_bytes_is_refused(name: str) -> None:
    with pytest.raises(SchemaError):
        unpack(Arena(BAD_LAYOUTS[name], ()), [bytes(8)])


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="complex64"):
        pack({"a": torch.zeros(2, dtype=torch.complex64)})
