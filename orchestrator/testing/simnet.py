"""A simulated control network with the manners of ZMQ over TCP, on a virtual loop.

One :class:`SimNet` is the network of a simulated world; each process gets its own :class:`SimNetwork`, which is the
`orchestrator.wire.ControlNetwork` its node uses. What ZMQ does, this does: a dealer's queue survives reconnects and
reaches whichever process listens on the address next; a reconnect keeps its identity and takes the older connection's
place; a router refuses frames for an identity that is not connected and cannot see a half-open connection.

Determinism: every delay and fault is drawn from one seeded generator, in the order of the sends. Times are virtual
seconds. No timer is set while no frame and no connection is under way, so an idle network lets a deadlock show.
"""

from __future__ import annotations

import contextvars
import itertools
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from orchestrator.hosts import check_address
from orchestrator.testing.virtual import Domain, VirtualLoop
from orchestrator.wire import Listener, Origin, Wire
from protocols.codec import decode
from protocols.errors import BusyError, MalformedFrameError
from protocols.ids import Incarnation

HIGH_WATER = 1000
"""Frames a dealer keeps while it is not connected; more are refused."""

Record = Callable[..., object]
"""``record(actor, verb, *details)``: one line of the world's history. Details become text only when it is read."""


@dataclass(slots=True, kw_only=True)
class NetFaults:
    """What goes wrong with frames, as probabilities, and how long things take, in seconds. The default is a good LAN.

    Real connections lose nothing while they live; loss stands for frames that a breaking one takes along.
    """

    delay_s: tuple[float, float] = (0.0002, 0.002)
    loss: float = 0.0
    duplicate: float = 0.0
    reorder: float = 0.0
    """A frame is late by up to `reorder_s`, and those behind it overtake it."""
    reorder_s: float = 1.0
    reconnect_s: tuple[float, float] = (0.05, 1.0)


class SimNet:
    """See the module. ``faults`` may be replaced at any time."""

    def __init__(self, loop: VirtualLoop, seed: int, record: Record, faults: NetFaults | None = None) -> None:
        self.faults = faults or NetFaults()
        self.lost = 0
        self.duplicated = 0
        self.delivered = 0
        self.loop = loop
        self.rng = random.Random(seed)
        self.record = record
        self.context = contextvars.Context()
        """Frames under way belong to no process: they outlive their sender."""
        self._ports = itertools.count(20000)
        self._listeners: dict[str, _Listener] = {}
        self._dealers: list[_Dealer] = []
        self._blocked: dict[tuple[str, str], Literal["hold", "drop"]] = {}
        self._held: list[tuple[tuple[str, str], Callable[[], None]]] = []

    def process(self, host: str, domain: Domain) -> SimNetwork:
        """The network as one process sees it. ``host`` is the name by which it can be partitioned."""
        return SimNetwork(self, host, domain)

    # -- faults --------------------------------------------------------------------------------------------------

    def partition(self, source: str, target: str, mode: Literal["hold", "drop"]) -> None:
        """Frames from one host to the other wait for `heal`, or are lost. One way: block the other way as well."""
        self._blocked[(source, target)] = mode

    def heal(self, source: str, target: str) -> None:
        """Undo `partition`; what was held arrives, and who was waiting reconnects."""
        self._blocked.pop((source, target), None)
        held, self._held = self._held, []
        for way, go_on in held:
            if way == (source, target):
                go_on()
            else:
                self._held.append((way, go_on))
        self._reconnect()

    def is_blocked(self, source: str, target: str) -> bool:
        return (source, target) in self._blocked

    def reset(self, first: str, second: str) -> None:
        """Break every connection between two hosts; both sides see it, what is under way is lost."""
        for pipe in self._pipes_between(first, second):
            pipe.end()

    def half_open(self, first: str, second: str, seconds: float) -> None:
        """Connections between two hosts die unseen: everything sent is lost, until the dealer notices and comes back
        under the same identity."""
        for pipe in self._pipes_between(first, second):
            pipe.deaf = True
            self.loop.call_later(seconds, pipe.dealer.lose, pipe, context=self.context)

    def kill(self, domain: Domain) -> None:
        """The process is gone; its sockets with it."""
        for listener in [other for other in self._listeners.values() if other.network.domain is domain]:
            listener.close()
        for dealer in [other for other in self._dealers if other.network.domain is domain]:
            dealer.close()

    def _pipes_between(self, first: str, second: str) -> list[_Pipe]:
        return [d.pipe for d in self._dealers if d.pipe is not None and {d.network.host, d.pipe.far} == {first, second}]

    # -- for the sockets -----------------------------------------------------------------------------------------

    def bind(self, network: SimNetwork, bind: str, on_frame: Callable[[bytes, bytes], None]) -> _Listener:
        address = bind if not bind.endswith(":0") else f"{bind.removesuffix(':0')}:{next(self._ports)}"
        if address in self._listeners:
            raise BusyError("the control port is taken", bind=bind)
        listener = self._listeners[address] = _Listener(network, address, on_frame)
        self._reconnect()
        return listener

    def unbind(self, listener: _Listener) -> None:
        del self._listeners[listener.address]

    def connect(self, dealer: _Dealer) -> None:
        """Try, after a moment."""
        dealer.connecting = True
        delay = (
            self.rng.uniform(*self.faults.reconnect_s) if dealer.attempts else self.rng.uniform(*self.faults.delay_s)
        )
        dealer.attempts += 1
        self.loop.call_later(delay, self._try, dealer, context=self.context)

    def _try(self, dealer: _Dealer) -> None:
        dealer.connecting = False
        listener = self._listeners.get(dealer.address)
        if dealer.closed or dealer.pipe is not None or listener is None:
            return
        here, there = dealer.network.host, listener.network.host
        if not self.is_blocked(here, there) and not self.is_blocked(there, here):
            dealer.connected(_Pipe(self, dealer, listener))

    def _reconnect(self) -> None:
        for dealer in self._dealers:
            if dealer.pipe is None and not dealer.connecting:
                self.connect(dealer)

    def add(self, dealer: _Dealer) -> None:
        self._dealers.append(dealer)
        self.connect(dealer)

    def remove(self, dealer: _Dealer) -> None:
        self._dealers.remove(dealer)

    def carry(self, way: tuple[str, str], at: float, arrive: Callable[[], None]) -> None:
        """Let a frame arrive at that time, unless the way is blocked by then."""

        def go() -> None:
            mode = self._blocked.get(way)
            if mode is None:
                arrive()
            elif mode == "hold":
                self._held.append((way, lambda: self.carry(way, self.loop.time() + self.rng.random() * 0.01, arrive)))
            else:
                self.lost += 1

        self.loop.call_at(at, go, context=self.context)


