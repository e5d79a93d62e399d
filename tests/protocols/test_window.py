from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.blocks import Ints
from protocols.errors import LocalError
from protocols.window import CALM_TURNS, LONE_TURNS, PARTS, Width, Window, WindowStatistics


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def naive(window: Window, lengths: list[int], at_most: int) -> int:
    """One block after the other, as long as it fits."""
    statistics = window.statistics()
    blocks, nbytes = statistics.blocks, statistics.bytes
    count = 0
    for length in lengths[:at_most]:
        fits = nbytes + length <= window.max_bytes or blocks == 0
        if not fits or blocks + 1 > window.max_blocks:
            break
        count, blocks, nbytes = count + 1, blocks + 1, nbytes + length
    return count


@pytest.mark.row("B3")
@given(
    st.integers(1, 8),
    st.integers(1, 100),
    st.lists(st.lists(st.integers(1, 150), min_size=1, max_size=12), min_size=1, max_size=12),
    st.integers(1, 8),
    st.data(),
)
def test_blocks_and_bytes_in_flight_stay_within_the_window(
    max_blocks: int, max_bytes: int, batches: list[list[int]], at_most: int, data: st.DataObject
) -> None:
    window = Window(max_blocks, max_bytes)
    flying: deque[list[int]] = deque()
    peak_blocks = peak_bytes = 0
    for lengths in batches:
        count = window.fitting(ints(lengths), at_most)
        assert count == naive(window, lengths, at_most)
        if count:
            flying.append(lengths[:count])
            window.take(count, sum(lengths[:count]))
        in_flight = [length for batch in flying for length in batch]
        peak_blocks, peak_bytes = max(peak_blocks, len(in_flight)), max(peak_bytes, sum(in_flight))
        assert len(in_flight) <= max_blocks
        assert sum(in_flight) <= max_bytes or len(in_flight) == 1
        assert window.statistics() == WindowStatistics(len(in_flight), sum(in_flight), peak_blocks, peak_bytes)
        assert window.idle == (not in_flight)
        if data.draw(st.booleans()) and flying:
            done = flying.popleft()
            window.give_back(len(done), sum(done))
    while flying:
        done = flying.popleft()
        window.give_back(len(done), sum(done))
    assert window.idle
    assert window.statistics() == WindowStatistics(0, 0, peak_blocks, peak_bytes)


@pytest.mark.row("B3")
@given(st.integers(1, 8), st.integers(1, 100), st.lists(st.integers(1, 200), min_size=1), st.integers(1, 8))
def test_an_idle_window_lets_something_pass(max_blocks: int, max_bytes: int, lengths: list[int], at_most: int) -> None:
    assert Window(max_blocks, max_bytes).fitting(ints(lengths), at_most) >= 1


@pytest.mark.row("B3")
def test_a_block_larger_than_the_window_goes_alone() -> None:
    window = Window(8, 100)
    assert window.fitting(ints([150, 1]), 8) == 1
    window.take(1, 150)
    assert window.fitting(ints([1]), 8) == 0
    window.give_back(1, 150)
    window.take(1, 1)
    assert window.fitting(ints([150]), 8) == 0


@pytest.mark.row("B3")
@pytest.mark.parametrize(
    "lengths, at_most, fits",
    [([10] * 9, 99, 4), ([10] * 9, 3, 3), ([10] * 2, 99, 2), ([30, 30, 30], 99, 2), ([], 99, 0), ([10], 0, 0)],
)
def test_fitting(lengths: list[int], at_most: int, fits: int) -> None:
    assert Window(4, 60).fitting(ints(lengths), at_most) == fits


@pytest.mark.row("B3")
def test_a_full_window_takes_nothing() -> None:
    window = Window(2, 100)
    window.take(2, 20)
    assert window.fitting(ints([1]), 8) == 0
    window = Window(8, 100)
    window.take(1, 100)
    assert window.fitting(ints([1]), 8) == 0


@pytest.mark.parametrize("blocks, nbytes", [(3, 10), (1, 31), (3, 31)])
def test_more_back_than_was_taken_is_an_error_and_changes_nothing(blocks: int, nbytes: int) -> None:
    window = Window(8, 100)
    window.take(2, 30)
    with pytest.raises(LocalError, match="more permits"):
        window.give_back(blocks, nbytes)
    assert window.statistics() == WindowStatistics(2, 30, 2, 30)


# -- how wide, in how many batches --------------------------------------------------------------------------------


def test_usually_a_window_goes_in_quarters() -> None:
    width = Width(160, 160, 160)
    assert (width.blocks, width.batch, width.late) == (160, 40, False)
    assert Width(2, 2, 64).batch == 1
    assert Width(400, 400, 64).batch == 64, "never more than the engine takes"


def test_a_dry_window_widens_and_goes_in_fewer_batches_within_the_bound() -> None:
    width = Width(64, 160, 512)
    seen = []
    for _ in range(4):
        width.refill(dry=True, late=True)
        seen.append((width.blocks, width.batch))
    assert seen == [(128, 64), (160, 160), (160, 160), (160, 160)]
    assert width.late


def test_a_dry_window_of_a_loop_that_was_on_time_only_widens() -> None:
    width = Width(64, 160, 512)
    for _ in range(9):
        width.refill(dry=True, late=False)
    assert (width.blocks, width.parts, width.late) == (160, PARTS, False)


def test_when_calm_it_becomes_what_it_was() -> None:
    width = Width(64, 160, 512)
    for _ in range(2 + LONE_TURNS):
        width.refill(dry=True, late=True)
    assert (width.parts, width.blocks) == (2, 160), "one batch is dry whenever it lands: two are tried"
    for _ in range(2 * CALM_TURNS):
        width.refill(dry=False, late=True)
    assert (width.parts, width.blocks, width.late) == (PARTS, 64, False)


def test_the_try_with_two_batches_ends_where_the_loop_is_still_late() -> None:
    width = Width(160, 160, 512)
    for _ in range(2 + LONE_TURNS):
        width.refill(dry=True, late=True)
    assert width.parts == 2
    width.refill(dry=True, late=True)
    assert width.parts == 1


@given(st.integers(1, 300), st.integers(1, 600), st.integers(1, 600), st.lists(st.booleans(), max_size=600))
def test_the_bounds_hold_whatever_comes(base: int, most: int, batch: int, dry: list[bool]) -> None:
    width = Width(base, most, batch)
    for each in dry:
        width.refill(each, late=len(dry) % 2 == 0)
        assert base <= width.blocks <= max(base, most)
        assert 1 <= width.batch <= min(batch, width.blocks)
