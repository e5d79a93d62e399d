"""The decode side: links to prefill ranks, leases, rooms. A shell around pure machines. Loop thread only; the
thread-safe face is `orchestrator.decode`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from dataclasses import dataclass
from functools import partial
from typing import Any

from orchestrator.clock import Clock
from orchestrator.config import Config
from orchestrator.decode_room import DecodeRoom, Expectation, Rank
from orchestrator.dialer import Dialer
from orchestrator.engines.base import Engine
from orchestrator.link import Link, flushed
from orchestrator.log import RateLimited
from orchestrator.outcome import Outcome
from orchestrator.registry import Registry, Verdict
from orchestrator.rollover import EngineRollover, MakeEngine
from orchestrator.wire import ControlNetwork
from protocols.errors import (
    AbortedError,
    BrokenPeerError,
    BusyError,
    KvferryError,
    MalformedFrameError,
    RemoteError,
    TransferError,
)
from protocols.ids import Incarnation, RoomKey, Session
from protocols.layout import Layout
from protocols.leases import LeaseBook, UnitState
from protocols.messages import (
    HEARD_BY_DECODE,
    HEARD_BY_PREFILL,
    Abort,
    AbortAck,
    AnyMessage,
    Bye,
    Done,
    RolloverAck,
)


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One room's units that are not free although it has ended: why, since when (monotonic seconds), how many."""

    key: RoomKey
    why: str
    since: float
    unknown: int
    in_doubt: int


