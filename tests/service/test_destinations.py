"""Where a chunk goes: its own positions, the ranks that own them, every destination (A3, F3, A11, E4)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.engines.faulty import EVERY, Fault
from orchestrator.outcome import RoomStatus
from orchestrator.pages.ownership import owned_pages
from orchestrator.pages.ranges import chunk_ranges
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import POISON, Pool
from tests.service.scenes import (
    LateModel,
    both_modes,
    config,
    expected_items,
    faulty,
    idle_turns,
    ints,
    live,
    once,
    outcomes,
    quarantined,
    spec,
    written,
)
from tests.service.scripted import PAGE, chunk_of, pages_of, scene
from tests.support.waiting import until, within

# -- A3, F3: where it goes ----------------------------------------------------------------------------------------


@pytest.mark.row("A3", "A16")
@both_modes
@pytest.mark.parametrize("at_decode", [0, 2, 5])
async def test_a_chunk_writes_its_own_positions_and_no_other_s(layerwise: bool, at_decode: int) -> None:
    """Chunk by chunk, to the end of each: what the engine was given lies exactly at the chunk's positions."""
    table, target = np.array([9, 3, 4, 30, 31, 32, 2, 50, 11, 12]), np.array([60, 1, 20, 21, 5, 6, 7, 40, 41, 0])
    src, dst = Pool(seed=1), Pool()
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        handle = cluster.decode().expect(
            1, 0, cluster.addresses, target[at_decode:], prefix_tokens=PAGE * at_decode, total_tokens=39
        )
        room = await live(cluster, 1)
        seen = 0
        for number, span in enumerate(chunk_ranges(39, [13, 2, 17, 7], PAGE)):
            cluster.forward([chunk_of(span, table)])
            await until(lambda: room.concluded_chunks > number, "the chunk concludes")  # noqa: B023
            first, count = span.positions(PAGE)
            mine = [target[at] for at in range(max(first, at_decode), first + count)]
            log, seen = faulty(cluster).log[seen:], len(faulty(cluster).log)
            assert written(log, dst.layout) == once(expected_items(dst.layout, mine))
        await outcomes(cluster, handle)
        assert src.differences(dst, table[at_decode:], target[at_decode:]) == []
        assert dst.untouched(target[at_decode:])


@pytest.mark.row("A3", "F3", "E4", "A16")
@both_modes
@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("at_decode", [0, 3])
async def test_context_parallel_ranks_send_each_what_they_own(
    layerwise: bool, mode: Any, ranks: int, at_decode: int
) -> None:
    """Every rank has pages and content of its own. Chunks of one page leave ranks without any. Per chunk the union is
    the whole, and no byte comes from two ranks."""
    pools = [Pool(seed=rank, cp_rank=rank, cp_size=ranks, cp_mode=mode) for rank in range(ranks)]
    dst, rng = Pool(), random.Random(ranks)
    tables = [np.array(rng.sample(range(64), 12), np.int64) for _ in range(ranks)]
    target = np.array(rng.sample(range(64), 12), np.int64)
    settings = config(layerwise=layerwise)
    async with scene(prefills=pools, decodes=[dst], config=settings) as cluster:
        handle = cluster.decode().expect(
            1, 0, cluster.addresses, target[at_decode:], prefix_tokens=PAGE * at_decode, total_tokens=47
        )
        owner = np.full(12, -1)
        for span in chunk_ranges(47, [20, 5, 4, 18], PAGE):
            first, count = span.positions(PAGE)
            seen = 0
            for rank in rng.sample(range(ranks), ranks):
                pages, positions = owned_pages(pages_of(span, tables[rank]), first, mode, rank, ranks)
                assert (owner[positions] == -1).all()
                owner[positions] = rank
                seen += len(positions)
                cluster.forward(
                    [
                        ChunkSpec(
                            room=1,
                            start_token=span.start_token,
                            end_token=span.end_token,
                            pages=pages,
                            positions=positions,
                            last=span.last,
                        )
                    ],
                    prefill=rank,
                )
            assert seen == count, "the owned pages of a chunk are all its pages"
        assert (await within(handle)).ok
        for rank, pool in enumerate(pools):
            assert (await within(cluster.prefill(rank).finished(1))).ok
            mine = np.flatnonzero((owner == rank) & (np.arange(12) >= at_decode))
            assert pool.differences(dst, tables[rank][mine], target[mine]) == []
            sent = written(faulty(cluster, rank).log, dst.layout)
            assert sent == once(expected_items(dst.layout, target[mine].tolist()))
        assert dst.untouched(target[at_decode:])
        assert cluster.balanced() == []


