"""Control sockets: frames in, frames out, no decisions. ZMQ over TCP, driven by the loop's reader, never blocking.

The prefill binds a ROUTER, the decode dials it with one DEALER per prefill rank whose identity is its incarnation.
A frame that ZMQ does not take now is dropped here: the channel above sends it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

import zmq

from protocols.errors import BusyError, ConfigError
from protocols.ids import Incarnation
from protocols.messages import MAX_FRAME_BYTES

log = logging.getLogger("kvferry.wire")

BURST = 64
"""Frames taken in one go before other callbacks of the loop get a turn."""
HANDSHAKE_MS = 5000


class Wire(Protocol):
    """A way to one peer."""

    def send(self, frame: bytes) -> bool:
        """Hand the frame to the transport. False: not taken now, send it again later. Never blocks or raises."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """The prefill's side: one address, many peers, each known by its identity."""

    @property
    def address(self) -> str: ...

    def wire_to(self, identity: bytes) -> Wire: ...

    def close(self) -> None: ...


class ControlNetwork(Protocol):
    """Where control connections come from. Injected: ZMQ in production, simulated in tests."""

    def listen(self, bind: str, on_frame: Callable[[bytes, bytes], None]) -> Listener:
        """Bind ``bind`` and call ``on_frame(identity, frame)`` for each frame. Raises BusyError, ConfigError."""
        ...

    def dial(self, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]) -> Wire:
        """Connect, in the background, to ``address``. Raises ConfigError for an address that cannot be one."""
        ...

    def close(self) -> None: ...


class _Pump:
    """Reads a ZMQ socket from the loop. ZMQ's descriptor is edge-triggered: after every read *and* every send the
    socket itself must be asked again, or frames lie there unseen."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        socket: zmq.Socket[bytes],
        pumps: set[_Pump],
        deliver: Callable[[list[bytes]], None],
    ) -> None:
        self._loop = loop
        self._pumps = pumps
        pumps.add(self)
        self._deliver = deliver
        self.socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._closed = False
        loop.add_reader(self._fd, self.read)

    def read(self) -> None:
        self._scheduled = False
        if self._closed:
            return
        for _ in range(BURST):
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            except zmq.ZMQError as exc:
                log.warning("control socket: %s", exc)
                return
            try:
                self._deliver(frames)
            except Exception:
                log.exception("a control frame could not be handled; the next one is read all the same")
            if self._closed:
                return
        self._again()

    def send(self, frames: list[bytes]) -> bool:
        if self._closed:
            return False
        try:
            self.socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError:  # full, unreachable or closing: the channel sends again
            return False
        finally:
            self._again()
        return True

    def _again(self) -> None:
        if not self._scheduled and not self._closed:
            self._scheduled = True
            self._loop.call_soon(self.read)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pumps.discard(self)
            self._loop.remove_reader(self._fd)
            self.socket.close(linger=0)


class _DealerWire:
    def __init__(self, pump: _Pump) -> None:
        self._pump = pump

    def send(self, frame: bytes) -> bool:
        return self._pump.send([frame])

    def close(self) -> None:
        self._pump.close()


class _RouterWire:
    def __init__(self, pump: _Pump, identity: bytes) -> None:
        self._pump = pump
        self._identity = identity

    def send(self, frame: bytes) -> bool:
        return self._pump.send([self._identity, frame])

    def close(self) -> None:
        return None


class _RouterListener:
    def __init__(self, pump: _Pump, address: str) -> None:
        self._pump = pump
        self.address = address

    def wire_to(self, identity: bytes) -> Wire:
        return _RouterWire(self._pump, identity)

    def close(self) -> None:
        self._pump.close()


class ZmqNetwork:
    """Loop thread only."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._context = zmq.Context()
        self._pumps: set[_Pump] = set()

    def listen(self, bind: str, on_frame: Callable[[bytes, bytes], None]) -> Listener:
        check_address(bind)
        if not is_loopback(bind):
            raise ConfigError(
                "the control endpoint has no authentication yet and binds loopback addresses only",
                bind=bind,
                hint="Bind tcp://127.0.0.1:PORT.",
            )
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        try:
            socket.bind(bind)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            if exc.errno == zmq.EADDRINUSE:
                raise BusyError(
                    "the control port is taken", bind=bind, hint="Choose another port, or port 0 for any free one."
                ) from exc
            raise ConfigError(f"cannot bind the control endpoint: {exc}", bind=bind) from exc

        def deliver(frames: list[bytes]) -> None:
            if len(frames) == 2:
                on_frame(frames[0], frames[1])
            elif frames:
                on_frame(frames[0], b"")

        pump = _Pump(self._loop, socket, self._pumps, deliver)
        return _RouterListener(pump, socket.getsockopt_string(zmq.LAST_ENDPOINT))

    def dial(self, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]) -> Wire:
        check_address(address)
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        try:
            socket.connect(address)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            raise ConfigError(f"cannot connect: {exc}", address=address) from exc

        def deliver(frames: list[bytes]) -> None:
            on_frame(frames[0] if len(frames) == 1 else b"")

        return _DealerWire(_Pump(self._loop, socket, self._pumps, deliver))

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        return socket

    def close(self) -> None:
        for pump in list(self._pumps):
            pump.close()
        self._context.term()


def check_address(address: str) -> None:
    """Raise ConfigError unless the address reads ``tcp://HOST:PORT``."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not address.startswith("tcp://") or not host or not (port.isdigit() and int(port) <= 65535):
        raise ConfigError("not a control address", address=address, hint="It reads tcp://HOST:PORT.")


def is_loopback(address: str) -> bool:
    host = address.removeprefix("tcp://").rpartition(":")[0]
    return host == "localhost" or host.startswith("127.") or host == "[::1]"
