"""The one paced poller. It runs only while something is pending; with nothing pending the process uses no CPU.

CUDA events and engine batches complete without telling anybody, so they must be asked. Asking is done here, for all of
them, in one pass; everything that completed is resolved in that pass. Where a completion is expected, by what the link
has cost so far, nobody is asked before. Beyond it, and where nothing is known, the pace needs no model: the longer
nothing has completed, the rarer the question, by a fixed fraction of that time, so that a completion is seen late by at
most that fraction (bounded both ways).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
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


class Pace(Protocol):
    """What a lane needs of the pacer."""

    def expect(self, who: object, due: float | None) -> None: ...

    def after_pass(self, callback: Callable[[], object]) -> None: ...


class Pacer:
    """Loop thread only. `kick` whenever a source may have become pending."""

    def __init__(self, loop: asyncio.AbstractEventLoop, clock: Clock) -> None:
        self._loop = loop
        self._clock = clock
        self._timer = make_timer(loop, self._tick)
        self._sources: list[Source] = []
        self._unforeseen: list[Source] = []
        self._due: dict[object, float] = {}
        self._after: dict[Callable[[], object], None] = {}
        self._running = False
        self._passing = False
        self._closed = False
        self._last_progress = 0.0
        self._next = 0.0
        self.passes = 0
        """How often the sources were asked; does not move while nothing is pending."""

    def add(self, source: Source, *, foreseen: bool = False) -> None:
        """``foreseen``: of what is pending there somebody says with `expect` when it is due."""
        if source not in self._sources:
            self._sources.append(source)
            if not foreseen:
                self._unforeseen.append(source)

    def kick(self) -> None:
        """Something is pending: ask soon, then keep pace. Cheap when already running."""
        if self._running or self._closed:
            self._not_later_than(self._clock.now() + SHORTEST_S)
            return
        self._start()
        self._next = self._last_progress
        self._loop.call_soon(self._tick)

    def expect(self, who: object, due: float | None) -> None:
        """``who`` has something pending in a foreseen source, worth asking about from ``due`` on (seconds of the
        clock); None: nothing any more. A time that is past means: as for what nobody foresees."""
        if due is None:
            self._due.pop(who, None)
            return
        self._due[who] = due
        if self._running or self._closed:
            self._not_later_than(due)
        elif due <= self._clock.now() + SHORTEST_S:
            self.kick()
        else:
            self._start()
            self._arm(due - self._last_progress)

    def after_pass(self, callback: Callable[[], object]) -> None:
        """Call back once the sources have said all that this pass can learn, once however often that is asked; now,
        when no pass is under way."""
        if self._passing:
            self._after[callback] = None
        else:
            callback()

    def _start(self) -> None:
        self._running = True
        self._last_progress = self._clock.now()

    def _arm(self, delay: float) -> None:
        delay = min(max(delay, SHORTEST_S), LONGEST_S)
        self._next = self._clock.now() + delay
        self._timer.arm(delay)

    def _not_later_than(self, due: float) -> None:
        """What is newly pending may be due long before the next pass."""
        if not self._passing and not self._closed and self._next > due + SHORTEST_S:
            self._arm(due - self._clock.now())

    def _tick(self) -> None:
        if self._closed:
            return
        self.passes += 1
        self._passing = True
        completed = 0
        for source in self._sources:
            if source.pending:
                try:
                    completed += source.poll()
                except Exception:
                    log.exception("a source failed while it was asked; the others go on")
        while self._after:
            callback = next(iter(self._after))
            del self._after[callback]
            self._guarded(callback)
        self._passing = False
        self._pace(completed)

    def _guarded(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:
            log.exception("a callback after a pass failed; the others go on")

    def _pace(self, completed: int) -> None:
        now = self._clock.now()
        if completed:
            self._last_progress = now
        if not any(source.pending for source in self._sources):  # asked last: a completion may have begun something
            self._running = False
            return
        delay = (now - self._last_progress) * FRACTION
        if self._due and not any(source.pending for source in self._unforeseen):
            delay = max(delay, min(self._due.values()) - now)
        self._arm(delay)

    def close(self) -> None:
        self._closed = True
        self._timer.close()
