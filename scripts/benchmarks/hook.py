"""What a hook costs the forward thread: non-boundary and boundary layers, with many active chunks.

The loop runs in its own thread as in a worker. Before each hook the forward thread does a layer's worth of Python
(about 20 µs), and once a group it leaves the GIL, so that a deposit finds the loop asleep: the dearest case.
Events are the host's: the cost of recording one, which is CUDA's own, is not in the figure.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from orchestrator import ChunkSpec, Config, EmbeddedLoop, Prefill
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.testing.pool import Pool
from scripts.benchmarks.figures import Figure

LAYERS = 64
GROUP = 8
CHUNKS = (1, 10, 100, 1000)


def run(quick: bool) -> list[Figure]:
    passes = 15 if quick else 60
    plain: dict[int, float] = {}
    boundary: dict[int, float] = {}
    raw_plain: dict[int, list[float]] = {}
    raw_boundary: dict[int, list[float]] = {}
    for count in CHUNKS:
        raw_plain[count], raw_boundary[count] = _measure(count, passes)
        plain[count] = statistics.median(raw_plain[count])
        boundary[count] = statistics.median(raw_boundary[count])
    figures: list[Figure] = []
    for count in CHUNKS:
        for metric, values, raw, limit in (
            ("non-boundary layer_end", plain, raw_plain, 0.3),
            ("boundary layer_end", boundary, raw_boundary, 10.0),
        ):
            met = values[count] <= limit
            figures.append(
                Figure(
                    "hook",
                    f"{count} chunks",
                    metric,
                    "µs",
                    values[count],
                    f"≤ {limit} µs",
                    met,
                    reason="" if met else "see docs/performance.md",
                    runs=raw[count],
                )
            )
    ratio = boundary[1000] / boundary[1]
    figures.append(
        Figure(
            "hook",
            "1000 chunks against 1",
            "boundary layer_end",
            "µs",
            boundary[1000],
            "≤ 1.2 × 1 chunk",
            ratio <= 1.2,
            "1 chunk",
            boundary[1],
            ratio,
            "" if ratio <= 1.2 else "the loop serves 1000 chunks a boundary and holds the GIL meanwhile",
        )
    )
    return figures


def _measure(count: int, passes: int) -> tuple[list[float], list[float]]:
    """Median cost in µs of each kind of hook, one number a pass."""
    pool = Pool(pages=4096, layers=LAYERS, drafts=0, seed=1)
    engine = LoopbackFabric().engine()
    plain: list[float] = []
    boundary: list[float] = []
    with EmbeddedLoop(Config(layer_group=GROUP)) as loop:
        prefill = loop.start_prefill(engine, pool.layout)
        for number in range(passes + 3):
            one = _one_pass(prefill, number, count)
            if number >= 3:  # warm
                plain.append(statistics.median(one[0]))
                boundary.append(statistics.median(one[1]))
    return plain, boundary


def _one_pass(prefill: Prefill, number: int, count: int) -> tuple[list[float], list[float]]:
    chunks = [ChunkSpec(room=number * count + i, gen=0, pages=np.array([i]), last=True) for i in range(count)]
    clock = time.perf_counter_ns
    overhead = min(_empty_interval() for _ in range(50))
    plain: list[float] = []
    boundary: list[float] = []
    forward = prefill.begin_forward(chunks)
    time.sleep(0.02 + count * 5e-5)  # the loop has registered them: a forward takes longer than that
    layer_end = forward.layer_end
    for first in range(0, LAYERS, GROUP):
        time.sleep(0.0005 + count * 2e-5)  # the loop finishes the group before and falls asleep
        spent = 0
        for layer in range(first, first + GROUP - 1):
            _launch()
            start = clock()
            layer_end(layer)
            spent += clock() - start - overhead
        _launch()
        start = clock()
        layer_end(first + GROUP - 1)
        boundary.append((clock() - start - overhead) / 1000)
        plain.append(spent / (GROUP - 1) / 1000)
    forward.end()
    for chunk in chunks:
        prefill.abort(chunk.room, 0, "the benchmark is done with it")
    return plain, boundary


def _launch() -> int:
    """About 20 µs of Python."""
    total = 0
    for number in range(400):
        total += number
    return total


def _empty_interval() -> int:
    start = time.perf_counter_ns()
    return time.perf_counter_ns() - start
