"""Two channels against each other over a network that a test drives by hand: `pair`, `transfer`, `drop`, `duplicate`,
`reorder`, `settle`. Plain functions on plain lists; frames are real bytes; time is a number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import msgspec

from protocols.channel import FIRST_RETRY_S, Channel
from protocols.codec import decode, encode
from protocols.messages import Abort, AnyMessage, Pong

A, B = b"a" * 16, b"b" * 16


@dataclass
class End:
    """One side: its channel, what lies in the network towards it, what it was handed."""

    name: bytes
    peer: bytes
    channel: Channel
    arriving: list[bytes] = field(default_factory=list)
    posted: list[int] = field(default_factory=list)
    received: list[int] = field(default_factory=list)
    frames_sent: int = 0


@dataclass
class Pair:
    a: End
    b: End
    now: float = 0.0

    def other(self, end: End) -> End:
        return self.b if end is self.a else self.a


def pair(seed: int = 0) -> Pair:
    return Pair(End(A, B, Channel(random.Random(seed))), End(B, A, Channel(random.Random(seed + 1))))


def post(pair: Pair, end: End) -> None:
    """Queue the next numbered message."""
    number = len(end.posted)
    end.posted.append(number)
    end.channel.post(Abort(room=number, gen=0, origin="decode", reason=""), pair.now)


def send(pair: Pair, end: End) -> None:
    """Put what is due into the network, each frame with the acknowledgement; an owed one goes alone if nothing is."""
    due = end.channel.take_due(pair.now)
    if not due and end.channel.ack_owed:
        due = [Pong(number=0)]
    for message in due:
        stamped = msgspec.structs.replace(message, src=end.name, dst=end.peer, ack=end.channel.ack)
        pair.other(end).arriving.append(encode(stamped))
        end.channel.ack_owed = False
        end.frames_sent += 1


def deliver(end: End, count: int | None = None) -> None:
    """Hand ``count`` frames (None: all) that lie in the network to their end."""
    for _ in range(len(end.arriving) if count is None else min(count, len(end.arriving))):
        message: AnyMessage = decode(end.arriving.pop(0))
        end.channel.acked(message.ack)
        if message.seq:
            for ready in end.channel.receive(message.seq, message):
                assert isinstance(ready, Abort)
                end.received.append(ready.room)


def transfer(pair: Pair) -> None:
    """One exchange without a fault: both send what is due, both get all of it."""
    for end in (pair.a, pair.b):
        send(pair, end)
    for end in (pair.a, pair.b):
        deliver(end)


def drop(end: End, at: int | None = None) -> None:
    """Lose one frame on its way to ``end``, or all (None), as a broken connection does."""
    if at is None:
        end.arriving.clear()
    elif end.arriving:
        del end.arriving[at % len(end.arriving)]


def duplicate(end: End, at: int) -> None:
    if end.arriving:
        end.arriving.append(end.arriving[at % len(end.arriving)])


def reorder(end: End, seed: int) -> None:
    random.Random(seed).shuffle(end.arriving)


def settle(pair: Pair, rounds: int = 60) -> None:
    """Let time pass over a network without faults until nothing is due any more."""
    for _ in range(rounds):
        transfer(pair)
        if pair.a.channel.ack_owed or pair.b.channel.ack_owed:
            continue
        due = [when for end in (pair.a, pair.b) if (when := end.channel.next_due()) is not None]
        if not due:
            return
        pair.now = max(pair.now, *due) + FIRST_RETRY_S
    raise AssertionError("the channels do not come to rest")
