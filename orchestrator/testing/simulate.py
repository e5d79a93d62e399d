# ruff: noqa: T201 - it talks to a person through the terminal
"""The command behind ``scripts/simulate``: run many seeds, or replay one.

::

    scripts/simulate --seeds 2000 --json sim.json     exits 1 on a violation, 0 else
    scripts/simulate --seed 17 --trace                one seed, every event
    scripts/simulate --minutes 30 --first 100000      as many as fit
"""

from __future__ import annotations

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from orchestrator.testing.planted import PLANTS, planted
from orchestrator.testing.shrink import Shrinker
from orchestrator.testing.simulation import COUNTED, Result, simulate
from orchestrator.testing.workload import make_workload

BATCH = 10
"""Seeds that a worker runs before it reports."""
SHOWN = 60
"""Last events that a failure prints."""
Plant = Callable[[], AbstractContextManager[object]]


def run_seed(seed: int, plant: str = "") -> Result:
    """One seed, with a planted bug or none."""
    return simulate(make_workload(seed), plant_of(plant))


def plant_of(name: str) -> Plant:
    return functools.partial(planted, name) if name else nullcontext


def run_batch(seeds: list[int], plant: str) -> tuple[dict[str, float], list[tuple[int, str, str]]]:
    """Sums over these seeds, and (seed, violation, text) for the first violation of each that has one."""
    sums: Counter[str] = Counter()
    found: list[tuple[int, str, str]] = []
    for seed in seeds:
        result = run_seed(seed, plant)
        sums.update({name: getattr(result, name) for name in COUNTED})
        sums["seeds"] += 1
        sums["violations"] += len(result.violations)
        if result.violations:
            found.append((seed, result.violations[0].name, result.violations[0].text))
    return dict(sums), found


def batches(seeds: Iterable[int]) -> Iterator[list[int]]:
    batch: list[int] = []
    for seed in seeds:
        batch.append(seed)
        if len(batch) == BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def run_many(
    first: int, count: int | None, minutes: float | None, workers: int, plant: str
) -> tuple[dict[str, float], list[tuple[int, str, str]]]:
    """Seeds from ``first`` on, ``count`` of them or for so many minutes, until one violates something.

    Order of the results, and so of the sums, is that of the seeds, whatever the workers do.
    """
    begin = time.monotonic()
    sums: Counter[str] = Counter()
    found: list[tuple[int, str, str]] = []
    seeds = range(first, first + (count if count is not None else 10**9))
    waiting = batches(seeds)
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context) as pool:
        running = [pool.submit(run_batch, batch, plant) for _, batch in zip(range(2 * workers), waiting, strict=False)]
        while running:
            part, bad = running.pop(0).result()
            sums.update(part)
            found += bad
            _progress(sums, found, begin)
            late = minutes is not None and time.monotonic() - begin > minutes * 60
            batch = None if found or late else next(waiting, None)
            if batch is not None:
                running.append(pool.submit(run_batch, batch, plant))
    sums["wall_s"] = time.monotonic() - begin  # type: ignore[assignment]
    return dict(sums), found


def _progress(sums: Counter[str], found: list[tuple[int, str, str]], begin: float) -> None:
    if sys.stdout.isatty():
        line = f"{sums['seeds']:.0f} seeds, {sums['rooms']:.0f} rooms, {len(found)} with a violation"
        print(f"\r{line}, {time.monotonic() - begin:.0f} s ", end="", flush=True)


def report_failure(seed: int, plant: str, shrink_runs: int) -> None:
    """What a person needs: how to replay it, the events before it, and the smallest workload that does it too."""
    again = f"scripts/simulate --seed {seed}" + (f" --plant {plant}" if plant else "")
    result = run_seed(seed, plant)
    if not result.violations:
        print(f"seed {seed} failed in a worker, and does not here: the run is not deterministic. Replay: {again}")
        return
    print(f"\nseed {seed} violates: {result.violations[0].name}\nreplay: {again}\n")
    print(result.story(SHOWN))
    if shrink_runs:
        shrinker = Shrinker(result, plant_of(plant), shrink_runs)
        small = shrinker.run()
        print(
            f"\nshrunk in {shrinker.tried} runs from {len(result.workload.rooms)} rooms and "
            f"{len(result.workload.faults)} faults to {len(small.workload.rooms)} and {len(small.workload.faults)}:\n"
        )
        print(small.story(SHOWN))
    print(f"\nreplay: {again}")


def summary(sums: dict[str, float]) -> str:
    order = ["seeds", *COUNTED, "violations", "wall_s"]
    return ", ".join(f"{name} {sums.get(name, 0):.0f}" for name in order)


def replay(seed: int, arguments: argparse.Namespace) -> int:
    result = run_seed(seed, arguments.plant)
    if arguments.trace:
        print("\n".join([*result.workload.describe(), *result.lines()]))
    sums = {name: getattr(result, name) for name in COUNTED}
    sums |= {"seeds": 1, "violations": len(result.violations)}
    _write_json(arguments.json, sums, [(seed, v.name, v.text) for v in result.violations])
    print(summary(sums))
    if result.violations:
        report_failure(seed, arguments.plant, arguments.shrink)
        return 1
    return 0


def _write_json(path: Path | None, sums: dict[str, Any], found: list[tuple[int, str, str]]) -> None:
    if path is not None:
        rounded = {name: round(value, 3) if isinstance(value, float) else value for name, value in sums.items()}
        listed = [{"seed": seed, "violation": name, "text": text} for seed, name, text in found]
        path.write_text(json.dumps({**rounded, "found": listed}, indent=1) + "\n")


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="scripts/simulate", description=(__doc__ or "").partition("\n")[0])
    made.add_argument("--seeds", type=int, help="how many seeds (default 300)")
    made.add_argument("--seed", type=int, help="replay this one")
    made.add_argument("--first", type=int, default=0, help="the first seed of many (default 0)")
    made.add_argument("--minutes", type=float, help="as many seeds as fit instead of a number")
    made.add_argument("--workers", type=int, default=2, help="processes (default 2)")
    made.add_argument("--json", type=Path, help="write the sums to this file")
    made.add_argument("--plant", choices=sorted(PLANTS), default="", help="run with this planted bug")
    made.add_argument("--trace", action="store_true", help="with --seed: print every event")
    made.add_argument("--shrink", type=int, default=150, help="runs spent on a smaller workload (default 150, 0 none)")
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 without a violation, 1 with one."""
    arguments = parser().parse_args(argv)
    if arguments.seed is not None:
        return replay(arguments.seed, arguments)
    count = arguments.seeds if arguments.seeds is not None or arguments.minutes is not None else 300
    sums, found = run_many(arguments.first, count, arguments.minutes, max(1, arguments.workers), arguments.plant)
    _write_json(arguments.json, sums, found)
    print(("\r" if sys.stdout.isatty() else "") + summary(sums))
    for seed, name, text in found[:20]:
        print(f"  seed {seed}: {name}: {text[:200]}")
    if found:
        report_failure(found[0][0], arguments.plant, arguments.shrink)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
