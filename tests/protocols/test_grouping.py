"""Group sizes: they sum to the forward, taper towards its end, and are large where nothing is gained by small ones."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.grouping import adaptive_groups, closing_layers, fixed_groups, group_overhead

SECONDS = st.one_of(st.none(), st.floats(1e-6, 1.0))


@pytest.mark.row("A5")
@given(layers=st.integers(0, 200), size=st.integers(1, 16))
def test_fixed_groups_are_as_few_as_possible(layers: int, size: int) -> None:
    sizes = fixed_groups(layers, size)
    assert sum(sizes) == layers
    assert len(sizes) == -(-layers // size)


@pytest.mark.row("N6")
@given(layers=st.integers(0, 200), largest=st.integers(1, 16), compute=SECONDS, transfer=SECONDS)
def test_adaptive_groups_tile_the_forward(
    layers: int, largest: int, compute: float | None, transfer: float | None
) -> None:
    sizes = adaptive_groups(layers, largest, compute, transfer)
    assert sum(sizes) == layers
    assert all(1 <= size <= largest for size in sizes)


@pytest.mark.row("N6")
@given(compute=st.floats(1e-3, 1.0), share=st.floats(0.01, 0.95))
def test_a_fast_link_exposes_one_layer_and_every_other_group_is_hidden(compute: float, share: float) -> None:
    sizes = adaptive_groups(64, 8, compute, compute * share, overhead_s=0.0)
    assert sizes[-1] == 1
    # All but the first, which takes the remainder: each is sent while the layers of the next are computed.
    for size, behind in itertools.pairwise(sizes[1:]):
        assert size == behind or size * share <= behind + 1e-9


@pytest.mark.row("N6")
def test_a_slow_link_is_busy_from_the_first_layer_on() -> None:
    """A first group of eight layers kept it idle for as long as they took to compute."""
    assert adaptive_groups(30, 8, 0.01, 0.02) == (1,) * 30


@pytest.mark.row("N6")
def test_where_handing_over_takes_longer_than_computing_groups_are_large() -> None:
    """Ten chunks, 0.85 ms a layer: 32 groups of one layer kept the loop busy for longer than the forward took."""
    assert adaptive_groups(32, 8, 0.00085, 0.0005, overhead_s=0.0013) == (2, 4, 4, 4, 4, 4, 4, 4, 2)
    assert adaptive_groups(32, 8, 0.00085, 0.0005, overhead_s=0.0103) == (8, 8, 8, 8)


@pytest.mark.row("N6")
def test_a_short_forward_pays_for_few_groups() -> None:
    """With 0.1 ms a layer a group's own cost is three layers: smaller ones would not be hidden."""
    sizes = adaptive_groups(30, 8, 0.0001, 0.00002)
    assert (sizes[-1], sizes[-2], len(sizes)) == (3, 6, 5)


@pytest.mark.row("N6")
def test_a_group_costs_more_with_every_chunk_and_with_dear_submissions() -> None:
    assert group_overhead(1, 0.0) == pytest.approx(0.0004)
    assert group_overhead(10, 0.00003) == pytest.approx(0.0013)
    assert group_overhead(1, 0.005) == pytest.approx(0.0103), "two waits for the GIL"


def test_the_tail_tapers_before_anything_was_measured() -> None:
    assert adaptive_groups(30, 8, None, None) == (6, 8, 8, 4, 2, 1, 1)
    assert adaptive_groups(3, 8, None, None) == (1, 1, 1)


@given(layers=st.integers(1, 64), size=st.integers(1, 9))
def test_the_last_hooked_layer_closes_the_last_group(layers: int, size: int) -> None:
    hooked = tuple(range(10, 10 + 2 * layers, 2))
    closing = closing_layers(hooked, fixed_groups(layers, size))
    assert hooked[-1] in closing
    assert len(closing) == -(-layers // size)
