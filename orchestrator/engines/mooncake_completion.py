"""How Mooncake says that blocks are done: two ways, one interface.

Native batch ids live here and go no further. An id is a raw pointer: asking about one that was freed crashes the
process. So each id has exactly one owner, an entry in one queue, which leaves the queue when the id is freed.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import ClassVar, Generic, TypeVar

from orchestrator.engines.base import Batch
from orchestrator.engines.mooncake_abi import COMPLETED, FAILED, WAITING, Abi
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError
from protocols.ids import Session

log = logging.getLogger(__name__)

LOOK_AHEAD = 16
"""A session's poll stops after this many unfinished entries. At least the most lanes a peer can have: with that many
stuck, nothing behind them moves either."""

FAILED_REASON = "the transport failed this block: the peer is gone or stopped, or has no such memory registered"
REFUSED_REASON = "the engine refused this block"
CLOSED_REASON = "the engine was closed before this block was terminal"

Ints = tuple[list[int], list[int], list[int]]
"""Sources, destinations and lengths of a batch, checked."""


class _Counted(Batch):
    """A batch that knows how many of its blocks have no verdict yet."""

    __slots__ = ("left",)

    def __init__(self, session: Session, blocks: Blocks) -> None:
        super().__init__(session, blocks)
        self.left = len(blocks)


_Verdict = tuple[_Counted, int, int, str]
"""(batch, n, index, reason): ``n`` of its blocks are terminal; if there is a reason, block ``index`` failed of it."""

Entry = TypeVar("Entry")


class Completion(ABC, Generic[Entry]):
    """Submits, and polls each session's entries oldest first. Loop thread only.

    Verdicts are delivered after all queues are in order again, so a callback may submit; one that raises goes through
    to the caller of ``poll``, and the verdicts behind it are delivered by the next.
    """

    mode: ClassVar[str]
    """The word for EngineInfo.completion_mode."""

    def __init__(self) -> None:
        self.pending = 0
        """Batches not done."""
        self._queues: dict[Session, deque[Entry]] = {}
        self._verdicts: deque[_Verdict] = deque()
        self._abandoned = False

    @abstractmethod
    def submit(self, session: Session, blocks: Blocks, ints: Ints) -> Batch:
        """Hand the blocks over. Raises BrokenPeerError if all are refused."""

    @abstractmethod
    def _settled(self, entry: Entry) -> bool:
        """Ask once, note verdicts; True if all blocks of the entry are terminal and its id is freed."""

    @abstractmethod
    def _open_blocks(self, entry: Entry) -> tuple[_Counted, list[int]]:
        """The batch, and the indices of the entry's blocks that are not terminal."""

    def poll(self) -> int:
        """Settle what became terminal, run its callbacks and return the number of blocks."""
        if self._abandoned:
            return 0
        for session, queue in list(self._queues.items()):
            unfinished: list[Entry] = []
            while queue and len(unfinished) < LOOK_AHEAD:
                entry = queue.popleft()
                if not self._settled(entry):
                    unfinished.append(entry)
            queue.extendleft(reversed(unfinished))
            if not queue:
                del self._queues[session]
        return self._deliver()

    @abstractmethod
    def _forget_engine(self) -> None:
        """Drop every reference to the native engine: the last one to go deletes it."""

    def abandon(self) -> None:
        """The native engine is about to be deleted: forget it and every id. ``poll`` delivers nothing any more."""
        for queue in self._queues.values():
            for entry in queue:
                batch, indices = self._open_blocks(entry)
                self._verdicts.extend((batch, 1, index, CLOSED_REASON) for index in indices)
        self._queues.clear()
        self._abandoned = True
        self._forget_engine()

    def finish(self) -> None:
        """It is deleted, so no source is read any more: finish every batch, open blocks in doubt."""
        while self._verdicts:
            try:
                self._deliver()
            except Exception:
                log.exception("a completion callback failed while the engine was closing")

    def _enter(self, session: Session, entry: Entry) -> None:
        queue = self._queues.get(session)
        if queue is None:
            queue = self._queues[session] = deque()
        queue.append(entry)

    def _deliver(self) -> int:
        delivered = 0
        while self._verdicts:
            batch, count, index, reason = self._verdicts.popleft()
            delivered += count
            batch.left -= count
            try:
                if reason:
                    batch.fail_block(index, reason)
            finally:
                if batch.left == 0:
                    self.pending -= 1
                    batch.finish()
        return delivered


