"""What is remembered of rooms that ended: their verdict, for a while and for as long as it is in doubt. Pure."""

from __future__ import annotations

from collections import deque
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
        self._by_key: dict[RoomKey, Tombstone[T]] = {}
        self._order: deque[tuple[float, RoomKey]] = deque()

    def __len__(self) -> int:
        return len(self._by_key)

    def add(self, key: RoomKey, verdict: T, now: float, *, in_doubt: bool = False) -> None:
        """A stone in doubt stays so, whatever is added over it, until `settle`."""
        known = self._by_key.get(key)
        self._put(key, verdict, now, in_doubt or (known is not None and known.in_doubt))

    def _put(self, key: RoomKey, verdict: T, now: float, in_doubt: bool) -> None:
        expires = now + self._keep_s
        self._by_key[key] = Tombstone(verdict, in_doubt, expires)
        self._order.append((expires, key))

    def get(self, key: RoomKey, now: float) -> T | None:
        """The verdict, or None when nothing is remembered."""
        stone = self._by_key.get(key)
        if stone is None or (stone.expires <= now and not stone.in_doubt):
            return None
        return stone.verdict

    def settle(self, key: RoomKey, now: float) -> None:
        """Nothing of this room is in doubt any more: it expires like the others, counted from now."""
        stone = self._by_key.get(key)
        if stone is not None and stone.in_doubt:
            self._put(key, stone.verdict, now, in_doubt=False)

    def take_expired(self, now: float) -> list[RoomKey]:
        """Forget what expired and return its keys. Amortised constant time."""
        gone: list[RoomKey] = []
        while self._order and self._order[0][0] <= now:
            expires, key = self._order.popleft()
            stone = self._by_key.get(key)
            if stone is not None and stone.expires == expires and not stone.in_doubt:
                del self._by_key[key]
                gone.append(key)
        return gone
