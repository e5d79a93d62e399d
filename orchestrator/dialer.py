"""Dialling prefill ranks: one link an address, Hello until Welcome, both layouts checked. Loop thread only."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from orchestrator.clock import Clock, Timer
from orchestrator.config import Config
from orchestrator.engines.base import Engine
from orchestrator.hello import make_hello
from orchestrator.link import Link, LinkOwner
from orchestrator.wire import ControlNetwork
from protocols.breaker import Breaker
from protocols.codec import decode, decode_envelope
from protocols.errors import BrokenPeerError, KvferryError, MalformedFrameError, RefusedError
from protocols.ids import Incarnation
from protocols.layout import Layout, pair_layouts
from protocols.messages import (
    HEARD_BY_DECODE,
    PROTOCOL_VERSION,
    AnyMessage,
    Envelope,
    Hello,
    Refused,
    Welcome,
    WrongIncarnation,
)

MAX_FACTS, MAX_FACT = 16, 500
"""Fields, and characters of each, that are taken over from a Refused."""
FIRST_HELLO_S = 0.1
LAST_HELLO_S = 1.0


class DialOwner(LinkOwner, Protocol):
    """The receiver: it also hears that a peer is gone for good."""

    def peer_gone(self, link: Link, reason: str) -> None: ...

    def named_old_session(self, link: Link, session: str) -> None:
        """The link is up, and the peer may know us under a session that was rolled over meanwhile."""
        ...

    def session_reused(self) -> None:
        """The peer knows our engine's session of an earlier process."""
        ...


@dataclass(slots=True)
class _Dial:
    """A link and who waits for it."""

    link: Link
    deadline: float
    delay: float = FIRST_HELLO_S
    timer: Timer | None = None
    named: set[str] = field(default_factory=set)
    """The engine sessions that its Hellos named: which of them the peer has heard, if any, it does not say."""
    welcomed: bool = False
    waiting: list[tuple[Callable[[Link], None], Callable[[KvferryError], None]]] = field(default_factory=list)


