"""What a hook costs the forward thread: non-boundary and boundary layers, with many active chunks.

The loop runs in its own thread as in a worker. Before each hook the forward thread does a layer's worth of Python
(about 20 µs), and once a group it leaves the GIL, so that a deposit finds the loop asleep: the dearest case.
Events are the host's: the cost of recording one, which is CUDA's own, is not in the figure.

The pause before a group is as long as the loop needs for the chunks of the one before, and a long pause slows whatever
runs after it: so many chunks are compared with one chunk after pauses of the same length.

The thread pool's hooks run in the same way; its workers only take the jobs, they send nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np

from orchestrator import ChunkSpec, Config, EmbeddedLoop, Prefill
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.testing.pool import Pool
from protocols.ids import Session
from scripts.benchmarks.baselines.sending import Context
from scripts.benchmarks.baselines.threadpool import ThreadPool
from scripts.benchmarks.figures import Figure, bounded, compared
from scripts.benchmarks.forward import launch

LAYERS = 64
GROUP = 8
CHUNKS = (1, 10, 100, 1000)
POOL_CHUNKS = 100
WARM_UP = 3


def run(quick: bool) -> list[Figure]:
    return measure(15 if quick else 60)


def measure(passes: int) -> list[Figure]:
    plain: dict[int, list[float]] = {}
    boundary: dict[int, list[float]] = {}
    for count in CHUNKS:
        plain[count], boundary[count] = _kvferry(count, passes, _pause(count))
    figures: list[Figure] = []
    for count in CHUNKS:
        case = f"{count} chunks"
        figures.append(bounded("hook", case, "non-boundary layer_end", "µs", plain[count], at_most=0.3))
        figures.append(bounded("hook", case, "boundary layer_end", "µs", boundary[count], at_most=10.0))
    most = CHUNKS[-1]
    _, one = _kvferry(1, passes, _pause(most))
    figures.append(
        compared(
            "hook",
            f"{most} chunks against 1",
            "boundary layer_end",
            "µs",
            boundary[most],
            "1 chunk after the same pauses",
            one,
            at_most=1.2,
        )
    )
    ours, theirs = _against_pool(passes)
    figures.append(
        compared(
            "hook",
            f"{POOL_CHUNKS} chunks against a thread pool",
            "all hooks of one forward",
            "µs",
            ours,
            "threadpool",
            theirs,
            at_most=1 / 20,
            target="≤ 1/20 × threadpool",
        )
    )
    return figures


def _kvferry(count: int, passes: int, pause: float) -> tuple[list[float], list[float]]:
    """Median cost in µs of each kind of hook, one number a pass."""
    plain: list[float] = []
    boundary: list[float] = []
    with EmbeddedLoop(Config(layer_group=GROUP)) as loop:
        prefill = _start(loop)
        for number in range(passes + WARM_UP):
            one = _one_pass(prefill, number, count, pause)
            if number >= WARM_UP:
                plain.append(statistics.median(one[0]))
                boundary.append(statistics.median(one[1]))
    return plain, boundary


def _against_pool(passes: int) -> tuple[list[float], list[float]]:
    """What all hooks of a forward cost together (µs), ours and a thread pool's, in turn."""
    ours: list[float] = []
    theirs: list[float] = []
    pool = _IdlePool()
    contexts = [Context(number, (([], [], []),) * (LAYERS // GROUP), b"") for number in range(POOL_CHUNKS)]
    with EmbeddedLoop(Config(layer_group=GROUP)) as loop:
        prefill = _start(loop)
        for number in range(passes + WARM_UP):
            plain, boundary = _one_pass(prefill, number, POOL_CHUNKS, _pause(POOL_CHUNKS))
            pool.begin(contexts)
            their_plain, their_boundary = _hooks(pool.layer_end, _pause(POOL_CHUNKS))
            if number >= WARM_UP:
                ours.append(_sum(plain, boundary))
                theirs.append(_sum(their_plain, their_boundary))
    pool.close()
    return ours, theirs


def _sum(plain: Sequence[float], boundary: Sequence[float]) -> float:
    return sum(plain) * (GROUP - 1) + sum(boundary)


class _IdlePool(ThreadPool):
    """Its hooks and its queue are real, its workers send nothing."""

    def __init__(self) -> None:
        super().__init__(
            None,  # type: ignore[arg-type]
            Session(""),
            lambda _: None,
            layers=LAYERS,
            group=GROUP,
            blocking=True,
        )

    def _send(self, *_: object) -> None:
        return None


def _start(loop: EmbeddedLoop) -> Prefill:
    return loop.start_prefill(LoopbackFabric().engine(), Pool(pages=4096, layers=LAYERS, drafts=0, seed=1).layout)


def _pause(chunks: int) -> float:
    """Seconds in which the loop finishes a group of so many chunks and falls asleep."""
    return 0.0005 + chunks * 2e-5


def _one_pass(prefill: Prefill, number: int, count: int, pause: float) -> tuple[list[float], list[float]]:
    chunks = [ChunkSpec(room=number * count + i, gen=0, pages=np.array([i]), last=True) for i in range(count)]
    forward = prefill.begin_forward(chunks)
    time.sleep(0.02 + count * 5e-5)  # the loop has registered them: a forward takes longer than that
    costs = _hooks(forward.layer_end, pause)
    forward.end()
    for chunk in chunks:
        prefill.abort(chunk.room, 0, "the benchmark is done with it")
    return costs


def _hooks(layer_end: Callable[[int], object], pause: float) -> tuple[list[float], list[float]]:
    """By group: the mean cost of its plain hooks, and that of its boundary (µs)."""
    clock = time.perf_counter_ns
    overhead = min(_empty_interval() for _ in range(50))
    plain: list[float] = []
    boundary: list[float] = []
    for first in range(0, LAYERS, GROUP):
        time.sleep(pause)
        spent = 0
        for layer in range(first, first + GROUP - 1):
            launch()
            start = clock()
            layer_end(layer)
            spent += clock() - start - overhead
        launch()
        start = clock()
        layer_end(first + GROUP - 1)
        boundary.append((clock() - start - overhead) / 1000)
        plain.append(spent / (GROUP - 1) / 1000)
    return plain, boundary


def _empty_interval() -> int:
    start = time.perf_counter_ns()
    return time.perf_counter_ns() - start
