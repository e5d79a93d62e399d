"""What is remembered of rooms that ended: their verdict, for a while and for as long as it is in doubt. Pure."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Generic, TypeVar

from protocols.ids import RoomKey

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tombstone(Generic[T]):
    verdict: T
    in_doubt: bool
    expires: float


class Tombstones(Generic[T]):
    """Bounded by time (``keep_s`` seconds); an entry in doubt outlives it until `settle`."""

    def __init__(self, keep_s: float) -> None:
        self._keep_s = keep_s
        self._expiring: OrderedDict[RoomKey, Tombstone[T]] = OrderedDict()
        """In the order in which they expire."""
        self._doubtful: dict[RoomKey, Tombstone[T]] = {}

    def __len__(self) -> int:
        return len(self._expiring) + len(self._doubtful)

    def add(self, key: RoomKey, verdict: T, now: float, *, in_doubt: bool = False) -> None:
        """A stone in doubt stays so, whatever is added over it, until `settle`."""
        self._put(key, verdict, now, in_doubt or key in self._doubtful)

    def _put(self, key: RoomKey, verdict: T, now: float, in_doubt: bool) -> None:
        stone = Tombstone(verdict, in_doubt, now + self._keep_s)
        self._expiring.pop(key, None)
        self._doubtful.pop(key, None)
        if in_doubt:
            self._doubtful[key] = stone
        else:
            self._expiring[key] = stone

    def get(self, key: RoomKey, now: float) -> T | None:
        """The verdict, or None when nothing is remembered."""
        stone = self._doubtful.get(key) or self._expiring.get(key)
        if stone is None or (stone.expires <= now and not stone.in_doubt):
            return None
        return stone.verdict

    def settle(self, key: RoomKey, now: float) -> None:
        """Nothing of this room is in doubt any more: it expires like the others, counted from now."""
        stone = self._doubtful.get(key)
        if stone is not None:
            self._put(key, stone.verdict, now, in_doubt=False)

    def discard(self, key: RoomKey) -> bool:
        """Forget a verdict before its time, unless it is in doubt. True if there was one to forget."""
        return self._expiring.pop(key, None) is not None

    def take_expired(self, now: float) -> list[RoomKey]:
        """Forget what expired and return its keys. Amortised constant time."""
        gone: list[RoomKey] = []
        while self._expiring:
            key, stone = next(iter(self._expiring.items()))
            if stone.expires > now:
                break
            del self._expiring[key]
            gone.append(key)
        return gone
