"""Whose turn it is on a link that several rooms share. Pure: says who is next, submits nothing.

Rooms in turn have a quantum of bytes each. One that is expected to be over with its first turn is *fresh* until it went
once: fresh rooms go first, but have every second turn at most, so that however many come the others go on.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from itertools import islice
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)


class Turns(Generic[K]):
    """See the module."""

    def __init__(self, quantum: int) -> None:
        """``quantum``: bytes of a turn."""
        self.quantum = max(quantum, 1)
        self._fresh: OrderedDict[K, None] = OrderedDict()
        self._regular: OrderedDict[K, None] = OrderedDict()
        """In turn."""
        self._spent: dict[K, int] = {}
        """Bytes of the turn under way."""
        self._fresh_went = False

    def __len__(self) -> int:
        return len(self._spent)

    def add(self, key: K, *, fresh: bool) -> None:
        """A room that was not here has something to send."""
        (self._fresh if fresh else self._regular)[key] = None
        self._spent[key] = 0

    def remove(self, key: K) -> None:
        """It has nothing to send any more."""
        del self._spent[key]
        del (self._fresh if key in self._fresh else self._regular)[key]

    def is_fresh(self, key: K) -> bool:
        return key in self._fresh

    def left(self, key: K) -> int:
        """Bytes left of its turn."""
        return self.quantum - self._spent[key]

    def candidates(self) -> list[K]:
        """Who may go now, in this order: the second only where there is no place for the first."""
        fresh, regular = list(islice(self._fresh, 1)), list(islice(self._regular, 1))
        if fresh and not (self._fresh_went and regular):
            return fresh
        return regular + fresh

    def went(self, key: K, nbytes: int) -> None:
        """It sent so much. A turn that is over makes it the last; one that is not leaves it the next."""
        self._fresh_went = key in self._fresh
        self._fresh.pop(key, None)
        self._spent[key] += nbytes
        over = self._spent[key] >= self.quantum
        if over:
            self._spent[key] = 0
        self._regular[key] = None
        self._regular.move_to_end(key, last=over)
