"""GiB/s of scattered 16 KiB pages to one peer and to four, from the first hook to the last commit.

All layers fire at once, so nothing but the transfer takes time. Raw engine calls with an ideal window send the same
blocks in turn, without any control traffic.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from scripts.benchmarks.figures import Figure, compared
from scripts.benchmarks.forward import Compute
from scripts.benchmarks.pools import MHA_64, Request, Shape, pages_needed, requests
from scripts.benchmarks.rig import Rig, next_generation

GIB = 1 << 30


def run(quick: bool) -> list[Figure]:
    pages, runs = (64, 5) if quick else (256, 9)
    return measure(MHA_64, pages, runs, peers=1) + measure(MHA_64, pages // 4, runs, peers=4)


def measure(shape: Shape, pages: int, runs: int, peers: int) -> list[Figure]:
    """``pages`` to each peer."""
    ours: list[float] = []
    raw: list[float] = []
    needed = pages_needed(peers, pages, scattered=True)
    with Rig(shape, needed, decodes=peers) as rig:
        asked = requests(peers, 1, pages, scattered=True, rng=rig.rng)
        gib = peers * pages * shape.buffers * shape.item_len / GIB
        for number in range(runs + 1):
            rates = gib / _kvferry(rig, asked), gib / _raw(rig, asked)
            if number:  # the first warms up: memory, lanes, the link model
                ours.append(rates[0])
                raw.append(rates[1])
    case = f"scattered {shape.item_len >> 10} KiB pages, {peers} peer{'s' if peers > 1 else ''}"
    return [compared("throughput", case, "rate", "GiB/s", ours, "raw", raw, at_least=0.95)]


def _kvferry(rig: Rig, asked: Sequence[Request]) -> float:
    """One request to each peer, in one forward."""
    rig.refresh()
    gen = next_generation()
    for request, decode in zip(asked, rig.decodes, strict=True):
        decode.call("expect", [rig.side.address], rig.awaited([request], gen))
    start = rig.side.forward(asked, Compute(), gen).start
    known = [rig.committed([request], gen, decode=number)[0] for number, request in enumerate(asked)]
    for number, request in enumerate(asked):
        rig.side.result(request, gen)
        rig.verify([request], decode=number)
    return max(known) - start


def _raw(rig: Rig, asked: Sequence[Request]) -> float:
    rig.refresh()
    parts = [
        (where.session, rig.blocks(request, rig.all_layers, decode=number))
        for number, (request, where) in enumerate(zip(asked, rig.where, strict=True))
    ]
    start = time.perf_counter()
    rig.raw.send(parts)
    seconds = time.perf_counter() - start
    for number, request in enumerate(asked):
        rig.verify([request], decode=number)
    return seconds
