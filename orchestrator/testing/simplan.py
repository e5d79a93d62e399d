"""What happens in one simulated run, as data: rooms, aborts, faults. It can be printed, cut down and run again.

A workload says everything that the world decides. Delays of frames and blocks and the order of callbacks are drawn
while it runs, from generators of the same seed, so a workload with its seed is one run. Times are virtual seconds
from the start, or from the room's own start where it says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from orchestrator.testing.simflight import EngineFaults
from orchestrator.testing.simnet import NetFaults
from orchestrator.testing.virtual import Order

PAGE_SIZE = 2
LAYERS = 3
DRAFTS = 1
DECODE_PAGES = 20
PREFILL_PAGES = 40

GroupKind = Literal["single", "cp", "pp", "dummy"]
PassEnd = Literal["end", "discard", "raise", "never"]
FaultKind = Literal[
    "crash",
    "leave",
    "stop",
    "partition",
    "half-open",
    "reset",
    "data-partition",
    "black-hole",
    "rollover",
    "abort-storm",
]


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Prefill ranks that serve a room together: ranks of context or pipeline parallelism, or a second rank that must
    only know of the room. ``prefills`` are host numbers."""

    kind: GroupKind
    prefills: tuple[int, ...]
    zigzag: bool = False


@dataclass(frozen=True, slots=True)
class PassPlan:
    """How the forward ends that a chunk is first in. A discarded or raising one is run again where that is legal."""

    end: PassEnd = "end"
    after: int = 0
    """Layers that fired before it was thrown away, or stopped."""
    missing: tuple[int, ...] = ()
    """Layers whose hook never fires."""
    layer_s: float = 0.02
    formed: int = 1
    """How often the batch was formed; all but the last are dropped without a layer."""


@dataclass(frozen=True, slots=True)
class AbortPlan:
    """One side asks for the end, so long after the room's start."""

    after_s: float
    host: str
    """``D0``, ``P1``, …"""


@dataclass(frozen=True, slots=True)
class RoomPlan:
    """One request. ``delays`` are those of its decodes, then of its prefill, after its start; None: that side never
    hears of the request."""

    number: int
    room: int
    gen: int
    at: float
    group: int
    decodes: tuple[int, ...]
    tokens: int
    chunks: tuple[int, ...]
    """Tokens that each forward computes."""
    prefixes: tuple[int, ...]
    """Pages that each decode has already."""
    delays: tuple[float | None, ...]
    passes: tuple[PassPlan, ...] = ()
    """By chunk."""
    aborts: tuple[AbortPlan, ...] = ()
    state_rows: int = 0
    use_s: float = 0.5
    """How long a decode uses what it got before the units are free."""
    fake: bool = False
    probe: bool = False
    """Comes after the faults: it must succeed."""

    @property
    def key(self) -> tuple[int, int]:
        return self.room, self.gen


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """One thing that goes wrong. ``seconds``: until it is over (restart, continue, heal)."""

    kind: FaultKind
    at: float
    host: str
    other: str = ""
    seconds: float = 0.0
    one_way: bool = False
    mode: Literal["hold", "drop"] = "hold"
    for_good: bool = False
    """A crash after which nobody comes back."""


@dataclass(frozen=True, slots=True)
class Workload:
    """See the module."""

    seed: int
    order: Order
    groups: tuple[GroupPlan, ...]
    decodes: int
    rooms: tuple[RoomPlan, ...]
    faults: tuple[FaultPlan, ...] = ()
    config: dict[str, Any] = field(default_factory=dict)
    net: NetFaults = field(default_factory=NetFaults)
    engine: EngineFaults = field(default_factory=EngineFaults)
    reuse_ports: bool = True
    """A restarted process, or a rolled-over one whose old ports were let go, may get a port that it had."""
    no_engine: float = 0.0
    """How likely another engine cannot be made for a rollover."""
    named: bool = True
    """Workers have stable names, so that a restarted one is recognised as its predecessor's successor."""

    @property
    def prefills(self) -> int:
        return max(number for group in self.groups for number in group.prefills) + 1

    def keep(self, rooms: Sequence[RoomPlan], faults: Sequence[FaultPlan]) -> Workload:
        """The same with fewer rooms and faults."""
        return replace(self, rooms=tuple(rooms), faults=tuple(faults))

    def describe(self) -> list[str]:
        """The plan as lines, in the order of time."""
        groups = ", ".join(f"{group.kind} {'+'.join(f'P{n}' for n in group.prefills)}" for group in self.groups)
        head = f"seed {self.seed}: prefills {groups}; decodes {self.decodes}; order {self.order}; {self.config}"
        lines = [(room.at, _describe_room(room)) for room in self.rooms]
        lines += [(fault.at, _describe_fault(fault)) for fault in self.faults]
        return [head, *(f"{at:8.3f}  {text}" for at, text in sorted(lines))]


def _describe_room(room: RoomPlan) -> str:
    text = f"room {room.room}.{room.gen}: {room.tokens} tokens in {list(room.chunks)}, group {room.group}"
    text += f" to {', '.join(f'D{n}' for n in room.decodes)}, prefix pages {list(room.prefixes)}, delays "
    text += "/".join("never" if delay is None else f"{delay:.3f}" for delay in room.delays)
    odd = [p for p in room.passes if p != PassPlan(layer_s=p.layer_s)]
    text += "".join(f"; {p.end} after {p.after}, missing {list(p.missing)}, formed {p.formed}" for p in odd)
    text += "".join(f"; {a.host} aborts after {a.after_s:.3f}" for a in room.aborts)
    return text + ("; fake" if room.fake else "")


def _describe_fault(fault: FaultPlan) -> str:
    text = f"{fault.kind} {fault.host}{'–' + fault.other if fault.other else ''}"
    text += " for good" if fault.for_good else f" for {fault.seconds:.3f} s" if fault.seconds else ""
    return text + (f" ({'one way, ' if fault.one_way else ''}{fault.mode})" if fault.kind == "partition" else "")
