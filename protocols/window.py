"""Window arithmetic: how many blocks and bytes may be in flight to one session, in how many batches. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

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

    def fitting(self, lengths: Iterable[int], at_most: int) -> int:
        """How many of the next blocks (lengths in bytes) may be submitted now, ``at_most`` in one batch.

        A single block larger than the byte window passes when nothing else is in flight: it could never pass
        otherwise.
        """
        room = min(at_most, self.max_blocks - self._blocks)
        left = self.max_bytes - self._bytes
        count = 0
        for length in lengths:
            left -= length
            if count >= room or (left < 0 and (count or self._blocks)):
                break
            count += 1
        return count

    def take(self, blocks: int, nbytes: int) -> None:
        self._blocks += blocks
        self._bytes += nbytes
        if self._blocks > self._peak_blocks:
            self._peak_blocks = self._blocks
        if self._bytes > self._peak_bytes:
            self._peak_bytes = self._bytes

    def give_back(self, blocks: int, nbytes: int) -> None:
        """Raises LocalError when more comes back than was taken: the books would lie."""
        if blocks > self._blocks or nbytes > self._bytes:
            raise LocalError("more permits came back than were taken", blocks=blocks, bytes=nbytes)
        self._blocks -= blocks
        self._bytes -= nbytes

    @property
    def blocks(self) -> int:
        """In flight now."""
        return self._blocks

    @property
    def nbytes(self) -> int:
        """In flight now (bytes)."""
        return self._bytes

    @property
    def idle(self) -> bool:
        return self._blocks == 0

    def statistics(self) -> WindowStatistics:
        return WindowStatistics(self._blocks, self._bytes, self._peak_blocks, self._peak_bytes)


CALM_TURNS = 256
"""Refills without a dry window after which a widened one narrows again."""
LONE_TURNS = 16
"""A window that is one batch is dry whenever that lands; after so many it is tried with two."""
PARTS = 4
"""A window goes in so many batches: while one lands the others keep the link busy."""


class Width:
    """How many blocks a window holds and how many a batch takes, by how late the loop comes round.

    A window that ran dry while blocks were waiting was too small: it widens, within what a stopped peer may leave
    behind. Where it did because the loop came late (a busy forward thread holds the GIL), it goes in fewer batches,
    because every submission is another wait for the GIL. When calm it becomes what it was.
    """

    def __init__(self, base: int, most: int, max_batch: int) -> None:
        """Blocks: of the window usually, of the widest window, of the largest batch."""
        self.blocks = base
        self.parts = PARTS
        self._base = base
        self._most = max(base, most)
        self._max_batch = max_batch
        self._calm = 0

    @property
    def batch(self) -> int:
        """Most blocks of one batch."""
        return max(1, min(self._max_batch, self.blocks // self.parts))

    @property
    def late(self) -> bool:
        return self.parts < PARTS

    def refill(self, dry: bool, late: bool) -> None:
        """Note a refill that found blocks waiting; ``dry``: and nothing in flight any more; ``late``: well after it was
        due."""
        lone = self.parts == 1
        if dry and (late or self.blocks < self._most) and not lone:
            self.blocks = min(self._most, 2 * self.blocks)
            self.parts = self.parts // 2 if late else self.parts
            self._calm = 0
            return
        self._calm += 1
        if lone and self._calm >= LONE_TURNS:
            self.parts, self._calm = 2, 0
        elif not lone and self._calm >= CALM_TURNS:
            self.blocks = max(self._base, self.blocks // 2)
            self.parts = min(PARTS, 2 * self.parts)
            self._calm = 0
