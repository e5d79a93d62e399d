"""Who may write which unit, and when a unit is free again. One table, one book; pure.

A unit is a destination page, aux slot or state row. A lease gives a room's writers (the prefill ranks its Offer went
to) the right to write a set of units. Only three things lead back to FREE: every writer done, quiet from every
writer, a fence. A timeout changes a request's outcome, never a unit's state: it merely moves to QUARANTINED.

    FREE ─grant─▶ LEASED ─commit─▶ FREE
                    └─fail─▶ DRAINING ─quiet─▶ FREE
                                │ └─deadline─▶ UNKNOWN ─quiet─▶ FREE
                                └─doubt─▶ IN_DOUBT ◀─doubt─┘        (fence from any of them ─▶ FREE)
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

from protocols.blocks import Ints, check_units
from protocols.errors import BusyError, IllegalTransitionError
from protocols.ids import RoomKey, Session

UnitKind = Literal["page", "aux", "state"]
KINDS: tuple[UnitKind, ...] = ("page", "aux", "state")
NOUNS: dict[UnitKind, str] = {"page": "pages", "aux": "aux slots", "state": "state rows"}


class UnitState(IntEnum):
    FREE = 0
    """No writer."""
    LEASED = 1
    """A room's writers may write it."""
    DRAINING = 2
    """The room failed; a writer may still be writing."""
    UNKNOWN = 3
    """Quarantined: a writer has not said whether it is quiet."""
    IN_DOUBT = 4
    """Quarantined: a write failed, or its writer is gone, and may land until a fence."""


class LeaseEvent(Enum):
    GRANT = "grant"
    COMMIT = "every writer is done"
    FAIL = "the room failed"
    DEADLINE = "not every writer said quiet in time"
    DOUBT = "a writer says it is in doubt, or is gone without a word"
    QUIET = "every writer said quiet"
    FENCE = "the session's engine was deleted"


LEASE_TABLE: dict[UnitState, dict[LeaseEvent, UnitState]] = {
    UnitState.FREE: {LeaseEvent.GRANT: UnitState.LEASED},
    UnitState.LEASED: {
        LeaseEvent.COMMIT: UnitState.FREE,
        LeaseEvent.FAIL: UnitState.DRAINING,
    },
    UnitState.DRAINING: {
        LeaseEvent.QUIET: UnitState.FREE,
        LeaseEvent.DOUBT: UnitState.IN_DOUBT,
        LeaseEvent.DEADLINE: UnitState.UNKNOWN,
        LeaseEvent.FENCE: UnitState.FREE,
    },
    UnitState.UNKNOWN: {
        LeaseEvent.QUIET: UnitState.FREE,
        LeaseEvent.DOUBT: UnitState.IN_DOUBT,
        LeaseEvent.DEADLINE: UnitState.UNKNOWN,
        LeaseEvent.FENCE: UnitState.FREE,
    },
    UnitState.IN_DOUBT: {
        LeaseEvent.DOUBT: UnitState.IN_DOUBT,
        LeaseEvent.DEADLINE: UnitState.IN_DOUBT,
        LeaseEvent.FENCE: UnitState.FREE,
    },
}


def next_state(state: UnitState, event: LeaseEvent) -> UnitState:
    """The table's cell. Raises IllegalTransitionError."""
    try:
        return LEASE_TABLE[state][event]
    except KeyError:
        raise IllegalTransitionError("no such lease transition", state=state.name, on=event.name) from None


@dataclass(frozen=True, slots=True)
class UnitSet:
    """Units of one room: pages, aux slots, state rows (indices into the pools)."""

    pages: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    aux: Ints = field(default_factory=lambda: np.empty(0, np.int64))
    state: Ints = field(default_factory=lambda: np.empty(0, np.int64))

    def of(self, kind: UnitKind) -> Ints:
        return {"page": self.pages, "aux": self.aux, "state": self.state}[kind]

    def __len__(self) -> int:
        return len(self.pages) + len(self.aux) + len(self.state)


Selection = Mapping[UnitKind, npt.NDArray[np.bool_]]


