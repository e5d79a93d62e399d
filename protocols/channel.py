"""Exactly-once, in-order delivery of sequenced messages between two incarnations. Pure: time is an argument.

ZMQ may lose what was queued when a connection breaks and deliver it to another process on the same port; TCP alone
promises nothing across a reconnect. A channel lives as long as the pair of incarnations does and survives both.

Sending side: every message gets the next ``seq`` and is sent again with jittered, doubling delay until acknowledged.
Receiving side: messages are handed out once and in order; what arrives early is held, bounded; what arrives again is
dropped, but acknowledged again.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from dataclasses import dataclass

import msgspec

from protocols.errors import BrokenPeerError
from protocols.messages import MAX_FRAME_BYTES, AnyMessage

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 5.0
MAX_UNACKED = 65536
MAX_HELD = 1024
MAX_HELD_BYTES = MAX_FRAME_BYTES
"""Frames that arrived early are held up to this many, and this many bytes: each of them could be 16 MiB."""


@dataclass(slots=True)
class _Unacked:
    message: AnyMessage
    posted: float
    due: float
    attempts: int = 0


class Channel:
    """One direction's numbering and the other direction's order. Both belong to one (src, dst) pair."""

    def __init__(self, rng: random.Random, counters: Counter[str] | None = None) -> None:
        """``counters``: where frames that come again, or too early, are counted."""
        self._rng = rng
        self._counters = Counter[str]() if counters is None else counters
        self._next_seq = 1
        self._unacked: deque[_Unacked] = deque()
        self._held: dict[int, tuple[AnyMessage | None, int]] = {}
        self._held_bytes = 0
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
        self._unacked.append(_Unacked(msgspec.structs.replace(message, seq=seq), now, now))

    def take_due(self, now: float) -> list[AnyMessage]:
        """What must be sent (again) now, oldest first; each is due again after a longer, jittered delay."""
        due: list[AnyMessage] = []
        for entry in self._unacked:
            if entry.due <= now:
                delay = min(FIRST_RETRY_S * 2**entry.attempts, LAST_RETRY_S)
                entry.due = now + delay * (0.75 + 0.5 * self._rng.random())
                entry.attempts = min(entry.attempts + 1, 16)
                due.append(entry.message)
        return due

    def next_due(self) -> float | None:
        """When `take_due` will next have something, in the caller's clock; None when all is acknowledged."""
        return min((entry.due for entry in self._unacked), default=None)

    @property
    def unacked(self) -> int:
        return len(self._unacked)

    @property
    def owed_since(self) -> float | None:
        """When the oldest message was posted that is not acknowledged, in the caller's clock."""
        return self._unacked[0].posted if self._unacked else None

    def acked(self, ack: int) -> None:
        """The peer has processed everything up to ``ack``. Numbers never sent are ignored."""
        while self._unacked and self._unacked[0].message.seq <= ack:
            self._unacked.popleft()

    def wants(self, seq: int, nbytes: int = 0) -> bool:
        """Whether `receive` would keep a frame of this number and size: one that it would drop need not be decoded."""
        if seq <= self.ack or seq in self._held:
            self._counters["repeated_frames"] += 1
        elif seq > self.ack + MAX_HELD or (seq > self.ack + 1 and self._held_bytes + nbytes > MAX_HELD_BYTES):
            self._counters["early_frames"] += 1
        else:
            return True
        self.ack_owed = True
        return False

    def receive(self, seq: int, message: AnyMessage | None, nbytes: int = 0) -> list[AnyMessage]:
        """Take a sequenced message (None: its body was bad) whose frame had so many bytes, and return what can be
        processed now, in order."""
        if not self.wants(seq, nbytes):
            return []
        self.ack_owed = True
        self._held[seq] = message, nbytes
        self._held_bytes += nbytes
        ready: list[AnyMessage] = []
        while self.ack + 1 in self._held:
            self.ack += 1
            head, size = self._held.pop(self.ack)
            self._held_bytes -= size
            if head is not None:
                ready.append(head)
        return ready
