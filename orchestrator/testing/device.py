"""A faithful fake of a CUDA device for machines without one: in-order streams, kernels that write late, events.

What a kernel writes becomes visible only when the device gets to it, so whoever reads a layer before its event sees
stale bytes, as on the real thing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Hashable

Kernel = Callable[[], object]


class FakeEvent:
    """A point in one stream."""

    def __init__(self, device: FakeDevice, stream: Hashable, position: int) -> None:
        self._device = device
        self.stream = stream
        self._position = position

    def query(self) -> bool:
        return self._device.reached(self.stream, self._position)


class FakeDevice:
    """An event source. Kernels are enqueued by the forward thread and run by `step` or `run`; any thread."""

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self.current_stream: Hashable = "compute"
        self.loop_threads: list[int] = []
        """Threads that selected this device (A13)."""
        self.recorded = 0
        self.fail_record: Exception | None = None
        """Raised by the next `record` calls while set."""
        self._queues: dict[Hashable, deque[Kernel]] = {}
        self._enqueued: dict[Hashable, int] = {}
        self._completed: dict[Hashable, int] = {}
        self._lock = threading.Lock()

    def launch(self, kernel: Kernel) -> None:
        """Enqueue work on the current stream; returns at once."""
        with self._lock:
            self._queues.setdefault(self.current_stream, deque()).append(kernel)
            self._enqueued[self.current_stream] = self._enqueued.get(self.current_stream, 0) + 1

    def record(self) -> FakeEvent:
        if self.fail_record is not None:
            raise self.fail_record
        self.recorded += 1
        return FakeEvent(self, self.current_stream, self._enqueued.get(self.current_stream, 0))

    def enter_loop_thread(self) -> None:
        self.loop_threads.append(threading.get_ident())

    def reached(self, stream: Hashable, position: int) -> bool:
        return self._completed.get(stream, 0) >= position

    def step(self, kernels: int = 1, stream: Hashable = "compute") -> int:
        """Run the next kernels of a stream; return how many ran."""
        ran = 0
        while ran < kernels:
            with self._lock:
                queue = self._queues.get(stream)
                if not queue:
                    break
                kernel = queue.popleft()
            kernel()
            with self._lock:
                self._completed[stream] = self._completed.get(stream, 0) + 1
            ran += 1
        return ran

    def run(self) -> None:
        """Run everything that is enqueued, stream by stream."""
        for stream in list(self._queues):
            while self.step(1, stream):
                pass
