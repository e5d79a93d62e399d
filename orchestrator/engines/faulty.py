"""Any engine, with faults by script: what a test says goes wrong goes wrong, and nothing else.

A script is a list of :class:`Fault`; the first that matches a submission applies to it. The fields of a fault are
independent of each other: one may hold a batch, fail some of its blocks and let those land later. Everything happens
inside ``submit``, ``poll`` and ``land_late``, so a run replays exactly.
"""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable, Container
from dataclasses import dataclass
from functools import partial
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from orchestrator.engines.base import Batch, Engine, Probe
from orchestrator.engines.wrapping import WrappingEngine
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError
from protocols.ids import Session

Match = Callable[[Session, Blocks, int], bool]
"""(session, blocks, ordinal): ordinal counts every ``submit`` from 0, refused ones included."""

EVERY = range(2**31)
"""For ``Fault.fail``: every block."""


def always(session: Session, blocks: Blocks, ordinal: int) -> bool:
    """Match every submission."""
    return True


def nth(*ordinals: int) -> Match:
    """Match the submissions with these ordinals."""
    return lambda session, blocks, ordinal: ordinal in ordinals


def to(*sessions: Session) -> Match:
    """Match submissions to these sessions."""
    return lambda session, blocks, ordinal: session in sessions


@dataclass(eq=False, slots=True)
class Fault:
    """One line of the script."""

    match: Match = always
    refuse: bool = False
    """``submit`` raises BrokenPeerError; nothing is submitted."""
    hold: bool = False
    """The batch is not handed on until ``release``."""
    delay_polls: int = 0
    """It is handed on by the poll after this many others."""
    fail: Container[int] = ()
    """Indices of blocks that are reported FAILED by the next poll without having been written."""
    landing: Literal["never", "snapshot", "late-read"] = "never"
    """What ``land_late`` writes for failed blocks: nothing; the bytes they had when handed on (they sat in socket
    buffers); or whatever the source address holds by then (the engine had not read it yet)."""
    unfinished: bool = False
    """Its blocks land, but the batch is never reported done."""
    rewrite: Callable[[Blocks], Blocks] | None = None
    """Other, fewer or no blocks are handed on, while completion is reported for those asked for: the control
    experiment of every byte oracle. Applied before ``fail``."""

    def release(self) -> None:
        """Stop holding: the next poll hands on what was held."""
        self.hold = False


class Submission(NamedTuple):
    """What the caller asked for, whatever became of it."""

    session: Session
    blocks: Blocks
    ordinal: int


class _Late(NamedTuple):
    """Blocks that may land after they were reported FAILED; ``held`` keeps a snapshot alive."""

    session: Session
    blocks: Blocks
    held: npt.NDArray[np.uint8] | None


@dataclass(eq=False, slots=True)
class _Flight:
    batch: Batch
    fault: Fault
    polls_left: int
    failing: list[int]
    open_parts: int = 0

    @property
    def due(self) -> bool:
        return not self.fault.hold and self.polls_left <= 0


NO_FAULT = Fault()


