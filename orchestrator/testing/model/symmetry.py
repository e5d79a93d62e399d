"""States that differ only in the names of ranks are one state.

Two prefill ranks change places together with the pages they write; two decode ranks change places as they are. Of a
state and its mirror image the explorer keeps the smaller one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

from orchestrator.testing.model.state import (
    DecodeRoom,
    DecodeSide,
    Destination,
    LeaseState,
    Message,
    Pages,
    PrefillRoom,
    PrefillSide,
    Rank,
    Tombstone,
    Wire,
    Writes,
)
from orchestrator.testing.model.system import Parts, State, System

T = TypeVar("T", bound=Hashable)


class Mirror:
    """Of one system; the image of each part is worked out once."""

    def __init__(self, system: System) -> None:
        self._system = system
        decodes, prefills = system.bounds.decodes, system.bounds.prefills
        self.exists = decodes + prefills == 3
        if decodes == 2:
            self._decode = _Images(system.decodes, _same)
            self._prefill = _Images(system.prefills, _decodes_swapped)
            self._wire = _Images(system.wires, _same)
            self._writes = _Images(system.writes, _same)
        else:
            self._decode = _Images(system.decodes, _decode_of_swapped)
            self._prefill = _Images(system.prefills, _prefill_of_swapped)
            self._wire = _Images(system.wires, _wire_of_swapped)
            self._writes = _Images(system.writes, _writes_of_swapped)

    def canonical(self, state: State) -> State:
        """The smaller one of the state and its mirror image."""
        if not self.exists:
            return state
        if self._system.bounds.decodes == 2:
            d0, d1, p, w0, w1, h0, h1 = state
            image: State = (d1, d0, self._prefill.of(p), w1, w0, h1, h0)
        else:
            d, p0, p1, w0, w1, h = state
            prefill, wire = self._prefill.of, self._wire.of
            image = (self._decode.of(d), prefill(p1), prefill(p0), wire(w1), wire(w0), self._writes.of(h))
        return min(state, image)


class _Images:
    """The number of the image of a part, by the part's number."""

    def __init__(self, parts: Parts[T], image: Callable[[T], T]) -> None:
        def find(number: int) -> int:
            return parts.number(image(parts.values[number]))

        self._known: dict[int, int] = {}
        self._find = find

    def of(self, number: int) -> int:
        try:
            return self._known[number]
        except KeyError:
            self._known[number] = found = self._find(number)
            return found


def _same(part: T) -> T:
    return part


# -- two decode ranks ------------------------------------------------------------------------------------------------


def _decodes_swapped(side: PrefillSide) -> PrefillSide:
    return replace(
        side,
        links=side.links[::-1],
        rooms=tuple(_room_of_swapped_decodes(room) for room in side.rooms),
        owed=frozenset((1 - decode, peer, dial, session) for decode, peer, dial, session in side.owed),
    )


def _room_of_swapped_decodes(room: PrefillRoom | Tombstone | None) -> PrefillRoom | Tombstone | None:
    if isinstance(room, PrefillRoom):
        return replace(room, destinations=room.destinations[::-1])
    return room and replace(room, said=room.said[::-1])


# -- two prefill ranks -----------------------------------------------------------------------------------------------


def _pages(pages: Pages) -> Pages:
    return tuple(sorted(1 - page for page in pages))


def _decode_of_swapped(side: DecodeSide) -> DecodeSide:
    awaited = frozenset(1 - rank for rank in side.rollover.awaited)
    return replace(
        side,
        links=side.links[::-1],
        dials=side.dials[::-1],
        rooms=tuple(room and _decode_room(room) for room in side.rooms),
        leases=tuple(_lease(lease) for lease in side.leases),
        rollover=replace(side.rollover, awaited=awaited),
    )


def _decode_room(room: DecodeRoom) -> DecodeRoom:
    ranks = [Rank(rank.dial, rank.covered and _pages(rank.covered)) for rank in reversed(room.ranks)]
    return replace(room, pages=_pages(room.pages), ranks=tuple(ranks))


def _lease(lease: LeaseState) -> LeaseState:
    return replace(
        lease,
        pages=_pages(lease.pages),
        states=lease.states[::-1],
        waiting=frozenset(1 - rank for rank in lease.waiting),
        unknown=tuple(sorted((1 - rank, _pages(pages)) for rank, pages in lease.unknown)),
    )


def _prefill_of_swapped(side: PrefillSide) -> PrefillSide:
    return replace(side, rooms=tuple(_room_of_swapped_prefills(room) for room in side.rooms))


def _room_of_swapped_prefills(room: PrefillRoom | Tombstone | None) -> PrefillRoom | Tombstone | None:
    if isinstance(room, PrefillRoom):
        return replace(room, destinations=tuple(d and _destination(d) for d in room.destinations))
    if room is None:
        return None
    said = tuple(said and replace(said, in_doubt=_pages(said.in_doubt)) for said in room.said)
    return replace(room, said=said)


def _destination(destination: Destination) -> Destination:
    blocks = tuple(sorted((1 - page, block) for page, block in destination.blocks))
    return replace(destination, pages=_pages(destination.pages), blocks=blocks)


def _message(message: Message) -> Message:
    return message._replace(pages=_pages(message.pages), in_doubt=_pages(message.in_doubt))


def _wire_of_swapped(wire: Wire) -> Wire:
    return Wire(tuple(map(_message, wire.to_prefill)), tuple(map(_message, wire.to_decode)))


def _writes_of_swapped(writes: Writes) -> Writes:
    return frozenset(write._replace(rank=1 - write.rank, page=1 - write.page) for write in writes)
