"""One simulated run: a workload is lived through, everything is healed, and then the books must balance.

::

    result = simulate(make_workload(7))
    assert not result.violations, result.story()

Judged during the run by `orchestrator.testing.oracle`; judged here: every room reaches an end within its deadlines
once the faults are over (*never hang*), every decode can be served by every group again, and nothing is left in any
table but quarantine (V8). Determinism: a workload is a run, event by event; `Result.lines` of two runs are equal.
"""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from orchestrator.testing.simdecode import DecodeWorker
from orchestrator.testing.simflight import EngineFaults
from orchestrator.testing.simhost import SCALE, Host, Life, World
from orchestrator.testing.simnet import NetFaults
from orchestrator.testing.simplan import FaultPlan, RoomPlan, Workload
from orchestrator.testing.simprefill import PrefillWorker
from orchestrator.testing.simresult import COUNTED, Result, render
from orchestrator.testing.simsetting import CallbackStuckError, surroundings, watchdog
from orchestrator.testing.virtual import BudgetError, DeadlockError, VirtualLoop
from orchestrator.testing.workload import probe_rooms

__all__ = ["COUNTED", "Result", "Simulation", "simulate"]

SETTLE_S = SCALE["room_timeout_s"] + SCALE["commit_timeout_s"] + 4 * SCALE["drain_timeout_s"] + 4.0
"""Once nothing goes wrong any more, every room must have ended after this (virtual seconds)."""
QUIET_S = 15.0
"""What was to be said has been said and acknowledged after this (virtual seconds)."""
PROBE_PAUSES_S = (1.0, 10.0, 40.0, 0.0)
"""After each round of probes: a circuit breaker leaves a peer alone for half a minute at most (virtual seconds)."""
FIRST_PROBE = 60000


def simulate(workload: Workload, plant: Callable[[], AbstractContextManager[object]] = nullcontext) -> Result:
    """Run a workload to its end. ``plant`` makes a context in which a mutation of the product is in force."""
    begin = time.perf_counter()
    loop = VirtualLoop(workload.seed, order=workload.order, max_virtual_s=3600.0, max_steps=400_000)
    run = Simulation(World(loop, workload))
    errors: list[str] = []
    try:
        with plant(), surroundings(run.world, errors), watchdog():
            try:
                loop.run_until_complete(run.main())
            except DeadlockError as exc:
                run.world.oracle.violate("hang: deadlock", str(exc))
            except BudgetError as exc:
                run.world.oracle.violate("hang: no end", str(exc))
            except CallbackStuckError as exc:
                stack = traceback.format_tb(exc.__traceback__)[-8:]
                run.world.oracle.violate("hang: a callback does not return", "".join(stack))
        for text in [*loop.failures(), *errors]:
            run.world.oracle.violate("unhandled", text)
        return run.result(time.perf_counter() - begin)
    finally:
        loop.close()


