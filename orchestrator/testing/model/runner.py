"""Runs configurations and mutants in processes of their own, and says in a line what each found."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from orchestrator.testing.model import trace
from orchestrator.testing.model.bounds import Bounds
from orchestrator.testing.model.channel import explore_channel
from orchestrator.testing.model.explore import Explorer, Result
from orchestrator.testing.model.system import System

T = TypeVar("T")
R = TypeVar("R")
PROCESSES = 2


@dataclass(frozen=True, slots=True)
class Report:
    """What one configuration found, ready to be read."""

    name: str
    states: int
    transitions: int
    depth: int
    ends: int
    most_in_flight: int
    seconds: float
    """Of processor time."""
    violation: str
    counterexample: tuple[str, ...] = ()

    def __str__(self) -> str:
        found = f"{self.ends} ends, at most {self.most_in_flight} messages in flight"
        if self.violation:
            found = f"VIOLATION: {self.violation}"
        return (
            f"{self.name:<18} {self.states:>9,} states {self.transitions:>11,} transitions  depth {self.depth:>2}  "
            f"{self.seconds:5.1f} s  {found}"
        )


def report(result: Result, lines: Iterable[str] = ()) -> Report:
    return Report(
        result.name,
        result.states,
        result.transitions,
        result.depth,
        result.ends,
        result.most_in_flight,
        result.seconds,
        result.violation,
        tuple(lines),
    )


def explored(system: System, *, detailed: bool = False) -> Report:
    """Explore one configuration."""
    result = Explorer(system).run()
    return report(result, trace.lines(system, result, detailed=detailed) if result.violation else ())


def check_channel() -> Report:
    result = explore_channel()
    return report(result, (f"channel: {result.violation}",) if result.violation else ())


def check_all(configurations: Sequence[Bounds], *, detailed: bool = False) -> Iterator[Report]:
    """The channel, then each configuration, in the order given; several at a time."""
    jobs: list[tuple[Bounds | None, bool]] = [(None, detailed), *((bounds, detailed) for bounds in configurations)]
    yield from in_processes(_check, jobs)


def _check(job: tuple[Bounds | None, bool]) -> Report:
    bounds, detailed = job
    return check_channel() if bounds is None else explored(System(bounds), detailed=detailed)


def in_processes(function: Callable[[T], R], jobs: Sequence[T]) -> Iterator[R]:
    """The results in order. Nothing is inherited from this process but the code."""
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        yield from pool.imap(function, jobs)
