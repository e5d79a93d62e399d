"""A small pool of units, and what a lease book holds of it."""

from __future__ import annotations

import numpy as np

from protocols.blocks import Ints
from protocols.ids import Session
from protocols.leases import KINDS, LeaseBook, UnitKind, UnitSet, UnitState

Unit = tuple[UnitKind, int]
POOL: dict[UnitKind, int] = {"page": 4, "aux": 1, "state": 2}
UNITS: list[Unit] = [(kind, index) for kind in KINDS for index in range(POOL[kind])]
WRITERS = ("w0", "w1")
SESSIONS = (Session("s0"), Session("s1"))


def ints(values: list[int]) -> Ints:
    return np.array(values, np.int64)


def unit_set(units: set[Unit]) -> UnitSet:
    return UnitSet(*(ints(sorted(index for kind, index in units if kind == each)) for each in KINDS))


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