class FaultyEngine(WrappingEngine):
    """See the module. Loop thread only."""

    def __init__(self, inner: Engine, *faults: Fault) -> None:
        super().__init__(inner)
        self.faults = list(faults)
        self.silent: set[Session] = set()
        """Peers that never answer: ``connect`` to one fails at its timeout."""
        self.log: list[Submission] = []
        """Every accepted submission, in order."""
        self.submitted_blocks = 0
        self.submitted_bytes = 0
        self.attempts = 0
        """Calls of ``submit``; the next one's ordinal."""
        self._waiting: list[_Flight] = []
        self._verdicts: list[_Flight] = []
        self._late: list[_Late] = []

    def add(self, fault: Fault) -> Fault:
        """Append one line to the script and return it."""
        self.faults.append(fault)
        return fault

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        if session in self.silent:
            await asyncio.sleep(timeout)
            raise BrokenPeerError("the peer did not answer in time", session=session, timeout=timeout)
        await super().connect(session, probe, timeout)

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        ordinal = self.attempts
        self.attempts += 1
        batch = self._admit(session, blocks)
        fault = next((fault for fault in self.faults if fault.match(session, blocks, ordinal)), NO_FAULT)
        if fault.refuse:
            raise BrokenPeerError("refused by the script", session=session, ordinal=ordinal)
        flight = _Flight(batch, fault, fault.delay_polls, [])
        if flight.due:
            self._launch(flight)
        else:
            self._waiting.append(flight)
        self._open[id(batch)] = batch
        self.log.append(Submission(session, blocks, ordinal))
        self.submitted_blocks += len(blocks)
        self.submitted_bytes += blocks.nbytes
        return batch

    def land_late(self) -> int:
        """Write what failed with a ``landing``, poll once, and return the number of blocks.

        Over loopback they have landed on return; over a real engine poll on, though nothing is ``pending``. A block
        whose peer is fenced by then does not land.
        """
        late, self._late = self._late, []
        for entry in late:
            try:
                batch = self.inner.submit(entry.session, entry.blocks)
            except BrokenPeerError:
                continue
            if entry.held is not None:
                batch.add_callbacks(partial(self._drop_snapshot, entry.held))
        self.poll()
        return sum(len(entry.blocks) for entry in late)

    def _drop_snapshot(self, snapshot: npt.NDArray[np.uint8], _: Batch) -> None:
        self.inner.unregister(snapshot.ctypes.data)

    def _advance(self) -> None:
        waiting, self._waiting = self._waiting, []
        for flight in waiting:
            if flight.due:
                self._launch_late(flight)
            else:
                flight.polls_left -= 1
                self._waiting.append(flight)
        verdicts, self._verdicts = self._verdicts, []
        for flight in verdicts:
            for index in flight.failing:
                flight.batch.fail_block(index, "failed by the script")
            self._part_done(flight)

    def _launch_late(self, flight: _Flight) -> None:
        try:
            self._launch(flight)
        except BrokenPeerError as error:
            for index in range(len(flight.batch.blocks)):
                flight.batch.refuse_block(index, str(error))
            self._settle(flight.batch)

    def _launch(self, flight: _Flight) -> None:
        """Hand on what the fault lets pass; the rest gets its verdict at a poll. Raises BrokenPeerError if refused."""
        batch, fault = flight.batch, flight.fault
        blocks = batch.blocks if fault.rewrite is None else fault.rewrite(batch.blocks)
        passing = [index for index in range(len(blocks)) if index not in fault.fail]
        flight.failing = [index for index in range(len(batch.blocks)) if index in fault.fail]
        if passing:
            answering = passing if len(blocks) == len(batch.blocks) else list(range(len(batch.blocks)))
            self._hand_on(batch, take(blocks, passing), answering, partial(self._part_done, flight))
            flight.open_parts += 1
        if flight.failing or not passing:
            self._verdicts.append(flight)
            flight.open_parts += 1
        failing = [index for index in range(len(blocks)) if index in fault.fail]
        if failing and fault.landing != "never":
            self._keep(batch.session, take(blocks, failing), snapshot=fault.landing == "snapshot")

    def _part_done(self, flight: _Flight) -> None:
        flight.open_parts -= 1
        if flight.open_parts == 0 and not flight.fault.unfinished:
            self._settle(flight.batch)

    def _keep(self, session: Session, blocks: Blocks, *, snapshot: bool) -> None:
        if not snapshot:
            self._late.append(_Late(session, blocks, None))
            return
        held = np.empty(blocks.nbytes, np.uint8)
        src = held.ctypes.data + np.cumsum(blocks.length) - blocks.length
        for address, source, nbytes in zip(src.tolist(), blocks.src.tolist(), blocks.length.tolist(), strict=True):
            ctypes.memmove(address, source, nbytes)
        self.inner.register(held.ctypes.data, held.nbytes)
        self._late.append(_Late(session, Blocks(src, blocks.dst, blocks.length), held))


def take(blocks: Blocks, indices: list[int]) -> Blocks:
    """The blocks at ``indices``, in that order."""
    chosen = np.array(indices, np.int64)
    return Blocks(blocks.src[chosen], blocks.dst[chosen], blocks.length[chosen])
