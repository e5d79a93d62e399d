"""Prefill and decode nodes in one process and one loop, over the loopback engine and the in-memory network.

::

    async with Cluster(prefills=[Pool(seed=1)], decodes=[Pool()]) as cluster:
        handle = cluster.decode().expect(7, 1, cluster.addresses, pages, total_tokens=8)
        cluster.forward([ChunkSpec(room=7, gen=1, pages=pages, last=True)])
        await handle
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from orchestrator.chunk import ChunkSpec
from orchestrator.clock import Clock
from orchestrator.config import Config
from orchestrator.cuda_events import EventSource
from orchestrator.decode import Decode
from orchestrator.engines.base import Engine, EngineLimits
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.forward import ForwardPass
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from orchestrator.testing.network import MemoryNetwork
from orchestrator.testing.pool import Pool

Wrap = Callable[[Engine], Engine]


class Cluster:
    """Async context manager. Leaving it stops every node; ``balanced`` tells whether the books are empty."""

    def __init__(
        self,
        *,
        prefills: Sequence[Pool],
        decodes: Sequence[Pool],
        config: Config | None = None,
        decode_config: Config | None = None,
        events: EventSource | None = None,
        wrap: Wrap | None = None,
        limits: EngineLimits | None = None,
        seed: int = 0,
        digest: bool = True,
        clock: Clock | None = None,
    ) -> None:
        """Page digests are on unless ``digest`` says otherwise; ``wrap`` is put around each prefill's engine (to make
        it faulty or paced)."""
        self.network = MemoryNetwork()
        self.fabric = LoopbackFabric()
        self.prefill_pools = list(prefills)
        self.decode_pools = list(decodes)
        self.prefills: list[Prefill] = []
        self.decodes: list[Decode] = []
        self.engines: list[Engine] = []
        self.nodes: list[Node] = []
        self.decode_nodes: list[Node] = []
        self.prefill_nodes: list[Node] = []
        self._config = replace(config or Config(), digest=digest)
        self._decode_config = replace(decode_config or self._config, digest=digest)
        self._events = events
        self._wrap = wrap or (lambda engine: engine)
        self._limits = limits
        self._clock = clock
        self._rng = random.Random(seed)

    async def __aenter__(self) -> Cluster:
        for pool in self.prefill_pools:
            node = Node(clock=self._clock, network=self.network, rng=self._rng)
            engine = self._wrap(self.fabric.engine(self._limits))
            self.engines.append(engine)
            self.prefills.append(node.start_prefill(engine, pool.layout, config=self._config, events=self._events))
            self.nodes.append(node)
            self.prefill_nodes.append(node)
        for pool in self.decode_pools:
            node = Node(clock=self._clock, network=self.network, rng=self._rng)
            engine = self.fabric.engine(self._limits)
            self.decodes.append(node.start_decode(engine, pool.layout, config=self._decode_config))
            self.nodes.append(node)
            self.decode_nodes.append(node)
        return self

    async def __aexit__(self, *_: object) -> None:
        for node in reversed(self.nodes):
            await node.stop()

    @property
    def addresses(self) -> list[str]:
        return [prefill.address for prefill in self.prefills]

    def prefill(self, number: int = 0) -> Prefill:
        return self.prefills[number]

    def decode(self, number: int = 0) -> Decode:
        return self.decodes[number]

    def forward(
        self, chunks: Iterable[ChunkSpec], *, prefill: int = 0, layers: Iterable[int] | None = None
    ) -> ForwardPass:
        """One whole forward: every hooked layer fires, in order, unless ``layers`` says otherwise."""
        fired = range(self.prefill_pools[prefill].layers) if layers is None else layers
        with self.prefills[prefill].begin_forward(chunks) as forward:
            for layer in fired:
                forward.layer_end(layer)
        return forward

    def balanced(self) -> list[str]:
        """What is left in any table: empty when every room has ended and every unit is free (V8)."""
        left: list[str] = []
        for node in self.nodes:
            if node.sender is not None:
                left += [repr(room) for room in node.sender.rooms]
                left += [
                    f"lane {lane.session} is busy" for lane in node.sender.sessions.lanes.values() if not lane.idle
                ]
                left += [f"{node.sender.engine.pending} batches pending"] if node.sender.engine.pending else []
            if node.receiver is not None:
                left += [repr(room) for room in node.receiver.rooms]
                left += [f"{node.receiver.book.taken()} units taken"] if node.receiver.book.taken() else []
        return left
