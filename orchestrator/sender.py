"""The prefill side: peers, offers, rooms. A shell around pure machines: feed → act → re-arm → publish.

Loop thread only; the thread-safe face is `orchestrator.prefill`.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import msgspec

from orchestrator.chunk import ChunkData, as_transfer_error
from orchestrator.clock import Clock
from orchestrator.config import Config
from orchestrator.contacts import Contacts
from orchestrator.cuda_events import Event, EventSource, EventWatcher
from orchestrator.destination import Destination
from orchestrator.engines.base import Engine
from orchestrator.forward import ForwardPass
from orchestrator.kept import KeptOffers
from orchestrator.link import Link, wait_until
from orchestrator.log import RateLimited
from orchestrator.planner import GroupPlanner
from orchestrator.prefill_room import PrefillRoom
from orchestrator.progress import Pacer
from orchestrator.reception import Reception
from orchestrator.registry import Registry, Verdict
from orchestrator.sessions import Sessions
from orchestrator.wire import ControlNetwork
from protocols.errors import (
    AbortedError,
    BrokenPeerError,
    KvferryError,
    MalformedFrameError,
    RemoteError,
    TransferError,
)
from protocols.ids import Incarnation, RoomKey
from protocols.layout import LayerBuffer, Layout
from protocols.messages import (
    HEARD_BY_DECODE,
    HEARD_BY_PREFILL,
    Abort,
    AbortAck,
    AnyMessage,
    Bye,
    Committed,
    Offer,
    Rollover,
)
from protocols.pins import PinBook

MAX_OWED = 4096
"""Answers to what only a peer named (rooms unknown, over or refused) that may wait for its acknowledgement."""


class Sender:
    """Everything of one prefill rank. `start` binds; `stop` ends every room."""

    def __init__(
        self,
        *,
        me: Incarnation,
        layout: Layout,
        engine: Engine,
        config: Config,
        network: ControlNetwork,
        events: EventSource,
        clock: Clock,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        pacer: Pacer,
    ) -> None:
        self.me = me
        self.layout = layout
        self.engine = engine
        self.config = config
        self.clock = clock
        self.loop = loop
        self.log = RateLimited("kvferry.prefill", clock.now, config.log_burst)
        self.counters: Counter[str] = Counter()
        self.unheard = HEARD_BY_DECODE - HEARD_BY_PREFILL
        self.rooms: Registry[PrefillRoom] = Registry(clock, config.tombstone_s, config.max_peer_tombstones)
        self.kept = KeptOffers(config, self.rooms)
        self.page_buffers = layout.unit_buffers("page")
        self.hooked_buffers: dict[int, list[LayerBuffer]] = {}
        for buffer in self.page_buffers:
            if buffer.hooked:
                self.hooked_buffers.setdefault(buffer.layer, []).append(buffer)
        self.events = events
        self.address = ""
        self._watcher = EventWatcher(loop)
        self.pacer = pacer
        self.pins = PinBook(layout.num_pages)
        self._contacts = Contacts(engine, layout, config, clock, rng, self._start, pacer.kick)
        self.sessions = Sessions(self, self._contacts)
        self.planner = GroupPlanner(self.page_buffers, config, self.sessions.slowest, self.sessions.submission)
        self.reception = Reception(self, me, network, self._contacts, rng)
        self._tasks: dict[asyncio.Task[None], None] = {}
        """In the order of their start: a simulated run must not depend on addresses."""
        self.stopping: AbortedError | None = None
        pacer.add(engine, foreseen=True)
        pacer.add(self._watcher)

    # -- life ----------------------------------------------------------------------------------------------------

    def start(self, bind: str) -> str:
        """Bind the control endpoint and return its address. Raises BusyError or ConfigError."""
        self.events.enter_loop_thread()
        self.address = self.reception.listen(bind)
        return self.address

    async def stop(self, reason: str = "the prefill worker is shutting down") -> None:
        """Fail what is live, tell every peer, drain for at most `drain_timeout_s`, close."""
        self.stopping = AbortedError(reason, origin="prefill")
        for room in self.rooms:
            room.fail(self.stopping)
        deadline = self.clock.now() + self.config.drain_timeout_s
        await wait_until(lambda: not len(self.rooms), self.clock, deadline)
        await self.reception.say_bye()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.gather(*self._tasks, return_exceptions=True)
        self.reception.close()

    def start_task(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine that never raises, and keep it alive until it is done."""
        return self._start(coroutine)

    def _start(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(coroutine)
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def watch(self, event: Event) -> asyncio.Future[None]:
        """A future for a recorded event, asked by the pacer."""
        future = self._watcher.watch(event)
        if not future.done():
            self.pacer.kick()
        return future

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, forward: ForwardPass, chunks: list[ChunkData]) -> None:
        """Add a pass's chunks to their rooms and attach them to the pass (deposited before the pass's hooks)."""
        for data in chunks:
            key = data.key.room_key
            try:
                if not self._is_current(key):
                    continue
                room = self.rooms.live(key) or self._new_room(key)
                chunk = room.register(data) if room is not None else None
                if room is not None:
                    self.kept.release(room)
                if chunk is not None and chunk.attach(forward):
                    forward.chunks.append(chunk)
            except Exception as exc:  # a set-up error never reaches the scheduler, nor the pass's other chunks (A10)
                error = as_transfer_error(exc, chunk=str(data.key))
                room = self.rooms.live(key)
                if room is not None:
                    room.fail(error)
                else:
                    self._bury(key, error)

    def refuse(self, key: RoomKey, error: TransferError) -> None:
        """A chunk that could not even be read: its room fails with the reason."""
        if not self._is_current(key):
            return
        room = self.rooms.live(key) or self._new_room(key)
        if room is not None:
            room.fail(error)

    def _is_current(self, key: RoomKey, named_by: str = "") -> bool:
        """A higher generation ends a live lower one; a lower one is stale and fails at once."""
        newest = self.rooms.newest(key.room)
        if newest is None or newest.gen == key.gen:
            return True
        if newest.gen > key.gen:
            if self.rooms.live(key) is None and self.rooms.verdict(key) is None:
                self._bury(key, TransferError("a newer generation of this room is live", newer=newest.gen), named_by)
            return False
        older = self.rooms.live(newest)
        if older is not None:
            older.fail(AbortedError("superseded by a newer generation", newer=key.gen))
        return True

    def _new_room(self, key: RoomKey) -> PrefillRoom | None:
        """None when the key has ended: what meets a tombstone fails at once."""
        if self.rooms.verdict(key) is not None:
            self.counters["met_tombstone"] += 1
            return None
        room = PrefillRoom(self.rooms.open(key), self)
        self.rooms.add(room)
        if self.stopping is not None:
            room.outcome.fail(self.stopping)
        if room.outcome.failed:  # aborted by a thread before the loop heard of it, or too late
            room.fail(room.outcome.error or AbortedError("aborted"))
            return None
        return room

    def _bury(self, key: RoomKey, error: TransferError, named_by: str = "") -> None:
        """End a room that never was here: a tombstone, and pages that nobody reads."""
        outcome = self.rooms.open(key)
        outcome.fail(error)
        self.rooms.end(key, Verdict(outcome, {}), named_by=named_by)
        outcome.free_units()

    def room_ended(self, room: PrefillRoom) -> None:
        """The room is over and drained: remember the verdict, log it, count it."""
        asking = {peer: d for peer, d in room.destinations.items() if room.outcome.failed and not d.link.closed}
        acks = {bytes(peer): destination.abort_ack(room.key) for peer, destination in asking.items()}
        doubtful = self.sessions.note_doubt(room)
        self.pins.unpin(room.key)
        self.kept.release(room)
        named_by = "" if room.chunks else next((d.link.account for d in room.destinations.values()), "")
        self.rooms.end(room.key, Verdict(room.outcome, acks), in_doubt=doubtful, named_by=named_by)
        result = room.outcome.result
        if room.outcome.failed:
            self.counters["rooms_failed"] += 1
            self.log.warning("room_failed", "room %s failed: %s", room.key, room.outcome.error)
        else:
            self.counters["rooms_ok"] += 1
            self.log.debug("room %s done: %s", room.key, result)
        if result is not None and result.bytes:
            self.counters["bytes"] += result.bytes

    def abort(self, key: RoomKey, error: TransferError) -> None:
        """Carry out an abort whose outcome a thread has already decided."""
        room = self.rooms.live(key)
        if room is not None:
            room.fail(error)

    # -- LinkOwner -----------------------------------------------------------------------------------------------

    def on_message(self, link: Link, message: AnyMessage) -> None:
        try:
            match message:
                case Offer():
                    self._on_offer(link, message)
                case Committed():
                    self._on_committed(link, message)
                case Abort():
                    self._on_abort(link, message)
                case Rollover():
                    self.sessions.on_rollover(link, message)
                case Bye():
                    self.peer_gone(link, "the decode worker said goodbye")
                case _:
                    self.counters["unexpected_messages"] += 1
        except RemoteError as exc:
            self.counters["bad_messages"] += 1
            self.log.warning("bad_message", "a %s was dropped: %s", type(message).__name__, exc)
            link.count_bad_frame()
        except Exception as exc:
            self.counters["handler_errors"] += 1
            self.log.warning("handler", "%s could not be handled: %r", type(message).__name__, exc)

    def peer_gone(self, link: Link, reason: str) -> None:
        """This incarnation is gone: its rooms fail, and it is forgotten."""
        rooms = link.rooms
        self.reception.forget(link)  # first: what the rooms have to say to this peer must not try to reach it
        for key in rooms:
            self.abort(key, TransferError(reason, peer=link.peer.hex()[:8]))

    def on_bad_body(self, link: Link, key: RoomKey, error: MalformedFrameError) -> None:
        """What the frame was we cannot tell: the room it names fails, and its sender is told."""
        failure = TransferError(f"the peer sent a frame that does not decode: {error.what}")
        if not self._end_for(link, key, failure):
            self._turn_away(link, key, str(failure))

    def on_silent(self, link: Link) -> None:
        self.counters["silent_peers"] += 1
        for key in link.rooms:
            self.abort(
                key,
                TransferError("the decode worker is silent", seconds=self.config.silence_s, peer=link.peer.hex()[:8]),
            )

    def on_broken(self, link: Link, error: BrokenPeerError) -> None:
        self.peer_gone(link, error.what)

    def _on_offer(self, link: Link, offer: Offer) -> None:
        key = RoomKey(offer.room, offer.gen)
        verdict = self.rooms.verdict(key)
        if verdict is not None:
            self._turn_away(link, key, str(verdict.outcome.error or "the room has ended"))
            return
        assert link.hello is not None
        if offer.session != link.hello.session:
            self._turn_away(link, key, "the offer names another session than Hello did")
            return
        if not self.reception.guests.owns(offer.session, link.peer):
            self.counters["foreign_sessions"] += 1
            self._turn_away(link, key, "another decode worker had this session first: take another")
            return
        if not self._is_current(key, link.account):
            self._turn_away(link, key, "a newer generation of this room is live")
            return
        room = self.rooms.live(key)
        if room is not None and link.peer in room.destinations:
            first = room.destinations[link.peer].offer
            same = msgspec.structs.replace(offer, seq=first.seq, ack=first.ack) == first
            self.counters["repeated_offers" if same else "other_offers"] += 1
            return
        if room is not None and room.is_complete:
            self.counters["surplus_offers"] += 1
            self._turn_away(link, key, "the room has all its destinations")
            return
        if room is None:
            room = self._new_room(key)
        if room is None or room.outcome.failed:
            reason = str(self.rooms.open(key).error or "the room has failed")
            self._turn_away(link, key, reason)
            return
        try:
            destination = Destination(
                link, offer, link.hello.layout, self._contacts.pairs(link.peer), self.layout.page_size
            )
            room.add_destination(destination, offer.destinations)
            self.kept.keep(room, destination)
        except KvferryError as exc:
            self._turn_away(link, key, str(exc))
            room.fail(as_transfer_error(exc, peer=link.peer.hex()[:8]))
            return
        if not destination.dummy:
            self._start(self._connect(room, destination))

    async def _connect(self, room: PrefillRoom, destination: Destination) -> None:
        """First contact with the destination's engine, off the loop; shared by all rooms of the peer."""
        try:
            await self._contacts.contact(destination.link.peer)
        except KvferryError as exc:
            room.fail(as_transfer_error(exc, peer=destination.link.peer.hex()[:8]))
            return
        if destination.link.hello is None or destination.link.hello.session != destination.session:
            room.fail(TransferError("the decode's engine was rolled over", session=destination.session))
            return
        destination.lane = self.sessions.lane(destination.session)
        room.check_ready()

    def write_failed(self, destination: Destination) -> None:
        self._contacts.write_failed(destination.link.peer)

    def write_worked(self, destination: Destination) -> None:
        self._contacts.write_worked(destination.link.peer)

    def _turn_away(self, link: Link, key: RoomKey, reason: str) -> None:
        """Tell the offerer that its room ended here, and what of it is not quiet (nothing, unless remembered)."""
        abort = Abort(room=key.room, gen=key.gen, origin="prefill", reason=reason[:1000])
        self._answer(link, abort, self._ack(link, key))

    def _answer(self, link: Link, *answers: AnyMessage) -> None:
        """Post what the peer asked for. One that asks on and on, and acknowledges nothing, is broken."""
        if link.unacked >= MAX_OWED:
            self.on_broken(link, BrokenPeerError("the peer asks and acknowledges nothing", unacked=link.unacked))
        for answer in answers:
            link.post(answer)

    def _ack(self, link: Link, key: RoomKey) -> AbortAck:
        verdict = self.rooms.verdict(key)
        said = verdict.acks.get(bytes(link.peer)) if verdict is not None else None
        session = link.hello.session if link.hello is not None else ""
        return said if said is not None else AbortAck(room=key.room, gen=key.gen, session=session)

    def _on_committed(self, link: Link, message: Committed) -> None:
        room = self.rooms.live(RoomKey(message.room, message.gen))
        destination = room.destinations.get(link.peer) if room is not None else None
        if room is None or destination is None:
            self.counters["late_messages"] += 1
        elif message.status == "ok":
            room.committed(destination)
        else:
            room.fail(TransferError(message.reason, origin="decode"))

    def _on_abort(self, link: Link, message: Abort) -> None:
        """Fail the room, and acknowledge: at once when it is unknown or over, when it has drained otherwise (C2)."""
        key = RoomKey(message.room, message.gen)
        if not self._end_for(link, key, AbortedError(message.reason, origin=message.origin)):
            self._answer(link, self._ack(link, key))

    def _end_for(self, link: Link, key: RoomKey, error: TransferError) -> bool:
        """End the room for a peer: the peer's own, one that may still wait for it, one never heard of. True if the
        room acknowledges by itself, once it has drained; else it owes this peer nothing that is not remembered."""
        room = self.rooms.live(key)
        if room is None:
            if self.rooms.verdict(key) is None:
                self._bury(key, error, link.account)
            return False
        mine = link.peer in room.destinations
        if mine or not room.is_complete:
            room.fail(error)
        return mine
