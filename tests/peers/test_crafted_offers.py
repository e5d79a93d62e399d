"""Addresses and units that a peer may not name (E5)."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import POISON, Pool
from protocols.blocks import Blocks, check_units
from protocols.codec import pack_indices
from protocols.errors import LayoutError, MismatchError
from protocols.layout import LayerBuffer
from protocols.messages import Abort, AbortAck, Units
from tests.peers.raw import RawDecode
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    TOKENS,
    buffers,
    cluster,
    engine_of,
    expect,
    raw_decode,
    receiver,
    spec,
)
from tests.support.waiting import until

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
