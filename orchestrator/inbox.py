"""The one door from threads into the loop.

Threads only deposit: append, and wake the loop once per burst. A deposit is either refused, because the loop has
ended, or it is processed; deposits of one thread are processed in their order.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from typing import Any

from protocols.errors import ClosedError

log = logging.getLogger("kvferry.inbox")

BURST = 256
"""Deposits handled before other callbacks of the loop get a turn."""


class Inbox:
    """Created on the loop; `put` may be called from any thread, the rest only on the loop."""

    __slots__ = ("_closed", "_drain", "_items", "_lock", "_loop", "_woken", "deposits", "wakes")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self._lock = threading.Lock()
        self._woken = False
        self._closed = False
        self._drain = self._run_some
        self.deposits = 0
        self.wakes = 0

    def put(self, callback: Callable[..., object], *args: Any) -> None:
        """Run ``callback(*args)`` on the loop, soon. A few microseconds, never blocks.

        Raises ClosedError once the loop has ended; then nothing was deposited.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the loop has ended")
            self._items.append((callback, args))
            if self._woken:
                return
            self._woken = True
            self.wakes += 1
            try:
                self._loop.call_soon_threadsafe(self._drain)
            except RuntimeError:  # the loop died and nobody closed the door
                self._closed = True
                self._items.clear()
                raise ClosedError("the loop has ended") from None

    def _run_some(self) -> None:
        for _ in range(min(len(self._items), BURST)):
            self._run_one()
        with self._lock:
            if self._items:
                self._loop.call_soon(self._drain)
            else:
                self._woken = False

    def _run_one(self) -> None:
        callback, args = self._items.popleft()
        self.deposits += 1
        try:
            callback(*args)
        except Exception:
            log.exception("a deposit raised; the others go on")

    def close(self) -> None:
        """Refuse further deposits and process those already accepted. Loop thread; idempotent."""
        with self._lock:
            self._closed = True
        while self._items:
            self._run_one()
