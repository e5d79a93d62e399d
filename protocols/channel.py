"""Exactly-once, in-order delivery of sequenced messages between two incarnations. Pure: time is an argument.

ZMQ may lose what was queued when a connection breaks and deliver it to another process on the same port; TCP alone
promises nothing across a reconnect. A channel lives as long as the pair of incarnations does and survives both.

Sending side: every message gets the next ``seq`` and is sent again with jittered, doubling delay until acknowledged.
Receiving side: messages are handed out once and in order; what arrives early is held, bounded; what arrives again is
dropped, but acknowledged again.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import msgspec

from protocols.errors import BrokenPeerError
from protocols.messages import AnyMessage

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 5.0
MAX_UNACKED = 65536
MAX_HELD = 1024


@dataclass(slots=True)
class _Unacked:
    message: AnyMessage
    due: float
    attempts: int


class Channel:
    """One direction's numbering and the other direction's order. Both belong to one (src, dst) pair."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._next_seq = 1
        self._unacked: dict[int, _Unacked] = {}
        self._held: dict[int, AnyMessage | None] = {}
        self.ack = 0
        """Highest contiguous sequence number processed; stamped on everything we send."""
        self.ack_owed = False
        """Something was received since `ack` was last stamped on a frame."""

    def post(self, message: AnyMessage, now: float) -> None:
        """Queue a message; it is due at once. Raises BrokenPeerError when the peer acknowledges nothing for so long
        that the buffer is full: then the peer is broken, nothing is dropped silently."""
        if len(self._unacked) >= MAX_UNACKED:
            raise BrokenPeerError("the peer acknowledges nothing", unacked=len(self._unacked))
        seq = self._next_seq
        self._next_seq += 1
        self._unacked[seq] = _Unacked(msgspec.structs.replace(message, seq=seq), now, 0)

    def take_due(self, now: float) -> list[AnyMessage]:
        """What must be sent (again) now, oldest first; each is due again after a longer, jittered delay."""
        due: list[AnyMessage] = []
        for entry in self._unacked.values():
            if entry.due <= now:
                delay = min(FIRST_RETRY_S * 2**entry.attempts, LAST_RETRY_S)
                entry.due = now + delay * (0.75 + 0.5 * self._rng.random())
                entry.attempts = min(entry.attempts + 1, 16)
                due.append(entry.message)
        return due

    def next_due(self) -> float | None:
        """When `take_due` will next have something, in the caller's clock; None when all is acknowledged."""
        return min((entry.due for entry in self._unacked.values()), default=None)

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    def acked(self, ack: int) -> None:
        """The peer has processed everything up to ``ack``. Numbers never sent are ignored."""
        for seq in list(self._unacked):
            if seq > ack:
                break
            del self._unacked[seq]

    def receive(self, seq: int, message: AnyMessage | None) -> list[AnyMessage]:
        """Take a sequenced message (None: its body was bad) and return what can be processed now, in order."""
        self.ack_owed = True
        if seq <= self.ack or seq in self._held:
            return []
        if seq > self.ack + MAX_HELD:
            return []
        self._held[seq] = message
        ready: list[AnyMessage] = []
        while self.ack + 1 in self._held:
            self.ack += 1
            head = self._held.pop(self.ack)
            if head is not None:
                ready.append(head)
        return ready
