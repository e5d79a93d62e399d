"""What must not grow unseen: counts and ratios of counts over the loopback engine, never a time.

A figure that depends on the machine is a bench's. These depend on the code alone, so a change that adds a submission, a
wake-up or an allocation to every chunk fails here.
"""

import asyncio
import gc
import sys
import tracemalloc
from collections.abc import Awaitable, Callable
from types import FrameType

import numpy as np
import pytest

from orchestrator import ChunkSpec, Config, ForwardPass, RoomHandle
from orchestrator.engines.loopback import LoopbackEngine
from orchestrator.flow import Lane
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool

LAYERS = 16
GROUP = 4
GROUPS = LAYERS // GROUP
PAGE_SIZE = 4
PATIENCE_S = 30.0

# Half as much again as it was when this was written; lower them when it falls.
CALLS_A_ROOM = 3300
"""Of a room of one chunk: sixteen layers in four groups, offer to commit, on both sides."""
ALLOCATIONS_A_CHUNK = 260
BYTES_A_CHUNK = 20 << 10
"""Of a chunk in flight, sixteen blocks in four hand-overs."""


class Scene:
    """A cluster of one prefill and one decode; MLA, so a layer is a buffer; one draft, which has no hook."""

    def __init__(self, pages: int, *, drafts: int = 0, layer_group: int | None = GROUP) -> None:
        self.source = Pool(pages=pages, layers=LAYERS, drafts=drafts, kind="mla", page_size=PAGE_SIZE, seed=1)
        self.target = Pool(pages=pages, layers=LAYERS, drafts=drafts, kind="mla", page_size=PAGE_SIZE)
        config = Config(layer_group=layer_group)
        self.cluster = Cluster(prefills=[self.source], decodes=[self.target], config=config, digest=False)
        self._next = 0

    async def __aenter__(self) -> "Scene":
        await self.cluster.__aenter__()
        await self.send(1)  # first contact
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cluster.__aexit__()
        assert self.cluster.balanced() == []

    @property
    def lane(self) -> Lane:
        sender = self.cluster.prefill_nodes[0].sender
        assert sender is not None
        (lane,) = sender.sessions.lanes.values()
        return lane

    @property
    def engine(self) -> LoopbackEngine:
        engine = self.cluster.engines[0]
        assert isinstance(engine, LoopbackEngine)
        return engine

    def rooms(self, count: int, chunks: int, pages: int) -> list[list[ChunkSpec]]:
        """By forward: each room's next chunk, on ``pages`` contiguous pages of its own. The rooms are expected."""
        self.handles = []
        passes: list[list[ChunkSpec]] = [[] for _ in range(chunks)]
        for nth in range(count):
            self._next += 1
            first = nth * chunks * pages
            tokens = chunks * pages * PAGE_SIZE
            own = np.arange(first, first + chunks * pages)
            decode, addresses = self.cluster.decode(), self.cluster.addresses
            self.handles.append(decode.expect(self._next, 1, addresses, own, total_tokens=tokens))
            for number, chosen in enumerate(passes):
                chosen.append(
                    ChunkSpec(
                        room=self._next,
                        gen=1,
                        start_token=number * pages * PAGE_SIZE,
                        pages=own[number * pages : (number + 1) * pages],
                        last=number == chunks - 1,
                    )
                )
        return passes

    handles: list[RoomHandle]

    async def send(self, count: int, chunks: int = 1, pages: int = 1) -> list[ForwardPass]:
        """That many rooms, each in so many forwards; returns when the decode has committed all of them."""
        forwards = [self.cluster.forward(specs) for specs in self.rooms(count, chunks, pages)]
        await self.ended()
        return forwards

    async def ended(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            for handle in self.handles:
                assert (await handle).ok
            prefill = self.cluster.prefill()
            for handle in self.handles:
                await prefill.finished(handle.key.room, handle.key.gen)


async def counted(counter: Callable[[], int], action: Awaitable[object]) -> int:
    before = counter()
    await action
    return counter() - before


@pytest.mark.parametrize("rooms", [1, 10, 100])
async def test_a_forward_records_one_event_a_group_and_one_at_its_end_however_many_chunks_it_has(rooms: int) -> None:
    async with Scene(pages=100) as scene:
        (forward,) = await scene.send(rooms)
        assert forward.events_recorded == GROUPS + 1


@pytest.mark.parametrize("rooms", [1, 10, 100])
async def test_a_chunk_is_submitted_once_a_group(rooms: int) -> None:
    async with Scene(pages=100) as scene:
        assert await counted(lambda: scene.lane.batches, scene.send(rooms)) <= rooms * GROUPS


async def test_what_has_no_hook_is_one_submission_more() -> None:
    """Beside other rooms a turn may end within a group: half as many again at most."""
    async with Scene(pages=10, drafts=2) as scene:
        assert await counted(lambda: scene.lane.batches, scene.send(1)) <= GROUPS + 1
        assert await counted(lambda: scene.lane.batches, scene.send(10)) <= 15 * (GROUPS + 1)


async def test_groups_that_follow_what_was_measured_are_few() -> None:
    """A taper adds a few small groups to the large ones; it never falls back to a group a layer."""
    async with Scene(pages=20, layer_group=None) as scene:
        for _ in range(5):  # the link is known by now
            await scene.send(20)
        assert await counted(lambda: scene.lane.batches, scene.send(20)) <= 20 * LAYERS // 2


async def test_scattered_pages_fill_their_batches() -> None:
    """A window's quarter is a batch: many blocks take as few submissions as that allows, and one more a group."""
    async with Scene(pages=256) as scene:
        pages = 2 * np.random.default_rng(1).permutation(128)
        handle = scene.cluster.decode().expect(1 << 20, 1, scene.cluster.addresses, pages, total_tokens=128 * PAGE_SIZE)
        before = scene.lane.batches
        scene.cluster.forward([ChunkSpec(room=1 << 20, gen=1, pages=pages, last=True)])
        async with asyncio.timeout(PATIENCE_S):
            assert (await handle).ok
        blocks = 128 * LAYERS
        assert scene.lane.batches - before <= blocks / (scene.engine.limits.window_blocks / 4) + GROUPS


async def test_a_forward_of_the_host_asks_nobody_for_its_events() -> None:
    """They have completed when they are recorded: no pass of the poller is for them."""
    async with Scene(pages=1) as scene:
        sender = scene.cluster.prefill_nodes[0].sender
        assert sender is not None
        queries = await counted(lambda: sender._watcher.queries, scene.send(1))
        assert queries == GROUPS + 1
        assert sender._watcher.pending == 0


async def test_a_long_transfer_takes_a_pass_a_batch() -> None:
    """Refilled once a pass: as many passes as windows, where all that is in flight lands at once."""
    async with Scene(pages=256) as scene:
        pacer = scene.cluster.prefill_nodes[0].pacer
        pages = 2 * np.random.default_rng(1).permutation(128)
        handle = scene.cluster.decode().expect(1 << 20, 1, scene.cluster.addresses, pages, total_tokens=128 * PAGE_SIZE)
        before = pacer.passes
        scene.cluster.forward([ChunkSpec(room=1 << 20, gen=1, pages=pages, last=True)])
        async with asyncio.timeout(PATIENCE_S):
            assert (await handle).ok
        assert pacer.passes - before <= 128 * LAYERS / scene.engine.limits.window_blocks + 2 * GROUPS


async def test_a_burst_of_deposits_wakes_the_loop_once() -> None:
    """Everything that one forward deposits before the loop comes round: its chunks, its groups, its end."""
    async with Scene(pages=100) as scene:
        inbox = scene.cluster.prefill_nodes[0].inbox
        (specs,) = scene.rooms(100, 1, 1)
        await asyncio.sleep(0.01)
        deposits, wakes = inbox.deposits, inbox.wakes
        scene.cluster.forward(specs)
        assert inbox.wakes - wakes == 1
        await scene.ended()
        assert (inbox.deposits - deposits, inbox.wakes - wakes) == (GROUPS + 2, 1)


async def test_the_engine_is_asked_less_than_once_a_block() -> None:
    """All that completed is resolved in one pass; a pass in which nothing completed is rare."""
    async with Scene(pages=100) as scene:
        pacer = scene.cluster.prefill_nodes[0].pacer
        passes = await counted(lambda: pacer.passes, scene.send(100))
        assert passes <= 100 * LAYERS / 8


async def test_a_slow_engine_is_asked_in_proportion_to_what_completes() -> None:
    async with Scene(pages=100) as scene:
        pacer = scene.cluster.prefill_nodes[0].pacer
        scene.engine.copies_per_poll = 16
        passes = await counted(lambda: pacer.passes, scene.send(100))
        assert passes <= 2 * 100 * LAYERS / 16


async def test_nothing_is_asked_and_nobody_is_woken_while_nothing_is_pending() -> None:
    async with Scene(pages=10) as scene:
        await scene.send(10)
        node = scene.cluster.prefill_nodes[0]
        await asyncio.sleep(0.05)
        before = node.pacer.passes, node.inbox.wakes, len(scene.cluster.network.frames)
        await asyncio.sleep(0.2)
        assert (node.pacer.passes, node.inbox.wakes, len(scene.cluster.network.frames)) == before


@pytest.mark.parametrize("chunks", [1, 20])
async def test_a_room_costs_a_handful_of_frames_however_many_chunks_it_has(chunks: int) -> None:
    async with Scene(pages=400) as scene:
        frames = await counted(lambda: len(scene.cluster.network.frames), scene.send(20, chunks))
        assert frames <= 20 * 6


# -- in proportion -----------------------------------------------------------------------------------------------


class Calls:
    """Counts the calls of Python functions in this thread while entered: work, without a clock."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> "Calls":
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            self.count += 1


async def calls_a_chunk(rooms: int, chunks: int) -> float:
    async with Scene(pages=rooms * chunks) as scene:
        await scene.send(5)
        with Calls() as calls:
            await scene.send(rooms, chunks)
        return calls.count / (rooms * chunks)


async def test_a_chunk_costs_no_more_calls_among_many_rooms() -> None:
    assert await calls_a_chunk(rooms=200, chunks=1) <= 1.2 * await calls_a_chunk(rooms=20, chunks=1)


async def test_a_chunk_costs_no_more_calls_late_in_a_long_room() -> None:
    assert await calls_a_chunk(rooms=2, chunks=200) <= 1.2 * await calls_a_chunk(rooms=20, chunks=20)


async def test_a_room_costs_a_bounded_number_of_calls() -> None:
    assert await calls_a_chunk(rooms=100, chunks=1) <= CALLS_A_ROOM


async def test_a_chunk_in_flight_holds_a_bounded_number_of_allocations() -> None:
    chunks = 400
    async with Scene(pages=chunks) as scene:
        await scene.send(20)
        scene.engine.copies_per_poll = 0  # held: everything stays in flight
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.take_snapshot()
            for specs in scene.rooms(4, chunks // 4, 1):
                scene.cluster.forward(specs)
            async with asyncio.timeout(PATIENCE_S):
                while scene.lane.statistics().queued_blocks < (chunks - 64) * LAYERS:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            gc.collect()
            growth = tracemalloc.take_snapshot().compare_to(before, "filename")
        finally:
            tracemalloc.stop()
        ours = [one for one in growth if "tests/bench" not in one.traceback[0].filename]
        allocations = sum(one.count_diff for one in ours) / chunks
        nbytes = sum(one.size_diff for one in ours) / chunks
        assert (allocations <= ALLOCATIONS_A_CHUNK, nbytes <= BYTES_A_CHUNK) == (True, True), (allocations, nbytes)
        scene.engine.copies_per_poll = None
        await scene.ended()
