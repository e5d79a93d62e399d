import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.ids import RoomKey
from protocols.tombstones import Tombstones

KEEP = 600.0
ROOM, OTHER = RoomKey(7, 0), RoomKey(8, 0)


def test_a_verdict_is_remembered_for_its_time() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    assert stones.get(ROOM, 0.0) is None
    stones.add(ROOM, "ok", 0.0)
    assert stones.get(ROOM, 0.0) == "ok"
    assert stones.get(ROOM, KEEP - 0.1) == "ok"
    assert stones.get(ROOM, KEEP) is None, "also before anyone has swept"
    assert stones.get(RoomKey(7, 1), 0.0) is None, "another generation is another room"


def test_what_expired_is_told_once_and_in_order() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    stones.add(ROOM, "ok", 0.0)
    stones.add(OTHER, "failed", 1.0)
    assert stones.take_expired(KEEP - 0.1) == []
    assert stones.take_expired(KEEP + 1.0) == [ROOM, OTHER]
    assert stones.take_expired(KEEP + 1.0) == []
    assert len(stones) == 0


@pytest.mark.row("C2")
def test_doubt_outlives_its_time_until_it_is_settled() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    stones.add(ROOM, "in doubt", 0.0, in_doubt=True)
    assert stones.take_expired(10 * KEEP) == []
    assert stones.get(ROOM, 10 * KEEP) == "in doubt"
    stones.settle(ROOM, 10 * KEEP)
    assert stones.get(ROOM, 11 * KEEP - 0.1) == "in doubt"
    assert stones.take_expired(11 * KEEP) == [ROOM]
    assert len(stones) == 0


def test_settling_what_is_in_no_doubt_changes_nothing() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    stones.add(ROOM, "ok", 0.0)
    stones.settle(ROOM, KEEP / 2)
    stones.settle(OTHER, KEEP / 2)
    assert stones.take_expired(KEEP) == [ROOM]


def test_a_stone_laid_again_counts_from_then() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    stones.add(ROOM, "first", 0.0)
    stones.add(ROOM, "second", 100.0)
    assert stones.take_expired(KEEP) == []
    assert stones.get(ROOM, KEEP) == "second"
    assert stones.take_expired(KEEP + 100.0) == [ROOM]


rooms = st.builds(RoomKey, st.integers(0, 4), st.just(0))
operations = st.one_of(
    st.tuples(st.just("add"), rooms, st.booleans()),
    st.tuples(st.just("settle"), rooms),
    st.tuples(st.just("sweep")),
    st.tuples(st.just("wait"), st.integers(0, 4)),
)


@given(st.lists(operations, max_size=50))
def test_against_a_dictionary(script: list[tuple[object, ...]]) -> None:
    stones: Tombstones[int] = Tombstones(5.0)
    model: dict[RoomKey, tuple[int, bool, float]] = {}
    now = 0.0
    known: set[RoomKey] = set()
    for nth, (what, *arguments) in enumerate(script):
        match what, arguments:
            case "add", [RoomKey() as key, bool() as in_doubt]:
                if key not in model or (model[key][2] <= now and not model[key][1]):
                    known.add(key)
                    stones.add(key, nth, now, in_doubt=in_doubt)
                    model[key] = (nth, in_doubt, now + 5.0)
            case "settle", [RoomKey() as key]:
                stones.settle(key, now)
                if key in model and model[key][1]:
                    model[key] = (model[key][0], False, now + 5.0)
            case "sweep", _:
                expired = {key for key, (_, in_doubt, expires) in model.items() if expires <= now and not in_doubt}
                assert set(stones.take_expired(now)) == expired
                for key in expired:
                    del model[key]
            case "wait", [int() as seconds]:
                now += seconds
        for key in known:
            verdict, in_doubt, expires = model.get(key, (None, False, 0.0))
            assert stones.get(key, now) == (verdict if in_doubt or expires > now else None)
        assert len(stones) == len(model)


@pytest.mark.row("N9")
def test_a_verdict_can_be_forgotten_early() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    for room in range(5):
        stones.add(RoomKey(room, 0), "gone", float(room))
    assert stones.discard(RoomKey(2, 0))
    assert not stones.discard(RoomKey(2, 0))
    assert stones.get(RoomKey(2, 0), 5.0) is None
    assert stones.take_expired(KEEP + 3) == [RoomKey(room, 0) for room in (0, 1, 3)]
    assert len(stones) == 1


def test_doubt_is_not_forgotten_early() -> None:
    stones: Tombstones[str] = Tombstones(KEEP)
    stones.add(ROOM, "doubt", 0.0, in_doubt=True)
    assert not stones.discard(ROOM)
    assert stones.get(ROOM, 2 * KEEP) == "doubt"
