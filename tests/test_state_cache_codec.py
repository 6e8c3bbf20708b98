"""Tensors and files to blobs and back, bit by bit."""

import time
from collections.abc import Sequence

import pytest
import torch

from longtake.state_cache import (
    MAX_BLOB,
    Arena,
    BlobRef,
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
from longtake.state_cache.codec import pack, save_both
from longtake.state_cache.landing import Landing

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


def landed(refs: Sequence[TensorRef], blobs: Sequence[bytes]) -> dict[str, torch.Tensor]:
    """Tensors of blobs that have arrived."""
    landing = Landing(refs, [len(blob) for blob in blobs])
    for buffer, blob in zip(landing.buffers, blobs, strict=True):
        buffer[:] = blob
    return landing.tensors()


def test_packing_takes_a_copy() -> None:
    tensor = torch.zeros(4)
    refs, blobs = pack({"a": tensor})
    tensor.fill_(1)
    assert torch.equal(landed(refs, [bytes(blob) for blob in blobs])["a"], torch.zeros(4))


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


def test_tensors_and_a_file_go_in_one_call_as_in_two(any_store: Store) -> None:
    session_id, data = new_session_id(), bytes(MAX_BLOB + 5)
    both = save_both(any_store, session_id, TENSORS, data)
    assert both == (save_tensors(any_store, session_id, TENSORS), save_file(any_store, session_id, data))


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
    "too many sides": (ref("U8", (1,) * 17 + (8,)),),
    "empty, with sides beyond any address": (ref(), TensorRef("b", "U8", (0, 1 << 62, 1 << 62), 8, 8)),
}


@pytest.mark.parametrize("name", BAD_LAYOUTS)
def test_an_arena_that_does_not_fit_its_bytes_is_refused(name: str) -> None:
    with pytest.raises(SchemaError):
        landed(BAD_LAYOUTS[name], [bytes(8)])


HOSTILE = {
    "a million tensors": Arena(tuple(TensorRef(str(n), "U8", (0,), 0, 0) for n in range(1_000_000)), ()),
    "a million blobs": Arena((ref(),), (BlobRef("0" * 32, 0),) * 1_000_000),
    "blobs that cancel out": Arena((ref(),), (BlobRef("0" * 32, 16), BlobRef("0" * 32, -8))),
    "a blob beyond the limit": Arena((ref("U8", (1 << 40,), 0, 1 << 40),), (BlobRef("0" * 32, 1 << 40),)),
    "a shape of a million sides": Arena((ref(shape=((1 << 62) - 1,) * 1_000_000),), (BlobRef("0" * 32, 8),)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_arena_is_refused_before_it_costs_anything(name: str) -> None:
    started = time.monotonic()
    with pytest.raises(SchemaError):
        load_tensors(MemoryStore(), new_session_id(), HOSTILE[name])
    assert time.monotonic() - started < 1


def test_large_tensors_in_host_memory_are_not_copied() -> None:
    large, small, strided = torch.randn(MAX_BLOB), torch.randn(3), torch.randn(1000, 400).T
    _, blobs = pack({"large": large, "small": small, "strided": strided})
    first = torch.frombuffer(blobs[0], dtype=torch.float32)
    assert first.data_ptr() == large.data_ptr()
    assert [len(blob) for blob in blobs] == [MAX_BLOB] * 4 + [12, MAX_BLOB, 1_600_000 - MAX_BLOB]
    assert torch.frombuffer(blobs[4], dtype=torch.float32).data_ptr() != small.data_ptr()


class Recorder(MemoryStore):
    """Keeps where blobs were received."""

    def get_into(self, session_id: str, refs: Sequence[BlobRef], buffers: Sequence[memoryview]) -> None:
        super().get_into(session_id, refs, buffers)
        self.places = [torch.frombuffer(buffer, dtype=torch.uint8).data_ptr() for buffer in buffers]


def test_tensors_are_received_in_their_own_memory() -> None:
    store, session_id = Recorder(), new_session_id()
    tensors = {"a": torch.randn(5), "large": torch.randn(3 * MAX_BLOB), "b": torch.randn(7), "c": torch.randn(2)}
    found = load_tensors(store, session_id, save_tensors(store, session_id, tensors))
    start = found["large"].data_ptr()
    assert start % 64 == 0
    assert store.places[:-1] == [found["a"].data_ptr(), *range(start, start + 12 * MAX_BLOB, MAX_BLOB)]
    assert store.places[-1] not in {found["b"].data_ptr(), found["c"].data_ptr()}
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)


@pytest.mark.parametrize("size", [1, 3, 8, 9, 64])
def test_an_arena_may_be_cut_anywhere(size: int) -> None:
    tensors = {
        "a": torch.arange(5.0),
        "none": torch.empty(0),
        "b": torch.arange(9, dtype=torch.uint8),
        "c": torch.ones(2),
    }
    refs, blobs = pack(tensors)
    data = b"".join(blobs)
    cut = [data[start : start + size] for start in range(0, len(data), size)]
    found = landed(refs, cut)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_other_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="complex64"):
        pack({"a": torch.zeros(2, dtype=torch.complex64)})
