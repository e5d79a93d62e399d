"""What two workers must agree on, where bytes may go, and what a decode believes of a Done (E3, E5, E7, N5)."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.engines.faulty import Fault
from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import POISON, Pool
from protocols.blocks import Blocks, check_units
from protocols.codec import pack_indices
from protocols.errors import LayoutError, MismatchError, RefusedError
from protocols.layout import MUST_BE_EQUAL, LayerBuffer, Layout
from protocols.leases import UnitState
from protocols.messages import Abort, AbortAck, Coverage, Done, Hello, Offer, Refused, Units
from tests.peers.raw import RawDecode, RawPrefill
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    TOKENS,
    cluster,
    engine_of,
    expect,
    held,
    landed,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

# -- E3: the layouts ------------------------------------------------------------------------------------------------


def buffers(layout: Layout, change: Callable[[LayerBuffer], LayerBuffer | None]) -> Layout:
    changed = [change(buffer) for buffer in layout.buffers]
    return msgspec.structs.replace(layout, buffers=tuple(buffer for buffer in changed if buffer is not None))


def resized(name: str) -> Callable[[Layout], Layout]:
    def change(buffer: LayerBuffer) -> LayerBuffer:
        half = {"item_len": buffer.item_len // 2, "nbytes": buffer.nbytes // 2}
        return msgspec.structs.replace(buffer, **half) if buffer.name == name else buffer

    return lambda layout: buffers(layout, change)


def without(name: str) -> Callable[[Layout], Layout]:
    return lambda layout: buffers(layout, lambda buffer: None if buffer.name == name else buffer)


def renamed(name: str, **changes: Any) -> Callable[[Layout], Layout]:
    def change(buffer: LayerBuffer) -> LayerBuffer:
        return msgspec.structs.replace(buffer, **changes) if buffer.name == name else buffer

    return lambda layout: buffers(layout, change)


def flipped(field: str) -> Callable[[Layout], Layout]:
    def change(layout: Layout) -> Layout:
        value = getattr(layout, field)
        other = value + "-2" if isinstance(value, str) else value * 2 or 2
        return msgspec.structs.replace(layout, **{field: other})

    return change


DIFFERENT: dict[str, tuple[Callable[[Layout], Layout], str]] = {
    **{field: (flipped(field), field) for field in MUST_BE_EQUAL},
    "item_len of a layer": (resized("k[1]"), "k[1]"),
    "item_len of aux": (resized("aux[0]"), "aux[0]"),
    "a layer more on the prefill": (without("v[3]"), "v[3]"),
    "a draft layer more on the prefill": (without("draft_k[4]"), "draft_k[4]"),
    "aux on the prefill only": (without("aux[0]"), "aux[0]"),
    "another layer": (renamed("v[3]", layer=9), "v[3]"),
    "another kind": (renamed("v[3]", kind="w"), "w[3]"),
}
UNSUPPORTED: dict[str, tuple[Callable[[Layout], Layout], str, str]] = {
    "decode cp": (
        lambda layout: msgspec.structs.replace(layout, cp_size=2, cp_mode="zigzag"),
        "cp_size",
        "decode rank with context parallelism",
    ),
    "tp of mha": (lambda layout: msgspec.structs.replace(layout, tp_size=2), "prefill", "head slicing"),
    "tp rank of mha": (lambda layout: msgspec.structs.replace(layout, tp_size=2, tp_rank=1), "decode", "head slicing"),
    "pp": (lambda layout: msgspec.structs.replace(layout, pp_size=3), "decode", "pipeline stages"),
}


@pytest.mark.row("E3")
@pytest.mark.parametrize("name", DIFFERENT)
async def test_a_difference_is_refused_on_both_sides_by_its_name(name: str) -> None:
    change, field = DIFFERENT[name]
    other = Pool()
    other.layout = change(other.layout)
    async with cluster(decodes=[other, Pool()]) as c:
        fitting: dict[str, Any] = {"page_size": {"pages": [1, 2]}, "aux on the prefill only": {"aux_slot": None}}
        result = await asyncio.wait_for(expect(c, **fitting.get(name, {})), SOON)
        assert result.error is not None
        assert isinstance(result.error.__cause__, RefusedError)
        assert field in str(result.error)
        assert sender(c).counters["hello_refused"] == 1
        assert engine_of(c).attempts == 0
        handle = expect(c, number=1)
        c.forward([spec(room=5)])
        assert (await handle).ok, "a decode that fits is served"
        # Each side sees it by itself, were the other blind.
        decode = RawDecode(c.network, c.addresses[0], change(Pool().layout))
        decode.send(decode.hello(), dst=b"")
        assert field in (await decode.hear(Refused)).fields
        prefill = RawPrefill(c.network, Pool().layout)
        again = expect(c, gen=2, peers=[prefill.address], **fitting.get(name, {}))
        error = (await asyncio.wait_for(again, SOON)).error
        assert error is not None
        assert field in str(error)
        assert not prefill.all(Offer)


@pytest.mark.row("E3")
@pytest.mark.parametrize("name", UNSUPPORTED)
async def test_what_is_not_supported_is_refused_with_the_reason(name: str) -> None:
    change, field, reason = UNSUPPORTED[name]
    other = Pool()
    other.layout = change(other.layout)
    async with cluster(decodes=[other]) as c:
        error = (await asyncio.wait_for(expect(c), SOON)).error
        assert error is not None
        assert reason in str(error)
        assert field in error.data
        decode = RawDecode(c.network, c.addresses[0], other.layout)
        decode.send(decode.hello(), dst=b"")
        refused = await decode.hear(Refused)
        assert reason in refused.reason
        assert field in refused.fields


@pytest.mark.row("E3")
async def test_an_interleaved_prefill_is_refused_by_the_decode() -> None:
    odd = Pool(seed=1, cp_size=2, cp_mode="interleaved")
    async with cluster(prefills=[odd]) as c:
        error = (await asyncio.wait_for(expect(c), SOON)).error
        assert error is not None
        assert "below page grain" in str(error)
        assert "interleaved" in str(error)


@pytest.mark.row("E3")
async def test_a_fingerprint_is_the_same_for_every_rank_and_another_for_every_flip() -> None:
    layout = Pool().layout
    ranks = [msgspec.structs.replace(layout, tp_rank=rank, tp_size=4, buffers=()) for rank in range(4)]
    assert {rank.fingerprint for rank in ranks} == {layout.fingerprint}
    prints = {DIFFERENT[field][0](layout).fingerprint for field in MUST_BE_EQUAL}
    assert len(prints | {layout.fingerprint}) == len(MUST_BE_EQUAL) + 1


# -- E5: addresses ---------------------------------------------------------------------------------------------------

WILD: dict[str, tuple[dict[str, Any], str]] = {
    "a page beyond the pool": ({"pages": [1, 2, 3, 64]}, "outside the registered region"),
    "a page far beyond": ({"pages": [1, 2, 3, 2**31 - 1]}, "outside the registered region"),
    "a negative page": ({"pages": [1, 2, 3, -1]}, "negative"),
    "a page twice": ({"pages": [1, 2, 3, 2]}, "duplicate destination pages"),
    "a page too many": ({"pages": [1, 2, 3, 9, 10]}, "disagree about the request's length"),
    "a page too few": ({"pages": [1, 2, 3]}, "disagree about the request's length"),
    "no pages": ({"pages": []}, "disagree about the request's length"),
    "half a page number": ({"raw": b"\1\0\0"}, "torn"),
    "a slot beyond the pool": ({"aux_slot": 8}, "aux slots outside"),
    "a slot of 63 bits": ({"aux_slot": 2**63 - 1}, "aux slots outside"),
    "no slot": ({"aux_slot": None}, "only one side has an aux slot"),
    "a row where there are none": ({"state_rows": pack_indices(np.array([0]))}, "state rows outside"),
    "a prefix within a page": ({"prefix_tokens": 2}, "whole number of pages"),
    "a prefix beyond the request": ({"prefix_tokens": 16}, "not longer than the request"),
    "another length": ({"total_tokens": 13}, "disagree about the request's length"),
    "a length of 63 bits": ({"total_tokens": 2**63 - 1}, "disagree about the request's length"),
    "a prefix that shifts the pages": ({"prefix_tokens": 4, "pages": [1, 2, 3, 9]}, "disagree about the request's"),
}


@pytest.mark.row("E5", "E1")
@pytest.mark.parametrize("order", ["offer first", "registration first"])
@pytest.mark.parametrize("name", WILD)
async def test_a_crafted_offer_writes_nothing_and_hurts_nobody(name: str, order: str) -> None:
    changes, reason = WILD[name]
    changes = dict(changes)
    async with cluster() as c:
        bystander = expect(c, room=7)
        raw = await raw_decode(c)
        offer = raw.offer(5, 1, changes.pop("pages", DST), **{"total_tokens": TOKENS, "aux_slot": 2})
        if "raw" in changes:
            changes["pages"] = changes.pop("raw")
        if order == "registration first":
            c.forward([spec()])
        raw.send(msgspec.structs.replace(offer, **changes))
        await raw.flushed()
        if order == "offer first":
            c.forward([spec()])
        abort, ack = await raw.hear(Abort, 5), await raw.hear(AbortAck, 5)
        assert reason in abort.reason
        assert ack.unknown == ack.in_doubt == Units()
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED
        assert c.prefill().source_free(*KEY)
        blocks = [entry for entry in engine_of(c).log if entry.session == raw.session]
        assert not blocks or name == "no slot", "aux goes last: pages may have landed, all within the offer"
        assert raw.pool.untouched(np.array(DST if blocks else [], np.int64))
        c.forward([spec(room=7)])
        assert (await bystander).ok
        await until(lambda: c.balanced() == [])


@pytest.mark.row("E5", "B4")
@pytest.mark.parametrize("lie", ["another address", "a larger pool"])
async def test_a_hello_that_lies_about_memory_reaches_none(lie: str) -> None:
    """The engine of the decode registered something else than its Hello says: every such write is refused there."""
    async with cluster() as c:
        bystander = expect(c, room=7)
        pool = Pool(pages=64)
        outside = np.full(1 << 20, POISON, np.uint8)
        engine = c.fabric.engine()
        for buffer in pool.layout.buffers:
            engine.register(buffer.address, buffer.nbytes)

        def move(buffer: LayerBuffer) -> LayerBuffer:
            if buffer.unit != "page":
                return buffer
            if lie == "another address":
                return msgspec.structs.replace(buffer, address=int(outside.ctypes.data) + 8192 * buffer.id)
            return msgspec.structs.replace(buffer, nbytes=buffer.nbytes << 20)

        raw = RawDecode(c.network, c.addresses[0], buffers(pool.layout, move), engine.session)
        await raw.connect()
        pages = DST if lie == "another address" else [page << 23 for page in (1, 2, 3, 4)]
        raw.send(raw.offer(5, 1, pages, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec()])
        assert "not registered" in (await raw.hear(Abort, 5)).reason
        assert (await raw.hear(AbortAck, 5)).in_doubt.pages
        assert (outside == POISON).all()
        assert pool.untouched(np.array([], np.int64))
        c.forward([spec(room=7)])
        assert (await bystander).ok


@pytest.mark.row("E5")
@pytest.mark.parametrize(
    "changes",
    [
        {"pages": [1, 2, 3, 64]},
        {"pages": [1, 2, 3, 3]},
        {"pages": [1, 2, 3, -1]},
        {"pages": [1, 2, 3]},
        {"pages": [1.5, 2, 3, 4]},
        {"aux_slot": 8},
        {"aux_slot": -1},
        {"state_rows": [0]},
        {"prefix_tokens": 2},
        {"prefix_tokens": 16},
        {"total_tokens": 17},
    ],
)
async def test_the_decode_refuses_its_own_mistake_before_it_leases_anything(changes: dict[str, Any]) -> None:
    async with cluster() as c:
        with pytest.raises((LayoutError, MismatchError)):
            expect(c, **changes)
        assert receiver(c).book.taken() == 0
        handle = expect(c)
        c.forward([spec()])
        assert (await handle).ok, "nor was the key used"


@pytest.mark.row("E5", "C3")
@pytest.mark.parametrize(
    "changes", [{"pages": [4, 5, 6, 64]}, {"pages": [4, 5, 6, 6]}, {"pages": [4, 5, 6, -1]}, {"aux_slot": 8}]
)
async def test_a_source_outside_the_pool_is_read_by_nobody(changes: dict[str, Any]) -> None:
    async with cluster() as c:
        handle = expect(c)
        c.forward([spec(**changes)])
        assert not (await asyncio.wait_for(handle, SOON)).ok
        await until(lambda: c.prefill().source_free(*KEY) and handle.units_free())
        blocks = Blocks.join([entry.blocks for entry in engine_of(c).log])
        regions = [(b.address, b.address + b.nbytes) for b in c.prefill_pools[0].layout.buffers]
        for first, length in zip(blocks.src.tolist(), blocks.length.tolist(), strict=True):
            assert any(start <= first and first + length <= end for start, end in regions)


@pytest.mark.row("E5")
def test_checking_a_page_list_takes_no_longer_than_a_callback_may() -> None:
    pages = np.random.default_rng(1).permutation(1_000_000)[:100_000].astype(np.int64)
    check_units(pages, 1_000_000, "pages")
    before = time.thread_time()
    check_units(pages, 1_000_000, "pages")
    assert time.thread_time() - before < 0.01
    for limit in (1_000_000, 2**31):  # a mark each, and where that would cost a peer's word in memory
        with pytest.raises(MismatchError, match="duplicate"):
            check_units(np.append(pages, [pages[5]]), limit, "pages")
    check_units(np.array([0, 2**31 - 1, 7]), 2**31, "pages")
    with pytest.raises(MismatchError, match="duplicate"):
        check_units(np.array([0, 2**31 - 1, 7, 0]), 2**31, "pages")


# -- E7: pairs and stages --------------------------------------------------------------------------------------------


def shuffled(pool: Pool, seed: int) -> Pool:
    """The same memory, announced in another order and under other ids."""
    order = list(pool.layout.buffers)
    random.Random(seed).shuffle(order)
    renumbered = tuple(msgspec.structs.replace(buffer, id=100 + 7 * nth) for nth, buffer in enumerate(order))
    pool.layout = msgspec.structs.replace(pool.layout, buffers=renumbered)
    return pool


def aux_equal(src: Pool, dst: Pool) -> bool:
    return bool(np.array_equal(src.arrays[("aux", 0)][1], dst.arrays[("aux", 0)][2]))


@pytest.mark.row("E7", "A16")
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("layers", [range(4), (), (3, 0)])
@pytest.mark.parametrize("seed", [1, 2, 3])
async def test_buffers_pair_by_kind_and_layer(kind: Any, layers: Any, seed: int) -> None:
    src, dst = shuffled(Pool(seed=1, kind=kind, state_rows=4), seed), shuffled(Pool(kind=kind, state_rows=4), seed + 9)
    async with cluster(prefills=[src], decodes=[dst], digest=True) as c:
        handle = expect(c, state_rows=[3, 0])
        c.forward([spec(state_rows=[1, 2])], layers=layers)
        assert (await handle).ok
        assert landed(src, dst)
        assert dst.untouched(np.array(DST))
        assert aux_equal(src, dst)
        assert np.array_equal(src.arrays[("state", 0)][[1, 2]], dst.arrays[("state", 0)][[3, 0]])


def stage_of(number: int, owned: range, *, with_aux: bool, **changes: Any) -> Pool:
    return Pool(seed=number + 1, own_layers=owned, with_aux=with_aux, pp_rank=number, pp_size=2, **changes)


def forward_stage(c: Any, number: int, owned: range, *, aux: bool) -> None:
    chunk = spec(aux_slot=1 if aux else None)
    c.forward([chunk], prefill=number, layers=[layer for layer in owned if layer < 4])


@pytest.mark.row("E7", "N5")
@pytest.mark.parametrize("cut", [1, 2, 4])
async def test_two_stages_address_their_slices_of_one_decode(cut: int) -> None:
    slices = [range(cut), range(cut, 5)]
    stages = [shuffled(stage_of(nth, owned, with_aux=nth == 1), nth) for nth, owned in enumerate(slices)]
    dst = shuffled(Pool(), 5)
    async with cluster(prefills=stages, decodes=[dst], digest=True) as c:
        handle = expect(c)
        for nth, owned in enumerate(slices):
            assert not handle.poll().ended
            forward_stage(c, nth, owned, aux=nth == 1)
            if nth == 0:
                await until(lambda: "done=1/2" in repr(receiver(c).rooms.live(KEY)))
                assert not landed(stages[1], dst)
        result = await handle
        assert result.ok
        assert all(landed(stage, dst) for stage in stages)
        assert dst.untouched(np.array(DST))
        assert aux_equal(stages[1], dst)
        sent = [(await prefill.finished(*KEY)).bytes or 0 for prefill in c.prefills]
        assert result.bytes == sum(sent)


@pytest.mark.row("E7")
async def test_a_stage_of_the_decode_takes_from_its_own_stage_only() -> None:
    slices = [range(2), range(2, 5)]
    sources = [stage_of(nth, owned, with_aux=True) for nth, owned in enumerate(slices)]
    targets = [Pool(own_layers=owned, pp_rank=nth, pp_size=2) for nth, owned in enumerate(slices)]
    async with cluster(prefills=sources, decodes=targets, digest=True) as c:
        handles = [expect(c, number=nth, peers=[c.addresses[nth]]) for nth in range(2)]
        for nth, owned in enumerate(slices):
            forward_stage(c, nth, owned, aux=True)
        for nth, handle in enumerate(handles):
            assert (await handle).ok
            assert landed(sources[nth], targets[nth])
        crossed = await asyncio.wait_for(expect(c, gen=2, peers=[c.addresses[1]]), SOON)
        assert "pipeline stages" in str(crossed.error)


@pytest.mark.row("E7", "N5")
async def test_two_stages_that_both_write_the_aux_slot_do_not_commit() -> None:
    slices = [range(2), range(2, 5)]
    stages = [stage_of(nth, owned, with_aux=True) for nth, owned in enumerate(slices)]
    async with cluster(prefills=stages) as c:
        handle = expect(c)
        for nth, owned in enumerate(slices):
            forward_stage(c, nth, owned, aux=True)
        error = (await asyncio.wait_for(handle, SOON)).error
        assert isinstance(error, MismatchError)
        await until(lambda: all(prefill.poll(*KEY) is RoomStatus.FAILED for prefill in c.prefills))
        await until(handle.units_free)


@pytest.mark.row("E7", "N5")
async def test_a_missing_stage_is_a_gap() -> None:
    async with cluster(prefills=[stage_of(0, range(2), with_aux=False)]) as c:
        handle = expect(c)
        forward_stage(c, 0, range(2), aux=False)
        error = (await asyncio.wait_for(handle, SOON)).error
        assert isinstance(error, MismatchError)
        assert "gap" in str(error)
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED


@pytest.mark.row("A11", "E7")
async def test_a_replicated_latent_goes_to_every_decode_rank() -> None:
    src = Pool(seed=1, kind="mla")
    ranks = [Pool(kind="mla", tp_rank=rank, tp_size=2) for rank in range(2)]
    pages = [DST, [30, 11, 12, 7]]
    async with cluster(prefills=[src], decodes=ranks, digest=True) as c:
        handles = [expect(c, number=rank, pages=pages[rank], destinations=2) for rank in range(2)]
        c.forward([spec()])
        for rank, handle in enumerate(handles):
            result = await handle
            assert result.ok
            assert landed(src, ranks[rank], twins=pages[rank])
            assert ranks[rank].untouched(np.array(pages[rank]))
            assert aux_equal(src, ranks[rank])
        sent = await c.prefill().finished(*KEY)
        assert sent.bytes == 2 * (result.bytes or 0)


@pytest.mark.row("A11", "E7")
async def test_of_replicated_prefill_ranks_one_sends_and_the_others_only_know() -> None:
    sources = [Pool(seed=1, kind="mla", tp_rank=rank, tp_size=2) for rank in range(2)]
    dst = Pool(kind="mla")
    async with cluster(prefills=sources, decodes=[dst], digest=True) as c:
        handle = expect(c, peers=c.addresses[:1], dummy_peers=c.addresses[1:])
        for number in range(2):
            c.forward([spec()], prefill=number)
        assert (await handle).ok
        assert landed(sources[0], dst)
        results = [await prefill.finished(*KEY) for prefill in c.prefills]
        assert [result.ok for result in results] == [True, True]
        assert results[1].bytes is None
        assert engine_of(c, 1).attempts == 0


# -- the coverage rule -----------------------------------------------------------------------------------------------

Told = tuple[Coverage, ...]


def edit(**changes: Any) -> Callable[[Told], Told]:
    """The first buffer's entry, changed."""
    return lambda told: (msgspec.structs.replace(told[0], **changes), *told[1:])


