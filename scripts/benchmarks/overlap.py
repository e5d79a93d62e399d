"""Exposed time: how long after the forward the decode has to wait until every byte is there.

The forward sleeps without the GIL, layer by layer, and is as long as the transfer alone over the given share. Each
side ends with the decode's own knowledge: kvferry's commit, a baseline's notice. Of several requests the last counts.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from protocols.blocks import Blocks
from scripts.benchmarks.baselines import limit
from scripts.benchmarks.baselines.sending import Context, Sender
from scripts.benchmarks.figures import Figure, compared
from scripts.benchmarks.forward import Compute
from scripts.benchmarks.pools import MHA_64, MLA_79, Request, Shape, pages_needed, requests
from scripts.benchmarks.rig import Exposed, Rig

SHARES = (0.1, 0.3, 0.6, 1.2)
"""The transfer alone over the forward."""
SHORT_FORWARD_S = 0.010
"""A prompt of one page still runs through every layer."""
GROUP = 8
WARM_UP = 4
"""Requests after which group sizes have followed from one share to the next."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is sent and how often; pages of all requests together."""

    scattered: int
    contiguous: int
    runs: int
    shares: tuple[float, ...] = SHARES
    batches: tuple[tuple[int, int], ...] = ((1, 1), (10, 2))
    """(requests, chunks each)"""
    shapes: tuple[Shape, ...] = (MHA_64, MLA_79)


FULL = Size(scattered=80, contiguous=320, runs=7)
QUICK = Size(scattered=20, contiguous=80, runs=3)


@dataclass(slots=True)
class Times:
    """Seconds, one entry a round."""

    kvferry: list[float] = field(default_factory=list)
    monolithic: list[float] = field(default_factory=list)
    pools: dict[int, list[float]] = field(default_factory=lambda: {GROUP: [], 1: []})
    tail: list[float] = field(default_factory=list)
    trip: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    forward: list[float] = field(default_factory=list)

    def limits(self) -> list[float]:
        whole, forward = statistics.median(self.whole), statistics.median(self.forward)
        return [limit.limit(tail, trip, whole, forward) for tail, trip in zip(self.tail, self.trip, strict=True)]

    def best_pool(self) -> tuple[int, list[float]]:
        return min(self.pools.items(), key=lambda item: statistics.median(item[1]))


def run(quick: bool) -> list[Figure]:
    return measure(QUICK if quick else FULL)


def measure(size: Size) -> list[Figure]:
    figures: list[Figure] = []
    for shape in size.shapes:
        name = f"{shape.kind.upper()} {shape.buffers} buffers"
        pages = max(pages_needed(1, size.scattered, scattered=True), size.contiguous)
        with Rig(shape, pages) as rig:
            for scattered, (count, chunks) in itertools.product((False, True), size.batches):
                each = (size.scattered if scattered else size.contiguous) // count
                asked = requests(count, chunks, each, scattered=scattered, rng=rig.rng)
                case = f"{name}, {'scattered' if scattered else 'contiguous'}, {count} × {chunks}"
                for share, times in _by_share(rig, asked, size):
                    figures += _figures(f"{case}, {share:.0%}", share, times)
            asked = requests(1, 1, 1, scattered=False, rng=rig.rng)
            times = _rounds(rig, asked, Compute(SHORT_FORWARD_S / shape.layers), 3 * size.runs)
            figures += _figures(f"{name}, prompt of 64 tokens", None, times)
    return figures


def _by_share(rig: Rig, asked: Sequence[Request], size: Size) -> list[tuple[float, Times]]:
    alone = statistics.median(_whole(rig, asked) for _ in range(4))
    chunks = len(asked[0].cuts)
    return [
        (share, _rounds(rig, asked, Compute(alone / share / chunks / rig.shape.layers), size.runs))
        for share in size.shares
    ]


def _rounds(rig: Rig, asked: Sequence[Request], compute: Compute, runs: int) -> Times:
    """Every side once a round, in turn."""
    times = Times()
    for _ in range(WARM_UP):
        _verified(rig, asked, None, [], compute)
    passes = {group: rig.passes(asked, group) for group in times.pools}
    senders: dict[int, Sender] = {group: rig.threadpool(group) for group in times.pools}
    monolithic = rig.monolithic()
    try:
        for _ in range(runs):
            ours = _verified(rig, asked, None, [], compute)
            times.kvferry.append(ours.seconds)
            times.forward.append(ours.forward.seconds)
            times.monolithic.append(_verified(rig, asked, monolithic, passes[GROUP], compute).seconds)
            for group, sender in senders.items():
                times.pools[group].append(_verified(rig, asked, sender, passes[group], compute).seconds)
            times.tail.append(_tail(rig, asked))
            times.trip.append(limit.round_trip(rig.notifiers[0]))
            times.whole.append(_whole(rig, asked))
    finally:
        for sender in (monolithic, *senders.values()):
            sender.close()
    return times


def _verified(
    rig: Rig, asked: Sequence[Request], sender: Sender | None, passes: list[list[Context]], compute: Compute
) -> Exposed:
    rig.refresh()
    done = rig.kvferry(asked, compute) if sender is None else rig.baseline(sender, rig.renamed(passes), compute)
    rig.verify(asked, sent_by=type(sender or rig.side).__name__)
    return done


def _tail(rig: Rig, asked: Sequence[Request]) -> float:
    """The last layer's and the unfired layers' blocks of the last forward, alone."""
    layers = range(rig.shape.layers - 1, rig.shape.layers + rig.shape.drafts)
    parts = [rig.blocks(request, layers, slice(([0, *request.cuts])[-2], None)) for request in asked]
    return limit.send_alone(rig.raw, rig.where[0].session, Blocks.join(parts))


def _whole(rig: Rig, asked: Sequence[Request]) -> float:
    parts = [rig.blocks(request, rig.all_layers) for request in asked]
    session = rig.where[0].session
    blocks = Blocks.join(parts)
    start = time.perf_counter()
    rig.raw.send([(session, blocks)])
    return time.perf_counter() - start


def _figures(case: str, share: float | None, times: Times) -> list[Figure]:
    """``share`` None: a short prompt, which must only never lose."""
    ours = _milliseconds(times.kvferry)
    group, pool = times.best_pool()
    monolithic = 0.03 if share == 0.3 else 1.02
    return [
        compared("overlap", case, "exposed, limit", "ms", ours, "limit", _milliseconds(times.limits()), at_most=2.0),
        compared(
            "overlap",
            case,
            "exposed, monolithic",
            "ms",
            ours,
            "monolithic",
            _milliseconds(times.monolithic),
            at_most=monolithic,
        ),
        compared(
            "overlap",
            case,
            "exposed, threadpool",
            "ms",
            ours,
            f"threadpool (group {group})",
            _milliseconds(pool),
            below=1.0,
        ),
    ]


def _milliseconds(seconds: Sequence[float]) -> list[float]:
    return [second * 1e3 for second in seconds]
