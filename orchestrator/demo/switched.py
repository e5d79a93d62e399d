"""The prefill's way to the wire: Mooncake as it is, or paced like a slower link, switched between two transfers."""

from __future__ import annotations

import time

from orchestrator.engines.base import Batch, Engine
from orchestrator.engines.paced import PacedEngine
from protocols.blocks import Blocks
from protocols.ids import Session


class SwitchedLink(PacedEngine):
    """``paced`` decides for each submission; change it only while nothing is pending. Loop thread, but for that."""

    def __init__(self, inner: Engine, gigabits: float) -> None:
        super().__init__(inner, gigabits, time.monotonic)
        self.paced = False

    @property
    def pending(self) -> int:
        return super().pending + self.inner.pending

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        return super().submit(session, blocks) if self.paced else self.inner.submit(session, blocks)

    def poll(self) -> int:
        """As the contract says; a paced block may count twice, once per engine, which only hastens the next poll."""
        self._turned = 0
        self._advance()
        return self.inner.poll() + self._turned
