"""Window arithmetic: how many blocks and bytes may be in flight to one session. Pure."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocols.blocks import Ints
from protocols.errors import LocalError


@dataclass(frozen=True, slots=True)
class WindowStatistics:
    """What is in flight now and what was at most."""

    blocks: int
    bytes: int
    peak_blocks: int
    peak_bytes: int


class Window:
    """Permits for one session. Taken when blocks are submitted, returned when they are terminal, never by a waiter."""

    def __init__(self, max_blocks: int, max_bytes: int) -> None:
        self.max_blocks = max_blocks
        self.max_bytes = max_bytes
        self._blocks = 0
        self._bytes = 0
        self._peak_blocks = 0
        self._peak_bytes = 0

    def fitting(self, lengths: Ints, at_most: int) -> int:
        """How many of the next blocks (lengths in bytes) may be submitted now, ``at_most`` in one batch.

        A single block larger than the byte window passes when nothing else is in flight: it could never pass
        otherwise.
        """
        room = min(at_most, self.max_blocks - self._blocks, len(lengths))
        if room <= 0:
            return 0
        fits = int(np.searchsorted(np.cumsum(lengths[:room]), self.max_bytes - self._bytes, side="right"))
        return fits if fits or self._blocks else 1

    def take(self, blocks: int, nbytes: int) -> None:
        self._blocks += blocks
        self._bytes += nbytes
        self._peak_blocks = max(self._peak_blocks, self._blocks)
        self._peak_bytes = max(self._peak_bytes, self._bytes)

    def give_back(self, blocks: int, nbytes: int) -> None:
        """Raises LocalError when more comes back than was taken: the books would lie."""
        if blocks > self._blocks or nbytes > self._bytes:
            raise LocalError("more permits came back than were taken", blocks=blocks, bytes=nbytes)
        self._blocks -= blocks
        self._bytes -= nbytes

    @property
    def idle(self) -> bool:
        return self._blocks == 0

    def statistics(self) -> WindowStatistics:
        return WindowStatistics(self._blocks, self._bytes, self._peak_blocks, self._peak_bytes)
