"""Room ids that come again, offers that nobody waits for, ranks too many: the first is unharmed, the other is told."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from orchestrator.engines.faulty import Fault, nth
from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.errors import BusyError
from protocols.ids import RoomKey
from protocols.leases import UnitState
from protocols.messages import Abort, AbortAck, Done, Units
from tests.peers.raw import QUICK, RawDecode, settled
from tests.peers.scenes import (
    DST,
    KEY,
    TOKENS,
    cluster,
    expect,
    held,
    landed,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

NEXT = RoomKey(5, 2)


def whole(raw: RawDecode, gen: int = 1, room: int = 5, pages: list[int] | None = None, **changes: Any) -> None:
    """Offer the room of these tests."""
    raw.send(raw.offer(room, gen, pages or DST, **{"total_tokens": TOKENS, "aux_slot": 2} | changes))


@pytest.mark.row("C2", "C4", "C6")
@pytest.mark.parametrize("heard_first_by", ["decode", "prefill"])
async def test_a_higher_generation_ends_a_live_lower_one(heard_first_by: str) -> None:
    hold = Fault(nth(0), hold=True)
    src, dst = Pool(seed=1), Pool()
    async with cluster(hold, prefills=[src], decodes=[dst]) as c:
        older = expect(c)
        c.forward([spec()])
        await until(lambda: sender(c).engine.pending > 0)
        if heard_first_by == "prefill":
            c.forward([spec(gen=2)])
            assert "superseded" in str((await older).error)
            newer = expect(c, gen=2, pages=[20, 21, 22, 23], aux_slot=3)
        else:
            newer = expect(c, gen=2, pages=[20, 21, 22, 23], aux_slot=3)
            assert "superseded" in str((await older).error)
            c.forward([spec(gen=2)])
        assert (await newer).ok
        assert landed(src, dst, twins=[20, 21, 22, 23])
        assert not c.prefill().source_free(*KEY)
        assert not older.units_free(), "its write is still under way"
        for array in src.arrays.values():
            array += 1  # the next requests' content: generation 1 must not carry it into generation 3's pages
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: older.units_free() and c.prefill().source_free(*KEY))
        third = expect(c, gen=3)
        c.forward([spec(gen=3)])
        assert (await third).ok
        assert landed(src, dst)


@pytest.mark.row("C2", "C5")
async def test_a_lower_generation_is_stale_wherever_it_turns_up() -> None:
    async with cluster(decodes=[Pool(), Pool()]) as c:
        live = expect(c, gen=2)
        await until(lambda: sender(c).rooms.live(NEXT))
        c.forward([spec()])
        await until(lambda: c.prefill().poll(*KEY) is RoomStatus.FAILED)
        assert "newer generation" in str(c.prefill().result(*KEY).error)
        assert c.prefill().source_free(*KEY), "its pages were never read"
        assert c.prefill().begin_forward([spec()]).refused
        stale = expect(c)
        assert "newer generation" in str((await stale).error)
        assert stale.units_free()
        other = expect(c, number=1)  # of another decode, which has not heard of generation 2
        assert "newer generation" in str((await other).error)
        await until(other.units_free)
        c.forward([spec(gen=2)])
        assert (await live).ok
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C5")
async def test_a_superseded_room_that_still_drains_is_not_free_because_it_is_named_again() -> None:
    hold = Fault(nth(0), hold=True)
    async with cluster(hold) as c:
        handle = expect(c)
        c.forward([spec()])
        await until(lambda: sender(c).engine.pending > 0)
        c.forward([spec(gen=2)])
        await handle
        raw = await raw_decode(c)
        whole(raw)
        raw.send(Abort(room=5, gen=1, origin="decode", reason="also named by this"))
        await raw.hear(AbortAck, 5)
        c.forward([spec()])
        await settled()
        assert not c.prefill().source_free(*KEY)
        assert sender(c).rooms.live(KEY) is not None
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: c.prefill().source_free(*KEY))


@pytest.mark.row("C2")
async def test_a_key_is_used_once() -> None:
    config = dataclasses.replace(QUICK, tombstone_s=0.1)
    async with cluster(config=config) as c:
        handle = expect(c)
        with pytest.raises(BusyError, match="is live"):
            expect(c, pages=[30, 31, 32, 33])
        c.forward([spec()])
        assert (await handle).ok, "the first is unharmed"
        await until(lambda: c.prefill().source_free(*KEY))
        with pytest.raises(BusyError, match="ended recently"):
            expect(c)
        assert "has ended" in c.forward([spec()]).refused[0]
        await until(lambda: sender(c).rooms.verdict(KEY) is None and receiver(c).rooms.verdict(KEY) is None)
        again = expect(c)
        c.forward([spec()])
        assert (await again).ok, "after the tombstone it is a new room"


@pytest.mark.row("C7", "E5")
async def test_the_first_offer_of_a_rank_stands() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        whole(raw)
        whole(raw)  # the same once more
        whole(raw, pages=[20, 21, 22, 23])
        whole(raw, total_tokens=15)
        await raw.flushed()
        assert (sender(c).counters["repeated_offers"], sender(c).counters["other_offers"]) == (1, 2)
        c.forward([spec()])
        done = await raw.hear(Done, 5)
        assert (done.status, sum(count for cover in done.coverage for _, count in cover.runs)) == ("ok", 5)
        assert not raw.all(Abort)


@pytest.mark.row("C7", "A11")
@pytest.mark.parametrize("when", ["before the registration", "while sending", "while committing"])
async def test_a_destination_too_many_is_turned_away_and_the_first_is_unharmed(when: str) -> None:
    first, surplus = Pool(), Pool()
    hold = Fault(hold=when == "while sending")
    async with cluster(hold, decodes=[first, surplus]) as c:
        handle = expect(c)
        await until(lambda: sender(c).rooms.live(KEY))
        if when == "while committing":
            raw = await raw_decode(c)
            handle.abort()
            await until(handle.units_free)
            whole(raw, gen=2)
            c.forward([spec(gen=2)])
            await raw.hear(Done)
            other = expect(c, number=1, gen=2)
        else:
            if when == "while sending":
                c.forward([spec()])
                await until(lambda: sender(c).engine.pending > 0)
            other = expect(c, number=1)
        assert "all its destinations" in str((await other).error)
        await until(other.units_free)
        if when == "while committing":
            assert c.prefill().poll(5, 2) is RoomStatus.TRANSFERRING
            return
        hold.release()
        sender(c).pacer.kick()
        if when == "before the registration":
            c.forward([spec()])
        assert (await handle).ok
        assert landed(c.prefill_pools[0], first)
        assert surplus.untouched(())  # type: ignore[arg-type]
        assert sender(c).counters["surplus_offers"] == 1


@pytest.mark.row("A11", "C3")
async def test_ranks_that_disagree_about_their_number_fail_together() -> None:
    async with cluster(decodes=[Pool(), Pool()]) as c:
        one = expect(c, destinations=3)
        await until(lambda: sender(c).rooms.live(KEY))
        two = expect(c, number=1, destinations=2)
        for handle in (one, two):
            assert "disagree" in str((await asyncio.wait_for(handle, 1)).error)
            await until(handle.units_free)


@pytest.mark.row("C2", "C7")
async def test_offers_that_nobody_registers_are_bounded_in_number() -> None:
    async with cluster(config=dataclasses.replace(QUICK, max_kept_offers=3)) as c:
        raw = await raw_decode(c)
        for room in range(10, 15):
            whole(raw, room=room)
        await raw.flushed()
        assert len(sender(c).rooms) == 3
        assert [abort.room for abort in raw.all(Abort)] == [10, 11], "the oldest fall out"
        assert "waiting" in raw.all(Abort)[0].reason
        assert [(ack.room, ack.unknown, ack.in_doubt) for ack in raw.all(AbortAck)] == [
            (10, Units(), Units()),
            (11, Units(), Units()),
        ]
        c.forward([spec(room=14)])
        assert (await raw.hear(Done)).room == 14
        assert c.forward([spec(room=10)]).refused


@pytest.mark.row("C2", "C7")
async def test_offers_that_nobody_registers_are_bounded_in_age() -> None:
    async with cluster(config=dataclasses.replace(QUICK, bootstrap_timeout_s=0.1)) as c:
        handle = expect(c)
        result = await asyncio.wait_for(handle, 2)
        assert "waited for its offers and its registration" in str(result.error)
        await until(handle.units_free)
        assert len(sender(c).rooms) == 0
        c.forward([spec(room=6)])  # the reverse: a registration that nobody offers to
        await until(lambda: c.prefill().poll(6, 1) is RoomStatus.FAILED, timeout=2)
        assert c.prefill().source_free(6, 1)


@pytest.mark.row("C4")
async def test_units_of_a_room_that_could_not_have_them_stay_with_their_owner() -> None:
    async with cluster() as c:
        owner = expect(c)
        await until(lambda: receiver(c).book.taken() == 5)
        for wanted in ({"pages": [30, 31, 32, 2]}, {"pages": [30, 31, 32, 33], "aux_slot": 2}):
            thief = expect(c, room=6, gen=len(wanted), **{"aux_slot": 4} | wanted)
            result = await thief
            assert "holder=room 5.1" in str(result.error)
            assert receiver(c).book.taken() == 5
        assert held(receiver(c), UnitState.LEASED) == {"page": DST, "aux": [2]}
        c.forward([spec()])
        assert (await owner).ok
        assert receiver(c).book.taken() == 0