class _Pipe:
    """One connection, seen from the dealer's side: ``near`` is its host, ``far`` the listener's."""

    def __init__(self, net: SimNet, dealer: _Dealer, listener: _Listener) -> None:
        self.net = net
        self.dealer = dealer
        self.listener = listener
        self.near = dealer.network.host
        self.far = listener.network.host
        self.ended = False
        self.deaf = False
        self._latest = {True: 0.0, False: 0.0}

    def send(self, frame: bytes, *, to_far: bool) -> None:
        net, faults, rng = self.net, self.net.faults, self.net.rng
        way = (self.near, self.far) if to_far else (self.far, self.near)
        net.record(way[0], "sends", way[1], frame)
        if self.deaf or rng.random() < faults.loss:
            net.lost += 1
            net.record(way[0], "lost a frame to", way[1], frame)
            return
        copies = 1
        if rng.random() < faults.duplicate:
            copies = 2
            net.duplicated += 1
        for _ in range(copies):
            at = net.loop.time() + rng.uniform(*faults.delay_s)
            if rng.random() < faults.reorder:
                at += rng.random() * faults.reorder_s
            else:
                at = self._latest[to_far] = max(at, self._latest[to_far] + 1e-7)
            net.carry(way, at, lambda: self._arrive(frame, to_far))

    def _arrive(self, frame: bytes, to_far: bool) -> None:
        net = self.net
        if self.deaf or (self.ended and not to_far):
            net.lost += 1
        elif self.ended:
            self.dealer.take_back(frame)
        elif to_far:
            net.delivered += 1
            listener = self.listener
            net.record(self.far, "receives from", self.near, frame)
            net.loop.call_soon(listener.receive, self.dealer.identity, frame, context=listener.network.domain.context)
        else:
            net.delivered += 1
            net.record(self.near, "receives from", self.far, frame)
            net.loop.call_soon(self.dealer.receive, frame, context=self.dealer.network.domain.context)

    def end(self) -> None:
        """Both sides see the connection's end."""
        if not self.ended:
            self.ended = True
            self.listener.forget(self)
            self.dealer.lose(self)


