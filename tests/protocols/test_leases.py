import pytest

from protocols.errors import BusyError, IllegalTransitionError, MismatchError
from protocols.ids import RoomKey
from protocols.leases import LEASE_TABLE, LeaseBook, LeaseEvent, UnitSet, UnitState, next_state
from tests.support.leases import POOL, SESSIONS, WRITERS, held, ints

ROOM = RoomKey(7, 0)
NONE = UnitSet()


def pages(*indices: int) -> UnitSet:
    return UnitSet(pages=ints(list(indices)))


def granted(*, writers: tuple[str, ...] = WRITERS, units: UnitSet | None = None) -> LeaseBook:
    book = LeaseBook(POOL)
    book.grant(ROOM, SESSIONS[0], pages(0, 1) if units is None else units, writers, 0.0)
    return book


# The table.


@pytest.mark.row("C4")
@pytest.mark.row("N1")
@pytest.mark.parametrize("state", UnitState)
@pytest.mark.parametrize("event", LeaseEvent)
def test_an_event_has_a_cell_or_raises(state: UnitState, event: LeaseEvent) -> None:
    if event in LEASE_TABLE[state]:
        assert next_state(state, event) is LEASE_TABLE[state][event]
    else:
        with pytest.raises(IllegalTransitionError) as caught:
            next_state(state, event)
        assert dict(caught.value.data) == {"state": state.name, "on": event.name}


@pytest.mark.row("C4")
def test_only_success_quiet_and_a_fence_lead_to_free() -> None:
    to_free = {event for cells in LEASE_TABLE.values() for event, after in cells.items() if after is UnitState.FREE}
    assert to_free == {LeaseEvent.COMMIT, LeaseEvent.QUIET, LeaseEvent.FENCE}
    assert set(LEASE_TABLE) == set(UnitState)


@pytest.mark.row("C4")
def test_in_doubt_leaves_by_a_fence_only() -> None:
    leaving = {event for event, after in LEASE_TABLE[UnitState.IN_DOUBT].items() if after is not UnitState.IN_DOUBT}
    assert leaving == {LeaseEvent.FENCE}


@pytest.mark.row("C4")
def test_every_state_that_is_not_free_can_become_free() -> None:
    for state in UnitState:
        seen = {state}
        frontier = [state]
        while frontier:
            for after in LEASE_TABLE[frontier.pop()].values():
                if after not in seen:
                    seen.add(after)
                    frontier.append(after)
        assert UnitState.FREE in seen


@pytest.mark.row("C4")
def test_a_timeout_frees_nothing() -> None:
    for cells in LEASE_TABLE.values():
        assert cells.get(LeaseEvent.DEADLINE, UnitState.UNKNOWN) in (UnitState.UNKNOWN, UnitState.IN_DOUBT)


# One story each.


@pytest.mark.row("C4")
def test_a_committed_room_gives_its_units_back() -> None:
    book = granted()
    with pytest.raises(IllegalTransitionError, match="not said done"):
        book.commit(ROOM)
    book.done(ROOM, "w0")
    with pytest.raises(IllegalTransitionError):
        book.commit(ROOM)
    assert set(held(book).values()) == {UnitState.LEASED}
    book.done(ROOM, "w1")
    book.commit(ROOM)
    assert (len(book), book.taken(), book.get(ROOM)) == (0, 0, None)


@pytest.mark.row("C4")
def test_a_failed_room_waits_for_every_writer() -> None:
    book = granted()
    assert not book.fail(ROOM, "cancelled")
    assert not book.ack(ROOM, "w0", NONE, NONE)
    assert not book.ack(ROOM, "w0", NONE, NONE), "saying it twice does not stand for the other"
    assert book.taken() == 2
    assert book.ack(ROOM, "w1", NONE, NONE)
    assert book.taken() == 0


@pytest.mark.row("C4")
def test_done_counts_as_quiet() -> None:
    book = granted()
    book.done(ROOM, "w0")
    assert not book.fail(ROOM, "cancelled")
    assert book.ack(ROOM, "w1", NONE, NONE)
    book = granted()
    book.done(ROOM, "w0")
    book.done(ROOM, "w1")
    assert book.fail(ROOM, "cancelled"), "all were done before the room failed"
    assert book.taken() == 0


@pytest.mark.row("C4")
def test_a_late_done_frees_what_waited_for_it() -> None:
    book = granted()
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", NONE, NONE)
    assert book.done(ROOM, "w1")
    assert book.taken() == 0


