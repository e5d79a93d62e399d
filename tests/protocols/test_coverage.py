from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.coverage import Expected, Ledger, Runs, merged
from protocols.errors import MismatchError
from protocols.messages import Coverage

ITEM = 64

run_lists = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 6)), max_size=12)


def positions(runs: Runs) -> Counter[int]:
    return Counter(first + nth for first, count in runs for nth in range(count))


def report(buffer: int, *runs: tuple[int, int], offset: int = 0, length: int = ITEM) -> Coverage:
    return Coverage((buffer,), offset, length, runs)


def expect(*reports: Coverage, first: int = 0, count: int = 8) -> None:
    expected = Expected({1: (ITEM, first, count)})
    expected.add(reports)
    expected.check()


@given(run_lists)
def test_merged_keeps_every_position_as_often_as_it_came(runs: list[tuple[int, int]]) -> None:
    result = merged(runs)
    assert positions(result) == positions(tuple(runs))
    assert list(result) == sorted(result)
    assert len(result) <= len(runs)


@given(st.sets(st.integers(0, 60)))
def test_merged_single_positions_are_the_fewest_runs(them: set[int]) -> None:
    result = merged((position, 1) for position in them)
    assert len(result) == sum(1 for position in them if position - 1 not in them)
    assert positions(result) == Counter(them)


def test_merged_keeps_overlaps_apart() -> None:
    assert merged([(0, 4), (0, 4)]) == ((0, 4), (0, 4))
    assert merged([(2, 2), (0, 4)]) == ((0, 4), (2, 2))
    assert merged([(4, 2), (0, 4)]) == ((0, 6),)


@pytest.mark.row("N5")
@given(
    reports=st.lists(run_lists, min_size=1, max_size=4),
    first=st.integers(0, 10),
    count=st.integers(1, 20),
    fair=st.booleans(),
    data=st.data(),
)
def test_the_check_passes_for_exact_coverage_and_nothing_else(
    reports: list[list[tuple[int, int]]], first: int, count: int, fair: bool, data: st.DataObject
) -> None:
    if fair:  # cut the wanted positions up and deal them out; then perhaps spoil one run
        cuts = sorted(data.draw(st.sets(st.integers(first + 1, first + count), max_size=6)) - {first + count})
        bounds = [first, *cuts, first + count]
        runs = [(low, high - low) for low, high in pairwise(bounds)]
        dealt = [data.draw(st.integers(0, len(reports) - 1)) for _ in runs]
        reports = [[run for run, to in zip(runs, dealt, strict=True) if to == nth] for nth in range(len(reports))]
        if data.draw(st.booleans()):
            at = data.draw(st.integers(0, len(reports) - 1))
            reports[at] = [*reports[at], *data.draw(run_lists)]
    expected = Expected({1: (ITEM, first, count)})
    for each in reports:
        ledger = Ledger()
        ledger.landed([1], {1: ITEM}, tuple(each))
        expected.add(ledger.coverage())
    total = sum((positions(tuple(each)) for each in reports), Counter[int]())
    if total == Counter(range(first, first + count)):
        expected.check()
    else:
        with pytest.raises(MismatchError, match=r"gap|overlap|excess"):
            expected.check()


@pytest.mark.row("N5")
@pytest.mark.parametrize(
    "runs, what, at",
    [
        ([], "gap", 0),
        ([(0, 7)], "gap", 7),
        ([(1, 7)], "gap", 0),
        ([(0, 3), (4, 4)], "gap", 3),
        ([(0, 8), (0, 8)], "overlap", 0),
        ([(0, 5), (4, 4)], "overlap", 4),
        ([(0, 9)], "excess", 8),
        ([(0, 8), (8, 1)], "excess", 8),
    ],
)
def test_what_is_wrong_is_named_with_its_place(runs: list[tuple[int, int]], what: str, at: int) -> None:
    with pytest.raises(MismatchError, match=what) as caught:
        expect(report(1, *runs))
    assert caught.value.data["buffer"] == 1
    assert caught.value.data["at"] == at


