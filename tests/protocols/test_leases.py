from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.blocks import Ints
from protocols.errors import BusyError, IllegalTransitionError, MismatchError
from protocols.ids import RoomKey, Session
from protocols.leases import (
    KINDS,
    LEASE_TABLE,
    LeaseBook,
    LeaseEvent,
    UnitKind,
    UnitSet,
    UnitState,
    next_state,
)
from tests.support.properties import examples

Unit = tuple[UnitKind, int]
POOL: dict[UnitKind, int] = {"page": 4, "aux": 1, "state": 2}
UNITS: list[Unit] = [(kind, index) for kind in KINDS for index in range(POOL[kind])]
WRITERS = ("w0", "w1")
SPEAKERS = (*WRITERS, "stranger")
SESSIONS = (Session("s0"), Session("s1"))
ROOM = RoomKey(7, 0)
NONE = UnitSet()


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def unit_set(units: set[Unit]) -> UnitSet:
    return UnitSet(*(ints(sorted(index for kind, index in units if kind == each)) for each in KINDS))


def pages(*indices: int) -> UnitSet:
    return UnitSet(pages=ints(list(indices)))


def held(book: LeaseBook) -> dict[Unit, UnitState]:
    """Every unit under a lease, with its state."""
    found: dict[Unit, UnitState] = {}
    for lease in book.leases():
        for kind in KINDS:
            for index, state in zip(lease.units.of(kind).tolist(), lease.states[kind].tolist(), strict=True):
                assert (kind, index) not in found, "a unit has one lease"
                found[kind, index] = UnitState(state)
    assert len(found) == book.taken()
    return found


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


# The book against a naive model: sets of units, and for each writer what it has not declared quiet.


@dataclass
class ModelLease:
    session: Session
    units: set[Unit]
    writers: tuple[str, ...]
    failed: bool = False
    silent: set[str] = field(default_factory=set)
    """Writers that have said neither done nor quiet."""
    acked: set[str] = field(default_factory=set)
    noisy: dict[str, set[Unit]] = field(default_factory=dict)
    """Units of which a writer is not quiet; of a silent one, all."""
    in_doubt: set[Unit] = field(default_factory=set)

    def quiet(self, unit: Unit) -> bool:
        return unit not in self.in_doubt and all(unit not in noisy for noisy in self.noisy.values())


class Model:
    def __init__(self) -> None:
        self.leases: dict[RoomKey, ModelLease] = {}

    def taken(self) -> set[Unit]:
        return {unit for lease in self.leases.values() for unit in lease.units}

    def grant(self, key: RoomKey, session: Session, units: set[Unit], writers: tuple[str, ...]) -> bool:
        if key in self.leases or units & self.taken():
            return False
        noisy = {writer: set(units) for writer in writers}
        self.leases[key] = ModelLease(session, set(units), writers, silent=set(writers), noisy=noisy)
        self.sweep(key)
        return True

    def done(self, key: RoomKey, writer: str) -> None:
        lease = self.leases[key]
        if writer not in lease.acked:  # its own later word is the better one
            lease.noisy[writer] = set()
        lease.silent.discard(writer)
        self.sweep(key)

    def commit(self, key: RoomKey) -> bool:
        lease = self.leases[key]
        if lease.silent or lease.failed:
            return False
        del self.leases[key]
        return True

    def fail(self, key: RoomKey) -> None:
        self.leases[key].failed = True
        self.sweep(key)

    def ack(self, key: RoomKey, writer: str, unknown: set[Unit], in_doubt: set[Unit]) -> None:
        lease = self.leases[key]
        lease.failed = True
        lease.in_doubt |= in_doubt & lease.units
        lease.acked.add(writer)
        lease.noisy[writer] = set(unknown)
        if not unknown:
            lease.silent.discard(writer)
        self.sweep(key)

    def gone(self, key: RoomKey, writer: str) -> None:
        lease = self.leases[key]
        if writer in lease.silent:
            lease.failed = True
            lease.in_doubt |= lease.noisy[writer] & lease.units
            lease.silent.discard(writer)
            self.sweep(key)

    def fence(self, session: Session) -> set[RoomKey]:
        freed = {key for key, lease in self.leases.items() if lease.session == session and lease.failed}
        for key in freed:
            del self.leases[key]
        return freed

    def sweep(self, key: RoomKey) -> None:
        """What every writer is quiet about is free, once the room failed."""
        lease = self.leases[key]
        if lease.failed:
            lease.units = {unit for unit in lease.units if not lease.quiet(unit)}
        if not lease.units:
            del self.leases[key]