@pytest.mark.row("C4")
def test_late_quiet_empties_quarantine() -> None:
    book = granted()
    book.fail(ROOM, "cancelled")
    book.expire(ROOM)
    assert set(held(book).values()) == {UnitState.UNKNOWN}
    assert book.quarantined() == 2
    book.expire(ROOM)
    book.ack(ROOM, "w0", NONE, NONE)
    assert book.ack(ROOM, "w1", NONE, NONE)
    assert (book.taken(), book.quarantined()) == (0, 0)


@pytest.mark.row("C4")
def test_only_the_units_a_writer_cannot_tell_stay() -> None:
    book = granted(units=UnitSet(ints([0, 1, 2]), ints([0]), ints([1])))
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", NONE, NONE)
    assert not book.ack(ROOM, "w1", UnitSet(ints([1]), ints([]), ints([1])), NONE)
    assert held(book) == {("page", 1): UnitState.DRAINING, ("state", 1): UnitState.DRAINING}
    assert not book.ack(ROOM, "w1", pages(1), NONE)
    assert held(book) == {("page", 1): UnitState.DRAINING}
    assert book.ack(ROOM, "w1", NONE, NONE)


@pytest.mark.row("C4")
def test_what_either_writer_cannot_tell_stays() -> None:
    book = granted(units=pages(0, 1, 2))
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", pages(0), NONE)
    assert not book.ack(ROOM, "w1", pages(1), NONE)
    assert held(book) == {("page", 0): UnitState.DRAINING, ("page", 1): UnitState.DRAINING}
    assert not book.ack(ROOM, "w0", NONE, NONE)
    assert held(book) == {("page", 1): UnitState.DRAINING}


@pytest.mark.row("C4")
def test_units_in_doubt_wait_for_a_fence_whatever_is_said() -> None:
    book = granted()
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", NONE, pages(1))
    book.ack(ROOM, "w1", NONE, NONE)
    assert held(book) == {("page", 1): UnitState.IN_DOUBT}
    book.expire(ROOM)
    assert not book.ack(ROOM, "w0", NONE, NONE)
    assert not book.ack(ROOM, "w1", NONE, NONE)
    book.done(ROOM, "w0")
    book.writer_gone(ROOM, "w0")
    assert held(book) == {("page", 1): UnitState.IN_DOUBT}
    assert book.fence(SESSIONS[1]) == []
    assert book.fence(SESSIONS[0]) == [ROOM]
    assert book.taken() == 0
    assert book.fence(SESSIONS[0]) == []


@pytest.mark.row("C4")
def test_a_writer_that_is_gone_without_a_word_leaves_everything_in_doubt() -> None:
    book = granted()
    book.fail(ROOM, "the peer is gone")
    book.writer_gone(ROOM, "w0")
    assert not book.ack(ROOM, "w1", NONE, NONE)
    assert set(held(book).values()) == {UnitState.IN_DOUBT}


@pytest.mark.row("C4")
def test_a_writer_that_is_gone_after_its_word_leaves_in_doubt_what_it_could_not_tell() -> None:
    book = granted()
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", pages(1), NONE)
    book.writer_gone(ROOM, "w0")
    book.ack(ROOM, "w1", NONE, NONE)
    assert held(book) == {("page", 1): UnitState.IN_DOUBT}
    book = granted()
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", NONE, NONE)
    book.writer_gone(ROOM, "w0")
    assert book.ack(ROOM, "w1", NONE, NONE), "gone after it was quiet is quiet"


@pytest.mark.row("C4")
def test_doubt_told_before_the_room_failed_here_is_not_forgotten() -> None:
    """An AbortAck, asked or not, says that the room failed at its writer; it may be the first we learn of it."""
    book = granted()
    assert not book.ack(ROOM, "w0", NONE, pages(1))
    assert held(book) == {("page", 0): UnitState.DRAINING, ("page", 1): UnitState.IN_DOUBT}
    book.fail(ROOM, "cancelled")
    assert not book.ack(ROOM, "w1", NONE, NONE)
    assert held(book) == {("page", 1): UnitState.IN_DOUBT}


@pytest.mark.row("C4")
def test_a_writer_gone_before_the_room_failed_here_is_not_forgotten() -> None:
    book = granted()
    book.writer_gone(ROOM, "w0")
    assert set(held(book).values()) == {UnitState.IN_DOUBT}
    book.done(ROOM, "w1")
    with pytest.raises(IllegalTransitionError):
        book.commit(ROOM)
    assert not book.fail(ROOM, "the peer is gone")
    assert book.taken() == 2
    assert book.fence(SESSIONS[0]) == [ROOM]


