"""The teeth of the model: changed cells and planted faults are noticed."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.testing.model.mutations import all_mutations, applied
from protocols.errors import IllegalTransitionError
from protocols.ids import RoomKey, Session
from protocols.leases import LEASE_TABLE, LeaseBook, LeaseEvent, UnitSet, UnitState


@pytest.mark.row("N1")
def test_a_grant_goes_by_the_table() -> None:
    """Found by the mutations of its cell, which changed nothing: the book wrote LEASED by itself."""
    pages = UnitSet(np.array([0, 1]))
    changed = {mutation.name: mutation for mutation in all_mutations()}
    with applied(changed["LEASE_TABLE FREE GRANT: to DRAINING"]):
        assert LEASE_TABLE[UnitState.FREE][LeaseEvent.GRANT] is UnitState.DRAINING
        lease = LeaseBook({"page": 2}).grant(RoomKey(1, 1), Session("d:1"), pages, ["p"], 0.0)
        assert lease.count(UnitState.DRAINING) == 2
    book = LeaseBook({"page": 2})
    with applied(changed["LEASE_TABLE FREE GRANT: dropped"]), pytest.raises(IllegalTransitionError):
        book.grant(RoomKey(1, 1), Session("d:1"), pages, ["p"], 0.0)
    assert book.taken() == 0
    assert book.grant(RoomKey(1, 1), Session("d:1"), pages, ["p"], 0.0).count(UnitState.LEASED) == 2
