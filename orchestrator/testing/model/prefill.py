"""One prefill rank, second part: links, offers, sessions, and what may happen. What `orchestrator.sender`, `reception`
and `sessions` decide; see `prefill_rooms`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestrator.testing.model.bounds import Bounds, Violation
from orchestrator.testing.model.prefill_rooms import LIVE, PrefillRooms, with_item
from orchestrator.testing.model.state import (
    Destination,
    Event,
    Message,
    PrefillLink,
    PrefillRoom,
    PrefillSide,
    Tombstone,
)
from protocols.machines import PrefillEvent, PrefillState


def fresh(bounds: Bounds, incarnation: int = 0, before: PrefillSide | None = None) -> PrefillSide:
    """A prefill rank that has just started; after a crash nobody has said Hello yet."""
    link = PrefillLink(0, 1, 0) if before is None else None
    registered = (False,) * bounds.generations if before is None else before.registered
    broken = 0 if before is None else before.broken
    rooms = (None,) * bounds.generations
    return PrefillSide(incarnation, (link,) * bounds.decodes, rooms, registered, broken=broken)


class Prefill(PrefillRooms):
    """See the module."""

    # -- what may happen here ------------------------------------------------------------------------------------

    def choices(self) -> Iterator[Event]:
        """Events that need nobody else: the scheduler, the deadlines, the engine."""
        for gen in range(1, self.bounds.generations + 1):
            if not self.registered[gen - 1] and (gen in self.rooms or not self.bounds.late_registration):
                yield ("register", gen)
            if self.bounds.fake_rooms and not self.registered[gen - 1] and self._is_unoffered(gen):
                yield ("skip", gen)
            if self.bounds.early_abort and gen not in self.rooms and gen not in self.stones:
                yield ("abort early", gen)
        for gen, room in self.rooms.items():
            if room.outcome is None:
                yield ("fail", gen)
                if self.bounds.slow_abort:
                    yield ("call abort", gen)
            elif self.bounds.slow_abort and room.outcome == "failed" and room.state in LIVE:
                yield ("carry out abort", gen)
            if self._is_ready(room):
                yield ("ready", gen)
            if room.state is PrefillState.DRAINING and room.stopped and not self.bounds.patient:
                yield ("drain deadline", gen)
            for decode, destination in enumerate(room.destinations):
                if destination is None:
                    continue
                queued = destination.pages_in("queued")
                if queued and not room.stopped and room.outcome is None:  # a lane submits in order
                    yield ("submit", gen, decode, queued[0])
                for page in destination.pages_in("inflight"):
                    yield ("completed", gen, decode, page)
                    yield ("write failed", gen, decode, page)

    def take(self, event: Event) -> None:
        match event:
            case ("register", int(gen)):
                self.register(gen)
            case ("skip", int(gen)):
                self.skip(gen)
            case ("abort early", int(gen)):
                self.refuse(gen)
            case ("fail", int(gen)):
                self.fail(gen)
            case ("call abort", int(gen)):
                self._end_outcome(gen, "failed")
            case ("carry out abort", int(gen)):
                self.fail(gen)
            case ("ready", int(gen)):
                self._ready(gen)
            case ("submit", int(gen), int(decode), int(page)):
                self._set_block(gen, decode, page, "inflight")
                self._effect("submit", gen, decode, page)
            case ("completed", int(gen), int(decode), int(page)):
                self._effect("landed", gen, decode, page)
                self._set_block(gen, decode, page, "landed")
                self._handover_done(gen)
            case ("write failed", int(gen), int(decode), int(page)):
                self._effect("failed", gen, decode, page)
                self._set_block(gen, decode, page, "failed")
                self.fail(gen)
            case ("drain deadline", int(gen)):
                self._drain_expired(gen)
            case ("give up", int(decode)):
                self.broken += 1
                self.peer_gone(decode)
            case ("hello", int(decode), int(peer), int(dial), int(session)):
                self.on_hello(decode, PrefillLink(peer, dial, session))
            case ("receive", int(decode), Message() as message):
                self.on_message(decode, message)
            case _:
                raise AssertionError(event)

    # -- links ---------------------------------------------------------------------------------------------------

    def on_hello(self, decode: int, said: PrefillLink) -> None:
        """`Reception._on_hello`."""
        known = self.links[decode]
        if known is not None and known.peer == said.peer and said.dial <= known.dial:
            return
        if known is not None:
            self.peer_gone(decode)
        self.links[decode] = said

    def peer_gone(self, decode: int) -> None:
        link = self.links[decode]
        assert link is not None
        self.links[decode] = None  # first: what the rooms have to say to this peer must not try to reach it
        for gen in sorted(self.rooms):
            room = self.rooms.get(gen)
            destination = room.destinations[decode] if room is not None else None
            if destination is not None and (destination.peer, destination.dial) == (link.peer, link.dial):
                self.fail(gen)

    def on_message(self, decode: int, message: Message) -> None:
        match message.kind:
            case "offer":
                self._on_offer(decode, message)
            case "committed":
                self._on_committed(decode, message)
            case "abort":
                if not self._end_for(decode, message.gen):
                    self._post_ack(decode, message.gen)
            case "rollover":
                self.on_rollover(decode, message)

    # -- sender --------------------------------------------------------------------------------------------------

    def register(self, gen: int) -> None:
        self.registered[gen - 1] = True
        if self._is_current(gen) and (gen in self.rooms or self._new_room(gen)):
            if self.rooms[gen].outcome is None:
                self._update(gen, registered=True)

    def skip(self, gen: int) -> None:
        """A fake room's forward ended: it succeeds without a transfer."""
        self.register(gen)
        if gen in self.rooms and self._end_outcome(gen, "ok"):
            self._fire(gen, PrefillEvent.SKIP)

    def _is_unoffered(self, gen: int) -> bool:
        room = self.rooms.get(gen)
        return gen not in self.stones and (room is None or not any(room.destinations))

    def refuse(self, gen: int) -> None:
        """`Prefill._carry_out_abort` of a room that is not known."""
        if self._is_current(gen) and (gen in self.rooms or self._new_room(gen)):
            self.fail(gen)

    def _newest(self) -> int | None:
        return max(self.rooms, default=None)

    def _is_current(self, gen: int) -> bool:
        newest = self._newest()
        if newest is None or newest == gen:
            return True
        if newest > gen:
            if gen not in self.rooms and gen not in self.stones:
                self._bury(gen)
            return False
        self.fail(newest)  # superseded
        return True

    def _new_room(self, gen: int) -> bool:
        if gen in self.stones:
            return False
        self.rooms[gen] = PrefillRoom(PrefillState.WAITING, None, False, False, (None,) * self.bounds.decodes)
        return True

    def _bury(self, gen: int) -> None:
        self.stones[gen] = Tombstone("failed", (None,) * self.bounds.decodes)

    def _on_offer(self, decode: int, offer: Message) -> None:
        gen, link = offer.gen, self.links[decode]
        assert link is not None
        if gen in self.stones or offer.session != link.session:
            self._turn_away(decode, gen)
            return
        if not self._is_current(gen):
            self._turn_away(decode, gen)
            return
        room = self.rooms.get(gen)
        if room is not None and self._of(room, decode) is not None:
            raise Violation(f"two offers of decode {decode} for gen {gen}")
        if room is not None and self._is_complete(room):
            self._turn_away(decode, gen)
            return
        if room is None and not self._new_room(gen):
            self._turn_away(decode, gen)
            return
        if self.rooms[gen].outcome == "failed":
            self._turn_away(decode, gen)
            return
        destination = Destination(link.peer, link.dial, offer.session, offer.pages)
        self._update_destination(gen, decode, destination)

    def _turn_away(self, decode: int, gen: int) -> None:
        link = self.links[decode]
        assert link is not None
        self._post(decode, link.peer, link.dial, Message("abort", gen))
        self._post_ack(decode, gen)

    def _post_ack(self, decode: int, gen: int) -> None:
        """Nothing, unless it is remembered."""
        link = self.links[decode]
        assert link is not None
        stone = self.stones.get(gen)
        said = stone.said[decode] if stone is not None else None
        in_doubt = said.in_doubt if said is not None and said.peer == link.peer else ()
        self._post(decode, link.peer, link.dial, Message("ack", gen, in_doubt=in_doubt))

    def _on_committed(self, decode: int, message: Message) -> None:
        room = self.rooms.get(message.gen)
        if room is not None and self._of(room, decode) is not None:
            self.committed(message.gen, decode)

    def _end_for(self, decode: int, gen: int) -> bool:
        room = self.rooms.get(gen)
        if room is None:
            if gen not in self.stones:
                self._bury(gen)
            return False
        mine = self._of(room, decode) is not None
        if mine or not self._is_complete(room):
            self.fail(gen)
        return mine

    def _of(self, room: PrefillRoom, decode: int) -> Destination | None:
        """The destination of the incarnation that speaks, as `room.destinations.get(link.peer)`."""
        link, destination = self.links[decode], room.destinations[decode]
        return destination if link is not None and destination is not None and destination.peer == link.peer else None

    # -- sessions ------------------------------------------------------------------------------------------------

    def on_rollover(self, decode: int, message: Message) -> None:
        link = self.links[decode]
        assert link is not None
        if not message.last:  # its deadline for the old session is one of the causes of `fail`
            self.links[decode] = replace(link, session=message.session)
            return
        for gen in sorted(self.rooms):
            room = self.rooms.get(gen)
            destination = self._of(room, decode) if room is not None else None
            if destination is not None and destination.session == message.session:
                self.fail(gen)
        for gen, stone in self.stones.items():  # settled
            said = stone.said[decode]
            if said is not None and (said.peer, said.session) == (link.peer, message.session):
                self.stones[gen] = replace(stone, said=with_item(stone.said, decode, None))
        self.owed |= {(decode, link.peer, link.dial, message.session)}