unit_sets = st.sets(st.sampled_from(UNITS))
rooms = st.integers(0, 2)
operations = st.one_of(
    st.tuples(st.just("grant"), rooms, unit_sets, st.sampled_from(SESSIONS), st.sampled_from([(), ("w0",), WRITERS])),
    st.tuples(st.just("done"), rooms, st.sampled_from(SPEAKERS)),
    st.tuples(st.just("commit"), rooms),
    st.tuples(st.just("fail"), rooms),
    st.tuples(st.just("ack"), rooms, st.sampled_from(SPEAKERS), unit_sets, unit_sets),
    st.tuples(st.just("quiet"), rooms, st.sampled_from(SPEAKERS)),
    st.tuples(st.just("expire"), rooms),
    st.tuples(st.just("gone"), rooms, st.sampled_from(SPEAKERS)),
    st.tuples(st.just("fence"), st.sampled_from(SESSIONS)),
)


@pytest.mark.row("C4")
@examples(600)
@given(st.lists(operations, max_size=40))
def test_no_unit_is_free_of_which_a_writer_is_not_quiet(script: list[tuple[Any, ...]]) -> None:
    """Exactly the units that every writer is quiet about are free, after any sequence of events (V3)."""
    book, model = LeaseBook(POOL), Model()
    expired: set[RoomKey] = set()
    generation = dict.fromkeys(range(3), 0)
    for what, *arguments in script:
        if what == "fence":
            assert set(book.fence(arguments[0])) == model.fence(arguments[0])
        else:
            room, *more = arguments
            key = RoomKey(room, generation[room])
            lease = model.leases.get(key)
            if what == "grant":
                if lease is None:  # an ended room comes back as another generation
                    generation[room] += 1
                    key = RoomKey(room, generation[room])
                grant(book, model, key, *more)
            elif lease is None:
                nothing_happens(book, what, key, more)
            elif what in ("done", "ack", "quiet", "gone") and more[0] not in lease.writers:
                a_stranger_speaks(book, what, key, more)
            else:
                run(book, model, what, key, more)
                if what == "expire" and lease.failed:
                    expired.add(key)
        assert_equal(book, model, expired)


def grant(
    book: LeaseBook, model: Model, key: RoomKey, units: set[Unit], session: Session, writers: tuple[str, ...]
) -> None:
    if model.grant(key, session, units, writers):
        book.grant(key, session, unit_set(units), writers, 0.0)
    else:
        with pytest.raises(BusyError):
            book.grant(key, session, unit_set(units), writers, 0.0)


def nothing_happens(book: LeaseBook, what: str, key: RoomKey, more: list[Any]) -> None:
    """Events of a room that has no lease, or not any more, are late words: they touch nothing."""
    assert book.get(key) is None
    match what:
        case "done":
            assert book.done(key, *more)
        case "commit":
            book.commit(key)
        case "fail":
            assert book.fail(key, "late")
        case "ack" | "quiet":
            assert book.ack(key, more[0], unit_set(set(UNITS)), unit_set(set(UNITS)))
        case "expire":
            book.expire(key)
        case "gone":
            book.writer_gone(key, *more)


def a_stranger_speaks(book: LeaseBook, what: str, key: RoomKey, more: list[Any]) -> None:
    match what:
        case "done":
            assert not book.done(key, *more)
        case "ack" | "quiet":
            assert not book.ack(key, more[0], unit_set(set(UNITS)), unit_set(set(UNITS)))
        case "gone":
            book.writer_gone(key, *more)


def run(book: LeaseBook, model: Model, what: str, key: RoomKey, more: list[Any]) -> None:
    match what:
        case "done":
            model.done(key, *more)
            assert book.done(key, *more) == (key not in model.leases)
        case "commit":
            if model.commit(key):
                book.commit(key)
            else:
                with pytest.raises(IllegalTransitionError):
                    book.commit(key)
        case "fail":
            model.fail(key)
            assert book.fail(key, "cancelled") == (key not in model.leases)
        case "ack" | "quiet":
            writer, *said = more
            unknown, in_doubt = said or (set(), set())
            model.ack(key, writer, unknown, in_doubt)
            assert book.ack(key, writer, unit_set(unknown), unit_set(in_doubt)) == (key not in model.leases)
        case "expire":
            book.expire(key)
        case "gone":
            model.gone(key, *more)
            book.writer_gone(key, *more)


def assert_equal(book: LeaseBook, model: Model, expired: set[RoomKey]) -> None:
    states = held(book)
    assert set(states) == model.taken()
    assert {lease.key for lease in book.leases()} == set(model.leases)
    assert len(book) == len(model.leases)
    quarantined = 0
    for key, lease in model.leases.items():
        for unit in lease.units:
            if not lease.failed:
                assert states[unit] is UnitState.LEASED
            elif unit in lease.in_doubt:
                assert states[unit] is UnitState.IN_DOUBT
            else:
                assert states[unit] is (UnitState.UNKNOWN if key in expired else UnitState.DRAINING)
            quarantined += states[unit] in (UnitState.UNKNOWN, UnitState.IN_DOUBT)
    assert book.quarantined() == quarantined


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