@pytest.mark.row("C4")
def test_quiet_is_not_done() -> None:
    """A writer that failed the room says quiet; what it should have written is missing."""
    book = granted()
    book.done(ROOM, "w0")
    assert book.ack(ROOM, "w1", NONE, NONE)
    assert book.taken() == 0


@pytest.mark.row("C4")
def test_a_failed_room_cannot_be_committed() -> None:
    book = granted(writers=("w0",))
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", NONE, pages(0))
    with pytest.raises(IllegalTransitionError, match="failed"):
        book.commit(ROOM)
    assert held(book) == {("page", 0): UnitState.IN_DOUBT}


@pytest.mark.row("C4")
def test_a_fence_leaves_live_rooms_and_other_sessions_alone() -> None:
    book = granted()
    other = RoomKey(8, 0)
    book.grant(other, SESSIONS[1], pages(2), WRITERS, 0.0)
    book.fail(other, "cancelled")
    assert book.fence(SESSIONS[0]) == []
    assert held(book) == {
        ("page", 0): UnitState.LEASED,
        ("page", 1): UnitState.LEASED,
        ("page", 2): UnitState.DRAINING,
    }


@pytest.mark.row("C4")
def test_a_room_moved_before_its_offer_is_fenced_with_the_session_it_was_offered_under() -> None:
    book = granted()
    book.move(ROOM, SESSIONS[1])
    book.move(RoomKey(9, 9), SESSIONS[1])
    book.fail(ROOM, "cancelled")
    assert book.fence(SESSIONS[0]) == []
    assert book.fence(SESSIONS[1]) == [ROOM]


@pytest.mark.row("C4")
def test_a_fence_frees_a_room_that_failed_for_no_given_reason() -> None:
    book = granted()
    book.fail(ROOM, "")
    assert book.fence(SESSIONS[0]) == [ROOM]
    assert book.taken() == 0


@pytest.mark.row("C4")
@pytest.mark.row("E5")
@pytest.mark.parametrize(
    "units, error, text",
    [
        (pages(2, 1), BusyError, "pages still under another lease"),
        (UnitSet(ints([2]), ints([0])), BusyError, "aux slots still under another lease"),
        (pages(2, 4), MismatchError, "pages outside"),
        (pages(2, 2), MismatchError, "duplicate pages"),
        (pages(-1), MismatchError, "pages outside"),
        (UnitSet(pages=ints([2]), state=ints([2])), MismatchError, "state rows outside"),
    ],
)
def test_a_refused_grant_changes_nothing(units: UnitSet, error: type[Exception], text: str) -> None:
    book = granted(units=UnitSet(ints([0, 1]), ints([0])))
    with pytest.raises(error, match=text):
        book.grant(RoomKey(8, 0), SESSIONS[0], units, WRITERS, 0.0)
    assert len(held(book)) == 3
    assert len(book) == 1


def test_the_holder_of_a_busy_unit_is_named() -> None:
    book = granted()
    with pytest.raises(BusyError) as caught:
        book.grant(RoomKey(8, 0), SESSIONS[0], pages(1), WRITERS, 0.0)
    assert caught.value.data["holder"] == "room 7.0 (live)"
    book.fail(ROOM, "cancelled")
    book.fail(ROOM, "another reason")
    with pytest.raises(BusyError) as caught:
        book.grant(RoomKey(8, 0), SESSIONS[0], pages(1), WRITERS, 0.0)
    assert caught.value.data["holder"] == "room 7.0 (cancelled)", "the first cause"


def test_a_room_holds_one_lease() -> None:
    book = granted()
    with pytest.raises(BusyError, match="holds a lease already"):
        book.grant(ROOM, SESSIONS[0], pages(2), WRITERS, 0.0)


def test_a_room_without_units_leaves_nothing_behind() -> None:
    book = LeaseBook({})
    lease = book.grant(ROOM, SESSIONS[0], NONE, WRITERS, 0.0)
    assert len(lease.units) == 0
    assert (len(book), book.taken()) == (0, 0)
    book.commit(ROOM)
    assert book.fail(ROOM, "cancelled")


def test_units_can_be_granted_again_once_free() -> None:
    book = granted(writers=("w0",))
    book.fail(ROOM, "cancelled")
    book.ack(ROOM, "w0", NONE, NONE)
    lease = book.grant(RoomKey(7, 1), SESSIONS[0], pages(0, 1), WRITERS, 5.0)
    assert (lease.since, lease.session, lease.count(UnitState.LEASED)) == (5.0, SESSIONS[0], 2)
    assert book.ack(ROOM, "w0", NONE, pages(0, 1)), "a late word of the old room"
    assert set(held(book).values()) == {UnitState.LEASED}
