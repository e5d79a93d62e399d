"""The teeth of the model: every single-cell change of the tables, and planted faults in what is not a table.

The smallest configuration runs first, and the larger ones only for what survives it. What survives them all must stand
in `harmless`, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any, cast

from protocols.leases import LEASE_TABLE, LeaseEvent, UnitState
from protocols.machines import DECODE_ROOM, PREFILL_ROOM, ROLLOVER, Action

Cell = tuple[Enum, tuple[Action, ...]]

ROOMS: dict[str, Mapping[Enum, Mapping[Enum, Cell]]] = cast(
    Any, {"PREFILL_ROOM": PREFILL_ROOM, "DECODE_ROOM": DECODE_ROOM, "ROLLOVER": ROLLOVER}
)


@dataclass(frozen=True, slots=True)
class Mutation:
    """One cell of one table, and what it says instead."""

    table: str
    state: Enum
    event: Enum
    change: str
    cell: Any
    """None: dropped. A lease's target, or a room's target and actions."""

    @property
    def name(self) -> str:
        return f"{self.table} {self.state.name} {self.event.name}: {self.change}"


def all_mutations() -> list[Mutation]:
    """Drop a cell, change its target to each other state, drop or replace an action, change the order of two; add a
    cell where there is none."""
    return [*_of_leases(), *(mutation for name in ROOMS for mutation in _of_rooms(name))]


def _of_leases() -> Iterator[Mutation]:
    for state in UnitState:
        for event in LeaseEvent:
            target = LEASE_TABLE[state].get(event)
            if target is not None:
                yield Mutation("LEASE_TABLE", state, event, "dropped", None)
            for other in UnitState:
                if other is not target:
                    change = f"to {other.name}" if target is not None else f"added, to {other.name}"
                    yield Mutation("LEASE_TABLE", state, event, change, other)


def _of_rooms(name: str) -> Iterator[Mutation]:
    table = ROOMS[name]
    known = {action: None for row in table.values() for _, actions in row.values() for action in actions}
    events = {event: None for row in table.values() for event in row}
    for state, row in table.items():
        for event, (target, actions) in row.items():
            yield Mutation(name, state, event, "dropped", None)
            for other in table:
                if other is not target:
                    yield Mutation(name, state, event, f"to {other.name}", (other, actions))
            for n, action in enumerate(actions):
                rest = (*actions[:n], *actions[n + 1 :])
                yield Mutation(name, state, event, f"without {action.name}", (target, rest))
                for other_action in known:
                    if other_action not in actions:
                        changed = (*actions[:n], other_action, *actions[n + 1 :])
                        change = f"{other_action.name} for {action.name}"
                        yield Mutation(name, state, event, change, (target, changed))
            if len(actions) > 1:
                yield Mutation(name, state, event, "actions in the other order", (target, actions[::-1]))
        for event in events:
            if event not in row:
                for other in table:
                    yield Mutation(name, state, event, f"added, to {other.name}", (other, ()))


@contextmanager
def applied(mutation: Mutation) -> Iterator[None]:
    """The table says so here, and what it said before afterwards."""
    table: Any = LEASE_TABLE if mutation.table == "LEASE_TABLE" else ROOMS[mutation.table]
    row: dict[Enum, Any] = table[mutation.state]
    before = dict(row)
    try:
        if mutation.cell is None:
            del row[mutation.event]
        else:
            row[mutation.event] = mutation.cell
        yield
    finally:
        row.clear()
        row.update(before)
