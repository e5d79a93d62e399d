"""What two workers must agree on, where bytes may go, and what a decode believes of a Done (E3, E5, E7, N5)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.errors import MismatchError, RefusedError
from protocols.layout import MUST_BE_EQUAL, LayerBuffer, Layout
from protocols.messages import Offer, Refused
from tests.peers.raw import RawDecode, RawPrefill
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    buffers,
    cluster,
    engine_of,
    expect,
    landed,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

# -- E3: the layouts ------------------------------------------------------------------------------------------------


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