def _gone(*_: object) -> int:
    """In place of a call of a deleted engine: 0 is a refusal, and no answer about an id."""
    return 0


class OneBlock(Completion[tuple[int, _Counted, int]]):
    """Each block is a native batch of its own: exact for every block, plain API, nothing leaks."""

    mode = "one-block"

    def __init__(self, submit_write: Callable[[str, int, int, int], int], check_status: Callable[[int], int]) -> None:
        super().__init__()
        self._submit_write = submit_write
        self._check_status = check_status

    def submit(self, session: Session, blocks: Blocks, ints: Ints) -> Batch:
        batch = _Counted(session, blocks)
        taken = 0
        for src, dst, length in zip(*ints, strict=True):
            ident = self._submit_write(session, src, dst, length)
            if ident == 0:
                break
            self._enter(session, (ident, batch, taken))
            taken += 1
        if taken == 0:
            raise BrokenPeerError("the engine refused the submission", session=session)
        batch.left = taken
        for index in range(taken, len(blocks)):
            batch.refuse_block(index, REFUSED_REASON)
        self.pending += 1
        return batch

    def _settled(self, entry: tuple[int, _Counted, int]) -> bool:
        ident, batch, index = entry
        status = self._check_status(ident)
        if status == 1:
            self._verdicts.append((batch, 1, 0, ""))
        elif status == -1:
            self._verdicts.append((batch, 1, index, FAILED_REASON))
        else:  # running; -2 is a native timeout, which stops nothing and leaves the id alive
            return False
        return True

    def _open_blocks(self, entry: tuple[int, _Counted, int]) -> tuple[_Counted, list[int]]:
        return entry[1], [entry[2]]

    def _forget_engine(self) -> None:
        self._submit_write = self._check_status = _gone


class _Flight:
    """A native batch of many blocks."""

    __slots__ = ("batch", "ident", "open", "singly")

    def __init__(self, ident: int, batch: _Counted) -> None:
        self.ident = ident
        self.batch = batch
        self.open = list(range(len(batch.blocks)))
        self.singly = False
        """One block failed: the others are asked one by one."""


class BatchStatus(Completion[_Flight]):
    """One native batch for all blocks, asked through the exported symbols: cheaper by the block.

    A batch says FAILED at its first failed block while others still run. From then on each block is asked until all
    are terminal, and only then is the id freed, once.
    """

    mode = "batch-status"

    def __init__(self, submit_batch: Callable[[str, list[int], list[int], list[int]], int], abi: Abi) -> None:
        super().__init__()
        self._submit_batch = submit_batch
        self._abi = abi

    def submit(self, session: Session, blocks: Blocks, ints: Ints) -> Batch:
        ident = self._submit_batch(session, *ints)
        if ident == 0:
            raise BrokenPeerError("the engine refused the submission", session=session)
        batch = _Counted(session, blocks)
        self._enter(session, _Flight(ident, batch))
        self.pending += 1
        return batch

    def _settled(self, entry: _Flight) -> bool:
        if not entry.singly:
            state = self._abi.batch_status(entry.ident)
            if state == WAITING:
                return False
            if state == COMPLETED:
                self._verdicts.append((entry.batch, len(entry.open), 0, ""))
                self._free(entry.ident)
                return True
            entry.singly = True
        entry.open = [index for index in entry.open if not self._terminal(entry, index)]
        if entry.open:
            return False
        self._free(entry.ident)
        return True

    def _terminal(self, entry: _Flight, index: int) -> bool:
        state = self._abi.task_status(entry.ident, index)
        if state == COMPLETED:
            self._verdicts.append((entry.batch, 1, 0, ""))
        elif state == FAILED:
            self._verdicts.append((entry.batch, 1, index, FAILED_REASON))
        else:
            return False
        return True

    def _free(self, ident: int) -> None:
        if not self._abi.free(ident):
            log.warning("mooncake did not free a batch whose blocks are all terminal; its memory is leaked")

    def _open_blocks(self, entry: _Flight) -> tuple[_Counted, list[int]]:
        return entry.batch, entry.open

    def _forget_engine(self) -> None:
        self._submit_batch = _gone