class Lease:
    """One room's units and what each writer has said of them."""

    def __init__(self, key: RoomKey, session: Session, units: UnitSet, writers: Iterable[Hashable], now: float) -> None:
        self.key = key
        self.session = session
        self.units = units
        self.since = now
        self.why = ""
        self.writers = frozenset(writers)
        self.waiting: set[Hashable] = set(self.writers)
        """Writers that have not said done or quiet."""
        self.unknown: dict[Hashable, UnitSet] = {}
        """What a writer last said it cannot tell yet."""
        granted = next_state(UnitState.FREE, LeaseEvent.GRANT)
        self.states: dict[UnitKind, npt.NDArray[np.uint8]] = {
            kind: np.full(len(units.of(kind)), granted, np.uint8) for kind in KINDS
        }
        self.quarantined = 0
        """Units that are UNKNOWN or IN_DOUBT: kept here because it is asked of all leases whenever one is granted."""

    def fire(self, event: LeaseEvent, only: Selection | None = None) -> None:
        """Move every unit (or those selected) that has a cell for this event; the others stay as they are."""
        for kind in KINDS:
            before = self.states[kind].copy()
            chosen = np.ones(len(before), bool) if only is None else only[kind]
            for state, cells in LEASE_TABLE.items():
                if event in cells:
                    self.states[kind][chosen & (before == state)] = next_state(state, event)
        self.quarantined = self.count(UnitState.UNKNOWN) + self.count(UnitState.IN_DOUBT)

    def count(self, state: UnitState) -> int:
        return int(sum((self.states[kind] == state).sum() for kind in KINDS))

    def free_units(self) -> UnitSet:
        """The units of this lease that are FREE."""
        return UnitSet(*(self.units.of(kind)[self.states[kind] == UnitState.FREE] for kind in KINDS))

    def drop_free(self) -> None:
        """Forget the units that are FREE: they belong to the pool again."""
        kept = {kind: self.states[kind] != UnitState.FREE for kind in KINDS}
        self.units = UnitSet(*(self.units.of(kind)[kept[kind]] for kind in KINDS))
        self.states = {kind: self.states[kind][kept[kind]] for kind in KINDS}


