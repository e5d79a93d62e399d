"""Which units of a worker are free. Whoever asks for some gets the most recently freed: reuse as soon as can be."""

from __future__ import annotations

import asyncio
from collections import deque


class FreeUnits:
    """One event loop only. Waiters are served in order."""

    def __init__(self, count: int) -> None:
        self._free = list(range(count - 1, -1, -1))
        self._waiters: deque[tuple[int, asyncio.Future[list[int]]]] = deque()
        self.total = count

    def __len__(self) -> int:
        return len(self._free)

    @property
    def free(self) -> list[int]:
        return sorted(self._free)

    async def take(self, count: int) -> list[int]:
        """``count`` units, once there are so many."""
        if not self._waiters and count <= len(self._free):
            return self._pop(count)
        waiter: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._waiters.append((count, waiter))
        return await waiter

    def give(self, units: list[int]) -> None:
        self._free += units
        while self._waiters and (self._waiters[0][1].done() or self._waiters[0][0] <= len(self._free)):
            count, waiter = self._waiters.popleft()
            if not waiter.done():
                waiter.set_result(self._pop(count))

    def _pop(self, count: int) -> list[int]:
        taken = self._free[len(self._free) - count :]
        del self._free[len(self._free) - count :]
        return taken
