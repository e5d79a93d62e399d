"""The engine sessions of decode peers: a lane for each, and what it means when one ends. Loop thread only."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from orchestrator.contacts import Contacts
from orchestrator.flow import Lane
from orchestrator.link import Link
from protocols.errors import TransferError
from protocols.ids import Incarnation, RoomKey, Session
from protocols.layout import pair_layouts
from protocols.messages import Rollover, RolloverAck

if TYPE_CHECKING:
    from orchestrator.prefill_room import PrefillRoom
    from orchestrator.sender import Sender


class Sessions:
    """See the module."""

    def __init__(self, sender: Sender, contacts: Contacts) -> None:
        self.lanes: dict[Session, Lane] = {}
        self._sender = sender
        self._contacts = contacts
        self._doubtful: dict[tuple[Incarnation, Session], set[RoomKey]] = {}
        """Ended rooms with units in doubt, by the destination that can fence them."""

    def lane(self, session: Session) -> Lane:
        """The one queue and window of this session."""
        lane = self.lanes.get(session)
        if lane is None:
            sender = self._sender
            lane = self.lanes[session] = Lane(
                session, sender.engine, sender.clock, sender.pacer.kick, sender.config.link_quantum_bytes
            )
        return lane

    def slowest(self, nbytes: float, blocks: float) -> float | None:
        """Seconds that so much takes, latency apart, on the slowest link that is known; None while none is."""
        known = [lane.model for lane in self.lanes.values() if lane.model.known]
        return max((model.costs().seconds(nbytes, blocks, 0) for model in known), default=None)

    def note_doubt(self, room: PrefillRoom) -> None:
        """An ended room left units in doubt: its verdict is remembered until they are fenced."""
        for peer, destination in room.destinations.items():
            if destination.in_doubt:
                self._doubtful.setdefault((peer, destination.session), set()).add(room.key)

    def on_rollover(self, link: Link, message: Rollover) -> None:
        """First: offers name the new session from now on; the old one's rooms may finish until the deadline. Second,
        with deadline 0: nothing more goes to the old session, and the peer hears when all its tasks are terminal."""
        old = Session(message.old_session)
        if message.deadline_ms:
            assert link.hello is not None, "a link carries messages only after Hello"
            pairs = pair_layouts(self._sender.layout, message.layout)
            link.hello = msgspec.structs.replace(link.hello, session=message.session, layout=message.layout)
            self._contacts.add(link.peer, link.hello, pairs)
            self._sender.clock.call_later(message.deadline_ms / 1000, lambda: self._end(link, old))
            return
        self._end(link, old)
        for key in self._doubtful.pop((link.peer, old), ()):
            self._sender.rooms.settle(key, bytes(link.peer))
        lane = self.lanes.pop(old, None)
        if lane is None:
            link.post(RolloverAck(session=old))
        else:
            lane.when_idle(lambda: link.post(RolloverAck(session=old)))

    def _end(self, link: Link, session: Session) -> None:
        for room in self._sender.rooms:
            destination = room.destinations.get(link.peer)
            if destination is not None and destination.session == session:
                room.fail(TransferError("the decode's engine was rolled over", session=session))
