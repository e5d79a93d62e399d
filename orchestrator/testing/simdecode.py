"""The embedder of a simulated decode process: gives units to rooms, uses what arrived, gives free units out at once."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.decode import RoomHandle
from orchestrator.outcome import Outcome, RoomStatus
from orchestrator.registry import Registry
from orchestrator.testing.oracle import Grant, Unit
from orchestrator.testing.simhost import AUX_SLOTS, STATE_ROWS, Life
from orchestrator.testing.simplan import DECODE_PAGES, PAGE_SIZE, RoomPlan
from protocols.errors import BusyError, KvferryError, UnknownRoomError
from protocols.ids import RoomKey

if TYPE_CHECKING:
    from orchestrator.testing.simhost import World


class UnitPool:
    """Free units, the one freed last given out first: what is free is granted again as soon as can be."""

    def __init__(self, pages: int, aux: int, state: int) -> None:
        self._free = {"page": list(range(pages)), "aux": list(range(aux)), "state": list(range(state))}

    def take(self, pages: int, aux: int, state: int) -> list[Unit] | None:
        """None, with nothing taken, when there are not enough."""
        wanted = {"page": pages, "aux": aux, "state": state}
        if any(len(self._free[kind]) < count for kind, count in wanted.items()):
            return None
        return [(kind, self._free[kind].pop()) for kind, count in wanted.items() for _ in range(count)]

    def give_back(self, units: list[Unit]) -> None:
        for kind, index in units:
            self._free[kind].append(index)

    def free(self, kind: str) -> int:
        return len(self._free[kind])


class DecodeRoomJob:
    """One room that this decode expects."""

    def __init__(self, plan: RoomPlan, units: list[Unit], grant: Grant | None) -> None:
        self.plan = plan
        self.units = units
        self.grant = grant
        self.handle: RoomHandle | None = None
        self.units_free = False
        self.since = (0.0, 0.0)
        """When it was expected, and how long the process had stood still by then."""

    @property
    def status(self) -> str:
        return self.handle.poll().name if self.handle is not None else "REFUSED"

    @property
    def ended(self) -> bool:
        return self.handle is None or self.handle.poll().ended


class DecodeWorker:
    """See the module. Every method runs in the process."""

    def __init__(self, life: Life) -> None:
        assert life.decode is not None, "a decode life has begun"
        self.life = life
        self.world: World = life.world
        self.face = life.decode
        self.jobs: list[DecodeRoomJob] = []
        self.pool = UnitPool(DECODE_PAGES, AUX_SLOTS, STATE_ROWS)
        self._waiting: list[RoomPlan] = []

    # -- rooms -------------------------------------------------------------------------------------------------------

    def expect(self, plan: RoomPlan) -> None:
        """Take units and expect the room; wait for units if there are too few."""
        self._waiting.append(plan)
        self._serve()

    def _serve(self) -> None:
        while self._waiting and not self.life.leaving:
            plan = self._waiting[0]
            units: list[Unit] | None = []
            if not plan.fake:
                pages = -(-plan.tokens // PAGE_SIZE) - self._prefix(plan)
                units = self.pool.take(pages, 1, plan.state_rows)
            if units is None:
                return
            self._waiting.pop(0)
            self._expect(plan, units)

    def _prefix(self, plan: RoomPlan) -> int:
        return plan.prefixes[plan.decodes.index(int(self.life.host.name[1:]))]

    def _expect(self, plan: RoomPlan, units: list[Unit]) -> None:
        key = RoomKey(plan.room, plan.gen)
        prefix = self._prefix(plan)
        group = self.world.workload.groups[plan.group]
        addresses = [self.world.prefills[n].address for n in group.prefills]
        real, dummy = (addresses[:1], addresses[1:]) if group.kind == "dummy" else (addresses, [])
        by_kind: dict[str, list[int]] = {"page": [], "aux": [], "state": []}
        for kind, index in units:
            by_kind[kind].append(index)
        positions = [
            ((kind, index), nth + (prefix if kind == "page" else 0))
            for kind, indices in by_kind.items()
            for nth, index in enumerate(indices)
        ]
        grant = None if plan.fake else self.world.oracle.granted(self.life.side, key, positions)
        job = DecodeRoomJob(plan, units, grant)
        self.life.world.record(self.life.name, "expects room", key, [f"{kind}{index}" for kind, index in units])
        try:
            job.handle = self.face.expect(
                plan.room,
                plan.gen,
                [] if plan.fake else real,
                by_kind["page"],
                total_tokens=plan.tokens,
                prefix_tokens=prefix * PAGE_SIZE,
                aux_slot=by_kind["aux"][0] if by_kind["aux"] else None,
                state_rows=by_kind["state"],
                destinations=len(plan.decodes),
                dummy_peers=[] if plan.fake else dummy,
            )
        except BusyError as exc:  # the id is live, or was used and is remembered
            self.world.record(self.life.name, "is refused room", key, exc)
            self._release(job)
            return
        self.world.rooms.add(plan.number)
        job.since = self.world.loop.time(), self.life.held_s
        self.jobs.append(job)
        job.handle._outcome.future().add_done_callback(lambda future: self._ended(job, future.result()))
        job.handle.on_units_free(lambda: self._units_free(job))

    def _ended(self, job: DecodeRoomJob, outcome: Outcome) -> None:
        """The outcome is decided, this instant."""
        ok = outcome.status is RoomStatus.SUCCESS
        self.world.record(self.life.name, "ends room", outcome.key, outcome.status.name, outcome.error or "")
        self.world.counts["ok" if ok else "failed"] += 1
        self.world.oracle.ended(self.life.side, outcome.key, outcome.status.name)
        self.life.check_deadline(outcome.key, *job.since)
        if ok and job.grant is not None:
            self.world.oracle.committed(self.life.side, job.grant)

    def _units_free(self, job: DecodeRoomJob) -> None:
        job.units_free = True
        self.world.record(self.life.name, "hears that units are free of room", job.plan.key)
        assert job.handle is not None
        if job.handle.poll() is RoomStatus.SUCCESS and job.plan.use_s:
            self.world.loop.call_later(job.plan.use_s, self._release, job)  # decoding
        else:
            self._release(job)

    def _release(self, job: DecodeRoomJob) -> None:
        if job.grant is not None:
            self.world.oracle.released(self.life.side, job.grant)
        self.pool.give_back(job.units)
        self._serve()

    # -- what the plan asks --------------------------------------------------------------------------------------

    def abort(self, plan: RoomPlan, reason: str) -> None:
        """Also of rooms it never heard of."""
        self.world.counts["aborts"] += 1
        self.world.record(self.life.name, "aborts room", plan.key)
        self._waiting = [other for other in self._waiting if other is not plan]
        try:
            self.face.abort(plan.room, plan.gen, reason)
        except UnknownRoomError:
            return

    def stop_waiting(self) -> None:
        """Forget the requests that still wait for units."""
        self._waiting.clear()

    def abort_all(self) -> None:
        for job in list(self.jobs):
            if not job.ended:
                self.abort(job.plan, "abort storm")

    def roll_over(self) -> None:
        try:
            self.face.roll_over("the plan says so")
        except KvferryError as exc:
            self.world.record(self.life.name, "cannot roll over", exc)
        else:
            self.world.counts["rollovers"] += 1
            self.world.record(self.life.name, "rolls its engine over")

    # -- at the end --------------------------------------------------------------------------------------------------

    def unfinished(self) -> list[str]:
        """Rooms without an outcome."""
        receiver = self.face._receiver
        return [
            f"{self.life.name}: room {job.plan.key} is {job.status}: {receiver.rooms.live(RoomKey(*job.plan.key))!r}"
            for job in self.jobs
            if not job.ended
        ]

    def remembered(self) -> list[str]:
        """Verdicts and outcomes whose time is over."""
        return remembered(self.life.name, self.face._receiver.rooms)

    def left(self) -> list[str]:
        """What is in the books, quarantine aside (V8)."""
        receiver = self.face._receiver
        quarantined = {entry.key for entry in self.face.quarantine()}
        lines = [repr(room) for room in receiver.rooms if room.key not in quarantined]
        book = receiver.book
        if book.taken() != book.quarantined():
            lines.append(f"{book.taken()} units are taken, {book.quarantined()} of them in quarantine")
        lines += [repr(link) for link in receiver.dialer.links.values() if link.rooms]
        lines += [
            f"units of room {job.plan.key} are not free"
            for job in self.jobs
            if not job.units_free and RoomKey(*job.plan.key) not in quarantined
        ]
        return [f"{self.life.name}: {line}" for line in lines]


def remembered(who: str, rooms: Registry[Any]) -> list[str]:
    """What a registry still knows although every tombstone has expired."""
    rooms.forget_expired()
    lines = [f"{who}: {rooms.remembered} verdicts"] if rooms.remembered else []
    return lines + [f"{who}: the outcome of room {key}" for key in rooms._outcomes]