def aux_of(told: Told) -> Coverage:
    return told[-1]


LIES: dict[str, Callable[[Told], Told]] = {
    "nothing": lambda told: (),
    "a buffer missing": lambda told: told[1:],
    "the draft buffers missing": lambda told: told[:8] + told[10:],
    "the aux slot missing": lambda told: told[:-1],
    "the aux slot twice": lambda told: (*told, aux_of(told)),
    "another aux position": lambda told: (*told[:-1], msgspec.structs.replace(aux_of(told), runs=((1, 1),))),
    "the first page missing": edit(runs=((1, 3),)),
    "a page missing within": edit(runs=((0, 1), (2, 2))),
    "the last page missing": edit(runs=((0, 3),)),
    "chunk 1 over chunk 0": edit(runs=((0, 2), (0, 2))),
    "chunk 0 twice and chunk 1": edit(runs=((0, 2), (0, 2), (2, 2))),
    "a page twice": edit(runs=((0, 4), (3, 1))),
    "a page beyond": edit(runs=((0, 5),)),
    "far beyond": edit(runs=((2**62, 4),)),
    "one page of many times": edit(runs=((0, 1),) * 4),
    "half of each page": edit(length=32),
    "the second half of each page": edit(offset=32, length=32),
    "two halves": lambda told: (
        msgspec.structs.replace(told[0], length=32),
        msgspec.structs.replace(told[0], offset=32, length=32),
        *told[1:],
    ),
    "longer than a page": edit(length=128),
    "an unknown buffer": edit(buffers=(999,)),
    "the scratch buffer too": edit(buffers=(0, 11)),
    "the same buffer twice": edit(buffers=(0, 0)),
    "another buffer twice": edit(buffers=(1,)),
}


