from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.blocks import Blocks, Ints
from protocols.errors import MismatchError
from protocols.layout import pair_layouts
from protocols.leases import KINDS
from protocols.planning import check_total, plan_chunk, units_at
from tests.support.layouts import PAGE_SIZE, PAGES, buffer, make_layout, mha_buffers

SOURCE = make_layout(buffers=mha_buffers(item_len=64))
TARGET = make_layout(buffers=tuple(reversed(mha_buffers(item_len=64))))
PAIRS = [pair for pair in pair_layouts(SOURCE, TARGET) if pair.src.unit == "page"]


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def moved(blocks: Blocks) -> Counter[tuple[int, int]]:
    return Counter(
        (src + nth, dst + nth)
        for src, dst, length in zip(blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist(), strict=True)
        for nth in range(length)
    )


@pytest.mark.row("A2")
@pytest.mark.row("A3")
@given(
    first=st.integers(0, 10),
    pages=st.lists(st.integers(0, PAGES - 1), unique=True, max_size=8),
    gaps=st.lists(st.integers(1, 3), min_size=8, max_size=8),
    prefix=st.integers(0, 14),
    destination=st.permutations(range(PAGES)),
    limit=st.integers(1, 300),
)
def test_a_plan_moves_the_bytes_of_a_loop_over_pages_and_buffers(
    first: int, pages: list[int], gaps: list[int], prefix: int, destination: list[int], limit: int
) -> None:
    """Positions with gaps are those of one context-parallel rank; the index into the offer is position - prefix."""
    positions = [first + sum(gaps[:nth]) for nth in range(len(pages))]
    plan = plan_chunk(ints(pages), ints(positions), prefix, ints(destination))
    expected: Counter[tuple[int, int]] = Counter()
    for page, position in zip(pages, positions, strict=True):
        if position < prefix:
            continue
        for pair in PAIRS:
            src = pair.src.address + page * pair.src.item_len
            dst = pair.dst.address + destination[position - prefix] * pair.dst.item_len
            expected.update((src + nth, dst + nth) for nth in range(pair.src.item_len))
    blocks = plan.blocks(PAIRS, limit)
    assert moved(blocks) == expected
    assert all(length <= limit for length in blocks.length.tolist())
    told = [start + nth for start, count in plan.positions for nth in range(count)]
    assert told == [position for position in positions if position >= prefix]


@pytest.mark.row("E4")
def test_a_chunk_without_pages_has_no_blocks() -> None:
    plan = plan_chunk(ints([]), ints([]), 3, ints([1, 2]))
    assert (len(plan.blocks(PAIRS, 64)), plan.positions) == (0, ())
    below = plan_chunk(ints([5, 6]), ints([0, 1]), 2, ints([]))
    assert (len(below.blocks(PAIRS, 64)), below.positions) == (0, ())


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    "pages, positions, prefix, destination, text",
    [
        ([1, 2], [0, 1], 0, [7], "more pages than the decode offered"),
        ([1, 2], [4, 5], 4, [7], "more pages than the decode offered"),
        ([1], [0], 0, [], "more pages than the decode offered"),
        ([1, 2], [0], 0, [7, 8], "one position a page"),
        ([1], [0, 1], 0, [7, 8], "one position a page"),
        ([1, 2], [1, 0], 0, [7, 8], "must ascend"),
        ([1, 2], [1, 1], 0, [7, 8], "must ascend"),
    ],
)
def test_nothing_is_truncated(
    pages: list[int], positions: list[int], prefix: int, destination: list[int], text: str
) -> None:
    with pytest.raises(MismatchError, match=text):
        plan_chunk(ints(pages), ints(positions), prefix, ints(destination))


@pytest.mark.row("E1")
def test_a_mismatch_shows_both_lists() -> None:
    with pytest.raises(MismatchError) as caught:
        plan_chunk(ints(list(range(10))), ints(list(range(10))), 0, ints([7, 8]))
    assert caught.value.data["source"] == "10[0, 1, 2, …, 8, 9]"
    assert caught.value.data["destination"] == "2[7, 8]"


@pytest.mark.row("E1")
@given(st.integers(1, 200), st.integers(0, 12), st.integers(0, 12), st.integers(1, 200))
def test_both_sides_must_mean_the_same_request(tokens: int, prefix_pages: int, offered: int, total: int) -> None:
    fits = total == tokens and -(-tokens // PAGE_SIZE) == prefix_pages + offered
    if fits:
        check_total(tokens, total, PAGE_SIZE, prefix_pages, ints(list(range(offered))))
    else:
        with pytest.raises(MismatchError, match="disagree") as caught:
            check_total(tokens, total, PAGE_SIZE, prefix_pages, ints(list(range(offered))))
        assert caught.value.data["prefill_tokens"] == tokens
        assert caught.value.data["decode_tokens"] == total


@pytest.mark.row("E1")
@pytest.mark.parametrize(
    "tokens, total, prefix_pages, offered, fits",
    [(33, 33, 0, 3, True), (33, 33, 1, 2, True), (32, 32, 2, 0, True), (33, 34, 0, 3, False), (33, 33, 0, 2, False)],
)
def test_totals(tokens: int, total: int, prefix_pages: int, offered: int, fits: bool) -> None:
    if fits:
        check_total(tokens, total, PAGE_SIZE, prefix_pages, ints(list(range(offered))))
    else:
        with pytest.raises(MismatchError):
            check_total(tokens, total, PAGE_SIZE, prefix_pages, ints(list(range(offered))))


LAYOUT = make_layout(
    buffers=(*mha_buffers(item_len=64), buffer(60, "state", 0, item_len=32, items=6), buffer(61, "scratch", 0, items=8))
)


@pytest.mark.row("C2")
@given(st.data())
def test_the_units_of_blocks_are_the_items_they_touch(data: st.DataObject) -> None:
    """In doubt is told in units: any item that a block touches, in whatever buffer."""
    blocks: list[tuple[int, int]] = []
    expected: dict[str, set[int]] = {kind: set() for kind in KINDS}
    for _ in range(data.draw(st.integers(0, 5))):
        into = data.draw(st.sampled_from(LAYOUT.buffers))
        start = data.draw(st.integers(0, into.nbytes - 1))
        length = data.draw(st.integers(1, min(into.nbytes - start, 3 * into.item_len)))
        blocks.append((into.address + start, length))
        if into.unit in expected:
            expected[into.unit] |= {at // into.item_len for at in range(start, start + length)}
    dst, length_ = ints([at for at, _ in blocks]), ints([length for _, length in blocks])
    found = units_at(LAYOUT, Blocks(dst * 0, dst, length_), range(len(blocks)))
    assert {kind: set(found.of(kind).tolist()) for kind in KINDS} == expected
    assert len(found) == sum(len(units) for units in expected.values()), "each once"


@pytest.mark.row("C2")
def test_only_the_chosen_blocks_count() -> None:
    k0 = LAYOUT.buffers[0]
    dst = ints([k0.address, k0.address + 64, k0.address + 640])
    found = units_at(LAYOUT, Blocks(dst, dst, ints([64, 64, 64])), [2])
    assert found.pages.tolist() == [10]
    assert len(units_at(LAYOUT, Blocks(dst, dst, ints([64, 64, 64])), [])) == 0
