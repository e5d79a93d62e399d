"""Memory over very many rooms: does anything grow, and is everything that a room made gone afterwards?

Prefill and decode run on one loop over the loopback engine. Verdicts of ended rooms are remembered for a second here
instead of ten minutes: the memory of ten minutes' rooms is meant and bounded, and would hide a leak.
"""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import dataclass

import numpy as np

from orchestrator import ChunkSpec, Config
from orchestrator.loop_thread import new_event_loop
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from scripts.benchmarks.figures import Figure, bounded
from scripts.benchmarks.remote import Remote
from scripts.benchmarks.usage import rss_bytes

AT_ONCE = 50
PAGES = 2
PAGE_SIZE = 4
TOMBSTONE_S = 1.0
SAMPLES = 50
WARM_UP = 0.2
"""Share of the rooms before the slope counts."""


@dataclass(frozen=True, slots=True)
class Course:
    """Resident bytes by number of rooms so far, and kvferry's objects that were more or fewer at the end."""

    rooms: list[int]
    rss: list[int]
    changed: dict[str, int]


def run(quick: bool) -> list[Figure]:
    return measure(4_000, at_most=None) if quick else measure(100_000)


def measure(rooms: int, at_most: float | None = 10.0) -> list[Figure]:
    """Over few rooms the slope is the allocator's grain, so it has no bound then."""
    with Remote("scripts.benchmarks.memory:Rooms") as process:
        course: Course = process.call("measure", rooms, timeout=1800.0)
    warm = [(at, rss) for at, rss in zip(course.rooms, course.rss, strict=True) if at >= rooms * WARM_UP]
    slope = float(np.polyfit([at for at, _ in warm], [rss for _, rss in warm], 1)[0])
    changed = sum(abs(difference) for difference in course.changed.values())
    names = ", ".join(f"{name} {difference:+d}" for name, difference in course.changed.items())
    case = f"{rooms:,} rooms"
    return [
        bounded("memory", case, "resident size after warm-up", "bytes a room", [slope], at_most=at_most),
        bounded(
            "memory",
            f"{case}, live objects{f' ({names[:200]})' if names else ''}",
            "before against after",
            "objects",
            [float(changed)],
            at_most=0.0,
            target="equal",
        ),
    ]


class Rooms:
    """Served by `Remote`: a heap that nothing else has touched."""

    def measure(self, rooms: int) -> Course:
        loop = new_event_loop()
        try:
            return loop.run_until_complete(_course(rooms))
        finally:
            loop.close()

    def close(self) -> None:
        return None


async def _course(rooms: int) -> Course:
    needed = AT_ONCE * PAGES
    source = Pool(pages=needed, layers=4, drafts=1, page_size=PAGE_SIZE, seed=1)
    target = Pool(pages=needed, layers=4, drafts=1, page_size=PAGE_SIZE)
    config = Config(tombstone_s=TOMBSTONE_S, layer_group=4)
    async with Cluster(prefills=[source], decodes=[target], config=config, digest=False) as cluster:
        for number in range(10):
            await _batch(cluster, source, target, number * AT_ONCE)
        before = await _objects(cluster, source, target, 1 << 19)
        sizes, at = [rss_bytes()], [0]
        done, every = 0, max(1, rooms // SAMPLES // AT_ONCE)
        for number in range(rooms // AT_ONCE):
            done += await _batch(cluster, source, target, (1 << 20) + number * AT_ONCE)
            if number % every == 0:
                gc.collect()
                sizes.append(rss_bytes())
                at.append(done)
        after = await _objects(cluster, source, target, 1 << 40)
    changed = {name: after[name] - before[name] for name in before | after if after[name] != before[name]}
    return Course(at, sizes, changed)


async def _batch(cluster: Cluster, source: Pool, target: Pool, first: int, count: int = AT_ONCE) -> int:
    """Some rooms at once, each on pages of its own, and every byte compared."""
    for array in source.arrays.values():
        array += 1  # new content: every byte changes
    pages = np.arange(count * PAGES).reshape(count, PAGES)
    handles = [
        cluster.decode().expect(first + number, 1, cluster.addresses, pages[number], total_tokens=PAGES * PAGE_SIZE)
        for number in range(count)
    ]
    cluster.forward([ChunkSpec(room=first + number, gen=1, pages=pages[number], last=True) for number in range(count)])
    for handle in handles:
        result = await handle
        if not result.ok:
            raise RuntimeError(f"a room failed: {result.error}")
    sent = slice(0, count * PAGES)
    for key, ours in source.arrays.items():
        if key[0] not in ("aux", "state", "scratch") and not np.array_equal(ours[sent], target.arrays[key][sent]):
            raise RuntimeError(f"the decode holds other bytes in {key}")
    cluster.network.frames.clear()  # a test's record of what was sent
    return count


async def _objects(cluster: Cluster, source: Pool, target: Pool, number: int) -> Counter[str]:
    """kvferry's living objects by type, when every verdict but one room's is forgotten."""
    await asyncio.sleep(TOMBSTONE_S + 0.5)
    await _batch(cluster, source, target, number, 1)  # what is expired is dropped when a room ends
    await asyncio.sleep(0.1)
    gc.collect()
    names = (_name(type(thing)) for thing in gc.get_objects())
    return Counter(name for name in names if name.startswith(("orchestrator.", "protocols.", "asyncio.")))


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
