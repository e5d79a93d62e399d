"""Which rooms there are: live ones by key, and the outcomes of those that ended, for a while.

Live rooms belong to the loop; outcomes may be looked up from any thread.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import replace
from typing import Generic, Protocol, TypeVar

from orchestrator.clock import Clock
from orchestrator.outcome import Outcome
from protocols.errors import BusyError, UnknownRoomError
from protocols.ids import RoomKey
from protocols.messages import AbortAck, Units
from protocols.shares import Shares
from protocols.tombstones import Tombstones


class Room(Protocol):
    """What the registry needs of a room."""

    @property
    def key(self) -> RoomKey: ...

    @property
    def outcome(self) -> Outcome: ...


R = TypeVar("R", bound=Room)

KEPT_SPANS = 65536
"""Spans kept of ended rooms, all together: some 15 MB. A room of a long prompt has thousands."""


class Verdict:
    """What is remembered of an ended room, and what its writers last said to each destination (by incarnation)."""

    __slots__ = ("acks", "outcome")

    def __init__(self, outcome: Outcome, acks: dict[bytes, AbortAck]) -> None:
        self.outcome = outcome
        self.acks = acks


class Timelines:
    """The spans of the rooms that ended last. Older ones keep their result without them: verdicts are remembered for
    minutes, and at hundreds of rooms a second their timelines would fill gigabytes."""

    def __init__(self, at_most: int = KEPT_SPANS) -> None:
        self._at_most = at_most
        self._held = 0
        self._outcomes: OrderedDict[RoomKey, tuple[Outcome, int]] = OrderedDict()

    def keep(self, outcome: Outcome) -> None:
        """Of the room that has just ended; the oldest make place. Loop thread."""
        spans = len(outcome.result.spans) if outcome.result is not None else 0
        if not spans:
            return
        self.forget(outcome.key)
        self._outcomes[outcome.key] = outcome, spans
        self._held += spans
        while self._held > self._at_most:
            _, (oldest, count) = self._outcomes.popitem(last=False)
            self._held -= count
            if oldest.result is not None:
                oldest.result = replace(oldest.result, spans=())

    def forget(self, key: RoomKey) -> None:
        """The room itself is forgotten."""
        _, count = self._outcomes.pop(key, (None, 0))
        self._held -= count


class Registry(Generic[R]):
    """Loop thread only, but for `open`, `find` and `outcome`."""

    def __init__(self, clock: Clock, tombstone_s: float, max_foreign: int = 1 << 16) -> None:
        """``max_foreign``: verdicts kept of rooms that only peers named."""
        self._clock = clock
        self._foreign: Shares[RoomKey] = Shares(max_foreign)
        """Ended rooms that this side's embedder never named, by the peer that did."""
        self._live: dict[RoomKey, R] = {}
        self._generations: dict[int, RoomKey] = {}
        """The newest live generation of each room id."""
        self._stones: Tombstones[Verdict] = Tombstones(tombstone_s)
        self._timelines = Timelines()
        self._outcomes: dict[RoomKey, Outcome] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._live)

    def __iter__(self) -> Iterator[R]:
        return iter(list(self._live.values()))

    # -- any thread ----------------------------------------------------------------------------------------------

    def open(self, key: RoomKey, *, exclusive: bool = False) -> Outcome:
        """The outcome of this room, made now if there is none. Raises BusyError for a known key if ``exclusive``."""
        with self._lock:
            known = self._outcomes.get(key)
            if known is None:
                known = self._outcomes[key] = Outcome(key)
            elif exclusive:
                state = "ended recently" if known.status.ended else "is live"
                raise BusyError(f"the room {state}", room=str(key), hint="Mint a new generation for a reused room id.")
            return known

    def find(self, key: RoomKey) -> Outcome:
        """The outcome of this room. Raises UnknownRoomError when it never was here or is forgotten."""
        outcome = self._outcomes.get(key)
        if outcome is None:
            raise UnknownRoomError("no such room", room=str(key))
        return outcome

    # -- loop thread ---------------------------------------------------------------------------------------------

    def live(self, key: RoomKey) -> R | None:
        return self._live.get(key)

    def newest(self, room: int) -> RoomKey | None:
        """The newest live generation of this room id."""
        return self._generations.get(room)

    def add(self, room: R) -> None:
        self._live[room.key] = room
        newest = self._generations.get(room.key.room)
        if newest is None or newest.gen < room.key.gen:
            self._generations[room.key.room] = room.key

    def end(self, key: RoomKey, verdict: Verdict, *, in_doubt: bool = False, named_by: str = "") -> None:
        """The room ended: only its verdict stays. ``named_by``: the peer that alone ever named it; of such rooms the
        number remembered is bounded."""
        self._live.pop(key, None)
        if self._generations.get(key.room) == key:
            del self._generations[key.room]
        self._stones.add(key, verdict, self._clock.now(), in_doubt=in_doubt)
        self._timelines.keep(verdict.outcome)
        with self._lock:
            self._outcomes[key] = verdict.outcome
        self._foreign.remove(key)
        for gone in self._foreign.add(named_by, key) if named_by else ():
            if self._stones.discard(gone):
                self._forget(gone)
        self.forget_expired()

    def settle(self, key: RoomKey, peer: bytes) -> None:
        """A fence at this destination: nothing of the room is in doubt there any more."""
        verdict = self._stones.get(key, self._clock.now())
        if verdict is not None:
            verdict.acks.pop(peer, None)
            if not any(ack.in_doubt != Units() for ack in verdict.acks.values()):
                self._stones.settle(key, self._clock.now())

    def verdict(self, key: RoomKey) -> Verdict | None:
        self.forget_expired()
        return self._stones.get(key, self._clock.now())

    def forget_expired(self) -> None:
        """Drop outcomes whose tombstone has expired."""
        for key in self._stones.take_expired(self._clock.now()):
            self._foreign.remove(key)
            self._forget(key)

    def _forget(self, key: RoomKey) -> None:
        self._timelines.forget(key)
        with self._lock:
            self._outcomes.pop(key, None)

    @property
    def remembered(self) -> int:
        return len(self._stones)
