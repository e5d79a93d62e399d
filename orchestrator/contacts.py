"""First contact with the engines of decode peers: once a peer, off the loop, with a deadline, shared by its rooms."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from orchestrator.config import Config
from orchestrator.engines.base import Engine, Probe
from protocols.errors import BrokenPeerError, KvferryError
from protocols.ids import Incarnation, Session
from protocols.layout import Layout, Pair
from protocols.messages import Hello

Starter = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]


class _Contact:
    __slots__ = ("attempt", "hello", "made", "pairs")

    def __init__(self, hello: Hello, pairs: Sequence[Pair]) -> None:
        self.hello = hello
        self.pairs = pairs
        self.made = False
        self.attempt: asyncio.Future[KvferryError | None] | None = None


class Contacts:
    """Loop thread only. Starts contacting as soon as a peer says Hello, so that its first room finds it made."""

    def __init__(self, engine: Engine, layout: Layout, config: Config, start: Starter) -> None:
        self._engine = engine
        self._config = config
        self._start = start
        self._scratch = next(iter(layout.unit_buffers("scratch")), None)
        self._peers: dict[Incarnation, _Contact] = {}

    def add(self, peer: Incarnation, hello: Hello, pairs: Sequence[Pair]) -> None:
        self._peers[peer] = contact = _Contact(hello, pairs)
        self._attempt(contact)

    def remove(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)

    def pairs(self, peer: Incarnation) -> Sequence[Pair]:
        """The buffer pairs settled at Hello. Raises BrokenPeerError for a peer that is gone."""
        contact = self._peers.get(peer)
        if contact is None:
            raise BrokenPeerError("the peer is gone", peer=peer.hex()[:8])
        return contact.pairs

    async def contact(self, peer: Incarnation) -> None:
        """Return once blocks can be submitted to the peer. Raises BrokenPeerError; a later room tries again."""
        contact = self._peers.get(peer)
        if contact is None:
            raise BrokenPeerError("the peer is gone", peer=peer.hex()[:8])
        if contact.made:
            return
        error = await asyncio.shield(contact.attempt or self._attempt(contact))
        if error is not None:
            raise error

    def _attempt(self, contact: _Contact) -> asyncio.Future[KvferryError | None]:
        attempt: asyncio.Future[KvferryError | None] = asyncio.get_running_loop().create_future()
        contact.attempt = attempt
        self._start(self._connect(contact, attempt))
        return attempt

    async def _connect(self, contact: _Contact, attempt: asyncio.Future[KvferryError | None]) -> None:
        error: KvferryError | None = BrokenPeerError("first contact was cancelled")
        try:
            probe = self._probe(contact.hello.layout)
            session = Session(contact.hello.session)
            await self._engine.connect(session, probe, self._config.connect_timeout_s)
            contact.made, error = True, None
        except KvferryError as exc:
            error = exc
        except Exception as exc:
            error = BrokenPeerError(f"first contact failed: {type(exc).__name__}: {exc}")
        finally:
            contact.attempt = None
            if not attempt.done():
                attempt.set_result(error)

    def _probe(self, layout: Layout) -> Probe | None:
        """One byte, from our scratch buffer into theirs: never a page."""
        theirs = next(iter(layout.unit_buffers("scratch")), None)
        if self._scratch is None or theirs is None:
            return None
        return Probe(self._scratch.address, theirs.address)
