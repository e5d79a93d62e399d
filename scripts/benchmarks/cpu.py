"""CPU time of everything but the engine's own I/O threads, of both processes together.

The forward thread counts with its hooks only: its own sleep and wake-up are the simulation's. A thread pool counts
with its workers; its hooks are given to it for nothing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.engines.mooncake import CompletionMode
from scripts.benchmarks.baselines.sending import Context, Sender
from scripts.benchmarks.figures import Figure, bounded, compared
from scripts.benchmarks.forward import Compute
from scripts.benchmarks.pools import Request, Shape, pages_needed, requests
from scripts.benchmarks.rig import Rig
from scripts.benchmarks.usage import our_cpu_s

LAYERS = 32
GROUP = 8
SHARE = 0.3
MODES: tuple[tuple[CompletionMode, str, float], ...] = (
    ("batch-status", "by batch status", 5.0),
    ("one-block", "one-block", 9.0),
)
IDLE_TARGET_PERCENT = 0.05
"""What still prints as 0.0 % of a core."""


@dataclass(frozen=True, slots=True)
class Used:
    """One transfer: CPU and wall seconds."""

    cpu_s: float
    wall_s: float


@dataclass(frozen=True, slots=True)
class Size:
    """Bytes a transfer, transfers a side, seconds of idling."""

    nbytes: int
    runs: int
    idle_s: float


def run(quick: bool) -> list[Figure]:
    return measure(Size(64 << 20, 5, 3.0) if quick else Size(256 << 20, 11, 10.0))


def measure(size: Size) -> list[Figure]:
    figures = [_block_cost(size, *mode) for mode in MODES]
    figures += [_share_of_wall(size, item) for item in (64 << 10, 256 << 10, 1 << 20)]
    return figures + _against_pools(size) + [_idle(size)]


def _rig(size: Size, item_len: int, completion: CompletionMode = "auto") -> tuple[Rig, list[Request]]:
    shape = Shape("mha", LAYERS, item_len)
    pages = max(1, size.nbytes // (shape.buffers * item_len))
    rig = Rig(shape, pages_needed(1, pages, scattered=True), completion=completion)
    return rig, requests(1, 1, pages, scattered=True, rng=rig.rng)


def _block_cost(size: Size, mode: CompletionMode, name: str, most: float) -> Figure:
    """µs a block while the link is busy all the time: the loop at its busiest, and its polls at their densest."""
    rig, asked = _rig(size, 16 << 10, mode)
    blocks = rig.shape.buffers * len(asked[0].source)
    with rig:
        runs = [_kvferry(rig, asked, Compute()).cpu_s / blocks * 1e6 for _ in range(size.runs + 1)][1:]
    return bounded("cpu", f"16 KiB blocks, {name}", "CPU a block", "µs", runs, at_most=most)


def _share_of_wall(size: Size, item_len: int) -> Figure:
    rig, asked = _rig(size, item_len)
    with rig:
        used = [_kvferry(rig, asked, Compute()) for _ in range(size.runs + 1)][1:]
    runs = [one.cpu_s / one.wall_s * 100 for one in used]
    return bounded("cpu", f"{item_len >> 10} KiB blocks, busy link", "CPU over wall", "%", runs, at_most=5.0)


def _against_pools(size: Size) -> list[Figure]:
    """The transfer is 30 % of a forward that leaves the GIL."""
    rig, asked = _rig(size, 16 << 10)
    with rig:
        alone = statistics.median(_kvferry(rig, asked, Compute()).wall_s for _ in range(3))
        compute = Compute(alone / SHARE / LAYERS)
        passes = rig.passes(asked, GROUP)
        pools = {
            "threadpool, blocking": rig.threadpool(GROUP, blocking=True),
            "threadpool, asynchronous": rig.threadpool(GROUP),
        }
        ours: list[float] = []
        theirs: dict[str, list[float]] = {name: [] for name in pools}
        for _ in range(size.runs):
            ours.append(_kvferry(rig, asked, compute).cpu_s * 1e3)
            for name, pool in pools.items():
                theirs[name].append(_baseline(rig, asked, pool, passes, compute).cpu_s * 1e3)
        for pool in pools.values():
            pool.close()
    bounds = {"threadpool, blocking": 0.1, "threadpool, asynchronous": None}
    return [
        compared(
            "cpu", "16 KiB blocks, 30 % of the forward", f"CPU, {name}", "ms", ours, name, runs, at_most=bounds[name]
        )
        for name, runs in theirs.items()
    ]


def _idle(size: Size) -> Figure:
    """Nothing to do, with a peer connected."""
    rig, asked = _rig(Size(1 << 20, 1, 0), 16 << 10)
    with rig:
        _kvferry(rig, asked, Compute())
        time.sleep(0.5)
        start, before = time.monotonic(), our_cpu_s(_not_ours()) + rig.decodes[0].call("cpu")
        time.sleep(size.idle_s)
        used = our_cpu_s(_not_ours()) + rig.decodes[0].call("cpu") - before
        percent = used / (time.monotonic() - start) * 100
    return bounded(
        "cpu",
        f"idle for {size.idle_s:g} s",
        "CPU",
        "% of a core",
        [percent],
        at_most=IDLE_TARGET_PERCENT,
        target="0.0 % of a core",
    )


def _kvferry(rig: Rig, asked: Sequence[Request], compute: Compute) -> Used:
    rig.refresh()
    before = our_cpu_s(_not_ours()) + rig.decodes[0].call("cpu")
    done = rig.kvferry(asked, compute, count_hooks=True)
    used = our_cpu_s(_not_ours()) + rig.decodes[0].call("cpu") - before
    rig.verify(asked)
    return Used(used + done.forward.hooks_cpu_s, done.total)


def _baseline(
    rig: Rig, asked: Sequence[Request], sender: Sender, passes: list[list[Context]], compute: Compute
) -> Used:
    rig.refresh()
    renamed = rig.renamed(passes)
    before = our_cpu_s(_not_ours()) + rig.decodes[0].call("cpu")
    done = rig.baseline(sender, renamed, compute)
    used = our_cpu_s(_not_ours()) + rig.decodes[0].call("cpu") - before
    rig.verify(asked)
    return Used(used, done.total)


def _not_ours() -> set[int]:
    """The main thread is the simulated forward and the measurement."""
    main = threading.main_thread().native_id
    return set() if main is None else {main}
