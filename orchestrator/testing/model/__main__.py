"""The exhaustive model of the lease, abort, room and rollover tables: see docs/model.md.

Exit status 1 when an assertion fails (the shortest way to it is printed, step by step), or when a mutation survives
that nobody has explained.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from orchestrator.testing.model.bounds import DEEP, FULL, QUICK, Bounds
from orchestrator.testing.model.faults import PLANTED
from orchestrator.testing.model.mutations import all_mutations, applied
from orchestrator.testing.model.runner import Report, check_all, explored
from orchestrator.testing.model.survivors import planted, survey, unused_reasons
from orchestrator.testing.model.system import System


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/model", description=(__doc__ or "").partition("\n")[0])
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="the smallest configurations only (seconds)")
    size.add_argument("--deep", action="store_true", help="larger bounds (minutes, gigabytes)")
    parser.add_argument(
        "--trace", action="store_true", help="in a counterexample, tell where all stands after each step"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--mutations", action="store_true", help="change every cell of the tables, and list what survives"
    )
    what.add_argument("--mutation", metavar="NAME", help="explore with one change, named as --mutations names it")
    what.add_argument("--fault", metavar="NAME", help="explore with one planted fault (a part of its name)")
    options = parser.parse_args()
    configurations = QUICK if options.quick else DEEP if options.deep else FULL
    began = time.monotonic()
    if options.mutations:
        good = tell_of_mutations(configurations)
    else:
        for bounds in configurations:
            say(f"{bounds.name:<18} {bounds}")
        if options.mutation is not None:
            reports = with_mutation(options.mutation, configurations, options.trace)
        elif options.fault is not None:
            reports = with_fault(options.fault, configurations, options.trace)
        else:
            reports = check_all(configurations, detailed=options.trace)
        good = tell(reports)
    say(f"{time.monotonic() - began:.1f} s")
    return 0 if good else 1


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def tell(reports: Iterable[Report]) -> bool:
    """Print each report as it comes, and the first counterexample. True when there is none."""
    states = transitions = 0
    for report in reports:
        states, transitions = states + report.states, transitions + report.transitions
        say(str(report))
        if report.violation:
            for line in report.counterexample:
                say(line)
            return False
    say(f"{'in all':<18} {states:>9,} states {transitions:>11,} transitions")
    return True


def with_mutation(name: str, configurations: Sequence[Bounds], detailed: bool) -> Iterator[Report]:
    mutation = {each.name: each for each in all_mutations()}.get(name)
    if mutation is None:
        raise SystemExit(f"no mutation has this name: {name}")
    with applied(mutation):
        for bounds in configurations:
            yield explored(System(bounds), detailed=detailed)


def with_fault(name: str, configurations: Sequence[Bounds], detailed: bool) -> Iterator[Report]:
    found = [fault for fault in PLANTED if name in fault.name]
    if len(found) != 1:
        raise SystemExit("name one of:\n" + "\n".join(f"  {fault.name}" for fault in PLANTED))
    for bounds in configurations:
        yield explored(found[0].system(bounds), detailed=detailed)


def tell_of_mutations(configurations: Sequence[Bounds]) -> bool:
    """Print what is not noticed, with its reason. True when everything has one, and every planted fault is noticed."""
    verdicts = []
    for verdict in survey(configurations):
        verdicts.append(verdict)
        if verdict.is_asked_for and not verdict.noticed_in:
            ran = f"after {', '.join(verdict.explored_in)}" if verdict.explored_in else "it changes no step"
            say(f"{verdict.name}: survives ({ran}): {verdict.reason or 'NOBODY HAS SAID WHY'}")
    survivors = [verdict for verdict in verdicts if not verdict.noticed_in]
    reasons = Counter(verdict.reason for verdict in survivors if not verdict.is_asked_for)
    for reason, count in reasons.items():
        say(f"{count} survive because their cell is never asked for: {reason or 'NOBODY HAS SAID WHY'}")
    say(f"{len(verdicts)} mutations of the tables, {len(verdicts) - len(survivors)} noticed")
    unused = unused_reasons(verdicts)
    for pattern in unused:
        say(f"{pattern}: excused, and nothing survives")
    faults = list(planted(configurations))
    for verdict in faults:
        found = f"{verdict.noticed_in}: {verdict.violation}" if verdict.noticed_in else "NOT NOTICED"
        say(f"planted: {verdict.name}: {found}")
    return all(verdict.reason for verdict in survivors) and not unused and all(fault.noticed_in for fault in faults)


if __name__ == "__main__":
    sys.exit(main())