class _Dealer:
    """The decode's side of one address."""

    def __init__(
        self, network: SimNetwork, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]
    ) -> None:
        self.network = network
        self.address = address
        self.identity = identity
        self.pipe: _Pipe | None = None
        self.connecting = False
        self.closed = False
        self.attempts = 0
        self._on_frame = on_frame
        self._queue: deque[bytes] = deque()

    def send(self, frame: bytes) -> bool:
        if self.closed:
            return False
        if self.pipe is not None:
            self.pipe.send(frame, to_far=True)
        elif len(self._queue) >= HIGH_WATER:
            return False
        else:
            self._queue.append(frame)
        return True

    def reconnect(self) -> None:
        return None

    def receive(self, frame: bytes) -> None:
        if not self.closed:
            self._on_frame(frame)

    def connected(self, pipe: _Pipe) -> None:
        self.pipe = pipe
        pipe.listener.admit(pipe)
        queue, self._queue = self._queue, deque()
        for frame in queue:
            pipe.send(frame, to_far=True)

    def lose(self, pipe: _Pipe) -> None:
        """The connection broke, and this side knows."""
        if self.pipe is pipe and not self.closed:
            self.pipe = None
            self.network.net.connect(self)

    def take_back(self, frame: bytes) -> None:
        """The process it was meant for is gone: some frames were still in our queue and go to the next one there."""
        net = self.network.net
        if self.closed or net.rng.random() < 0.5:
            net.lost += 1
        elif self.pipe is not None:
            self.pipe.send(frame, to_far=True)
        else:
            self._queue.append(frame)

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._queue.clear()
            self.network.net.remove(self)
            if self.pipe is not None:
                self.pipe.listener.forget(self.pipe)
                self.pipe = None


class _Listener:
    """The prefill's side: one address."""

    def __init__(self, network: SimNetwork, address: str, on_frame: Callable[[bytes, bytes], None]) -> None:
        self.network = network
        self.address = address
        self.origin = Origin()
        self._pipes: dict[bytes, _Pipe] = {}
        self._on_frame = on_frame
        self._closed = False

    def wire_to(self, identity: bytes) -> Wire:
        return _RouterWire(self, identity)

    def send(self, identity: bytes, frame: bytes) -> bool:
        pipe = self._pipes.get(identity)
        if pipe is None or self._closed:
            return False
        pipe.send(frame, to_far=False)
        return True

    def receive(self, identity: bytes, frame: bytes) -> None:
        if not self._closed:
            self._on_frame(identity, frame)

    def admit(self, pipe: _Pipe) -> None:
        """A connection; an older one of the same identity is handed over."""
        self._pipes[pipe.dealer.identity] = pipe

    def forget(self, pipe: _Pipe) -> None:
        if self._pipes.get(pipe.dealer.identity) is pipe:
            del self._pipes[pipe.dealer.identity]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.network.net.unbind(self)
            for pipe in list(self._pipes.values()):
                pipe.end()


class _RouterWire:
    def __init__(self, listener: _Listener, identity: bytes) -> None:
        self._listener = listener
        self._identity = identity

    def send(self, frame: bytes) -> bool:
        return self._listener.send(self._identity, frame)

    def reconnect(self) -> None:
        return None

    def close(self) -> None:
        return None


class SimNetwork:
    """One process's control network. Loop thread only."""

    def __init__(self, net: SimNet, host: str, domain: Domain) -> None:
        self.net = net
        self.host = host
        self.domain = domain

    def listen(self, bind: str, on_frame: Callable[[bytes, bytes], None]) -> Listener:
        check_address(bind)
        return self.net.bind(self, bind, on_frame)

    def dial(self, address: str, identity: Incarnation, on_frame: Callable[[bytes], None]) -> Wire:
        check_address(address)
        dealer = _Dealer(self, address, identity, on_frame)
        self.net.add(dealer)
        return dealer

    def close(self) -> None:
        return None


def describe_frame(frame: bytes) -> str:
    """A frame in a few words: type, room, sequence numbers, what matters of the body."""
    try:
        message = decode(frame)
    except MalformedFrameError:
        return f"{len(frame)} undecodable bytes"
    name = type(message).__name__
    room = f" {message.room}.{getattr(message, 'gen', 0)}" if hasattr(message, "room") else ""
    number = f" #{message.seq}" if message.seq else ""
    notes = [
        f"{field}={getattr(message, field)}"
        for field in ("session", "old_session", "status", "origin", "reason", "deadline_ms", "dial", "session_reused")
        if getattr(message, field, None) not in (None, "", False)
    ]
    for field in ("unknown", "in_doubt"):
        units = getattr(message, field, None)
        if units is not None:
            count = len(units.pages) // 4 + len(units.aux) + len(units.state) // 4
            notes += [f"{field}={count} units"] if count else []
    return f"{name}{room}{number} ack {message.ack}{' (' + ', '.join(notes)[:160] + ')' if notes else ''}"
