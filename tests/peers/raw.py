"""Peers that speak the wire protocol frame by frame, so that a test decides what they say, forget and repeat."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import pytest

from orchestrator.config import Config
from orchestrator.receiver import Receiver, new_incarnation
from orchestrator.sender import Sender
from orchestrator.testing.pool import Pool
from orchestrator.wire import ControlNetwork
from protocols.codec import decode, encode, unpack_indices
from protocols.errors import MalformedFrameError
from protocols.ids import Incarnation
from protocols.layout import Layout
from protocols.messages import (
    PROTOCOL_VERSION,
    UNSEQUENCED,
    Abort,
    AbortAck,
    AnyMessage,
    Coverage,
    Done,
    Hello,
    Message,
    Offer,
    Ping,
    Pong,
    Role,
    Welcome,
)
from tests.support.waiting import until

PATIENCE = 10.0
"""Seconds until a test gives up on something that should happen at once."""

QUICK = Config(ping_interval_s=0.05, silence_s=10.0, drain_timeout_s=0.1, connect_timeout_s=5.0, room_timeout_s=20.0)
"""Bounds scaled so that a test may wait for the short ones, while a busy machine does not meet the long ones."""
HASTY = dataclasses.replace(QUICK, silence_s=0.4, connect_timeout_s=0.5)
"""For tests of those: a peer that is silent, or not there."""

M = TypeVar("M", bound=Message)
_rng = random.Random(4)


async def settled(turns: int = 20) -> None:
    """Let everything that is due now run: callbacks, deliveries, and what they post."""
    for _ in range(turns):
        await asyncio.sleep(0)


def overhear(monkeypatch: pytest.MonkeyPatch, owner: Sender | Receiver) -> list[AnyMessage]:
    """What reaches the owner's application from now on: every message once, if the channel does its work."""
    heard: list[AnyMessage] = []
    original = owner.on_message

    def on_message(link: Any, message: AnyMessage) -> None:
        heard.append(message)
        original(link, message)

    monkeypatch.setattr(owner, "on_message", on_message)
    return heard


class RawPeer:
    """One end of one connection. It acknowledges what it hears and answers pings, unless told otherwise."""

    def __init__(self, role: Role, layout: Layout, session: str, me: Incarnation | None = None) -> None:
        self.role = role
        self.layout = layout
        self.session = session
        self.me = me or new_incarnation(_rng)
        self.peer = b""
        self.dial = 1
        """What every frame says that does not say otherwise."""
        self.copies = 1
        """How often each frame is sent: on a bad network nobody else sends it again."""
        self.alive = True
        """Answers pings and acknowledges."""
        self.heard: list[AnyMessage] = []
        """Each sequenced message once, the others as they come; pings left out."""
        self.repeated = 0
        self.ack = 0
        self.next_seq = 1
        self._send: Callable[[bytes], object] = lambda frame: None

    def hello(self, **changes: Any) -> Hello:
        fields: dict[str, Any] = {
            "role": self.role,
            "fingerprint": self.layout.fingerprint,
            "layout": self.layout,
            "engine": "raw",
            "engine_version": "1",
            "transport": "memory",
            "session": self.session,
            "dial": self.dial,
        }
        return Hello(**fields | changes)

    def send(self, message: Message, **envelope: Any) -> None:
        """Stamp and send; sequenced messages take the next number unless ``seq`` is given."""
        if "seq" not in envelope and not isinstance(message, UNSEQUENCED):
            envelope["seq"] = self.next_seq
            self.next_seq += 1
        stamp: dict[str, Any] = {"src": self.me, "dst": self.peer, "ack": self.ack, "dial": message.dial or self.dial}
        self.send_frame(encode(msgspec.structs.replace(message, **stamp | envelope)))

    def send_map(self, **fields: Any) -> None:
        """A frame of any fields at all, with this peer's envelope where the test names none."""
        self.send_frame(msgspec.msgpack.encode(self.envelope() | fields))

    def envelope(self) -> dict[str, Any]:
        return {"v": PROTOCOL_VERSION, "src": self.me, "dst": self.peer, "ack": self.ack, "dial": self.dial}

    def send_frame(self, frame: bytes) -> None:
        for _ in range(self.copies):
            self._send(frame)

    def on_frame(self, frame: bytes) -> None:
        self.take(frame)

    def take(self, frame: bytes) -> AnyMessage:
        """Note a frame, acknowledge it, answer a ping."""
        try:
            message = decode(frame)
        except MalformedFrameError:
            raise AssertionError(f"the product sent a frame that does not decode: {frame!r}") from None
        if isinstance(message, Ping):
            if self.alive:
                self.send(Pong(number=message.number))
        elif message.seq:
            if message.seq != self.ack + 1:
                self.repeated += 1
            else:
                self.ack = message.seq
                self.heard.append(message)
            if self.alive:
                self.send(Pong(number=0))
        else:
            self.heard.append(message)
        return message

    def all(self, kind: type[M], room: int | None = None) -> list[M]:
        """What was heard of this kind, of one room or of all."""
        found = [message for message in self.heard if isinstance(message, kind)]
        return [message for message in found if room is None or getattr(message, "room", None) == room]

    async def hear(self, kind: type[M], room: int | None = None, nth: int = 0) -> M:
        """The ``nth`` message of this kind, once it is here."""
        await until(lambda: len(self.all(kind, room)) > nth)
        return self.all(kind, room)[nth]

    async def flushed(self) -> None:
        """Return when the other side has worked off everything sent before: it answers in order."""
        before = len(self.all(Pong))
        self.send(Ping(number=9))
        await until(lambda: len(self.all(Pong)) > before)


