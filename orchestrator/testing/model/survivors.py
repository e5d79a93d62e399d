"""Which mutations of the tables the model does not notice.

First every configuration runs as it is and notes which cells are asked for, present or not: a change of any other cell
would leave that exploration as it was. Then each mutation runs through the configurations that ask for its cell, the
smallest first, until one notices.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from orchestrator.testing.model.bounds import Bounds
from orchestrator.testing.model.explore import Explorer
from orchestrator.testing.model.faults import PLANTED
from orchestrator.testing.model.harmless import HARMLESS
from orchestrator.testing.model.mutations import ROOMS, Mutation, all_mutations, applied
from orchestrator.testing.model.runner import in_processes
from orchestrator.testing.model.system import System
from protocols.leases import Lease, LeaseEvent, UnitState
from protocols.machines import Machine

CellName = tuple[str, str, str]
"""(table, state, event)"""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one mutation."""

    name: str
    noticed_in: str
    """The configuration; empty for a survivor."""
    violation: str
    explored_in: tuple[str, ...]
    """The configurations that ran."""
    seconds: float

    @property
    def reason(self) -> str:
        """Why a survivor is harmless; empty when nobody has said so."""
        return next((why for pattern, why in HARMLESS.items() if fnmatchcase(self.name, pattern)), "")


def survey(configurations: Sequence[Bounds]) -> Iterator[Verdict]:
    """Every mutation, in order."""
    asked = list(in_processes(cells_asked_for, configurations))
    jobs = [
        (number, [bounds for bounds, cells in zip(configurations, asked, strict=True) if _cell(mutation) in cells])
        for number, mutation in enumerate(all_mutations())
    ]
    yield from in_processes(_run_mutation, jobs)


def planted(configurations: Sequence[Bounds]) -> Iterator[Verdict]:
    """Every planted fault, in order."""
    yield from in_processes(_run_planted, [(number, configurations) for number in range(len(PLANTED))])


def unused_reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Entries of the table that excuse nothing."""
    survivors = [verdict.name for verdict in verdicts if not verdict.noticed_in]
    return [pattern for pattern in HARMLESS if not any(fnmatchcase(name, pattern) for name in survivors)]


def cells_asked_for(bounds: Bounds) -> frozenset[CellName]:
    """By an exploration of the tables as they are."""
    cells: set[CellName] = {("LEASE_TABLE", UnitState.FREE.name, LeaseEvent.GRANT.name)}
    with _recording(cells):
        Explorer(System(bounds)).run()
    return frozenset(cells)


def _cell(mutation: Mutation) -> CellName:
    return mutation.table, mutation.state.name, mutation.event.name


@contextmanager
def _recording(cells: set[CellName]) -> Iterator[None]:
    names = {id(table): name for name, table in ROOMS.items()}
    fire, accepts, move = Machine.fire, Machine.accepts, Lease.fire

    def note(machine: Machine[Any, Any], event: Any) -> None:
        cells.add((names[id(machine._table)], machine.state.name, event.name))

    def noted_fire(self: Machine[Any, Any], event: Any) -> Any:
        note(self, event)
        return fire(self, event)

    def noted_accepts(self: Machine[Any, Any], event: Any) -> bool:
        note(self, event)
        return accepts(self, event)

    def noted_move(self: Lease, event: LeaseEvent, only: Any = None) -> None:
        states = self.states["page"] if only is None else self.states["page"][only["page"]]
        cells.update(("LEASE_TABLE", UnitState(int(state)).name, event.name) for state in np.unique(states))
        move(self, event, only)

    vars_of_machine: Any = Machine
    vars_of_lease: Any = Lease
    vars_of_machine.fire, vars_of_machine.accepts, vars_of_lease.fire = noted_fire, noted_accepts, noted_move
    try:
        yield
    finally:
        vars_of_machine.fire, vars_of_machine.accepts, vars_of_lease.fire = fire, accepts, move


def _run_mutation(job: tuple[int, Sequence[Bounds]]) -> Verdict:
    number, configurations = job
    mutation = all_mutations()[number]
    with applied(mutation):
        return _verdict(mutation.name, [(bounds, System(bounds)) for bounds in configurations])


def _run_planted(job: tuple[int, Sequence[Bounds]]) -> Verdict:
    number, configurations = job
    fault = PLANTED[number]
    return _verdict(fault.name, [(bounds, fault.system(bounds)) for bounds in configurations])


def _verdict(name: str, systems: Sequence[tuple[Bounds, System]]) -> Verdict:
    began = time.process_time()
    ran: list[str] = []
    for bounds, system in systems:
        ran.append(bounds.name)
        try:
            violation = Explorer(system).run().violation
        except (AssertionError, LookupError, AttributeError) as exc:  # a shell stumbles over it
            violation = f"{type(exc).__name__}: {exc}"
        if violation:
            return Verdict(name, bounds.name, violation, tuple(ran), time.process_time() - began)
    return Verdict(name, "", "", tuple(ran), time.process_time() - began)
