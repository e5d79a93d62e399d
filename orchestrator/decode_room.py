"""One room on the decode side: its lease, the ranks it was offered to, and what they said. Loop thread only.

The shell around `protocols.machines.DECODE_ROOM` and `protocols.leases`: every event is fired in one place (`_fire`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.clock import Timer
from orchestrator.digest import check_digests
from orchestrator.link import Link
from orchestrator.outcome import Outcome
from orchestrator.trace import TransferResult, difference
from protocols.blocks import Ints
from protocols.codec import pack_indices, unpack_indices
from protocols.coverage import Expected
from protocols.errors import DeadlineError, IllegalTransitionError, KvferryError, MismatchError, TransferError
from protocols.ids import Incarnation
from protocols.leases import UnitSet
from protocols.machines import DECODE_ROOM, Action, DecodeEvent, DecodeState, Machine
from protocols.messages import FOREVER_MS, Abort, AbortAck, Committed, Done, Offer, Units

if TYPE_CHECKING:
    from orchestrator.receiver import Receiver


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """What a decode rank expects: the units of one room and the prefill ranks that will write them."""

    peers: tuple[str, ...]
    dummy_peers: tuple[str, ...]
    """Ranks that must know of the room but send no data (replicated MLA with fewer decode ranks)."""
    pages: Ints
    prefix_tokens: int
    total_tokens: int
    aux_slot: int | None
    state_rows: Ints
    destinations: int

    @property
    def units(self) -> UnitSet:
        aux = np.array([] if self.aux_slot is None else [self.aux_slot], np.int64)
        return UnitSet(self.pages, aux, self.state_rows)


@dataclass(slots=True)
class Rank:
    """One prefill rank of the room."""

    address: str
    dummy: bool
    link: Link | None = None
    offered_to: Incarnation | None = None
    """The incarnation the Offer went to: quiet counts from it alone."""
    done: Done | None = None


class DecodeRoom:
    """See the module."""

    def __init__(self, outcome: Outcome, expectation: Expectation, receiver: Receiver) -> None:
        self.key = outcome.key
        self.outcome = outcome
        self.session = receiver.session
        """The engine session its Offers name, for life."""
        self.expectation = expectation
        self.receiver = receiver
        self.machine = Machine(DECODE_ROOM, DecodeState.OFFERED)
        self.ranks = [Rank(address, False) for address in expectation.peers]
        self.ranks += [Rank(address, True) for address in expectation.dummy_peers]
        self.stamps: dict[str, float] = {"known": receiver.clock.now()}
        self.bytes = 0
        self.blocks = 0
        self._timeout = min(receiver.config.waiting_timeout_s, receiver.config.room_timeout_s)
        self._deadline: Timer | None = receiver.clock.call_later(self._timeout, self._expired)
        self._ack_deadline: Timer | None = None

    def __repr__(self) -> str:
        done = sum(rank.done is not None for rank in self.ranks)
        return f"<DecodeRoom {self.key} {self.machine.state.name} done={done}/{len(self.ranks)}>"

    # -- start ---------------------------------------------------------------------------------------------------

    def lease(self) -> None:
        """Lease the units. Raises BusyError or MismatchError with nothing changed."""
        writers = [rank.address for rank in self.ranks]
        self.receiver.book.grant(self.key, self.session, self.expectation.units, writers, self.receiver.clock.now())

    def offer(self, rank: Rank, link: Link) -> None:
        """The rank's link is up: offer it the units. A room that was rolled over before its first Offer follows."""
        if self.session != self.receiver.session:
            if any(other.offered_to is not None for other in self.ranks):
                self.fail(TransferError("the decode's engine was rolled over", session=self.session))
                return
            self.session = self.receiver.session
            self.receiver.book.move(self.key, self.session)
        rank.link = link
        rank.offered_to = link.peer
        expectation = self.expectation
        link.open_room(self.key)
        deadline_ms = min(int(self._timeout * 1000), FOREVER_MS)
        link.post(
            Offer(
                room=self.key.room,
                gen=self.key.gen,
                session=self.session,
                pages=b"" if rank.dummy else pack_indices(expectation.pages),
                prefix_tokens=expectation.prefix_tokens,
                total_tokens=expectation.total_tokens,
                aux_slot=None if rank.dummy else expectation.aux_slot,
                state_rows=b"" if rank.dummy else pack_indices(expectation.state_rows),
                destinations=expectation.destinations,
                deadline_ms=deadline_ms,
                dummy=rank.dummy,
            )
        )
        self.stamps.setdefault("offered", self.receiver.clock.now())
        self.outcome.transferring()

    def rank_of(self, link: Link) -> Rank | None:
        return next((rank for rank in self.ranks if rank.link is link), None)

    # -- what the ranks say --------------------------------------------------------------------------------------

    def on_done(self, rank: Rank, message: Done) -> None:
        """One rank says everything of it is COMPLETED. Commit when all have, and only if the union is exact."""
        if rank.done is not None:
            return
        if message.status != "ok":
            self.fail(TransferError(message.reason or "the prefill failed", origin="prefill", peer=rank.address))
            return
        rank.done = message
        self.receiver.book.done(self.key, rank.address)
        if self.outcome.failed:
            self.check_quiet()
            return
        if all(other.done is not None for other in self.ranks):
            self._commit()

    def _commit(self) -> None:
        dones = [rank.done for rank in self.ranks if rank.done is not None]
        try:
            expected = self._expected()
            for done in dones:
                expected.add(done.coverage)
            expected.check()
        except KvferryError as exc:
            self.fail(MismatchError(exc.what, **exc.data))
            return
        if self.receiver.config.digest:
            self.receiver.start_task(self._compare(dones))
        else:
            self._committed(dones)

    async def _compare(self, dones: list[Done]) -> None:
        """Every page must hold what its sender hashed. Never raises."""
        layout, want = self.receiver.layout, self.expectation
        buffers = {buffer.id: buffer for buffer in layout.buffers}
        prefix = want.prefix_tokens // layout.page_size
        try:
            for done in dones:
                await check_digests(done.digests, done.coverage, buffers, want.pages, prefix)
        except KvferryError as exc:
            self.fail(MismatchError(exc.what, hint=exc.hint, **exc.data))
        except Exception as exc:
            self.fail(MismatchError(f"the digests could not be compared: {exc}"))
        else:
            if not self.outcome.failed:
                self._committed(dones)

    def _committed(self, dones: list[Done]) -> None:
        self.bytes = sum(done.bytes for done in dones)
        self.blocks = sum(done.blocks for done in dones)
        self.stamps["committed"] = self.receiver.clock.now()
        if self.outcome.succeed(self.result()):
            self._fire(DecodeEvent.COVERED)
        else:
            self.fail(TransferError("aborted while it committed"))

    def _expected(self) -> Expected:
        """Every buffer, every unit of ours, once."""
        layout, want = self.receiver.layout, self.expectation
        prefix = want.prefix_tokens // layout.page_size
        spans = {"page": (prefix, len(want.pages)), "state": (0, len(want.state_rows))}
        spans["aux"] = (0, int(want.aux_slot is not None))
        if not want.peers:
            return Expected({})
        return Expected({b.id: (b.item_len, *spans[b.unit]) for b in layout.buffers if b.unit in spans})

    def on_abort_ack(self, rank: Rank, message: AbortAck) -> None:
        """The rank tells which of our units are not quiet from it. Unasked, it is news of a failure."""
        if not self.outcome.failed:
            self.fail(TransferError("the prefill ended the room", peer=rank.address))
        if rank.offered_to == message.src:
            self.receiver.book.ack(self.key, rank.address, unit_set(message.unknown), unit_set(message.in_doubt))
        self.receiver.check_quarantine_soon()
        self.check_quiet()

    def rank_gone(self, rank: Rank, reason: str) -> None:
        """The incarnation is gone for good: what it was writing is in doubt until a fence."""
        self.fail(TransferError(reason, peer=rank.address))
        self.receiver.book.writer_gone(self.key, rank.address)
        self.receiver.check_quarantine_soon()
        self.check_quiet()

    # -- the end -------------------------------------------------------------------------------------------------

    def fail(self, error: TransferError) -> None:
        """End the room with its first cause, and tell every rank it was offered to. Idempotent."""
        self.outcome.fail(error)
        if not self.outcome.failed or not self.machine.accepts(DecodeEvent.FAIL):
            return
        first = self.machine.state is DecodeState.OFFERED
        self._fire(DecodeEvent.FAIL)
        if first:
            self.receiver.rollover.room_ended()
            self.receiver.book.fail(self.key, str(self.outcome.error)[:200])
            for rank in self.ranks:
                if rank.offered_to is None:  # it never heard of the units
                    self.receiver.book.ack(self.key, rank.address, UnitSet(), UnitSet())
            self.check_quiet()

    def finish_fake(self) -> None:
        """The room asks for no transfer: it succeeds at once and reports no bytes."""
        if self.outcome.succeed(self.result()):
            self._fire(DecodeEvent.COVERED)

    def check_quiet(self) -> None:
        """End the room if every unit of it is free."""
        if self.outcome.failed and self.receiver.book.get(self.key) is None:
            if self.machine.accepts(DecodeEvent.QUIET):
                self._fire(DecodeEvent.QUIET)

    def _expired(self) -> None:
        missing = [rank.address for rank in self.ranks if rank.done is None]
        self.fail(
            DeadlineError("the prefill did not finish in time", room=str(self.key), waiting_for=",".join(missing))
        )

    def _ack_expired(self) -> None:
        if self.machine.accepts(DecodeEvent.ACK_DEADLINE):
            self._fire(DecodeEvent.ACK_DEADLINE)
            self.receiver.book.expire(self.key)
            self.receiver.note_quarantine(self)

    def _fire(self, event: DecodeEvent) -> None:
        for action in self.machine.fire(event):
            self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Action.SEND_COMMITTED:
                self.receiver.book.commit(self.key)
                for rank in self.ranks:
                    if rank.link is not None:
                        rank.link.post(Committed(room=self.key.room, gen=self.key.gen, status="ok"))
            case Action.TELL_PEERS:
                self._tell_peers()
            case Action.END:
                self._end()
            case Action.SEND_DONE | Action.STOP_SUBMITTING | Action.ACK:
                raise IllegalTransitionError("a decode room does not send", key=str(self.key))

    def _tell_peers(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        timeout = 2 * self.receiver.config.drain_timeout_s  # the prefill's own drain, and the way here
        self._ack_deadline = self.receiver.clock.call_later(timeout, self._ack_expired)
        for rank in self.ranks:
            if rank.link is not None:
                rank.link.post(self.abort_message())
                rank.link.close_room(self.key)

    def abort_message(self) -> Abort:
        """What every rank is told of this room's failure."""
        reason = str(self.outcome.error)[:4000]
        return Abort(room=self.key.room, gen=self.key.gen, origin="decode", reason=reason)

    def _end(self) -> None:
        for timer in (self._deadline, self._ack_deadline):
            if timer is not None:
                timer.cancel()
        self.stamps["ended"] = self.receiver.clock.now()
        self.outcome.close(self.result())
        for rank in self.ranks:
            if rank.link is not None:
                rank.link.close_room(self.key)
        self.receiver.room_ended(self)
        self.outcome.free_units()

    def result(self) -> TransferResult:
        timing = {
            "wait_done": difference(self.stamps.get("offered"), self.stamps.get("committed")),
            "total": difference(self.stamps.get("known"), self.stamps.get("committed")),
        }
        return TransferResult(
            key=self.key,
            ok=not self.outcome.failed,
            error=self.outcome.error,
            bytes=self.bytes if self.expectation.peers else None,
            blocks=self.blocks if self.expectation.peers else None,
            chunks=0,
            layers_fired=0,
            layers_fallback=0,
            timing={name: value for name, value in timing.items() if value is not None},
            stamps=dict(self.stamps),
        )


def unit_set(units: Units) -> UnitSet:
    """Units as they travel, as index arrays. Raises MalformedFrameError."""
    return UnitSet(unpack_indices(units.pages), np.array(units.aux, np.int64), unpack_indices(units.state))
