"""The engine sessions of decode peers: a lane for each, and what it means when one ends. Loop thread only."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import msgspec

from orchestrator.clock import Timer
from orchestrator.contacts import Contacts
from orchestrator.flow import Lane
from orchestrator.guests import Guests, check_session
from orchestrator.hello import refusal
from orchestrator.link import Link
from protocols.errors import RefusedError, TransferError
from protocols.ids import Incarnation, RoomKey, Session
from protocols.layout import pair_layouts
from protocols.messages import Rollover, RolloverAck

if TYPE_CHECKING:
    from orchestrator.destination import Destination
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
        self._ending: dict[Incarnation, tuple[Session, Timer]] = {}
        """By peer: the old session of a rollover, until its deadline. One a peer."""

    @property
    def _guests(self) -> Guests:
        return self._sender.reception.guests

    def lane(self, session: Session) -> Lane:
        """The one queue and window of this session."""
        lane = self.lanes.get(session)
        if lane is None:
            sender = self._sender
            lane = self.lanes[session] = Lane(
                session, sender.engine, sender.clock, sender.pacer, sender.config.link_quantum_bytes
            )
        return lane

    def slowest(self, nbytes: float, blocks: float) -> float | None:
        """Seconds that so much takes, latency apart, on the slowest link that is known; None while none is."""
        known = [lane.model for lane in self.lanes.values() if lane.model.known]
        return max((model.costs().seconds(nbytes, blocks, 0) for model in known), default=None)

    def submission(self) -> float:
        """Seconds that a submission keeps the loop, of late, where it does so longest."""
        return max((lane.submission_s for lane in self.lanes.values()), default=0.0)

    def note_doubt(self, room: PrefillRoom) -> bool:
        """An ended room left units in doubt: its verdict is remembered until they are fenced, or until the peer that
        could ask is gone. True if it must be."""
        doubtful = False
        for peer, destination in room.destinations.items():
            if destination.in_doubt and not destination.fenced and not destination.link.closed:
                self._doubtful.setdefault((peer, destination.session), set()).add(room.key)
                doubtful = True
        return doubtful

    def _settle(self, peer: Incarnation, session: Session) -> None:
        for key in self._doubtful.pop((peer, session), ()):
            self._sender.rooms.settle(key, bytes(peer))

    def on_rollover(self, link: Link, message: Rollover) -> None:
        """First: offers name the new session from now on; the old one's rooms may finish until the deadline. Second,
        with deadline 0: nothing more goes to the old session, and the peer hears when all its tasks are terminal."""
        old = Session(message.old_session)
        if message.deadline_ms:
            try:
                self._begin(link, old, message)
            except RefusedError as exc:  # it would offer under a session that we do not write to: let it dial anew
                link.send(refusal(exc))
                self._sender.peer_gone(link, f"its rollover was refused: {exc.what}")
            return
        self._end(link, old)
        self._settle(link.peer, old)
        for _, destination in self._users(link, old):
            destination.fenced = True
        if not self._guests.owns(old, link.peer):  # the lane of a session that is another worker's goes on
            link.post(RolloverAck(session=old))
            return
        lane = self.lanes.pop(old, None)
        if lane is None:
            self._leave(link, old)
        else:
            lane.when_idle(lambda: self._leave(link, old))

    def _leave(self, link: Link, old: Session) -> None:
        self._sender.start_task(self._disconnect(link, old))

    async def _disconnect(self, link: Link, old: Session) -> None:
        """The peer hears that we are done with the session when not even a connection to it is left."""
        await self._sender.engine.disconnect(old)
        link.post(RolloverAck(session=old))

    def _begin(self, link: Link, old: Session, message: Rollover) -> None:
        """Raises RefusedError for a session that another worker has, or had, so that late writes of its rooms may still
        arrive, and for what Hello would refuse."""
        assert link.hello is not None, "a link carries messages only after Hello"
        check_session(message.session, link.origin)
        if self._guests.user(message.session) not in (None, link.peer):
            raise RefusedError("the new session is, or was, another decode worker's", session=message.session)
        pairs = pair_layouts(self._sender.layout, message.layout)
        self._expire(link)  # at most two engines are alive: the one before is gone
        self._guests.release(link)
        self._guests.take_over(message.session, link.peer, link.origin)
        link.hello = msgspec.structs.replace(link.hello, session=message.session, layout=message.layout)
        self._contacts.add(link.peer, link.hello, pairs, link.origin.name)
        timer = self._sender.clock.call_later(message.deadline_ms / 1000, lambda: self._expire(link))
        self._ending[link.peer] = old, timer

    def _expire(self, link: Link) -> None:
        """The deadline of a rollover: rooms of the old session end."""
        old, timer = self._ending.pop(link.peer, (None, None))
        if old is not None and timer is not None:
            timer.cancel()
            self._end(link, old)

    def forget(self, link: Link) -> None:
        """The peer is gone: so are its timer and, once nothing is in flight, its lanes and its engine's connections."""
        _, timer = self._ending.pop(link.peer, (None, None))
        if timer is not None:
            timer.cancel()
        for peer, doubted in list(self._doubtful):
            if peer == link.peer:  # a peer that loses its link holds what it offered for in doubt without being told
                self._settle(peer, doubted)
        mine = {session for session in self.lanes if self._guests.owns(session, link.peer)}
        if link.hello is not None and self._guests.owns_session_of(link):
            mine.add(Session(link.hello.session))
        for session in sorted(mine):
            lane = self.lanes.get(session)
            if lane is None:
                self._drop_soon(session)
            else:
                lane.when_idle(partial(self._drop_soon, session))

    def _drop_soon(self, session: Session) -> None:
        """Not at once: its worker may be dialling anew just now."""
        self._sender.loop.call_soon(self._drop, session)

    def _drop(self, session: Session) -> None:
        sender, lane = self._sender, self.lanes.get(session)
        in_use = any(
            link.hello is not None and link.hello.session == session for link in sender.reception.links.values()
        )
        if not in_use and sender.stopping is None and (lane is None or lane.idle):
            self.lanes.pop(session, None)
            sender.start_task(sender.engine.disconnect(session))

    def _end(self, link: Link, session: Session) -> None:
        for room, _ in self._users(link, session):
            room.fail(TransferError("the decode's engine was rolled over", session=session))

    def _users(self, link: Link, session: Session) -> list[tuple[PrefillRoom, Destination]]:
        """Rooms that write, or wrote, to this session of the peer."""
        pairs = [(room, room.destinations.get(link.peer)) for room in self._sender.rooms]
        return [(room, d) for room, d in pairs if d is not None and d.session == session]
