"""The lease book against a naive model: sets of units, and for each writer the units of which it is not quiet."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.errors import BusyError, IllegalTransitionError
from protocols.ids import RoomKey, Session
from protocols.leases import LeaseBook, UnitState
from tests.support.leases import POOL, SESSIONS, UNITS, WRITERS, Unit, held, unit_set
from tests.support.properties import examples

SPEAKERS = (*WRITERS, "stranger")


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
    st.tuples(st.just("unknown"), rooms, st.sampled_from(SPEAKERS), st.sampled_from(UNITS)),
    st.tuples(st.just("quiet"), rooms, st.sampled_from(SPEAKERS)),
    st.tuples(st.just("expire"), rooms),
    st.tuples(st.just("gone"), rooms, st.sampled_from(SPEAKERS)),
    st.tuples(st.just("fence"), st.sampled_from(SESSIONS)),
)


@pytest.mark.row("C4")
@examples(400)
@given(st.lists(operations, max_size=40), st.booleans())
def test_no_unit_is_free_of_which_a_writer_is_not_quiet(script: list[tuple[Any, ...]], crowded: bool) -> None:
    """Exactly the units that every writer is quiet about are free, after any sequence of events (V3)."""
    book, model = LeaseBook(POOL), Model()
    expired: set[RoomKey] = set()
    generation = dict.fromkeys(range(3), 0)
    if crowded:  # every second time all units are out from the start, and one room has two writers
        script = [("grant", 0, set(UNITS[2:]), SESSIONS[0], WRITERS), ("fail", 0), *script]
    for what, *arguments in script:
        if what == "fence":
            assert set(book.fence(arguments[0])) == model.fence(arguments[0])
        else:
            room, *more = arguments
            if what == "unknown":
                what, more = "ack", [more[0], {more[1]}, set()]
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
