"""Both sides mean the same pages, also over recycled ones (E1, E6)."""

from __future__ import annotations

import random

import numpy as np
import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.outcome import RoomStatus
from orchestrator.pages.tables import mask_table
from orchestrator.testing.pool import POISON, Pool
from protocols.blocks import Ints
from protocols.errors import TransferError
from tests.service.scenes import (
    both_modes,
    config,
    faulty,
    ints,
    outcomes,
    sender,
    spec,
    taken,
)
from tests.service.scripted import PAGE, scene
from tests.support.waiting import until

# -- E1: equal counts ---------------------------------------------------------------------------------------------


@pytest.mark.row("E1", "A16")
@both_modes
@pytest.mark.parametrize("at_decode", [0, 8])
@pytest.mark.parametrize("last", [True, False])
async def test_more_source_pages_than_offered_fails_both_sides(layerwise: bool, at_decode: int, last: bool) -> None:
    src, dst = Pool(seed=1), Pool()
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        target = np.arange(30, 40 - at_decode // PAGE)
        handle = cluster.decode().expect(1, 0, cluster.addresses, target, prefix_tokens=at_decode, total_tokens=40)
        source = np.array([50, 51, 52, 3, 4, 9, 10, 11, 20, 21, 22, 23])
        cluster.forward([ChunkSpec(room=1, pages=source, last=last)])
        prefill, decode = await outcomes(cluster, handle)
        for error in (prefill.error, decode.error):
            assert_both_lists(error, source, target)
        assert faulty(cluster).attempts == 0, "nothing is truncated: nothing leaves"
        assert dst.untouched(np.empty(0, np.int64))
        await until(lambda: taken(cluster) == 0)


@pytest.mark.row("E1", "A16")
@both_modes
async def test_fewer_source_pages_than_offered_fails_both_sides(layerwise: bool) -> None:
    src, dst = Pool(seed=1), Pool()
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        target = np.arange(30, 42)
        handle = cluster.decode().expect(1, 0, cluster.addresses, target, total_tokens=48)
        source = np.array([50, 51, 52, 3, 4, 9, 10, 11])
        cluster.forward([ChunkSpec(room=1, pages=source, last=True)])
        prefill, decode = await outcomes(cluster, handle)
        for error in (prefill.error, decode.error):
            assert_both_lists(error, source, target)
        assert faulty(cluster).attempts == 0
        await until(lambda: taken(cluster) == 0)


def assert_both_lists(error: TransferError | None, source: Ints, target: Ints) -> None:
    """Both counts, the first and the last of both lists, and no more than a line."""
    text = str(error)
    for pages in (source, target):
        assert f"{len(pages)}[{pages[0]}, {pages[1]}, {pages[2]}, …, {pages[-2]}, {pages[-1]}]" in text
    assert len(text) < 400


@pytest.mark.row("E1")
@pytest.mark.parametrize("tokens", [45, 47, 49])
async def test_the_same_pages_for_another_length_fail_too(tokens: int) -> None:
    """Twelve pages on both sides, but not the same request (or, for 49 tokens, not even that)."""
    async with scene() as cluster:
        pages = np.arange(-(-tokens // PAGE))
        handle = cluster.decode().expect(1, 0, cluster.addresses, pages, total_tokens=tokens)
        cluster.forward([ChunkSpec(room=1, pages=np.arange(12), end_token=46, last=True)])
        prefill, decode = await outcomes(cluster, handle)
        assert str(tokens) in str(prefill.error)
        assert "46" in str(decode.error)
        assert faulty(cluster).attempts == 0


@pytest.mark.row("E1")
@pytest.mark.parametrize("source, target", [([0, 1], [2]), ([0], [2, 3]), ([], [2]), ([1], [])])
async def test_a_difference_in_state_rows_fails_the_room(source: list[int], target: list[int]) -> None:
    src, dst = Pool(seed=1, state_rows=4), Pool(state_rows=4)
    async with scene(prefills=[src], decodes=[dst]) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5], total_tokens=4, state_rows=target)
        cluster.forward([spec(1, ints(1), state_rows=source)])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (False, False)
        assert (dst.arrays["state", 0] == POISON).all()


@pytest.mark.row("E1")
@pytest.mark.parametrize("prefill_slot, decode_slot", [(None, 2), (3, None), (8, 2), (99, 2), (-1, 2)])
async def test_an_aux_slot_of_one_side_only_or_beyond_the_pool(
    prefill_slot: int | None, decode_slot: int | None
) -> None:
    src, dst = Pool(seed=1), Pool()
    async with scene(prefills=[src], decodes=[dst]) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5], total_tokens=4, aux_slot=decode_slot)
        cluster.forward([spec(1, ints(1), aux_slot=prefill_slot)])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (False, False)
        assert "aux" in str(decode.error)
        assert (dst.arrays["aux", 0] == POISON).all()


