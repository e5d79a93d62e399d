"""``scripts/bench NAME|all [--quick] [--json FILE]``.

Each bench runs in a process of its own: engines and threads that one leaves behind do not stand beside the next.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.benchmarks import figures, settings

BENCHES = (
    "hook",
    "overlap",
    "throughput",
    "cpu",
    "gil",
    "scale",
    "fairness",
    "abort",
    "handshake",
    "memory",
    "plan",
    "link",
)
"""What ``all`` runs, in this order: modules `scripts.benchmarks.NAME` with ``run(quick) -> list[Figure]``. A new one
needs its name here and nothing else."""
OPTIONAL = ("peers",)
"""Needs what not everybody has; never part of ``all``."""
BENCH_SECONDS = 3600.0


def main() -> int:
    """0 when everything ran and every byte was verified, whether or not a target was met."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Figures, as ratios from one run.")
    parser.add_argument("name", choices=(*BENCHES, *OPTIONAL, "all"))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions and smaller transfers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures with all raw numbers")
    chosen = parser.parse_args()
    found, worked = run_all(chosen.quick) if chosen.name == "all" else (run_one(chosen.name, chosen.quick), True)
    figures.show(found)
    if chosen.json is not None:
        figures.write(chosen.json, found, settings.used())
    return 0 if worked else 1


def run_one(name: str, quick: bool) -> list[figures.Figure]:
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    return list(importlib.import_module(f"scripts.benchmarks.{name}").run(quick))


def run_all(quick: bool) -> tuple[list[figures.Figure], bool]:
    """Every figure, and whether every bench ended well."""
    found: list[figures.Figure] = []
    worked = True
    with tempfile.TemporaryDirectory() as folder:
        for name in BENCHES:
            print(f"bench {name} … ", end="", file=sys.stderr, flush=True)
            start = time.monotonic()
            file = Path(folder) / f"{name}.json"
            command = [sys.executable, "-m", "scripts.benchmarks", name, "--json", str(file)]
            child = subprocess.run(
                command + ["--quick"] * quick,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                timeout=BENCH_SECONDS,
                check=False,
            )
            good = child.returncode == 0 and file.exists()
            worked = worked and good
            print(f"{time.monotonic() - start:.0f} s" if good else f"FAILED ({child.returncode})", file=sys.stderr)
            if good:
                found += figures.read(file)
            else:
                print(child.stderr.decode(errors="replace"), file=sys.stderr)
    return found, worked


if __name__ == "__main__":
    sys.exit(main())
