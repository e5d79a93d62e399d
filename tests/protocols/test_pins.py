from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.blocks import Ints
from protocols.ids import RoomKey
from protocols.pins import PinBook

PAGES = 6
ALL = np.arange(PAGES)


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


rooms = st.builds(RoomKey, st.integers(0, 3), st.just(0))
operations = st.one_of(
    st.tuples(rooms, st.sets(st.integers(0, PAGES - 1))),
    st.tuples(rooms, st.none()),
)


@pytest.mark.row("C5")
@given(st.lists(operations, max_size=30))
def test_a_page_is_pinned_as_long_as_a_room_may_read_it(script: list[tuple[RoomKey, set[int] | None]]) -> None:
    book = PinBook(PAGES)
    model: dict[RoomKey, Counter[int]] = {}
    for key, pages in script:
        if pages is None:
            book.unpin(key)
            model.pop(key, None)
        else:
            book.pin(key, ints(sorted(pages)))
            model.setdefault(key, Counter()).update(pages)
        pinned = {page for its in model.values() for page in its}
        assert set(np.flatnonzero(book.pinned(ALL)).tolist()) == pinned
        assert len(book) == len(pinned)
    for key in model:
        book.unpin(key)
    assert len(book) == 0


@pytest.mark.row("C5")
def test_a_shared_prefix_stays_pinned_for_the_other_room() -> None:
    book = PinBook(PAGES)
    book.pin(RoomKey(1, 0), ints([0, 1, 2]))
    book.pin(RoomKey(2, 0), ints([0, 3]))
    book.unpin(RoomKey(1, 0))
    assert book.pinned(ints([0, 1, 2, 3])).tolist() == [True, False, False, True]
    book.unpin(RoomKey(1, 0))
    assert book.pinned(ints([0])).tolist() == [True], "unpinning twice takes nothing from others"


@pytest.mark.row("C5")
def test_chunks_of_a_room_add_up() -> None:
    book = PinBook(PAGES)
    book.pin(RoomKey(1, 0), ints([0, 1]))
    book.pin(RoomKey(1, 0), ints([1, 2]))
    assert len(book) == 3
    book.unpin(RoomKey(1, 0))
    assert len(book) == 0


def test_nothing_to_pin() -> None:
    book = PinBook(0)
    book.pin(RoomKey(1, 0), ints([]))
    assert book.pinned(ints([])).tolist() == []
    book.unpin(RoomKey(9, 9))
    assert len(book) == 0
