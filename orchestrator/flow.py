"""Windowed submission to one session, fair between rooms.

A chunk hands over all blocks of a layer group at once; the lane submits them as the window allows, rooms taking turns:
a turn is a quantum of bytes, or a batch in blocks, or one block that is larger. A room whose first hand-over is no more
than a turn goes before those that are in turn, and while several rooms queue part of the window is kept for such: a
small room does not wait until large ones have landed what they have in flight. Permits come back when the engine says a
batch is terminal, never when somebody stops waiting (V5). A block is submitted once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from orchestrator.clock import Clock
from orchestrator.engines.base import Batch, Engine
from orchestrator.handover import Handover
from orchestrator.progress import LONGEST_S, Pace
from protocols.errors import BrokenPeerError, KvferryError
from protocols.ids import RoomKey, Session
from protocols.linkmodel import LinkModel
from protocols.turns import Turns
from protocols.window import Width, Window, WindowStatistics


@dataclass(frozen=True, slots=True)
class LaneStatistics:
    window: WindowStatistics
    rooms: int
    queued_blocks: int
    batches: int


EARLY = 0.5
"""Part of the time foreseen for what is in flight after which the engine is asked."""
BLOCKS_SHARED, BYTES_SHARED = 2, 4
"""While several rooms queue, those in turn have this part of the window: 80 blocks and 2 MiB still keep a link busy."""
LATE_S = 0.0025
"""A pass that comes so long after it was due was kept from coming: half of a switch interval."""
SMOOTH = 0.1
"""Weight of the newest submission in the running mean of what one costs."""
SLOW_S = 0.02
"""A submission that took longer met with something else: it counts as this."""
LONG_PERIOD_BYTES = 64 << 20
"""A busy period longer than this is observed in pieces."""


class _Busy:
    """A period in which something was in flight."""

    __slots__ = ("blocks", "nbytes", "since", "spoilt", "starts")

    def __init__(self, since: float, starts: int = 1) -> None:
        self.since = since
        self.starts = starts
        self.blocks = 0
        self.nbytes = 0
        self.spoilt = False

    def add(self, blocks: int, nbytes: int) -> None:
        self.blocks += blocks
        self.nbytes += nbytes


class Lane:
    """One session's queue and window. Loop thread only."""

    def __init__(self, session: Session, engine: Engine, clock: Clock, pace: Pace, quantum_bytes: int) -> None:
        limits = engine.limits
        self.session = session
        self.max_block_bytes = limits.max_block_bytes
        self._engine = engine
        self._clock = clock
        self._pace = pace
        self._window = Window(limits.window_blocks, limits.window_bytes)
        self._later = Window(limits.window_blocks, limits.window_bytes)
        """The part of the window that rooms in turn hold."""
        self._width = Width(limits.window_blocks, limits.max_window_blocks, limits.max_batch_blocks)
        self._rooms: dict[RoomKey, deque[Handover]] = {}
        self._turns: Turns[RoomKey] = Turns(quantum_bytes)
        self._due = 0.0
        self._pumping = False
        self._on_idle: list[Callable[[], object]] = []
        self._busy: _Busy | None = None
        self.submission_s = 0.0
        """Seconds that the engine keeps the loop with a submission, of late: beside a forward thread that holds the GIL
        it waits for that, too."""
        self.model = LinkModel()
        """What this link costs, learnt from its busy periods."""
        self.batches = 0

    @property
    def idle(self) -> bool:
        """Nothing queued and nothing in flight."""
        return not self._rooms and self._window.idle

    def post(self, handover: Handover) -> None:
        """Queue the blocks behind the room's earlier ones. An empty hand-over is done at once."""
        if len(handover.blocks) == 0 or handover.outcome.failed:
            handover.finish()
            return
        key = handover.outcome.key
        queue = self._rooms.get(key)
        if queue is None:
            queue = self._rooms[key] = deque()
            small = len(handover.blocks) <= self._width.batch and handover.span.bytes <= self._turns.quantum
            self._turns.add(key, fresh=small)
        queue.append(handover)
        self.pump()

    def when_idle(self, callback: Callable[[], object]) -> None:
        """Call back once nothing is queued or in flight (now, if so)."""
        if self.idle:
            callback()
        else:
            self._on_idle.append(callback)

    def stop(self, key: RoomKey) -> None:
        """Submit nothing further for the room. What is in flight runs to its end and then finishes its hand-over."""
        queue = self._rooms.get(key)
        if queue is None:
            return
        self._forget(key)
        for handover in queue:
            if not handover.inflight:
                handover.finish()

    def pump(self) -> None:
        """Submit what the window allows. Called after every hand-over and after every pass with completions."""
        if self._pumping:
            return
        self._pumping = True
        try:
            self._set_shares()
            while self._rooms and self._one_turn():
                pass
        finally:
            self._pumping = False
        self._foresee()

    @property
    def _in_turns(self) -> bool:
        """Rooms are to share the window finely. Not while the loop comes round late: each submission costs a wait for
        the GIL then, and turns of a few blocks would make every room late."""
        return len(self._rooms) > 1 and not self._width.late

    def _set_shares(self) -> None:
        """Alone a room has the whole window; beside others those in turn share a part of it."""
        blocks, nbytes = self._width.blocks, self._window.max_bytes
        self._window.max_blocks = blocks
        if self._in_turns:
            blocks, nbytes = max(1, blocks // BLOCKS_SHARED), max(1, nbytes // BYTES_SHARED)
        self._later.max_blocks, self._later.max_bytes = blocks, nbytes

    def _one_turn(self) -> bool:
        """Let one room submit one batch. False when the window has no place for any whose turn it is."""
        return any(self._submit_of(key) for key in self._turns.candidates())

    def _submit_of(self, key: RoomKey) -> bool:
        """One batch of this room. False when the window has no place for it."""
        handover = self._rooms[key][0]
        if handover.outcome.failed:
            self.stop(key)
            return True
        share = None if self._turns.is_fresh(key) else self._later
        first, at_most = handover.posted, self._width.batch
        waiting: list[int] = handover.blocks.length[first : first + at_most].tolist()
        waiting = waiting[: self._bytes_fit(waiting, key)]
        count = self._window.fitting(waiting, at_most)
        if share is not None and count:
            count = share.fitting(waiting[:count], at_most)
        if count == 0:
            return False
        self._submit(handover, first, count, sum(waiting[:count]), share)
        return True

    def _bytes_fit(self, waiting: list[int], key: RoomKey) -> int:
        """How many of these blocks a batch takes: its part of the window in bytes, beside other rooms what is left of
        the turn; at least one."""
        left = self._window.max_bytes // self._width.parts
        if self._in_turns:
            left = min(left, self._turns.left(key))
        for count, length in enumerate(waiting):
            left -= length
            if left < 0:
                return max(1, count)
        return len(waiting)

    def _submit(self, handover: Handover, first: int, count: int, nbytes: int, share: Window | None) -> None:
        part = handover.blocks[first : first + count]
        now = self._clock.now()  # before the engine has it: a stamp from after would make the link look faster
        try:
            batch = self._engine.submit(self.session, part)
        except KvferryError as exc:
            self._refused(handover, exc)
            return
        self.submission_s += SMOOTH * (min(self._clock.now() - now, SLOW_S) - self.submission_s)
        key = handover.outcome.key
        handover.posted += count
        handover.inflight.append((first, batch))
        if handover.span.posted is None:
            handover.span.posted = now
        self.batches += 1
        if self._busy is None:
            self._busy = _Busy(now)
        self._busy.add(count, nbytes)
        self._window.take(count, nbytes)
        if share is not None:
            share.take(count, nbytes)
        # However small its blocks, a turn is over after a batch.
        self._turns.went(key, max(nbytes, count * self._turns.quantum // self._width.batch))
        if handover.posted == len(handover.blocks):
            queue = self._rooms[key]
            queue.popleft()
            if not queue:
                self._forget(key)
        batch.add_callbacks(
            lambda done: self._batch_done(handover, first, done, nbytes, share),
            lambda failed: self._failed(handover, failed),
        )

    def _refused(self, handover: Handover, exc: KvferryError) -> None:
        """Nothing of that batch was submitted; what was sent before drains, and nothing follows for the room (B2)."""
        handover.fail(exc)
        self.stop(handover.outcome.key)

    def _forget(self, key: RoomKey) -> None:
        del self._rooms[key]
        self._turns.remove(key)

    def _batch_done(self, handover: Handover, first: int, batch: Batch, nbytes: int, share: Window | None) -> None:
        self._window.give_back(len(batch.blocks), nbytes)
        if share is not None:
            share.give_back(len(batch.blocks), nbytes)
        handover.inflight = [(at, other) for at, other in handover.inflight if other is not batch]
        if batch.failed:
            handover.in_doubt += [first + index for index in batch.in_doubt]
            handover.missed += len(batch.never_submitted)
            if self._busy is not None:
                self._busy.spoilt = True
        if not handover.inflight and handover not in self._rooms.get(handover.outcome.key, ()):
            if handover.is_complete:
                handover.span.landed = self._clock.now()
            handover.finish()
        self._pace.after_pass(self._refill)

    def _refill(self) -> None:
        """After all that one pass learnt: only then does a dry window show, and one batch can take what is free."""
        if self._rooms:
            self._width.refill(dry=self._window.idle, late=self._clock.now() - self._due > LATE_S)
        self.pump()
        self._observe()
        if self._on_idle and self.idle:
            callbacks, self._on_idle = self._on_idle, []
            for callback in callbacks:
                callback()

    def _foresee(self) -> None:
        """Tell when the next question is worth it: when half of what is in flight should have landed, beyond which the
        window could run dry or the end be seen late. That corrects itself: what comes earlier than foreseen is learnt
        as such. A small room among large ones is not to wait for it."""
        blocks, nbytes = self._window.blocks, self._window.nbytes
        if blocks == 0:
            self._pace.expect(self, None)
            return
        self._due = now = self._clock.now()
        fresh_ones = blocks > self._later.blocks
        if not self.model.known or (fresh_ones and self._rooms):
            self._pace.expect(self, now)
            return
        whole = self._busy is not None and self._busy.blocks == blocks
        seconds = self.model.costs().seconds(nbytes, blocks, float(whole))
        self._due = now + min(seconds * EARLY, LONGEST_S)
        self._pace.expect(self, self._due)

    def _observe(self) -> None:
        """Teach the model at the end of a busy period, or once a long one has moved enough."""
        busy = self._busy
        if busy is None:
            return
        over = self.idle
        if over or busy.nbytes >= LONG_PERIOD_BYTES:
            now = self._clock.now()
            if not busy.spoilt:
                self.model.observe(busy.nbytes, busy.blocks, now - busy.since, starts=busy.starts)
            self._busy = None if over else _Busy(now, starts=0)

    def _failed(self, handover: Handover, batch: Batch) -> None:
        """The first failed block of a batch: nothing further is submitted for the room, what runs is drained."""
        handover.fail(BrokenPeerError(f"the engine failed a write: {batch.reason}", session=self.session))
        self.stop(handover.outcome.key)

    def statistics(self) -> LaneStatistics:
        queued = sum(len(h.blocks) - h.posted for queue in self._rooms.values() for h in queue)
        return LaneStatistics(self._window.statistics(), len(self._rooms), queued, self.batches)
