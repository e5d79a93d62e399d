from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pages.ranges import ChunkCursor, Range, chunk_ranges
from protocols.errors import LayoutError


def spans(ranges: Sequence[Range]) -> list[tuple[int, int]]:
    return [(each.start_token, each.end_token) for each in ranges]


@st.composite
def plans(draw: st.DrawFn) -> tuple[int, list[int], int, int]:
    """(prompt, chunk sizes also smaller than a page, page size, prefix of any alignment)."""
    page_size = draw(st.sampled_from([1, 2, 3, 16, 64]))
    prefix = draw(st.integers(0, 5 * page_size))
    sizes = draw(st.lists(st.integers(1, 3 * page_size), min_size=1, max_size=12))
    return prefix + sum(sizes), sizes, page_size, prefix


@pytest.mark.row("A1")
@given(plans())
def test_ranges_tile_the_prompt_once(plan: tuple[int, list[int], int, int]) -> None:
    prompt, sizes, page_size, prefix = plan
    ranges = chunk_ranges(prompt, sizes, page_size, prefix)
    tokens = [token for start, end in spans(ranges) for token in range(start, end)]
    assert tokens == list(range(prompt))
    assert [each.last for each in ranges] == [False] * (len(ranges) - 1) + [True]
    assert len({each.start_token for each in ranges}) == len(ranges), "the start names the chunk"


@pytest.mark.row("A1")
@given(plans())
def test_a_range_holds_what_its_forward_made_final_and_nothing_more(plan: tuple[int, list[int], int, int]) -> None:
    prompt, sizes, page_size, prefix = plan
    cursor = ChunkCursor(page_size, prefix)
    computed = prefix
    sent = 0
    for nth, size in enumerate(sizes, start=1):
        computed += size
        made = cursor.advance(computed, nth == len(sizes))
        final = computed if nth == len(sizes) else computed // page_size * page_size
        if made is None:
            assert final == sent
            continue
        assert (made.start_token, made.end_token) == (sent, final)
        assert made.start_token % page_size == 0
        sent = final
    assert sent == prompt


@pytest.mark.row("A1")
@given(plans())
def test_positions_tile_the_pages_of_the_prompt(plan: tuple[int, list[int], int, int]) -> None:
    prompt, sizes, page_size, prefix = plan
    positions: list[int] = []
    for each in chunk_ranges(prompt, sizes, page_size, prefix):
        first, count = each.positions(page_size)
        positions += range(first, first + count)
    assert positions == list(range(-(-prompt // page_size)))


@given(prompt=st.integers(1, 300), size=st.integers(1, 400), page_size=st.integers(1, 64), data=st.data())
def test_one_size_is_the_list_of_it(prompt: int, size: int, page_size: int, data: st.DataObject) -> None:
    prefix = data.draw(st.integers(0, prompt - 1))
    new = prompt - prefix
    sizes = [size] * (new // size) + ([new % size] if new % size else [])
    assert chunk_ranges(prompt, size, page_size, prefix) == chunk_ranges(prompt, sizes, page_size, prefix)


@pytest.mark.row("A1")
@pytest.mark.parametrize(
    "prompt, chunks, page_size, prefix, expected",
    [
        pytest.param(100, 100, 16, 0, [(0, 100)], id="one full range when not chunked"),
        pytest.param(100, [40, 40, 20], 16, 0, [(0, 32), (32, 80), (80, 100)], id="floored to pages"),
        pytest.param(100, [36, 32], 16, 32, [(0, 64), (64, 100)], id="the first includes the cached prefix"),
        pytest.param(100, [40], 16, 60, [(0, 100)], id="a prefix that ends within a page"),
        pytest.param(40, [10, 10, 10, 10], 16, 0, [(0, 16), (16, 40)], id="chunks smaller than a page ride along"),
        pytest.param(12, [4, 4, 4], 16, 0, [(0, 12)], id="less than a page in three chunks"),
        pytest.param(64, [32, 32], 16, 0, [(0, 32), (32, 64)], id="exact pages"),
        pytest.param(5, 2, 1, 0, [(0, 2), (2, 4), (4, 5)], id="pages of one token"),
        pytest.param(64, 8, 16, 64, [(0, 64)], id="a prompt cached whole"),
        pytest.param(64, [], 16, 64, [(0, 64)], id="a prompt cached whole, no sizes"),
    ],
)
def test_ranges(prompt: int, chunks: int | list[int], page_size: int, prefix: int, expected: object) -> None:
    assert spans(chunk_ranges(prompt, chunks, page_size, prefix)) == expected


@pytest.mark.row("A1")
def test_a_chunk_that_completes_no_page_registers_nothing() -> None:
    cursor = ChunkCursor(16)
    assert cursor.advance(10, last=False) is None
    assert cursor.advance(15, last=False) is None
    assert cursor.advance(20, last=False) == Range(0, 16, last=False)
    assert cursor.advance(31, last=False) is None
    assert cursor.advance(31, last=True) == Range(16, 31, last=True)


@pytest.mark.row("E4")
def test_the_last_chunk_gets_a_range_also_without_new_pages() -> None:
    cursor = ChunkCursor(16)
    assert cursor.advance(32, last=False) == Range(0, 32, last=False)
    made = cursor.advance(32, last=True)
    assert made == Range(32, 32, last=True)
    assert made.tokens == 0
    assert made.positions(16) == (2, 0)


def test_the_first_chunk_may_be_nothing_but_the_prefix() -> None:
    assert ChunkCursor(16, 40).advance(40, last=False) == Range(0, 32, last=False)


def test_positions_of_a_started_page() -> None:
    assert Range(32, 33, last=True).positions(16) == (2, 1)
    assert Range(0, 64, last=False).positions(16) == (0, 4)


def test_a_refused_chunk_changes_nothing() -> None:
    cursor = ChunkCursor(4, 8)
    with pytest.raises(LayoutError, match="backwards"):
        cursor.advance(7, last=True)
    assert cursor.advance(9, last=False) == Range(0, 8, last=False)
    with pytest.raises(LayoutError, match="backwards"):
        cursor.advance(8, last=True)
    assert cursor.advance(10, last=True) == Range(8, 10, last=True)
    with pytest.raises(LayoutError, match="after the last"):
        cursor.advance(12, last=False)


@pytest.mark.parametrize(
    "arguments, text",
    [
        ((0, 4, 4, 0), "must have tokens"),
        ((8, 0, 4, 0), "chunk must have tokens"),
        ((8, [8, 0], 4, 0), "chunk must have tokens"),
        ((8, [4], 4, 0), "do not add up"),
        ((8, [8], 4, 4), "do not add up"),
        ((8, [], 4, 0), "do not add up"),
        ((8, 4, 4, 9), "longer than the prompt"),
        ((8, 4, 4, -1), "negative"),
        ((8, 4, 0, 0), "at least one token"),
    ],
)
def test_contradictions_are_refused(arguments: tuple[int, int | list[int], int, int], text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        chunk_ranges(*arguments)
