"""One decode rank, second part: links, rollovers, and what may happen. What `orchestrator.receiver`, `dialer` and
`rollover` decide; see `decode_rooms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations

from orchestrator.testing.model.bounds import Bounds, Violation
from orchestrator.testing.model.decode_rooms import DecodeRooms, key
from orchestrator.testing.model.state import DecodeLink, DecodeSide, Effect, Event, History, Message, RolloverSide
from protocols.errors import IllegalTransitionError
from protocols.leases import UnitState
from protocols.machines import ROLLOVER, Action, DecodeState, Machine, RolloverEvent
from protocols.machines import RolloverState as Rolling


def fresh(bounds: Bounds, incarnation: int = 0, before: DecodeSide | None = None) -> DecodeSide:
    """A decode rank that has just started: the first time every link is up, after a crash none is."""
    ranks, generations = bounds.prefills, bounds.generations
    nothing: History = ""
    if before is None:
        link = DecodeLink(1, True, 0)
        links: tuple[DecodeLink | None, ...] = (link,) * ranks
        return DecodeSide(incarnation, 0, links, (1,) * ranks, (None,) * generations, (nothing,) * generations, ())
    lost = tuple(_after_a_crash(known) for known in before.history)
    return replace(
        before,
        incarnation=incarnation,
        session=before.sessions,
        sessions=before.sessions + 1,
        links=(None,) * ranks,
        dials=(0,) * ranks,
        rooms=(None,) * generations,
        history=lost,
        leases=(),
        rollover=RolloverSide(),
        gone=frozenset(),
    )


def _after_a_crash(known: History) -> History:
    return "lost" if known == "live" else known


class Decode(DecodeRooms):
    """See the module."""

    # -- what may happen here ------------------------------------------------------------------------------------

    def choices(self) -> Iterator[Event]:
        """Events that need nobody else: the application, the deadlines, the engine, the operator."""
        unused = [gen for gen in range(1, self.bounds.generations + 1) if not self.history[gen - 1]]
        if unused:
            taken = {page for lease in self.before.leases for page in lease.pages}
            free = [page for page in range(self.bounds.pages) if page not in taken]
            for size in self.bounds.sizes[unused[0] - 1]:
                for pages in combinations(free, size):
                    yield ("expect", unused[0], pages)
                    if self.bounds.prefills == 1:  # pages that nobody uses are alike
                        break
        for gen, room in self.rooms.items():
            if room.outcome is None:
                yield ("fail", gen)
                if self.bounds.slow_abort:
                    yield ("call abort", gen)
            elif self.bounds.slow_abort and room.outcome == "failed" and room.state is DecodeState.OFFERED:
                yield ("carry out abort", gen)
            if room.ack_timer and room.state is DecodeState.ABORTING and not self.bounds.patient:
                yield ("ack deadline", gen)
        if self.roll.state is Rolling.IDLE:
            needed = any(UnitState.IN_DOUBT in lease.states for lease in self.before.leases)
            if needed or self.asked < self.bounds.rollovers:
                for session in (self.sessions, *(sorted(self.gone) if self.bounds.reuse_ports else ())):
                    yield ("roll over", session, needed)
        if self.roll.state is Rolling.ANNOUNCED:
            yield ("expire",)
        if self.roll.engine == "deleting":
            yield ("deleted",)

    def take(self, event: Event) -> None:
        match event:
            case ("expect", int(gen), pages):
                self.expect(gen, pages)
            case ("fail", int(gen)):
                self.fail(gen)
            case ("call abort", int(gen)):
                self._end_outcome(gen, "failed")
            case ("carry out abort", int(gen)):
                self.fail(gen)
            case ("ack deadline", int(gen)):
                self._ack_expired(gen)
            case ("roll over", int(session), bool(needed)):
                self.asked += not needed
                self.start_rollover(session)
            case ("expire",):
                self._fire_rollover(RolloverEvent.EXPIRE)
            case ("deleted",):
                self._closed_old()
            case ("give up", int(rank)):
                self.broken += 1
                self.peer_gone(rank, for_good=False)
            case ("refused", int(rank)):
                self.peer_gone(rank, for_good=False)
            case ("gone", int(rank)):
                self.peer_gone(rank, for_good=True)
            case ("up", int(rank), int(peer)):
                self.link_up(rank, peer)
            case ("receive", int(rank), Message() as message):
                if message.kind == "rollover_ack":
                    self._acked(rank, message.session)
                else:
                    self.on_message(rank, message)
            case _:
                raise AssertionError(event)

    # -- links ---------------------------------------------------------------------------------------------------

    def _dial(self, rank: int) -> None:
        self.dials[rank] += 1
        self.links[rank] = DecodeLink(self.dials[rank], False, -1, (self.session,))

    def link_up(self, rank: int, peer: int) -> None:
        """Welcome came: what waited for the link goes ahead."""
        link = self.links[rank]
        assert link is not None
        self.links[rank] = replace(link, up=True, peer=peer, said=())
        if set(link.said) != {self.session}:  # it may know the session that was rolled over meanwhile
            self._post(rank, link.dial, Message("rollover", session=self.session))
        for gen in sorted(self.rooms):
            self._up(gen, rank)

    def peer_gone(self, rank: int, *, for_good: bool) -> None:
        """`Receiver.peer_gone`: its rooms fail, what it was writing is in doubt. It may be alive and writing all the
        same, unless another process has taken its place."""
        link = self.links[rank]
        assert link is not None
        self.links[rank] = None
        if not for_good and self.bounds.reuse_ports:
            old = {self.roll.old} if self.roll.old is not None else set()
            self.roll = replace(self.roll, suspect=self.roll.suspect | {self.session} | old)
        self.roll = replace(self.roll, awaited=self.roll.awaited - {rank})
        self._check_acked()
        for gen in sorted(self.rooms):
            room = self.rooms.get(gen)
            if room is None or room.ranks[rank].dial != link.dial:
                continue
            self.fail(gen)
            if room.ranks[rank].covered is None:
                self.book.writer_gone(key(gen), rank)
                self.check_quiet(gen)

    # -- rollover ------------------------------------------------------------------------------------------------

    def start_rollover(self, session: int) -> None:
        self._next = session
        self._fire_rollover(RolloverEvent.START)

    def _room_ended_for_rollover(self) -> None:
        if self.roll.state is Rolling.ANNOUNCED and not self._rooms_of_old():
            self._fire_rollover(RolloverEvent.EXPIRE)

    def _rooms_of_old(self) -> list[int]:
        return [
            gen
            for gen, room in sorted(self.rooms.items())
            if room.session == self.roll.old and room.state is DecodeState.OFFERED
        ]

    def _fire_rollover(self, event: RolloverEvent) -> None:
        machine = Machine(ROLLOVER, self.roll.state)
        actions = machine.fire(event)
        self.roll = replace(self.roll, state=machine.state)
        for action in actions:
            match action:
                case Action.ANNOUNCE:
                    self._announce()
                case Action.DELETE:
                    self._delete()
                case Action.FENCE:
                    self._fence()
                case Action.RELEASE:
                    self._release()
                case _:
                    raise IllegalTransitionError("not an action of a rollover", action=action.name)

    def _announce(self) -> None:
        self.roll = replace(self.roll, old=self.session, engine="alive")
        self.session = self._next
        self.gone -= {self._next}
        self.sessions = max(self.sessions, self._next + 1)
        self.effects.append(Effect("listens", session=self.session))
        self._tell(Message("rollover", session=self.session))
        for rank, link in enumerate(self.links):  # those that still dial name it in their next Hello
            if link is not None and not link.up:
                self.links[rank] = replace(link, said=(*link.said, self.session))

    def _delete(self) -> None:
        if self.roll.old is None:
            raise Violation("an engine is deleted that is not the old one")
        self.roll = replace(self.roll, engine="deleting")
        for gen in self._rooms_of_old():
            self.fail(gen)

    def _closed_old(self) -> None:
        """`_close_old` came to its end: nothing can land through the old engine any more."""
        old = self.roll.old
        assert old is not None
        self.roll = replace(self.roll, engine="deleted")
        self.effects.append(Effect("deleted", session=old))
        self._fire_rollover(RolloverEvent.DELETED)

    def _fence(self) -> None:
        old = self.roll.old
        if old is None:
            raise Violation("a fence without an old engine")
        self.book.fence(self._name(old))
        for gen in sorted(self.rooms):
            self.check_quiet(gen)
        up = frozenset(rank for rank, link in enumerate(self.links) if link is not None and link.up)
        self.roll = replace(self.roll, awaited=up, held=self.roll.held | {old})
        self._tell(Message("rollover", session=old, last=True))
        self._check_acked()

    def _acked(self, rank: int, session: int) -> None:
        if self.roll.old == session:
            self.roll = replace(self.roll, awaited=self.roll.awaited - {rank})
            self._check_acked()

    def _check_acked(self) -> None:
        if self.roll.state is Rolling.FENCED and not self.roll.awaited:
            self._fire_rollover(RolloverEvent.ALL_ACKED)

    def _release(self) -> None:
        old = self.roll.old
        if old is not None:
            if self.bounds.reuse_ports and old not in self.roll.suspect:
                self.gone |= {old}
            self.roll = replace(self.roll, held=self.roll.held - {old})
        self.roll = replace(self.roll, old=None, engine="")

    def _tell(self, message: Message) -> None:
        for rank, link in enumerate(self.links):
            if link is not None and link.up:
                self._post(rank, link.dial, message)
