"""Five hundred random rooms over pages that are handed out again at once: chunks, destinations, prefixes, discarded
passes, aborts from either side, refused, failed and late writes. Then the books are looked at.

* Every byte of a room that succeeded is right, when it ends and, where its pages are kept, when all is over (V1, V3).
* Every unit is with its embedder again, or in quarantine because a write of it is in doubt (V4, V5).
* No table holds anything else, and nothing of our own has grown from the 250th room to the 500th (V8).
"""

from __future__ import annotations

import asyncio
import gc
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from orchestrator.chunk import Chunk, ChunkSpec
from orchestrator.clock import LoopClock
from orchestrator.decode import RoomHandle
from orchestrator.decode_room import DecodeRoom
from orchestrator.destination import Destination
from orchestrator.engines.base import Batch, Engine, EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, FaultyEngine
from orchestrator.forward import ForwardPass, Group
from orchestrator.handover import Handover
from orchestrator.outcome import Outcome
from orchestrator.pages.ranges import chunk_ranges
from orchestrator.prefill_room import PrefillRoom
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Bytes, Pool
from orchestrator.trace import TransferResult
from protocols.blocks import Ints
from tests.service.scenes import OTHERS, both_modes, config, faulty, quarantined, sender, taken
from tests.support.waiting import until, within

ROOMS, AT_ONCE = 500, 8
PAGES, PAGE, SLOTS, LAYERS = 400, 4, 40, 3
TOMBSTONE_S = 600.0


