"""The design that kvferry replaces: a pool of worker threads behind one queue.

At the end of each layer group the forward thread goes through the contexts of its batch, records an event for each and
queues the group. A worker waits for the event and submits. In the asynchronous form nobody waits then; the last group
of a context leaves its batches to a blocking status call, which spins. In the blocking form each worker stays in the
synchronous call until its group has landed, as SGLang's workers do.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Protocol

from protocols.ids import Session
from scripts.benchmarks.baselines.raw import RawEngine
from scripts.benchmarks.baselines.sending import Context

WORKERS = 4


class Waitable(Protocol):
    """A recorded event that a worker can wait for."""

    def synchronize(self) -> None: ...


class HostEvent:
    """When the host has written a layer, it is there."""

    __slots__ = ()

    def synchronize(self) -> None:
        return None


class _Request:
    """How many contexts of a request have not landed, and what to announce when none is left."""

    __slots__ = ("contexts", "lock", "notice")

    def __init__(self) -> None:
        self.contexts = 0
        self.notice = b""
        self.lock = threading.Lock()

    def opened(self, context: Context) -> None:
        with self.lock:
            self.contexts += 1
            self.notice = context.notice

    def landed(self) -> bytes:
        """One more context has landed. The notice, if that was the last of the request."""
        with self.lock:
            self.contexts -= 1
            return b"" if self.contexts else self.notice


class _Progress:
    """Where one context stands."""

    __slots__ = ("context", "idents", "left", "lock", "request")

    def __init__(self, context: Context, request: _Request) -> None:
        self.context = context
        self.request = request
        self.left = len(context.groups)
        self.idents: list[int] = []
        self.lock = threading.Lock()


_Job = tuple[_Progress, int, Waitable]


class ThreadPool:
    """``group`` hooked layers a submission, of ``layers``; ``blocking`` selects the second form."""

    def __init__(
        self,
        engine: RawEngine,
        session: Session,
        announce: Callable[[bytes], None],
        *,
        layers: int,
        group: int,
        blocking: bool,
        record: Callable[[], Waitable] = HostEvent,
    ) -> None:
        self._engine = engine
        self._session = session
        self._announce = announce
        self._group = group
        self._layers = layers
        self._blocking = blocking
        self._record = record
        self._jobs: queue.Queue[_Job | None] = queue.Queue()
        self._batch: list[_Progress] = []
        self._requests: dict[int, _Request] = {}
        self.failures: list[Exception] = []
        self._threads = [
            threading.Thread(target=self._work, name=f"pool-{number}", daemon=True) for number in range(WORKERS)
        ]
        for thread in self._threads:
            thread.start()

    # -- forward thread ------------------------------------------------------------------------------------------

    def begin(self, contexts: Sequence[Context]) -> None:
        self._batch = []
        for context in contexts:
            request = self._requests.setdefault(context.request, _Request())
            request.opened(context)
            self._batch.append(_Progress(context, request))

    def layer_end(self, layer: int) -> None:
        done = layer + 1
        if done % self._group and done != self._layers:
            return
        number = layer // self._group
        for progress in self._batch:
            self._jobs.put((progress, number, self._record()))

    def end(self) -> None:
        """What has no hook goes as one more group."""
        number = -(-self._layers // self._group)
        for progress in self._batch:
            if len(progress.context.groups) > number:
                self._jobs.put((progress, number, self._record()))

    # -- workers -------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            progress, number, event = job
            try:
                self._send(progress, number, event)
            except Exception as exc:
                self.failures.append(exc)

    def _send(self, progress: _Progress, number: int, event: Waitable) -> None:
        event.synchronize()
        ints = progress.context.groups[number]
        if self._blocking:
            self._engine.write_sync(self._session, ints)
        else:
            ident = self._engine.write_async(self._session, ints)
        with progress.lock:
            if not self._blocking:
                progress.idents.append(ident)
            progress.left -= 1
            last = progress.left == 0
        if last:
            self._engine.wait_spinning(progress.idents)
            notice = progress.request.landed()
            if notice:
                self._announce(notice)

    def close(self) -> None:
        for _ in self._threads:
            self._jobs.put(None)
        for thread in self._threads:
            thread.join()
