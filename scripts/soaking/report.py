"""The figures of a soak, as text and as JSON."""

from __future__ import annotations

import statistics
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_UP = 0.2
"""The part of the rooms before memory is judged."""
MAX_LISTED = 20


@dataclass(slots=True)
class Report:
    """What happened. ``violations`` decides."""

    seed: int
    rooms: int = 0
    engine: str = ""
    kinds: Counter[str] = field(default_factory=Counter)
    aborts: Counter[str] = field(default_factory=Counter)
    """By the side that ended the room; ``too late`` where it had ended before."""
    kills: int = 0
    corrupt_pages: int = 0
    stray_writes: int = 0
    stuck_rooms: int = 0
    verified_pages: int = 0
    bytes: int = 0
    seconds: float = 0.0
    room_seconds: list[float] = field(default_factory=list)
    """Of each room that was committed: from its units to its outcome on the decode."""
    prefill_ended_after_kill: list[float] = field(default_factory=list)
    """Seconds until the last room of a killed decode had ended on the prefill, by kill."""
    served_after_kill: list[float] = field(default_factory=list)
    """Seconds until the restarted decode had its first room committed, by kill."""
    quarantine: list[dict[str, Any]] = field(default_factory=list)
    """What was in quarantine at the end, and why; emptied by a rollover."""
    left: dict[str, list[str]] = field(default_factory=dict)
    """What is left in each worker's tables."""
    memory: list[tuple[int, int]] = field(default_factory=list)
    """(rooms ended, resident bytes of the prefill)."""
    tables: dict[str, Any] = field(default_factory=dict)
    violations: list[str] = field(default_factory=list)

    @property
    def slope(self) -> float | None:
        """Bytes a room by which the prefill's memory grows after the warm-up."""
        points = [point for point in self.memory if point[0] >= WARM_UP * self.rooms]
        if len(points) < 3:
            return None
        return statistics.linear_regression([x for x, _ in points], [y for _, y in points]).slope

    def percentiles(self) -> dict[str, float]:
        """How long committed rooms took (seconds)."""
        ordered = sorted(self.room_seconds)
        if not ordered:
            return {}
        return {"p50": ordered[len(ordered) // 2], "p99": ordered[len(ordered) * 99 // 100], "longest": ordered[-1]}

    def to_json(self) -> dict[str, Any]:
        values = asdict(self)
        values["kinds"], values["aborts"] = dict(self.kinds), dict(self.aborts)
        values["room_seconds"] = self.percentiles()
        values["rss_slope_bytes_per_room"] = self.slope
        values["rooms_per_s"] = self.rooms / self.seconds if self.seconds else None
        return values

    def text(self) -> str:
        mib = 1 << 20
        slope = self.slope
        lines = [
            f"{self.rooms} rooms in {self.seconds:.0f} s ({self.rooms / max(self.seconds, 1e-9):.0f}/s), "
            f"{self.bytes / mib:.0f} MiB committed, {self.engine}, seed {self.seed}",
            "  " + ", ".join(f"{count} {kind}" for kind, count in sorted(self.kinds.items())),
            "  a committed room: "
            + ", ".join(f"{name} {1000 * seconds:.0f} ms" for name, seconds in self.percentiles().items()),
            f"  aborts: {', '.join(f'{count} {who}' for who, count in sorted(self.aborts.items())) or 'none'}",
            f"  kills: {self.kills}; rooms over on the prefill after at most "
            f"{max(self.prefill_ended_after_kill, default=0.0):.1f} s, the restarted decode served after at most "
            f"{max(self.served_after_kill, default=0.0):.1f} s",
            f"  pages verified byte for byte: {self.verified_pages}, corrupt: {self.corrupt_pages}, "
            f"written while free: {self.stray_writes}",
            f"  stuck rooms: {self.stuck_rooms}",
            f"  left in tables: {self.left or 'nothing'}",
            f"  quarantine at the end: {self.quarantine or 'none'}",
        ]
        if self.memory:
            growth = "too few samples" if slope is None else f"{slope:+.0f} bytes a room after warm-up"
            lines.append(
                f"  prefill memory: {self.memory[0][1] / mib:.1f} MiB at first, {self.memory[-1][1] / mib:.1f} MiB "
                f"at last, {growth}"
            )
        lines += [f"VIOLATION: {text}" for text in self.violations[:MAX_LISTED]]
        if len(self.violations) > MAX_LISTED:
            lines.append(f"and {len(self.violations) - MAX_LISTED} more")
        lines.append("no violation" if not self.violations else f"{len(self.violations)} violations")
        return "\n".join(lines)
