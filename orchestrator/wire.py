"""Control sockets: frames in, frames out, no decisions. ZMQ over TCP, driven by the loop's reader, never blocking.

The prefill binds a ROUTER, the decode dials it with one DEALER per prefill rank whose identity is its incarnation.
A frame that ZMQ does not take now is dropped here: the channel above sends it again. With keys in the configuration
every connection is authenticated and encrypted (CURVE); without, nothing but loopback addresses is bound unasked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

import zmq

from orchestrator.clock import LoopClock
from orchestrator.config import Config
from orchestrator.curve import ZAP_ENDPOINT, Pair, Servers, Zap, load_clients, load_pair
from orchestrator.hosts import check_address, is_loopback
from orchestrator.log import RateLimited
from protocols.errors import BusyError, ConfigError
from protocols.ids import Incarnation
from protocols.messages import MAX_FRAME_BYTES

BURST = 128
"""Parts of frames taken in one go before other callbacks of the loop get a turn. ZMQ takes from its connections in
turn, so a flood over one of them is at most every other frame while another has something to say."""
BURST_S = 0.002
"""The same as a time (seconds): frames differ much in what they cost."""
HANDSHAKE_MS = 5000
"""A connection that has not finished its handshake by then is closed."""
RECEIVE_QUEUE = 32
"""Frames of one connection that wait in ZMQ before TCP makes its sender wait: each may be 16 MiB."""
SEND_QUEUE = 512
"""Frames for one connection that wait in ZMQ; what it does not take is sent again by the channel."""
KEEPALIVE_S = (30, 10, 3)
"""The kernel asks a connection without traffic after so long, again in such steps, so often: a host that vanished
gives its descriptor back, and an idle process still sends nothing itself."""

MAX_PARTS = 8
"""Parts of one message that are kept: a peer's good one has two at most, a bad one may have millions."""

