"""Paths through branches: cut, clipped and looked up, against lists of log records."""

from hypothesis import given
from hypothesis import strategies as st

from longtake.state_cache.branches import branch_name, branch_of, cut, spans, within
from longtake.state_cache.records import Cursor, Head, Span

CURSOR = Cursor(controller={}, seed=0)

lengths = st.lists(st.integers(1, 4), max_size=5)
places = st.integers(-3, 25)


def path_of(lengths: list[int]) -> tuple[Span, ...]:
    """Spans of these lengths end to end."""
    stops = [sum(lengths[: place + 1]) for place in range(len(lengths))]
    return tuple(
        Span(f"b{place}", stop - length, stop) for place, (stop, length) in enumerate(zip(stops, lengths, strict=True))
    )


def records(path: tuple[Span, ...]) -> list[tuple[str, int]]:
    return [(span.branch, index) for span in path for index in range(span.start, span.stop)]


def test_the_last_span_is_the_branch_that_a_session_writes() -> None:
    head = Head(chunk=4, revision=2, cursor=CURSOR, path=(Span("a:0", 0, 2), Span("b:1", 2, 4)), base=4)
    assert spans("b", head) == (Span("a:0", 0, 2), Span("b:1", 2, 4), Span("b:2", 4, 5))
    assert spans("new", Head(chunk=-1, revision=0, cursor=CURSOR)) == (Span("new:0", 0, 0),)
    assert branch_name("b", 2) == "b:2"


@given(lengths, places)
def test_a_cut_path_ends_there(lengths: list[int], stop: int) -> None:
    path = path_of(lengths)
    kept = cut(path, stop)
    assert records(kept) == [record for record in records(path) if record[1] < stop]
    assert all(span.start < span.stop for span in kept)


def test_a_cut_drops_spans_that_are_empty() -> None:
    assert cut((Span("a:0", 0, 3), Span("b:0", 3, 3)), 9) == (Span("a:0", 0, 3),)


@given(lengths, places, places)
def test_a_part_of_a_path_has_its_records(lengths: list[int], start: int, stop: int) -> None:
    path = path_of(lengths)
    assert records(within(path, start, stop)) == [record for record in records(path) if start <= record[1] < stop]


@given(lengths, places)
def test_every_record_lies_on_one_branch(lengths: list[int], index: int) -> None:
    path = path_of(lengths)
    found = branch_of(path, index)
    assert [(found, index)] == [r for r in records(path) if r[1] == index] or (
        found is None and index not in range(sum(lengths))
    )
