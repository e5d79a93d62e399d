"""The in-memory engine: real copies between registered regions of one process, at ``poll`` and nowhere else.

No thread, no clock, no randomness: a submission only queues, ``poll`` copies in the order of submission. A test or the
simulator therefore decides when bytes land by deciding when it polls, and how many at once with ``copies_per_poll``.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import deque

from orchestrator.engines.admission import Regions, admit
from orchestrator.engines.base import Batch, EngineInfo, EngineLimits, Probe
from orchestrator.engines.draining import drain
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ClosedError, ConfigError
from protocols.ids import Session


class LoopbackFabric:
    """The network of one process: which session is which engine. A session is never given out twice."""

    def __init__(self) -> None:
        self._engines: dict[Session, LoopbackEngine] = {}
        self._numbers = itertools.count(1)

    def engine(self, limits: EngineLimits | None = None, *, copies_per_poll: int | None = None) -> LoopbackEngine:
        """A new engine on this fabric. ``copies_per_poll``: most blocks one ``poll`` copies; None for all."""
        engine = LoopbackEngine(self, Session(f"loopback:{next(self._numbers)}"), limits, copies_per_poll)
        self._engines[engine.session] = engine
        return engine

    def find(self, session: Session) -> LoopbackEngine | None:
        """The living engine of that session."""
        return self._engines.get(session)

    def remove(self, session: Session) -> None:
        """No write finds this session any more."""
        self._engines.pop(session, None)


class _Queued(Batch):
    """A batch with what the copier needs of it."""

    __slots__ = ("copied", "dst", "length", "src")

    def __init__(self, session: Session, blocks: Blocks, src: list[int], dst: list[int], length: list[int]) -> None:
        super().__init__(session, blocks)
        self.src, self.dst, self.length = src, dst, length
        self.copied = 0


class LoopbackEngine:
    """See the module. Made by :meth:`LoopbackFabric.engine`; loop thread only, like every engine."""

    def __init__(
        self, fabric: LoopbackFabric, session: Session, limits: EngineLimits | None, copies_per_poll: int | None
    ) -> None:
        self.info = EngineInfo("loopback", "1", "memory", "one-block")
        self.limits = limits or EngineLimits()
        self.session = session
        self.ports: tuple[int, ...] = ()
        self.regions = Regions()
        self.copies_per_poll = copies_per_poll
        self._fabric = fabric
        self._connected: set[Session] = set()
        self._queue: deque[_Queued] = deque()
        self._open_blocks = 0
        self._closed = False

    @property
    def pending(self) -> int:
        return len(self._queue)

    def register(self, address: int, nbytes: int) -> None:
        self.regions.add(address, nbytes)

    def unregister(self, address: int) -> None:
        self.regions.remove(address)

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        """At once; ``timeout`` is not needed."""
        if self._closed:
            raise ClosedError("the engine is closed", session=self.session)
        if session in self._connected:
            return
        peer = self._fabric.find(session)
        if peer is None:
            raise BrokenPeerError("no such peer", session=session)
        if probe is not None:
            if not self.regions.hold(probe.src, 1):
                raise ConfigError("the probe's source lies outside the registered regions", src=probe.src)
            if not peer.regions.hold(probe.dst, 1):
                raise BrokenPeerError("the peer refused the probe", session=session)
            ctypes.memmove(probe.dst, probe.src, 1)
        self._connected.add(session)

    async def disconnect(self, session: Session) -> None:
        self._connected.discard(session)

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        if self._closed:
            raise ClosedError("the engine is closed", session=self.session)
        if session not in self._connected:
            raise BrokenPeerError("this peer was never connected", session=session)
        batch = _Queued(session, blocks, *admit(blocks, self.limits, self.regions))
        self._queue.append(batch)
        self._open_blocks += len(batch.src)
        return batch

    def poll(self) -> int:
        count = self._open_blocks if self.copies_per_poll is None else min(self._open_blocks, self.copies_per_poll)
        for _ in range(count):
            self._copy_next()
        return count

    def _copy_next(self) -> None:
        batch = self._queue[0]
        index = batch.copied
        batch.copied += 1
        self._open_blocks -= 1
        last = batch.copied == len(batch.src)
        if last:
            self._queue.popleft()
        try:
            self._copy(batch, index)
        finally:
            if last:
                batch.finish()

    def _copy(self, batch: _Queued, index: int) -> None:
        peer = self._fabric.find(batch.session)
        if peer is None:
            batch.fail_block(index, "the peer's engine is gone")
        elif not peer.regions.hold(batch.dst[index], batch.length[index]):
            batch.fail_block(index, "the destination is not registered at the peer")
        else:
            ctypes.memmove(batch.dst[index], batch.src[index], batch.length[index])

    async def close(self, drain_timeout: float) -> None:
        await drain(self, drain_timeout)
        self._closed = True
        self._fabric.remove(self.session)
        self._open_blocks = 0
        while self._queue:
            batch = self._queue.popleft()
            for index in range(batch.copied, len(batch.src)):
                batch.fail_block(index, "the engine was closed before this block was written")
            batch.finish()
