"""One room on the prefill side: its chunks, its destinations, and how both come to an end. Loop thread only.

The shell around `protocols.machines.PREFILL_ROOM`: every event is fired in one place (`_fire`) and its actions are
performed there, in order.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from orchestrator.chunk import Chunk, ChunkData, as_transfer_error
from orchestrator.deadlines import Deadlines
from orchestrator.destination import Destination
from orchestrator.forward import Group
from orchestrator.handover import Handover
from orchestrator.outcome import Outcome
from orchestrator.prefill_report import layer_counts, result, timing
from orchestrator.trace import MAX_SPANS, Span
from orchestrator.transfer import run_chunk
from protocols.errors import (
    AbortedError,
    DeadlineError,
    IllegalTransitionError,
    KvferryError,
    MismatchError,
    TransferError,
)
from protocols.ids import Incarnation
from protocols.layout import LayerBuffer
from protocols.machines import PREFILL_ROOM, Action, ChunkEvent, Machine, PrefillEvent, PrefillState
from protocols.messages import Abort, Done
from protocols.planning import ChunkPlan

if TYPE_CHECKING:
    from orchestrator.sender import Sender


class PrefillRoom:
    """See the module. Created by a registration or by an Offer, whichever comes first."""

    def __init__(self, outcome: Outcome, sender: Sender) -> None:
        self.key = outcome.key
        self.outcome = outcome
        self.sender = sender
        self.machine = Machine(PREFILL_ROOM, PrefillState.WAITING)
        self.destinations: dict[Incarnation, Destination] = {}
        self.chunks: dict[int, Chunk] = {}
        """By start token."""
        self._sequence: list[Chunk] = []  # in registration order: the order in which they conclude
        self.concluded_chunks = 0
        self.outstanding = 0
        """Hand-overs of all chunks that are not done."""
        self.spans: list[Span] = []
        self.predicted: float | None = None
        """Seconds the link model gave the room's transfer, alone on its link, when its first chunk was planned."""
        self.stamps: dict[str, float] = {"known": sender.clock.now()}
        self._acting = False
        self._expected: int | None = None
        self._offered: asyncio.Future[None] = sender.loop.create_future()
        self._next_token = 0
        self._deadlines = Deadlines(sender.clock, sender.config.room_timeout_s, self._expired)
        self._deadlines.wait(sender.config.bootstrap_timeout_s)

    def __repr__(self) -> str:
        offered = f"{len(self.destinations)}/{self._expected or '?'}"
        return (
            f"<PrefillRoom {self.key} {self.machine.state.name} chunks={self.concluded_chunks}/{len(self.chunks)} "
            f"destinations={offered} outstanding={self.outstanding}>"
        )

    # -- registration --------------------------------------------------------------------------------------------

    def register(self, data: ChunkData) -> Chunk | None:
        """Add a chunk, or find it: the same chunk again is one (A12), the same key with other pages, or a range that
        does not follow the last one, fails the room. None when the room takes no chunk."""
        if self.outcome.status.ended:
            return None
        known = self.chunks.get(data.key.start_token)
        if known is not None:
            if known.data.same_as(data):
                return known
            self.fail(MismatchError("the chunk was registered again with other pages", chunk=str(data.key)))
            return None
        if data.key.start_token != self._next_token or (self._sequence and self._sequence[-1].data.last):
            self.fail(
                MismatchError(
                    "a chunk must start where the one before it ended",
                    chunk=str(data.key),
                    expected_start_token=self._next_token,
                )
            )
            return None
        chunk = Chunk(data, self, self.sender.config.layerwise)
        self.chunks[data.key.start_token] = chunk
        self._sequence.append(chunk)
        self._next_token = data.end_token
        self.touch()
        self.sender.pins.pin(self.key, data.pages)
        if not data.fake:
            chunk.task = self.sender.start_task(run_chunk(chunk, self))
        self.check_ready()
        return None if self.outcome.failed else chunk

    def note_degraded(self, chunk: Chunk) -> None:
        self.sender.log.warning(
            "degraded", "room %s: chunk %s goes after its forward: %s", self.key, chunk.key, chunk.degraded_by
        )

    def touch(self) -> None:
        """Something of the room moved: the progress deadline counts from now."""
        self._deadlines.touch()

    def forward_ended(self, chunk: Chunk, at: float) -> None:
        self.touch()
        self.stamps["forward_end"] = max(at, self.stamps.get("forward_end", at))
        if chunk.data.fake and chunk.data.last:
            self.skip()

    # -- offers --------------------------------------------------------------------------------------------------

    def add_destination(self, destination: Destination, expected: int) -> None:
        """One more decode rank's offer. Raises MismatchError when they disagree about how many there are."""
        if self._expected not in (None, expected):
            raise MismatchError("the decode ranks disagree about their number", said=expected, before=self._expected)
        self._expected = expected
        self.destinations[destination.link.peer] = destination
        self._deadlines.shorten(destination.offer.deadline_ms / 1000)
        destination.link.open_room(self.key)
        self.check_ready()

    @property
    def is_complete(self) -> bool:
        """Every destination it was told of has offered: another peer is none of its business."""
        return self._expected is not None and len(self.destinations) >= self._expected

    async def all_offered(self) -> None:
        """Return when every destination has offered and can be written to."""
        await asyncio.shield(self._offered)

    def check_ready(self) -> None:
        """Start sending once a chunk is registered and every destination has offered and can be written to."""
        if self.machine.state is not PrefillState.WAITING or not self.chunks:
            return
        if self.destinations and any(chunk.data.fake for chunk in self.chunks.values()):
            self.fail(MismatchError("a decode offered its pages to a room that asks for no transfer"))
            return
        if not self.is_complete:
            return
        if not all(destination.connected for destination in self.destinations.values()):
            return
        self.stamps["ready"] = self.sender.clock.now()
        self.outcome.transferring()
        self.touch()
        self._deadlines.wait(self.sender.config.progress_timeout_s)
        self._fire(PrefillEvent.READY)
        self._offered.set_result(None)

    # -- what the coroutine asks ---------------------------------------------------------------------------------

    def check_chunk(self, chunk: Chunk) -> None:
        """Plan the chunk for every destination. Raises MismatchError."""
        for destination in self.destinations.values():
            if not destination.dummy:
                plan = destination.plan(chunk.data)
                self.sender.planner.fragmented(len(plan.runs), plan.runs.pages)
                self._admit(destination, plan)

    def _admit(self, destination: Destination, plan: ChunkPlan) -> None:
        """Predict how long the room's bytes take on this link. Raises TransferError, if so configured, when they
        cannot land by the deadline (N7)."""
        predicted = destination.predict(plan) if self.predicted is None else None
        if predicted is None:
            return
        self.predicted = predicted
        left = self._deadlines.left
        if self.sender.config.admission and predicted > left:
            raise TransferError(
                "the room cannot land by its deadline", predicted_s=round(predicted, 3), left_s=round(left, 3)
            )

    def hooked_buffers(self, layers: Iterable[int]) -> list[LayerBuffer]:
        by_layer = self.sender.hooked_buffers
        return [buffer for layer in layers for buffer in by_layer.get(layer, ())]

    def buffers_without(self, layers: frozenset[int]) -> list[LayerBuffer]:
        """Every page buffer that was not sent with a fired layer."""
        return [b for b in self.sender.page_buffers if not (b.hooked and b.layer in layers)]

    def hand_over(self, chunk: Chunk, kind: str, buffers: Sequence[LayerBuffer], group: Group) -> None:
        """Give the blocks of these source buffers to every destination's lane. Raises what failed the room, if that
        happened here: its coroutine is not cancelled from within itself."""
        for destination in list(self.destinations.values()):
            if not destination.dummy:
                plan = destination.plans[chunk.key.start_token]
                pairs = destination.pairs_of(buffers)
                blocks = plan.blocks(pairs, self.sender.engine.limits.max_block_bytes)
                layers = tuple(sorted({pair.src.layer for pair in pairs}))
                span = self._span(chunk, kind, layers, len(blocks), blocks.nbytes, group)
                destination.post(self, chunk, blocks, span, pairs, plan.positions)
        self._check_alive()

    def hand_over_aux(self, chunk: Chunk, group: Group) -> None:
        """Aux slot and state rows: once, with the last chunk (A14). Raises like `hand_over`."""
        for destination in list(self.destinations.values()):
            for pairs, blocks, runs in destination.aux_blocks(chunk.data):
                span = self._span(chunk, "aux", (), len(blocks), blocks.nbytes, group)
                destination.post(self, chunk, blocks, span, pairs, runs)
        self._check_alive()

    def _check_alive(self) -> None:
        if self.outcome.error is not None:
            raise self.outcome.error

    def _span(self, chunk: Chunk, kind: str, layers: tuple[int, ...], blocks: int, nbytes: int, group: Group) -> Span:
        span = Span(chunk.key.start_token, layers, kind, nbytes, blocks)
        span.fired, span.queued = group.fired_at, self.sender.clock.now()
        if group.ready_at is None:
            group.ready_at = span.queued  # the chunk may hear before the group's own stamp
        span.ready = group.ready_at
        if blocks and len(self.spans) < MAX_SPANS:
            self.spans.append(span)
        return span

    async def prove(self, chunk: Chunk) -> None:
        """Hash what was sent, for the decode to compare; nothing unless configured."""
        if self.sender.config.digest:
            for destination in list(self.destinations.values()):
                await destination.digest(chunk.data)

    def is_next(self, chunk: Chunk) -> bool:
        """Whether every chunk registered before this one has concluded."""
        return self._sequence[self.concluded_chunks] is chunk

    def concluded(self, chunk: Chunk) -> None:
        self.concluded_chunks += 1
        if self.concluded_chunks < len(self._sequence):
            self._sequence[self.concluded_chunks].wake()
        if self.outcome.failed:  # a thread aborted meanwhile: Done(ok) must not follow
            self.fail(self.outcome.error or AbortedError("aborted"))
        elif chunk.data.last:
            self._fire(PrefillEvent.LANDED)

    # -- completions ---------------------------------------------------------------------------------------------

    def handover_done(self, destination: Destination, chunk: Chunk, handover: Handover) -> None:
        """Called by the lane when nothing of the hand-over runs or will run. Permits were returned before."""
        self.outstanding -= 1
        self.touch()
        chunk.outstanding -= 1
        chunk.wake()
        if not handover.landed and not self.outcome.failed:
            self.write_failed(destination, TransferError("blocks were dropped"))
        self._check_drained()

    def write_failed(self, destination: Destination, error: KvferryError) -> None:
        """The first failed or refused write: the room ends now, on every lane, and then drains."""
        if not self.outcome.failed:
            self.sender.write_failed(destination)
            self.fail(as_transfer_error(error, peer=destination.link.peer.hex()[:8]))

    # -- the end -------------------------------------------------------------------------------------------------

    def committed(self, destination: Destination) -> None:
        destination.committed = True
        self.sender.write_worked(destination)
        if self.machine.state is PrefillState.COMMITTING and all(d.committed for d in self.destinations.values()):
            self.stamps["committed"] = self.sender.clock.now()
            if self.outcome.succeed(result(self)):
                self._fire(PrefillEvent.COMMITTED)
            else:
                self.fail(AbortedError("aborted while the decode committed"))

    def skip(self) -> None:
        """A fake room's forward ended: it succeeds without a transfer."""
        if self.outcome.succeed(result(self)):
            self._fire(PrefillEvent.SKIP)

    def fail(self, error: TransferError) -> None:
        """End the room with its first cause; drain what runs; tell every peer. Idempotent."""
        self.outcome.fail(error)
        if not self.outcome.failed:
            return
        if self.machine.accepts(PrefillEvent.FAIL):
            self._fire(PrefillEvent.FAIL)
        self._check_drained()

    def _check_drained(self) -> None:
        """Not amid the actions of another event: stopping can finish the last hand-over, and the peers are to hear why
        the room failed before they hear that it has drained."""
        if self.outstanding == 0 and not self._acting and self.machine.accepts(PrefillEvent.DRAINED):
            self._fire(PrefillEvent.DRAINED)

    def _fire(self, event: PrefillEvent) -> None:
        self._acting = True
        try:
            for action in self.machine.fire(event):
                self._perform(action)
        finally:
            self._acting = False

    def _perform(self, action: Action) -> None:
        match action:
            case Action.STOP_SUBMITTING:
                self._stop()
            case Action.TELL_PEERS:
                reason = str(self.outcome.error)[:4000]
                for destination in self.destinations.values():
                    destination.link.post(Abort(room=self.key.room, gen=self.key.gen, origin="prefill", reason=reason))
            case Action.SEND_DONE:
                self._send_done()
            case Action.ACK:
                for destination in self.destinations.values():
                    destination.link.post(destination.abort_ack(self.key))
            case Action.END:
                self._end()
            case Action.SEND_COMMITTED:
                raise IllegalTransitionError("a prefill room commits nothing", key=str(self.key))

    def _send_done(self) -> None:
        now = self.sender.clock.now()
        self.stamps["done"] = now
        self._deadlines.wait(self.sender.config.commit_timeout_s)
        for destination in self.destinations.values():
            destination.link.post(
                Done(
                    room=self.key.room,
                    gen=self.key.gen,
                    status="ok",
                    coverage=destination.ledger.coverage(),
                    bytes=destination.bytes,
                    blocks=destination.blocks,
                    timing=timing(self),
                    digests=tuple(destination.digests),
                )
            )

    def _stop(self) -> None:
        self._deadlines.stop()
        for chunk in self.chunks.values():
            if chunk.machine.accepts(ChunkEvent.FAIL):
                chunk.machine.fire(ChunkEvent.FAIL)
            if chunk.forward is not None:
                chunk.forward.detach(chunk)
            if chunk.task is not None and chunk.task is not asyncio.current_task():
                chunk.task.cancel()
        for destination in self.destinations.values():
            destination.stop(self.key)
        if self.outstanding:
            self._deadlines.drain(self.sender.config.drain_timeout_s, self._drain_expired)

    def _drain_expired(self) -> None:
        if self.machine.accepts(PrefillEvent.DRAIN_DEADLINE):
            self._fire(PrefillEvent.DRAIN_DEADLINE)

    def _expired(self) -> None:
        idle = self._deadlines.idle
        if self.machine.state is PrefillState.SENDING and self._deadlines.go_on(self.sender.config.progress_timeout_s):
            return
        waits = {PrefillState.WAITING: "for its offers and its registration", PrefillState.COMMITTING: "for Committed"}
        self.fail(
            DeadlineError(
                f"the room's deadline passed while it waited {waits.get(self.machine.state, 'to land')}",
                idle_s=round(idle, 3),
                room=str(self.key),
                state=self.machine.state.name,
                offers=f"{len(self.destinations)} of {self._expected or 'unknown'}",
                peers=",".join(link.hex()[:8] for link in self.destinations),
                layers=layer_counts(self),
                chunks="; ".join(repr(chunk) for chunk in list(self.chunks.values())[:4]),
            )
        )

    def _end(self) -> None:
        self._deadlines.close()
        for chunk in self.chunks.values():
            chunk.stop_watching()
        if not self._offered.done():
            self._offered.cancel()
        self.stamps["ended"] = self.sender.clock.now()
        self.outcome.close(result(self))
        for destination in self.destinations.values():
            destination.link.close_room(self.key)
        self.sender.room_ended(self)
        self.outcome.free_units()
