"""Breadth-first exploration of one configuration, and the way from the start to what is wrong."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from orchestrator.testing.model.canonical import Canonical
from orchestrator.testing.model.properties import Properties
from orchestrator.testing.model.system import Move, State, System


@dataclass(slots=True)
class Result:
    """What one exploration found."""

    name: str
    states: int = 0
    transitions: int = 0
    depth: int = 0
    ends: int = 0
    most_in_flight: int = 0
    seconds: float = 0.0
    violation: str = ""
    trace: list[tuple[Move, State]] = field(default_factory=list)
    """From the start to the violation: each step, and the state it led to."""


class Explorer:
    """See the module."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.properties = Properties(system)
        self.canonical = Canonical(system)
        self.states: list[State] = []
        self._numbers: dict[State, int] = {}
        self._parents = array("i")
        self._sources = array("i")
        self._targets = array("i")

    def run(self, progress: Callable[[int, int], None] | None = None) -> Result:
        """Explore everything within the bounds, then ask whether an end can be reached from everywhere."""
        system, properties = self.system, self.properties
        result = Result(system.bounds.name)
        began = time.process_time()
        canonical = self.canonical.of
        self._add(canonical(system.start()), -1)
        at, level_end = 0, 1
        while at < len(self.states):
            if at == level_end:
                result.depth += 1
                level_end = len(self.states)
                if progress is not None:
                    progress(at, level_end)
            state = self.states[at]
            wrong = properties.broken(state)
            if wrong:
                result.violation, result.trace = wrong, self._path(at)
                break
            for move, after in system.steps(state):
                if isinstance(after, str):
                    result.violation, result.trace = after, [*self._path(at), (move, ())]
                    break
                after = canonical(after)
                number = self._numbers.get(after)
                if number is None:
                    number = self._add(after, at)
                self._sources.append(at)
                self._targets.append(number)
            if result.violation:
                break
            at += 1
        result.states, result.transitions = len(self.states), len(self._targets)
        if not result.violation:
            result.violation = properties.unentered()
        if not result.violation:
            self._check_ends(result)
        result.seconds = time.process_time() - began
        return result

    def _add(self, state: State, parent: int) -> int:
        number = self._numbers[state] = len(self.states)
        self.states.append(state)
        self._parents.append(parent)
        return number

    # -- can it end ----------------------------------------------------------------------------------------------

    def _check_ends(self, result: Result) -> None:
        system, properties = self.system, self.properties
        last = system.bounds.generations
        ends = np.array([system.is_idle(state) for state in self.states], np.bool_)
        result.ends = int(ends.sum())
        result.most_in_flight = max(system.in_flight(state) for state in self.states)
        stuck = np.flatnonzero(~self._reaching(ends))
        if len(stuck):
            result.violation = "no end can be reached from here any more"
            result.trace = self._path(int(stuck[0]))
            return
        won = np.array([properties.has_succeeded(state, last) for state in self.states], np.bool_)
        lost = ends & ~self._reaching(won)
        for number in np.flatnonzero(lost):
            if properties.is_untouched(self.states[number], last):
                result.violation = f"all is over here, and gen {last} cannot succeed any more"
                result.trace = self._path(int(number))
                return

    def _reaching(self, goal: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """From which states the goal can be reached."""
        sources = np.frombuffer(self._sources, np.int32)
        targets = np.frombuffer(self._targets, np.int32)
        reaching = goal.copy()
        while True:
            fresh = sources[reaching[targets] & ~reaching[sources]]
            if not len(fresh):
                return reaching
            reaching[fresh] = True

    # -- how it came about ---------------------------------------------------------------------------------------

    def _path(self, number: int) -> list[tuple[Move, State]]:
        numbers = []
        while number >= 0:
            numbers.append(number)
            number = self._parents[number]
        numbers.reverse()
        now = self.system.start()
        steps: list[tuple[Move, State]] = []
        for after in numbers[1:]:  # the states on the way may be mirror images: here the ranks keep their names
            wanted = self.states[after]
            move, now = next(
                (move, to)
                for move, to in self.system.steps(now)
                if not isinstance(to, str) and self.canonical.of(to) == wanted
            )
            steps.append((move, now))
        return steps
