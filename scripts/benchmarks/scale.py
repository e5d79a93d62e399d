"""Chunks in flight on the loopback engine, 100 to 100,000: loop time and memory of each, over its whole life.

Prefill and decode run in one process on one loop, so both sides' work is in the figure, and so are the embedder's
calls. The engine is held until every chunk is in flight, then released. A chunk is one page of four layers that fire
as one group; a room has 100 chunks, each of another forward, which is a prompt of 100 times the chunk size.
"""

from __future__ import annotations

import asyncio
import gc
import time
import tracemalloc
from dataclasses import dataclass

import numpy as np

from orchestrator import ChunkSpec, Config, RoomHandle
from orchestrator.engines.loopback import LoopbackEngine
from orchestrator.loop_thread import new_event_loop
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.blocks import Ints
from scripts.benchmarks.figures import Figure, bounded, compared
from scripts.benchmarks.remote import Remote
from scripts.benchmarks.usage import rss_bytes

LAYERS = 4
PAGE_SIZE = 4
COUNTS = (100, 1_000, 10_000, 100_000)
QUICK_COUNTS = COUNTS[:3]
PER_ROOM = 100
TRACED_UP_TO = 1_000
"""Above this memory is told from the resident size, which is exact enough there; tracing would take minutes."""
LONG_S = 3600.0


@dataclass(frozen=True, slots=True)
class Life:
    """One chunk's share."""

    loop_us: float
    nbytes: float


def run(quick: bool) -> list[Figure]:
    figures = measure(QUICK_COUNTS, PER_ROOM, runs=1) if quick else measure(COUNTS, PER_ROOM, runs=3)
    return figures + _alone(1_000 if quick else 10_000)


def measure(counts: tuple[int, ...], per_room: int, runs: int) -> list[Figure]:
    figures: list[Figure] = []
    costs: dict[int, list[float]] = {}
    for count in counts:
        few = runs if count > TRACED_UP_TO else 3 * runs
        lives = [_in_a_process(count, per_room, traced=False) for _ in range(few)]
        costs[count] = [life.loop_us for life in lives]
        memory = [life.nbytes for life in lives]
        if count <= TRACED_UP_TO:
            memory = [_in_a_process(count, per_room, traced=True).nbytes]
        case = f"{count:,} chunks in flight"
        figures.append(bounded("scale", case, "loop time a chunk", "µs", costs[count], at_most=60.0))
        figures.append(bounded("scale", case, "memory a chunk", "bytes", memory, at_most=4096.0))
    most, reference = counts[-1], counts[min(1, len(counts) - 1)]
    case = f"{most:,} chunks against {reference:,}"
    figures.append(
        compared(
            "scale",
            case,
            "loop time a chunk",
            "µs",
            costs[most],
            f"{reference:,} chunks",
            costs[reference],
            at_most=1.3,
        )
    )
    return figures


def _alone(count: int) -> list[Figure]:
    """Every chunk a room of its own: what a room costs on top, offer to commit, on both sides."""
    life = _in_a_process(count, 1, traced=False)
    return [bounded("scale", f"{count:,} rooms of one chunk", "loop time a room", "µs", [life.loop_us])]


def _in_a_process(count: int, per_room: int, traced: bool) -> Life:
    with Remote("scripts.benchmarks.scale:Flight") as flight:
        life: Life = flight.call("measure", count, per_room, traced, timeout=600.0)
        return life


class Flight:
    """Served by `Remote`, so that each measurement starts with a fresh heap."""

    def measure(self, count: int, per_room: int, traced: bool) -> Life:
        loop = new_event_loop()
        try:
            return loop.run_until_complete(_fly(count, min(per_room, count), traced))
        finally:
            loop.close()

    def close(self) -> None:
        return None


async def _fly(count: int, per_room: int, traced: bool) -> Life:
    rooms = count // per_room
    pools = [
        Pool(pages=count, layers=LAYERS, drafts=0, page_size=PAGE_SIZE, kind="mla", aux_slots=0, seed=seed)
        for seed in (1, None)
    ]
    config = Config(
        layer_group=LAYERS,
        bootstrap_timeout_s=LONG_S,
        progress_timeout_s=LONG_S,
        waiting_timeout_s=LONG_S,
        room_timeout_s=LONG_S,
        pass_timeout_s=LONG_S,
    )
    async with Cluster(prefills=pools[:1], decodes=pools[1:], config=config, digest=False) as cluster:
        await _warm_up(cluster)
        engine = cluster.engines[0]
        assert isinstance(engine, LoopbackEngine)
        gc.collect()
        if traced:
            tracemalloc.start()
        before = tracemalloc.get_traced_memory()[0] if traced else rss_bytes()
        engine.copies_per_poll = 0
        start = time.thread_time()
        handles = await _launch(cluster, rooms, per_room)
        spent = time.thread_time() - start
        after = tracemalloc.get_traced_memory()[0] if traced else rss_bytes()
        tracemalloc.stop()
        engine.copies_per_poll = None
        start = time.thread_time()
        for handle in handles:
            await handle
        spent += time.thread_time() - start
        positions = np.arange(rooms * per_room)
        if pools[0].differences(pools[1], positions, positions):
            raise RuntimeError("the decode holds other bytes than the prefill")
    return Life(spent / count * 1e6, (after - before) / count)


async def _launch(cluster: Cluster, rooms: int, per_room: int) -> list[RoomHandle]:
    """Offer every room, run every forward, and let the loop hand everything over."""
    tokens = per_room * PAGE_SIZE
    handles = [
        cluster.decode().expect(room, 1, cluster.addresses, _pages(room, 0, per_room, per_room), total_tokens=tokens)
        for room in range(rooms)
    ]
    for chunk in range(per_room):
        last = chunk == per_room - 1
        specs = [
            ChunkSpec(
                room=room, gen=1, start_token=chunk * PAGE_SIZE, pages=_pages(room, chunk, 1, per_room), last=last
            )
            for room in range(rooms)
        ]
        cluster.forward(specs)
        await asyncio.sleep(0)
    while _held(cluster) < rooms * per_room * LAYERS:  # noqa: ASYNC110 - nothing tells when the last was handed over
        await asyncio.sleep(0.02)
    return handles


def _held(cluster: Cluster) -> int:
    """Blocks that wait in the lanes or in the engine."""
    sender = cluster.prefill_nodes[0].sender
    assert sender is not None
    statistics = [lane.statistics() for lane in sender.sessions.lanes.values()]
    return sum(one.queued_blocks + one.window.blocks for one in statistics)


def _pages(room: int, chunk: int, count: int, per_room: int) -> Ints:
    first = room * per_room + chunk
    return np.arange(first, first + count)


async def _warm_up(cluster: Cluster) -> None:
    for room in range(20):
        number = (1 << 40) + room
        handle = cluster.decode().expect(number, 1, cluster.addresses, [0], total_tokens=PAGE_SIZE)
        cluster.forward([ChunkSpec(room=number, gen=1, pages=[0], last=True)])
        await handle
