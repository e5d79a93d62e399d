"""What must hold in every state, and in which states everything is over.

The rules of the protocol as claims about one state: V3 about a decode and the writes under way to it, the rules of the
messages about a pair with nothing in flight between them (then nothing may be owed either).
"""

from __future__ import annotations

from enum import Enum
from typing import TypeGuard

from orchestrator.testing.model.prefill_rooms import LIVE
from orchestrator.testing.model.state import (
    DecodeRoom,
    DecodeSide,
    Destination,
    PrefillRoom,
    PrefillSide,
    Tombstone,
    Wire,
    Writes,
)
from orchestrator.testing.model.system import State, System
from protocols.leases import UnitState
from protocols.machines import DecodeState, PrefillState
from protocols.machines import RolloverState as Rolling


class Properties:
    """Of one system; what was found about equal parts is remembered."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._safe: dict[tuple[int, int], str] = {}
        self._pairs: dict[tuple[int, int, int, int, int], tuple[str, int]] = {}
        self._failed: dict[int, tuple[str, int]] = {}
        self._astray: dict[int, str] = {}

    def broken(self, state: State) -> str:
        """What does not hold; empty when all does."""
        system, bounds = self._system, self._system.bounds
        for side in state[system.at_prefill : system.at_wire]:
            text = self._astray.get(side)
            if text is None:
                text = self._astray[side] = astray(system.prefills.values[side])
            if text:
                return text
        for d in range(bounds.decodes):
            at = (state[d], state[system.at_writes + d])
            text = self._safe.get(at)
            if text is None:
                text = self._safe[at] = unsafe(system.decodes.values[at[0]], system.writes.values[at[1]])
            if text:
                return text
            told = self._failed.get(state[d])
            if told is None:
                told = self._failed[state[d]] = told_apart(system.decodes.values[state[d]])
            text, quiet = told
            if text:
                return text
            for p in range(bounds.prefills):
                pair = (d, p, state[d], state[system.at_prefill + p], state[system.wire_at(d, p)])
                between = self._pairs.get(pair)
                if between is None:
                    between = self._pairs[pair] = self._between(*pair)
                if between[0]:
                    return between[0]
                quiet &= between[1]
            if quiet:
                gen = quiet.bit_length() - 1
                return f"C4: every prefill is quiet about gen {gen} of decode {d}, and its units are not free"
        return ""

    def _between(self, d: int, p: int, side_d: int, side_p: int, wire: int) -> tuple[str, int]:
        """What is owed between two sides, and about which generations (as bits) this prefill rank is quiet."""
        system = self._system
        dec, pre = system.decodes.values[side_d], system.prefills.values[side_p]
        settled = system.wires.values[wire] == Wire() and system.linked(d, p, side_d, side_p)[0]
        text = owed(d, p, dec, pre) if settled else ""
        return text, sum(1 << gen for gen in range(1, len(dec.rooms) + 1) if is_quiet(d, p, gen, dec, pre, settled))

    def unentered(self) -> str:
        """A state of a table that no room ever stood in, though nothing in the bounds keeps it from that."""
        system = self._system
        stood: set[Enum] = {room.state for side in system.prefills.values for room in side.rooms if _is_live(room)}
        stood |= {room.state for side in system.decodes.values for room in side.rooms if room is not None}
        stood |= {side.rollover.state for side in system.decodes.values}
        wanted: set[Enum] = {*LIVE, PrefillState.DRAINING, *DecodeState, *Rolling}
        wanted -= {DecodeState.COMMITTED, DecodeState.FAILED}  # ends: the room is gone in the same step
        if system.bounds.patient:
            wanted -= {DecodeState.QUARANTINED}
        else:
            wanted |= {PrefillState.LINGERING}
        missing = sorted(f"{type(state).__name__}.{state.name}" for state in wanted - stood)
        return f"nothing ever stands in {', '.join(missing)}" if missing else ""

    # -- ends ----------------------------------------------------------------------------------------------------

    def is_untouched(self, state: State, gen: int) -> bool:
        """Nobody has heard of this generation yet."""
        system = self._system
        return not any(system.decodes.values[side].history[gen - 1] for side in state[: system.at_prefill]) and not any(
            system.prefills.values[side].rooms[gen - 1] is not None or system.prefills.values[side].registered[gen - 1]
            for side in state[system.at_prefill : system.at_wire]
        )

    def has_succeeded(self, state: State, gen: int) -> bool:
        """On every side."""
        system = self._system
        rooms = [system.prefills.values[side].rooms[gen - 1] for side in state[system.at_prefill : system.at_wire]]
        return all(system.decodes.values[side].history[gen - 1] == "ok" for side in state[: system.at_prefill]) and all(
            isinstance(room, Tombstone) and room.outcome == "ok" for room in rooms
        )


def _is_live(room: PrefillRoom | Tombstone | None) -> TypeGuard[PrefillRoom]:
    return isinstance(room, PrefillRoom)


def unsafe(side: DecodeSide, writes: Writes) -> str:
    """V3: what may still be written is under the lease of the room that it is written for."""
    leased = {(lease.gen, page) for lease in side.leases for page in lease.pages}
    for write in sorted(writes):
        if write.reaches and (write.gen, write.page) not in leased:
            holder = [lease.gen for lease in side.leases if write.page in lease.pages]
            now = f"granted to gen {holder[0]}" if holder else "free"
            what = "a running write" if write.running else "a write that FAILED, or whose writer died,"
            return f"V3: page {write.page} is {now}, and {what} of prefill {write.rank} for gen {write.gen} may land"
    return ""


def astray(side: PrefillSide) -> str:
    """A live room is the only one of its id, and each of its destinations is on a link that stands."""
    live = [(n + 1, room) for n, room in enumerate(side.rooms) if isinstance(room, PrefillRoom) and not room.outcome]
    if len(live) > 1:
        return f"V4: gens {[gen for gen, _ in live]} of one room are live at a prefill"
    for gen, room in live:
        for link, destination in zip(side.links, room.destinations, strict=True):
            if destination is not None:
                if link is None or (link.peer, link.dial) != (destination.peer, destination.dial):
                    return f"C2: gen {gen} goes on at a prefill, and a decode of it is gone"
    return ""


def told_apart(side: DecodeSide) -> tuple[str, int]:
    """Room and lease must tell the same story. Also: the generations (as bits) whose failed lease is not free."""
    allowed = {
        DecodeState.OFFERED: {UnitState.LEASED},
        DecodeState.ABORTING: {UnitState.DRAINING, UnitState.IN_DOUBT},
        DecodeState.QUARANTINED: {UnitState.UNKNOWN, UnitState.IN_DOUBT},
    }
    live = [n + 1 for n, room in enumerate(side.rooms) if room is not None and room.outcome is None]
    if len(live) > 1:
        return f"V4: gens {live} of one room are live at a decode", 0
    for lease in side.leases:
        room = side.rooms[lease.gen - 1]
        if room is None:
            return f"C4: gen {lease.gen} is over and its units are leased", 0
        wrong = [f"page {page} {state.name}" for page, state in lease.by_page() if state not in allowed[room.state]]
        if wrong:
            return f"C4: gen {lease.gen} is {room.state.name}, and {', '.join(wrong)}", 0
    return "", sum(1 << lease.gen for lease in side.leases if lease.failed)


def is_quiet(d: int, p: int, gen: int, dec: DecodeSide, pre: PrefillSide, settled: bool) -> bool:
    """No write of this rank for that generation can land any more, and the decode has heard all there is to hear."""
    room, kept, near = dec.rooms[gen - 1], pre.rooms[gen - 1], dec.links[p]
    if room is None or room.outcome is None or room.state is DecodeState.OFFERED:
        return False
    if not room.ranks[p].dial:
        return True
    if not settled or near is None or room.ranks[p].dial != near.dial or not isinstance(kept, Tombstone):
        return False
    said = kept.said[d]
    return said is None or said.peer != dec.incarnation


def owed(d: int, p: int, dec: DecodeSide, pre: PrefillSide) -> str:
    """The pair is connected and nothing is in flight between them: nobody may be waiting for the other's word."""
    near, far = dec.links[p], pre.links[d]
    assert near is not None
    assert far is not None
    if far.session != dec.session:
        return f"N11: prefill {p} holds session {far.session} of decode {d} current, and it is {dec.session}"
    if dec.rollover.state is Rolling.FENCED and p in dec.rollover.awaited:
        if (d, dec.incarnation, near.dial, dec.rollover.old) not in pre.owed:
            return f"N11: decode {d} waits for a RolloverAck that prefill {p} does not owe"
    for n, room in enumerate(dec.rooms):
        kept = pre.rooms[n]
        mine = kept.destinations[d] if isinstance(kept, PrefillRoom) else None
        if mine is not None and (mine.peer, mine.dial) != (dec.incarnation, near.dial):
            mine = None
        text = ""
        if room is not None and room.ranks[p].dial == near.dial:
            text = _owed_to_live(p, room, kept, mine, dec, n + 1)
        elif room is None and isinstance(kept, PrefillRoom) and mine is not None and kept.state in LIVE:
            if dec.history[n] == "ok":
                text = "" if mine.committed else "C2: never hears that it was committed"
            elif dec.history[n] == "failed" and kept.outcome is None:
                text = "C1: never hears that the decode failed"
        if text:
            return f"{text} (gen {n + 1}, decode {d}, prefill {p})"
    return ""


