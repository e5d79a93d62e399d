"""Chunks of a prompt, through whole transfers: what each sends, where to, how often, in which order they conclude."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from orchestrator.chunk import Chunk, ChunkSpec
from orchestrator.decode import RoomHandle
from orchestrator.engines.faulty import EVERY, Fault, Match
from orchestrator.outcome import RoomStatus
from orchestrator.pages.ownership import owned_pages
from orchestrator.pages.ranges import ChunkCursor, Range, chunk_ranges
from orchestrator.pages.tables import mask_table
from orchestrator.prefill_room import PrefillRoom
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import POISON, Pool
from protocols.blocks import Blocks, Ints
from protocols.errors import MismatchError, TransferError
from protocols.ids import Session
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
    quarantined,
    sender,
    spec,
    taken,
    wrapped,
    written,
)
from tests.support.waiting import until, within

PAGE = 4
"""Tokens of a page, unless a test says otherwise."""


def scene(**changes: Any) -> Cluster:
    """One prefill whose engine logs what it is given, one decode."""
    fields: dict[str, Any] = {"prefills": [Pool(seed=1)], "decodes": [Pool()], "config": config(), "wrap": wrapped()}
    return Cluster(**fields | changes)


def pages_of(span: Range, table: Ints, page_size: int = PAGE) -> Ints:
    """The source pages of a range."""
    first, count = span.positions(page_size)
    return table[first : first + count]


def chunk_of(span: Range, table: Ints, page_size: int = PAGE, **more: Any) -> ChunkSpec:
    return ChunkSpec(
        room=1,
        start_token=span.start_token,
        end_token=span.end_token,
        pages=pages_of(span, table, page_size),
        last=span.last,
        **more,
    )


def to_pages(layout_of: Pool, pages: Ints) -> Match:
    """Match submissions that write one of these pages of a destination."""
    low, high = [], []
    for buffer in layout_of.layout.unit_buffers("page"):
        low += [buffer.address + page * buffer.item_len for page in pages.tolist()]
        high += [buffer.address + (page + 1) * buffer.item_len for page in pages.tolist()]
    spans = list(zip(low, high, strict=True))

    def match(session: Session, blocks: Blocks, ordinal: int) -> bool:
        return any(a <= dst < b for dst in blocks.dst.tolist() for a, b in spans)

    return match


@pytest.fixture
def concluded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(room, start token) of every chunk that concludes, in order."""
    order: list[tuple[int, int]] = []
    real = PrefillRoom.concluded

    def spy(room: PrefillRoom, chunk: Chunk) -> None:
        order.append((room.key.room, chunk.key.start_token))
        real(room, chunk)

    monkeypatch.setattr(PrefillRoom, "concluded", spy)
    return order


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
