"""The prefill's door: who may talk to it. Frames in, links out; Hello, Welcome, Refused, WrongIncarnation.

Loop thread only. No rooms here: what a link hears goes to the sender.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import msgspec

from orchestrator.contacts import Contacts
from orchestrator.guests import Guests, check_session
from orchestrator.hello import make_hello, refusal
from orchestrator.link import Link, flushed
from orchestrator.wire import ControlNetwork, Listener, Origin
from protocols.codec import decode, decode_envelope, encode
from protocols.errors import MalformedFrameError, RefusedError
from protocols.ids import Incarnation
from protocols.layout import pair_layouts
from protocols.messages import (
    HEARD_BY_PREFILL,
    PROTOCOL_VERSION,
    Bye,
    Envelope,
    Hello,
    Message,
    Refused,
    Welcome,
    WrongIncarnation,
)

if TYPE_CHECKING:
    from orchestrator.sender import Sender


class Reception:
    """See the module."""

    def __init__(
        self, sender: Sender, me: Incarnation, network: ControlNetwork, contacts: Contacts, rng: random.Random
    ) -> None:
        self.links: dict[Incarnation, Link] = {}
        self._sender = sender
        self._me = me
        self._network = network
        self._contacts = contacts
        self._rng = rng
        self._counters = sender.counters
        self._log = sender.log
        self.guests = Guests(sender.config, sender.clock, sender.counters)
        self._listener: Listener | None = None

    def listen(self, bind: str) -> str:
        """Bind and return the address. Raises BusyError or ConfigError."""
        self._listener = self._network.listen(bind, self.on_frame)
        return self._listener.address

    async def say_bye(self) -> None:
        """Tell every peer that we leave, and let those that answer acknowledge."""
        for link in list(self.links.values()):
            link.post(Bye(deadline_ms=0))
        await flushed(self.links.values(), self._sender.clock)

    def close(self) -> None:
        for link in self.links.values():
            link.close()
        self.links.clear()
        if self._listener is not None:
            self._listener.close()

    def forget(self, link: Link) -> None:
        """The peer's incarnation is gone."""
        self.links.pop(link.peer, None)
        self._contacts.remove(link.peer)
        self._sender.sessions.forget(link)
        self.guests.release(link)
        link.close()

    def on_frame(self, identity: bytes, frame: bytes) -> None:
        """A frame from the control endpoint. Never raises for what a peer sends (C7)."""
        assert self._listener is not None, "frames come from the listener"
        link = self.links.get(Incarnation(identity))
        if self.guests.is_foreign(Incarnation(identity), self._listener.origin, link):
            self._log.warning("foreign", "a frame for the incarnation of another key was dropped")
            return  # without an answer: by now the identity may lead to its true owner again
        try:
            envelope = decode_envelope(frame, HEARD_BY_PREFILL)
            if envelope.src != identity:
                raise MalformedFrameError("the sender is not who it says", src=envelope.src.hex())
        except MalformedFrameError as exc:
            self._counters["bad_frames"] += 1
            self._log.warning("bad_frame", "a frame was dropped: %s", exc)
            if link is not None:
                link.count_bad_frame()
            return
        if envelope.type == "hello":
            self._on_hello(envelope, frame)
        elif envelope.dst != self._me:
            self._counters["wrong_incarnation"] += 1
            self._reply(envelope, WrongIncarnation(meant=envelope.dst))
        elif link is None or envelope.dial > link.dial:
            self._reply(envelope, Refused(reason="say Hello first"))
        elif envelope.dial < link.dial:
            self._counters["late_messages"] += 1  # of a connection the peer has left
        else:
            link.receive(envelope, frame)

    def _reply(self, envelope: Envelope, message: Message) -> None:
        """Answer a peer with which there is no link."""
        stamped = msgspec.structs.replace(message, src=self._me, dst=envelope.src, dial=envelope.dial)
        if self._listener is not None:
            self._listener.wire_to(envelope.src).send(encode(stamped))

    def _on_hello(self, envelope: Envelope, frame: bytes) -> None:
        peer = Incarnation(envelope.src)
        known = self.links.get(peer)
        assert self._listener is not None, "frames come from the listener"
        origin = self._listener.origin
        try:
            if envelope.v != PROTOCOL_VERSION:
                raise RefusedError("another protocol version", protocol=f"{PROTOCOL_VERSION} != {envelope.v}")
            hello = decode(frame)
            if not isinstance(hello, Hello):
                raise MalformedFrameError("not a Hello", type=envelope.type)
            if not hello.v_min <= PROTOCOL_VERSION <= hello.v_max:
                raise RefusedError(
                    "no common protocol version", protocol=f"{PROTOCOL_VERSION} not in {hello.v_min}..{hello.v_max}"
                )
            if hello.role != "decode":
                raise RefusedError("a prefill serves decode workers only", role=hello.role)
            check_session(hello.session, origin)
            pairs = pair_layouts(self._sender.layout, hello.layout)
            if known is None:
                self._make_place(hello, peer, origin)
        except (RefusedError, MalformedFrameError) as exc:
            self._counters["hello_refused"] += 1
            self._log.warning("refused", "a peer was refused: %s", exc)
            self._reply(envelope, refusal(exc))
            return
        if known is not None and hello.dial < known.dial:
            self._counters["late_messages"] += 1
            return
        if known is not None and hello.dial > known.dial:
            self._sender.peer_gone(known, "the decode worker dialled anew")
            known = None
        if known is None:
            known = self._new_link(hello, peer, origin)
            if self.guests.claim(hello.session, peer, origin):
                self._contacts.add(peer, hello, pairs, origin.name)
        sender = self._sender
        known.send(make_hello(sender.layout, sender.engine, sender.config, "prefill"))
        known.send(Welcome(chosen=PROTOCOL_VERSION, session_reused=not self.guests.owns_session_of(known)))
        known.welcome()

    def _new_link(self, hello: Hello, peer: Incarnation, origin: Origin) -> Link:
        assert self._listener is not None, "frames come from the listener"
        sender = self._sender
        link = Link(
            self._me,
            peer,
            self._listener.wire_to(peer),
            sender,
            sender.clock,
            random.Random(self._rng.random()),
            sender.config,
            sender.loop.call_soon,
        )
        link.hello, link.origin, link.dial = hello, origin, hello.dial
        self.links[peer] = link
        return link

    def _make_place(self, hello: Hello, peer: Incarnation, origin: Origin) -> None:
        """For a new link: the older incarnation of the same rank is gone, and so is who was silent longest if there
        are too many. Raises RefusedError."""
        self._forget_older(hello, origin)
        leaving = self.guests.who_makes_place(origin, self.links)
        if leaving is not None:
            self._sender.peer_gone(leaving, "it made place for another decode worker")
        self.guests.note(peer, origin)

    def _forget_older(self, hello: Hello, origin: Origin) -> None:
        """A newer incarnation of the same rank, with the same key: the older one is gone."""
        for link in list(self.links.values()) if hello.name else ():
            if link.hello is not None and link.hello.name == hello.name and link.origin.key == origin.key:
                self._sender.peer_gone(link, "the decode worker was restarted")
