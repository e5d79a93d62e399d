"""Planted faults of a decode and of its lease book, each doing one thing wrong. See `faults`."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from orchestrator.testing.model.decode import Decode
from orchestrator.testing.model.decode_rooms import key
from orchestrator.testing.model.state import DecodeLink, Message
from protocols.ids import RoomKey, Session
from protocols.leases import Lease, LeaseBook, LeaseEvent, UnitSet
from protocols.machines import Action, DecodeState

# -- the lease book --------------------------------------------------------------------------------------------------


class FreedOnTimeout(LeaseBook):
    def expire(self, key: RoomKey) -> None:
        lease = self.get(key)
        if lease is not None:
            lease.waiting.clear()
            lease.unknown.clear()
            self._try_free(lease)


class FreedOnFirstAck(LeaseBook):
    def ack(self, key: RoomKey, writer: Hashable, unknown: UnitSet, in_doubt: UnitSet) -> bool:
        lease = self.get(key)
        if lease is not None:
            lease.waiting &= {writer}
        return super().ack(key, writer, unknown, in_doubt)


class UnknownIsQuiet(LeaseBook):
    def ack(self, key: RoomKey, writer: Hashable, unknown: UnitSet, in_doubt: UnitSet) -> bool:
        return super().ack(key, writer, UnitSet(), in_doubt)


class QuietOfOneUnit(LeaseBook):
    """What one writer cannot tell is free once another is quiet about it."""

    def _try_free(self, lease: Lease) -> bool:
        if not lease.waiting - set(lease.unknown):
            lease.unknown = {}
        return super()._try_free(lease)


class DoubtUnheard(LeaseBook):
    def ack(self, key: RoomKey, writer: Hashable, unknown: UnitSet, in_doubt: UnitSet) -> bool:
        return super().ack(key, writer, unknown, UnitSet())


class QuietThoughInDoubt(LeaseBook):
    def _try_free(self, lease: Lease) -> bool:
        if not lease.waiting:
            lease.fire(LeaseEvent.FENCE)
        return super()._try_free(lease)


class DeathIsAFence(LeaseBook):
    def writer_gone(self, key: RoomKey, writer: Hashable) -> None:
        lease = self.get(key)
        if lease is not None:
            lease.waiting.discard(writer)
            lease.unknown.pop(writer, None)
            self._try_free(lease)


class DeathIsSilence(LeaseBook):
    """A writer that is gone is waited for like one that is slow: its units never leave."""

    def writer_gone(self, key: RoomKey, writer: Hashable) -> None:
        return


class FenceAcrossSessions(LeaseBook):
    def fence(self, session: Session) -> list[RoomKey]:
        freed = super().fence(session)
        for other in {lease.session for lease in self.leases()}:
            freed += super().fence(other)
        return freed


class FenceOfTheLiving(LeaseBook):
    def fence(self, session: Session) -> list[RoomKey]:
        for lease in self.leases():
            self._fail(lease, "fenced")
            lease.session = session
        return super().fence(session)


class DoneOfOneIsDoneOfAll(LeaseBook):
    def done(self, key: RoomKey, writer: Hashable) -> bool:
        lease = self.get(key)
        if lease is not None:
            lease.waiting.clear()
        return super().done(key, writer)


# -- rooms -----------------------------------------------------------------------------------------------------------


class CommitsWithTheFirstDone(Decode):
    def on_done(self, gen: int, rank: int, message: Message) -> None:
        for other in self._ranks():
            if other != rank:
                self._update_rank(gen, other, covered=())
                self.book.done(key(gen), other)
        super().on_done(gen, rank, message._replace(pages=self.rooms[gen].pages))


class TellsOneRankOfAnAbort(Decode):
    def _perform(self, gen: int, action: Action) -> None:
        before = len(self.effects)
        super()._perform(gen, action)
        if action is Action.TELL_PEERS:
            del self.effects[before + 1 :]


class OffersAfterItFailed(Decode):
    """A failed room is offered all the same when a link comes up."""

    def _up(self, gen: int, rank: int) -> None:
        super()._up(gen, rank)
        room, link = self.rooms.get(gen), self.links[rank]
        if room is not None and link is not None and link.up and not room.ranks[rank].dial:
            self._post(rank, link.dial, Message("offer", gen, self.session, (0,)))
            if room.state is not DecodeState.OFFERED:
                self._update_rank(gen, rank, dial=link.dial)


# -- rollover --------------------------------------------------------------------------------------------------------


class MovesAnOfferedRoom(Decode):
    """A room whose first Offer named the old session is counted as one of the new engine."""

    def offer(self, gen: int, rank: int, link: DecodeLink) -> None:
        if self.rooms[gen].session != self.session:
            self._update(gen, session=self.session)
            self.book.move(key(gen), self._name(self.session))
        super().offer(gen, rank, link)


class FencesBeforeTheEnd(Decode):
    def _delete(self) -> None:
        super()._delete()
        assert self.roll.old is not None
        self.book.fence(self._name(self.roll.old))
        for gen in sorted(self.rooms):
            self.check_quiet(gen)


class LeavesRoomsInTheOldEngine(Decode):
    def _delete(self) -> None:
        self.roll = replace(self.roll, engine="deleting")


class ForgetsAbortedRooms(Decode):
    """A room that a thread has aborted counts as over at a rollover, before the loop has heard of it."""

    def _rooms_of_old(self) -> list[int]:
        return [gen for gen in super()._rooms_of_old() if self.rooms[gen].outcome is None]


class WelcomedUnderAnOldName(Decode):
    """A peer that heard Hello before a rollover and said Welcome after it is not told."""

    def link_up(self, rank: int, peer: int) -> None:
        link = self.links[rank]
        assert link is not None
        self.links[rank] = replace(link, said=(self.session,))
        super().link_up(rank, peer)


class ComparesTheFirstHello(Decode):
    def link_up(self, rank: int, peer: int) -> None:
        link = self.links[rank]
        assert link is not None
        self.links[rank] = replace(link, said=link.said[:1])
        super().link_up(rank, peer)


class TrustsThoseItGaveUp(Decode):
    """The ports of an old engine are released although a peer that was given up may still write to it."""

    def peer_gone(self, rank: int, *, for_good: bool) -> None:
        super().peer_gone(rank, for_good=True)


class AwaitsNobody(Decode):
    def _tell(self, message: Message) -> None:
        super()._tell(message)
        if message.last:
            self.roll = replace(self.roll, awaited=frozenset())


class OffersTheOldEngine(Decode):
    """A room goes on naming the session that it was expected with, though the engine was rolled over meanwhile."""

    def offer(self, gen: int, rank: int, link: DecodeLink) -> None:
        room = self.rooms[gen]
        self._update_rank(gen, rank, dial=link.dial)
        self._post(rank, link.dial, Message("offer", gen, room.session, room.pages))

    def _rooms_of_old(self) -> list[int]:
        return [gen for gen in super()._rooms_of_old() if any(rank.dial for rank in self.rooms[gen].ranks)]
