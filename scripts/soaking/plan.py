"""Which rooms there are, and what is to happen to each, from a seed."""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass
from typing import Literal

Side = Literal["prefill", "decode"]


@dataclass(frozen=True, slots=True)
class Planned:
    """One room generation."""

    number: int
    room: int
    gen: int
    decode: int
    """Which decode worker."""
    tokens: int
    chunks: tuple[tuple[int, int], ...]
    abort: Side | None
    abort_at: tuple[int, int] | None
    """The prefill ends it in the forward of this (chunk, layer)."""
    abort_after: float | None
    """The decode ends it after this part of a usual room's time."""
    late: dict[Side, float]
    """How long each side waits before it begins (seconds): sometimes the offer comes first, sometimes the chunk."""


@dataclass(frozen=True)
class Shape:
    """What the rooms look like."""

    page_size: int = 4
    max_pages: int = 24
    layers: int = 6
    aborts: float = 0.11
    """The part of the rooms that one side is to end; some of these aborts come too late."""


class Plan:
    """`next` as often as rooms are wanted. A room that was aborted is followed at once by its own id, one generation
    higher; every other room has an id of its own."""

    def __init__(self, seed: int, decodes: int, shape: Shape) -> None:
        self._rng = random.Random(seed)
        self._decodes = decodes
        self._shape = shape
        self._count = 0
        self._again: deque[tuple[int, int]] = deque()
        self._fresh = 0

    def again(self, planned: Planned) -> None:
        """Its room id is free for the next generation."""
        self._again.append((planned.room, planned.gen + 1))

    def next(self) -> Planned:
        rng, shape = self._rng, self._shape
        if self._again:
            room, gen = self._again.popleft()
        else:
            self._fresh += 1
            room, gen = self._fresh, 1
        pages = rng.randint(1, shape.max_pages)
        tokens = pages * shape.page_size - rng.randrange(shape.page_size)
        chunks = self._chunks(pages, tokens)
        abort: Side | None = None
        if rng.random() < shape.aborts:
            abort = "prefill" if rng.random() < 0.5 else "decode"
        late: dict[Side, float] = {"prefill": 0.0, "decode": 0.0}
        if rng.random() < 0.2:
            late["prefill" if rng.random() < 0.5 else "decode"] = rng.random() * 0.05
        self._count += 1
        return Planned(
            number=self._count,
            room=room,
            gen=gen,
            decode=self._count % self._decodes,
            tokens=tokens,
            chunks=chunks,
            abort=abort,
            abort_at=(rng.randrange(len(chunks)), rng.randrange(shape.layers)) if abort == "prefill" else None,
            abort_after=rng.random() if abort == "decode" else None,
            late=late,
        )

    def _chunks(self, pages: int, tokens: int) -> tuple[tuple[int, int], ...]:
        """Cut at page boundaries."""
        size = self._rng.randint(2, 12)
        starts = [first * self._shape.page_size for first in range(0, pages, size)]
        return tuple(zip(starts, [*starts[1:], tokens], strict=True))
