"""A decode is killed and restarted a hundred times under traffic: nothing of it is left with the prefill."""

from __future__ import annotations

import asyncio
import statistics
from typing import Any

import pytest

from orchestrator.engines.mooncake_env import lanes
from scripts.soaking.process import Worker
from tests.faults.scenes import CONFIG, IMPATIENT, PAGE, POOL, DecodeHere, asked, chunks
from tests.support.waiting import within

pytestmark = [pytest.mark.mooncake, pytest.mark.long, pytest.mark.timeout(1200)]

RESTARTS = 100
WARM_UP = 30
TOMBSTONE_S = 3.0
GROWTH = 96 << 10
"""Bytes a restart, the native library's own included: it keeps a descriptor of every peer there ever was, and malloc
keeps some of what a dying connection held."""
SETTINGS = CONFIG | {
    "tombstone_s": TOMBSTONE_S,
    "bootstrap_timeout_s": 3.0,
    "drain_timeout_s": 0.5,
    "silence_s": 3.0,  # for minutes, on a machine that does other things as well
    "connect_timeout_s": 10.0,
}
REUSED = "an earlier process had this engine session"
EMPTY = ("pinned", "busy_lanes", "permits", "batches", "tasks")
LARGER: dict[str, Any] = POOL | {"pages": 512, "item_len": 8192, "aux_slots": 64}


async def traffic(prefill: Worker, decode: DecodeHere, stop: asyncio.Event) -> int:
    """Rooms of a neighbour, one after the other, all of which must succeed."""
    room = 1 << 20
    while not stop.is_set():
        room += 1
        handle = decode.expect(room, 1, prefill.started["address"], range(4))
        sent = prefill.ask("room", room=room, gen=1, chunks=chunks(4, of=2), abort_at=None, late=0)
        result = await within(handle)
        assert result.ok, result.error
        assert decode.wrong(room, 1, range(4)) == []
        await sent
    return room - (1 << 20)


async def one_life(prefill: Worker, number: int) -> int:
    """A decode that serves rooms and is killed in the middle of others: on their way, or stuck with it standing still.
    How many rooms were committed."""
    peers, served = [prefill.started["address"]], 0
    async with Worker("decode", pool=LARGER, config=SETTINGS | {"name": "mortal"}, environ=IMPATIENT) as decode:
        rooms = [1000 * number + nth for nth in range(10)]

        def send(room: int) -> asyncio.Future[Any]:
            return prefill.ask("room", room=room, gen=1, chunks=chunks(16, of=6), abort_at=None, late=0)

        for room in rooms[:3]:
            await decode.call("expect", room=room, gen=1, peers=peers, tokens=16 * PAGE)
            sent = send(room)
            ended = await decode.call("ended", room=room, gen=1)
            assert ended["ok"] or REUSED in ended["error"], ended
            served += ended["ok"]
            await sent
        if number % 2:
            for room in rooms[3:]:
                await decode.call("expect", room=room, gen=1, peers=peers, tokens=16 * PAGE)
            await asked(prefill, "tables", lambda tables: len(tables["rooms"]) >= 7)
            await decode.stop()
            dying = [send(room) for room in rooms[3:]]
            await asked(prefill, "tables", lambda tables: tables["permits"] > 0)
        else:
            expected = [decode.ask("expect", room=room, gen=1, peers=peers, tokens=16 * PAGE) for room in rooms[3:]]
            dying = [send(room) for room in rooms[3:]]
            await asyncio.wait(expected, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.gather(*dying)  # each ends, and its source is free, within its deadlines
    return served


@pytest.mark.row("C4", "C5", "N11")
async def test_a_hundred_restarts_under_traffic_leave_nothing_behind() -> None:
    samples: list[dict[str, Any]] = []
    pool, near_decode = LARGER | {"seed": 1}, DecodeHere(LARGER, silence_s=SETTINGS["silence_s"])
    async with Worker("prefill", pool=pool, config=SETTINGS, environ=IMPATIENT) as prefill, near_decode as near:
        stop = asyncio.Event()
        neighbour = asyncio.create_task(traffic(prefill, near, stop))
        served = 0
        for number in range(1, RESTARTS + 1):
            served += await one_life(prefill, number)
            samples.append(await prefill.call("tables"))
        stop.set()
        assert await neighbour > RESTARTS
        assert served > 2 * RESTARTS
        async with Worker("decode", pool=LARGER, config=SETTINGS | {"name": "mortal"}) as heir:
            await heir.call("expect", room=1, gen=1, peers=[prefill.started["address"]], tokens=PAGE)
            await prefill.call("room", room=1, gen=1, chunks=chunks(1), abort_at=None, late=0)
            tables = await asked(prefill, "tables", lambda tables: not tables["rooms"] and not tables["tasks"])
    first, last = samples[WARM_UP - 1]["process"], samples[-1]["process"]
    assert [tables[name] for name in EMPTY] == [0 if name != "busy_lanes" else [] for name in EMPTY]
    assert tables["doubtful"] == 0, "who is gone asks for no verdict"
    assert (
        tables["remembered"] == tables["outcomes"] < sum(sample["counters"]["rooms_ok"] for sample in samples[-1:]) / 4
    )
    assert max(tables["links"], tables["lanes"], tables["contacts"]) <= 2
    assert last["threads"] <= first["threads"]
    assert last["fds"] <= first["fds"] + lanes(IMPATIENT), "of one peer that may just be connected, more than before"
    memory = [sample["process"]["rss"] for sample in samples[WARM_UP:]]
    assert statistics.linear_regression(range(len(memory)), memory).slope < GROWTH
