"""The teeth of the model: changed cells and planted faults are noticed."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.testing.model.bounds import FULL, QUICK
from orchestrator.testing.model.explore import Explorer
from orchestrator.testing.model.harmless import NOBODY_ASKS
from orchestrator.testing.model.mutations import all_mutations, applied
from orchestrator.testing.model.survivors import cell_of, influence_in, planted, survey, unused_reasons
from orchestrator.testing.model.system import System
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


@pytest.mark.row("N1")
def test_a_mutation_that_changes_no_step_changes_no_exploration() -> None:
    """The survey does not run such a one: here it does, in the smallest configuration."""
    bounds = QUICK[0]
    influence, plain = influence_in(bounds), Explorer(System(bounds)).run()
    skipped = [
        mutation
        for number, mutation in enumerate(all_mutations())
        if cell_of(mutation) in influence.cells and number not in influence.changing
    ]
    assert len(skipped) > 10
    assert len(influence.changing) > 150
    for mutation in skipped:
        with applied(mutation):
            result = Explorer(System(bounds)).run()
        assert not result.violation, mutation.name
        assert (result.states, result.transitions, result.ends) == (plain.states, plain.transitions, plain.ends)


@pytest.mark.row("N1")
@pytest.mark.long
@pytest.mark.timeout(2400)
def test_every_change_is_noticed_or_known_to_be_harmless_and_every_planted_fault_is_found() -> None:
    verdicts = list(survey(FULL))
    assert [verdict.name for verdict in verdicts] == [mutation.name for mutation in all_mutations()]
    survivors = [verdict for verdict in verdicts if not verdict.noticed_in]
    assert not [verdict.name for verdict in survivors if not verdict.reason], "say why it is harmless, or model more"
    asked = [verdict.name for verdict in survivors if verdict.is_asked_for and verdict.reason == NOBODY_ASKS]
    assert not asked, "somebody does ask"
    assert not unused_reasons(verdicts), "these are noticed by now"
    assert not [fault.name for fault in planted(FULL) if not fault.noticed_in]