@pytest.mark.row("F3", "A3")
async def test_a_page_that_two_ranks_send_is_no_success() -> None:
    """An owner filter that overlaps: the bytes would be right by luck, the coverage is not."""
    pools = [Pool(seed=1, cp_rank=rank, cp_size=2, cp_mode="contiguous") for rank in range(2)]
    async with scene(prefills=pools) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5, 6, 7], total_tokens=12)
        for rank, positions in enumerate(([0, 1], [1, 2])):
            chunk = ChunkSpec(room=1, end_token=12, pages=positions, positions=positions, last=True)
            cluster.forward([chunk], prefill=rank)
        result = await within(handle)
        assert "overlap" in str(result.error)
        for prefill in cluster.prefills:
            assert "overlap" in str((await within(prefill.finished(1))).error)
        await until(lambda: cluster.balanced() == [], "everything landed, so everything is free")


@pytest.mark.row("F3", "A8")
async def test_a_page_that_no_rank_sends_is_no_success() -> None:
    pools = [Pool(seed=1, cp_rank=rank, cp_size=2, cp_mode="contiguous") for rank in range(2)]
    async with scene(prefills=pools) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5, 6, 7], total_tokens=12)
        for rank, positions in enumerate(([0], [2])):
            chunk = ChunkSpec(room=1, end_token=12, pages=positions, positions=positions, last=True)
            cluster.forward([chunk], prefill=rank)
        assert "gap" in str((await within(handle)).error)


# -- A11: several destinations ------------------------------------------------------------------------------------


@pytest.mark.row("A11", "A16", "A14")
@both_modes
@pytest.mark.parametrize(
    "dummies",
    [d for n in (1, 2, 4) for d in itertools.product([False, True], repeat=n) if list(d) == sorted(d)],
    ids=str,
)
async def test_every_destination_gets_every_byte_and_each_chunk_concludes_once(
    layerwise: bool, dummies: tuple[bool, ...], concluded: list[tuple[int, int]]
) -> None:
    """1, 2, 4 destinations, every number of dummies among them, three chunks in flight at once."""
    device, src = FakeDevice(), Pool()
    decodes = [Pool() for _ in dummies]
    rng = random.Random(len(dummies))
    targets = [np.array(rng.sample(range(64), 6), np.int64) for _ in dummies]
    settings = config(layerwise=layerwise)
    async with scene(prefills=[src], decodes=decodes, config=settings, events=device) as cluster:
        model = LateModel(src, device)
        table = np.array([7, 8, 1, 2, 3, 60])
        for span in chunk_ranges(24, 8, PAGE):
            chunk = chunk_of(span, table, aux_slot=5 if span.last else None)
            model.forward(cluster.prefill().begin_forward([chunk]), pages_of(span, table), 4)
        handles = []
        for each, target, dummy in zip(cluster.decodes, targets, dummies, strict=True):
            assert cluster.prefill().poll(1) is RoomStatus.WAITING
            handles.append(
                each.expect(
                    1,
                    0,
                    [] if dummy else cluster.addresses,
                    None if dummy else target,
                    total_tokens=24,
                    aux_slot=None if dummy else 3,
                    dummy_peers=cluster.addresses if dummy else [],
                    destinations=len(dummies),
                )
            )
            await idle_turns(rng.randrange(6))
        room = await live(cluster, 1)
        await until(lambda: len(room.chunks) == 3 and len(room.destinations) == len(dummies))
        device.run()
        for handle in handles:
            prefill, decode = await outcomes(cluster, handle)
            assert (prefill.ok, decode.ok) == (True, True)
        assert concluded == [(1, 0), (1, 8), (1, 16)]
        for node, pool, target, dummy in zip(cluster.decode_nodes, decodes, targets, dummies, strict=True):
            receiver = node.receiver
            assert receiver is not None
            sent = written(faulty(cluster).log, pool.layout, receiver.session)
            if dummy:
                assert pool.untouched(np.empty(0, np.int64))
                assert not sent
            else:
                assert src.differences(pool, table, target) == []
                assert pool.untouched(target)
                assert np.array_equal(src.arrays["aux", 0][5], pool.arrays["aux", 0][3])
                assert sent == once(expected_items(pool.layout, target.tolist(), aux=[3]))
        if all(dummies):
            assert faulty(cluster).attempts == 0
        assert cluster.balanced() == []