@pytest.mark.row("N5")
@pytest.mark.parametrize("name", LIES)
async def test_a_lie_about_what_landed_is_never_committed(name: str) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        truth = raw.coverage(offer)
        assert len(truth) == 11
        raw.done(offer, LIES[name](truth), bytes=2592, blocks=21)  # the totals are right, as always
        error = (await asyncio.wait_for(handle, SOON)).error
        assert isinstance(error, MismatchError)
        assert "coverage" in str(error)
        assert "coverage" in (await raw.hear(Abort, 5)).reason
        raw.done(offer)
        await raw.flushed()
        assert handle.poll() is RoomStatus.FAILED, "it had its word"


@pytest.mark.row("N5")
async def test_the_truth_is_committed_however_it_is_put() -> None:
    ways: list[Callable[[Told], Told]] = [
        lambda told: told,
        lambda told: tuple(reversed(told)),
        edit(runs=((2, 2), (0, 2))),
        lambda told: (
            msgspec.structs.replace(told[0], buffers=tuple(range(10))),
            msgspec.structs.replace(told[0], buffers=()),
            aux_of(told),
        ),
        lambda told: tuple(
            msgspec.structs.replace(entry, runs=(run,)) for entry in told for run in split_runs(entry.runs)
        ),
    ]
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        for gen, way in enumerate(ways):
            handle = expect(c, gen=gen, peers=[raw.address])
            offer = await raw.hear(Offer, nth=gen)
            raw.done(offer, way(raw.coverage(offer)))
            assert (await asyncio.wait_for(handle, SOON)).ok


