"""What a lineage still needs, against a model that keeps everything."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtake.state_cache.branches import branch_name, branch_of, cut
from longtake.state_cache.records import Arena, Cursor, Fingerprint, Head, SessionRecord, Span
from longtake.state_cache.retention import Retention, Root, kept_snapshots, needed, next_horizon


def root(session_id: str, chunk: int, **fields: object) -> Root:
    session = SessionRecord(
        id=session_id,
        model="tiny",
        fingerprint=Fingerprint("weights", "numerics"),
        prompt="",
        seed=0,
        created_at=0.0,
        first_pose=[],
        intrinsics=[],
        intrinsics_size=(1, 1),
        source_size=(1, 1),
        conditions=Arena((), ()),
        warnings=[],
    )
    head = Head(chunk=chunk, revision=0, cursor=Cursor(controller={}, seed=0))
    return Root(session, msgspec.structs.replace(head, **fields))


def test_a_session_needs_its_path_and_what_it_is_about_to_write() -> None:
    marked = needed([root("b", 6, path=(Span("a:0", 0, 4),), base=4)], {}, Retention())
    assert [marked.has_record("a:0", index) for index in (0, 3, 4)] == [True, True, False]
    assert [marked.has_record("b:0", index) for index in (3, 4, 6, 7, 1000)] == [False, True, True, True, True]
    assert not marked.has_record("b:1", 4)


def test_a_record_stays_whole_for_the_session_with_the_nearest_horizon() -> None:
    shared = (Span("a:0", 0, 4),)
    marked = needed([root("a", 9, horizon=6), root("b", 3, path=shared, base=4, horizon=2)], {}, Retention())
    assert [marked.has_whole("a:0", index) for index in (1, 2, 3, 4, 5, 6, 50)] == [
        False,
        True,
        True,
        False,
        False,
        True,
        True,
    ]
    assert marked.has_record("a:0", 0)


def test_snapshots_written_while_the_marking_goes_on_stay() -> None:
    snapshots = {"a:0": [1, 2, 3, 4, 6], "b:0": [3]}
    marked = needed([root("a", 3)], snapshots, Retention(snapshots=1))
    assert marked.snapshots == {("a:0", 3), ("a:0", 4), ("a:0", 6)}


def test_snapshots_of_a_fork_lie_where_its_path_leads() -> None:
    fork = root("b", 5, path=(Span("a:0", 0, 3),), base=3)
    snapshots = {"a:0": [0, 1, 2, 3, 4, 5], "b:0": [4]}
    assert fork.snapshots(snapshots) == [0, 1, 2, 4]
    assert needed([fork], snapshots, Retention(snapshots=2)).snapshots == {("a:0", 2), ("b:0", 4)}


KEPT = {
    "the newest": ([0, 1, 2, 3], 0, Retention(snapshots=2), [2, 3]),
    "no more than there are": ([3], 0, Retention(snapshots=2), [3]),
    "the one at the horizon": ([2, 4, 6, 8, 9], 5, Retention(snapshots=2), [4, 8, 9]),
    "one a stride": (list(range(20)), 4, Retention(snapshots=1, chunks=8), [3, 5, 7, 9, 11, 13, 15, 17, 19]),
    "sparse ones, all": ([0, 5, 10, 15], 0, Retention(snapshots=1, chunks=8), [0, 5, 10, 15]),
    "a stride of one": ([0, 1, 2], 0, Retention(snapshots=1, chunks=1), [0, 1, 2]),
    "none": ([], 0, Retention(), []),
}


@pytest.mark.parametrize("name", KEPT)
def test_which_snapshots_stay(name: str) -> None:
    indices, horizon, policy, kept = KEPT[name]
    assert kept_snapshots(indices, horizon, policy) == kept


HORIZONS = {
    "all stay": ([0, 5], 0, None, 0),
    "behind a snapshot": ([0, 5], 0, 4, 6),
    "no snapshot": ([], 0, 4, 0),
    "too near the end": ([7], 0, 4, 0),
    "just far enough": ([5], 0, 4, 6),
    "never back": ([0, 5], 8, 4, 8),
}


@pytest.mark.parametrize("name", HORIZONS)
def test_where_the_horizon_moves(name: str) -> None:
    indices, horizon, chunks, moved = HORIZONS[name]
    assert next_horizon(root("a", 9, horizon=horizon), {"a:0": indices}, Retention(chunks=chunks)) == moved


class Lineage:
    """Branches as a store keeps them, and beside them the log of every session as a plain list."""

    def __init__(self) -> None:
        self.roots = {"s0": root("s0", -1)}
        self.logs: dict[str, list[int]] = {"s0": []}
        self.records: dict[tuple[str, int], int] = {}
        self.whole: set[tuple[str, int]] = set()
        self.snapshots: set[tuple[str, int]] = set()
        self.made = 0

    def found(self) -> dict[str, list[int]]:
        return {branch: [i for name, i in self.snapshots if name == branch] for branch, _ in self.snapshots}

    def move(self, name: str, **fields: object) -> None:
        self.roots[name] = Root(self.roots[name].session, msgspec.structs.replace(self.roots[name].head, **fields))

    def write(self, name: str, count: int, every: int) -> None:
        """Commit `count` chunks, with a snapshot after each whose index `every` divides."""
        for _ in range(count):
            head = self.roots[name].head
            at = (branch_name(name, head.revision), head.chunk + 1)
            self.made += 1
            self.records[at] = self.made
            self.whole.add(at)
            self.logs[name].append(self.made)
            if at[1] % every == 0:
                self.snapshots.add(at)
            self.move(name, chunk=at[1])

    def fork(self, name: str, back: int, _: int) -> None:
        parent, child = self.roots[name], f"s{len(self.logs)}"
        chunk = max(parent.head.chunk - back, parent.head.horizon - 1)
        path = cut(parent.path, chunk + 1)
        self.roots[child] = root(child, chunk, path=path, base=chunk + 1, horizon=parent.head.horizon)
        self.logs[child] = self.logs[name][: chunk + 1]

    def rewind(self, name: str, back: int, _: int) -> None:
        at = self.roots[name]
        chunk = max(at.head.chunk - back, at.head.horizon - 1)
        path = cut(at.path, chunk + 1)
        self.move(name, chunk=chunk, path=path, base=chunk + 1, revision=at.head.revision + 1)
        self.logs[name] = self.logs[name][: chunk + 1]

    def delete(self, name: str, *_: int) -> None:
        if len(self.roots) > 1:
            del self.roots[name]

    def collect(self, policy: Retention) -> None:
        for name, at in list(self.roots.items()):
            horizon = next_horizon(at, self.found(), policy)
            assert horizon == at.head.horizon or at.head.chunk - horizon + 1 >= (policy.chunks or 0)
            self.move(name, horizon=horizon)
        marked = needed(self.roots.values(), self.found(), policy)
        self.snapshots &= marked.snapshots
        self.records = {at: made for at, made in self.records.items() if marked.has_record(*at)}
        self.whole = {at for at in self.whole & self.records.keys() if marked.has_whole(*at)}

    def check(self) -> None:
        """Every session has its log, whole from its horizon on, and a snapshot to begin from."""
        for name, at in self.roots.items():
            log = [(branch_of(at.path, index) or "", index) for index in range(at.head.chunk + 1)]
            assert [self.records[place] for place in log] == self.logs[name]
            assert self.whole >= set(log[at.head.horizon :])
            assert at.head.horizon == 0 or log[at.head.horizon - 1] in self.snapshots

    def check_tidy(self) -> None:
        """There is nothing that no session needs."""
        paths = {
            name: {(s.branch, i) for s in at.path for i in range(s.start, s.stop)} for name, at in self.roots.items()
        }
        assert self.records.keys() == set().union(*paths.values())
        assert self.whole == {
            place for name, path in paths.items() for place in path if place[1] >= self.roots[name].head.horizon
        }
        assert self.snapshots <= self.records.keys()


steps = st.lists(
    st.tuples(
        st.sampled_from(["write", "write", "fork", "rewind", "delete", "collect"]),
        st.integers(0, 99),
        st.integers(0, 9),
    ),
    max_size=25,
)
policies = st.builds(Retention, snapshots=st.integers(1, 3), chunks=st.none() | st.integers(1, 9))


@settings(deadline=None)
@given(steps, policies, st.integers(1, 4))
def test_no_session_loses_anything_and_nothing_else_stays(
    steps: list[tuple[str, int, int]], policy: Retention, every: int
) -> None:
    lineage = Lineage()
    for kind, which, count in steps:
        if kind == "collect":
            lineage.collect(policy)
            lineage.check_tidy()
        else:
            name = sorted(lineage.roots)[which % len(lineage.roots)]
            step: Callable[[str, int, int], None] = getattr(lineage, kind)
            step(name, count, every)
        lineage.check()


@settings(deadline=None)
@given(policies.filter(lambda policy: policy.chunks is not None), st.integers(1, 4), st.integers(1, 7))
def test_what_a_long_session_keeps_does_not_grow(policy: Retention, every: int, burst: int) -> None:
    assert policy.chunks is not None
    lineage = Lineage()
    for _ in range(30):
        lineage.write("s0", burst, every)
        lineage.collect(policy)
        lineage.check()
        stride = max(policy.stride or 1, every)
        assert len(lineage.whole) <= policy.chunks + stride + every + burst
        assert len(lineage.snapshots) <= policy.snapshots + 2 + (policy.chunks + stride + every) // stride
