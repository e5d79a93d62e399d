"""States that behave alike are one state: of each such family the explorer keeps one.

* What is over is forgotten: how a generation ended, once every side has ended it, but for the last one.
* Sessions are names: those that anybody still knows are counted from the first again.
* Ranks are names: see `symmetry`.
"""

from __future__ import annotations

from dataclasses import replace

from orchestrator.testing.model.state import DecodeRoom, DecodeSide, PrefillRoom, PrefillSide, Tombstone, Wire, Writes
from orchestrator.testing.model.symmetry import Mirror
from orchestrator.testing.model.system import State, System

Names = dict[int, int]


class Canonical:
    """Of one system; what is worked out about a part is remembered."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._mirror = Mirror(system)
        self._ended: dict[int, int] = {}
        self._forgotten: dict[tuple[int, int], int] = {}
        self._renamed: dict[tuple[str, int, int, int], int] = {}
        self._places = [self._parts(d) for d in range(system.bounds.decodes)]
        self._all: dict[int, int] = {}
        """By decode side: every session that there was so far, as bits."""

    def of(self, state: State) -> State:
        """The one that stands for all that behave like this one."""
        system = self._system
        over = -1
        for side in state[system.at_prefill : system.at_wire]:
            ended = self._ended.get(side)
            if ended is None:
                ended = self._ended[side] = _ended(system.prefills.values[side])
            over &= ended
        for d in range(system.bounds.decodes):
            if over:
                side = self._forget(state[d], over)
                if side != state[d]:
                    state = (*state[:d], side, *state[d + 1 :])
            sessions = self._all.get(state[d])
            if sessions is None:
                sessions = self._all[state[d]] = (1 << system.decodes.values[state[d]].sessions) - 1
            if sessions != 1:
                state = self._count_anew(state, d, sessions)
        return self._mirror.canonical(state)

    def _forget(self, side: int, over: int) -> int:
        known = self._forgotten.get((side, over))
        if known is None:
            value = self._system.decodes.values[side]
            last = len(value.history) - 1
            history = tuple(
                "over" if n != last and over >> n & 1 and how in ("ok", "failed", "lost") else how
                for n, how in enumerate(value.history)
            )
            known = side if history == value.history else self._system.decodes.number(replace(value, history=history))
            self._forgotten[side, over] = known
        return known

    # -- sessions ------------------------------------------------------------------------------------------------

    def _parts(self, d: int) -> list[tuple[str, int, dict[int, int]]]:
        """Where a session of this decode may be known: the kind of part, its place in the state, and by its number
        which sessions it knows, as bits."""
        system = self._system
        prefills = range(system.bounds.prefills)
        sides = [("decode", d), *(("prefill", system.at_prefill + p) for p in prefills)]
        places = [*sides, *(("wire", system.wire_at(d, p)) for p in prefills), ("writes", system.at_writes + d)]
        return [(kind, at, {}) for kind, at in places]

    def _count_anew(self, state: State, d: int, sessions: int) -> State:
        known = 0
        for kind, at, masks in self._places[d]:
            mask = masks.get(state[at])
            if mask is None:
                mask = masks[state[at]] = sum(1 << session for session in self._sessions(kind, state[at], d))
            known |= mask
        if known == sessions:
            return state
        after = list(state)
        for kind, at, _ in self._places[d]:
            renamed = self._renamed.get((kind, state[at], d, known))
            if renamed is None:
                still = [session for session in range(known.bit_length()) if known >> session & 1]
                names = {session: n for n, session in enumerate(still)}
                renamed = self._renamed[kind, state[at], d, known] = self._rename(kind, state[at], d, names)
            after[at] = renamed
        return tuple(after)

    def _sessions(self, kind: str, number: int, d: int) -> frozenset[int]:
        system = self._system
        match kind:
            case "decode":
                return _sessions_of_decode(system.decodes.values[number])
            case "prefill":
                return _sessions_of_prefill(system.prefills.values[number], d)
            case "wire":
                return _sessions_of_wire(system.wires.values[number])
        return frozenset(write.session for write in system.writes.values[number])

    def _rename(self, kind: str, number: int, d: int, names: Names) -> int:
        system = self._system
        match kind:
            case "decode":
                return system.decodes.number(_decode_renamed(system.decodes.values[number], names))
            case "prefill":
                return system.prefills.number(_prefill_renamed(system.prefills.values[number], d, names))
            case "wire":
                return system.wires.number(_wire_renamed(system.wires.values[number], names))
        return system.writes.number(_writes_renamed(system.writes.values[number], names))


def _ended(side: PrefillSide) -> int:
    """The generations that have ended here, as bits."""
    return sum(1 << n for n, room in enumerate(side.rooms) if isinstance(room, Tombstone))


NAMING = ("offer", "rollover", "rollover_ack")
"""Messages that name a session."""


def _sessions_of_decode(side: DecodeSide) -> frozenset[int]:
    rolling = side.rollover
    known = {side.session, *(lease.session for lease in side.leases), *rolling.held, *rolling.suspect, *side.gone}
    known |= {room.session for room in side.rooms if room is not None}
    known |= {session for link in side.links if link is not None for session in link.said}
    return frozenset(known if rolling.old is None else {*known, rolling.old})


def _sessions_of_prefill(side: PrefillSide, d: int) -> frozenset[int]:
    known = {session for decode, _, _, session in side.owed if decode == d}
    link = side.links[d]
    if link is not None:
        known.add(link.session)
    for room in side.rooms:
        named = room.destinations[d] if isinstance(room, PrefillRoom) else room.said[d] if room is not None else None
        if named is not None:
            known.add(named.session)
    return frozenset(known)


def _sessions_of_wire(wire: Wire) -> frozenset[int]:
    return frozenset(message.session for messages in wire for message in messages if message.kind in NAMING)


def _decode_renamed(side: DecodeSide, names: Names) -> DecodeSide:
    rolling = side.rollover
    return replace(
        side,
        session=names[side.session],
        sessions=len(names),
        links=tuple(link and replace(link, said=tuple(names[session] for session in link.said)) for link in side.links),
        rooms=tuple(_room_renamed(room, names) for room in side.rooms),
        leases=tuple(replace(lease, session=names[lease.session]) for lease in side.leases),
        rollover=replace(
            rolling,
            old=None if rolling.old is None else names[rolling.old],
            held=frozenset(names[session] for session in rolling.held),
            suspect=frozenset(names[session] for session in rolling.suspect),
        ),
        gone=frozenset(names[session] for session in side.gone),
    )


def _room_renamed(room: DecodeRoom | None, names: Names) -> DecodeRoom | None:
    return room and replace(room, session=names[room.session])


def _prefill_renamed(side: PrefillSide, d: int, names: Names) -> PrefillSide:
    rooms: list[PrefillRoom | Tombstone | None] = []
    for room in side.rooms:
        if isinstance(room, PrefillRoom):
            destinations = list(room.destinations)
            offered = destinations[d]
            if offered is not None:
                destinations[d] = replace(offered, session=names[offered.session])
            rooms.append(replace(room, destinations=tuple(destinations)))
        elif room is not None:
            all_said = list(room.said)
            said = all_said[d]
            if said is not None:
                all_said[d] = replace(said, session=names[said.session])
            rooms.append(replace(room, said=tuple(all_said)))
        else:
            rooms.append(None)
    link = side.links[d]
    return replace(
        side,
        links=(*side.links[:d], link and replace(link, session=names[link.session]), *side.links[d + 1 :]),
        rooms=tuple(rooms),
        owed=frozenset(
            (decode, peer, dial, names[session] if decode == d else session)
            for decode, peer, dial, session in side.owed
        ),
    )


def _wire_renamed(wire: Wire, names: Names) -> Wire:
    there, back = (
        tuple(
            message._replace(session=names[message.session]) if message.kind in NAMING else message
            for message in messages
        )
        for messages in wire
    )
    return Wire(there, back)


def _writes_renamed(writes: Writes, names: Names) -> Writes:
    return frozenset(write._replace(session=names[write.session]) for write in writes)
