"""The coordinator: as a router would, it names rooms to a prefill and its decodes; and it kills one of them."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scripts.soaking.plan import Plan, Planned, Shape
from scripts.soaking.process import Worker, WorkerGone
from scripts.soaking.report import Report
from scripts.soaking.verdict import judge, left_over

STUCK_S = 60.0
"""A room without an end on both sides, or whose pages are not free, after so long is stuck: no deadline is longer."""
SETTLE_S = 20.0
"""What must be empty is empty so long after the last room."""
USUAL = 200
"""Rooms that say what a usual room's time is."""

CONFIG = {
    "room_timeout_s": 30.0,
    "waiting_timeout_s": 30.0,
    "bootstrap_timeout_s": 10.0,  # a decode that is killed before its Offer is nobody whom the prefill could miss
    "silence_s": 5.0,
    "tombstone_s": 20.0,  # verdicts are a part of memory: with the default they would only grow during a soak
}


@dataclass(frozen=True)
class Options:
    rooms: int = 10_000
    kills: int = 10
    seed: int = 1
    decodes: int = 2
    in_flight: int = 24
    pages: int = 1024
    item_len: int = 1024
    layers: int = 6
    completion: str = "auto"
    say: Callable[[str], object] = print


class Seat:
    """One decode worker and its successors; only the first seat's are killed."""

    def __init__(self, number: int, options: Options) -> None:
        self.number = number
        self._options = options
        self._pool = pool_of(options)
        self._there = asyncio.Event()
        self._worker: Worker
        self.killed_at = 0.0
        self.served = True
        self.open: set[int] = set()
        """Rooms of the killed worker that have not ended on the prefill."""

    async def start(self) -> None:
        name = f"decode-{self.number}"
        worker = Worker("decode", pool=self._pool, config=CONFIG | {"name": name}, completion=self._options.completion)
        self._worker = await worker.start()
        self._there.set()

    async def worker(self) -> Worker:
        """The one that is alive, once there is one."""
        await self._there.wait()
        return self._worker

    async def kill(self) -> None:
        self._there.clear()
        self.killed_at, self.served = time.monotonic(), False
        await self._worker.kill()
        await self.start()

    async def close(self) -> None:
        if self._there.is_set():
            await self._worker.kill()


def pool_of(options: Options) -> dict[str, Any]:
    return {
        "pages": options.pages,
        "layers": options.layers,
        "drafts": 1,
        "page_size": Shape.page_size,
        "item_len": options.item_len,
        "aux_slots": 2 * options.in_flight,
    }