def split_runs(runs: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return [(first + nth, 1) for first, count in runs for nth in range(count)]


@pytest.mark.row("N5")
@pytest.mark.parametrize("runs, good", [(((0, 3),), False), (((1, 3),), True), (((0, 1), (1, 3)), False)])
async def test_what_the_decode_has_already_is_not_covered_again(runs: Any, good: bool) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address], prefix_tokens=4, pages=[1, 2, 3])
        offer = await raw.hear(Offer)
        truth = raw.coverage(offer)
        assert truth[0].runs == ((1, 3),)
        raw.done(offer, (msgspec.structs.replace(truth[0], runs=runs), *truth[1:]))
        assert (await asyncio.wait_for(handle, SOON)).ok is good


@pytest.mark.row("N5", "C1")
@pytest.mark.parametrize(
    "first, second, good",
    [
        ("all", "nothing", True),
        ("all", "all", False),
        ("first half", "second half", True),
        ("first half", "first half", False),
        ("first half", "nothing", False),
    ],
)
async def test_the_union_of_all_ranks_must_be_the_list(first: str, second: str, good: bool) -> None:
    async with cluster() as c:
        ranks = [RawPrefill(c.network, Pool().layout) for _ in range(2)]
        handle = expect(c, peers=[rank.address for rank in ranks])
        for rank, told in zip(ranks, (first, second), strict=True):
            offer = await rank.hear(Offer)
            truth = rank.coverage(offer)
            halves = {"all": truth, "nothing": (), "first half": truth[:5], "second half": truth[5:]}
            rank.done(offer, halves[told])
            await rank.flushed()
            assert handle.poll().ended is (rank is ranks[1]), "one rank's word is not enough"
        assert (await handle).ok is good


