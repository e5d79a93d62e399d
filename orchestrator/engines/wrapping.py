"""What ``faulty`` and ``paced`` share: an engine in front of another, with batches of its own.

The outer batch is what the caller holds. The inner one is made when the wrapper hands the blocks on, maybe much later
and maybe as other blocks; here its outcome is carried back to the outer one.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

from orchestrator.engines.admission import Regions, admit
from orchestrator.engines.base import Batch, Engine, EngineInfo, EngineLimits, Probe
from orchestrator.engines.draining import drain
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ClosedError
from protocols.ids import Session


class WrappingEngine(ABC):
    """Everything of the contract that a wrapper does not change. Register and connect through the wrapper."""

    def __init__(self, inner: Engine) -> None:
        self.inner = inner
        self._regions = Regions()
        self._connected: set[Session] = set()
        self._open: dict[int, Batch] = {}
        self._turned = 0
        self._closed = False

    @property
    def info(self) -> EngineInfo:
        return self.inner.info

    @property
    def limits(self) -> EngineLimits:
        return self.inner.limits

    @property
    def session(self) -> Session:
        return self.inner.session

    @property
    def ports(self) -> tuple[int, ...]:
        return self.inner.ports

    @property
    def pending(self) -> int:
        return len(self._open)

    def register(self, address: int, nbytes: int) -> None:
        self.inner.register(address, nbytes)
        self._regions.add(address, nbytes)

    def unregister(self, address: int) -> None:
        self.inner.unregister(address)
        self._regions.remove(address)

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        await self.inner.connect(session, probe, timeout)
        self._connected.add(session)

    async def disconnect(self, session: Session) -> None:
        self._connected.discard(session)
        await self.inner.disconnect(session)

    @abstractmethod
    def submit(self, session: Session, blocks: Blocks) -> Batch: ...

    def poll(self) -> int:
        """As the contract says; a batch's blocks count when the whole batch is terminal."""
        if self._closed:
            return 0
        self._turned = 0
        self._advance()
        self.inner.poll()
        return self._turned

    async def close(self, drain_timeout: float) -> None:
        """Drain within ``drain_timeout`` seconds of the loop's clock, then close the inner engine."""
        deadline = asyncio.get_running_loop().time() + drain_timeout
        await drain(self, drain_timeout)
        self._closed = True
        await self.inner.close(max(0.0, deadline - asyncio.get_running_loop().time()))
        for batch in list(self._open.values()):
            known = {*batch.in_doubt, *batch.never_submitted}
            for index in range(len(batch.blocks)):
                if index not in known:
                    batch.fail_block(index, "the engine was closed before this block was written")
            self._settle(batch)

    # -- for the wrappers ----------------------------------------------------------------------------------------

    @abstractmethod
    def _advance(self) -> None:
        """Hand on whatever has become due. Called at the start of every poll."""

    def _admit(self, session: Session, blocks: Blocks) -> Batch:
        """A checked outer batch, not yet open; raises what ``submit`` raises."""
        if self._closed:
            raise ClosedError("the engine is closed", session=self.session)
        if session not in self._connected:
            raise BrokenPeerError("this peer was never connected", session=session)
        admit(blocks, self.limits, self._regions)
        return Batch(session, blocks)

    def _hand_on(self, outer: Batch, blocks: Blocks, indices: list[int], then: Callable[[], None]) -> None:
        """Submit ``blocks`` for ``outer`` and call ``then`` once they are terminal.

        Block ``i`` of them answers for block ``indices[i]`` of the outer batch; where the numbers differ, any failure
        answers for every outer block in ``indices``. Raises BrokenPeerError if the inner engine refuses.
        """
        inner = self.inner.submit(outer.session, blocks)

        def outer_indices(inner_indices: list[int]) -> list[int]:
            if not inner_indices or len(indices) != len(blocks):
                return indices if inner_indices else []
            return [indices[index] for index in inner_indices]

        def carry(batch: Batch) -> None:
            for index in outer_indices(batch.in_doubt):
                if index not in outer.in_doubt:
                    outer.fail_block(index, batch.reason)
            for index in outer_indices(batch.never_submitted):
                if index not in outer.never_submitted and index not in outer.in_doubt:
                    outer.refuse_block(index, batch.reason)

        def done(batch: Batch) -> None:
            carry(batch)
            then()

        inner.add_callbacks(done, carry)

    def _settle(self, outer: Batch) -> None:
        """The outer batch is done."""
        del self._open[id(outer)]
        self._turned += len(outer.blocks)
        outer.finish()
