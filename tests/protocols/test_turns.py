"""Whose turn it is: bytes decide among those in turn, small newcomers go first, and nobody waits for ever."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.turns import Turns


def play(turns: Turns[str], steps: int, nbytes: int = 10) -> list[str]:
    """Whoever is first goes, again and again."""
    went = []
    for _ in range(steps):
        key = turns.candidates()[0]
        turns.went(key, nbytes)
        went.append(key)
    return went


def test_rooms_in_turn_have_a_quantum_each() -> None:
    turns: Turns[str] = Turns(30)
    for key in "abc":
        turns.add(key, fresh=False)
    assert "".join(play(turns, 12)) == "aaabbbcccaaa"
    assert turns.left("b") == 30
    turns.went("b", 10)
    assert turns.left("b") == 20


def test_a_block_larger_than_the_quantum_is_a_turn() -> None:
    turns: Turns[str] = Turns(30)
    turns.add("a", fresh=False)
    turns.add("b", fresh=False)
    assert "".join(play(turns, 4, nbytes=100)) == "abab"


def test_fresh_rooms_go_first_and_are_in_turn_afterwards() -> None:
    turns: Turns[str] = Turns(30)
    turns.add("large", fresh=False)
    turns.add("small", fresh=True)
    assert turns.is_fresh("small")
    assert turns.candidates() == ["small"]
    turns.went("small", 30)
    assert not turns.is_fresh("small")
    assert turns.candidates() == ["large"]


def test_however_many_fresh_rooms_come_the_others_have_every_second_turn() -> None:
    turns: Turns[str] = Turns(10)
    turns.add("large", fresh=False)
    went = []
    for number in range(10):
        turns.add(f"small {number}", fresh=True)
        key = turns.candidates()[0]
        turns.went(key, 10)
        went.append(key)
        if key != "large":
            turns.remove(key)
    assert went[1::2] == ["large"] * 5


def test_where_there_is_no_place_for_who_is_in_turn_a_fresh_one_may_go() -> None:
    turns: Turns[str] = Turns(10)
    turns.add("large", fresh=False)
    turns.add("first", fresh=True)
    turns.add("second", fresh=True)
    turns.went("first", 10)
    turns.remove("first")
    assert turns.candidates() == ["large", "second"]


def test_nobody_waits_where_nobody_is() -> None:
    turns: Turns[str] = Turns(0)
    assert turns.candidates() == []
    turns.add("a", fresh=True)
    turns.remove("a")
    assert (turns.candidates(), len(turns)) == ([], 0)


@pytest.mark.row("B3")
@given(st.lists(st.tuples(st.integers(0, 5), st.booleans(), st.integers(1, 50)), max_size=60), st.integers(1, 40))
def test_who_waits_goes_within_one_round(steps: list[tuple[int, bool, int]], quantum: int) -> None:
    """Rooms come and go as they like: from any state every room has its turn before any other has a fourth."""
    turns: Turns[int] = Turns(quantum)
    here: set[int] = set()
    for key, fresh, nbytes in steps:
        if key not in here:
            turns.add(key, fresh=fresh)
            here.add(key)
        elif fresh:
            turns.remove(key)
            here.discard(key)
        else:
            turns.went(key, nbytes)
    assert len(turns) == len(here)
    went: Counter[int] = Counter()
    while set(went) != here:
        key = turns.candidates()[0]
        turns.went(key, quantum)
        went[key] += 1
        assert went[key] <= 3
