"""Writes docs/states.md from the state tables of the pure core: a diagram and two tables for each machine.

Run it after a change to protocols/machines.py or protocols/leases.py; a test fails while the file is not current.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from protocols.leases import LEASE_TABLE, LeaseEvent, UnitState
from protocols.machines import (
    CHUNK,
    DECODE_ROOM,
    FORWARD_PASS,
    PREFILL_ROOM,
    ROLLOVER,
    Action,
    ChunkEvent,
    ChunkState,
    DecodeEvent,
    DecodeState,
    PassEvent,
    PassState,
    PrefillEvent,
    PrefillState,
    RolloverEvent,
    RolloverState,
)

PAGE = Path(__file__).resolve().parents[2] / "docs" / "states.md"
HEAD = """\
# States

<!-- Written by scripts/draw_states from protocols/machines.py and protocols/leases.py. Do not edit. -->

Everything that decides a transition stands in the tables below; the code that runs uses the same tables. For a room,
a chunk or a pass, an event without a cell is an error that leaves the state as it was.

The *outcome* that a caller sees (success or failure, and the first cause) is not here: it is decided once, and a room
outlives it. A failed room still drains, and its pages are still somebody's until that is over.
"""

UNIT_STATES = {
    UnitState.FREE: "no writer",
    UnitState.LEASED: "a room's writers may write it",
    UnitState.DRAINING: "the room failed; a writer may still be writing",
    UnitState.UNKNOWN: "quarantined: a writer has not said whether it is quiet",
    UnitState.IN_DOUBT: "quarantined: a write failed, or its writer is gone, and may land until a fence",
}


class Arrow(NamedTuple):
    source: str
    event: str
    target: str
    actions: tuple[str, ...]


class Drawing(NamedTuple):
    title: str
    text: str
    states: dict[str, str]
    events: dict[str, str]
    arrows: list[Arrow]


def machine(title: str, text: str, table: Mapping[Any, Any], states: type[Enum], events: type[Enum]) -> Drawing:
    arrows = [
        Arrow(state.name, event.name, target.name, tuple(action.name for action in actions))
        for state, cells in table.items()
        for event, (target, actions) in cells.items()
    ]
    return Drawing(title, text, {s.name: s.value for s in states}, {e.name: e.value for e in events}, arrows)


def lease() -> Drawing:
    arrows = [
        Arrow(state.name, event.name, target.name, ())
        for state, cells in LEASE_TABLE.items()
        for event, target in cells.items()
    ]
    return Drawing(
        "Unit of a decode worker",
        "A unit is a destination page, an aux slot or a state row. Only three events lead back to FREE: every writer "
        "done, quiet from every writer, a fence. An event moves those of a room's units that have a cell for it.",
        {state.name: UNIT_STATES[state] for state in UnitState},
        {event.name: event.value for event in LeaseEvent},
        arrows,
    )


def drawings() -> list[Drawing]:
    return [
        machine(
            "Room on the prefill worker",
            "Source pages may be reused from SUCCEEDED or FAILED on, never before.",
            PREFILL_ROOM,
            PrefillState,
            PrefillEvent,
        ),
        machine(
            "Room on the decode worker",
            "Destination units belong to the embedder again from COMMITTED or FAILED on.",
            DECODE_ROOM,
            DecodeState,
            DecodeEvent,
        ),
        lease(),
        machine(
            "Engine rollover on the decode worker",
            "The fence without a restart: what was quarantined under the old session is free from FENCED on.",
            ROLLOVER,
            RolloverState,
            RolloverEvent,
        ),
        machine("Chunk", "One contiguous page range that one forward makes final.", CHUNK, ChunkState, ChunkEvent),
        machine("Forward pass", "One model forward on the prefill worker.", FORWARD_PASS, PassState, PassEvent),
    ]


def page() -> str:
    actions = table(("action", "what is done"), [(action.name, action.value) for action in Action])
    return "\n".join([HEAD, *map(section, drawings()), "## Actions\n", actions])


def section(drawing: Drawing) -> str:
    first = next(iter(drawing.states))
    lines = [f"    {arrow.source} --> {arrow.target} : {arrow.event}" for arrow in drawing.arrows]
    diagram = "\n".join(["```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *lines, "```"])
    columns = 4 if any(arrow.actions for arrow in drawing.arrows) else 3
    rows = [(a.source, a.event, a.target, ", ".join(a.actions) or "–")[:columns] for a in drawing.arrows]
    parts = [
        f"## {drawing.title}",
        drawing.text,
        diagram,
        table(("state", "meaning"), list(drawing.states.items())),
        table(("event", "meaning"), list(drawing.events.items())),
        table(("from", "event", "to", "actions")[:columns], rows),
    ]
    return "\n\n".join(part.rstrip("\n") for part in parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [header, ("---",) * len(header), *rows]
    return "".join(f"| {' | '.join(row)} |\n" for row in cells)


def main(arguments: list[str] | None = None, path: Path = PAGE) -> int:
    parser = argparse.ArgumentParser(prog="scripts/draw_states", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if the file is not current")
    options = parser.parse_args(arguments)
    drawn = page()
    current = path.read_text(encoding="utf-8") if path.exists() else ""
    if current == drawn:
        return 0
    if options.check:
        print(f"{path} is not current: run scripts/draw_states", file=sys.stderr)
        return 1
    path.write_text(drawn, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
