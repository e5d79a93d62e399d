"""Names of things: rooms with their generation, chunks, ranks, incarnations."""

from __future__ import annotations

from typing import NamedTuple, NewType

Incarnation = NewType("Incarnation", bytes)
"""16 random bytes, the first not zero, minted at every start of a process side; also its ZMQ identity."""

Session = NewType("Session", str)
"""``host:port`` of an engine: all a writer needs to reach it. Another engine means another session."""

INCARNATION_BYTES = 16
MAX_ROOM = 2**63 - 1
MAX_GENERATION = 2**64 - 1


class RoomKey(NamedTuple):
    """One request's handoff: the room id (63 bits) and its generation (64 bits). A reused id is a new room."""

    room: int
    gen: int

    def __str__(self) -> str:
        return f"{self.room}.{self.gen}"


class ChunkKey(NamedTuple):
    """One chunk of a room, named by the token at which it starts (absolute in the request)."""

    room: int
    gen: int
    start_token: int

    @property
    def room_key(self) -> RoomKey:
        return RoomKey(self.room, self.gen)

    def __str__(self) -> str:
        return f"{self.room}.{self.gen}@{self.start_token}"


def is_incarnation(value: bytes) -> bool:
    """True for 16 bytes whose first is not zero (ZMQ keeps identities that start with zero for itself)."""
    return len(value) == INCARNATION_BYTES and value[0] != 0
