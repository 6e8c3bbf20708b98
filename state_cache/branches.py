"""Which branch holds which log record: a session's path through the branches of its lineage."""

from collections.abc import Iterable, Sequence

from longtake.state_cache.records import Head, Span


def branch_name(session_id: str, revision: int) -> str:
    """The branch that a session writes in one revision."""
    return f"{session_id}:{revision}"


def spans(session_id: str, head: Head) -> tuple[Span, ...]:
    """Every committed log record of a session, in order; the last span is the branch it writes, empty at first."""
    return *head.path, Span(branch_name(session_id, head.revision), head.base, head.chunk + 1)


def cut(path: Iterable[Span], stop: int) -> tuple[Span, ...]:
    """The part of a path before chunk `stop`."""
    cut_off = (Span(span.branch, span.start, min(span.stop, stop)) for span in path)
    return tuple(span for span in cut_off if span.start < span.stop)


def within(path: Iterable[Span], start: int, stop: int) -> tuple[Span, ...]:
    """The part of a path from chunk `start` to chunk `stop - 1`."""
    clipped = (Span(span.branch, max(span.start, start), span.stop) for span in cut(path, stop))
    return tuple(span for span in clipped if span.start < span.stop)


def branch_of(path: Sequence[Span], index: int) -> str | None:
    """The branch whose record a path has for a chunk."""
    return next((span.branch for span in path if span.start <= index < span.stop), None)
