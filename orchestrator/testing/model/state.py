"""What the model keeps of each process and of the wire. Immutable: equal means the same state.

Decode and prefill ranks are named by small numbers, and so are incarnations (the first is 0), dials of a link (the
first is 1), engine sessions of a decode rank (the first is 0), generations of the one room id (the first is 1) and
pages of a pool.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from protocols.leases import UnitState
from protocols.machines import DecodeState, PrefillState, RolloverState

Outcome = Literal["ok", "failed"] | None
History = Literal["", "live", "ok", "failed", "lost", "over"]
Pages = tuple[int, ...]


class Message(NamedTuple):
    """A sequenced message. One type for all, so that those of equal content but another kind differ."""

    kind: Literal["offer", "committed", "abort", "rollover", "done", "ack", "rollover_ack"]
    gen: int = 0
    session: int = 0
    pages: Pages = ()
    """Offer: the destination's. Done: those covered. Ack: those unknown."""
    in_doubt: Pages = ()
    last: bool = False
    """Rollover: the second one, which says that the old engine is deleted. ``session`` is the old one then."""

    def __str__(self) -> str:
        match self.kind:
            case "offer":
                return f"Offer(gen {self.gen}, pages {list(self.pages)}, session {self.session})"
            case "done":
                return f"Done(gen {self.gen}, covers {list(self.pages)})"
            case "ack":
                return f"AbortAck(gen {self.gen}, unknown {list(self.pages)}, in doubt {list(self.in_doubt)})"
            case "rollover" if self.last:
                return f"Rollover(session {self.session} is deleted)"
            case "rollover":
                return f"Rollover(session {self.session} from now on)"
            case "rollover_ack":
                return f"RolloverAck(session {self.session})"
        return f"{self.kind.capitalize()}(gen {self.gen})"


# -- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rank:
    """One prefill rank of a decode room: the dial its Offer went through (0: none yet), what its Done covers."""

    dial: int = 0
    covered: Pages | None = None


@dataclass(frozen=True, slots=True)
class DecodeRoom:
    state: DecodeState
    outcome: Outcome
    session: int
    pages: Pages
    ranks: tuple[Rank, ...]
    ack_timer: bool = False


@dataclass(frozen=True, slots=True)
class DecodeLink:
    """A link as the decode sees it. Down, it still dials."""

    dial: int
    up: bool
    peer: int
    """The prefill's incarnation; -1 while it dials."""
    said: tuple[int, ...] = ()
    """While it dials: the sessions that its Hellos named, the first one first."""


@dataclass(frozen=True, slots=True)
class LeaseState:
    """What a `protocols.leases.Lease` holds."""

    gen: int
    session: int
    pages: Pages
    states: tuple[UnitState, ...]
    waiting: frozenset[int]
    unknown: tuple[tuple[int, Pages], ...]
    failed: bool

    def by_page(self) -> list[tuple[int, UnitState]]:
        return list(zip(self.pages, self.states, strict=True))


@dataclass(frozen=True, slots=True)
class RolloverSide:
    state: RolloverState = RolloverState.IDLE
    old: int | None = None
    engine: Literal["", "alive", "deleting", "deleted"] = ""
    """The old one."""
    awaited: frozenset[int] = frozenset()
    """Prefill ranks whose RolloverAck is missing."""
    held: frozenset[int] = frozenset()
    """Sessions whose ports are held."""
    suspect: frozenset[int] = frozenset()
    """Sessions that a peer may still write to which was given up, and is not gone: their ports are never released."""