class RawDecode(RawPeer):
    """Dials a prefill."""

    def __init__(
        self,
        network: ControlNetwork,
        address: str,
        layout: Layout,
        session: str = "loopback:1000",
        me: Incarnation | None = None,
    ) -> None:
        super().__init__("decode", layout, session, me)
        self.pool = Pool(pages=1)
        """The memory of ``layout``, where somebody may write to it."""
        self._wire = network.dial(address, self.me, self.on_frame)
        self._send = self._wire.send

    async def connect(self, **changes: Any) -> Hello:
        """Say Hello until Welcome and return the prefill's own Hello."""
        before = len(self.all(Welcome))
        self.dial = changes.get("dial", self.dial)
        async with asyncio.timeout(PATIENCE):
            while len(self.all(Welcome)) == before:
                self.send(self.hello(**changes), dst=b"")
                for _ in range(100):
                    await asyncio.sleep(0.001)
                    if len(self.all(Welcome)) > before:
                        break
        hello = self.all(Hello)[-1]
        self.peer = hello.src
        return hello

    def offer(self, room: int, gen: int, pages: list[int], **changes: Any) -> Offer:
        """The Offer of whole pages, nothing else."""
        fields: dict[str, Any] = {
            "room": room,
            "gen": gen,
            "session": self.session,
            "pages": b"".join(page.to_bytes(4, "little", signed=True) for page in pages),
            "prefix_tokens": 0,
            "total_tokens": len(pages) * self.layout.page_size,
        }
        return Offer(**fields | changes)

    def close(self) -> None:
        self._wire.close()


class RawPrefill(RawPeer):
    """Listens, and knows one decode: whoever spoke last."""

    def __init__(
        self,
        network: ControlNetwork,
        layout: Layout,
        bind: str = "tcp://127.0.0.1:0",
        *,
        greets: bool = True,
        me: Incarnation | None = None,
    ) -> None:
        super().__init__("prefill", layout, "loopback:2000", me)
        self.greets = greets
        self.yields = False
        """Answers an Abort with quiet, as a prefill does that has submitted nothing."""
        self._listener = network.listen(bind, self._on_frame)
        self.address = self._listener.address

    def _on_frame(self, identity: bytes, frame: bytes) -> None:
        if identity != self.peer:
            self.peer, self.dial = identity, 0
            self._send = self._listener.wire_to(identity).send
        message = self.take(frame)
        if isinstance(message, Hello):
            if message.dial != self.dial:
                self.dial, self.ack, self.next_seq = message.dial, 0, 1
            if self.greets:
                self.greet()
        elif isinstance(message, Abort) and self.yields:
            self.send(AbortAck(room=message.room, gen=message.gen, session=self.session))

    def greet(self, **changes: Any) -> None:
        self.send(self.hello(**changes))
        self.send(Welcome(chosen=PROTOCOL_VERSION))

    def coverage(self, offer: Offer) -> tuple[Coverage, ...]:
        """What a truthful Done says of this offer: one entry a buffer."""
        first = offer.prefix_tokens // self.layout.page_size
        runs = {
            "page": ((first, len(offer.pages) // 4),),
            "aux": ((0, 1),) if offer.aux_slot is not None else (),
            "state": ((0, len(offer.state_rows) // 4),),
        }
        return tuple(
            Coverage((buffer.id,), 0, buffer.item_len, tuple(run for run in runs[buffer.unit] if run[1]))
            for buffer in self.layout.buffers
            if buffer.unit in runs and any(run[1] for run in runs[buffer.unit])
        )

    def done(self, offer: Offer, coverage: tuple[Coverage, ...] | None = None, **changes: Any) -> None:
        fields: dict[str, Any] = {"room": offer.room, "gen": offer.gen, "status": "ok"}
        fields["coverage"] = self.coverage(offer) if coverage is None else coverage
        self.send(Done(**fields | changes))

    def abort(self, offer: Offer, reason: str = "raw prefill") -> None:
        self.send(Abort(room=offer.room, gen=offer.gen, origin="prefill", reason=reason))

    def quiet(self, offer: Offer, **changes: Any) -> None:
        self.send(AbortAck(room=offer.room, gen=offer.gen, session=offer.session, **changes))

    def close(self) -> None:
        self._listener.close()


def pages_of(raw: bytes) -> list[int]:
    """Pages as they travel, as a list."""
    pages: list[int] = unpack_indices(raw).tolist()
    return pages


def number(peer: RawPeer) -> int:
    """The next sequence number, taken."""
    peer.next_seq += 1
    return peer.next_seq - 1
