"""First contact with the engines of decode peers: once a session, off the loop, with a deadline, shared by its rooms.

Each peer has a circuit breaker. A room that fails because a write to the peer failed counts against it; while it is
open the peer's rooms fail at once, and after a pause one of them goes ahead as the probe. Loop thread only.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from orchestrator.clock import Clock
from orchestrator.config import Config
from orchestrator.engines.base import Engine, Probe
from protocols.blocks import Blocks
from protocols.breaker import Breaker, BreakerState
from protocols.errors import BrokenPeerError, KvferryError
from protocols.ids import Incarnation, Session
from protocols.layout import Layout, Pair
from protocols.messages import Hello

Starter = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


ATTEMPTS_PER_ORIGIN = 16
"""First contacts under way for one key or address. Each may hold a thread for a minute, and goes to wherever a peer
says its engine is; others of the same origin wait for their turn, those of other origins do not."""


class _Contact:
    __slots__ = ("attempt", "breaker", "gone", "hello", "made", "pairs", "task", "turn", "under_way")

    def __init__(self, hello: Hello, pairs: Sequence[Pair], breaker: Breaker, turn: asyncio.Semaphore) -> None:
        self.hello = hello
        self.pairs = pairs
        self.breaker = breaker
        self.turn = turn
        self.made = False
        self.gone = False
        """Another session took its place, or the peer left."""
        self.attempt: asyncio.Future[KvferryError | None] | None = None
        self.task: asyncio.Task[None] | None = None
        self.under_way = False
        """An attempt has had its turn and has not ended."""


class Contacts:
    """See the module. Contacting starts as soon as a peer says Hello, so that its first room finds it made."""

    def __init__(
        self,
        engine: Engine,
        layout: Layout,
        config: Config,
        clock: Clock,
        rng: random.Random,
        start: Starter,
        kick: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._config = config
        self._clock = clock
        self._rng = rng
        self._start = start
        self._kick = kick
        self._scratch = next(iter(layout.unit_buffers("scratch")), None)
        self._peers: dict[Incarnation, _Contact] = {}
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()
        """By origin."""

    def add(self, peer: Incarnation, hello: Hello, pairs: Sequence[Pair], origin: str = "") -> None:
        """A peer said Hello, or rolled its engine over: contact the session it names now."""
        known = self._peers.get(peer)
        self.remove(peer)
        breaker = known.breaker if known is not None else Breaker(random.Random(self._rng.random()))
        turn = self._turns.get(origin)
        if turn is None:
            turn = self._turns[origin] = asyncio.Semaphore(ATTEMPTS_PER_ORIGIN)
        contact = self._peers[peer] = _Contact(hello, pairs, breaker, turn)
        self._attempt(contact)

    def remove(self, peer: Incarnation) -> None:
        """The peer is gone, or this session of it: an attempt that waits for its turn has no reason any more. One under
        way goes on to its deadline and keeps its turn: the engine's thread cannot be stopped either."""
        contact = self._peers.pop(peer, None)
        if contact is None:
            return
        contact.gone = True
        if contact.attempt is not None and not contact.attempt.done():
            contact.attempt.set_result(BrokenPeerError("the peer is gone", peer=peer.hex()[:8]))
        if contact.task is not None and not contact.under_way:
            contact.task.cancel()

    def pairs(self, peer: Incarnation) -> Sequence[Pair]:
        """The buffer pairs settled at Hello. Raises BrokenPeerError for a peer that is gone."""
        return self._find(peer).pairs

    def write_failed(self, peer: Incarnation) -> None:
        """A room failed because a write to this peer failed."""
        contact = self._peers.get(peer)
        if contact is not None:
            contact.breaker.failed(self._clock.now())

    def write_worked(self, peer: Incarnation) -> None:
        contact = self._peers.get(peer)
        if contact is not None:
            contact.breaker.succeeded()

    async def contact(self, peer: Incarnation) -> None:
        """Return once blocks can be submitted to the peer. Raises BrokenPeerError: not reached, or the breaker is open.

        Cancelling leaves the attempt running for the peer's other rooms.
        """
        contact = self._find(peer)
        if not contact.breaker.allow(self._clock.now()):
            wait = contact.breaker.retry_in(self._clock.now())
            raise BrokenPeerError(
                "the peer failed repeatedly and is left alone for a while",
                peer=peer.hex()[:8],
                retry_in_s=round(wait, 2),
            )
        if contact.made and contact.breaker.state is not BreakerState.HALF_OPEN:
            return
        error = await asyncio.shield(contact.attempt or self._attempt(contact))
        if error is not None:
            raise error

    def _find(self, peer: Incarnation) -> _Contact:
        contact = self._peers.get(peer)
        if contact is None:
            raise BrokenPeerError("the peer is gone", peer=peer.hex()[:8])
        return contact

    def _attempt(self, contact: _Contact) -> asyncio.Future[KvferryError | None]:
        attempt: asyncio.Future[KvferryError | None] = asyncio.get_running_loop().create_future()
        contact.attempt = attempt
        contact.task = self._start(self._connect(contact, attempt))
        return attempt

    async def _connect(self, contact: _Contact, attempt: asyncio.Future[KvferryError | None]) -> None:
        error: KvferryError | None = BrokenPeerError("first contact was cancelled")
        try:
            async with contact.turn:
                contact.under_way = True
                await self._reach(contact)
            contact.made, error = True, None
            contact.breaker.succeeded()
        except KvferryError as exc:
            error = exc
        except Exception as exc:
            error = BrokenPeerError(f"first contact failed: {type(exc).__name__}: {exc}")
        finally:
            contact.attempt, contact.under_way = None, False
            if error is not None and not contact.gone:
                contact.breaker.failed(self._clock.now())
            if not attempt.done():
                attempt.set_result(error)

    async def _reach(self, contact: _Contact) -> None:
        """Raises BrokenPeerError."""
        probe = self._probe(contact.hello.layout)
        session = Session(contact.hello.session)
        await self._engine.connect(session, probe, self._config.connect_timeout_s)
        if contact.made and probe is not None:  # the breaker's probe: contact alone proves nothing about writes
            await self._write(session, probe)

    async def _write(self, session: Session, probe: Probe) -> None:
        """One byte into the peer's scratch buffer. Raises BrokenPeerError."""
        one = np.array([1], np.int64)
        batch = self._engine.submit(session, Blocks(np.array([probe.src]), np.array([probe.dst]), one))
        self._kick()
        try:
            async with asyncio.timeout(self._config.connect_timeout_s):
                await batch.wait()
        except TimeoutError:
            raise BrokenPeerError("the probe did not land in time", session=session) from None
        if not batch.landed:
            raise BrokenPeerError(f"the probe failed: {batch.reason}", session=session)

    def _probe(self, layout: Layout) -> Probe | None:
        """One byte, from our scratch buffer into theirs: never a page."""
        theirs = next(iter(layout.unit_buffers("scratch")), None)
        if self._scratch is None or theirs is None:
            return None
        return Probe(self._scratch.address, theirs.address)
