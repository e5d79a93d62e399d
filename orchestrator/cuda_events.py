"""Awaiting the moment a layer is written: CUDA events behind a small protocol, never waited on by the forward thread.

The forward thread records an event on the stream that wrote the layers; the loop asks it, oldest first, through the
pacer. Events of one stream complete in order, so only the oldest of each stream is asked.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Hashable
from typing import Any, Protocol

from protocols.errors import EngineUnavailableError


class Event(Protocol):
    """A point in a stream. ``stream`` names the stream, for ordering."""

    @property
    def stream(self) -> Hashable: ...

    def query(self) -> bool:
        """True once everything before it in its stream has completed. Never blocks. Any thread."""
        ...


class EventSource(Protocol):
    """Where events come from: one device."""

    def record(self) -> Event:
        """An event behind everything enqueued so far on the current stream. Forward thread; never synchronises."""
        ...

    def enter_loop_thread(self) -> None:
        """Called once on the loop thread, before anything else: select the device (A13)."""
        ...


class _Done:
    stream = "host"

    def query(self) -> bool:
        return True


class HostEvents:
    """For caches written by the CPU: when the hook runs, the bytes are there."""

    _done = _Done()

    def record(self) -> Event:
        return self._done

    def enter_loop_thread(self) -> None:
        return None


class _CudaEvent:
    __slots__ = ("_event", "stream")

    def __init__(self, event: Any, stream: Hashable) -> None:
        self._event = event
        self.stream = stream

    def query(self) -> bool:
        return bool(self._event.query())


class CudaEvents:
    """Events of one CUDA device. Raises EngineUnavailableError without torch or without a device."""

    def __init__(self, device: int) -> None:
        try:
            import torch
        except ImportError as exc:
            raise EngineUnavailableError(
                "torch is not installed", hint="Install it: pip install 'kvferry[torch]'"
            ) from exc
        if not torch.cuda.is_available():
            raise EngineUnavailableError("torch sees no CUDA device", hint="Use HostEvents for pools in host memory.")
        self._torch: Any = torch
        self.device = device

    def record(self) -> Event:
        stream = self._torch.cuda.current_stream(self.device)
        event = self._torch.cuda.Event(enable_timing=False)
        event.record(stream)
        return _CudaEvent(event, int(stream.cuda_stream))

    def enter_loop_thread(self) -> None:
        self._torch.cuda.set_device(self.device)


class EventWatcher:
    """A pacer source that resolves futures of events. Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._streams: dict[Hashable, deque[tuple[Event, asyncio.Future[None]]]] = {}
        self.pending = 0
        """Events that have not completed."""
        self.queries = 0

    def watch(self, event: Event) -> asyncio.Future[None]:
        """A future that resolves when the event has completed, at once if it has, or carries what ``query`` raised. It
        is shared by several waiters: await it through ``asyncio.shield``. Kick the pacer afterwards, if one is pending.
        """
        future: asyncio.Future[None] = self._loop.create_future()
        queue = self._streams.get(event.stream)
        if queue is None:
            if self._settled(event, future):
                return future
            queue = self._streams[event.stream] = deque()
        queue.append((event, future))
        self.pending += 1
        return future

    def poll(self) -> int:
        completed = 0
        for stream, queue in list(self._streams.items()):
            while queue and self._settled(*queue[0]):
                queue.popleft()
                completed += 1
            if not queue:
                del self._streams[stream]
        self.pending -= completed
        return completed

    def _settled(self, event: Event, future: asyncio.Future[None]) -> bool:
        """Ask once."""
        self.queries += 1
        try:
            if not event.query():
                return False
        except Exception as exc:
            if not future.done():
                future.set_exception(exc)
                future.exception()  # retrieved: a pass without waiters must not log it as forgotten
        else:
            if not future.done():
                future.set_result(None)
        return True
