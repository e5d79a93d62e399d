"""What happened to a room, in stamps: the one source of logs, metrics, results and the trace (`orchestrator.perfetto`).

All times are the injected clock's monotonic seconds; a stamp that never happened is None and so is every duration
that needs it (D2). Spans of one process can be laid beside those of another on the same machine.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from protocols.errors import TransferError
from protocols.ids import RoomKey

MAX_SPANS = 65536


@dataclass(slots=True)
class Span:
    """One hand-over: some layers of one chunk to one destination."""

    chunk: int
    """The chunk's start token."""
    layers: tuple[int, ...]
    kind: str
    """``group`` (fired layers), ``fallback`` (unfired layers), ``whole`` (layer-wise off or degraded), ``aux``."""
    bytes: int
    blocks: int
    fired: float | None = None
    """The last of its layers fired, on the forward thread."""
    ready: float | None = None
    """Its event had completed, as the loop saw it."""
    queued: float | None = None
    posted: float | None = None
    landed: float | None = None
    """All of it landed; None for one of which a block failed."""
    failed: bool = False
    """A block of it failed, or was refused."""

    @property
    def waited(self) -> float | None:
        """From ready to landed."""
        return difference(self.ready, self.landed)


@dataclass(frozen=True, slots=True)
class TransferResult:
    """What `result` returns once a room has ended. Bytes are those that landed, summed over destinations (D1)."""

    key: RoomKey
    ok: bool
    error: TransferError | None
    bytes: int | None
    """None for a room that asked for no transfer."""
    blocks: int | None
    chunks: int
    layers_fired: int
    """Layers of the last concluded state whose hook fired, summed over chunks."""
    layers_fallback: int
    """Layer ids that went after their forward, summed over chunks."""
    timing: dict[str, float]
    """Seconds by name; a name whose stamps are missing is absent."""
    spans: tuple[Span, ...] = field(default=(), repr=False)
    """The timeline: empty again once many rooms have ended since (`registry.KEPT_SPANS` in all are kept)."""
    stamps: dict[str, float] = field(default_factory=dict, repr=False)
    """Monotonic seconds by name: known, ready, forward_end, done, committed, ended."""

    @property
    def bytes_per_s(self) -> float | None:
        """Bytes over the union of the intervals in which blocks were in flight: never above the line rate, also where
        only the first of very many spans were kept. None without spans."""
        landed = [span for span in self.spans if span.landed is not None]
        busy = union_length((span.posted, span.landed) for span in landed)
        return sum(span.bytes for span in landed) / busy if busy else None


def difference(start: float | None, end: float | None) -> float | None:
    """Seconds from start to end; None if a stamp is missing or they contradict each other (D2)."""
    return end - start if start is not None and end is not None and end >= start else None


def union_length(intervals: Iterable[tuple[float | None, float | None]]) -> float:
    """Seconds covered by at least one interval; intervals with a missing end do not count."""
    total, reach = 0.0, float("-inf")
    for start, end in sorted((a, b) for a, b in intervals if a is not None and b is not None and b > a):
        if end > reach:
            total += end - max(start, reach)
            reach = end
    return total
