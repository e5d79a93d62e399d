"""Bugs of the kind that the simulation exists to find, each as a mutation that is in force for one run.

``scripts/simulate --plant NAME`` runs with one; `tests/sim/test_planted.py` shows that each is found. A mutation
breaks one rule and leaves everything else to the product, so what must be caught is what a programmer's slip would do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgspec
import numpy as np

from orchestrator import destination, sessions
from orchestrator.chunk import Chunk
from orchestrator.cuda_events import Event
from orchestrator.decode_room import DecodeRoom
from orchestrator.destination import Destination
from orchestrator.prefill_room import PrefillRoom
from orchestrator.reception import Reception
from orchestrator.rollover import EngineRollover
from orchestrator.sender import Sender
from protocols.blocks import Ints
from protocols.codec import decode, decode_envelope, encode
from protocols.errors import KvferryError
from protocols.ids import RoomKey, Session
from protocols.leases import Lease, LeaseBook, LeaseEvent, UnitSet, UnitState
from protocols.messages import Abort, AbortAck, Units
from protocols.planning import ChunkPlan

Patch = tuple[Any, str, Any]


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Run with this bug. Raises KeyError for a name that is not in `PLANTS`."""
    patches = PLANTS[name]()
    with ExitStack() as stack:
        for owner, attribute, value in patches:
            stack.callback(setattr, owner, attribute, vars(owner)[attribute])
            setattr(owner, attribute, value)
        yield


def page_freed_on_timeout() -> list[Patch]:
    """A writer does not say quiet in time, and its units are given out again."""

    def expire(self: LeaseBook, key: RoomKey) -> None:
        lease = self.get(key)
        if lease is not None:
            for states in lease.states.values():
                states[:] = UnitState.FREE
            self._settle(lease)

    ack_expired = DecodeRoom._ack_expired

    def expired(self: DecodeRoom) -> None:
        ack_expired(self)
        self.check_quiet()

    return [(LeaseBook, "expire", expire), (DecodeRoom, "_ack_expired", expired)]


def quiet_though_in_doubt() -> list[Patch]:
    """The prefill says quiet for blocks that FAILED."""
    abort_ack = Destination.abort_ack

    def silent(self: Destination, key: RoomKey) -> AbortAck:
        return msgspec.structs.replace(abort_ack(self, key), in_doubt=Units())

    return [(Destination, "abort_ack", silent)]


def wrong_incarnation_acked() -> list[Patch]:
    """A restarted prefill acknowledges an Abort that was meant for its predecessor, in its predecessor's name."""
    on_frame = Reception.on_frame

    def acking(self: Reception, identity: bytes, frame: bytes) -> None:
        try:
            envelope = decode_envelope(frame)
            message = decode(frame)
        except KvferryError:
            return on_frame(self, identity, frame)
        if envelope.dst in (b"", self._me):
            return on_frame(self, identity, frame)
        if isinstance(message, Abort) and self._listener is not None:
            ack = AbortAck(
                src=envelope.dst,
                dst=envelope.src,
                seq=envelope.ack + 1,
                ack=envelope.seq,
                room=message.room,
                gen=message.gen,
                session="",
            )
            self._listener.wire_to(envelope.src).send(encode(ack))
        return None  # what else is for the dead one is dropped

    return [(Reception, "on_frame", acking)]


def writer_death_is_a_fence() -> list[Patch]:
    """The writer's process is gone, so nothing of it can land: it can, from the kernel's buffers."""

    def writer_gone(self: LeaseBook, key: RoomKey, writer: object) -> None:
        self.ack(key, writer, UnitSet(), UnitSet())

    return [(LeaseBook, "writer_gone", writer_gone)]


def freed_on_first_ack() -> list[Patch]:
    """Of two ranks that were offered the units the first one's quiet frees them."""
    try_free = LeaseBook._try_free

    def first(self: LeaseBook, lease: Lease) -> bool:
        if len(lease.waiting) < len(lease.writers):
            lease.waiting.clear()
        return try_free(self, lease)

    return [(LeaseBook, "_try_free", first)]


