"""Page bookkeeping of a demo worker: recycling, kept prefixes, nothing lost."""

from __future__ import annotations

import pytest

from orchestrator.demo.pagebook import PageBook
from protocols.errors import ConfigError


def test_freed_pages_are_recycled_first() -> None:
    book = PageBook(32, seed=1)
    first = book.begin(0, 0, 8)
    book.end(0, first, 0)
    assert sorted(book.begin(1, 0, 8)) == sorted(first)


def test_pages_are_scattered_and_never_handed_out_twice() -> None:
    book = PageBook(32, seed=1)
    pages = book.begin(0, 0, 16) + book.begin(1, 0, 16)
    assert sorted(pages) == list(range(32))
    assert pages != sorted(pages)


@pytest.mark.row("E6")
def test_a_prefix_stays_where_it_is_and_the_rest_is_recycled() -> None:
    book = PageBook(16, seed=1)
    first = book.begin(0, 0, 10)
    book.end(0, first, 4)
    assert book.free == 12
    second = book.begin(0, 3, 10)
    assert second[:3] == first[:3]
    assert set(second[3:]) <= set(range(16)) - set(first[:3])
    book.end(0, second, 3)
    third = book.begin(0, 0, 16)
    assert sorted(third) == list(range(16)), "a prefix nobody asks for is freed by the next run of its prompt"


def test_what_cannot_be_had_is_refused_and_nothing_is_taken() -> None:
    book = PageBook(4, seed=1)
    with pytest.raises(ConfigError, match="too few free pages"):
        book.begin(0, 0, 5)
    with pytest.raises(ConfigError, match="prefix is not there"):
        book.begin(0, 1, 2)
    assert book.free == 4
