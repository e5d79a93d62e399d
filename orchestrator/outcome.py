"""How a room generation ends: exactly once, first cause wins, visible to every thread at once (V4, C6).

The outcome is what the caller sees. It is decided here, under one small lock, by whichever side comes first: the loop
that concludes, or a thread that aborts. Where the room itself stands is another matter (`protocols.machines`): a room
whose outcome is FAILED still drains, and its source or destination units are still leased until that is over.
"""

from __future__ import annotations

import concurrent.futures
import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any

from orchestrator.trace import TransferResult
from protocols.errors import TransferError
from protocols.ids import RoomKey


class RoomStatus(Enum):
    """What `poll` says."""

    WAITING = "known; nothing is being sent yet"
    TRANSFERRING = "data is on its way"
    SUCCESS = "committed by the decode"
    FAILED = "ended without success; `result().error` says why"

    @property
    def ended(self) -> bool:
        return self in (RoomStatus.SUCCESS, RoomStatus.FAILED)


log = logging.getLogger("kvferry.rooms")

_lock = threading.Lock()


class Outcome:
    """One room generation on one side. Reading is free from any thread; ending it is linearised by one lock."""

    __slots__ = ("_free_callbacks", "_future", "error", "failed", "key", "result", "specs", "status", "units_free")

    def __init__(self, key: RoomKey) -> None:
        self.key = key
        self.status = RoomStatus.WAITING
        self.failed = False
        """Cheap to read before each submission: a failed room starts nothing further."""
        self.error: TransferError | None = None
        self.result: TransferResult | None = None
        """Set by the loop: with success, or, after a failure, once the room has drained and its books are closed."""
        self.units_free = False
        """Source pages may be reused (prefill), destination units belong to the embedder again (decode)."""
        self.specs: dict[int, tuple[Any, Any]] = {}
        """Prefill: validated chunks by the identity of the spec they came from; kept alive here until the end."""
        self._future: concurrent.futures.Future[Outcome] | None = None
        self._free_callbacks: list[Callable[[], None]] = []

    def transferring(self) -> None:
        with _lock:
            if not self.status.ended:
                self.status = RoomStatus.TRANSFERRING

    def succeed(self, result: TransferResult) -> bool:
        """True if this ended the room, False if it had ended before."""
        return self._end(RoomStatus.SUCCESS, None, result)

    def fail(self, error: TransferError) -> bool:
        """True if this ended the room, False if it had ended before: the first cause stands."""
        _drop_frames(error)
        return self._end(RoomStatus.FAILED, error, None)

    def close(self, result: TransferResult) -> None:
        """Loop thread: the room's books are closed, this is what they say."""
        self.result = result
        self.specs = {}

    def _end(self, status: RoomStatus, error: TransferError | None, result: TransferResult | None) -> bool:
        with _lock:
            if self.status.ended:
                return False
            self.error = error
            self.result = result
            self.failed = status is RoomStatus.FAILED
            self.status = status
            future = self._future
        if future is not None:
            future.set_result(self)
        return True

    def future(self) -> concurrent.futures.Future[Outcome]:
        """Resolves, in the ending thread, when the outcome is decided. Shared: never cancel it."""
        with _lock:
            if self._future is None:
                self._future = concurrent.futures.Future()
                if self.status.ended:
                    self._future.set_result(self)
            return self._future

    def free_units(self) -> None:
        """Loop thread: no engine task of this room touches its units any more. Runs the callbacks once."""
        with _lock:
            if self.units_free:
                return
            self.units_free = True
            callbacks, self._free_callbacks = self._free_callbacks, []
        for callback in callbacks:
            try:
                callback()
            except Exception:
                log.exception("a callback of room %s raised; the others go on", self.key)

    def on_units_free(self, callback: Callable[[], None]) -> None:
        """Call back once, on the loop thread (or here and now if it has happened already)."""
        with _lock:
            if not self.units_free:
                self._free_callbacks.append(callback)
                return
        callback()


def _drop_frames(error: BaseException | None) -> None:
    """An error keeps the frames it was raised through, and they the room with all its pages: as long as its tombstone,
    or for ever when a write is in doubt. What happened stands in its text and data, and in its causes."""
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