class Soak:
    """``await Soak(options).run()``"""

    def __init__(self, options: Options) -> None:
        self.options = options
        self.report = Report(seed=options.seed)
        self._plan = Plan(options.seed, options.decodes, Shape(layers=options.layers))
        self._seats = [Seat(number, options) for number in range(options.decodes)]
        self._prefill = Worker("prefill", pool=pool_of(options), config=CONFIG, completion=options.completion)
        self._permits = asyncio.Semaphore(options.in_flight)
        self._usual: deque[float] = deque([0.05], maxlen=USUAL)
        self._ended = 0
        self._kills: set[asyncio.Task[None]] = set()

    async def run(self) -> Report:
        try:
            await asyncio.gather(self._prefill.start(), *(seat.start() for seat in self._seats))
            self.report.engine = self._prefill.started["engine"]
            began = time.monotonic()
            await self._traffic()
            self.report.seconds = time.monotonic() - began
            await self._settle()
        except WorkerGone as exc:
            self.report.violations.append(f"a worker that nobody killed has ended: {exc}")
        finally:
            for task in self._kills:
                task.cancel()
            await asyncio.gather(*self._kills, return_exceptions=True)
            await asyncio.gather(self._prefill.kill(), *(seat.close() for seat in self._seats))
        return self.report

    async def _traffic(self) -> None:
        options = self.options
        due = [options.rooms * (number + 1) // (options.kills + 1) for number in range(options.kills)]
        async with asyncio.TaskGroup() as rooms:
            for number in range(options.rooms):
                await self._permits.acquire()
                if number in due:
                    task = asyncio.create_task(self._kill(self._seats[0]))
                    self._kills.add(task)
                rooms.create_task(self._one(self._plan.next()))
        await asyncio.gather(*self._kills)

    async def _kill(self, seat: Seat) -> None:
        """In the middle of its rooms, and a successor with its name at once."""
        self.report.kills += 1
        await seat.kill()
        self.options.say(f"decode {seat.number} was killed and is back ({self._ended} rooms so far)")

    async def _one(self, planned: Planned) -> None:
        seat = self._seats[planned.decode]
        try:
            worker = await seat.worker()
            async with asyncio.timeout(STUCK_S):
                await self._both(planned, seat, worker)
        except TimeoutError:
            self.report.stuck_rooms += 1
            self.report.violations.append(f"room {planned.room}.{planned.gen} is stuck: {planned}")
        finally:
            self._permits.release()
            self._count()

    async def _both(self, planned: Planned, seat: Seat, worker: Worker) -> None:
        """Name the room to both sides, wait for both, judge."""
        usual = sorted(self._usual)[len(self._usual) // 2]
        name = {"room": planned.room, "gen": planned.gen}
        on_decode = worker.ask(
            "room",
            **name,
            peers=[self._prefill.started["address"]],
            tokens=planned.tokens,
            abort_after=None if planned.abort_after is None else planned.abort_after * usual,
            late=planned.late["decode"],
        )
        on_prefill = self._prefill.ask(
            "room", **name, chunks=planned.chunks, abort_at=planned.abort_at, late=planned.late["prefill"]
        )
        try:
            decode = await on_decode
        except WorkerGone:
            decode = None
        prefill = await on_prefill
        self._judge(planned, seat, decode, prefill)

    def _judge(self, planned: Planned, seat: Seat, decode: dict[str, Any] | None, prefill: dict[str, Any]) -> None:
        report, name = self.report, f"room {planned.room}.{planned.gen}"
        verdict = judge(planned, decode, prefill)
        report.kinds[verdict.kind] += 1
        if verdict.kind == "violation":
            report.violations.append(f"{name}: {verdict.why}; {planned}")
        if planned.abort is not None:
            hit = bool(prefill["aborted"] if planned.abort == "prefill" else decode and decode["aborted"])
            report.aborts[f"by the {planned.abort}" if hit else "too late"] += 1
        if decode is None:
            report.prefill_ended_after_kill[report.kills - 1 :] = [time.monotonic() - seat.killed_at]
            return
        report.bytes += decode["bytes"]
        if decode["wrong"]:
            report.corrupt_pages += len(decode["wrong"])
            report.violations.append(f"{name}: wrong bytes in {decode['wrong'][:5]}")
        if verdict.kind == "ok":
            self._usual.append(decode["seconds"])
            report.room_seconds.append(decode["seconds"])
            if not seat.served:
                seat.served = True
                report.served_after_kill.append(time.monotonic() - seat.killed_at)
        if verdict.kind == "aborted":
            self._plan.again(planned)

    def _count(self) -> None:
        self._ended += 1
        self.report.rooms = self._ended
        if self._ended % max(1, self.options.rooms // 200) == 0:
            self.report.memory.append((self._ended, self._prefill.rss))
        if self._ended % max(1, self.options.rooms // 10) == 0:
            self.options.say(f"{self._ended} rooms, prefill at {self._prefill.rss >> 20} MiB")

    # -- the end -------------------------------------------------------------------------------------------------

    async def _settle(self) -> None:
        """Every table must be empty; what is in quarantine must leave by a rollover."""
        report = self.report
        decodes = [await seat.worker() for seat in self._seats]
        await self._empty("prefill", self._prefill)
        for number, worker in enumerate(decodes):
            tables = await worker.call("tables")
            if tables["quarantine"]:
                report.quarantine += [entry | {"decode": number} for entry in tables["quarantine"]]
                await worker.call("roll_over")
            await self._empty(f"decode {number}", worker)
            audit = await worker.call("audit")
            report.verified_pages += audit["verified"]
            report.stray_writes += len(audit["strays"])
            report.violations += [f"decode {number}: {text}" for text in audit["strays"]]
            if audit["free"] != audit["pages"]:
                report.violations.append(f"decode {number}: {audit['pages'] - audit['free']} pages never came back")

    async def _empty(self, name: str, worker: Worker) -> None:
        deadline = time.monotonic() + SETTLE_S
        while True:
            tables = await worker.call("tables")
            left = left_over(worker.role, tables)
            if not left or time.monotonic() > deadline:
                break
            await asyncio.sleep(0.1)
        self.report.tables[name] = tables
        if left:
            self.report.left[name] = left
            self.report.violations.append(f"{name}: {left} is left")
