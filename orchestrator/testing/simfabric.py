"""The data network of a simulated world: where blocks are between two engines; see `orchestrator.testing.simengine`."""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import itertools
import random
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from orchestrator.testing.simflight import EngineFaults, Fate, Flight, Observer, SimBatch
from orchestrator.testing.virtual import Domain
from protocols.errors import BusyError
from protocols.ids import Session

if TYPE_CHECKING:
    from orchestrator.testing.simengine import SimEngine

PIECE = 8
"""A block that lands in two parts is cut at a multiple of this (bytes)."""


class SimFabric:
    """The data network of one simulated world. ``faults`` may be replaced at any time."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop | None = None, seed: int = 0, faults: EngineFaults | None = None
    ) -> None:
        """``loop``: None for whichever runs."""
        self._loop = loop
        self.rng = random.Random(seed)
        self.faults = faults or EngineFaults()
        self.observer: Observer | None = None
        self.live: dict[int, Flight] = {}
        """Blocks that may still be read or land, by number."""
        self.in_doubt = 0
        """Blocks reported FAILED so far."""
        self.late_landings = 0
        """Blocks that landed after they were reported FAILED, or after their writer died."""
        self.fences = 0
        """Engines that ended while they could be written to."""
        self.black_holes: set[str] = set()
        """Hosts whose engine takes connections and never answers."""
        self.engines: list[SimEngine] = []
        self.context = contextvars.Context()
        self._sessions: dict[Session, SimEngine] = {}
        self._ports = itertools.count(15000)
        self._numbers = itertools.count(1)
        self._blocked: set[tuple[str, str]] = set()
        self._stalled: list[Callable[[], None]] = []
        self._held: set[int] = set()
        self._unanswered: list[Flight] = []
        """Blocks that landed and whose writer hears nothing of it as long as the target lives."""

    def add(self, engine: SimEngine) -> None:
        """A new engine. Raises BusyError for a port that is in use or held."""
        if engine.session in self._sessions or not self._held.isdisjoint(engine.ports):
            raise BusyError("the port is taken", session=engine.session)
        self._sessions[engine.session] = engine
        self.engines.append(engine)

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        return self._loop or asyncio.get_running_loop()

    def next_port(self) -> int:
        """One that no engine had yet."""
        return next(self._ports)

    def free_ports(self, host: str, ports: Iterable[int]) -> list[int]:
        """Those of ``ports`` that an engine of this host could take now."""
        return [p for p in ports if p not in self._held and Session(f"{host}:{p}") not in self._sessions]

    def hold_ports(self, ports: Iterable[int]) -> None:
        """Plain sockets take these ports: no engine gets them, whoever connects is turned away."""
        self._held.update(ports)

    def release_ports(self, ports: Iterable[int]) -> None:
        self._held.difference_update(ports)

    def find(self, session: Session) -> SimEngine | None:
        """The living engine of that session."""
        return self._sessions.get(session)

    def remove(self, engine: SimEngine) -> None:
        """No write finds this engine any more: the fence."""
        if self._sessions.get(engine.session) is engine:
            del self._sessions[engine.session]
            self.fences += 1
        for flight in list(self.live.values()):
            if flight.target is engine:
                flight.data = None
                self._lost(flight, "the connection was reset")
        for flight in [other for other in self._unanswered if other.target is engine]:
            self._unanswered.remove(flight)
            self._lost(flight, "the connection was reset")

    # -- faults --------------------------------------------------------------------------------------------------

    def partition(self, first: str, second: str) -> None:
        """Nothing passes between two hosts until `heal`; what is under way waits."""
        self._blocked |= {(first, second), (second, first)}

    def heal(self, first: str, second: str) -> None:
        self._blocked -= {(first, second), (second, first)}
        stalled, self._stalled = self._stalled, []
        for go_on in stalled:
            self.loop.call_soon(go_on, context=self.context)

    def is_blocked(self, first: str, second: str) -> bool:
        return (first, second) in self._blocked

    def kill(self, domain: Domain) -> None:
        """The process is gone. What it had not read is gone, what it had read may still arrive; it takes no write."""
        for engine in self.engines:
            if engine.domain is not domain or engine.closed:
                continue
            engine.closed = True
            self.remove(engine)
            for flight in [other for other in self.live.values() if other.writer is engine]:
                if flight.data is None or self.rng.random() >= self.faults.survive:
                    flight.cancelled = True
                    self.live.pop(flight.number)
                elif self.rng.random() < 0.5:
                    flight.delay = self.rng.uniform(*self.faults.late_s)  # it sits in a full socket

    # -- questions -----------------------------------------------------------------------------------------------

    def may_land(self, engine: SimEngine, address: int, nbytes: int) -> list[Flight]:
        """Blocks that may still be written to this memory through this engine."""
        if engine.closed:
            return []
        return [
            flight
            for flight in self.live.values()
            if flight.dst < address + nbytes
            and address < flight.dst + flight.length
            and (flight.target is engine or (flight.target is None and flight.session == engine.session))
        ]

    def may_read(self, engine: SimEngine, address: int, nbytes: int) -> list[Flight]:
        """Blocks that this engine may still read from this memory."""
        return [
            flight
            for flight in self.live.values()
            if flight.writer is engine
            and flight.data is None
            and flight.src < address + nbytes
            and address < flight.src + flight.length
        ]

    # -- the way of a block --------------------------------------------------------------------------------------

    def launch(self, batch: SimBatch, src: list[int], dst: list[int], length: list[int]) -> None:
        """Queue the blocks of an accepted batch."""
        faults, rng, now = self.faults, self.rng, self.loop.time()
        engine = batch.engine
        taken = len(src)
        if taken > 1 and rng.random() < faults.refuse_rest:
            taken = rng.randrange(1, taken)
        for index, block in enumerate(zip(src, dst, length, strict=True)):
            flight = Flight(next(self._numbers), batch, index, *block, self._draw_fate())
            if index >= taken:
                self.give_verdict(flight, "NEVER", "refused after others were taken")
                continue
            self.live[flight.number] = flight
            engine.free_at = max(engine.free_at, now) + flight.length / faults.bytes_per_s
            jitter = rng.uniform(*faults.latency_s)
            self.loop.call_at(engine.free_at + jitter, self._leave, flight, context=engine.io_context)
        self.loop.call_at(
            engine.free_at + faults.latency_s[1] + faults.progress_timeout_s,
            self._time_out,
            batch,
            context=engine.io_context,
        )

    def _draw_fate(self) -> Fate:
        faults, dice = self.faults, self.rng.random()
        chances: tuple[tuple[float, Fate], ...] = (
            (faults.fail / 2, "fails"),
            (faults.fail / 2, "fails, then lands"),
            (faults.ack_lost, "lands, then fails"),
            (faults.stuck, "never ends"),
        )
        for probability, fate in chances:
            if dice < probability:
                return fate
            dice -= probability
        return "lands"

    def _leave(self, flight: Flight) -> None:
        """The writer's native thread takes the block from its queue, reads the source and hands it to the network."""
        if flight.cancelled or flight.verdict is not None:
            return
        if flight.fate == "fails" and self.rng.random() < 0.5:
            self._lost(flight, "failed before it left")
            return
        flight.data = ctypes.string_at(flight.src, flight.length)
        if self.observer is not None:
            self.observer.on_read(flight)
        flight.target = self.find(flight.session)
        if flight.target is None:
            self._lost(flight, "nobody listens there")
            return
        delay = self.rng.uniform(*self.faults.latency_s)
        if flight.fate == "fails":
            self.loop.call_later(delay, self._lost, flight, "the transport failed", context=flight.writer.io_context)
            return
        if flight.fate == "fails, then lands":
            self.loop.call_later(
                delay, self.give_verdict, flight, "FAILED", "the transport failed", context=flight.writer.io_context
            )
            delay += self.rng.uniform(*self.faults.late_s)
        elif flight.fate == "never ends":
            delay += self.rng.choice((0.0, 4 * self.faults.late_s[1]))
        cut = flight.length
        if flight.length > PIECE and self.rng.random() < self.faults.in_pieces:
            cut = PIECE * self.rng.randrange(1, -(-flight.length // PIECE))
        self._send(flight, 0, cut, delay)

    def _send(self, flight: Flight, start: int, cut: int, delay: float) -> None:
        assert flight.target is not None
        self.loop.call_later(delay, self._arrive, flight, start, cut, context=flight.target.io_context)

    def _arrive(self, flight: Flight, start: int, cut: int) -> None:
        """The target's native thread takes bytes ``[start, cut)`` of the block off its socket."""
        target, data = flight.target, flight.data
        if flight.number not in self.live or target is None or data is None:
            return
        if self.is_blocked(flight.writer.host, target.host):
            self._stalled.append(lambda: self._send(flight, start, cut, self.rng.uniform(*self.faults.latency_s)))
            return
        if flight.delay:
            self._send(flight, start, cut, flight.delay)
            flight.delay = 0.0
            return
        if start == 0 and not target.regions.hold(flight.dst, flight.length):
            self._lost(flight, "the destination is not registered at the peer")
            return
        if start == 0 and (flight.verdict == "FAILED" or flight.writer.closed):
            self.late_landings += 1
        if self.observer is not None:
            self.observer.on_landing(flight, start, cut - start)
        ctypes.memmove(flight.dst + start, data[start:cut], cut - start)
        if cut < flight.length:
            self._send(flight, cut, flight.length, self.rng.uniform(*self.faults.latency_s))
            return
        del self.live[flight.number]
        if flight.fate == "never ends":
            self._unanswered.append(flight)
        else:
            lost = flight.fate == "lands, then fails"
            self.loop.call_later(
                self.rng.uniform(*self.faults.latency_s),
                self.give_verdict,
                flight,
                "FAILED" if lost else "COMPLETED",
                "the acknowledgement was lost" if lost else "",
                context=flight.writer.io_context,
            )

    def _lost(self, flight: Flight, reason: str) -> None:
        """It will not land. The writer, if it lives, hears FAILED."""
        flight.cancelled = True
        self.live.pop(flight.number, None)
        self.loop.call_soon(self.give_verdict, flight, "FAILED", reason, context=flight.writer.io_context)

    def _time_out(self, batch: SimBatch) -> None:
        if not batch.done:
            for flight in [other for other in self.live.values() if other.batch is batch]:
                if flight.verdict is None and flight.fate != "never ends":
                    if flight.data is None:
                        self._lost(flight, "no progress before it left")
                    else:
                        self.give_verdict(flight, "FAILED", "no progress")

    def give_verdict(self, flight: Flight, verdict: str, reason: str) -> None:
        """The first one counts: FAILED stays FAILED when the acknowledgement comes after all."""
        if flight.verdict is None and not flight.batch.done:
            flight.verdict = verdict
            self.in_doubt += verdict == "FAILED"
            flight.writer.verdicts.append((flight, reason))
            if self.observer is not None:
                self.observer.on_verdict(flight)
