"""A storm of aborts: rooms ended by the decode mid-transfer, 500 a second; then one good request.

A quiet ack is late by what the engine still has in its hands: what counts is the longest batch of the same run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from orchestrator import RoomStatus, TransferResult
from orchestrator.engines.base import Batch
from orchestrator.engines.mooncake import MooncakeEngine
from scripts.benchmarks.decode_side import Aborted, Awaited
from scripts.benchmarks.figures import Figure, bounded, compared
from scripts.benchmarks.forward import Compute, run_forward
from scripts.benchmarks.pools import Request, Shape, requests
from scripts.benchmarks.quiet import quiet
from scripts.benchmarks.rig import Rig, next_generation

SHAPE = Shape("mha", layers=8, item_len=16 << 10)
PAGES_EACH = 32
SLOTS = 96
"""Rooms that have pages of their own; the next ones take the pages of rooms that are quiet by then."""
PER_SECOND = 500.0
DELAY_S = 0.006
"""From the offer to the abort: too short for 8 MiB among others, as a rule."""
TOO_LATE = 0.1
"""More rooms than this part, complete before their abort, and the storm is none."""
SETTLE_S = 10.0


@dataclass(frozen=True, slots=True)
class Size:
    rooms: int
    storms: int


class TimedEngine(MooncakeEngine):
    """Keeps how long its batches took."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: list[float] = []

    def submit(self, *arguments: Any, **more: Any) -> Batch:
        start = time.monotonic()
        batch = super().submit(*arguments, **more)
        batch.add_callbacks(lambda _: self.seconds.append(time.monotonic() - start))
        return batch


def run(quick: bool) -> list[Figure]:
    return measure(Size(1000, 1) if quick else Size(1000, 5))


def measure(size: Size) -> list[Figure]:
    with quiet():
        engine = TimedEngine()
    acks: list[float] = []
    longest: list[float] = []
    before: list[float] = []
    after: list[float] = []
    sent: list[float] = []
    left = 0
    with Rig(SHAPE, (SLOTS + 1) * PAGES_EACH, engine=engine) as rig:
        *victims, good = requests(SLOTS + 1, 1, PAGES_EACH, scattered=False, rng=rig.rng)
        for _ in range(size.storms):
            before += [_good(rig, good) for _ in range(7)][2:]
            engine.seconds.clear()
            storm, share = _storm(rig, victims, size.rooms)
            sent.append(share * 100)
            acks.append(float(np.percentile([one.quiet - one.aborted for one in storm], 99)) * 1e3)
            longest.append(max(engine.seconds) * 1e3)
            after.append(_good(rig, good))
            left += _left_over(rig)
    case = f"{size.rooms:,} rooms aborted at {PER_SECOND:.0f}/s"
    return [
        compared("abort", case, "quiet acks, p99", "ms", acks, "longest batch", longest, at_most=2.0),
        compared(
            "abort", f"{case}, then one good request", "offer to commit", "ms", after, "before it", before, at_most=1.5
        ),
        bounded("abort", case, "left in tables", "entries", [float(left)], at_most=0.0, target="none"),
        bounded("abort", case, "of them with bytes under way", "%", sent),
    ]


def _good(rig: Rig, request: Request) -> float:
    """Milliseconds of one request, verified."""
    rig.refresh()
    milliseconds = rig.kvferry([request], Compute()).total * 1e3
    rig.verify([request])
    return milliseconds


def _storm(rig: Rig, victims: Sequence[Request], count: int) -> tuple[list[Aborted], float]:
    """Expect, run the forward of, and abort ``count`` rooms; how each ended, and the share that had sent something."""
    gen = next_generation()
    size = rig.shape.page_size
    rooms = [
        Request((gen << 20) + number, victim.source, victim.target, victim.cuts)
        for number in range(count)
        for victim in (victims[number % len(victims)],)
    ]
    awaited = [Awaited(room.number, gen, room.target, PAGES_EACH * size) for room in rooms]
    start = time.monotonic() + 0.1
    rig.decodes[0].send("abort_each", [rig.side.address], awaited, start, 1 / PER_SECOND, DELAY_S)
    for number, room in enumerate(rooms):
        time.sleep(max(0.0, start + number / PER_SECOND - time.monotonic()))
        with rig.side.prefill.begin_forward([room.spec(0, gen, size)]) as forward:
            run_forward(rig.shape.layers, Compute(), forward.layer_end)
    storm: list[Aborted] = rig.decodes[0].receive(120.0)
    results = [_result(rig, room.number, gen) for room in rooms]
    ended = [one for one, result in zip(storm, results, strict=True) if not result.ok]
    if len(ended) < (1 - TOO_LATE) * count:
        raise RuntimeError(f"{count - len(ended)} rooms were complete before their abort: they must be larger")
    return ended, sum(bool(result.blocks) for result in results) / count


def _result(rig: Rig, room: int, gen: int) -> TransferResult:
    """A room that the decode aborted before it was offered is unknown here, and ended by its own side."""
    prefill = rig.side.prefill
    if prefill.poll(room, gen) is RoomStatus.WAITING:
        time.sleep(0.05)
        prefill.abort(room, gen)
    return prefill.wait(room, gen, 10.0)


def _left_over(rig: Rig) -> int:
    """Entries in the tables of both sides, once what is on its way has arrived."""
    deadline = time.monotonic() + SETTLE_S
    left = 1
    while left and time.monotonic() < deadline:
        time.sleep(0.05)
        left = rig.side.still_open() + rig.decodes[0].call("still_open")
    return left