class Simulation:
    """The director of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._loop = world.loop
        self._plan = world.workload
        world.loop.reporters.append(lambda: self._each("unfinished"))

    async def main(self) -> None:
        for host in self.world.hosts:
            host.start(self._begin)
        await asyncio.sleep(0.01)
        end = 0.0
        for room in self._plan.rooms:
            self._at(room.at, self._begin_room, room)
            end = max(end, room.at + max(delay or 0.0 for delay in room.delays))
            for abort in room.aborts:
                self._at(room.at + abort.after_s, self._abort, room, abort.host)
        for fault in self._plan.faults:
            self._at(fault.at, self._break, fault)
            end = max(end, fault.at + fault.seconds)
        await asyncio.sleep(end + 0.02)
        await self._heal()
        await self._settle("hang: a room has no outcome", "unfinished", SETTLE_S)
        await self._settle("V8 books do not balance", "left", SETTLE_S)
        await self._empty_quarantine()
        await self._probe()
        await self._settle("V8 books do not balance", "left", SETTLE_S)
        await self._empty_quarantine()
        await self._rest()
        await self._leave()

    def _at(self, when: float, function: Callable[..., object], *args: object) -> None:
        self._loop.call_later(when, function, *args)

    def _begin(self, life: Life) -> None:
        life.worker = PrefillWorker(life) if life.host.group is not None else DecodeWorker(life)

    # -- rooms -------------------------------------------------------------------------------------------------------

    def _begin_room(self, room: RoomPlan) -> None:
        for number, delay in zip(room.decodes, room.delays, strict=False):
            if delay is not None:
                self._at(delay, self._tell, self.world.decodes[number], "expect", room)
        delay = room.delays[-1]
        if delay is not None:
            for number in self._plan.groups[room.group].prefills:
                self._at(delay, self._tell, self.world.prefills[number], "compute", room)

    def _tell(self, host: Host, what: str, *args: object) -> None:
        """Ask the embedder there; a host that is down hears nothing."""
        life = host.life
        if life is not None and host.alive and life.worker is not None and not life.leaving:
            life.call(getattr(life.worker, what), *args)

    def _abort(self, room: RoomPlan, host: str) -> None:
        self._tell(self.world.host(host), "abort", room, "aborted by the plan")

    # -- faults ------------------------------------------------------------------------------------------------------

    def _break(self, fault: FaultPlan) -> None:
        world, host = self.world, self.world.host(fault.host)
        world.record("WORLD", fault.kind, fault.host, fault.other, f"for {fault.seconds:.3f} s")
        match fault.kind:
            case "crash" if host.alive and host.life is not None:
                world.counts["crashes"] += 1
                host.life.kill()
                host.gone = host.gone or fault.for_good
                self._at(fault.seconds, self._restart, host)
            case "leave" if host.alive and host.life is not None:
                host.life.leave()
                self._at(fault.seconds, self._restart, host)
            case "stop" if host.alive and host.life is not None and not host.life.domain.held:
                host.life.stop()
                self._at(fault.seconds, host.life.go_on)
            case "partition":
                ways = [(fault.host, fault.other), (fault.other, fault.host)][: 1 if fault.one_way else 2]
                for way in ways:
                    world.net.partition(*way, fault.mode)
                    self._at(fault.seconds, world.net.heal, *way)
            case "data-partition":
                world.fabric.partition(fault.host, fault.other)
                self._at(fault.seconds, world.fabric.heal, fault.host, fault.other)
            case "half-open":
                world.net.half_open(fault.host, fault.other, fault.seconds)
            case "reset":
                world.net.reset(fault.host, fault.other)
            case "black-hole":
                world.fabric.black_holes.add(fault.host)
                self._at(fault.seconds, world.fabric.black_holes.discard, fault.host)
            case "rollover":
                self._tell(host, "roll_over")
            case "abort-storm":
                self._tell(host, "abort_all")
            case _:
                return  # the host is down

    def _restart(self, host: Host) -> None:
        if host.gone:
            return
        if not host.alive:
            host.start(self._begin)
        elif host.life is not None and host.life.leaving:
            self._at(0.2, self._restart, host)

    async def _heal(self) -> None:
        """Nothing goes wrong from now on."""
        world = self.world
        world.record("WORLD", "is healed")
        world.calm = True
        names = [host.name for host in world.hosts]
        for first in names:
            for second in names:
                world.net.heal(first, second)
                world.fabric.heal(first, second)
        world.fabric.black_holes.clear()
        world.net.faults = NetFaults()
        world.fabric.faults = replace(EngineFaults(), latency_s=(0.001, 0.01), late_s=self._plan.engine.late_s)
        for host in world.hosts:
            if host.life is not None:
                host.life.go_on()
            self._tell(host, "stop_waiting")
            self._restart(host)

    # -- judgement ---------------------------------------------------------------------------------------------------

    def _each(self, question: str) -> list[str]:
        """What every living embedder answers."""
        return [
            line
            for host in self.world.hosts
            if host.alive and host.life is not None and host.life.worker is not None
            for line in getattr(host.life.worker, question)()
        ]

    async def _settle(self, name: str, question: str, limit: float) -> None:
        """Wait until nothing is left to answer; after ``limit`` virtual seconds it is a violation."""
        deadline = self._loop.time() + limit
        while self._each(question):
            if self._loop.time() >= deadline:
                for line in self._each(question):
                    self.world.oracle.violate(name, line)
                return
            await asyncio.sleep(0.5)

    async def _empty_quarantine(self) -> None:
        """What is in quarantine leaves by a rollover, without a restart (N11)."""
        deadline = self._loop.time() + SETTLE_S
        while stuck := [host for host in self.world.decodes if self._quarantine(host)]:
            if self._loop.time() >= deadline:
                for host in stuck:
                    self.world.oracle.violate("N11 quarantine stays", f"{host.name}: {self._quarantine(host)}")
                return
            for host in stuck:
                self._tell(host, "roll_over")
            await asyncio.sleep(1.0)

    def _quarantine(self, host: Host) -> list[str]:
        life = host.life
        if life is None or not host.alive or life.decode is None:
            return []
        return [str(entry) for entry in life.decode.quarantine()]

    async def _probe(self) -> None:
        """Every decode and every group must work again, after a failed room or three at most."""
        probes = probe_rooms(self._plan, FIRST_PROBE)
        missing = [room for room in probes if not any(host.gone for host in self._hosts_of(room))]
        number = FIRST_PROBE + len(probes)
        for pause in PROBE_PAUSES_S:
            for room in missing:
                self._begin_room(room)
            await asyncio.sleep(0.1)
            await self._settle("hang: a probe has no outcome", "unfinished", SETTLE_S)
            missing = [room for room in missing if not self._succeeded(room)]
            if not missing:
                return
            missing = [replace(room, room=number + n) for n, room in enumerate(missing)]
            number += len(missing)
            await asyncio.sleep(pause)
        for room in missing:
            self.world.oracle.violate("dead: no room succeeds any more", f"group {room.group} to D{room.decodes[0]}")

    def _hosts_of(self, room: RoomPlan) -> list[Host]:
        decodes = [self.world.decodes[number] for number in room.decodes]
        return decodes + [self.world.prefills[number] for number in self._plan.groups[room.group].prefills]

    def _succeeded(self, room: RoomPlan) -> bool:
        life = self.world.decodes[room.decodes[0]].life
        return life is not None and any(
            job.plan.key == room.key and job.status == "SUCCESS" for job in life.worker.jobs
        )

    async def _rest(self) -> None:
        """With nothing to do a process sends nothing and waits for nothing, and in time it forgets what was (V8)."""
        world = self.world
        ends = any(plan.kind in ("crash", "leave") for plan in self._plan.faults)
        lost = any(host.gone for host in world.hosts) or (ends and not self._plan.named)
        if self._is_stuck():
            return
        # A peer of which nobody says that it is gone is told again and again, and asked, until it is given up.
        await asyncio.sleep(QUIET_S + (SCALE["tombstone_s"] if lost else 0.0))
        frames = world.net.delivered + world.net.lost
        await asyncio.sleep(SCALE["tombstone_s"] + 1.0)
        if world.net.delivered + world.net.lost != frames:
            world.oracle.violate("V8 idle processes talk", render(world.history[-1]))
        # Of a peer that died unheard and owed nothing, doubt is kept until a fence, or until others take its place.
        for line in self._each("remembered") if not lost else ():
            world.oracle.violate("V8 something is remembered", line)
        for handle in self._loop.timers:
            world.oracle.violate("V8 a timer is left", repr(handle))

    def _is_stuck(self) -> bool:
        return any(engine.pending for engine in self.world.fabric.engines if not engine.closed)

    async def _leave(self) -> None:
        """All processes leave in order; nothing of them may stay behind."""
        for host in self.world.hosts:
            if host.life is not None:
                host.life.leave()
        deadline = self._loop.time() + 30.0
        while any(host.alive for host in self.world.hosts):
            if self._loop.time() >= deadline:
                self.world.oracle.violate("hang: a process does not leave", str(self._loop.waiting()))
                return
            await asyncio.sleep(0.1)

    def result(self, real_s: float) -> Result:
        world = self.world
        counts = world.counts
        return Result(
            self._plan,
            world.oracle.violations,
            world.history,
            rooms=len(world.rooms),
            ok=counts["ok"],
            failed=counts["failed"],
            aborts=counts["aborts"],
            crashes=counts["crashes"],
            rollovers=counts["rollovers"],
            in_doubt=world.fabric.in_doubt,
            late_landings=world.fabric.late_landings,
            fences=world.fabric.fences,
            landings=world.oracle.checked_landings,
            steps=self._loop.steps,
            virtual_s=world.elapsed(),
            real_s=real_s,
        )
