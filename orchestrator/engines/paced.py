"""A link of a given rate in front of any engine, for demos and benchmarks on a machine whose own network is too fast.

One virtual link for all sessions: a batch is handed to the inner engine when the link would have finished carrying it.
Until then its source is in use and it counts as pending, as on a real link. Time is injected, so a virtual clock works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from orchestrator.engines.base import Batch, Engine
from orchestrator.engines.wrapping import WrappingEngine
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ConfigError
from protocols.ids import Session


class PacedEngine(WrappingEngine):
    """``gigabits`` per second (10**9 bits); ``now`` returns monotonic seconds."""

    def __init__(self, inner: Engine, gigabits: float, now: Callable[[], float]) -> None:
        super().__init__(inner)
        if not gigabits > 0:
            raise ConfigError("a link needs a rate above zero", gigabits=gigabits)
        self._bytes_per_second = gigabits * 1e9 / 8
        self._now = now
        self._free_at = 0.0
        self._carried: deque[tuple[float, Batch]] = deque()

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        batch = self._admit(session, blocks)
        self._free_at = max(self._free_at, self._now()) + blocks.nbytes / self._bytes_per_second
        self._carried.append((self._free_at, batch))
        self._open[id(batch)] = batch
        return batch

    def next_due(self) -> float | None:
        """When the link next has something to hand on, in seconds of ``now``; None if it carries nothing."""
        return self._carried[0][0] if self._carried else None

    def _advance(self) -> None:
        while self._carried and self._carried[0][0] <= self._now():
            _, batch = self._carried.popleft()
            indices = list(range(len(batch.blocks)))
            try:
                self._hand_on(batch, batch.blocks, indices, partial(self._settle, batch))
            except BrokenPeerError as error:
                for index in indices:
                    batch.refuse_block(index, str(error))
                self._settle(batch)
