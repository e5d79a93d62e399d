"""Which source pages a room's writes may still read: pinned from registration until source free. Pure.

Unlike a lease a pin is shared: a cached prefix page may be read for several rooms at once. What it says is only that
the page must not be rewritten or given away.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from protocols.blocks import Ints
from protocols.ids import RoomKey


class PinBook:
    """Counts per page."""

    def __init__(self, pages: int) -> None:
        self._count = np.zeros(pages, np.int32)
        self._rooms: dict[RoomKey, list[Ints]] = {}

    def __len__(self) -> int:
        """Pages that are pinned."""
        return int((self._count > 0).sum())

    def pin(self, key: RoomKey, pages: Ints) -> None:
        """Pin these pages (each named once) for the room, in addition to what it has."""
        self._count[pages] += 1
        self._rooms.setdefault(key, []).append(pages)

    def unpin(self, key: RoomKey) -> None:
        """The room's source is free."""
        for pages in self._rooms.pop(key, ()):
            self._count[pages] -= 1

    def pinned(self, pages: Ints) -> npt.NDArray[np.bool_]:
        """For each page whether some room may still read it."""
        return self._count[pages] > 0
