"""``scripts/soak``: thousands of rooms over real processes, with aborts and kills; exit status 1 on any violation."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from scripts.soaking.run import Options, Soak

QUICK = Options(rooms=500, kills=2)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/soak", description=__doc__)
    parser.add_argument("--quick", action="store_true", help=f"{QUICK.rooms} rooms and {QUICK.kills} kills")
    parser.add_argument("--rooms", type=int, help=f"how many rooms (default {Options.rooms})")
    parser.add_argument("--kills", type=int, help=f"how often a decode is killed (default {Options.kills})")
    parser.add_argument("--seed", type=int, default=Options.seed, help="of the plan (timing is the machine's own)")
    parser.add_argument("--in-flight", type=int, default=Options.in_flight, help="rooms at a time")
    parser.add_argument("--completion", choices=["one-block", "batch-status", "auto"], default="auto")
    parser.add_argument("--max-slope", type=float, help="fail if the prefill grows by more bytes a room than this")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    asked = parse(arguments)
    began = time.monotonic()
    base = QUICK if asked.quick else Options()
    options = replace(
        base,
        rooms=base.rooms if asked.rooms is None else asked.rooms,
        kills=base.kills if asked.kills is None else asked.kills,
        seed=asked.seed,
        in_flight=asked.in_flight,
        completion=asked.completion,
        say=lambda text: print(f"[{time.monotonic() - began:6.1f} s] {text}", flush=True),
    )
    report = asyncio.run(Soak(options).run())
    slope = report.slope
    if asked.max_slope is not None and slope is not None and slope > asked.max_slope:
        report.violations.append(f"the prefill grows by {slope:.0f} bytes a room")
    print(report.text())
    if asked.json is not None:
        asked.json.write_text(json.dumps(report.to_json(), indent=1) + "\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
