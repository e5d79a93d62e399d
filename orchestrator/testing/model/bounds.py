"""How large the world is that the model explores: the configurations, and what a violation is."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any


class Violation(Exception):
    """A state, or a step, that must not be. The text says what is broken."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """One configuration. Every number is a limit; within it every interleaving is explored."""

    name: str
    decodes: int
    prefills: int
    generations: int = 2
    pages: int = 2
    sizes: tuple[tuple[int, ...], ...] = ((2,), (1, 2))
    """By generation: how many pages its Offer may name (any free ones)."""
    in_flight: int = 3
    """While so many messages are in flight only deliveries happen; their answers may exceed it."""
    decode_crashes: int = 1
    prefill_crashes: int = 1
    """In all: every crash is followed by a restart, at once."""
    rollovers: int = 1
    """Asked for by an operator, for each decode; those that units in doubt need are not limited."""
    give_ups: int = 0
    """Links that a side gives up although the peer is well (too many bad frames, a full buffer): in all."""
    slow_abort: bool = False
    """An abort called by a thread decides the outcome some time before the loop carries it out."""
    early_abort: bool = False
    """The prefill may abort a room before it has heard of it."""
    fake_rooms: bool = False
    """The scheduler may run a room that asks for no transfer, if no decode has offered it."""
    late_registration: bool = False
    """The scheduler registers a room only once an Offer of it is there; else in any order."""
    no_queue: bool = False
    """Every block is submitted the moment its room is ready; else one after the other, while others complete."""
    patient: bool = False
    """Nobody stops waiting for acknowledgements or running writes: neither of those two deadlines passes."""
    reuse_ports: bool = False
    """A new engine may listen on a port that an earlier one of this decode had and released."""

    def owner_of(self, page: int) -> int:
        """The prefill rank that writes this page of every destination."""
        return page % self.prefills

    def __str__(self) -> str:
        """Every bound in words; what is off is not named."""
        sizes = "; ".join(" or ".join(map(str, sizes)) for sizes in self.sizes[: self.generations])
        words = [
            f"{self.decodes} decode x {self.prefills} prefill",
            f"{self.generations} generations of {sizes} of {self.pages} pages",
            f"{self.in_flight} in flight",
            f"crashes {self.decode_crashes} decode {self.prefill_crashes} prefill",
            f"{self.rollovers} rollovers asked for",
        ]
        words += [f"{self.give_ups} links given up"] if self.give_ups else []
        flags = (field.name for field in fields(self) if getattr(self, field.name) is True)
        return ", ".join([*words, *(flag.replace("_", " ") for flag in flags)])


def _calm(name: str, decodes: int, prefills: int, **changes: Any) -> Bounds:
    """Nothing crashes, and no operator asks for a rollover; units in doubt do all the same."""
    return replace(Bounds(name, decodes, prefills, decode_crashes=0, prefill_crashes=0, rollovers=0), **changes)


def _narrow(name: str, decodes: int, prefills: int, **changes: Any) -> Bounds:
    """Everything at once, in fewer orders: else it would not fit into a minute."""
    few = Bounds(name, decodes, prefills, in_flight=1, late_registration=True, no_queue=True, patient=True)
    return replace(few, **changes)


ONE_PAGE = ((1,), (1,))
TINY = _calm("tiny", 1, 1, generations=1)
SMALL = Bounds("small", 1, 1, generations=1)

QUICK = [TINY, SMALL]
"""Seconds; what every mutation meets first."""

FULL = [
    *QUICK,
    _calm("aborts", 1, 1, slow_abort=True, early_abort=True, fake_rooms=True),
    _calm("ports", 1, 1, generations=1, rollovers=2, give_ups=1, reuse_ports=True),
    Bounds("ports, crash", 1, 1, generations=1, rollovers=2, decode_crashes=0, reuse_ports=True),
    _calm("1d2p generations", 1, 2),
    Bounds("1d2p faults", 1, 2, generations=1),
    _narrow("1d2p all", 1, 2, rollovers=0),
    _calm("2d1p pages", 2, 1, generations=1),
    _calm("2d1p rollover", 2, 1, generations=1, sizes=ONE_PAGE, rollovers=1),
    Bounds("2d1p faults", 2, 1, generations=1, sizes=ONE_PAGE, rollovers=0),
    _calm("2d1p generations", 2, 1, sizes=ONE_PAGE, in_flight=1),
    _narrow("2d1p all, prefill", 2, 1, sizes=ONE_PAGE, decode_crashes=0, rollovers=0),
    _narrow("2d1p all, decode", 2, 1, sizes=ONE_PAGE, prefill_crashes=0, rollovers=0),
]
"""Within a minute on two cores."""

DEEP = [
    Bounds("1d1p all", 1, 1),
    Bounds("1d1p aborts", 1, 1, decode_crashes=0, slow_abort=True, early_abort=True, in_flight=1),
    Bounds("ports, both", 1, 1, generations=1, rollovers=2, decode_crashes=0, give_ups=1, reuse_ports=True),
    _calm("1d2p rollover", 1, 2, rollovers=1),
    _narrow("1d2p all", 1, 2),
    Bounds("2d1p faults", 2, 1, generations=1, sizes=ONE_PAGE),
    _calm("2d1p generations", 2, 1, sizes=ONE_PAGE),
    _narrow("2d1p all", 2, 1, sizes=ONE_PAGE, rollovers=0),
]
"""Minutes, and gigabytes."""
