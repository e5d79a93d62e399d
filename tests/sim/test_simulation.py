"""Whole worlds: many seeds without a violation, and that a seed is a run."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from dataclasses import replace

import pytest

from orchestrator.flow import Lane
from orchestrator.testing import simsetting
from orchestrator.testing.shrink import Shrinker
from orchestrator.testing.simplan import FaultPlan, Workload
from orchestrator.testing.simulate import plant_of, run_seed
from orchestrator.testing.simulation import Result, simulate
from orchestrator.testing.workload import make_workload

FIRST = 1000
"""Where the seeds of these tests begin; scripts/simulate begins at 0."""


def check(seeds: range) -> None:
    for seed in seeds:
        result = run_seed(seed)
        assert not result.violations, f"scripts/simulate --seed {seed}\n{result.story()}"


def digest(result: Result) -> str:
    return hashlib.sha256("\n".join(result.lines()).encode()).hexdigest()


@pytest.mark.row("N2")
def test_a_few_seeds() -> None:
    check(range(FIRST, FIRST + 8))


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.row("N2", "C1", "C2", "C3", "C4", "C5", "C6")
@pytest.mark.parametrize("part", range(15))
def test_three_hundred_seeds(part: int) -> None:
    check(range(FIRST + 20 * part, FIRST + 20 * (part + 1)))


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.row("N2", "N11")
@pytest.mark.parametrize("part", range(40))
def test_two_thousand_seeds(part: int) -> None:
    check(range(100_000 + 50 * part, 100_000 + 50 * (part + 1)))


@pytest.mark.row("N2")
def test_one_seed_is_one_run_event_by_event() -> None:
    for seed in (1, 2, 3):
        first, again = run_seed(seed), run_seed(seed)
        assert first.lines() == again.lines()
        assert (first.steps, first.virtual_s, first.landings) == (again.steps, again.virtual_s, again.landings)
    assert digest(run_seed(1)) != digest(run_seed(2))


@pytest.mark.slow
def test_a_run_does_not_depend_on_the_process_it_runs_in() -> None:
    """Neither on hash seeds and addresses, nor on the seeds that ran before."""
    seeds = list(range(40, 52))
    ours = {seed: digest(run_seed(seed)) for seed in reversed(seeds)}
    program = (
        "import hashlib\nfrom orchestrator.testing.simulate import run_seed\n"
        f"for seed in {seeds}:\n"
        "    print(seed, hashlib.sha256('\\n'.join(run_seed(seed).lines()).encode()).hexdigest())\n"
    )
    for hash_seed in ("1", "2"):
        done = subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        theirs = dict(line.split() for line in done.stdout.splitlines())
        assert {str(seed): value for seed, value in ours.items()} == theirs


def test_a_workload_is_its_seed_and_can_be_read() -> None:
    for seed in range(30):
        workload = make_workload(seed)
        assert workload == make_workload(seed)
        assert len(workload.describe()) == 1 + len(workload.rooms) + len(workload.faults)
        assert all(sum(room.chunks) == room.tokens for room in workload.rooms)
        assert all(len(room.delays) == len(room.decodes) + 1 for room in workload.rooms)
    assert len(make_workload(1, rooms=3).rooms) == 3


def counts(results: list[Result]) -> dict[str, float]:
    names = (
        "rooms",
        "ok",
        "failed",
        "aborts",
        "crashes",
        "rollovers",
        "in_doubt",
        "late_landings",
        "fences",
        "landings",
    )
    return {name: sum(getattr(result, name) for result in results) for name in names}


def test_seeds_bring_about_everything_that_is_counted() -> None:
    results = [run_seed(seed) for seed in range(12)]
    assert min(counts(results).values()) > 0, counts(results)
    assert all(result.virtual_s > 0 and result.real_s > 0 for result in results)


def calm(seed: int, **changes: object) -> Workload:
    """Rooms of a seed and nothing that goes wrong."""
    plain = make_workload(0)
    made = make_workload(seed, rooms=6)
    quiet = [
        replace(room, aborts=(), passes=(), fake=False, delays=tuple(0.0 for _ in room.delays)) for room in made.rooms
    ]
    named = [replace(room, room=number + 1, gen=1) for number, room in enumerate(quiet)]
    return replace(
        made,
        rooms=tuple(named),
        faults=(),
        net=type(plain.net)(),
        engine=type(plain.engine)(latency_s=(0.001, 0.01)),
        **changes,  # type: ignore[arg-type]
    )


def test_without_faults_every_room_succeeds() -> None:
    for seed in range(6):
        result = simulate(calm(seed))
        assert not result.violations, result.story()
        assert result.failed == 0
        assert result.ok > 0
        assert (result.in_doubt, result.late_landings, result.crashes) == (0, 0, 0)


def test_hosts_that_never_come_back_leave_the_others_working() -> None:
    for seed in range(4):
        for host in ("P0", "D0"):
            workload = replace(calm(seed), faults=(FaultPlan("crash", 0.5, host, for_good=True),))
            result = simulate(workload)
            assert not result.violations, result.story()
            assert result.crashes == 1


def test_a_failure_tells_its_story_and_shrinks() -> None:
    plant = plant_of("layer-read-before-event")
    failing = next(
        result for result in (run_seed(seed, "layer-read-before-event") for seed in range(20)) if result.names
    )
    story = failing.story(10)
    assert "V2 read before final" in story
    assert f"seed {failing.workload.seed}" in story
    assert "last events:" in story
    small = Shrinker(failing, plant, runs=60).run()
    assert failing.violations[0].name in small.names
    assert len(small.workload.rooms) < len(failing.workload.rooms)
    assert len(small.workload.rooms) <= 3
    assert not small.workload.faults
    assert digest(simulate(small.workload, plant)) == digest(small)


def test_a_callback_that_loops_is_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    def loop_for_ever(_: Lane) -> None:
        while True:
            pass

    monkeypatch.setattr(simsetting, "RUN_CPU_S", 0.5)
    monkeypatch.setattr(Lane, "pump", loop_for_ever)
    result = simulate(calm(1))
    assert result.violations[0].name == "hang: a callback does not return"
    assert "loop_for_ever" in result.violations[0].text
