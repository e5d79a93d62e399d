"""One-page rooms behind ten rooms of 100,000 pages: how much later they are than alone.

Once the big rooms' pages are contiguous, so that the engine gets the largest blocks there are, and once scattered, so
that it gets millions of small ones. Big rooms that end are verified and followed by new ones; the rest are aborted.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from orchestrator import RoomStatus
from protocols.blocks import Ints
from scripts.benchmarks.figures import Figure, compared
from scripts.benchmarks.forward import Compute, run_forward
from scripts.benchmarks.pools import Request, Shape
from scripts.benchmarks.rig import Rig, next_generation

BIG_ROOMS = 10
MOST_STORMS = 60
SMALL_PAGES = 8
"""Pages that one-page rooms take in turn."""


@dataclass(frozen=True, slots=True)
class Size:
    """Pages of a big room, bytes of a page in one buffer, one-page rooms that are measured."""

    pages: int
    item_len: int
    rooms: int


def run(quick: bool) -> list[Figure]:
    return measure(Size(10_000, 4096, 60) if quick else Size(100_000, 1024, 400))


def measure(size: Size) -> list[Figure]:
    shape = Shape("mla", layers=2, item_len=size.item_len)
    figures = []
    with Rig(shape, BIG_ROOMS * size.pages + SMALL_PAGES, source_pages=size.pages + SMALL_PAGES) as rig:
        for scattered in (False, True):
            storm = Storm(rig, size, scattered)
            alone = [_one_page(rig, size, number) for number in range(size.rooms + 5)][5:]
            behind = storm.measure()
            storm.end()
            name = "scattered" if scattered else "contiguous"
            figures.append(
                compared(
                    "fairness",
                    f"one page behind {BIG_ROOMS} × {size.pages:,} {name} pages",
                    "end of forward to commit, p99",
                    "ms",
                    [float(np.percentile(behind, 99))],
                    "alone",
                    [float(np.percentile(alone, 99))],
                    at_most=3.0,
                )
            )
            figures.append(
                compared(
                    "fairness",
                    f"one page behind {BIG_ROOMS} × {size.pages:,} {name} pages",
                    "end of forward to commit, median",
                    "ms",
                    behind,
                    "alone",
                    alone,
                )
            )
    return figures


class Storm:
    """Big rooms under way, always ten of them. All are read from the same source pages."""

    def __init__(self, rig: Rig, size: Size, scattered: bool) -> None:
        self._rig = rig
        self._size = size
        self._scattered = scattered
        self._rooms: list[tuple[Request, int]] = []

    def measure(self) -> list[float]:
        """Milliseconds of one-page rooms while all big rooms are under way."""
        found: list[float] = []
        number = 0
        for _ in range(MOST_STORMS):
            if len(found) == self._size.rooms:
                return found
            self._start()
            while len(found) < self._size.rooms:
                milliseconds = _one_page(self._rig, self._size, number)
                if not all(self._under_way(*room) for room in self._rooms):
                    break
                found.append(milliseconds)
                number += 1
        raise RuntimeError("the big rooms are over too soon: they must be larger")

    def _start(self) -> None:
        self.end()
        self._rig.refresh()
        gen = next_generation()
        page_size = self._rig.shape.page_size
        for number in range(BIG_ROOMS):
            request = Request(number, *self._pages(number), (self._size.pages,))
            self._rig.decodes[0].call("expect", [self._rig.side.address], self._rig.awaited([request], gen))
            self._rooms.append((request, gen))
        specs = [request.spec(0, gen, page_size) for request, _ in self._rooms]
        with self._rig.side.prefill.begin_forward(specs) as forward:
            run_forward(self._rig.shape.layers, Compute(), forward.layer_end)
        while not all(self._under_way(*room) for room in self._rooms):
            time.sleep(0.001)

    def _pages(self, number: int) -> tuple[Ints, Ints]:
        count = self._size.pages
        if self._scattered:
            return self._rig.rng.permutation(count), number * count + self._rig.rng.permutation(count)
        return np.arange(count), number * count + np.arange(count)

    def _under_way(self, request: Request, gen: int) -> bool:
        return self._rig.side.prefill.poll(request.number, gen) is RoomStatus.TRANSFERRING

    def end(self) -> None:
        """Rooms that are complete are verified, the others aborted."""
        rooms, self._rooms = self._rooms, []
        complete = []
        for request, gen in rooms:
            if self._rig.side.prefill.poll(request.number, gen) is RoomStatus.SUCCESS:
                complete.append(request)
            else:
                self._rig.decodes[0].call("abort", [(request.number, gen)])
        self._rig.verify(complete)
        deadline = time.monotonic() + 30.0
        while self._rig.side.still_open() + self._rig.decodes[0].call("still_open"):
            if time.monotonic() > deadline:
                raise TimeoutError("aborted rooms did not become quiet")
            time.sleep(0.01)


def _one_page(rig: Rig, size: Size, number: int) -> float:
    """Milliseconds from the end of a one-page room's forward to its commit, verified."""
    nth = number % SMALL_PAGES
    request = Request((1 << 30) + number, np.array([size.pages + nth]), np.array([BIG_ROOMS * size.pages + nth]), (1,))
    milliseconds = rig.kvferry([request], Compute()).seconds * 1e3
    rig.verify([request])
    rig.refresh_pages(request.source)
    return milliseconds