@dataclass(frozen=True, slots=True)
class DecodeSide:
    incarnation: int
    session: int
    links: tuple[DecodeLink | None, ...]
    dials: tuple[int, ...]
    rooms: tuple[DecodeRoom | None, ...]
    """By generation, the first at index 0."""
    history: tuple[History, ...]
    """What became of each generation here, also across a crash: what an observer saw."""
    leases: tuple[LeaseState, ...]
    rollover: RolloverSide = RolloverSide()
    sessions: int = 1
    """How many there were so far."""
    gone: frozenset[int] = frozenset()
    """Sessions whose engine was deleted and whose ports were released."""
    asked: int = 0
    """Rollovers that an operator asked for, as opposed to those that a quarantine needed."""
    broken: int = 0
    """Links this side gave up although the peer was well."""

    @property
    def is_idle(self) -> bool:
        rolling, dialling = self.rollover, any(link is not None and not link.up for link in self.links)
        busy = any(self.rooms) or self.leases or dialling or rolling.held
        return not busy and rolling.state is RolloverState.IDLE


# -- prefill ---------------------------------------------------------------------------------------------------------

Block = Literal["queued", "inflight", "landed", "failed", "dropped"]


@dataclass(frozen=True, slots=True)
class Destination:
    """A decode rank's Offer at a prefill rank, and the blocks for it: one for each page this rank writes."""

    peer: int
    dial: int
    session: int
    pages: Pages
    committed: bool = False
    blocks: tuple[tuple[int, Block], ...] = ()
    """(page, what became of its block); empty until the room is ready."""

    def pages_in(self, *blocks: Block) -> Pages:
        return tuple(page for page, block in self.blocks if block in blocks)


@dataclass(frozen=True, slots=True)
class PrefillRoom:
    state: PrefillState
    outcome: Outcome
    registered: bool
    stopped: bool
    destinations: tuple[Destination | None, ...]
    """By decode rank."""


@dataclass(frozen=True, slots=True)
class Said:
    """The doubt that an ended room left at one destination."""

    peer: int
    session: int
    in_doubt: Pages


@dataclass(frozen=True, slots=True)
class Tombstone:
    outcome: Outcome
    said: tuple[Said | None, ...]
    """By decode rank; None: everything is quiet there."""


@dataclass(frozen=True, slots=True)
class PrefillLink:
    """A link as the prefill sees it: which incarnation and dial it belongs to, and the session that is current."""

    peer: int
    dial: int
    session: int


@dataclass(frozen=True, slots=True)
class PrefillSide:
    incarnation: int
    links: tuple[PrefillLink | None, ...]
    rooms: tuple[PrefillRoom | Tombstone | None, ...]
    registered: tuple[bool, ...]
    """Generations whose chunks the scheduler has registered, also across a crash: it does so once."""
    owed: frozenset[tuple[int, int, int, int]] = frozenset()
    """RolloverAcks that wait for tasks to end: (decode rank, its incarnation, dial, session)."""
    broken: int = 0

    @property
    def is_idle(self) -> bool:
        return not any(isinstance(room, PrefillRoom) for room in self.rooms) and not self.owed


# -- between them ----------------------------------------------------------------------------------------------------


class Wire(NamedTuple):
    """One link's messages in flight, oldest first."""

    to_prefill: tuple[Message, ...] = ()
    to_decode: tuple[Message, ...] = ()


class Write(NamedTuple):
    """A block that left a prefill rank and has not been seen COMPLETED: it may reach the page of the session's engine
    at any moment, now included."""

    rank: int
    gen: int
    page: int
    session: int
    running: bool
    """A task of a live prefill rank. Otherwise it FAILED, or its writer died: bytes in kernel buffers."""
    reaches: bool = True
    """The engine it was sent to is alive, or another one listens on its port."""


Writes = frozenset[Write]


class Effect(NamedTuple):
    """What a step of one side does to the world around it."""

    kind: Literal["post", "deleted", "listens", "submit", "landed", "failed", "succeeded"]
    """Both: a message for the peer. Decode: an engine of its own was deleted, or another listens. Prefill: a block was
    submitted, was seen COMPLETED or FAILED; a room succeeded."""
    peer: int = 0
    message: Message | None = None
    gen: int = 0
    page: int = 0
    session: int = 0


Event = tuple[Any, ...]
"""What happens to a side: a word, and what it is about."""
