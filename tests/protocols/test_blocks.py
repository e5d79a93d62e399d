from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.blocks import (
    MARKS,
    Blocks,
    Ints,
    check_units,
    layer_blocks,
    merge_runs,
    page_array,
    position_runs,
    split,
    summary,
)
from protocols.errors import LayoutError, MismatchError

SRC_BASE, DST_BASE = 1 << 32, 1 << 40


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


@st.composite
def page_pairs(draw: st.DrawFn) -> tuple[Ints, Ints]:
    """Equally long page lists, each without repetition, of any fragmentation: runs on one side, both or none."""
    count = draw(st.integers(0, 40))

    def side() -> Ints:
        pages: list[int] = []
        pool = list(range(draw(st.integers(count, 3 * count + 8))))
        while len(pages) < count:
            at = draw(st.integers(0, len(pool) - 1))
            length = draw(st.integers(1, count - len(pages)))
            pages += pool[at : at + length]
            del pool[at : at + length]
        return ints(pages)

    return side(), side()


def per_page(src: Ints, dst: Ints, item_len: int) -> list[tuple[int, int]]:
    """What is to be moved, byte by byte, by the loop nobody would ship."""
    moved: list[tuple[int, int]] = []
    for src_page, dst_page in zip(src.tolist(), dst.tolist(), strict=True):
        for nth in range(item_len):
            moved.append((SRC_BASE + src_page * item_len + nth, DST_BASE + dst_page * item_len + nth))  # noqa: PERF401
    return moved


def bytes_of(blocks: Blocks) -> list[tuple[int, int]]:
    return [
        (src + nth, dst + nth)
        for src, dst, length in zip(blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist(), strict=True)
        for nth in range(length)
    ]


@pytest.mark.row("A2")
@given(page_pairs(), st.integers(1, 9))
def test_blocks_move_the_bytes_of_a_page_loop(pages: tuple[Ints, Ints], item_len: int) -> None:
    blocks = layer_blocks(merge_runs(*pages), SRC_BASE, DST_BASE, item_len)
    assert bytes_of(blocks) == per_page(*pages, item_len)
    assert blocks.nbytes == len(pages[0]) * item_len


