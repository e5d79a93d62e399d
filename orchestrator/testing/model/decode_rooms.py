"""One decode rank, first part: its rooms and leases. What `orchestrator.decode_room` and the books decide.

A side is thawed from a state, takes one event and is frozen again. The method names are those of the shells, so that
both can be read side by side; the tables and the lease book are the service's own objects.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from orchestrator.testing.model.bounds import Bounds, Violation
from orchestrator.testing.model.state import (
    DecodeLink,
    DecodeRoom,
    DecodeSide,
    Effect,
    LeaseState,
    Message,
    Pages,
    Rank,
)
from protocols.errors import BusyError, IllegalTransitionError
from protocols.ids import RoomKey, Session
from protocols.leases import LeaseBook, UnitSet, UnitState
from protocols.machines import DECODE_ROOM, Action, DecodeEvent, DecodeState, Machine


def units(pages: Pages) -> UnitSet:
    return UnitSet(np.array(pages, np.int64))


def key(gen: int) -> RoomKey:
    return RoomKey(0, gen)


class DecodeRooms(ABC):
    """See the module. `decode.Decode` adds links, rollovers and what may happen."""

    book_type: type[LeaseBook] = LeaseBook

    def __init__(self, bounds: Bounds, side: DecodeSide) -> None:
        self.bounds = bounds
        self.before = side
        self.session = side.session
        self.sessions = side.sessions
        self.links: list[DecodeLink | None] = list(side.links)
        self.dials = list(side.dials)
        self.rooms: dict[int, DecodeRoom] = {n + 1: room for n, room in enumerate(side.rooms) if room is not None}
        self.history = list(side.history)
        self.roll = side.rollover
        self.gone = side.gone
        self.asked = side.asked
        self.broken = side.broken
        self.effects: list[Effect] = []
        self.book = self.book_type({"page": bounds.pages})
        for each in side.leases:
            lease = self.book.grant(key(each.gen), self._name(each.session), units(each.pages), self._ranks(), 0.0)
            lease.states["page"] = np.array(each.states, np.uint8)
            lease.waiting = set(each.waiting)
            lease.unknown = {rank: units(pages) for rank, pages in each.unknown}
            lease.why = "failed" if each.failed else ""
            lease.quarantined = lease.count(UnitState.UNKNOWN) + lease.count(UnitState.IN_DOUBT)

    def freeze(self) -> DecodeSide:
        leases = []
        for lease in self.book.leases():
            pages = [int(page) for page in lease.units.pages]
            states = [UnitState(int(state)) for state in lease.states["page"]]
            order = sorted(zip(pages, states, strict=True))
            unknown = {
                int(str(rank)): tuple(sorted(set(map(int, said.pages)) & set(pages)))
                for rank, said in lease.unknown.items()
            }
            leases.append(
                LeaseState(
                    lease.key.gen,
                    int(lease.session),
                    tuple(page for page, _ in order),
                    tuple(state for _, state in order),
                    frozenset(int(str(rank)) for rank in lease.waiting),
                    tuple(sorted(unknown.items())),
                    bool(lease.why),
                )
            )
        frozen = replace(
            self.before,
            session=self.session,
            sessions=self.sessions,
            links=tuple(self.links),
            dials=tuple(self.dials),
            rooms=tuple(_forgetful(self.rooms.get(n + 1)) for n in range(self.bounds.generations)),
            history=tuple(self.history),
            leases=tuple(sorted(leases, key=lambda lease: lease.gen)),
            rollover=self.roll,
            gone=self.gone,
            asked=self.asked,
            broken=self.broken,
        )
        self._check_doubt(frozen)
        return frozen

    def _check_doubt(self, after: DecodeSide) -> None:
        """V5: a unit in doubt stays so until the engine of its session is deleted."""
        now = {(lease.gen, page): state for lease in after.leases for page, state in lease.by_page()}
        for lease in self.before.leases:
            for page, state in lease.by_page():
                if state is UnitState.IN_DOUBT and now.get((lease.gen, page)) is not UnitState.IN_DOUBT:
                    if (self.roll.old, self.roll.engine) != (lease.session, "deleted") and not any(
                        effect.kind == "deleted" and effect.session == lease.session for effect in self.effects
                    ):
                        raise Violation(f"V5: page {page} of gen {lease.gen} left doubt without a fence of its session")

    def _ranks(self) -> range:
        return range(self.bounds.prefills)

    def _name(self, session: int) -> Session:
        return Session(str(session))

    def _post(self, rank: int, dial: int, message: Message) -> None:
        """On the link of that dial, if it is still there."""
        link = self.links[rank]
        if link is not None and link.up and link.dial == dial:
            self.effects.append(Effect("post", rank, message))

    @abstractmethod
    def _dial(self, rank: int) -> None:
        """Begin a link to this prefill rank."""

    @abstractmethod
    def _room_ended_for_rollover(self) -> None:
        """A room is over: a rollover may wait for it."""

    # -- rooms ---------------------------------------------------------------------------------------------------

    def expect(self, gen: int, pages: Pages) -> None:
        if self.rooms:
            self.fail(max(self.rooms))  # superseded
        nobody = (Rank(),) * self.bounds.prefills
        self.rooms[gen] = DecodeRoom(DecodeState.OFFERED, None, self.session, pages, nobody)
        self.history[gen - 1] = "live"
        try:
            self.book.grant(key(gen), self._name(self.session), units(pages), self._ranks(), 0.0)
        except BusyError:
            self.fail(gen)
            return
        for rank in self._ranks():
            if self.links[rank] is None:
                self._dial(rank)
            self._up(gen, rank)

    def _up(self, gen: int, rank: int) -> None:
        room, link = self.rooms.get(gen), self.links[rank]
        if room is not None and room.outcome != "failed" and link is not None and link.up and not room.ranks[rank].dial:
            self.offer(gen, rank, link)

    def offer(self, gen: int, rank: int, link: DecodeLink) -> None:
        room = self.rooms[gen]
        if room.session != self.session:
            if any(other.dial for other in room.ranks):
                self.fail(gen)
                return
            room = self._update(gen, session=self.session)
            self.book.move(key(gen), self._name(self.session))
        self._update_rank(gen, rank, dial=link.dial)
        self._post(rank, link.dial, Message("offer", gen, self.session, room.pages))

    def _update(self, gen: int, **fields: Any) -> DecodeRoom:
        self.rooms[gen] = replace(self.rooms[gen], **fields)
        return self.rooms[gen]

    def _update_rank(self, gen: int, rank: int, **fields: Any) -> None:
        ranks = list(self.rooms[gen].ranks)
        ranks[rank] = replace(ranks[rank], **fields)
        self._update(gen, ranks=tuple(ranks))

    def _end_outcome(self, gen: int, outcome: Literal["ok", "failed"]) -> bool:
        """`Outcome.succeed` and `fail`: true if this ended the room."""
        if self.rooms[gen].outcome is not None:
            return False
        self._update(gen, outcome=outcome)
        self.history[gen - 1] = outcome
        return True

    def on_message(self, rank: int, message: Message) -> None:
        link = self.links[rank]
        assert link is not None
        gen = message.gen
        room = self.rooms.get(gen)
        if room is None or room.ranks[rank].dial != link.dial:
            return  # late
        match message.kind:
            case "done":
                self.on_done(gen, rank, message)
            case "abort":
                self.fail(gen)
            case "ack":
                self.on_abort_ack(gen, rank, message)

    def on_done(self, gen: int, rank: int, message: Message) -> None:
        if self.rooms[gen].ranks[rank].covered is not None:
            return
        self._update_rank(gen, rank, covered=message.pages)
        self.book.done(key(gen), rank)
        if self.rooms[gen].outcome == "failed":
            self.check_quiet(gen)
        elif all(other.covered is not None for other in self.rooms[gen].ranks):
            self._commit(gen)

    def _commit(self, gen: int) -> None:
        room = self.rooms[gen]
        covered = [page for rank in room.ranks for page in rank.covered or ()]
        if sorted(covered) != sorted(room.pages):
            self.fail(gen)
        elif self._end_outcome(gen, "ok"):
            self._fire(gen, DecodeEvent.COVERED)
        else:
            self.fail(gen)

    def on_abort_ack(self, gen: int, rank: int, message: Message) -> None:
        if self.rooms[gen].outcome is None:
            raise Violation(f"C3: prefill {rank} acknowledged an abort before it said why gen {gen} failed")
        self.book.ack(key(gen), rank, units(message.pages), units(message.in_doubt))
        self.check_quiet(gen)

    def fail(self, gen: int) -> None:
        self._end_outcome(gen, "failed")
        room = self.rooms[gen]
        machine = Machine(DECODE_ROOM, room.state)
        if room.outcome != "failed" or not machine.accepts(DecodeEvent.FAIL):
            return
        self._fire(gen, DecodeEvent.FAIL)
        if room.state is DecodeState.OFFERED and gen in self.rooms:
            self._room_ended_for_rollover()
            self.book.fail(key(gen), "failed")
            for rank in self._ranks():
                if not room.ranks[rank].dial:
                    self.book.ack(key(gen), rank, UnitSet(), UnitSet())
            self.check_quiet(gen)

    def check_quiet(self, gen: int) -> None:
        room = self.rooms.get(gen)
        if room is None or room.outcome != "failed" or self.book.get(key(gen)) is not None:
            return
        if Machine(DECODE_ROOM, room.state).accepts(DecodeEvent.QUIET):
            self._fire(gen, DecodeEvent.QUIET)

    def _ack_expired(self, gen: int) -> None:
        if Machine(DECODE_ROOM, self.rooms[gen].state).accepts(DecodeEvent.ACK_DEADLINE):
            self._fire(gen, DecodeEvent.ACK_DEADLINE)
            self.book.expire(key(gen))

    def _fire(self, gen: int, event: DecodeEvent) -> None:
        machine = Machine(DECODE_ROOM, self.rooms[gen].state)
        actions = machine.fire(event)
        self._update(gen, state=machine.state)
        for action in actions:
            self._perform(gen, action)

    def _perform(self, gen: int, action: Action) -> None:
        room = self.rooms.get(gen)
        if room is None:
            raise Violation(f"{action.name} of gen {gen}, which has ended")
        match action:
            case Action.SEND_COMMITTED:
                self.book.commit(key(gen))
                for n, rank in enumerate(room.ranks):
                    self._post(n, rank.dial, Message("committed", gen))
            case Action.TELL_PEERS:
                self._update(gen, ack_timer=True)
                for n, rank in enumerate(room.ranks):
                    self._post(n, rank.dial, Message("abort", gen))
            case Action.END:
                self._end(gen)
            case _:
                raise IllegalTransitionError("a decode room does not send", action=action.name)

    def _end(self, gen: int) -> None:
        room = self.rooms[gen]
        if room.outcome != {DecodeState.COMMITTED: "ok", DecodeState.FAILED: "failed"}.get(room.state):
            raise Violation(f"V4: gen {gen} ends as {room.state.name}, its outcome is {room.outcome or 'open'}")
        if self.book.get(key(gen)) is not None:
            raise Violation(f"C4: gen {gen} ended and its units are still leased")
        del self.rooms[gen]
        self._room_ended_for_rollover()


def _forgetful(room: DecodeRoom | None) -> DecodeRoom | None:
    """Without what no step asks for any more."""
    if room is None or room.outcome != "failed" or room.state is DecodeState.OFFERED:
        return room
    return replace(room, pages=(), ranks=tuple(Rank(rank.dial) for rank in room.ranks))
