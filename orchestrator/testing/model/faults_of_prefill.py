"""Planted faults of a prefill rank, and of a restart, each doing one thing wrong. See `faults`."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.testing.model.prefill import Prefill
from orchestrator.testing.model.state import Destination, Event, Message, PrefillLink
from orchestrator.testing.model.system import Move, System
from protocols.machines import Action, PrefillEvent, PrefillState


class DoneBeforeItLanded(Prefill):
    def take(self, event: Event) -> None:
        super().take(event)
        for gen, room in sorted(self.rooms.items()):
            left = [d.pages_in("queued", "failed") for d in room.destinations if d is not None]
            if room.state is PrefillState.SENDING and room.outcome is None and not any(left):
                self._fire(gen, PrefillEvent.LANDED)

    def _message(self, action: Action, gen: int, destination: Destination) -> Message:
        if action is Action.SEND_DONE:
            return Message("done", gen, pages=destination.pages_in("landed", "inflight"))
        return super()._message(action, gen, destination)


class SucceedsWithDone(Prefill):
    def _check_landed(self, gen: int) -> None:
        super()._check_landed(gen)
        for decode in range(self.bounds.decodes):
            if gen in self.rooms and self.rooms[gen].state is PrefillState.COMMITTING:
                self.committed(gen, decode)


class SucceedsWithTheFirstCommitted(Prefill):
    def committed(self, gen: int, decode: int) -> None:
        all_of_them = tuple(d and replace(d, committed=True) for d in self.rooms[gen].destinations)
        self._update(gen, destinations=all_of_them)
        super().committed(gen, decode)


class SourceFreeOnCancel(Prefill):
    """A failed room ends at once, whatever still runs."""

    def _check_drained(self, gen: int) -> None:
        if self.rooms[gen].state is PrefillState.DRAINING:
            self._fire(gen, PrefillEvent.DRAINED)


class QuietWhileItRuns(Prefill):
    def _message(self, action: Action, gen: int, destination: Destination) -> Message:
        message = super()._message(action, gen, destination)
        return message._replace(pages=()) if action is Action.ACK else message


class QuietThoughItFailed(Prefill):
    def _message(self, action: Action, gen: int, destination: Destination) -> Message:
        return super()._message(action, gen, destination)._replace(in_doubt=())


class HonoursALateOffer(Prefill):
    """An Offer is taken, and written to, whatever session it names."""

    def _on_offer(self, decode: int, offer: Message) -> None:
        link = self.links[decode]
        assert link is not None
        self.links[decode] = replace(link, session=offer.session)
        super()._on_offer(decode, offer)
        self.links[decode] = link

    def _ready(self, gen: int) -> None:
        links = list(self.links)
        for decode, destination in enumerate(self.rooms[gen].destinations):
            link = links[decode]
            if destination is not None and link is not None:
                self.links[decode] = replace(link, session=destination.session)
        super()._ready(gen)
        self.links = links


class AcknowledgesARolloverAtOnce(Prefill):
    def _is_busy(self, decode: int, session: int) -> bool:
        return False


class KeepsRoomsOfTheGone(Prefill):
    """A newer Hello takes the link, and the rooms of the older one go on."""

    def on_hello(self, decode: int, said: PrefillLink) -> None:
        known = self.links[decode]
        if known is None or known.peer != said.peer or said.dial > known.dial:
            self.links[decode] = said


class DrainedBeforeItIsToldWhy(Prefill):
    """The acknowledgement overtakes the reason."""

    def _stop(self, gen: int) -> None:
        super()._stop(gen)
        self._acting = False
        self._check_drained(gen)


class TakesEveryGeneration(Prefill):
    """A lower generation is taken although a higher one is live, and a higher one leaves the lower one alone."""

    def _is_current(self, gen: int) -> bool:
        return True


class RestartsUnnoticed(System):
    """A restarted prefill answers for the one before: its Abort is acknowledged by somebody who knows of nothing."""

    def _restarted(self, move: Move, at: int, side: int) -> None:
        super()._restarted(move, at, side)
        if at >= self.at_prefill:
            before, after = self.prefills.values[side], self.prefills.values[move.side]
            links, incarnation = before.links, before.incarnation
            move.side = self.prefills.number(replace(after, links=links, incarnation=incarnation))
