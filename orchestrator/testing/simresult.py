"""What one simulated run found and counted, and its story in readable lines."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.testing.oracle import Violation
from orchestrator.testing.simnet import describe_frame
from orchestrator.testing.simplan import Workload

COUNTED = (
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
    "steps",
    "virtual_s",
    "real_s",
)
"""What a run counts, by the names of `Result`'s fields."""


@dataclass(slots=True)
class Result:
    """What became of a run. ``rooms`` are generations that a side was told of; each side's outcome counts as ``ok`` or
    ``failed``. ``virtual_s`` and ``real_s`` are seconds."""

    workload: Workload
    violations: list[Violation]
    history: list[tuple[float, str, str, tuple[object, ...]]]
    rooms: int = 0
    ok: int = 0
    failed: int = 0
    aborts: int = 0
    crashes: int = 0
    rollovers: int = 0
    in_doubt: int = 0
    late_landings: int = 0
    fences: int = 0
    landings: int = 0
    steps: int = 0
    virtual_s: float = 0.0
    real_s: float = 0.0

    @property
    def names(self) -> set[str]:
        return {violation.name for violation in self.violations}

    def lines(self) -> list[str]:
        """The whole history, readable."""
        return [render(entry) for entry in self.history]

    def story(self, last: int = 60) -> str:
        """What broke, and the last events before it."""
        if not self.violations:
            return "no violation"
        first = self.violations[0]
        upto = next((n for n, entry in enumerate(self.history) if entry[2] == first.name), len(self.history))
        events = [render(entry) for entry in self.history[max(0, upto - last) : upto + 1]]
        found = [f"at {violation.at:.6f} s: {violation}" for violation in self.violations[:5]]
        return "\n".join([*self.workload.describe(), "last events:", *events, "violations:", *found])


def render(entry: tuple[float, str, str, tuple[object, ...]]) -> str:
    at, actor, verb, details = entry
    words = [describe_frame(detail) if isinstance(detail, bytes) else str(detail) for detail in details]
    return f"{at:11.6f}  {actor} {verb} {' '.join(words)}".rstrip()