Side = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a frame came from. ``key``: the client's public key (Z85), empty without CURVE. ``address``: its IP
    address, empty where the network has none."""

    key: str = ""
    address: str = ""

    @property
    def name(self) -> str:
        """By what its frames are counted together."""
        return self.key or self.address


class Wire(Protocol):
    """A way to one peer."""

    def send(self, frame: bytes) -> bool:
        """Hand the frame to the transport. False: not taken now, send it again later. Never blocks or raises."""
        ...

    def reconnect(self) -> None:
        """Give the connection up for another; what it has queued is lost. The side that listens can do nothing.

        A connection may be dead without a sign: ZMQ keeps one open whose identity another has taken over."""
        ...

    def close(self) -> None: ...


class Listener(Protocol):
    """The prefill's side: one address, many peers, each known by its identity."""

    @property
    def address(self) -> str: ...

    @property
    def origin(self) -> Origin:
        """Of the frame that ``on_frame`` is being called with; only then."""
        ...

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

    def __init__(self, core: _Core, socket: zmq.Socket[bytes], deliver: Callable[[list[zmq.Frame]], None]) -> None:
        self._core = core
        core.pumps.add(self)
        self._deliver = deliver
        self._parts: list[zmq.Frame] = []
        self.socket = socket
        self._fd = int(socket.getsockopt(zmq.FD))
        self._scheduled = False
        self._closed = False
        core.loop.add_reader(self._fd, self.read)

    def read(self) -> None:
        self._scheduled = False
        until = self._core.clock.now() + BURST_S
        for _ in range(BURST):
            if self._closed:
                return
            try:
                part = self.socket.recv(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return
            except zmq.ZMQError as exc:
                self._core.log.warning("socket", "control socket: %s", exc)
                return
            if len(self._parts) < MAX_PARTS:
                self._parts.append(part)
            if not part.more:
                self._take()
                if self._core.clock.now() >= until:
                    break
        self._again()

    def _take(self) -> None:
        parts, self._parts = self._parts, []
        try:
            self._deliver(parts)
        except Exception as exc:
            self._core.log.warning("handler", "a control frame could not be handled, the next is read: %r", exc)

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
            self._core.loop.call_soon(self.read)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._core.pumps.discard(self)
            self._core.loop.remove_reader(self._fd)
            self.socket.close(linger=0)


class _DealerWire:
    def __init__(self, pump: _Pump, address: str) -> None:
        self._pump = pump
        self._address = address

    def send(self, frame: bytes) -> bool:
        return self._pump.send([frame])

    def reconnect(self) -> None:
        if self._pump.socket.closed:
            return
        try:
            self._pump.socket.disconnect(self._address)
        except zmq.ZMQError:
            pass  # refused for good, for instance: there is nothing to give up
        self._pump.socket.connect(self._address)

    def close(self) -> None:
        self._pump.close()


class _RouterWire:
    def __init__(self, pump: _Pump, identity: bytes) -> None:
        self._pump = pump
        self._identity = identity

    def send(self, frame: bytes) -> bool:
        return self._pump.send([self._identity, frame])

    def reconnect(self) -> None:
        return None

    def close(self) -> None:
        return None


class _RouterListener:
    def __init__(self, core: _Core, socket: zmq.Socket[bytes], on_frame: Callable[[bytes, bytes], None]) -> None:
        self.address = socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.origin = Origin()
        self._on_frame = on_frame
        self._has_keys = bool(socket.getsockopt(zmq.CURVE_SERVER)) if zmq.has("curve") else False
        self._pump = _Pump(core, socket, self._deliver)

    def _deliver(self, parts: list[zmq.Frame]) -> None:
        key = _property(parts[0], "User-Id") if self._has_keys else ""
        self.origin = Origin(key, _property(parts[0], "Peer-Address"))
        self._on_frame(parts[0].bytes, parts[1].bytes if len(parts) == 2 else b"")

    def wire_to(self, identity: bytes) -> Wire:
        return _RouterWire(self._pump, identity)

    def close(self) -> None:
        self._pump.close()


def _property(frame: zmq.Frame, name: str) -> str:
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""


class _Core:
    """What the networks of one loop share: ZMQ's context, its sockets, the door of its ZAP requests."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.clock = LoopClock()
        self.log = RateLimited("kvferry.wire", self.clock.now, 5)
        self.context = zmq.Context()
        self.pumps: set[_Pump] = set()
        self._zap: Zap | None = None

    def zap(self) -> Zap:
        """The one that libzmq asks about clients of this context. Without it CURVE would let every key in."""
        if self._zap is None:
            zap = self._zap = Zap(self.log)
            socket = self.context.socket(zmq.REP)
            socket.setsockopt(zmq.LINGER, 0)
            socket.bind(ZAP_ENDPOINT)
            pump = _Pump(self, socket, lambda parts: _answer(pump, zap, parts))
        return self._zap


def _answer(pump: _Pump, zap: Zap, request: list[zmq.Frame]) -> None:
    pump.send(zap.answer([part.bytes for part in request]))


class ZmqNetwork:
    """Loop thread only. One for each side of a process, as its configuration says: see `for_side`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._core = _Core(loop)
        self._config = Config()
        self._pair: Pair | None = None
        self._servers: Servers | None = None
        self._clients: frozenset[bytes] = frozenset()
        self.counters: Counter[str] = Counter()
        """Where refused clients are counted."""

    def for_side(self, side: Side, config: Config) -> ZmqNetwork:
        """The same network with the keys of one side. Raises ConfigError for keys that cannot be used."""
        mine = ZmqNetwork.__new__(ZmqNetwork)
        mine._core, mine._config = self._core, config
        mine._pair = None if config.secret_key is None else load_pair(config.secret_key)
        mine._servers, mine._clients, mine.counters = None, frozenset(), Counter()
        if mine._pair is not None and side == "decode":
            mine._servers = Servers(config.server_key, config.server_keys)
        elif mine._pair is not None:
            mine._clients = load_clients(config.client_keys)
        return mine

    def listen(self, bind: str, on_frame: Callable[[bytes, bytes], None]) -> Listener:
        check_address(bind)
        if not is_loopback(bind) and self._pair is None:
            if not self._config.insecure:
                raise ConfigError(
                    "a control endpoint that others can reach needs keys",
                    bind=bind,
                    hint="Make them with `kvferry keygen DIR` and set secret_key and client_keys; or set insecure=True "
                    "where everybody who reaches this address is trusted; or bind tcp://127.0.0.1:PORT.",
                )
            self._core.log.warning("insecure", "%s takes anybody: no keys are set, and insecure is", bind)
        socket = self._socket(zmq.ROUTER)
        socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if self._pair is not None:
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
            socket.setsockopt(zmq.ZAP_DOMAIN, self._core.zap().admit(self._clients, self.counters))
        try:
            socket.bind(bind)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            if exc.errno == zmq.EADDRINUSE:
                raise BusyError(
                    "the control port is taken", bind=bind, hint="Choose another port, or port 0 for any free one."
                ) from exc
            raise ConfigError(f"cannot bind the control endpoint: {exc}", bind=bind) from exc
        return _RouterListener(self._core, socket, on_frame)

    def dial(self, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]) -> Wire:
        check_address(address)
        server = None if self._servers is None else self._servers.key_of(address)
        socket = self._socket(zmq.DEALER)
        socket.setsockopt(zmq.IDENTITY, identity)
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        if self._pair is not None and server is not None:
            socket.setsockopt(zmq.CURVE_SERVERKEY, server)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._pair.public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._pair.secret)
        try:
            socket.connect(address)
        except zmq.ZMQError as exc:
            socket.close(linger=0)
            raise ConfigError(f"cannot connect: {exc}", address=address) from exc

        def deliver(parts: list[zmq.Frame]) -> None:
            on_frame(parts[0].bytes if len(parts) == 1 else b"")

        return _DealerWire(_Pump(self._core, socket, deliver), address)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket = self._core.context.socket(kind)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.RCVHWM, RECEIVE_QUEUE)
        socket.setsockopt(zmq.SNDHWM, SEND_QUEUE)
        idle, step, count = KEEPALIVE_S
        socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, idle)
        socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, step)
        socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, count)
        return socket

    def close(self) -> None:
        for pump in list(self._core.pumps):
            pump.close()
        self._core.context.term()
