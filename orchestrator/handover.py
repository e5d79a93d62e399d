"""What a chunk gives a lane: blocks of one room for one session, and what became of them. Loop thread only."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.engines.base import Batch
from orchestrator.outcome import Outcome
from orchestrator.trace import Span
from protocols.blocks import Blocks
from protocols.errors import KvferryError


class Handover:
    """Blocks of one room for one session, and what became of them. `done` when nothing of it runs or will run."""

    __slots__ = (
        "_on_done",
        "_on_failed",
        "blocks",
        "done",
        "error",
        "in_doubt",
        "inflight",
        "missed",
        "outcome",
        "posted",
        "span",
    )

    def __init__(
        self,
        outcome: Outcome,
        blocks: Blocks,
        span: Span,
        on_done: Callable[[Handover], None],
        on_failed: Callable[[Handover, KvferryError], None],
    ) -> None:
        """``on_failed`` hears of the first failure at once, ``on_done`` when what ran before it has drained."""
        self.outcome = outcome
        self.blocks = blocks
        self.span = span
        self.posted = 0
        """Blocks submitted so far: the first ``posted`` of ``blocks``."""
        self.inflight: list[tuple[int, Batch]] = []
        """(index of its first block, batch) for every batch that is not terminal."""
        self.in_doubt: list[int] = []
        """Indices of submitted blocks that FAILED or timed out."""
        self.missed = 0
        """Blocks of accepted batches that the engine refused all the same: they never left."""
        self.error: KvferryError | None = None
        self.done = False
        self._on_done = on_done
        self._on_failed = on_failed

    @property
    def landed(self) -> bool:
        """Every block was submitted and COMPLETED."""
        return self.done and self.is_complete

    @property
    def is_complete(self) -> bool:
        """Every block was submitted, and none of them failed so far."""
        return self.posted == len(self.blocks) and not self.in_doubt and not self.missed

    def unfinished(self) -> list[int]:
        """Indices of blocks that are submitted and not terminal."""
        return [first + i for first, batch in self.inflight for i in range(len(batch.blocks))]

    def fail(self, error: KvferryError) -> None:
        """A write of it failed or was refused: the room submits nothing more, what runs is drained."""
        if self.error is None:
            self.error = error
            self.span.failed = True
            self._on_failed(self, error)

    def finish(self) -> None:
        if not self.done:
            self.done = True
            self._on_done(self)
