"""What the link model foretold for a room, against what it took: the backtest of admission and of predicted completion.

Rooms of very different size follow each other, with pages that lie scattered or together, so that bytes and blocks do
not grow in step. Each prediction was made before its room sent anything; only those after the first fifty count. Beside
it stands the same formula fitted to these very rooms afterwards: what no prediction of that form does better, because
the machine does not repeat itself more exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from protocols.blocks import Ints
from scripts.benchmarks.figures import Figure, bounded, compared
from scripts.benchmarks.forward import Compute
from scripts.benchmarks.pools import Request, Shape
from scripts.benchmarks.rig import Rig, next_generation

SHAPE = Shape("mha", layers=16, item_len=16 << 10)


@dataclass(frozen=True, slots=True)
class Size:
    """Pages of the largest room, rooms that the model learns from, rooms that are measured."""

    pages: int
    learning: int
    rooms: int
    shape: Shape = SHAPE


def run(quick: bool) -> list[Figure]:
    return measure(Size(64, 50, 60) if quick else Size(256, 50, 400))


def measure(size: Size) -> list[Figure]:
    with Rig(size.shape, 2 * size.pages) as rig:
        rooms = [_once(rig, size, scattered=number % 2 == 0) for number in range(size.learning + size.rooms)]
    rooms = rooms[size.learning :]
    actual = np.array([room.actual for room in rooms])
    ours = (np.array([room.predicted for room in rooms]) - actual) / actual * 100
    facts = np.array([[1.0, room.nbytes, room.blocks] for room in rooms])
    costs = np.linalg.lstsq(facts / actual[:, None], np.ones(len(rooms)), rcond=None)[0]
    best = (facts @ costs - actual) / actual * 100
    metric = "error of the prediction"
    figures = [bounded("link", "all rooms", f"{metric}, median", "%", np.abs(ours).tolist(), at_most=15.0)]
    afterwards = "fitted afterwards"
    figures.append(compared("link", "all rooms", metric, "%", np.abs(ours).tolist(), afterwards, np.abs(best).tolist()))
    for case, chosen in (("scattered pages", True), ("contiguous pages", False)):
        which = np.array([room.scattered is chosen for room in rooms])
        figures.append(
            compared("link", case, metric, "%", np.abs(ours[which]).tolist(), afterwards, np.abs(best[which]).tolist())
        )
    figures.append(bounded("link", "all rooms", "its sign: below zero is too soon", "%", ours.tolist()))
    return figures


@dataclass(frozen=True, slots=True)
class Room:
    """Seconds that it was to take on its link and did take, from its first block posted to its last landed."""

    predicted: float
    actual: float
    nbytes: int
    blocks: int
    scattered: bool


def _once(rig: Rig, size: Size, scattered: bool) -> Room:
    count = int(np.exp(rig.rng.uniform(0, np.log(size.pages))))
    gen = next_generation()
    request = Request(1, *_pages(rig, size, count, scattered), (count,))
    rig.refresh()
    rig.decodes[0].call("expect", [rig.side.address], rig.awaited([request], gen))
    rig.side.forward([request], Compute(), gen)
    rig.committed([request], gen)
    result = rig.side.result(request, gen)
    rig.verify([request])
    posted = [span.posted for span in result.spans if span.posted is not None]
    landed = [span.landed for span in result.spans if span.landed is not None]
    assert result.bytes is not None
    assert result.blocks is not None
    predicted = result.timing.get("predicted", float("nan"))
    return Room(predicted, max(landed) - min(posted), result.bytes, result.blocks, scattered)


def _pages(rig: Rig, size: Size, count: int, scattered: bool) -> tuple[Ints, Ints]:
    if scattered:
        return rig.rng.permutation(2 * size.pages)[:count], rig.rng.permutation(2 * size.pages)[:count]
    first, other = (int(rig.rng.integers(0, size.pages)) for _ in range(2))
    return first + np.arange(count), other + np.arange(count)
