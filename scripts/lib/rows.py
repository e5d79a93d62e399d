"""Lists the requirement rows with the tests that proved them in the last run of scripts/test.

Fails when a row that is due (tests/rows.toml) has no passing test, when a test names a row that does not exist, or
when the last run did not run a whole lane, so that nothing can be said about the rows it left out.
"""

import argparse
import json
import signal
import sys
import time
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FULL_LANES = ("default", "long")


def why_partial(results: dict[str, Any]) -> str:
    """Why these results do not stand for a whole lane; empty when they do."""
    lane, selection = results["lane"], results["selection"]
    if lane is None:
        return "the last run of pytest was not started by scripts/test"
    if lane not in FULL_LANES:
        return f"the last run was the {lane} lane"
    if selection:
        return f"the last run was of a selection ({selection})"
    if not results["complete"]:
        return "the last run was cut short"
    return ""


def tests_of_row(tests: dict[str, str], outcome: str) -> list[str]:
    """The tests with this outcome, one line each; the parametrised cases of a test share one."""
    counts = Counter(nodeid.partition("[")[0] for nodeid, its in tests.items() if its == outcome)
    return [f"{name} ({count} cases)" if count > 1 else name for name, count in sorted(counts.items())]


def print_table(order: list[str], due: set[str], rows: dict[str, dict[str, str]]) -> None:
    print(f"{'row':<4} {'due':<4} tests")
    for row in order:
        tests = rows.get(row, {})
        if not tests and row not in due:
            continue
        outcomes = Counter(tests.values())
        summary = ", ".join(f"{outcomes[name]} {name}" for name in sorted(outcomes, key=lambda n: (n != "passed", n)))
        print(f"{row:<4} {'due' if row in due else '':<4} {summary or 'none'}")
        for line in tests_of_row(tests, "passed"):
            print(f"{'':<9} {line}")


def main(arguments: list[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="scripts/rows", description=__doc__)
    parser.add_argument("--brief", action="store_true", help="the verdict only, no table")
    parser.add_argument("--allow-partial", action="store_true", help="do not fail because only a part was run")
    options = parser.parse_args(arguments)

    try:
        results = json.loads((root / ".build" / "rows.json").read_text())
    except FileNotFoundError:
        print("rows: no results: run scripts/test first", file=sys.stderr)
        return 1
    declared = tomllib.loads((root / "tests" / "rows.toml").read_text())
    known: list[str] = declared["known"]
    due: list[str] = declared["due"]
    rows: dict[str, dict[str, str]] = results["rows"]
    partial = why_partial(results)

    minutes = max(0, round((time.time() - results["time"]) / 60))
    print(f"rows of the {results['lane'] or 'unnamed'} lane, {minutes} min ago{': ' + partial if partial else ''}")
    if not options.brief:
        print_table(known, set(due), rows)

    problems = []
    if undeclared := [row for row in due if row not in known]:
        problems.append(f"due but not among the known rows: {', '.join(undeclared)}")
    unknown = sorted(rows.keys() - set(known))
    problems.extend(f"unknown row {row}, named by {', '.join(sorted(rows[row]))}" for row in unknown)
    unproven = [row for row in due if "passed" not in rows.get(row, {}).values()]
    print(f"{len(due) - len(unproven)} of {len(due)} due rows have a passing test")
    if not partial and unproven:
        problems.append(f"due rows without a passing test: {', '.join(unproven)}")
    if partial and not options.allow_partial:
        problems.append(f"the due rows cannot be judged: {partial}; run scripts/test")
    sys.stdout.flush()
    for problem in problems:
        print(f"rows: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # "scripts/rows | head" ends quietly
    sys.exit(main())
