"""Cut a failing workload down: fewer rooms, faults and kinds of trouble, as long as the same violation comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TypeVar

from orchestrator.testing.simflight import EngineFaults
from orchestrator.testing.simnet import NetFaults
from orchestrator.testing.simplan import PassPlan, RoomPlan, Workload
from orchestrator.testing.simulation import Result, simulate

T = TypeVar("T")


class Shrinker:
    """``runs`` bounds how many candidates are tried. Deterministic, as runs are."""

    def __init__(
        self, failing: Result, plant: Callable[[], AbstractContextManager[object]] = nullcontext, runs: int = 150
    ) -> None:
        self.best = failing
        self.tried = 0
        self._name = failing.violations[0].name
        self._plant = plant
        self._runs = runs

    def run(self) -> Result:
        """The smallest workload found that fails in the same way."""
        before = None
        while before is not self.best and self.tried < self._runs:
            before = self.best
            self._fewer(lambda w: w.rooms, lambda w, kept: replace(w, rooms=tuple(kept)))
            self._fewer(lambda w: w.faults, lambda w, kept: replace(w, faults=tuple(kept)))
            for simpler in self._simpler():
                self._try(simpler)
        return self.best

    def _try(self, workload: Workload) -> bool:
        if self.tried >= self._runs or workload == self.best.workload:
            return False
        self.tried += 1
        result = simulate(workload, self._plant)
        if self._name not in result.names:
            return False
        self.best = result
        return True

    def _fewer(self, get: Callable[[Workload], Sequence[T]], put: Callable[[Workload, list[T]], Workload]) -> None:
        """Leave out all, halves, quarters, … single entries."""
        size = len(get(self.best.workload))
        while size and self.tried < self._runs:
            at = 0
            while at < len(get(self.best.workload)):
                entries = list(get(self.best.workload))
                kept = entries[:at] + entries[at + size :]
                if not self._try(put(self.best.workload, kept)):
                    at += size
            size //= 2

    def _simpler(self) -> Iterator[Workload]:
        """The same with one kind of trouble less."""
        yield replace(self.best.workload, net=NetFaults())
        engine = self.best.workload.engine
        yield replace(self.best.workload, engine=EngineFaults(latency_s=engine.latency_s, late_s=engine.late_s))
        for field in ("stuck", "ack_lost", "refuse", "refuse_rest", "in_pieces", "fail"):
            calmer = replace(self.best.workload.engine)
            setattr(calmer, field, 0.0)
            yield replace(self.best.workload, engine=calmer)
        yield replace(self.best.workload, order="domains")
        for number in range(len(self.best.workload.rooms)):
            for plain in (_without_aborts, _without_odd_passes, _without_waits):
                rooms = list(self.best.workload.rooms)
                if number < len(rooms):
                    rooms[number] = plain(rooms[number])
                    yield replace(self.best.workload, rooms=tuple(rooms))


def _without_aborts(room: RoomPlan) -> RoomPlan:
    return replace(room, aborts=())


def _without_odd_passes(room: RoomPlan) -> RoomPlan:
    return replace(room, passes=tuple(PassPlan(layer_s=plan.layer_s) for plan in room.passes))


def _without_waits(room: RoomPlan) -> RoomPlan:
    return replace(room, delays=tuple(None if delay is None else 0.0 for delay in room.delays))
