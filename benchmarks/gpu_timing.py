"""Times on the current GPU: of a captured graph, of eager calls, and of the kernels behind them."""

import statistics
from collections.abc import Callable, Sequence
from itertools import cycle, islice
from typing import TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

T = TypeVar("T")
WARMUPS, REPEATS = 5, 30


def elapsed(before: Callable[[], object], call: Callable[[], object]) -> float:
    """Microseconds from the end of what `before` put on the GPU to the end of the call."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    call()
    stop.record()
    stop.synchronize()
    return float(start.elapsed_time(stop)) * 1e3


def captured(run: Callable[[T], object], inputs: Sequence[T]) -> tuple[float, object]:
    """Median microseconds of a call in one graph that runs every input once, and what the first call returned there.

    Each timed replay is queued behind another, so that launching the graph is not counted.
    """
    graph, first = torch.cuda.CUDAGraph(), None
    with torch.cuda.graph(graph):
        for index, x in enumerate(inputs):
            result = run(x)
            first = result if index == 0 else first
    for _ in range(WARMUPS):
        graph.replay()
    times = [elapsed(graph.replay, graph.replay) / len(inputs) for _ in range(REPEATS)]
    return statistics.median(times), first


def eager(run: Callable[[T], object], inputs: Sequence[T]) -> float:
    """Median microseconds of a call launched from Python on an idle GPU, the inputs in turn."""
    for x in inputs:
        run(x)
    times = (elapsed(torch.cuda.synchronize, lambda x=x: run(x)) for x in islice(cycle(inputs), REPEATS))
    return statistics.median(times)


def kernels(run: Callable[[T], object], inputs: Sequence[T]) -> list[tuple[str, float, float]]:
    """Name, microseconds and launches a call of every kernel, the longest first."""
    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        for x in islice(cycle(inputs), REPEATS):
            run(x)
        torch.cuda.synchronize()
    totals: dict[str, list[float]] = {}
    for event in trace.events():
        if event.device_type.name == "CUDA":
            totals.setdefault(event.name, []).append(event.time_range.elapsed_us())
    rows = [(name, sum(times) / REPEATS, len(times) / REPEATS) for name, times in totals.items()]
    return sorted(rows, key=lambda row: -row[1])
