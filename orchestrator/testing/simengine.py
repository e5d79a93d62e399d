"""A simulated engine: the whole engine contract on a loop's clock, with everything a real transport does to bytes.

A block passes *queued* (its source is not read yet), *in the fabric* (its bytes are in sockets and belong to nobody),
*landed*; its verdict reaches the writer apart from that, at ``poll``. So a FAILED block may land later, also after its
writer was killed; a stopped destination takes nothing and everything once it goes on; a session name reaches whichever
engine has it when the block leaves. Closing a destination engine, or killing its process, is a fence: what is in the
fabric for it is dropped.

Determinism: fates, delays and orders are drawn from one seeded generator, in the order of the submissions; nothing
else is random. Times are seconds of the loop's clock. Without faults it is an ordinary engine on any asyncio loop.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections import deque

from orchestrator.engines.admission import Regions, admit
from orchestrator.engines.base import Batch, EngineInfo, EngineLimits, Probe
from orchestrator.engines.draining import drain, poll_guarded
from orchestrator.testing.simfabric import SimFabric
from orchestrator.testing.simflight import Flight, SimBatch
from orchestrator.testing.virtual import Domain
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ClosedError, ConfigError
from protocols.ids import Session

CONNECT_STEP_S = 0.2


class SimEngine:
    """See the module. Loop thread only, like every engine."""

    def __init__(
        self,
        fabric: SimFabric,
        host: str = "host",
        *,
        domain: Domain | None = None,
        io: Domain | None = None,
        port: int | None = None,
        limits: EngineLimits | None = None,
    ) -> None:
        """An engine of a process: ``domain`` is the process, ``io`` its native threads; both are held and killed
        together. ``port`` may be one that an ended engine had, as real ones repeat. Raises BusyError for one in use
        or held."""
        self.info = EngineInfo("simulated", "1", "fabric", "one-block")
        self.limits = limits or EngineLimits()
        self.host = host
        self.ports: tuple[int, ...] = (fabric.next_port() if port is None else port,)
        self.session = Session(f"{host}:{self.ports[0]}")
        self.domain = domain
        self.regions = Regions()
        self.closed = False
        self.free_at = 0.0
        """When its link has carried all that was submitted."""
        self.verdicts: deque[tuple[Flight, str]] = deque()
        self.io_context = io.context if io is not None else fabric.context
        self._fabric = fabric
        self._connected: set[Session] = set()
        self._batches: dict[int, SimBatch] = {}
        fabric.add(self)

    def __repr__(self) -> str:
        return f"<SimEngine {self.session}{' closed' if self.closed else ''}>"

    @property
    def pending(self) -> int:
        return len(self._batches)

    def register(self, address: int, nbytes: int) -> None:
        self.regions.add(address, nbytes)

    def unregister(self, address: int) -> None:
        self.regions.remove(address)

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        fabric = self._fabric
        deadline = fabric.loop.time() + timeout
        if self.closed:
            raise ClosedError("the engine is closed", session=self.session)
        if session in self._connected:
            return
        if probe is not None and not self.regions.hold(probe.src, 1):
            raise ConfigError("the probe's source lies outside the registered regions", src=probe.src)
        delay = fabric.rng.uniform(*fabric.faults.connect_s)
        if delay:
            await asyncio.sleep(min(delay, timeout))
        while (peer := fabric.find(session)) is not None and not self._answers(peer):
            left = deadline - fabric.loop.time()
            if left <= 0:
                raise BrokenPeerError("the peer did not answer in time", session=session, timeout=timeout)
            await asyncio.sleep(min(left, CONNECT_STEP_S))
        if peer is None:
            raise BrokenPeerError("no such peer", session=session)
        if probe is not None:
            if not peer.regions.hold(probe.dst, 1):
                raise BrokenPeerError("the peer refused the probe", session=session)
            ctypes.memmove(probe.dst, probe.src, 1)
        self._connected.add(session)

    async def disconnect(self, session: Session) -> None:
        self._connected.discard(session)

    def _answers(self, peer: SimEngine) -> bool:
        held = peer.domain is not None and peer.domain.held
        fabric = self._fabric
        return not (held or peer.host in fabric.black_holes or fabric.is_blocked(self.host, peer.host))

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        if self.closed:
            raise ClosedError("the engine is closed", session=self.session)
        if session not in self._connected:
            raise BrokenPeerError("this peer was never connected", session=session)
        parts = admit(blocks, self.limits, self.regions)
        if self._fabric.rng.random() < self._fabric.faults.refuse:
            raise BrokenPeerError("the transport refused", session=session)
        batch = SimBatch(self, session, blocks)
        self._batches[id(batch)] = batch
        self._fabric.launch(batch, *parts)
        return batch

    def poll(self) -> int:
        count = 0
        while self.verdicts:
            flight, reason = self.verdicts.popleft()
            count += 1
            self._apply(flight, reason)
        return count

    def _apply(self, flight: Flight, reason: str) -> None:
        batch = flight.batch
        batch.open.discard(flight.index)
        try:
            if flight.verdict == "FAILED":
                batch.fail_block(flight.index, reason)
            elif flight.verdict == "NEVER":
                batch.refuse_block(flight.index, reason)
        finally:
            if not batch.open:
                del self._batches[id(batch)]
                batch.finish()

    async def close(self, drain_timeout: float) -> None:
        await drain(self, drain_timeout)
        delay = self._fabric.rng.uniform(*self._fabric.faults.close_s)
        if delay:
            await asyncio.sleep(delay)
        if self.closed:
            return
        self.closed = True
        fabric = self._fabric
        fabric.remove(self)
        for flight in [other for other in fabric.live.values() if other.writer is self]:
            if flight.data is None:
                flight.cancelled = True
                del fabric.live[flight.number]
        while self.verdicts:
            poll_guarded(self)
        batches, self._batches = self._batches, {}
        for batch in batches.values():
            for index in sorted(batch.open):
                batch.fail_block(index, "the engine was closed before this block was acknowledged")
            batch.finish()
