"""Which mutations of the tables the model does not notice.

First every configuration runs as it is, and notes which steps of one side ask for which cell, present or not. Then each
of those steps is worked out once more with the mutation in place. Where none comes out differently, the mutant's
exploration would be the same, state by state: the sides meet the tables in such steps only. So a mutation runs only
through the configurations in which it changes a step, the smallest first, until one notices.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import numpy as np

from orchestrator.testing.model.bounds import Bounds
from orchestrator.testing.model.explore import Explorer
from orchestrator.testing.model.faults import PLANTED
from orchestrator.testing.model.harmless import HARMLESS
from orchestrator.testing.model.mutations import ROOMS, Mutation, all_mutations, applied
from orchestrator.testing.model.runner import in_processes
from orchestrator.testing.model.state import Event
from orchestrator.testing.model.system import Move, System
from protocols.leases import Lease, LeaseEvent, UnitState
from protocols.machines import Machine

STUMBLES = (AssertionError, LookupError, AttributeError)
"""What a shell raises that meets a state which must not be."""
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
    is_asked_for: bool = True
    """Whether any configuration asks for its cell. If so, and none ran, it changes no step."""

    @property
    def reason(self) -> str:
        """Why a survivor is harmless; empty when nobody has said so."""
        return next((why for pattern, why in HARMLESS.items() if fnmatchcase(self.name, pattern)), "")


def survey(configurations: Sequence[Bounds]) -> Iterator[Verdict]:
    """Every mutation, in order."""
    found = list(in_processes(influence_in, configurations))
    jobs = []
    for number, mutation in enumerate(all_mutations()):
        changed = [bounds for bounds, each in zip(configurations, found, strict=True) if number in each.changing]
        jobs.append((number, changed, any(cell_of(mutation) in each.cells for each in found)))
    yield from in_processes(_run_mutation, jobs)


def planted(configurations: Sequence[Bounds]) -> Iterator[Verdict]:
    """Every planted fault, in order."""
    yield from in_processes(_run_planted, [(number, configurations) for number in range(len(PLANTED))])


def unused_reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Entries of the table that excuse nothing."""
    survivors = [verdict.name for verdict in verdicts if not verdict.noticed_in]
    return [pattern for pattern in HARMLESS if not any(fnmatchcase(name, pattern) for name in survivors)]


@dataclass(frozen=True, slots=True)
class Influence:
    """What one configuration asks of the tables."""

    cells: frozenset[CellName]
    changing: frozenset[int]
    """The mutations, by number, with which any of its steps comes out differently."""


def influence_in(bounds: Bounds) -> Influence:
    system = _NotedSystem(bounds)
    with _recording(system.cells):
        violation = Explorer(system).run().violation
    if violation:
        raise AssertionError(f"{bounds.name}: {violation}")
    changing = (number for number, mutation in enumerate(all_mutations()) if system.is_changed_by(mutation))
    return Influence(frozenset(system.asking), frozenset(changing))


class _NotedSystem(System):
    """Knows of each cell which steps asked for it."""

    def __init__(self, bounds: Bounds) -> None:
        super().__init__(bounds)
        self.cells: set[CellName] = set()
        """Of the step that is being worked out."""
        self.asking: dict[CellName, list[tuple[int, int, Event]]] = defaultdict(list)

    def _worked_out(self, at: int, side: int, event: Event) -> Move:
        self.cells.clear()
        move = super()._worked_out(at, side, event)
        for cell in self.cells:
            self.asking[cell].append((at, side, event))
        return move

    def is_changed_by(self, mutation: Mutation) -> bool:
        with applied(mutation):
            for at, side, event in self.asking.get(cell_of(mutation), ()):
                try:
                    changed = super()._worked_out(at, side, event)
                except STUMBLES:
                    return True
                if changed != self.move(at, side, event):
                    return True
        return False


def cell_of(mutation: Mutation) -> CellName:
    return mutation.table, mutation.state.name, mutation.event.name


@contextmanager
def _recording(cells: set[CellName]) -> Iterator[None]:
    names = {id(table): name for name, table in ROOMS.items()}
    fire, accepts, move, made = Machine.fire, Machine.accepts, Lease.fire, Lease.__init__

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

    def noted_made(self: Lease, *arguments: Any) -> None:
        cells.add(("LEASE_TABLE", UnitState.FREE.name, LeaseEvent.GRANT.name))
        made(self, *arguments)

    vars_of_machine: Any = Machine
    vars_of_lease: Any = Lease
    vars_of_machine.fire, vars_of_machine.accepts = noted_fire, noted_accepts
    vars_of_lease.fire, vars_of_lease.__init__ = noted_move, noted_made
    try:
        yield
    finally:
        vars_of_machine.fire, vars_of_machine.accepts = fire, accepts
        vars_of_lease.fire, vars_of_lease.__init__ = move, made


def _run_mutation(job: tuple[int, Sequence[Bounds], bool]) -> Verdict:
    number, configurations, is_asked_for = job
    mutation = all_mutations()[number]
    with applied(mutation):
        verdict = _verdict(mutation.name, [(bounds, System(bounds)) for bounds in configurations])
    return replace(verdict, is_asked_for=is_asked_for)


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
        except STUMBLES as exc:
            violation = f"{type(exc).__name__}: {exc}"
        if violation:
            return Verdict(name, bounds.name, violation, tuple(ran), time.process_time() - began)
    return Verdict(name, "", "", tuple(ran), time.process_time() - began)
