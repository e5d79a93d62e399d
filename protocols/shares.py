"""A bounded table whose owners share it fairly. Pure.

When it is full, the oldest entry of the owner that has most of it goes: whoever floods it loses their own entries, and
nobody else's.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Shares(Generic[K]):
    """Keys with an owner and a weight each. Bounded by count, and by the sum of the weights if asked."""

    def __init__(self, max_entries: int, max_weight: int | None = None) -> None:
        self._max_entries = max_entries
        self._max_weight = max_weight
        self._owner_of: dict[K, str] = {}
        self._entries: dict[str, dict[K, int]] = {}
        """By owner, oldest first."""
        self._weights: dict[str, int] = {}
        self.weight = 0

    def __len__(self) -> int:
        return len(self._owner_of)

    def __contains__(self, key: K) -> bool:
        return key in self._owner_of

    def owner(self, key: K) -> str | None:
        return self._owner_of.get(key)

    def count(self, owner: str) -> int:
        """How many entries this owner has."""
        return len(self._entries.get(owner, ()))

    def add(self, owner: str, key: K, weight: int = 0) -> list[K]:
        """Add an entry, or replace it as the newest, and return what had to go for it: perhaps this very key, when it
        alone outweighs the table or its owner has nothing older."""
        self.remove(key)
        self._owner_of[key] = owner
        self._entries.setdefault(owner, {})[key] = weight
        self._weights[owner] = self._weights.get(owner, 0) + weight
        self.weight += weight
        gone: list[K] = []
        while len(self._owner_of) > self._max_entries:
            gone.append(self._drop_oldest(max(self._entries, key=self.count)))
        while self._max_weight is not None and self.weight > self._max_weight:
            gone.append(self._drop_oldest(max(self._weights, key=lambda each: self._weights[each])))
        return gone

    def remove(self, key: K) -> None:
        """Idempotent."""
        owner = self._owner_of.pop(key, None)
        if owner is None:
            return
        weight = self._entries[owner].pop(key)
        self.weight -= weight
        self._weights[owner] -= weight
        if not self._entries[owner]:
            del self._entries[owner], self._weights[owner]

    def _drop_oldest(self, owner: str) -> K:
        key = next(iter(self._entries[owner]))
        self.remove(key)
        return key
