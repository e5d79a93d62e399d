"""The only place where time is read. Seconds, monotonic; one clock for every process of a machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol


class Timer(Protocol):
    """A pending callback."""

    def cancel(self) -> None: ...


class Clock(Protocol):
    """Injected everywhere, so that a simulation can drive the same objects."""

    def now(self) -> float:
        """Monotonic seconds. Any thread."""
        ...

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        """Run ``callback`` on the loop after ``delay`` seconds. Loop thread only."""
        ...


class LoopClock:
    """The real one: CLOCK_MONOTONIC, timers of the running loop (1 ms grain under uvloop)."""

    def now(self) -> float:
        return time.monotonic()

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        return asyncio.get_running_loop().call_later(delay, callback)