@pytest.mark.row("A11", "A8", "C4")
async def test_one_destination_that_fails_fails_them_all() -> None:
    """Never a partial success: the copy that landed whole is not committed either."""
    decodes = [Pool(), Pool(), Pool()]
    async with scene(decodes=decodes) as cluster:
        receiver = cluster.decode_nodes[1].receiver
        assert receiver is not None
        bad = receiver.session
        faulty(cluster).add(Fault(lambda session, blocks, ordinal: session == bad, fail=EVERY))
        handles = [
            each.expect(1, 0, cluster.addresses, [5, 6], total_tokens=8, destinations=3) for each in cluster.decodes
        ]
        cluster.forward([spec(1, ints(1, 2))])
        for handle in handles:
            prefill, decode = await outcomes(cluster, handle)
            assert (prefill.ok, decode.ok) == (False, False)
            assert "failed by the script" in str(decode.error)
        await until(lambda: (quarantined(cluster, 0), quarantined(cluster, 1), quarantined(cluster, 2)) == (0, 2, 0))
        assert [handle.units_free() for handle in handles] == [True, False, True], "in doubt only where it is"


# -- E4: chunks and ranks without pages ---------------------------------------------------------------------------


@pytest.mark.row("E4", "A16", "A1")
@both_modes
@pytest.mark.parametrize("at_decode", [0, 4, 12])
async def test_a_last_chunk_without_new_pages_still_delivers_aux(layerwise: bool, at_decode: int) -> None:
    src, dst = Pool(seed=1), Pool()
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        target = np.arange(40, 43)[at_decode // PAGE :]
        handle = cluster.decode().expect(
            1, 0, cluster.addresses, target, prefix_tokens=at_decode, total_tokens=12, aux_slot=2
        )
        cluster.forward([ChunkSpec(room=1, pages=[1, 2, 3])])
        room = await live(cluster, 1)
        await until(lambda: room.concluded_chunks == 1)
        assert (dst.arrays["aux", 0] == POISON).all()
        cluster.forward([ChunkSpec(room=1, start_token=12, end_token=12, last=True, aux_slot=4)])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok, prefill.chunks) == (True, True, 2)
        assert np.array_equal(src.arrays["aux", 0][4], dst.arrays["aux", 0][2])
        assert written(faulty(cluster).log, dst.layout) == once(expected_items(dst.layout, target.tolist(), [2]))


@pytest.mark.row("E4")
async def test_a_whole_prompt_that_is_on_the_decode_already() -> None:
    """Nothing to send at all, not even aux: it concludes and commits all the same."""
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [], prefix_tokens=12, total_tokens=12)
        cluster.forward([ChunkSpec(room=1, pages=[1, 2, 3], last=True)])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (True, True)
        assert prefill.bytes == decode.bytes == faulty(cluster).attempts == 0


@pytest.mark.row("E4", "F3")
@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
async def test_a_rank_that_owns_nothing_reports_on_the_last_chunk(mode: Any, concluded: list[tuple[int, int]]) -> None:
    """One page for two ranks: the second submits nothing, concludes every chunk, and its Done is waited for."""
    pools = [Pool(seed=1, cp_rank=rank, cp_size=2, cp_mode=mode) for rank in range(2)]
    async with scene(prefills=pools) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5, 6], total_tokens=8)
        for number in range(2):
            for rank in range(2):
                pages, positions = owned_pages(ints(number), number, mode, rank, 2)
                chunk = ChunkSpec(
                    room=1,
                    start_token=4 * number,
                    end_token=4 * number + 4,
                    pages=pages,
                    positions=positions,
                    last=number == 1,
                )
                cluster.forward([chunk], prefill=rank)
            await idle_turns()
            assert not handle.poll().ended or number == 1
        assert (await within(handle)).ok
        assert sorted(concluded) == [(1, 0), (1, 0), (1, 4), (1, 4)]
        idle = [engine for engine in (faulty(cluster, 0), faulty(cluster, 1)) if engine.attempts == 0]
        assert len(idle) == 1
        ends = [await within(prefill.finished(1)) for prefill in cluster.prefills]
        assert sorted(end.bytes or 0 for end in ends) == [0, 2 * 10 * 64]
        assert all(end.bytes is not None for end in ends)


@pytest.mark.row("E4", "A5")
async def test_a_rank_s_done_is_waited_for_even_if_it_owns_nothing() -> None:
    pools = [Pool(seed=1, cp_rank=rank, cp_size=2, cp_mode="contiguous") for rank in range(2)]
    async with scene(prefills=pools) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5], total_tokens=4)
        cluster.forward([ChunkSpec(room=1, end_token=4, pages=[1], positions=[0], last=True)], prefill=0)
        await until(lambda: handle.poll() is RoomStatus.TRANSFERRING)
        room = await live(cluster, 1)
        await until(lambda: room.machine.state.name == "COMMITTING")
        await idle_turns()
        assert not handle.poll().ended
        cluster.forward([ChunkSpec(room=1, end_token=4, pages=[], positions=[], last=True)], prefill=1)
        assert (await within(handle)).ok
