"""``scripts/bench NAME|all [--quick] [--json FILE]``."""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from pathlib import Path

from scripts.benchmarks import figures

BENCHES = ("hook",)


def main() -> int:
    """0 when everything ran, whether or not a target was met."""
    parser = argparse.ArgumentParser(prog="scripts/bench", description="Figures, as ratios from one run.")
    parser.add_argument("name", choices=(*BENCHES, "all"))
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write figures with all raw numbers")
    chosen = parser.parse_args()
    logging.getLogger("kvferry").setLevel(logging.ERROR)
    found: list[figures.Figure] = []
    for name in BENCHES if chosen.name == "all" else (chosen.name,):
        print(f"bench {name} …", file=sys.stderr)
        found += importlib.import_module(f"scripts.benchmarks.{name}").run(chosen.quick)
    figures.show(found)
    if chosen.json is not None:
        figures.write(chosen.json, found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