def _owed_to_live(
    p: int,
    room: DecodeRoom,
    kept: PrefillRoom | Tombstone | None,
    mine: Destination | None,
    dec: DecodeSide,
    gen: int,
) -> str:
    """The decode has the room and has offered it to this rank."""
    live = isinstance(kept, PrefillRoom) and mine is not None and kept.state in LIVE
    if room.outcome is None:
        if not live:
            return "C3: the decode never hears that the prefill failed, or does not know it"
        if isinstance(kept, PrefillRoom) and kept.state is PrefillState.COMMITTING and room.ranks[p].covered is None:
            return "V4: the decode never hears Done"
        return ""
    if room.state is DecodeState.OFFERED:
        return ""  # a thread has aborted; the loop will carry it out
    if live and isinstance(kept, PrefillRoom) and kept.outcome is None:
        return "C1: the prefill never hears that the decode failed"
    lease = next((lease for lease in dec.leases if lease.gen == gen), None)
    if lease is None or p not in lease.waiting:
        return ""
    if not isinstance(kept, PrefillRoom):
        return "C2: the decode waits for an acknowledgement that never comes"
    if kept.state is PrefillState.LINGERING and p not in dict(lease.unknown):
        return "C2: the decode never hears what the prefill cannot tell yet"
    return ""
