"""One connection between two incarnations: sequenced messages, acknowledgements, heartbeats.

A link knows nothing of rooms but which are open (heartbeats run only then). It survives reconnects of its wire; it
ends when the peer's incarnation is gone. Loop thread only.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from orchestrator.clock import Clock, Timer
from orchestrator.config import Config
from orchestrator.wire import Origin, Wire
from protocols.channel import Channel
from protocols.codec import decode, encode, room_named_by
from protocols.errors import BrokenPeerError, MalformedFrameError
from protocols.ids import Incarnation, RoomKey
from protocols.layout import MAX_NATURAL
from protocols.messages import UNSEQUENCED, AnyMessage, Envelope, Hello, Ping, Pong

FRESH_S = 0.1
"""Shorter than any process takes to end and another to start on its address."""


class LinkOwner(Protocol):
    """Who is told what a link hears: the sender or the receiver."""

    counters: Counter[str]
    unheard: frozenset[str]
    """Types of messages that the peer may not send to this side: counted, not decoded."""

    def on_message(self, link: Link, message: AnyMessage) -> None:
        """A message to act on: sequenced ones exactly once and in order."""
        ...

    def on_bad_body(self, link: Link, key: RoomKey, error: MalformedFrameError) -> None:
        """A frame that names this room could not be decoded; its sequence number is used up."""
        ...

    def on_silent(self, link: Link) -> None:
        """Nothing was heard for `silence_s` while rooms were open."""
        ...

    def on_broken(self, link: Link, error: BrokenPeerError) -> None:
        """The peer breaks the protocol or acknowledges nothing: end its rooms."""
        ...


class Link:
    """See the module. ``peer`` is empty until the other side has said who it is."""

    def __init__(
        self,
        me: Incarnation,
        peer: Incarnation,
        wire: Wire,
        owner: LinkOwner,
        clock: Clock,
        rng: random.Random,
        config: Config,
        call_soon: Callable[[Callable[[], object]], object],
    ) -> None:
        self.me = me
        self.peer = peer
        self.address = ""
        """Where it was dialled to (decode side)."""
        self.dial = 0
        """Which dial of the decode this is: frames of another one are not of this link."""
        self.origin = Origin()
        """Where it came from (prefill side)."""
        self.hello: Hello | None = None
        """What the peer said of itself."""
        self.proven = False
        """A room of this peer was here."""
        self.up = False
        """Hello and Welcome were exchanged; messages may be posted."""
        self.silent = False
        self.closed = False
        self.bad_frames = 0
        self._wire = wire
        self._owner = owner
        self._clock = clock
        self._config = config
        self._patience_s = max(config.tombstone_s, config.silence_s)
        self._call_soon = call_soon
        self._channel = Channel(rng, owner.counters)
        self._open: dict[RoomKey, float] = {}
        self._watched = False
        self.last_heard = clock.now()
        self._pings = 0
        self._reconnected = False
        """Since it was last heard of."""
        self._flush_scheduled = False
        self._resend: Timer | None = None
        self._heartbeat: Timer | None = None

    def __repr__(self) -> str:
        state = "closed" if self.closed else "silent" if self.silent else "up" if self.up else "dialling"
        return f"<Link {self.address or self.peer.hex()[:8]} {state}, {len(self._open)} rooms, {self.unacked} unacked>"

    # -- sending -------------------------------------------------------------------------------------------------

    def post(self, message: AnyMessage) -> None:
        """Send a sequenced message, again and again until it is acknowledged or this link is closed.

        Raises ConfigError, with nothing queued, for one that is larger than a frame: it could never be delivered, nor
        anything behind it."""
        if self.closed:
            return
        encode(
            msgspec.structs.replace(
                message, src=self.me, dst=self.me, seq=MAX_NATURAL, ack=MAX_NATURAL, dial=MAX_NATURAL
            )
        )
        try:
            self._channel.post(message, self._clock.now())
        except BrokenPeerError as exc:
            self._owner.on_broken(self, exc)
            return
        self._flush_soon()

    def send(self, message: AnyMessage) -> bool:
        """Send an unsequenced message once. False when the transport did not take it."""
        if self.closed:
            return False
        # WrongIncarnation and Hello may go to a peer whose incarnation we do not know yet.
        stamped = msgspec.structs.replace(message, src=self.me, dst=self.peer, ack=self._channel.ack, dial=self.dial)
        self._channel.ack_owed = False
        return self._wire.send(encode(stamped))

    def _flush_soon(self) -> None:
        if not self._flush_scheduled and not self.closed:
            self._flush_scheduled = True
            self._call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        if self.closed or not self.up:
            return
        now, owed = self._clock.now(), self._channel.owed_since
        if owed is not None and now - owed > self._patience_s:
            # What it would have to answer is forgotten by now; and a peer that died unheard is not told for ever.
            self._owner.on_broken(self, BrokenPeerError("the peer acknowledges nothing", seconds=self._patience_s))
            return
        for message in self._channel.take_due(now):
            self.send(message)
        if self._channel.ack_owed:
            self.send(Pong(number=0))
        if self._resend is not None:
            self._resend.cancel()
            self._resend = None
        due = self._channel.next_due()
        if due is not None:
            self._resend = self._clock.call_later(max(0.0, due - now), self._flush)

    @property
    def account(self) -> str:
        """By what this peer's share of our tables is counted: its key, its address, or itself."""
        return self.origin.name or self.peer.hex()

    @property
    def unacked(self) -> int:
        return self._channel.unacked

    def welcome(self) -> None:
        """Both sides know each other: what was posted goes out."""
        self.up = True
        self._flush_soon()

    # -- receiving -----------------------------------------------------------------------------------------------

    def receive(self, envelope: Envelope, frame: bytes) -> None:
        """Take a frame whose envelope was decoded and is meant for us. Never raises."""
        if self.closed:
            return
        self.last_heard = self._clock.now()
        self.silent = self._reconnected = False
        self._channel.acked(envelope.ack)
        if envelope.seq and not self._channel.wants(envelope.seq, len(frame)):
            self._flush_soon()  # it has not heard the acknowledgement
            return
        message = self._decode(envelope, frame)
        if self.closed:
            return  # one bad frame too many
        if envelope.seq:
            for ready in self._channel.receive(envelope.seq, message, len(frame)):
                self._owner.on_message(self, ready)
                if self.closed:
                    return
            self._flush_soon()
        elif isinstance(message, Ping):
            self.send(Pong(number=message.number, rooms=len(self._open), oldest_ms=self._oldest_ms()))
        elif message is not None and not isinstance(message, Pong):
            self._owner.on_message(self, message)

    def _decode(self, envelope: Envelope, frame: bytes) -> AnyMessage | None:
        """The message, or None for what is counted as bad; then any room it names fails."""
        if envelope.type in self._owner.unheard:
            self._owner.counters["unexpected_messages"] += 1
            self.count_bad_frame()
            return None
        try:
            message = decode(frame)
            if isinstance(message, UNSEQUENCED) != (envelope.seq == 0):
                raise MalformedFrameError("sequenced where it must not be, or the reverse", type=envelope.type)
        except MalformedFrameError as exc:
            key = room_named_by(frame)
            if key is not None:
                self._owner.on_bad_body(self, key, exc)
            self.count_bad_frame()
            return None
        return message

    def count_bad_frame(self) -> None:
        """The peer sent a frame that does not decode, or that says what it may not say now; too many end it."""
        self.bad_frames += 1
        if self.bad_frames > self._config.max_bad_frames and not self.closed:
            self._owner.on_broken(self, BrokenPeerError("too many undecodable frames", frames=self.bad_frames))

    # -- heartbeats ----------------------------------------------------------------------------------------------

    def open_room(self, key: RoomKey) -> None:
        """A room depends on this peer: ping it until the room is closed."""
        now = self._clock.now()
        if not self._needed:  # silence is counted from here, also for a peer that was silent before
            self.last_heard = now
            self.silent = False
        self._open[key] = now
        self.proven = True
        self._keep_beating()

    def close_room(self, key: RoomKey) -> None:
        self._open.pop(key, None)
        self._stop_beating()

    @property
    def fresh(self) -> bool:
        """The peer was heard of so recently that no other process can have taken its place."""
        return self._clock.now() - self.last_heard <= FRESH_S

    def ask(self) -> None:
        """Ping the peer once: whoever is at its address answers."""
        self._pings += 1
        self.send(Ping(number=self._pings, rooms=len(self._open), oldest_ms=self._oldest_ms()))

    def watch(self, *, on: bool) -> None:
        """Ping the peer also without a room: somebody waits for its word, or for the news that it is gone."""
        self._watched = on
        if on:
            self._keep_beating()
        else:
            self._stop_beating()

    @property
    def _needed(self) -> bool:
        return bool(self._open) or self._watched

    def _keep_beating(self) -> None:
        if self._heartbeat is None and not self.closed:
            self._heartbeat = self._clock.call_later(self._config.ping_interval_s, self._beat)

    def _stop_beating(self) -> None:
        if not self._needed and self._heartbeat is not None:
            self._heartbeat.cancel()
            self._heartbeat = None

    @property
    def rooms(self) -> list[RoomKey]:
        return list(self._open)

    def _beat(self) -> None:
        self._heartbeat = None
        if self.closed or not self._needed:
            return
        silence = self._clock.now() - self.last_heard
        if self.silent and silence >= self._patience_s:
            self._owner.on_broken(self, BrokenPeerError("the peer stays silent", seconds=self._patience_s))
            return
        if silence >= self._config.silence_s and not self.silent:
            self.silent = True
            self._owner.on_silent(self)
        elif silence >= self._config.silence_s / 2 and not self._reconnected:
            self._reconnected = True
            self._owner.counters["reconnects"] += 1
            self._wire.reconnect()
        if self.up:
            self.ask()
        if self._needed:
            self._keep_beating()

    def _oldest_ms(self) -> int:
        return int((self._clock.now() - min(self._open.values())) * 1000) if self._open else 0

    def close(self) -> None:
        """Forget the peer: nothing is sent again, no timer stays. Idempotent."""
        if self.up and self._channel.ack_owed:
            self.send(Pong(number=0))  # what made us close may wait for its acknowledgement
        self.closed = True
        self.up = False
        for timer in (self._resend, self._heartbeat):
            if timer is not None:
                timer.cancel()
        self._resend = self._heartbeat = None
        self._open.clear()
        self._wire.close()


FLUSH_S = 0.5
"""How long a closing side waits for its last messages to be acknowledged."""


async def wait_until(ready: Callable[[], bool], clock: Clock, deadline: float) -> bool:
    """Wait for a condition, at most until ``deadline``. For shutdown only: it asks every two milliseconds."""
    while not ready() and clock.now() < deadline:  # noqa: ASYNC110
        await asyncio.sleep(0.002)
    return ready()


async def flushed(links: Iterable[Link], clock: Clock) -> None:
    """Let peers that still answer acknowledge what was posted: a closed ZMQ socket drops what it has not sent."""
    live = [link for link in links if link.up and not link.silent]
    await wait_until(lambda: all(link.unacked == 0 for link in live), clock, clock.now() + FLUSH_S)
