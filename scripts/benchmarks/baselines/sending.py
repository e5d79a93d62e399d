"""What the baselines share: a chunk as they see it, and how they tell the decode that a request is complete."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import zmq

from scripts.benchmarks.baselines.raw import Ints

ECHO = b"echo"


@dataclass(frozen=True, slots=True)
class Context:
    """One chunk of one request in one forward: its blocks by layer group, planned before the forward starts."""

    request: int
    groups: tuple[Ints, ...]
    notice: bytes
    """What to announce when all of the request has landed; empty unless this is its last chunk."""


class Sender(Protocol):
    """A baseline, as the forward thread sees it."""

    failures: list[Exception]

    def begin(self, contexts: Sequence[Context]) -> None: ...

    def layer_end(self, layer: int) -> None: ...

    def end(self) -> None: ...

    def close(self) -> None: ...


class Notifier:
    """One socket to the decode, shared by worker threads."""

    def __init__(self, address: str) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(address)
        self._lock = threading.Lock()

    def announce(self, text: bytes) -> None:
        with self._lock:
            self._socket.send(text)

    def round_trip(self) -> None:
        """To the decode and back. Blocks."""
        with self._lock:
            self._socket.send(ECHO)
            if not self._socket.poll(5000):
                raise TimeoutError("the decode does not echo")
            self._socket.recv()

    def close(self) -> None:
        self._socket.close()