@pytest.mark.row("N5", "C7")
async def test_done_is_heard_once_and_of_its_own_room() -> None:
    async with cluster() as c:
        raw, other = RawPrefill(c.network, Pool().layout), RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address, other.address])
        offer = await raw.hear(Offer)
        truth = raw.coverage(offer)
        raw.done(offer, truth[:5])
        raw.done(offer, truth[5:])  # nothing may be added afterwards
        for room, gen in ((6, 1), (5, 2)):
            other.send(Done(room=room, gen=gen, status="ok", coverage=truth))
        await raw.flushed()
        await other.flushed()
        assert not handle.poll().ended
        other.done(await other.hear(Offer), ())
        assert isinstance((await asyncio.wait_for(handle, SOON)).error, MismatchError)
        assert held(receiver(c), UnitState.LEASED) == {}


MOVES: dict[str, Callable[[Blocks], Blocks]] = {
    "dropped": lambda blocks: blocks[1:],
    "swapped": lambda blocks: Blocks(blocks.src[::-1], blocks.dst, blocks.length),
    "one page further": lambda blocks: Blocks(blocks.src, blocks.dst + 64, blocks.length),
    "cut short": lambda blocks: Blocks(blocks.src, blocks.dst, blocks.length // 2),
}


@pytest.mark.row("N5")
@pytest.mark.parametrize("name", MOVES)
async def test_with_digests_an_engine_that_lies_is_found_out(name: str) -> None:
    """The control experiment: coverage believes the engine, the digest does not."""
    src, dst = Pool(seed=1), Pool()
    for digest in (False, True):
        dst.poison()
        fault = Fault(lambda session, blocks, ordinal: len(blocks) > 2, rewrite=MOVES[name])
        async with cluster(fault, prefills=[src], decodes=[dst], digest=digest) as c:
            handle = expect(c)
            c.forward([spec()])
            result = await asyncio.wait_for(handle, SOON)
            assert not landed(src, dst)
            assert result.ok is not digest
            assert (await asyncio.wait_for(c.prefill().finished(*KEY), SOON)).ok is not digest


@pytest.mark.row("N5", "A3")
async def test_a_chunk_written_over_the_one_before_is_found_out() -> None:
    src, dst = Pool(seed=1), Pool()
    first = {buffer.address for buffer in dst.layout.unit_buffers("page")}

    def over(blocks: Blocks) -> Blocks:
        return Blocks(blocks.src, blocks.dst - 2 * 64, blocks.length)

    fault = Fault(lambda session, blocks, ordinal: int(blocks.dst[0]) - 3 * 64 in first, rewrite=over)
    async with cluster(fault, prefills=[src], decodes=[dst], digest=True) as c:
        handle = expect(c, pages=[1, 2, 3, 4], total_tokens=16)
        c.forward([spec(pages=[4, 5], last=False, end_token=8, aux_slot=None)])
        c.forward([spec(pages=[6, 7], start_token=8, end_token=16)])
        error = (await asyncio.wait_for(handle, SOON)).error
        assert isinstance(error, MismatchError)
        assert not (await asyncio.wait_for(c.prefill().finished(*KEY), SOON)).ok


@pytest.mark.row("E3")
async def test_a_hello_says_who_it_is() -> None:
    async with cluster() as c:
        hello = await asyncio.to_thread(c.decode().check, c.addresses[0])
        assert isinstance(hello, Hello)
        assert hello.fingerprint == c.prefill_pools[0].layout.fingerprint
        assert hello.layout == c.prefill_pools[0].layout
