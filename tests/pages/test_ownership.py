import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pages.ownership import owned, owned_pages
from protocols.errors import LayoutError
from protocols.layout import CpMode

MODES: list[CpMode] = ["contiguous", "zigzag"]

modes = st.sampled_from(MODES)
sizes = st.integers(1, 9)
firsts = st.integers(0, 10_000)
counts = st.integers(0, 60)  # often fewer pages than ranks


def naive(first: int, count: int, mode: str, rank: int, size: int) -> list[int]:
    """Deal the pages out one by one: to the segments in order, the first ones getting one more."""
    parts = 2 * size if mode == "zigzag" else size
    segments: list[list[int]] = []
    position = first
    for part in range(parts):
        length = count // parts + (1 if part < count % parts else 0)
        segments.append(list(range(position, position + length)))
        position += length
    return segments[rank] + (segments[parts - 1 - rank] if mode == "zigzag" else [])


@pytest.mark.row("F3")
@given(firsts, counts, modes, sizes)
def test_the_ranks_share_the_chunk_out_exactly(first: int, count: int, mode: CpMode, size: int) -> None:
    shares = [owned(first, count, mode, rank, size).tolist() for rank in range(size)]
    together = [position for share in shares for position in share]
    assert sorted(together) == list(range(first, first + count))
    assert len(set(together)) == len(together), "a page has one owner"


@pytest.mark.row("F3")
@given(firsts, counts, modes, sizes, st.data())
def test_a_share_equals_the_naive_one(first: int, count: int, mode: CpMode, size: int, data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, size - 1))
    share = owned(first, count, mode, rank, size)
    assert share.tolist() == naive(first, count, mode, rank, size)
    assert share.dtype == np.int64
    assert (np.diff(share) > 0).all()


@given(firsts, counts, modes, sizes)
def test_shares_are_balanced(first: int, count: int, mode: CpMode, size: int) -> None:
    lengths = [len(owned(first, count, mode, rank, size)) for rank in range(size)]
    assert max(lengths) - min(lengths) <= (2 if mode == "zigzag" else 1)


@pytest.mark.row("F3")
@given(firsts, modes, sizes, st.lists(st.integers(0, 500), unique=True, max_size=40))
def test_owned_pages_go_with_their_positions(first: int, mode: CpMode, size: int, pages: list[int]) -> None:
    at = dict(enumerate(pages, start=first))
    seen: list[tuple[int, int]] = []
    for rank in range(size):
        mine, positions = owned_pages(np.array(pages, np.int64), first, mode, rank, size)
        assert [at[position] for position in positions.tolist()] == mine.tolist()
        seen += zip(positions.tolist(), mine.tolist(), strict=True)
    assert sorted(seen) == sorted(at.items())


@pytest.mark.parametrize(
    "count, mode, size, shares",
    [
        (7, "contiguous", 3, [[10, 11, 12], [13, 14], [15, 16]]),
        (12, "zigzag", 3, [[10, 11, 20, 21], [12, 13, 18, 19], [14, 15, 16, 17]]),
        (8, "zigzag", 3, [[10, 11, 17], [12, 13, 16], [14, 15]]),
        (1, "zigzag", 2, [[10], []]),
        (2, "contiguous", 4, [[10], [11], [], []]),
        (3, "zigzag", 4, [[10], [11], [12], []]),
        (0, "zigzag", 2, [[], []]),
        (3, "none", 1, [[10, 11, 12]]),
        (3, "contiguous", 1, [[10, 11, 12]]),
        (3, "zigzag", 1, [[10, 11, 12]]),
    ],
)
@pytest.mark.row("F3")
def test_shares(count: int, mode: CpMode, size: int, shares: list[list[int]]) -> None:
    assert [owned(10, count, mode, rank, size).tolist() for rank in range(size)] == shares


@pytest.mark.parametrize(
    "first, count, mode, rank, size",
    [
        (0, 4, "none", 0, 2),
        (0, 4, "interleaved", 0, 2),
        (0, 4, "striped", 0, 2),
        (0, 4, "zigzag", 2, 2),
        (0, 4, "zigzag", -1, 2),
        (0, 4, "none", 0, 0),
        (-1, 4, "zigzag", 0, 2),
        (0, -1, "zigzag", 0, 2),
    ],
)
def test_what_gives_no_page_one_owner_is_refused(first: int, count: int, mode: CpMode, rank: int, size: int) -> None:
    with pytest.raises(LayoutError):
        owned(first, count, mode, rank, size)
