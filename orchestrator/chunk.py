"""One chunk on the loop: what it takes from its forward pass, and what of it is outstanding.

No policy here: the coroutine in `transfer` asks, the forward pass and the lanes answer. Loop thread only.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from orchestrator.clock import Timer
from orchestrator.forward import ForwardPass, Group
from protocols.blocks import Ints, check_units, page_array
from protocols.errors import DeadlineError, KvferryError, LayoutError, TransferError
from protocols.ids import MAX_GENERATION, MAX_ROOM, ChunkKey
from protocols.machines import CHUNK, ChunkEvent, ChunkState, Machine

if TYPE_CHECKING:
    from orchestrator.prefill_room import PrefillRoom


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSpec:
    """What one forward makes final of one room: tokens ``[start_token, end_token)``, absolute in the request.

    ``pages`` are this rank's source pages for ``positions`` (absolute page indices; all pages from ``start_token`` on
    when None). A chunk that is not the last ends at a page boundary: see `orchestrator.pages.ChunkCursor`. Aux slot
    and state rows go once, with the last chunk; their content must be final when the pass ends.
    """

    room: int
    gen: int = 0
    start_token: int | None = 0
    pages: object = None
    """None, a sequence, a numpy array or a CPU tensor of page indices."""
    last: bool = False
    end_token: int | None = None
    """None: as many tokens as the pages hold."""
    positions: object = None
    aux_slot: int | None = None
    state_rows: object = None
    fake: bool = False
    """A warm-up room: concludes with its forward, transfers nothing, reports no bytes."""

    @property
    def key(self) -> ChunkKey:
        return ChunkKey(self.room, self.gen, self.start_token or 0)


@dataclass(frozen=True, slots=True)
class ChunkData:
    """A validated `ChunkSpec`: host arrays, whole ranges."""

    key: ChunkKey
    end_token: int
    pages: Ints
    positions: Ints
    last: bool
    aux_slot: int | None
    state_rows: Ints
    fake: bool

    def same_as(self, other: ChunkData) -> bool:
        """The same chunk with the same pages: registering it again changes nothing."""
        return self is other or (
            self.end_token == other.end_token
            and self.last == other.last
            and self.aux_slot == other.aux_slot
            and np.array_equal(self.pages, other.pages)
            and np.array_equal(self.positions, other.positions)
            and np.array_equal(self.state_rows, other.state_rows)
        )


def validate(spec: ChunkSpec, page_size: int, num_pages: int) -> ChunkData:
    """Check a spec against the layout. Raises LayoutError or MismatchError; any thread."""
    start = spec.start_token or 0
    if not (0 <= spec.room <= MAX_ROOM and 0 <= spec.gen <= MAX_GENERATION and start >= 0):
        raise LayoutError("a room has 63 bits, a generation 64, a start token is not negative", key=str(spec.key))
    if start % page_size:
        raise LayoutError("a chunk starts at a page boundary", start_token=start, page_size=page_size)
    pages = page_array(spec.pages)
    check_units(pages, num_pages, "source pages")
    first = start // page_size
    if spec.positions is None:
        positions = first + np.arange(len(pages), dtype=np.int64)
    else:
        positions = page_array(spec.positions, "positions")
    end = spec.end_token if spec.end_token is not None else start + len(pages) * page_size
    if end < start or (end % page_size and not spec.last):
        raise LayoutError(
            "a chunk that is not the last ends at a page boundary",
            start_token=start,
            end_token=end,
            page_size=page_size,
        )
    last_page = -(-end // page_size)
    if len(positions) != len(pages) or (len(positions) and not first <= positions.min() <= positions.max() < last_page):
        raise LayoutError(
            "one position a page, each within the chunk",
            pages=len(pages),
            positions=len(positions),
            chunk=str(spec.key),
        )
    if spec.positions is None and len(pages) != last_page - first:
        raise LayoutError("the pages do not hold the chunk's tokens", pages=len(pages), needed=last_page - first)
    rows = page_array(spec.state_rows, "state rows")
    return ChunkData(spec.key, end, pages, positions, spec.last, spec.aux_slot, rows, spec.fake)


class Chunk:
    """See the module. Its coroutine is the only one that awaits it."""

    __slots__ = (
        "_end",
        "_fired",
        "_groups",
        "_pass_deadline",
        "_waiting",
        "data",
        "degraded_by",
        "fallback",
        "forward",
        "key",
        "layerwise",
        "machine",
        "outstanding",
        "room",
        "taken",
        "task",
    )

    def __init__(self, data: ChunkData, room: PrefillRoom, layerwise: bool) -> None:
        self.data = data
        self.key = data.key
        self.room = room
        self.machine = Machine(CHUNK, ChunkState.REGISTERED)
        self.layerwise = layerwise
        self.forward: ForwardPass | None = None
        self.taken: frozenset[int] = frozenset()
        """Layers it has taken from its forward, each once (A6)."""
        self.fallback: frozenset[int] = frozenset()
        """Layers sent after the forward's end."""
        self.degraded_by = ""
        self.outstanding = 0
        """Hand-overs that are not done."""
        self.task: asyncio.Task[None] | None = None
        self._pass_deadline: Timer | None = None
        self._groups: list[Group] = []
        self._fired = False
        """A group of its pass fired for it, sent or not."""
        self._end: Group | None = None
        self._waiting: asyncio.Future[None] | None = None

    def __repr__(self) -> str:
        return (
            f"<Chunk {self.key} {self.machine.state.name} fired={len(self.taken)} fallback={len(self.fallback)} "
            f"outstanding={self.outstanding}{' ended' if self._end else ''}>"
        )

    # -- from the forward pass -----------------------------------------------------------------------------------

    def attach(self, forward: ForwardPass) -> bool:
        """Take layers from this pass from now on. False if it does already, or if another has fired or ended: that
        one stays its own."""
        if self.forward is forward or self._end is not None:
            return False
        if self._fired or (self.forward is not None and self.forward.has_fired):
            return False
        if self.forward is not None:
            self.forward.detach(self)
        self.forward = forward
        self.stop_watching()
        sender = self.room.sender
        self._pass_deadline = sender.clock.call_later(sender.config.pass_timeout_s, self._pass_expired)
        return True

    def _pass_expired(self) -> None:
        """The pass never ended, or was discarded and no other took the chunk."""
        self.room.fail(DeadlineError("a forward pass did not end in time", chunk=repr(self)))

    def stop_watching(self) -> None:
        """Its pass may take as long as it likes from now on: it has ended, or the room has."""
        if self._pass_deadline is not None:
            self._pass_deadline.cancel()
            self._pass_deadline = None

    def fire(self, group: Group) -> None:
        if self.layerwise and self.machine.state is not ChunkState.DEGRADED:
            self._fired = True
            self._groups.append(group)
            self.wake()
            self.room.touch()

    def forward_ended(self, group: Group) -> None:
        self._end = group
        self.forward = None
        self.stop_watching()
        self.room.forward_ended(self, group.fired_at)
        self.wake()

    def given_back(self, reason: str) -> None:
        """The pass was discarded. Pages of which a layer has fired may be rewritten by the next run: fail, unless the
        chunk is degraded and reads none of them."""
        self.forward = None
        if self._fired and self.machine.state is not ChunkState.DEGRADED:
            self.fail(TransferError(reason, chunk=str(self.key), layers_taken=len(self.taken)))
        self._fired = False

    def setup_failed(self, exc: Exception) -> None:
        """Go monolithic if no byte has left, else fail the room (A10)."""
        if self.machine.accepts(ChunkEvent.DEGRADE):
            self.machine.fire(ChunkEvent.DEGRADE)
            self.degraded_by = f"{type(exc).__name__}: {exc}"
            self._groups.clear()
            self.wake()
            self.room.note_degraded(self)
        elif self.machine.state is not ChunkState.DEGRADED:
            self.fail(exc)

    def fail(self, exc: Exception) -> None:
        self.room.fail(as_transfer_error(exc, chunk=str(self.key)))

    # -- for the coroutine ---------------------------------------------------------------------------------------

    async def next_group(self) -> Group | None:
        """The next group that fired and is written, in order; None once the forward has ended and nothing fired is
        left, or the chunk goes monolithic. Raises what its event raised."""
        while True:
            if self._groups:
                group = self._groups.pop(0)
                await asyncio.shield(group.ready)
                return None if self.machine.state is ChunkState.DEGRADED else group
            if self._end is not None or not self.layerwise or self.machine.state is ChunkState.DEGRADED:
                return None
            await self._woken()

    async def forward_end(self) -> Group:
        """The group behind the forward's end event."""
        while self._end is None:
            await self._woken()
        return self._end

    async def settled(self) -> None:
        """Return when no hand-over of this chunk is outstanding."""
        while self.outstanding:
            await self._woken()

    async def turn(self) -> None:
        """Return when every chunk before this one has concluded (A9)."""
        while not self.room.is_next(self):
            await self._woken()

    async def _woken(self) -> None:
        """Return when something has changed. Nothing may be awaited between asking for it and this."""
        self._waiting = self.room.sender.loop.create_future()
        try:
            await self._waiting
        finally:
            self._waiting = None

    def wake(self) -> None:
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(None)


def as_transfer_error(exc: Exception, **data: object) -> TransferError:
    """Any cause as the kind a room carries, with the original chained."""
    if isinstance(exc, TransferError):
        return exc
    text = exc.what if isinstance(exc, KvferryError) else f"{type(exc).__name__}: {exc}"
    facts = {**(exc.data if isinstance(exc, KvferryError) else {}), **data}
    wrapped = TransferError(text, **facts)
    wrapped.__cause__ = exc
    return wrapped
