"""The one paced poller. It runs only while something is pending; with nothing pending the process uses no CPU.

CUDA events and engine batches complete without telling anybody, so they must be asked. Asking is done here, for all of
them, in one pass; everything that completed is resolved in that pass. The pace follows the expected completion without
a model of it: the longer nothing has completed, the rarer the question, by a fixed fraction of that time, so that a
completion is seen late by at most that fraction (bounded both ways).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from orchestrator.clock import Clock
from orchestrator.timerfd import make_timer

log = logging.getLogger("kvferry.progress")

SHORTEST_S = 0.0002
LONGEST_S = 0.002
FRACTION = 1 / 8


class Source(Protocol):
    """Something that must be asked."""

    @property
    def pending(self) -> int: ...

    def poll(self) -> int:
        """Resolve what completed and return how much that was. Never blocks."""
        ...


class Pacer:
    """Loop thread only. `kick` whenever a source may have become pending."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._timer = make_timer(loop, self._tick)
        self._sources: list[Source] = []
        self._running = False
        self._closed = False
        self._last_progress = 0.0
        self.passes = 0
        """How often the sources were asked; does not move while nothing is pending."""

    def add(self, source: Source) -> None:
        if source not in self._sources:
            self._sources.append(source)

    def kick(self) -> None:
        """Something is pending: ask soon, then keep pace. Cheap when already running."""
        if not self._running and not self._closed:
            self._running = True
            self._last_progress = self._clock.now()
            self._loop.call_soon(self._tick)

    def _tick(self) -> None:
        if self._closed:
            return
        self.passes += 1
        completed = 0
        for source in self._sources:
            if source.pending:
                try:
                    completed += source.poll()
                except Exception:
                    log.exception("a source failed while it was asked; the others go on")
        pending = any(source.pending for source in self._sources)  # also what a later source's completion began
        now = self._clock.now()
        if completed:
            self._last_progress = now
        if pending:
            waited = now - self._last_progress
            self._timer.arm(min(max(waited * FRACTION, SHORTEST_S), LONGEST_S))
        else:
            self._running = False

    def close(self) -> None:
        self._closed = True
        self._timer.close()
