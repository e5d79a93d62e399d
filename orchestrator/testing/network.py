"""An in-memory control network: loses, duplicates and holds back frames on demand. Deterministic; one loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from orchestrator.hosts import check_address
from orchestrator.wire import Listener, Origin, Wire
from protocols.errors import BusyError
from protocols.ids import Incarnation

Filter = Callable[[str, bytes], list[bytes]]
"""(direction ``to_prefill`` or ``to_decode``, frame) → the frames that arrive instead: none, one, several."""


class MemoryNetwork:
    """Give one to every `Node` of a test. ``filter`` may be replaced at any time."""

    def __init__(self) -> None:
        self.filter: Filter = lambda direction, frame: [frame]
        self.frames: list[tuple[str, bytes]] = []
        """Everything that was sent, before the filter."""
        self.origins: dict[bytes, Origin] = {}
        """Where the frames of an identity seem to come from; unknown unless a test says so."""
        self._listeners: dict[str, _MemoryListener] = {}
        self._ports = itertools.count(20000)

    def listen(self, bind: str, on_frame: Callable[[bytes, bytes], None]) -> Listener:
        check_address(bind)
        address = bind if not bind.endswith(":0") else f"{bind.removesuffix(':0')}:{next(self._ports)}"
        if address in self._listeners:
            raise BusyError("the control port is taken", bind=bind)
        listener = self._listeners[address] = _MemoryListener(self, address, on_frame)
        return listener

    def dial(self, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]) -> Wire:
        check_address(address)
        return _MemoryDealer(self, address, identity, on_frame)

    def find(self, address: str) -> _MemoryListener | None:
        return self._listeners.get(address)

    def forget(self, address: str) -> None:
        self._listeners.pop(address, None)

    def carry(self, direction: str, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        self.frames.append((direction, frame))
        loop = asyncio.get_running_loop()
        for arriving in self.filter(direction, frame):
            loop.call_soon(deliver, arriving)

    def close(self) -> None:
        return None


class _MemoryListener:
    def __init__(self, network: MemoryNetwork, address: str, on_frame: Callable[[bytes, bytes], None]) -> None:
        self.address = address
        self.origin = Origin()
        self.dealers: dict[bytes, _MemoryDealer] = {}
        self._network = network
        self._on_frame = on_frame
        self._closed = False

    def wire_to(self, identity: bytes) -> Wire:
        return _MemoryRouterWire(self._network, self, identity)

    def receive(self, identity: bytes, frame: bytes) -> None:
        if not self._closed:
            self.origin = self._network.origins.get(identity, Origin())
            self._on_frame(identity, frame)

    def close(self) -> None:
        self._closed = True
        self._network.forget(self.address)


class _MemoryRouterWire:
    def __init__(self, network: MemoryNetwork, listener: _MemoryListener, identity: bytes) -> None:
        self._network = network
        self._listener = listener
        self._identity = identity

    def send(self, frame: bytes) -> bool:
        dealer = self._listener.dealers.get(self._identity)
        if dealer is None or dealer.closed:
            return False
        self._network.carry("to_decode", frame, dealer.receive)
        return True

    def reconnect(self) -> None:
        return None

    def close(self) -> None:
        return None


class _MemoryDealer:
    def __init__(
        self, network: MemoryNetwork, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]
    ) -> None:
        self._network = network
        self._address = address
        self._identity = identity
        self._on_frame = on_frame
        self.closed = False

    def send(self, frame: bytes) -> bool:
        listener = self._network.find(self._address)
        if self.closed or listener is None:
            return False
        listener.dealers[self._identity] = self
        self._network.carry("to_prefill", frame, lambda arriving: listener.receive(self._identity, arriving))
        return True

    def reconnect(self) -> None:
        return None

    def receive(self, frame: bytes) -> None:
        if not self.closed:
            self._on_frame(frame)

    def close(self) -> None:
        self.closed = True
