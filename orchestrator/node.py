"""The composition root: builds one side on a running loop, in order, and stops it in reverse.

`Node` is what the embedded loop thread runs, what the standalone process runs, and what a test runs on its own loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable

from orchestrator.clock import Clock, LoopClock
from orchestrator.config import Config
from orchestrator.cuda_events import EventSource, HostEvents
from orchestrator.decode import Decode
from orchestrator.engines.base import Engine
from orchestrator.inbox import Inbox
from orchestrator.prefill import Prefill
from orchestrator.progress import Pacer
from orchestrator.receiver import Receiver, new_incarnation
from orchestrator.sender import Sender
from orchestrator.wire import ControlNetwork, Side, ZmqNetwork
from protocols.errors import ConfigError
from protocols.layout import Layout

ENGINE_DRAIN_S = 1.0


class Node:
    """The sides of one process. Loop thread only; use as an async context manager.

    Clock, randomness, control network and engine are injected; the defaults are the real ones.
    """

    def __init__(
        self, *, clock: Clock | None = None, rng: random.Random | None = None, network: ControlNetwork | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.clock = clock or LoopClock()
        self.rng = rng or random.SystemRandom()
        self.inbox = Inbox(self.loop)
        self.network = network or ZmqNetwork(self.loop)
        self.pacer = Pacer(self.loop, self.clock)
        self.sender: Sender | None = None
        self.receiver: Receiver | None = None
        self._engines: list[Engine] = []
        self._regions: list[tuple[Engine, tuple[int, int]]] = []

    async def __aenter__(self) -> Node:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def start_prefill(
        self,
        engine: Engine,
        layout: Layout,
        bind: str = "tcp://127.0.0.1:0",
        config: Config | None = None,
        events: EventSource | None = None,
    ) -> Prefill:
        """Register the layout's buffers with the engine, bind the control endpoint, serve. One prefill a node.

        Raises BusyError for a port that is taken, ConfigError.
        """
        assert self.sender is None, "one prefill side a node"
        config = config or Config()
        check_digest(config, layout)
        network = self._network_for("prefill", config)
        sender = Sender(
            me=new_incarnation(self.rng),
            layout=layout,
            engine=self._own(engine, layout),
            config=config,
            network=network,
            events=events or HostEvents(),
            clock=self.clock,
            rng=self.rng,
            loop=self.loop,
            pacer=self.pacer,
        )
        if isinstance(network, ZmqNetwork):
            network.counters = sender.counters
        sender.start(bind)
        self.sender = sender
        return Prefill(sender, self.inbox, threading.get_ident())

    def start_decode(
        self,
        engine: Engine,
        layout: Layout,
        config: Config | None = None,
        renew: Callable[[], Engine] | None = None,
    ) -> Decode:
        """Register the layout's buffers with the engine; prefill ranks are dialled when a room names them.

        ``renew`` makes another engine for a rollover (a few milliseconds, on the loop thread); without it quarantine
        empties only with the end of the process.
        """
        assert self.receiver is None, "one decode side a node"
        config = config or Config()
        check_digest(config, layout)
        network = self._network_for("decode", config)
        self.receiver = Receiver(
            me=new_incarnation(self.rng),
            layout=layout,
            engine=self._own(engine, layout),
            config=config,
            network=network,
            clock=self.clock,
            rng=self.rng,
            loop=self.loop,
            make_engine=None if renew is None else lambda: self._renew(renew, layout),
        )
        return Decode(self.receiver, self.inbox, threading.get_ident())

    def _network_for(self, side: Side, config: Config) -> ControlNetwork:
        """The real network with this side's keys; an injected one has none. Raises ConfigError."""
        return self.network.for_side(side, config) if isinstance(self.network, ZmqNetwork) else self.network

    def _own(self, engine: Engine, layout: Layout) -> Engine:
        """Register every region once; the engine is closed with this node."""
        if engine not in self._engines:
            self._engines.append(engine)
        for region in [(buffer.address, buffer.nbytes) for buffer in layout.buffers]:
            if (engine, region) not in self._regions:
                engine.register(*region)
                self._regions.append((engine, region))
        return engine

    def _renew(self, renew: Callable[[], Engine], layout: Layout) -> Engine:
        """Another engine over the same memory. The one before the current is gone by now: forget it."""
        assert self.receiver is not None
        kept = [self.receiver.engine, *([self.sender.engine] if self.sender is not None else [])]
        self._engines = [engine for engine in self._engines if engine in kept]
        self._regions = [(engine, region) for engine, region in self._regions if engine in kept]
        return self._own(renew(), layout)

    async def stop(self) -> None:
        """End every room, tell the peers, drain, delete the engines (a fence). Idempotent. What one step raises comes
        out in the end, and keeps none of the others from being done."""
        async with contextlib.AsyncExitStack() as steps:  # last in, first out
            steps.callback(self.network.close)
            steps.callback(self.pacer.close)
            steps.push_async_callback(self._close_engines)
            steps.callback(self.inbox.close)
            if self.receiver is not None:
                steps.push_async_callback(self.receiver.stop)
            if self.sender is not None:
                steps.push_async_callback(self.sender.stop)

    async def _close_engines(self) -> None:
        engines, self._engines = self._engines, []
        for engine in engines:
            await engine.close(ENGINE_DRAIN_S)
            if self.receiver is not None:
                self.receiver.fenced(engine.session)


def check_digest(config: Config, layout: Layout) -> None:
    """Raise ConfigError for page digests of memory that this process cannot read."""
    if config.digest and layout.memory != "host":
        raise ConfigError("page digests need a pool in host memory", memory=layout.memory, hint="Switch digest off.")
