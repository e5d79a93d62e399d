"""What an engine is: the one contract behind ``mooncake``, ``loopback`` and ``faulty``.

An engine writes blocks of registered local memory into registered memory of a peer, asynchronously. Everything here
runs on the loop thread and never blocks it; what an engine must do that blocks (first contact, being deleted) it does
in a thread of its own.

Two facts about a batch are separate and must never be taken for each other:

* **source free** – every block is terminal: the engine reads none of the source pages any more. That is ``done``.
* **destination quiet** – every block COMPLETED, or was never submitted: no write can land there any more. That is
  ``quiet``: ``done and not in_doubt``.

A block that FAILED, or whose status is a timeout, is *in doubt*: it may still land, seconds later, even after this
process died. Nothing but a fence at the destination (its engine deleted, its process ended) ends that doubt, so an
engine never resubmits a block and its callers must not either.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from protocols.blocks import Blocks
from protocols.ids import Session


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """What travels in Hello and stands in reports."""

    name: str
    version: str
    transport: str
    completion_mode: str
    """``one-block``, ``batch-status`` or ``ticket``: how completion is learnt. Settled once, at start."""


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine takes. Blocks and bytes in flight are per session (windowed submission, docs/engines.md)."""

    max_block_bytes: int = 1 << 20
    """Larger blocks are split before they are submitted (bytes)."""
    max_batch_blocks: int = 64
    """Most blocks in one ``submit``."""
    window_blocks: int = 64
    """Most blocks in flight to one session: what a stopped peer leaves behind drains in a bounded time."""
    max_window_blocks: int = 256
    """Most blocks in flight to one session while the loop is found to come round late (see `orchestrator.flow`)."""
    window_bytes: int = 8 << 20
    """Most bytes in flight to one session; one block may always be in flight, whatever its size."""


@dataclass(frozen=True, slots=True)
class Probe:
    """Where first contact may write one byte: a scratch buffer the peer announced. Never a page."""

    src: int
    dst: int


class Batch:
    """One submission. Its callbacks run on the loop, each at most once, `on_failed` before `on_done`.

    Dropping a batch, or leaving a wait on it, changes nothing: the engine keeps it until it is done.
    """

    __slots__ = ("_on_done", "_on_failed", "blocks", "done", "in_doubt", "never_submitted", "reason", "session")

    def __init__(self, session: Session, blocks: Blocks) -> None:
        self.session = session
        self.blocks = blocks
        self.done = False
        """Every block is terminal: the source is free."""
        self.in_doubt: list[int] = []
        """Indices into ``blocks`` that FAILED or timed out; complete once ``done``."""
        self.never_submitted: list[int] = []
        """Indices into ``blocks`` that the engine refused after it had taken others: they did not land and never
        will. Complete once ``done``."""
        self.reason = ""
        """The first failure, in words."""
        self._on_done: list[Callable[[Batch], None]] = []
        self._on_failed: list[Callable[[Batch], None]] = []

    @property
    def failed(self) -> bool:
        """A block is in doubt or was never submitted: these bytes will not all land."""
        return bool(self.in_doubt or self.never_submitted)

    @property
    def quiet(self) -> bool:
        """Done, and no block in doubt: no write of this batch can land any more."""
        return self.done and not self.in_doubt

    @property
    def landed(self) -> bool:
        """Done, and every block COMPLETED: the destination holds these bytes and is quiet."""
        return self.done and not self.failed

    def add_callbacks(self, on_done: Callable[[Batch], None], on_failed: Callable[[Batch], None] | None = None) -> None:
        """Call ``on_failed`` at the first failed block and ``on_done`` once all are terminal (at once if already so).

        Callbacks may submit, never poll. One that raises goes through ``poll`` to its caller; no completion is lost.
        """
        if on_failed is not None:
            if self.failed:
                on_failed(self)
            else:
                self._on_failed.append(on_failed)
        if self.done:
            on_done(self)
        else:
            self._on_done.append(on_done)

    async def wait(self) -> Batch:
        """Return when every block is terminal. Cancelling the wait leaves the batch running."""
        waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def wake(_: Batch) -> None:
            if not waiter.done():
                waiter.set_result(None)

        self.add_callbacks(wake)
        await waiter
        return self

    # -- for engines ---------------------------------------------------------------------------------------------

    def fail_block(self, index: int, reason: str) -> None:
        """Record that one block is in doubt."""
        self._fail(self.in_doubt, index, reason)

    def refuse_block(self, index: int, reason: str) -> None:
        """Record that one block was never submitted."""
        self._fail(self.never_submitted, index, reason)

    def _fail(self, indices: list[int], index: int, reason: str) -> None:
        first = not self.failed
        indices.append(index)
        if first:
            self.reason = reason
            callbacks, self._on_failed = self._on_failed, []
            for callback in callbacks:
                callback(self)

    def finish(self) -> None:
        """Record that every block is terminal. Once only."""
        assert not self.done, "a batch finishes once"
        self.done = True
        callbacks, self._on_done, self._on_failed = self._on_done, [], []
        for callback in callbacks:
            callback(self)


class Engine(Protocol):
    """The contract. Every method but the coroutines returns at once; all run on the loop thread."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def limits(self) -> EngineLimits: ...

    @property
    def session(self) -> Session:
        """This engine's own name, by which peers reach it. A new engine has a new session."""
        ...

    @property
    def ports(self) -> tuple[int, ...]:
        """TCP ports it listens on, also once it is closed: whoever writes to this session reaches these, so they must
        not become another engine's while a writer may still hold the session. Empty without ports."""
        ...

    @property
    def pending(self) -> int:
        """Batches that are not done. While it is above zero somebody must call ``poll``."""
        ...

    def register(self, address: int, nbytes: int) -> None:
        """Let peers write to, and this engine read from, ``[address, address + nbytes)``. Call before traffic: it
        may take long for large regions. Raises ConfigError if the region overlaps another or is empty."""
        ...

    def unregister(self, address: int) -> None:
        """Take a region back. No fence: a started write runs to its end. Raises ConfigError if it is not registered."""
        ...

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        """First contact, off the loop, in at most ``timeout`` seconds: afterwards ``submit`` to it does no network I/O.

        Idempotent. Raises BrokenPeerError if the peer is not there, does not answer in time or refuses the probe.
        Cancelling it, or its timeout, leaves a helper thread behind that ends by itself and disturbs nobody.
        """
        ...

    async def disconnect(self, session: Session) -> None:
        """The engine of ``session`` is gone, or nothing will be written to it any more: give back what it holds here.

        Does nothing for a session that is not connected. Afterwards ``submit`` to it needs another ``connect``. Call it
        with no batch to that session pending. Cancelling it loses nothing but what is not given back yet.
        """
        ...

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        """Start writing ``blocks`` (at least one, at most ``limits.max_batch_blocks``).

        Raises BrokenPeerError if the engine refuses or ``session`` was not connected: then nothing of it was
        submitted. A refusal after some blocks were taken ends that batch only: those run on, the rest stands in its
        ``never_submitted``. Raises ConfigError for an empty or oversized batch, an empty or oversized block, and a
        source outside the registered regions; ClosedError once the engine is closed.
        """
        ...

    def poll(self) -> int:
        """Learn what completed, run those batches' callbacks, return how many blocks turned terminal. Never blocks."""
        ...

    async def close(self, drain_timeout: float) -> None:
        """Drain own batches for at most ``drain_timeout`` seconds, then delete the engine.

        After it returned no write to ``session`` can land: this is the fence. Batches still unfinished are finished
        with their open blocks in doubt. Idempotent; the GIL is released while the native engine ends.
        """
        ...