@pytest.mark.row("A3")
@pytest.mark.row("N5")
def test_chunk_1_written_over_chunk_0_is_seen() -> None:
    """As many bytes as were wanted, on half of the pages: byte totals would pass."""
    ledger = Ledger()
    for _chunk in range(2):
        ledger.landed([1], {1: ITEM}, ((0, 4),))
    assert sum(count for entry in ledger.coverage() for _, count in entry.runs) == 8
    with pytest.raises(MismatchError, match="overlap"):
        expect(*ledger.coverage())


@pytest.mark.row("N5")
def test_a_position_below_the_first_wanted_is_no_coverage() -> None:
    with pytest.raises(MismatchError):
        expect(report(1, (2, 8)), first=3, count=7)


@pytest.mark.row("N5")
def test_ranks_cover_together_and_a_missing_rank_is_a_gap() -> None:
    shares = [report(1, (0, 2), (6, 2)), report(1, (2, 4))]
    expect(*shares)
    with pytest.raises(MismatchError, match="gap"):
        expect(shares[0])
    with pytest.raises(MismatchError, match="overlap"):
        expect(*shares, shares[1])


@pytest.mark.row("N5")
def test_each_buffer_is_checked_by_itself() -> None:
    expected = Expected({1: (ITEM, 0, 4), 2: (ITEM, 0, 4), 3: (128, 2, 2)})
    expected.add([Coverage((1, 2), 0, ITEM, ((0, 4),)), report(3, (2, 2), length=128)])
    expected.check()
    alike = Expected({1: (ITEM, 0, 4), 2: (ITEM, 0, 4)})
    alike.add([report(1, (0, 4)), report(2, (0, 3))])
    with pytest.raises(MismatchError, match="gap"):
        alike.check()
    lacking = Expected({1: (ITEM, 0, 4), 2: (ITEM, 0, 4)})
    lacking.add([Coverage((1, 2), 0, ITEM, ((0, 3),)), report(1, (3, 1))])
    with pytest.raises(MismatchError, match="gap") as caught:
        lacking.check()
    assert caught.value.data["buffer"] == 2


@pytest.mark.row("N5")
@pytest.mark.parametrize(
    "entry, text",
    [
        (report(9, (0, 1)), "expects nothing"),
        (report(2, (0, 1)), "expects nothing"),
        (report(1, (0, 8), length=ITEM // 2), "part of an item"),
        (report(1, (0, 8), offset=ITEM), "part of an item"),
    ],
)
def test_a_report_of_something_else_is_refused(entry: Coverage, text: str) -> None:
    with pytest.raises(MismatchError, match=text):
        Expected({1: (ITEM, 0, 8), 2: (ITEM, 0, 0)}).add([entry])


def test_the_ledger_groups_buffers_with_equal_runs() -> None:
    ledger = Ledger()
    lengths = {1: ITEM, 2: ITEM, 3: 128, 4: ITEM}
    ledger.landed([2, 1, 3], lengths, ((4, 2),))
    ledger.landed([1, 2, 3], lengths, ((0, 4),))
    ledger.landed([4], lengths, ((0, 1),))
    assert sorted(ledger.coverage(), key=lambda entry: entry.buffers) == [
        Coverage((1, 2), 0, ITEM, ((0, 6),)),
        Coverage((3,), 0, 128, ((0, 6),)),
        Coverage((4,), 0, ITEM, ((0, 1),)),
    ]


@pytest.mark.row("E4")
def test_nothing_landed_is_nothing_reported() -> None:
    """A rank that owns no page of a chunk, or a decode that has them all: no buffer may appear in the report."""
    ledger = Ledger()
    ledger.landed([1, 2], {1: ITEM, 2: ITEM}, ())
    assert ledger.coverage() == ()
    expected = Expected({1: (ITEM, 4, 0)})
    expected.add(ledger.coverage())
    expected.check()
