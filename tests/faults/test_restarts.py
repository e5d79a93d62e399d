"""A worker is killed and another takes its place: same control address, same name."""

from __future__ import annotations

import asyncio
import time

import pytest

from orchestrator.decode import RoomHandle
from orchestrator.trace import TransferResult
from scripts.soaking.process import Worker
from tests.faults.scenes import CONFIG, PAGE, POOL, DecodeHere, PrefillHere, chunks
from tests.support.waiting import until, within

pytestmark = [pytest.mark.mooncake, pytest.mark.timeout(60)]


async def served(prefill: Worker, decode: DecodeHere, room: int, first: int = 0) -> None:
    """The next request works: bytes and all."""
    pages = range(first, first + 4)
    handle = decode.expect(room, 1, prefill.started["address"], pages, slot=room)
    await prefill.call("send", room=room, gen=1, chunks=chunks(4, of=2))
    result = await within(handle)
    assert result.ok, result.error
    assert decode.wrong(room, 1, pages, slot=room) == []
    await prefill.call("freed", room=room, gen=1)
    await prefill.call("recycle", room=room, gen=1)


async def end_of(handle: RoomHandle) -> tuple[TransferResult, float]:
    """How the room ended, and when."""
    result: TransferResult = await within(handle)
    return result, time.monotonic()


@pytest.mark.row("C1", "C4")
@pytest.mark.parametrize("when", ["idle", "sending"])
async def test_a_prefill_restarted_on_its_address_serves_the_next_request(when: str) -> None:
    async with DecodeHere() as decode:
        async with Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG) as first:
            address = first.started["address"]
            await served(first, decode, room=1)
            if when == "sending":
                lost = decode.expect(2, 1, address, range(8, 16), slot=2)
                await first.call("send", room=2, gen=1, chunks=chunks(8), hold_after=2)
                await until(lambda: decode.content.strays(range(8, 16)), "its first layers have landed")
        killed = time.monotonic()
        if when == "sending":
            ending = asyncio.create_task(end_of(lost))  # the next process may take longer to start than that
        async with Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG, bind=address) as second:
            if when == "sending":
                result, ended = await ending
                assert not result.ok
                assert ended - killed < CONFIG["silence_s"] + 5.0
            await served(second, decode, room=3)
            await served(second, decode, room=4)
            if when == "sending":
                assert not lost.units_free(), "its writer's death is no fence"
                decode.decode.roll_over()
                await until(lost.units_free)
            assert decode.receiver.book.taken() == 0


@pytest.mark.row("C1", "C3", "C5")
async def test_a_decode_restarted_under_its_name_ends_its_rooms_at_once_and_is_served() -> None:
    """Long before the prefill would have called it silent."""
    settings = CONFIG | {"silence_s": 30.0, "name": "decode-7"}
    async with PrefillHere(silence_s=30.0, bootstrap_timeout_s=60.0) as prefill:
        peers = [prefill.address]
        async with Worker("decode", pool=POOL, config=settings) as first:
            for room in (1, 2):
                await first.call("expect", room=room, gen=1, peers=peers, tokens=8 * PAGE)
                await prefill.offered(room, 1)
            prefill.forward(1, 1, range(8))
            assert (await prefill.ended(1, 1)).ok
        async with Worker("decode", pool=POOL, config=settings) as second:
            await second.call("expect", room=3, gen=1, peers=peers, tokens=8 * PAGE)
            result = await prefill.ended(2, 1)
            assert "the decode worker was restarted" in str(result.error)
            prefill.forward(3, 1, range(8, 16), slot=1)
            assert (await second.call("ended", room=3, gen=1))["ok"]
            assert await second.call("wrong", room=3, gen=1) == []
            assert len(prefill.sender.reception.links) == 1
            assert len(prefill.sender.sessions.lanes) == 1
