import re
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from protocols import machines
from protocols.errors import IllegalTransitionError
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
    Machine,
    PassEvent,
    PassState,
    PrefillEvent,
    PrefillState,
    RolloverEvent,
    RolloverState,
)

AnyTable = Any
Walk = tuple[tuple[Enum, ...], Enum, tuple[Action, ...]]

TABLES: dict[str, tuple[Any, Any, Any, Any, set[str]]] = {
    "prefill": (PREFILL_ROOM, PrefillState, PrefillEvent, PrefillState.WAITING, {"SUCCEEDED", "FAILED"}),
    "decode": (DECODE_ROOM, DecodeState, DecodeEvent, DecodeState.OFFERED, {"COMMITTED", "FAILED"}),
    "chunk": (CHUNK, ChunkState, ChunkEvent, ChunkState.REGISTERED, {"CONCLUDED", "FAILED"}),
    "rollover": (ROLLOVER, RolloverState, RolloverEvent, RolloverState.IDLE, set()),
    "pass": (FORWARD_PASS, PassState, PassEvent, PassState.OPEN, {"ENDED", "DISCARDED"}),
}
ROOMS = ("prefill", "decode")
all_tables = pytest.mark.parametrize("name", TABLES)
CELLS = [
    pytest.param(table, state, event, id=f"{name}-{state.name}-{event.name}")
    for name, (table, states, events, _, _) in TABLES.items()
    for state in states
    for event in events
]


def reach(table: AnyTable, start: Enum) -> set[Enum]:
    seen, frontier = {start}, [start]
    while frontier:
        for state, _ in table[frontier.pop()].values():
            if state not in seen:
                seen.add(state)
                frontier.append(state)
    return seen


def walks(table: AnyTable, start: Enum, depth: int) -> Iterator[Walk]:
    """Every sequence of legal events up to that length: the events, where it ends, what was to be done."""
    frontier: list[Walk] = [((), start, ())]
    for _ in range(depth + 1):
        yield from frontier
        frontier = [
            ((*events, event), after, (*actions, *more))
            for events, state, actions in frontier
            for event, (after, more) in table[state].items()
        ]


@pytest.mark.row("C6")
@pytest.mark.row("N1")
@pytest.mark.parametrize("table, state, event", CELLS)
def test_an_event_has_a_cell_or_raises_and_changes_nothing(table: AnyTable, state: Enum, event: Enum) -> None:
    machine: Machine[Any, Any] = Machine(table, state)
    assert machine.accepts(event) == (event in table[state])
    if event in table[state]:
        after, actions = table[state][event]
        assert machine.fire(event) == actions
        assert machine.state is after
    else:
        with pytest.raises(IllegalTransitionError) as caught:
            machine.fire(event)
        assert machine.state is state
        assert dict(caught.value.data) == {"state": state.name, "on": event.name}


@all_tables
def test_tables_are_whole(name: str) -> None:
    table, states, events, start, _ = TABLES[name]
    assert set(table) == set(states)
    assert reach(table, start) == set(states), "every state can be reached"
    assert {event for cells in table.values() for event in cells} == set(events), "every event has a cell"
    assert all(isinstance(state.value, str) and state.value for state in states)


@all_tables
def test_every_state_reaches_an_end_and_ends_are_final(name: str) -> None:
    table, states, _, start, ends = TABLES[name]
    for state in states:
        assert {each.name for each in reach(table, state)} & (ends or {start.name})
        if state.name in ends:
            assert reach(table, state) == {state}
        else:
            assert len(reach(table, state)) > 1


@pytest.mark.row("C6")
@pytest.mark.parametrize("name", [*ROOMS, "chunk"])
def test_a_failure_is_legal_wherever_the_end_is_not_reached_and_repeats_harmlessly(name: str) -> None:
    table, states, events, _, ends = TABLES[name]
    fail = events["FAIL"]
    for state in states:
        if state.name in ends:
            continue
        machine: Machine[Any, Any] = Machine(table, state)
        machine.fire(fail)
        once = machine.state
        assert Action.TELL_PEERS not in machine.fire(fail), "peers are told once"
        assert machine.state is once


@pytest.mark.row("C6")
@pytest.mark.parametrize("name", ROOMS)
def test_a_room_that_failed_never_succeeds(name: str) -> None:
    table, _, events, _, _ = TABLES[name]
    failing = {"FAIL"}
    good = {"SUCCEEDED", "COMMITTED"}
    assert failing <= {event.name for event in events}
    for events_, state, _ in walks(table, TABLES[name][3], 7):
        if failing & {event.name for event in events_}:
            assert state.name not in good


@pytest.mark.parametrize("name", ROOMS)
def test_a_room_ends_once(name: str) -> None:
    table, _, _, start, ends = TABLES[name]
    for _, state, actions in walks(table, start, 8):
        assert actions.count(Action.END) == (1 if state.name in ends else 0)
        assert Action.END not in actions[:-1]


@pytest.mark.row("C3")
def test_a_prefill_that_fails_stops_then_tells_its_peers_once() -> None:
    for events, _, actions in walks(PREFILL_ROOM, PrefillState.WAITING, 8):
        failed = PrefillEvent.FAIL in events
        assert actions.count(Action.TELL_PEERS) == failed
        assert actions.count(Action.STOP_SUBMITTING) == failed
        if failed:
            assert actions.index(Action.STOP_SUBMITTING) < actions.index(Action.TELL_PEERS)


