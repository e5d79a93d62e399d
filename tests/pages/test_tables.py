import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pages.tables import mask_table
from protocols.errors import LayoutError


@pytest.mark.row("E6")
@given(
    head=st.lists(st.integers(0, 2**31 - 1), max_size=20),
    tail=st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20),
    page_size=st.integers(1, 64),
    kind=st.sampled_from([list, tuple, np.array, lambda row: np.array(row, np.int32)]),
    data=st.data(),
)
def test_the_stale_tail_is_masked(
    head: list[int], tail: list[int], page_size: int, kind: object, data: st.DataObject
) -> None:
    assert callable(kind)
    tokens = 0 if not head else data.draw(st.integers((len(head) - 1) * page_size + 1, len(head) * page_size))
    pages = mask_table(kind(head + tail), tokens, page_size)
    assert pages.tolist() == head
    assert pages.dtype == np.int64


@pytest.mark.row("E6")
def test_a_recycled_row_shows_nothing_of_its_former_request() -> None:
    row = np.full(8, -1, np.int32)
    row[:6] = [10, 11, 12, 13, 14, 15]
    assert mask_table(row, 6 * 16, 16).tolist() == [10, 11, 12, 13, 14, 15]
    row[:2] = [20, 10]
    assert mask_table(row, 17, 16).tolist() == [20, 10]


def test_the_result_is_a_copy() -> None:
    row = np.arange(4)
    pages = mask_table(row, 3, 1)
    row[:] = 9
    assert pages.tolist() == [0, 1, 2]


def test_no_tokens_need_no_row() -> None:
    assert mask_table(None, 0, 16).tolist() == []
    assert mask_table([], 0, 16).tolist() == []


@pytest.mark.parametrize(
    "row, tokens, page_size, text",
    [
        ([1, 2], 33, 16, "too short"),
        ([], 1, 16, "too short"),
        ([1, -1, 2], 33, 16, "negative"),
        ([1.0, 2.0], 17, 16, "integers"),
        (np.zeros((2, 4), np.int64), 4, 1, "one-dimensional"),
        (np.array(4), 1, 1, "one-dimensional"),
        (None, 1, 1, "one-dimensional"),
        ({0: 1}, 1, 1, "one-dimensional"),
        ([1], -1, 1, "page size"),
        ([1], 1, 0, "page size"),
    ],
)
def test_what_is_no_row_is_refused(row: object, tokens: int, page_size: int, text: str) -> None:
    with pytest.raises(LayoutError, match=text):
        mask_table(row, tokens, page_size)