def fence_across_sessions() -> list[Patch]:
    """The end of one engine frees what was offered under another's session as well."""

    def fence(self: LeaseBook, session: Session) -> list[RoomKey]:
        freed = []
        for lease in self.leases():
            if lease.why:
                lease.fire(LeaseEvent.FENCE)
                self._settle(lease)
                freed.append(lease.key)
        return freed

    return [(LeaseBook, "fence", fence)]


def late_offer_honoured() -> list[Patch]:
    """After a rollover both sides go on with what was offered under the deleted engine's session."""
    on_offer = Sender._on_offer

    def honour(self: Sender, link: Any, offer: Any) -> None:
        hello = link.hello
        link.hello = msgspec.structs.replace(hello, session=offer.session)
        try:
            on_offer(self, link, offer)
        finally:
            link.hello = hello

    async def connect(self: Sender, room: PrefillRoom, destination: Destination) -> None:
        destination.lane = self.sessions.lane(destination.session)
        room.check_ready()

    return [
        (Sender, "_on_offer", honour),
        (Sender, "_connect", connect),
        (sessions.Sessions, "_end", lambda self, link, session: None),
        (EngineRollover, "_rooms_of_old", lambda self: []),
    ]


def relative_chunk_offset() -> list[Patch]:
    """A chunk's positions index the destination's list from its own start instead of the request's."""
    plan_chunk = vars(destination)["plan_chunk"]

    def relative(pages: Ints, positions: Ints, prefix_pages: int, destination: Ints) -> ChunkPlan:
        right: ChunkPlan = plan_chunk(pages, positions, prefix_pages, destination)
        if len(positions) == 0:
            return right
        first = max(int(positions[0]), prefix_pages)
        shifted = np.where(positions < prefix_pages, positions, positions - first + prefix_pages)
        wrong: ChunkPlan = plan_chunk(pages, shifted, prefix_pages, destination)
        return ChunkPlan(wrong.runs, right.positions)

    return [(destination, "plan_chunk", relative)]


def source_freed_on_cancel() -> list[Patch]:
    """A room that fails gives its source pages back at once, while batches still read them."""
    fail = PrefillRoom.fail

    def freeing(self: PrefillRoom, error: Any) -> None:
        fail(self, error)
        if self.outcome.failed:
            self.outcome.free_units()

    return [(PrefillRoom, "fail", freeing)]


def layer_read_before_event() -> list[Patch]:
    """A layer is sent when its hook fires, not when its event has completed."""

    def watch(self: Sender, event: Event) -> asyncio.Future[None]:
        future: asyncio.Future[None] = self.loop.create_future()
        future.set_result(None)
        return future

    return [(Sender, "watch", watch)]


def done_before_landed() -> list[Patch]:
    """Done is sent, with the plan as its coverage, when everything was handed over."""
    post = Destination.post

    def posting(self: Destination, room: Any, chunk: Any, blocks: Any, span: Any, pairs: Any, runs: Any) -> None:
        if len(blocks):
            self.ledger.landed([p.dst.id for p in pairs], {p.dst.id: p.dst.item_len for p in pairs}, runs)
        post(self, room, chunk, blocks, span, pairs, ())

    async def settled(self: Chunk) -> None:
        return None

    return [(Destination, "post", posting), (Chunk, "settled", settled)]


PLANTS: dict[str, Callable[[], list[Patch]]] = {
    function.__name__.replace("_", "-"): function
    for function in (
        page_freed_on_timeout,
        quiet_though_in_doubt,
        wrong_incarnation_acked,
        writer_death_is_a_fence,
        freed_on_first_ack,
        fence_across_sessions,
        late_offer_honoured,
        relative_chunk_offset,
        source_freed_on_cancel,
        layer_read_before_event,
        done_before_landed,
    )
}
"""By name."""