@pytest.mark.row("C2")
def test_a_prefill_acknowledges_when_drained_and_not_before_it_stopped() -> None:
    for events, state, actions in walks(PREFILL_ROOM, PrefillState.WAITING, 8):
        acked = Action.ACK in actions
        if acked:
            assert PrefillEvent.DRAINED in events or PrefillEvent.DRAIN_DEADLINE in events
            assert actions.index(Action.STOP_SUBMITTING) < actions.index(Action.ACK)
        if state is PrefillState.FAILED:
            assert actions[-2:] == (Action.ACK, Action.END), "the last word says what is quiet"
        if state is PrefillState.SUCCEEDED:
            assert not acked


@pytest.mark.row("C2")
def test_lingering_tells_everyone_who_asks() -> None:
    machine = Machine(PREFILL_ROOM, PrefillState.WAITING)
    machine.fire(PrefillEvent.FAIL)
    assert machine.fire(PrefillEvent.DRAIN_DEADLINE) == (Action.ACK,)
    assert machine.fire(PrefillEvent.FAIL) == (Action.ACK,)
    assert machine.fire(PrefillEvent.DRAINED) == (Action.ACK, Action.END)


def test_done_is_sent_once_and_before_success() -> None:
    for events, state, actions in walks(PREFILL_ROOM, PrefillState.WAITING, 8):
        assert actions.count(Action.SEND_DONE) == (PrefillEvent.LANDED in events)
        if state is PrefillState.SUCCEEDED and PrefillEvent.SKIP not in events:
            assert Action.SEND_DONE in actions
            assert events[-1] is PrefillEvent.COMMITTED, "success only after the decode committed"


def test_a_decode_commits_only_what_is_covered() -> None:
    for events, state, actions in walks(DECODE_ROOM, DecodeState.OFFERED, 8):
        assert (Action.SEND_COMMITTED in actions) == (state is DecodeState.COMMITTED)
        if state is DecodeState.COMMITTED:
            assert events == (DecodeEvent.COVERED,)


@pytest.mark.row("C1")
def test_a_decode_that_fails_tells_every_rank_once() -> None:
    for events, _, actions in walks(DECODE_ROOM, DecodeState.OFFERED, 8):
        assert actions.count(Action.TELL_PEERS) == (DecodeEvent.FAIL in events)


@pytest.mark.row("C4")
def test_a_decode_room_ends_failed_only_by_quiet_never_by_time() -> None:
    for events, state, _ in walks(DECODE_ROOM, DecodeState.OFFERED, 8):
        if state is DecodeState.FAILED:
            assert events[-1] is DecodeEvent.QUIET
        if events and events[-1] is DecodeEvent.ACK_DEADLINE:
            assert state is DecodeState.QUARANTINED


@pytest.mark.row("A10")
def test_a_chunk_degrades_only_before_a_byte_has_left() -> None:
    for state, cells in CHUNK.items():
        assert (ChunkEvent.DEGRADE in cells) == (state is ChunkState.REGISTERED)


@pytest.mark.row("A9")
def test_a_chunk_concludes_only_when_it_landed() -> None:
    for events, state, _ in walks(CHUNK, ChunkState.REGISTERED, 6):
        if state is ChunkState.CONCLUDED:
            cut = events.index(ChunkEvent.CONCLUDE)
            assert ChunkEvent.LAND in events[:cut]
            assert ChunkEvent.FAIL not in events[:cut]
            assert ChunkEvent.POST not in events[events.index(ChunkEvent.LAND) :], "nothing is posted after it landed"


@pytest.mark.row("A12")
def test_a_pass_has_one_end_and_may_be_closed_again() -> None:
    for first, end in ((PassEvent.END, PassState.ENDED), (PassEvent.DISCARD, PassState.DISCARDED)):
        machine = Machine(FORWARD_PASS, PassState.OPEN)
        machine.fire(first)
        for again in PassEvent:
            machine.fire(again)
            assert machine.state is end


@pytest.mark.row("N11")
def test_a_rollover_goes_one_way_round_and_fences_once_the_engine_is_deleted() -> None:
    done: list[Action] = []
    machine = Machine(ROLLOVER, RolloverState.IDLE)
    for event in (RolloverEvent.START, RolloverEvent.EXPIRE, RolloverEvent.DELETED, RolloverEvent.ALL_ACKED):
        assert [each for each in RolloverEvent if machine.accepts(each)] == [event], (
            "one at a time: two engines at most"
        )
        done += machine.fire(event)
    assert done == [Action.ANNOUNCE, Action.DELETE, Action.FENCE, Action.RELEASE]
    assert machine.state is RolloverState.IDLE


def test_the_arrows_drawn_are_in_the_tables() -> None:
    """Each arrow that the docstring draws along one line is a cell; names of states and events are the tables'."""
    assert machines.__doc__ is not None
    drawing = machines.__doc__.partition("::")[2]
    known = {state.name for _, states, _, _, _ in TABLES.values() for state in states}
    assert set(re.findall(r"[A-Z]{4,}", drawing)) == known
    cells = {
        (state.name, event.name.lower(), after.name)
        for table, _, _, _, _ in TABLES.values()
        for state, row in table.items()
        for event, (after, _) in row.items()
    }
    arrows = re.findall(r"(?=\b([A-Z]+) ─+(\w+?)─+▶ ([A-Z]+))", drawing)
    assert len(arrows) >= 10
    assert set(arrows) <= cells