class Dialer:
    """One link to each prefill address."""

    def __init__(
        self,
        *,
        me: Incarnation,
        layout: Layout,
        engine: Engine,
        config: Config,
        network: ControlNetwork,
        clock: Clock,
        rng: random.Random,
        loop: asyncio.AbstractEventLoop,
        owner: DialOwner,
    ) -> None:
        self.links: dict[str, Link] = {}
        self._me = me
        self._layout = layout
        self._engine = engine
        self._config = config
        self._network = network
        self._clock = clock
        self._rng = rng
        self._loop = loop
        self._owner = owner
        self._dials: dict[str, _Dial] = {}
        self._breakers: dict[str, Breaker] = {}
        self._count = 0
        self.bad_frames = 0

    def use_engine(self, engine: Engine) -> None:
        """Hello names this engine from now on."""
        self._engine = engine

    def when_up(self, address: str, on_up: Callable[[Link], None], on_error: Callable[[KvferryError], None]) -> None:
        """Call ``on_up`` once the link is up (now, if it is), or ``on_error``: RefusedError with the differing fields,
        BrokenPeerError when nobody answers in `connect_timeout_s`, ConfigError for an impossible address.

        A peer that was not heard of for a moment is asked first: if another process is at its address by now, that one
        is dialled, and nothing is ever offered to one that is gone."""
        dial = self._dials.get(address)
        if dial is None:
            breaker = self._breakers.get(address)
            if breaker is not None and not breaker.allow(self._clock.now()):
                wait = round(breaker.retry_in(self._clock.now()), 2)
                on_error(BrokenPeerError("the prefill worker keeps not answering", address=address, retry_in_s=wait))
                return
            try:
                dial = self._dial(address)
            except KvferryError as exc:
                on_error(exc)
                return
        if dial.link.up and dial.link.fresh and not dial.waiting:
            on_up(dial.link)
            return
        dial.waiting.append((on_up, on_error))
        if dial.link.up and dial.timer is None:
            dial.deadline = self._clock.now() + self._config.connect_timeout_s
            dial.delay = FIRST_HELLO_S
            self._ask(address, dial)

    def _ask(self, address: str, dial: _Dial) -> None:
        """Repeated until the peer of an open link is heard of, or the deadline."""
        dial.timer = None
        if self._dials.get(address) is not dial or not dial.waiting:
            return
        if self._clock.now() >= dial.deadline:
            seconds = self._config.connect_timeout_s
            self._tell_waiting(dial, BrokenPeerError("the prefill worker is silent", address=address, seconds=seconds))
            return
        dial.link.ask()
        dial.timer = self._clock.call_later(dial.delay, lambda: self._ask(address, dial))
        dial.delay = min(dial.delay * 2, LAST_HELLO_S)

    def _answered(self, dial: _Dial) -> None:
        """The link is up, and its peer was heard of just now."""
        if dial.timer is not None:
            dial.timer.cancel()
            dial.timer = None
        waiting, dial.waiting = dial.waiting, []
        for on_up, _ in waiting:
            on_up(dial.link)

    def _tell_waiting(self, dial: _Dial, error: KvferryError) -> None:
        waiting, dial.waiting = dial.waiting, []
        for _, on_error in waiting:
            on_error(error)

    def _dial(self, address: str) -> _Dial:
        wire = self._network.dial(address, self._me, lambda frame: self._on_frame(address, frame))
        link = Link(
            self._me,
            Incarnation(b""),
            wire,
            self._owner,
            self._clock,
            random.Random(self._rng.random()),
            self._config,
            self._loop.call_soon,
        )
        self._count += 1
        link.address, link.dial = address, self._count
        dial = _Dial(link, self._clock.now() + self._config.connect_timeout_s)
        self._dials[address] = dial
        self.links[address] = link
        self._say_hello(address, dial)
        return dial

    def _say_hello(self, address: str, dial: _Dial) -> None:
        """Repeated until Welcome or Refused, or the deadline."""
        dial.timer = None
        if dial.link.up or self._dials.get(address) is not dial:
            return
        if self._clock.now() >= dial.deadline:
            heard = "answers, but never said Welcome" if dial.link.hello is not None else "does not answer"
            self._fail(
                address,
                BrokenPeerError(
                    f"the prefill worker {heard}",
                    address=address,
                    seconds=self._config.connect_timeout_s,
                    hint="Check that a prefill worker listens there."
                    if self._config.secret_key is None
                    else "Check that a prefill worker with server_key listens there and has our key in client_keys.",
                ),
                unanswered=True,
            )
            return
        dial.named.add(self._engine.session)
        dial.link.send(make_hello(self._layout, self._engine, self._config, "decode"))
        dial.timer = self._clock.call_later(dial.delay, lambda: self._say_hello(address, dial))
        dial.delay = min(dial.delay * 2, LAST_HELLO_S)

    def _on_frame(self, address: str, frame: bytes) -> None:
        dial = self._dials.get(address)
        if dial is None:
            return
        try:
            envelope = decode_envelope(frame, HEARD_BY_DECODE)
        except MalformedFrameError:
            self._count_bad_frame(dial.link)
            return
        link = dial.link
        if envelope.dial != link.dial and envelope.v == PROTOCOL_VERSION:
            # A Welcome of an earlier dial would let us speak before its Hello comes, which then ends what we said.
            self._owner.counters["late_messages"] += 1
        elif envelope.type == "wrong_incarnation" or (link.up and envelope.src != link.peer):
            if link.up:
                self._owner.peer_gone(link, "the prefill worker was restarted")
        elif envelope.dst not in (self._me, b""):
            self._count_bad_frame(link)
        elif link.up and envelope.type not in ("hello", "welcome", "refused"):
            link.receive(envelope, frame)
            if link.up and dial.waiting:
                self._answered(dial)
        else:
            self._handshake(address, dial, envelope, frame)

    def _count_bad_frame(self, link: Link) -> None:
        self.bad_frames += 1
        self._owner.counters["bad_frames"] += 1
        if link.up:
            link.count_bad_frame()

    def _handshake(self, address: str, dial: _Dial, envelope: Envelope, frame: bytes) -> None:
        try:
            if envelope.v != PROTOCOL_VERSION:
                raise RefusedError("another protocol version", protocol=f"{PROTOCOL_VERSION} != {envelope.v}")
            self._greet(address, dial, Incarnation(envelope.src), decode(frame))
        except (RefusedError, MalformedFrameError) as exc:
            if dial.link.up:  # too late to refuse it: rooms are open, and a greeting repeated badly changes nothing
                self._count_bad_frame(dial.link)
                return
            what = exc.what
            if isinstance(exc, MalformedFrameError):
                what = f"the peer is no prefill worker of this version: {what}"
            self._fail(address, RefusedError(what, hint=exc.hint, **{**exc.data, "address": address}))

    def _greet(self, address: str, dial: _Dial, src: Incarnation, message: AnyMessage) -> None:
        link = dial.link
        match message:
            case Hello():
                if message.role != "prefill":
                    raise RefusedError("a decode dials prefill workers only", role=message.role)
                pair_layouts(message.layout, self._layout)
                link.hello = message
                link.peer = src
            case Welcome():
                if message.session_reused:
                    if dial.named == {self._engine.session}:
                        self._owner.session_reused()
                    raise RefusedError(
                        "an earlier process had this engine session, and late writes of its rooms may still arrive",
                        hint="Restart this worker: its engine takes another port.",
                        session=self._engine.session,
                    )
                dial.welcomed = True
            case Refused():
                if link.up:  # it forgot us: what it holds of ours is over
                    self._owner.on_broken(link, BrokenPeerError(f"the prefill worker refused us: {message.reason}"))
                    return
                raise RefusedError(f"the prefill worker refused us: {message.reason}", **_facts(message.fields))
            case WrongIncarnation():
                return
            case _:
                return
        if dial.welcomed and link.hello is not None and not link.up:
            self._breakers.pop(address, None)
            link.welcome()
            for old in sorted(dial.named - {self._engine.session}):
                self._owner.named_old_session(link, old)
            self._answered(dial)

    def _fail(self, address: str, error: KvferryError, *, unanswered: bool = False) -> None:
        """Nobody gets this link; the next use dials anew, unless the address keeps not answering."""
        if unanswered:
            breaker = self._breakers.setdefault(address, Breaker(random.Random(self._rng.random())))
            breaker.failed(self._clock.now())
        else:
            self._breakers.pop(address, None)
        dial = self._dials.pop(address)
        self.links.pop(address, None)
        if dial.timer is not None:
            dial.timer.cancel()
        dial.link.close()
        self._tell_waiting(dial, error)

    def forget(self, link: Link) -> None:
        """The peer's incarnation is gone; the next use of its address dials anew, and so does who waits for it now."""
        dial = self._dials.get(link.address)
        if dial is not None and dial.link is link:
            waiting, dial.waiting = dial.waiting, []
            self._fail(link.address, BrokenPeerError("the prefill worker is gone", address=link.address))
            for on_up, on_error in waiting:
                self.when_up(link.address, on_up, on_error)
        link.close()

    async def close(self) -> None:
        for address in list(self._dials):
            self._fail(address, BrokenPeerError("the decode worker is shutting down", address=address))


def _facts(fields: dict[str, str]) -> dict[str, str]:
    """What a peer says differs, as data of an error: some of it, and nothing that an error takes for its own."""
    named = [(name, text[:MAX_FACT]) for name, text in fields.items() if name not in ("self", "what", "hint")]
    return dict(named[:MAX_FACTS])