@pytest.mark.row("A2")
@given(page_pairs(), st.integers(1, 9), st.integers(1, 40))
def test_split_moves_the_same_bytes_in_pieces_no_larger_than_the_limit(
    pages: tuple[Ints, Ints], item_len: int, limit: int
) -> None:
    blocks = layer_blocks(merge_runs(*pages), SRC_BASE, DST_BASE, item_len)
    pieces = split(blocks, limit)
    assert bytes_of(pieces) == bytes_of(blocks)
    assert all(1 <= length <= limit for length in pieces.length.tolist())
    assert len(pieces) == sum(-(-length // limit) for length in blocks.length.tolist()), "no more than needed"


@pytest.mark.row("A2")
@given(page_pairs())
def test_runs_are_as_long_as_both_sides_allow(pages: tuple[Ints, Ints]) -> None:
    src, dst = (each.tolist() for each in pages)
    runs = merge_runs(*pages)
    expected: list[list[int]] = []
    for src_page, dst_page in zip(src, dst, strict=True):
        if expected and expected[-1][0] + expected[-1][2] == src_page and expected[-1][1] + expected[-1][2] == dst_page:
            expected[-1][2] += 1
        else:
            expected.append([src_page, dst_page, 1])
    assert list(zip(runs.src.tolist(), runs.dst.tolist(), runs.count.tolist(), strict=True)) == [
        tuple(run) for run in expected
    ]
    assert runs.pages == len(src)


@pytest.mark.row("A2")
@pytest.mark.parametrize(
    "src, dst, expected",
    [
        ([], [], []),
        ([5], [9], [(5, 9, 1)]),
        ([5, 6, 7], [1, 2, 3], [(5, 1, 3)]),
        ([5, 6, 7], [1, 2, 9], [(5, 1, 2), (7, 9, 1)]),
        ([5, 6, 9], [1, 2, 3], [(5, 1, 2), (9, 3, 1)]),
        ([7, 6, 5], [3, 2, 1], [(7, 3, 1), (6, 2, 1), (5, 1, 1)]),
        ([0, 1, 1, 2], [4, 5, 6, 7], [(0, 4, 2), (1, 6, 2)]),
    ],
)
def test_runs(src: list[int], dst: list[int], expected: list[tuple[int, int, int]]) -> None:
    runs = merge_runs(ints(src), ints(dst))
    assert list(zip(runs.src.tolist(), runs.dst.tolist(), runs.count.tolist(), strict=True)) == expected
    assert len(runs) == len(expected)


@pytest.mark.row("E1")
@pytest.mark.parametrize("longer", ["source", "destination"])
def test_unequal_lists_are_refused_with_a_summary_of_both(longer: str) -> None:
    long, short = ints(list(range(100, 200))), ints([1, 2, 3])
    with pytest.raises(MismatchError) as caught:
        merge_runs(*((long, short) if longer == "source" else (short, long)))
    sides = {"source": "100[100, 101, 102, …, 198, 199]", "destination": "3[1, 2, 3]"}
    if longer == "destination":
        sides = {"source": sides["destination"], "destination": sides["source"]}
    assert dict(caught.value.data) == sides
    assert all(text in str(caught.value) for text in sides.values())
    assert len(str(caught.value)) < 160


@pytest.mark.row("E1")
@given(st.lists(st.integers(0, 2**31 - 1), max_size=200))
def test_a_summary_is_short_and_starts_with_the_count(pages: list[int]) -> None:
    text = summary(ints(pages))
    assert text.startswith(f"{len(pages)}[")
    assert text.endswith("]")
    assert len(text) < 90
    for shown in (*pages[:3], *pages[-2:]):
        assert str(shown) in text


@given(st.sets(st.integers(0, 80)))
def test_position_runs_are_the_positions(them: set[int]) -> None:
    runs = position_runs(ints(sorted(them)))
    assert [first + nth for first, count in runs for nth in range(count)] == sorted(them)
    assert len(runs) == sum(1 for position in them if position - 1 not in them)


def test_split_leaves_what_fits_alone() -> None:
    blocks = Blocks(ints([0, 100]), ints([50, 200]), ints([8, 4]))
    assert split(blocks, 8) is blocks
    assert len(split(Blocks.empty(), 1)) == 0
    with pytest.raises(LayoutError):
        split(blocks, 0)


def test_split_large_numbers() -> None:
    blocks = Blocks(ints([2**62]), ints([2**62 + 5]), ints([2**40 + 1]))
    pieces = split(blocks, 2**40)
    assert pieces.src.tolist() == [2**62, 2**62 + 2**40]
    assert pieces.dst.tolist() == [2**62 + 5, 2**62 + 2**40 + 5]
    assert pieces.length.tolist() == [2**40, 1]


def test_blocks_slice_and_join() -> None:
    blocks = Blocks(ints([1, 2, 3]), ints([4, 5, 6]), ints([7, 8, 9]))
    assert (len(blocks), blocks.nbytes, len(Blocks.empty()), Blocks.empty().nbytes) == (3, 24, 0, 0)
    assert Counter(bytes_of(Blocks.join([blocks[:1], Blocks.empty(), blocks[1:]]))) == Counter(bytes_of(blocks))
    assert Blocks.join([blocks]) is blocks
    assert len(Blocks.join([])) == 0


class Tensor:
    """Anything with ``__array__``, as a CPU tensor has."""

    def __init__(self, values: list[int]) -> None:
        self._values = values

    def __array__(self, dtype: object = None, copy: object = None) -> Ints:
        return ints(self._values)


@pytest.mark.row("A10")
@pytest.mark.parametrize(
    "pages, expected",
    [
        (None, []),
        ([], []),
        ((), []),
        (np.empty((0, 4)), []),
        ([3, 1, 2], [3, 1, 2]),
        ((3, 1), [3, 1]),
        (range(3), [0, 1, 2]),
        (np.array([3, 1], np.int32), [3, 1]),
        (np.array([3, 1], np.uint8), [3, 1]),
        (np.array([3, 2**63 - 1], np.uint64), [3, 2**63 - 1]),
        (Tensor([4, 5]), [4, 5]),
    ],
)
def test_page_lists_may_be_anything_of_integers(pages: object, expected: list[int]) -> None:
    array = page_array(pages)
    assert array.tolist() == expected
    assert array.dtype == np.int64
    assert array.ndim == 1


@pytest.mark.row("A10")
@pytest.mark.parametrize(
    "pages, text",
    [
        (7, "one-dimensional"),
        ([[1, 2], [3, 4]], "one-dimensional"),
        ([[1], [2, 3]], "chunk pages"),
        ([1.0, 2.0], "integers"),
        ([True, False], "integers"),
        (["1", "2"], "integers"),
        ([1, None], "integers"),
        ([2**70], "integers"),
        ("12", "one-dimensional"),
        ({1: 2}, "one-dimensional"),
        ([1, -1], "negative"),
        (np.array([2**63], np.uint64), "63 bits"),
    ],
)
def test_what_is_no_page_list_is_refused(pages: object, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        page_array(pages, "chunk pages")


@pytest.mark.row("A10")
def test_what_an_array_type_will_not_give_up_is_refused() -> None:
    class OnTheDevice:
        def __array__(self, dtype: object = None, copy: object = None) -> Ints:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    with pytest.raises(LayoutError, match="chunk pages"):
        page_array(OnTheDevice(), "chunk pages")


def test_a_page_array_is_a_copy() -> None:
    mine = ints([1, 2])
    theirs = page_array(mine)
    mine[:] = 0
    assert theirs.tolist() == [1, 2]


@pytest.mark.row("E5")
@given(st.lists(st.integers(-2, 12), max_size=10), st.integers(0, 12))
def test_units_must_lie_in_the_region_and_be_named_once(indices: list[int], limit: int) -> None:
    good = len(set(indices)) == len(indices) and all(0 <= each < limit for each in indices)
    if good:
        check_units(ints(indices), limit, "pages")
    else:
        with pytest.raises(MismatchError, match="pages"):
            check_units(ints(indices), limit, "pages")


@pytest.mark.row("E5")
@given(st.lists(st.integers(0, 8), max_size=8), st.integers(0, 2**40))
def test_units_far_apart_are_told_from_repeated_ones(indices: list[int], stride: int) -> None:
    far = ints([each * (MARKS + stride) for each in indices])
    if len(set(indices)) == len(indices):
        check_units(far, 2**60, "pages")
    else:
        with pytest.raises(MismatchError, match="duplicate pages"):
            check_units(far, 2**60, "pages")


@pytest.mark.row("E5")
def test_bad_units_are_named() -> None:
    with pytest.raises(MismatchError, match="outside") as caught:
        check_units(ints([0, 8]), 8, "aux slots")
    assert (caught.value.data["highest"], caught.value.data["limit"]) == (8, 8)
    with pytest.raises(MismatchError, match="duplicate aux slots") as caught:
        check_units(ints([3, 1, 3, 2, 2]), 8, "aux slots")
    assert caught.value.data["repeated"] == [2, 3]