class Receiver:
    """Everything of one decode rank."""

    def __init__(
        self,
        *,
        me: Incarnation,
        layout: Layout,
        engine: Engine,
        config: Config,
        network: ControlNetwork,
        clock: Clock,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        make_engine: MakeEngine | None = None,
    ) -> None:
        self.layout = layout
        self.engine = engine
        self.session: Session = engine.session
        self.config = config
        self.clock = clock
        self.loop = loop
        self.log = RateLimited("kvferry.decode", clock.now, config.log_burst)
        self.counters: Counter[str] = Counter()
        self.unheard = HEARD_BY_PREFILL - HEARD_BY_DECODE
        self.rooms: Registry[DecodeRoom] = Registry(clock, config.tombstone_s)
        self.book = LeaseBook(
            {"page": layout.num_pages, "aux": layout.units_of("aux"), "state": layout.units_of("state")}
        )
        self.dialer = Dialer(
            me=me,
            layout=layout,
            engine=engine,
            config=config,
            network=network,
            clock=clock,
            rng=rng,
            loop=loop,
            owner=self,
        )
        self.rollover = EngineRollover(self, make_engine)
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In the order of their start: a simulated run must not depend on addresses."""
        self._stopping: AbortedError | None = None

    async def stop(self, reason: str = "the decode worker is shutting down") -> None:
        """Abort what is live, let the peers acknowledge, close. Units that are not quiet stay leased: only the end
        of this process, or of its engine, makes them so."""
        self._stopping = AbortedError(reason, origin="decode")
        for room in self.rooms:
            room.fail(self._stopping)
        for link in list(self.dialer.links.values()):
            link.post(Bye(deadline_ms=0))
        await flushed(self.dialer.links.values(), self.clock)
        await self.rollover.close()
        for task in list(self._tasks):  # pages may still be compared: nobody reads the pool once this has returned
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.dialer.close()

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine and keep it alive until it is done."""
        task = self.loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    # -- engine and quarantine -----------------------------------------------------------------------------------

    def use_engine(self, engine: Engine) -> None:
        """Offers and Hellos name this engine's session from now on."""
        self.engine = engine
        self.session = engine.session
        self.dialer.use_engine(engine)

    def fenced(self, session: Session) -> None:
        """The engine of that session is deleted: its failed leases are free, and their rooms over."""
        self.counters["fences"] += 1
        self.book.fence(session)
        for room in self.rooms:
            room.check_quiet()

    def check_quarantine_soon(self) -> None:
        """After the event that may have quarantined units has been dealt with."""
        self.loop.call_soon(self.check_quarantine)

    def check_quarantine(self) -> None:
        """Roll the engine over when quarantine has passed its limit and another engine can be made."""
        units = self.book.quarantined()
        if units >= self.config.rollover_at_units:
            self.rollover.start_if_possible(f"{units} units are quarantined")

    def quarantine(self) -> list[Quarantined]:
        """What is in quarantine, and why."""
        found = [
            Quarantined(
                lease.key, lease.why, lease.since, lease.count(UnitState.UNKNOWN), lease.count(UnitState.IN_DOUBT)
            )
            for lease in self.book.leases()
        ]
        return [entry for entry in found if entry.unknown or entry.in_doubt]

    # -- rooms ---------------------------------------------------------------------------------------------------

    def expect(self, outcome: Outcome, expectation: Expectation) -> None:
        """Lease the units and offer them to every rank; what cannot be leased fails the room at once."""
        key = outcome.key
        if self._stopping is not None:
            outcome.fail(self._stopping)
        newest = self.rooms.newest(key.room)
        if newest is not None and newest.gen > key.gen:
            outcome.fail(TransferError("a newer generation of this room is live", newer=newest.gen))
        elif newest is not None:
            older = self.rooms.live(newest)
            if older is not None:
                older.fail(AbortedError("superseded by a newer generation", newer=key.gen))
        room = DecodeRoom(outcome, expectation, self)
        self.rooms.add(room)
        self._lease(room)
        if not room.ranks and not outcome.failed:  # a fake room: it asks for no transfer
            room.finish_fake()
        for rank in room.ranks if self._stopping is None else ():
            self.dialer.when_up(rank.address, partial(self._up, room, rank), partial(self._fail, room))

    def _lease(self, room: DecodeRoom) -> None:
        """Lease the room's units, or fail it: aborted by a thread, stale, or asking for what is not to be had."""
        if room.outcome.failed:
            room.fail(room.outcome.error or AbortedError("aborted"))
            return
        try:
            self._check_room_for_more()
            room.lease()
        except KvferryError as exc:
            self._fail(room, exc)

    def _check_room_for_more(self) -> None:
        """At the bound new work is refused: a pool that is mostly quarantined serves nobody."""
        units = self.book.quarantined()
        if units >= self.config.quarantine_limit_units:
            raise BusyError(
                "too many units are quarantined",
                units=units,
                hint="Roll the engine over, or restart the decode worker.",
            )

    def _up(self, room: DecodeRoom, rank: Rank, link: Link) -> None:
        """Offer, or tell a rank that waits for an Offer that none will come (C1)."""
        if room.outcome.failed:
            link.post(room.abort_message())
            return
        try:
            room.offer(rank, link)
        except KvferryError as exc:  # larger than a frame
            self._fail(room, exc)

    def _fail(self, room: DecodeRoom, error: KvferryError) -> None:
        failure = TransferError(error.what, hint=error.hint, **error.data)
        failure.__cause__ = error
        room.fail(failure)

    def abort(self, key: RoomKey, error: TransferError) -> None:
        """Carry out an abort whose outcome a thread has already decided."""
        room = self.rooms.live(key)
        if room is not None:
            room.fail(error)

    def room_ended(self, room: DecodeRoom) -> None:
        self.rooms.end(room.key, Verdict(room.outcome, {}))
        self.rollover.room_ended()
        if room.outcome.failed:
            self.counters["rooms_failed"] += 1
            self.log.warning("room_failed", "room %s failed: %s", room.key, room.outcome.error)
        else:
            self.counters["rooms_ok"] += 1
            self.counters["bytes"] += room.bytes
            self.log.debug("room %s committed: %s", room.key, room.outcome.result)

    def note_quarantine(self, room: DecodeRoom) -> None:
        lease = self.book.get(room.key)
        units = len(lease.units) if lease is not None else 0
        self.counters["quarantines"] += 1
        self.check_quarantine_soon()
        self.log.warning("quarantine", "room %s: %d units are quarantined: %s", room.key, units, room.outcome.error)

    # -- LinkOwner -----------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: AnyMessage) -> None:
        try:
            self._handle(link, message)
        except Exception as exc:
            remote = isinstance(exc, RemoteError)
            self.counters["bad_messages" if remote else "handler_errors"] += 1
            self.log.warning("handler", "%s could not be handled: %r", type(message).__name__, exc)
            key = RoomKey(getattr(message, "room", -1), getattr(message, "gen", -1))
            if key in link.rooms:
                self.abort(key, TransferError(f"a message of the prefill could not be handled: {exc}"))
            if remote:
                link.count_bad_frame()

    def _handle(self, link: Link, message: AnyMessage) -> None:
        if isinstance(message, Bye):
            self.peer_gone(link, "the prefill worker said goodbye")
            return
        if isinstance(message, RolloverAck):
            self.rollover.acked(link, message.session)
            return
        if not isinstance(message, (Done, Abort, AbortAck)):
            self.counters["unexpected_messages"] += 1
            return
        room = self.rooms.live(RoomKey(message.room, message.gen))
        rank = room.rank_of(link) if room is not None else None
        if room is None or rank is None:
            self.counters["late_messages"] += 1
            return
        match message:
            case Done():
                room.on_done(rank, message)
            case Abort():
                room.fail(AbortedError(message.reason, origin=message.origin))
            case AbortAck():
                room.on_abort_ack(rank, message)

    def on_bad_body(self, link: Link, key: RoomKey, error: MalformedFrameError) -> None:
        room = self.rooms.live(key)
        if room is not None and room.rank_of(link) is not None:
            room.fail(TransferError(f"the prefill sent a frame that does not decode: {error.what}"))

    def named_old_session(self, link: Link, session: str) -> None:
        """Said Hello before a rollover and heard Welcome after it: tell this peer what the others were told."""
        self.rollover.tell(link, session)

    def session_reused(self) -> None:
        """Late writes to the earlier process's session may still arrive: take another session, if that is possible."""
        self.rollover.start_if_possible("an earlier process had this engine session")

    def on_silent(self, link: Link) -> None:
        """Silence ends the rooms; it proves nothing about the units, and Abort is retransmitted until acknowledged."""
        self.counters["silent_peers"] += 1
        for key in link.rooms:
            self.abort(
                key, TransferError("the prefill worker is silent", seconds=self.config.silence_s, peer=link.address)
            )

    def on_broken(self, link: Link, error: BrokenPeerError) -> None:
        self.rollover.gave_up_peer()
        self.peer_gone(link, error.what)

    def peer_gone(self, link: Link, reason: str) -> None:
        """This incarnation is gone: its rooms fail, what it was writing is in doubt."""
        self.dialer.forget(link)
        self.rollover.peer_gone(link)
        for room in self.rooms:
            rank = room.rank_of(link)
            if rank is not None and rank.done is None:
                room.rank_gone(rank, reason)
            elif rank is not None:
                room.fail(TransferError(reason, peer=link.address))


def new_incarnation(rng: random.Random) -> Incarnation:
    """16 random bytes, the first not zero."""
    return Incarnation(bytes([rng.randrange(1, 256)]) + rng.randbytes(15))
