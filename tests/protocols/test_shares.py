import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.shares import Shares

steps = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.sampled_from("abc"), st.integers(0, 12), st.integers(0, 9)),
        st.tuples(st.just("remove"), st.just(""), st.integers(0, 12), st.just(0)),
    ),
    max_size=60,
)


@pytest.mark.row("N9")
@given(steps, st.integers(1, 6), st.one_of(st.none(), st.integers(1, 20)))
def test_the_books_agree_with_a_plain_list(
    script: list[tuple[str, str, int, int]], max_entries: int, max_weight: int | None
) -> None:
    shares: Shares[int] = Shares(max_entries, max_weight)
    plain: dict[int, tuple[str, int]] = {}  # oldest first
    for what, owner, key, weight in script:
        if what == "remove":
            shares.remove(key)
            plain.pop(key, None)
            continue
        plain.pop(key, None)
        plain[key] = (owner, weight)
        for gone in shares.add(owner, key, weight):
            lost, _ = plain.pop(gone)
            assert gone not in shares
            mine = sum(o == lost for o, _ in plain.values()) + 1
            assert max_weight is not None or all(
                sum(o == other for o, _ in plain.values()) <= mine for other in "abc"
            ), "it went to the one who had most"
        assert len(plain) <= max_entries
        assert max_weight is None or sum(w for _, w in plain.values()) <= max_weight
        assert len(shares) == len(plain)
        assert shares.weight == sum(w for _, w in plain.values())
        for each in "abc":
            assert shares.count(each) == sum(o == each for o, _ in plain.values())
        assert all(shares.owner(k) == o for k, (o, _) in plain.items())


def test_a_flood_pushes_out_its_own() -> None:
    shares: Shares[str] = Shares(10)
    for nth in range(3):
        assert shares.add("good", f"good {nth}") == []
    gone = [key for nth in range(100) for key in shares.add("flood", f"flood {nth}")]
    assert gone == [f"flood {nth}" for nth in range(93)], "the oldest first"
    assert shares.count("good") == 3


def test_an_entry_that_outweighs_the_table_is_not_kept() -> None:
    shares: Shares[str] = Shares(10, 100)
    shares.add("good", "small", 5)
    assert shares.add("bad", "huge", 101) == ["huge"]
    assert "small" in shares
    assert "huge" not in shares


def test_the_heaviest_owner_makes_place_not_the_most_numerous() -> None:
    shares: Shares[int] = Shares(100, 100)
    for nth in range(20):
        shares.add("many", nth, 1)
    assert shares.add("heavy", 100, 60) == []
    assert shares.add("heavy", 101, 60) == [100]
    assert shares.count("many") == 20


def test_an_entry_added_again_is_the_newest() -> None:
    shares: Shares[int] = Shares(2)
    shares.add("a", 1)
    shares.add("a", 2)
    assert shares.add("a", 1) == []
    assert shares.add("a", 3) == [2]