# -- E6: recycled pages -------------------------------------------------------------------------------------------


@pytest.mark.row("E6", "A16")
@both_modes
async def test_the_same_rooms_twice_over_recycled_pages(layerwise: bool) -> None:
    """Page tables as engines keep them: rectangular, with an earlier request's entries behind the valid ones. The
    second time a prefix is there already and the pages are handed out in another order. The last page is only partly
    valid: it travels whole, and the decode's own bytes behind it are nobody's business."""
    rng = random.Random(7)
    src, dst = Pool(seed=1), Pool()
    stale = 10**9
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        lengths = [3, 17, 32, 41]
        held: list[Ints] = []
        for gen in (1, 2):
            free_src, free_dst = rng.sample(range(64), 64), rng.sample(range(64), 64)
            for prefix_pages in held:
                free_dst = [page for page in free_dst if page not in prefix_pages]
            for array in src.arrays.values():
                array[...] = np.random.default_rng(gen).integers(0, 256, array.shape, np.uint8)
            tables = np.full((len(lengths), 16), stale, np.int64)
            handles, targets, kept = [], [], []
            for room, tokens in enumerate(lengths):
                count = -(-tokens // PAGE)
                hit = min(2, tokens // PAGE) if gen == 2 else 0
                tables[room, :count] = [free_src.pop() for _ in range(count)]
                if hit:  # the prefix has not changed: the model computes the same bytes for it
                    for (name, layer), array in src.arrays.items():
                        if name not in ("aux", "state", "scratch"):
                            array[tables[room, :hit]] = dst.arrays[name, layer][held[room][:hit]]
                fresh = np.array([free_dst.pop() for _ in range(count - hit)], np.int64)
                target = np.concatenate([held[room][:hit], fresh]) if hit else fresh
                handles.append(
                    cluster.decode().expect(
                        room, gen, cluster.addresses, fresh, prefix_tokens=PAGE * hit, total_tokens=tokens
                    )
                )
                targets.append(target)
                kept.append(target[: min(2, tokens // PAGE)])
            cluster.forward(
                [
                    ChunkSpec(
                        room=room,
                        gen=gen,
                        pages=mask_table(tables[room], tokens, PAGE),
                        end_token=tokens,
                        last=True,
                    )
                    for room, tokens in enumerate(lengths)
                ]
            )
            for room, handle in enumerate(handles):
                prefill, decode = await outcomes(cluster, handle)
                assert (prefill.ok, decode.ok) == (True, True)
                valid = mask_table(tables[room], lengths[room], PAGE)
                assert src.differences(dst, valid, targets[room]) == []
            held = kept
        assert sender(cluster).counters["rooms_ok"] == 8
        assert cluster.balanced() == []


@pytest.mark.row("E6", "A10")
async def test_an_unmasked_table_is_refused_and_not_truncated() -> None:
    """A stale tail that looks like pages: one entry too many for the tokens."""
    async with scene() as cluster:
        forward = cluster.forward([ChunkSpec(room=1, pages=[1, 2, 3, 60], end_token=10, last=True)])
        assert forward.refused
        assert cluster.prefill().poll(1) is RoomStatus.FAILED
