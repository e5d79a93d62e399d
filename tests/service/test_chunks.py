"""Chunks of a prompt, through whole transfers: what each sends, where to, how often, in which order they conclude."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.decode import RoomHandle
from orchestrator.engines.faulty import Fault
from orchestrator.outcome import RoomStatus
from orchestrator.pages.ranges import ChunkCursor, Range, chunk_ranges
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import POISON, Pool
from protocols.blocks import Ints
from protocols.errors import MismatchError
from protocols.machines import ChunkState
from tests.service.scenes import (
    LateModel,
    both_kinds,
    both_modes,
    config,
    expected_items,
    faulty,
    idle_turns,
    ints,
    live,
    once,
    outcomes,
    spec,
    written,
)
from tests.service.scripted import PAGE, chunk_of, pages_of, scene, to_pages
from tests.support.waiting import until, within

# -- A1: what each forward makes final ----------------------------------------------------------------------------


@pytest.mark.row("A1", "A16", "A14", "A15")
@both_modes
@both_kinds
@pytest.mark.parametrize("seed", range(8))
async def test_the_cursor_s_ranges_carry_a_whole_prompt(seed: int, kind: Any, layerwise: bool) -> None:
    """Random prompt, cached prefix, chunk sizes also below a page, page size, prefix on the decode: every page of every
    buffer arrives once. A chunk that completes no page registers nothing; its tokens ride with the next."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 4])
    tokens = rng.randrange(1, 90)
    prefix = rng.randrange(tokens + 1)
    at_decode = rng.randrange(tokens // page_size + 1) * page_size
    sizes: list[int] = []
    while sum(sizes) < tokens - prefix:
        sizes.append(min(rng.choice([1, 2, 3, 7, 30]), tokens - prefix - sum(sizes)))
    count = -(-tokens // page_size)
    src, dst = (Pool(kind=kind, pages=128, page_size=page_size, item_len=16, seed=s) for s in (seed, None))
    table, target = (np.array(rng.sample(range(128), count), np.int64) for _ in range(2))
    target = target[at_decode // page_size :]
    settings = config(layerwise=layerwise)
    async with scene(prefills=[src], decodes=[dst], config=settings) as cluster:
        offer = rng.randrange(len(sizes) + 1)
        handle: RoomHandle | None = None

        def expect() -> RoomHandle:
            return cluster.decode().expect(
                1, 0, cluster.addresses, target, prefix_tokens=at_decode, total_tokens=tokens, aux_slot=3
            )

        cursor, computed, registered = ChunkCursor(page_size, prefix), prefix, 0
        for number, size in enumerate(sizes or [0]):
            if number == offer:
                handle = expect()
            computed += size
            made = cursor.advance(computed, last=computed == tokens and number >= len(sizes) - 1)
            if made is None:
                cluster.forward([])
            else:
                registered += 1
                cluster.forward([chunk_of(made, table, page_size, aux_slot=5 if made.last else None)])
            await idle_turns(rng.randrange(3))
        prefill, decode = await outcomes(cluster, handle or expect())
        assert (prefill.ok, decode.ok) == (True, True)
        assert prefill.chunks == registered
        assert src.differences(dst, table[at_decode // page_size :], target) == []
        assert dst.untouched(target)
        assert written(faulty(cluster).log, dst.layout) == once(expected_items(dst.layout, target, aux=[3]))


@pytest.mark.row("A1", "A9")
@pytest.mark.parametrize("start, why", [(8, "a gap"), (0, "the same start, other pages"), (4, "an overlap")])
async def test_ranges_that_do_not_tile_fail_the_room(start: int, why: str) -> None:
    async with scene() as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, np.arange(10), total_tokens=40)
        first = ChunkSpec(room=1, pages=[1, 2] if why != "a gap" else [1])
        cluster.forward([first])
        forward = cluster.forward([ChunkSpec(room=1, start_token=start, pages=[30, 31])])
        assert forward.refused == []
        prefill, decode = await outcomes(cluster, handle)
        assert isinstance(prefill.error, MismatchError)
        assert "1.0@" in str(prefill.error)
        assert "chunk" in str(decode.error)
        assert cluster.balanced() == []


@pytest.mark.row("A1")
async def test_nothing_follows_the_last_chunk() -> None:
    async with scene() as cluster:
        cluster.forward([ChunkSpec(room=1, pages=[1, 2], last=True)])
        cluster.forward([ChunkSpec(room=1, start_token=8, pages=[3], last=True)])
        result = await within(cluster.prefill().finished(1))
        assert isinstance(result.error, MismatchError)


# -- A9: several in flight ----------------------------------------------------------------------------------------


def eight_chunks() -> Iterator[tuple[Range, Ints, Ints]]:
    """Ranges of two pages each, with their source and destination pages."""
    for span in chunk_ranges(64, 8, PAGE):
        first, count = span.positions(PAGE)
        yield span, np.arange(first, first + count), np.arange(40 + first, 40 + first + count)


@pytest.mark.row("A9", "A16")
@both_modes
@pytest.mark.parametrize("held", [(0,), (0, 1, 2), (3,), (0, 4, 5)])
async def test_chunks_conclude_in_send_order_however_they_land(
    layerwise: bool, held: tuple[int, ...], concluded: list[tuple[int, int]]
) -> None:
    """Some stay in flight while all the others land, one of which finishes while the next registers."""
    src, dst = Pool(seed=1), Pool(pages=128)
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        chunks = list(eight_chunks())
        holds = {n: faulty(cluster).add(Fault(to_pages(dst, chunks[n][2]), hold=True)) for n in held}
        handle = cluster.decode().expect(1, 0, cluster.addresses, np.arange(40, 56), total_tokens=64)
        room = await live(cluster, 1)
        for number, (span, source, _) in enumerate(chunks):
            cluster.forward([chunk_of(span, np.arange(16))])
            assert pages_of(span, np.arange(16)).tolist() == source.tolist()
            if number not in held:
                await until(lambda: room.chunks and list(room.chunks.values())[-1].machine.state.name != "REGISTERED")
        free = [n for n in range(8) if n not in held]
        await until(lambda: len(room.chunks) == 8)
        landed = (ChunkState.LANDED, ChunkState.CONCLUDED)
        await until(lambda: all(room.chunks[8 * n].machine.state in landed for n in free), "the others have landed")
        await until(lambda: len(concluded) >= held[0])
        await idle_turns()
        assert concluded == [(1, 8 * n) for n in range(held[0])], "none behind one that is in flight"
        for n in reversed(held):
            assert not cluster.prefill().poll(1).ended
            holds[n].release()
            await idle_turns()
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (True, True)
        assert concluded == [(1, 8 * n) for n in range(8)], "each once, in send order"
        assert src.differences(dst, np.arange(16), np.arange(40, 56)) == []


@pytest.mark.row("A9", "A10")
async def test_a_degraded_chunk_between_two_overlapped_ones(concluded: list[tuple[int, int]]) -> None:
    device, src, dst = FakeDevice(), Pool(), Pool()
    async with scene(prefills=[src], decodes=[dst], events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, np.arange(40, 46), total_tokens=24)
        model = LateModel(src, device)
        for number in range(3):
            source = np.arange(2 * number, 2 * number + 2)
            forward = cluster.prefill().begin_forward(
                [ChunkSpec(room=1, start_token=8 * number, pages=source, last=number == 2)]
            )
            device.fail_record = RuntimeError("no event") if number == 1 else None
            for layer in range(4):
                model.layer(layer, source)
                forward.layer_end(layer)
            device.fail_record = None
            model.layer(4, source)
            forward.end()
        room = await live(cluster, 1)
        await until(lambda: len(room.chunks) == 3)
        device.step(5)
        await until(lambda: concluded == [(1, 0)])
        assert [chunk.degraded_by for chunk in room.chunks.values()] == ["", "RuntimeError: no event", ""]
        device.run()
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        assert concluded == [(1, 0), (1, 8), (1, 16)]
        assert (prefill.layers_fired, prefill.layers_fallback) == (8, 1 + 5 + 1)
        assert src.differences(dst, np.arange(6), np.arange(40, 46)) == []


@pytest.mark.row("A9")
@pytest.mark.parametrize(
    "change",
    [{"pages": [1, 3]}, {"pages": [2, 1]}, {"last": True}, {"aux_slot": 2}, {"positions": [0, 1], "pages": [1, 5]}],
    ids=str,
)
async def test_the_same_chunk_with_other_pages_fails_the_room_and_drains_it(change: dict[str, Any]) -> None:
    """A preempted request comes back with other pages while its first chunks are still in flight."""
    async with scene() as cluster:
        hold = faulty(cluster).add(Fault(hold=True))
        handle = cluster.decode().expect(1, 0, cluster.addresses, np.arange(10), total_tokens=40, aux_slot=1)
        fields: dict[str, Any] = {"room": 1, "pages": [1, 2], "end_token": 8}
        cluster.forward([ChunkSpec(**fields)])
        cluster.forward([ChunkSpec(room=1, start_token=8, pages=[3])])
        await until(lambda: faulty(cluster).pending >= 2)
        cluster.forward([ChunkSpec(**fields)])
        await idle_turns()
        assert not cluster.prefill().poll(1).ended, "the same chunk is one"
        cluster.forward([ChunkSpec(**fields | change)])
        await until(lambda: cluster.prefill().poll(1) is RoomStatus.FAILED)
        assert isinstance(cluster.prefill().result(1).error, MismatchError)
        assert not cluster.prefill().source_free(1)
        hold.release()
        _, decode = await outcomes(cluster, handle)
        assert "other pages" in str(decode.error)
        await until(lambda: cluster.balanced() == [], "all chunks have drained")
        assert cluster.forward([ChunkSpec(**fields)]).refused


@pytest.mark.row("A9", "C5", "C4", "A16")
@both_modes
@pytest.mark.parametrize("who", ["prefill", "decode"])
async def test_dropping_a_room_drains_all_its_chunks(layerwise: bool, who: str) -> None:
    """Three chunks with batches in flight, one that waits for its forward: nothing is free until all are terminal."""
    src, dst = Pool(seed=1), Pool()
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        engine = faulty(cluster)
        holds = [engine.add(Fault(to_pages(dst, ints(40 + n)), hold=True)) for n in range(3)]
        handle = cluster.decode().expect(1, 0, cluster.addresses, np.arange(40, 50), total_tokens=40)
        for number in range(3):
            cluster.forward([ChunkSpec(room=1, start_token=4 * number, pages=[number])])
        forward = cluster.prefill().begin_forward([ChunkSpec(room=1, start_token=12, pages=[3])])
        room = await live(cluster, 1)
        await until(lambda: len(room.chunks) == 4)
        await until(lambda: all(room.chunks[4 * n].outstanding for n in range(3)), "three are in flight")
        attempts = engine.attempts
        cluster.prefill().abort(1) if who == "prefill" else handle.abort()
        await until(lambda: cluster.prefill().poll(1) is RoomStatus.FAILED)
        for layer in range(4):
            forward.layer_end(layer)
        forward.end()
        for n in (1, 2, 0):
            await until(lambda: handle.poll().ended)
            await idle_turns()
            assert not cluster.prefill().source_free(1)
            assert not handle.units_free()
            holds[n].release()
        await outcomes(cluster, handle)
        await until(handle.units_free, "all of it is quiet")
        assert engine.attempts == attempts, "nothing was submitted after the end"
        assert cluster.balanced() == []


# -- A14: once ----------------------------------------------------------------------------------------------------


@pytest.mark.row("A14", "A16")
@both_modes
@pytest.mark.parametrize("late", [False, True], ids=["offer first", "offer last"])
async def test_aux_and_state_go_once_and_with_the_last_chunk(layerwise: bool, late: bool) -> None:
    src, dst = Pool(seed=1, state_rows=6), Pool(state_rows=6)
    async with scene(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:

        def expect() -> RoomHandle:
            return cluster.decode().expect(
                1, 0, cluster.addresses, np.arange(40, 46), total_tokens=24, aux_slot=2, state_rows=[5, 0, 1]
            )

        handle = None if late else expect()
        room = await live(cluster, 1) if handle else None
        for span in chunk_ranges(24, 8, PAGE):
            more: dict[str, Any] = {"aux_slot": 4, "state_rows": [2, 3, 0]} if span.last else {}
            cluster.forward([chunk_of(span, np.arange(6), **more)])
            if room is not None and not span.last:
                await until(lambda: room.concluded_chunks == len(room.chunks) > 0)
                kinds = {kind for kind, _, _ in written(faulty(cluster).log, dst.layout)}
                assert kinds.isdisjoint({"aux", "state"})
        prefill, decode = await outcomes(cluster, handle or expect())
        want = once(expected_items(dst.layout, range(40, 46), [2], [5, 0, 1]))
        assert written(faulty(cluster).log, dst.layout) == want
        assert prefill.bytes == decode.bytes == faulty(cluster).submitted_bytes
        assert np.array_equal(src.arrays["aux", 0][4], dst.arrays["aux", 0][2])
        assert np.array_equal(src.arrays["state", 0][[2, 3, 0]], dst.arrays["state", 0][[5, 0, 1]])


@pytest.mark.row("A14")
async def test_aux_is_read_when_the_pass_has_ended() -> None:
    """Its content is final then, and not before: it goes behind the end event."""
    device, src, dst = FakeDevice(), Pool(), Pool()
    async with scene(prefills=[src], decodes=[dst], events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, [5], total_tokens=4, aux_slot=2)
        forward = cluster.prefill().begin_forward([spec(1, ints(1), aux_slot=4)])
        LateModel(src, device).forward(forward, ints(1), 4)
        device.step(4)
        room = await live(cluster, 1)
        await until(lambda: len(room.spans) == 2 and room.outstanding == 0)
        assert (dst.arrays["aux", 0] == POISON).all()
        src.arrays["aux", 0][4] = 77
        device.run()
        await outcomes(cluster, handle)
        assert (dst.arrays["aux", 0][2] == 77).all()
