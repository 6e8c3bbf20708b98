"""What snapshots of a full-size state cost the chunks that go on beside them, on this GPU; rows for RESULTS.md.

Stage 1 of SANA-WM at full size with random weights makes the same chunks twice: alone, and with a snapshot begun after
every chunk while the one before is not under way any more: copied by a stream of its own, written to a store on this
machine. The chunks must be the same bits, and every snapshot that was stored must load as the state it was taken of.
"""

import argparse
import asyncio
import statistics
import time

import torch

from benchmarks.model import condition, encode_text
from benchmarks.results import report, row
from benchmarks.state import Take, running, servers
from longtake.server.engine.copies import GpuCopies
from longtake.server.engine.snapshots import Snapshot, SnapshotWriter, Written
from longtake.server.model.conditions import TextCondition
from longtake.server.model.config import SANA_WM_1600M
from longtake.server.model.sampler import absorb_chunk, denoise_chunk
from longtake.server.model.state import TransformerState
from longtake.server.model.transformer import SanaWMTransformer
from longtake.server.model.weights import build_transformer, untrained_weights
from longtake.state_cache import Store, load_tensors, state_digest

CHUNKS = 16
WARM = 4
"""Chunks until the window is full and pinned memory is there."""


def main() -> None:
    """Check, measure, print; with --record also append the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", action="store_true", help="append the rows to benchmarks/RESULTS.md")
    arguments = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    dtype = torch.bfloat16
    weights = untrained_weights(SANA_WM_1600M, 0, dtype=dtype, device="cuda")
    model = build_transformer(SANA_WM_1600M, weights, dtype=dtype, device="cuda")
    with running(servers()[-1], fsync=False) as (store, name):
        alone = asyncio.run(Run(model, store, writes=False).chunks())
        beside = asyncio.run(Run(model, store, writes=True).chunks())
    assert alone.digests == beside.digests, "chunks with snapshots beside them differ"
    assert [each.outcome for each in beside.written].count("ok") >= 2, beside.written
    report([results_row(alone, beside, name)], record=arguments.record)


class Run:
    """A take, with or without snapshots."""

    def __init__(self, model: SanaWMTransformer, store: Store, *, writes: bool) -> None:
        self._model = model
        self._store = store
        self._writes = writes
        self.seconds: list[float] = []
        self.digests: list[str] = []
        self.written: list[Written] = []
        self.nbytes = 0

    async def chunks(self) -> "Run":
        """Make the chunks; returns itself."""
        take, text = Take.begin(self._store), encode_text(self._model)
        writer = SnapshotWriter(
            self._store,
            asyncio.to_thread,
            asyncio.to_thread,
            self.written.append,
            limit_bytes=4 * 2**30,
            copies=GpuCopies(),
        )
        state: TransformerState | None = None
        for index in range(CHUNKS):
            started = time.perf_counter()
            state = await asyncio.to_thread(self._chunk, text, index, state)
            self.seconds.append(time.perf_counter() - started)
            tensors = state.to_tensors()
            self.digests.append(state_digest(tensors))
            self.nbytes = sum(x.nbytes for x in tensors.values())
            take.commit({"latents": torch.zeros(9)}, b"")
            committed = asyncio.get_running_loop().create_future()
            committed.set_result(None)
            if self._writes:
                writer.write(Snapshot(take.id, take.fence, 0, index, tensors), committed)
        await writer.drain()
        for index, arena in self._store.snapshots(take.id).items():
            assert state_digest(load_tensors(self._store, take.id, arena)) == self.digests[index]
        return self

    @torch.inference_mode()
    def _chunk(self, text: TextCondition, index: int, state: TransformerState | None) -> TransformerState:
        chunk, latents = condition(self._model, text, index)
        latents = denoise_chunk(self._model, latents, chunk, state, pinned=int(index == 0))
        state = absorb_chunk(self._model, latents, chunk, state)
        torch.cuda.default_stream().synchronize()
        return state


def results_row(alone: Run, beside: Run, name: str) -> str:
    """The row for RESULTS.md."""
    steady, slowed = (statistics.median(run.seconds[WARM:]) * 1e3 for run in (alone, beside))
    stored = [each.seconds for each in beside.written if each.outcome == "ok"]
    number = (
        f"{slowed:.0f} ms beside snapshots, {steady:.0f} ms alone; "
        f"a snapshot of {beside.nbytes / 1e6:.0f} MB is stored after {statistics.median(stored) * 1e3:.0f} ms"
    )
    work = f"chunk of stage 1 at 2.66 B parameters, random weights, eager, snapshots going to {name} without AOF"
    return row(work, number, "alone", torch.cuda.get_device_name())


if __name__ == "__main__":
    main()