class LeaseBook:
    """All leases of one side. A unit under any lease, whatever its state, is not granted again (V3)."""

    def __init__(self, pool: Mapping[UnitKind, int]) -> None:
        """``pool``: how many units of each kind there are."""
        self._leases: dict[RoomKey, Lease] = {}
        self._taken: dict[UnitKind, npt.NDArray[np.bool_]] = {kind: np.zeros(pool.get(kind, 0), bool) for kind in KINDS}

    def __len__(self) -> int:
        return len(self._leases)

    def get(self, key: RoomKey) -> Lease | None:
        return self._leases.get(key)

    def leases(self) -> list[Lease]:
        return list(self._leases.values())

    def taken(self) -> int:
        """How many units are not FREE."""
        return int(sum(taken.sum() for taken in self._taken.values()))

    def quarantined(self) -> int:
        """How many units are in quarantine, for whatever reason."""
        return sum(lease.quarantined for lease in self._leases.values())

    def grant(self, key: RoomKey, session: Session, units: UnitSet, writers: Iterable[Hashable], now: float) -> Lease:
        """Lease the units to the room. Raises, with nothing changed, MismatchError for a unit outside the pool or
        named twice, and BusyError, naming the room that holds it, for one that is not FREE."""
        if key in self._leases:
            raise BusyError("the room holds a lease already", key=str(key))
        for kind in KINDS:
            wanted = units.of(kind)
            check_units(wanted, len(self._taken[kind]), NOUNS[kind])
            busy = wanted[self._taken[kind][wanted]]
            if len(busy):
                holder = self._holder(kind, int(busy[0]))
                raise BusyError(
                    f"{NOUNS[kind]} still under another lease", first=int(busy[0]), count=len(busy), holder=holder
                )
        lease = Lease(key, session, units, writers, now)
        self._leases[key] = lease
        for kind in KINDS:
            self._taken[kind][units.of(kind)] = True
        if len(units) == 0:
            del self._leases[key]
        return lease

    def done(self, key: RoomKey, writer: Hashable) -> bool:
        """This writer said Done(ok): it will write nothing more. True when the room failed and every unit is free."""
        lease = self._leases.get(key)
        if lease is None:
            return True
        lease.waiting.discard(writer)
        return bool(lease.why) and self._try_free(lease)

    def commit(self, key: RoomKey) -> None:
        """Every writer is done: the embedder owns the units again. Raises IllegalTransitionError if one is not, or the
        room failed."""
        lease = self._leases.get(key)
        if lease is None:
            return
        if lease.why:
            raise IllegalTransitionError("the room failed", key=str(key), why=lease.why)
        if lease.waiting:
            raise IllegalTransitionError("a writer has not said done", key=str(key), waiting=len(lease.waiting))
        lease.fire(LeaseEvent.COMMIT)
        self._settle(lease)

    def fail(self, key: RoomKey, why: str) -> bool:
        """The room failed: units drain until every writer is quiet. True if all were already so."""
        lease = self._leases.get(key)
        if lease is None:
            return True
        self._fail(lease, why)
        return self._try_free(lease)

    def ack(self, key: RoomKey, writer: Hashable, unknown: UnitSet, in_doubt: UnitSet) -> bool:
        """A writer's AbortAck. What it does not list is quiet from this writer. True when every unit is free.

        It says that the room failed there, asked or not: a lease that is still live fails with it. Of a writer that the
        lease does not know, nothing is believed."""
        lease = self._leases.get(key)
        if lease is None:
            return True
        if writer not in lease.writers:
            return False
        self._fail(lease, "a writer acknowledged an abort")
        if len(in_doubt):
            lease.fire(LeaseEvent.DOUBT, self._select(lease, in_doubt))
        if len(unknown):
            lease.unknown[writer] = unknown
        else:
            lease.unknown.pop(writer, None)
            lease.waiting.discard(writer)
        return self._try_free(lease)

    def expire(self, key: RoomKey) -> None:
        """The acknowledgement deadline passed: what is not quiet goes to quarantine."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.fire(LeaseEvent.DEADLINE)

    def move(self, key: RoomKey, session: Session) -> None:
        """The room will be offered under this session instead: only before its first Offer."""
        lease = self._leases.get(key)
        if lease is not None:
            lease.session = session

    def writer_gone(self, key: RoomKey, writer: Hashable) -> None:
        """The writer is gone for good without a word: its bytes may sit in kernel buffers. In doubt until a fence. A
        lease that is still live fails with it."""
        lease = self._leases.get(key)
        if lease is not None and writer in lease.waiting:
            self._fail(lease, "a writer is gone")
            unknown = lease.unknown.get(writer)
            lease.fire(LeaseEvent.DOUBT, None if unknown is None else self._select(lease, unknown))
            lease.waiting.discard(writer)

    def fence(self, session: Session) -> list[RoomKey]:
        """The engine of this session was deleted: every failed lease under it is free. Returns their rooms."""
        freed = []
        for lease in list(self._leases.values()):
            if lease.session == session and lease.why:
                lease.fire(LeaseEvent.FENCE)
                self._settle(lease)
                freed.append(lease.key)
        return freed

    def _fail(self, lease: Lease, why: str) -> None:
        """The first cause stays. A doubt told of a live lease would find no cell and be lost: so it fails first."""
        lease.why = lease.why or why or "failed"
        lease.fire(LeaseEvent.FAIL)

    def _select(self, lease: Lease, units: UnitSet) -> dict[UnitKind, npt.NDArray[np.bool_]]:
        return {kind: np.isin(lease.units.of(kind), units.of(kind)) for kind in KINDS}

    def _try_free(self, lease: Lease) -> bool:
        """Quiet means quiet from every writer: a unit one of them cannot tell yet stays."""
        if lease.waiting - set(lease.unknown):
            return False
        keep = {kind: np.zeros(len(lease.units.of(kind)), bool) for kind in KINDS}
        for unknown in lease.unknown.values():
            for kind, chosen in self._select(lease, unknown).items():
                keep[kind] |= chosen
        lease.fire(LeaseEvent.QUIET, {kind: ~chosen for kind, chosen in keep.items()})
        self._settle(lease)
        return lease.key not in self._leases

    def _settle(self, lease: Lease) -> None:
        """Give FREE units back to the pool, once: what stays in the lease shrinks to what is not FREE."""
        freed = lease.free_units()
        for kind in KINDS:
            self._taken[kind][freed.of(kind)] = False
        lease.drop_free()
        if len(lease.units) == 0:
            self._leases.pop(lease.key, None)

    def _holder(self, kind: UnitKind, index: int) -> str:
        for lease in self._leases.values():
            if index in lease.units.of(kind):
                return f"room {lease.key} ({lease.why or 'live'})"
        return "nobody"