class ShiftedClock(LoopClock):
    """Real time, and a leap when a test wants tombstones to expire."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def now(self) -> float:
        return super().now() + self.ahead


class Units:
    """What an embedder may hand out: pages and aux slots of one pool. A unit that comes back is handed out next."""

    def __init__(self, rng: random.Random) -> None:
        self.pages = rng.sample(range(PAGES), PAGES)
        self.slots = rng.sample(range(SLOTS), SLOTS)

    def take(self, count: int) -> Ints:
        return np.array([self.pages.pop() for _ in range(count)], np.int64)

    def give(self, pages: Ints, slot: int | None) -> None:
        self.pages += pages.tolist()
        if slot is not None:
            self.slots.append(slot)


@dataclass
class Kept:
    """Pages of a room that succeeded, kept by the decode, and what they must hold for ever."""

    pool: Pool
    pages: Ints
    content: dict[tuple[str, int], Bytes]

    def is_right(self) -> bool:
        return all(np.array_equal(self.pool.arrays[name][self.pages], want) for name, want in self.content.items())


@dataclass
class Tally:
    ok: int = 0
    failed: int = 0
    kept: list[Kept] = field(default_factory=list)
    freed: Counter[str] = field(default_factory=Counter)
    """How often each callback of a room ran."""


KINDS = (PrefillRoom, Destination, Chunk, ForwardPass, Group, Handover, Batch, DecodeRoom, Outcome)


class Soak:
    def __init__(self, cluster: Cluster, seed: int) -> None:
        self.cluster = cluster
        self.rng = random.Random(seed)
        self.content = np.random.default_rng(seed)
        self.source = Units(self.rng)
        self.targets = [Units(self.rng) for _ in cluster.decodes]
        self.tally = Tally()
        self._next = 0
        self._others = {id(thing): thing for thing in gc.get_objects() if issubclass(type(thing), KINDS)}
        """What other tests left."""

    async def run(self, count: int) -> None:
        """So many more rooms, a few at once; return when all of them have ended and nothing moves."""
        last = self._next + count

        async def worker() -> None:
            while self._next < last:
                number, self._next = self._next, self._next + 1
                await self._room(number, random.Random(number))

        async with asyncio.timeout(50):
            await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        engine = faulty(self.cluster)
        await until(lambda: not len(sender(self.cluster).rooms) and not engine.pending, "the prefill comes to rest")
        engine.land_late()
        await until(
            lambda: all(taken(self.cluster, n) == self._kept_back(n) for n in range(2)), "what is quiet comes back"
        )

    def _kept_back(self, number: int) -> int:
        return quarantined(self.cluster, number)

    async def _room(self, number: int, rng: random.Random) -> None:
        """One room, from the scheduler's and the embedder's side."""
        tokens, prefix = rng.randrange(1, 50), 0
        count = -(-tokens // PAGE)
        where = rng.choice([[0], [1], [0, 1]])
        prefix = rng.choice([0, 0, rng.randrange(count)])
        aux = rng.random() < 0.5
        units = [self.source, *(self.targets[n] for n in where)]
        await until(lambda: all(len(each.pages) >= count and each.slots for each in units), "units come back")
        pages, slot = self.source.take(count), self.source.slots.pop() if aux else None
        offered = [
            (n, self.targets[n].take(count - prefix), self.targets[n].slots.pop() if aux else None) for n in where
        ]
        handles: list[RoomHandle] = []

        async def decode_side() -> None:
            await pause(rng)
            for n, target, its_slot in offered:
                handle = self.cluster.decode(n).expect(
                    number,
                    1,
                    self.cluster.addresses,
                    target,
                    prefix_tokens=PAGE * prefix,
                    total_tokens=tokens,
                    aux_slot=its_slot,
                    destinations=len(where),
                )
                handles.append(handle)
                handle.on_units_free(self._count(f"decode {n} of {number}"))
                await pause(rng)

        written: dict[tuple[str, int], Bytes] = {}

        async def prefill_side() -> None:
            await pause(rng)
            sizes = rng.choice([[tokens], split(tokens, rng)])
            for span in chunk_ranges(tokens, sizes, PAGE):
                first, many = span.positions(PAGE)
                chunk = ChunkSpec(
                    room=number,
                    gen=1,
                    start_token=span.start_token,
                    end_token=span.end_token,
                    pages=pages[first : first + many],
                    last=span.last,
                    aux_slot=slot if span.last else None,
                )
                prefill = self.cluster.prefill()
                if rng.random() < 0.1:
                    prefill.begin_forward([chunk]).discard()
                with prefill.begin_forward([chunk]) as forward:
                    for layer in range(LAYERS + 1):
                        self._compute(layer, pages[first : first + many])
                        if layer < LAYERS and rng.random() < 0.95:
                            forward.layer_end(layer)
                        if rng.random() < 0.2:
                            await asyncio.sleep(0)
                    if span.last and slot is not None:
                        self._fill(("aux", 0), np.array([slot]))
                await pause(rng)
            for name, array in self.cluster.prefill_pools[0].arrays.items():
                if name[0] not in OTHERS:
                    written[name] = array[pages[prefix:]].copy()

        async def somebody_aborts() -> None:
            for _ in range(rng.randrange(12)):
                await asyncio.sleep(0.0005)
            if rng.random() < 0.5:
                self.cluster.prefill().abort(number, 1)
            elif handles:
                rng.choice(handles).abort()

        jobs = [decode_side(), prefill_side(), *([somebody_aborts()] if rng.random() < 0.15 else [])]
        await asyncio.gather(*jobs)
        for first_end in asyncio.as_completed([waiting(handle) for handle in handles]):
            if not (await within(first_end)).ok:  # as a router does: a decode that never offered tells nobody
                self.cluster.prefill().abort(number, 1)
        ends = [handle.result() for handle in handles]
        here = await within(self.cluster.prefill().finished(number, 1))
        self.cluster.prefill().on_source_free(number, 1, self._count(f"prefill of {number}"))
        await until(lambda: self.cluster.prefill().source_free(number, 1), "the source is free")
        self.source.give(pages, slot)
        assert here.ok <= all(end.ok for end in ends), "success here means that every decode has committed"
        self.tally.ok += here.ok
        self.tally.failed += not here.ok
        for (n, target, its_slot), handle, end in zip(offered, handles, ends, strict=True):
            if not end.ok:
                handle.on_units_free(partial(self.targets[n].give, target, its_slot))
                continue
            assert handle.units_free()
            done = Kept(self.cluster.decode_pools[n], target, written)
            assert done.is_right(), f"room {number}"
            if rng.random() < 0.1 and len(self.targets[n].pages) > PAGES // 2:
                self.tally.kept.append(done)
                self.targets[n].give(target[:0], its_slot)
            else:
                self.targets[n].give(target, its_slot)

    def _compute(self, layer: int, pages: Ints) -> None:
        for name in self.cluster.prefill_pools[0].arrays:
            if name[1] == layer and name[0] not in OTHERS:
                self._fill(name, pages)

    def _fill(self, name: tuple[str, int], rows: Ints) -> None:
        array = self.cluster.prefill_pools[0].arrays[name]
        array[rows] = self.content.integers(0, 256, (len(rows), array.shape[1]), np.uint8)

    def _count(self, what: str) -> Callable[[], None]:
        def ran() -> None:
            self.tally.freed[what] += 1

        return ran

    def assert_all_accounted(self) -> None:
        """Units: in the free list, kept, or in quarantine; nothing twice, nothing nowhere."""
        assert sorted(self.source.pages) == list(range(PAGES))
        assert sorted(self.source.slots) == list(range(SLOTS))
        for n, units in enumerate(self.targets):
            receiver = self.cluster.decode_nodes[n].receiver
            assert receiver is not None
            leases = receiver.book.leases()
            assert all(lease.why for lease in leases), "only failed rooms hold a lease"
            kept = [page for one in self.tally.kept if one.pool is self.cluster.decode_pools[n] for page in one.pages]
            in_doubt = [set(lease.units.pages.tolist()) for lease in leases]
            held = {page for part in in_doubt for page in part} | set(kept)
            assert held.isdisjoint(units.pages), "nobody hands out what is in doubt, or kept"
            assert len(units.pages) == len(set(units.pages))
            rooms = list(receiver.rooms)
            assert {room.key for room in rooms} == {lease.key for lease in leases}
            assert quarantined(self.cluster, n) == taken(self.cluster, n)
        assert set(self.tally.freed.values()) <= {1}, "each callback once"

    def leftovers(self) -> Counter[str]:
        """Objects of ours that only a live room needs, after all tombstones that may expire have done so."""
        for node in self.cluster.nodes:
            for side in (node.sender, node.receiver):
                if side is not None:
                    side.rooms.forget_expired()
        gc.collect()
        # By its type alone: some of what other packages leave about does not like to be looked at.
        found = (
            thing for thing in gc.get_objects() if issubclass(type(thing), KINDS) and id(thing) not in self._others
        )
        alive = Counter(type(thing).__name__.lstrip("_") for thing in found)
        alive["Task"] = len(asyncio.all_tasks())
        return alive


async def waiting(handle: RoomHandle) -> TransferResult:
    return await handle


async def pause(rng: random.Random) -> None:
    for _ in range(rng.choice([0, 0, 1, 5])):
        await asyncio.sleep(0)


def split(tokens: int, rng: random.Random) -> list[int]:
    """Random chunk sizes, also below a page."""
    sizes: list[int] = []
    while sum(sizes) < tokens:
        sizes.append(min(rng.choice([1, 3, 8, 20]), tokens - sum(sizes)))
    return sizes


def scripted(rng: random.Random) -> Callable[[Engine], Engine]:
    """A link that is slow at times, refuses at times, and fails at times: what failed lands later, as it was."""

    def now_and_then(chance: float) -> Callable[..., bool]:
        return lambda session, blocks, ordinal: rng.random() < chance

    def wrap(inner: Engine) -> Engine:
        return FaultyEngine(
            inner,
            Fault(now_and_then(0.003), refuse=True),
            Fault(now_and_then(0.002), fail=EVERY, landing="snapshot"),
            Fault(now_and_then(0.002), fail={0}, landing="late-read", delay_polls=2),
            Fault(now_and_then(0.1), delay_polls=3),
        )

    return wrap


@pytest.mark.row("A3", "A8", "A9", "A11", "A12", "A14", "A16", "B2", "B4", "C4", "C5", "E4")
@both_modes
async def test_five_hundred_random_rooms_leave_nothing_behind(
    layerwise: bool, caplog: pytest.LogCaptureFixture
) -> None:
    clock = ShiftedClock()
    make = {"pages": PAGES, "layers": LAYERS, "item_len": 16, "aux_slots": SLOTS, "page_size": PAGE}
    src, decodes = Pool(seed=1, **make), [Pool(**make), Pool(**make)]  # type: ignore[arg-type]
    settings = config(layerwise=layerwise, tombstone_s=TOMBSTONE_S, log_burst=1)
    limits = EngineLimits(max_batch_blocks=8, window_blocks=16)
    async with Cluster(
        prefills=[src],
        decodes=decodes,
        config=settings,
        wrap=scripted(random.Random(3)),
        limits=limits,
        clock=clock,
        digest=False,
    ) as cluster:
        soak = Soak(cluster, seed=layerwise)
        counts = []
        for _ in range(2):
            await soak.run(ROOMS // 2)
            soak.assert_all_accounted()
            assert all(one.is_right() for one in soak.tally.kept), "no late write touched what was kept"
            clock.ahead += TOMBSTONE_S + 1
            cluster.network.frames.clear()
            counts.append(soak.leftovers())
        assert soak.tally.ok + soak.tally.failed == ROOMS
        assert soak.tally.ok > ROOMS // 2
        assert soak.tally.failed > ROOMS // 20
        assert soak.tally.kept
        doubtful = [sum(1 for _ in node.receiver.rooms) if node.receiver else 0 for node in cluster.decode_nodes]
        assert sum(doubtful) > 0, "a write was in doubt"
        for kind in ("PrefillRoom", "Destination", "Chunk", "ForwardPass", "Group", "Handover", "Batch", "Queued"):
            assert counts[1][kind] == counts[0][kind] == 0, kind
        assert counts[1]["DecodeRoom"] == sum(doubtful)
        assert counts[1]["Task"] == counts[0]["Task"]
        assert counts[1]["Outcome"] <= sum(doubtful) + sender(cluster).rooms.remembered
        left = cluster.balanced()
        assert len(left) == sum(doubtful) + sum(many > 0 for many in doubtful), left
        assert [r.getMessage() for r in caplog.records if r.levelname in ("ERROR", "CRITICAL")] == []
