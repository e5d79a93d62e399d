"""After the forward, everything at once: one synchronous batch a window, from a worker thread.

The forward thread only says that a forward has ended; block lists are ready by then. The calling thread is free: the
engine waits without the GIL, spinning.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence

from protocols.ids import Session
from scripts.benchmarks.baselines.raw import Ints, RawEngine
from scripts.benchmarks.baselines.sending import Context

WINDOW = 1024
"""Blocks a call: more than this in flight gains nothing, and twice as many overflow the engine's default queue."""


class Monolithic:
    """One worker. ``announce`` tells the decode that a request is complete."""

    def __init__(self, engine: RawEngine, session: Session, announce: Callable[[bytes], None]) -> None:
        self._engine = engine
        self._session = session
        self._announce = announce
        self._jobs: queue.SimpleQueue[Context | None] = queue.SimpleQueue()
        self._contexts: Sequence[Context] = ()
        self.failures: list[Exception] = []
        self._thread = threading.Thread(target=self._work, name="monolithic", daemon=True)
        self._thread.start()

    def begin(self, contexts: Sequence[Context]) -> None:
        self._contexts = contexts

    def layer_end(self, layer: int) -> None:
        return None

    def end(self) -> None:
        for context in self._contexts:
            self._jobs.put(context)

    def _work(self) -> None:
        while (context := self._jobs.get()) is not None:
            try:
                for ints in context.groups:
                    self._write(ints)
            except Exception as exc:
                self.failures.append(exc)
                continue
            if context.notice:
                self._announce(context.notice)

    def _write(self, ints: Ints) -> None:
        src, dst, length = ints
        for first in range(0, len(src), WINDOW):
            part = slice(first, first + WINDOW)
            self._engine.write_sync(self._session, (src[part], dst[part], length[part]))

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()
