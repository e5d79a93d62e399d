"""A peer is stopped (SIGSTOP) and goes on: rooms end, units wait in quarantine, late writes harm nobody."""

from __future__ import annotations

import time

import pytest

from scripts.soaking.process import Worker
from tests.faults.scenes import CONFIG, IMPATIENT, LARGE, PAGE, POOL, DecodeHere, PrefillHere, asked, chunks
from tests.support.waiting import until, within

pytestmark = [pytest.mark.mooncake, pytest.mark.timeout(60)]

ENDS_S = CONFIG["silence_s"] + CONFIG["drain_timeout_s"] + 2.0
"""Seconds in which a stopped peer's rooms end, on a busy machine."""


@pytest.mark.row("N11", "C4", "B4")
async def test_late_writes_into_a_stopped_decode_land_and_a_rollover_frees_their_pages(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its pages are written after SIGCONT, although every write was reported failed: whoever had them next would
    have been corrupted. They stay in quarantine until the old engine has ended, and are then as good as new."""
    for name, value in IMPATIENT.items():
        monkeypatch.setenv(name, value)
    async with PrefillHere(LARGE) as prefill, Worker("decode", pool=LARGE, config=CONFIG) as decode:
        peers = [prefill.address]
        await decode.call("expect", room=1, gen=1, peers=peers, tokens=8 * PAGE)
        await prefill.offered(1, 1)
        await decode.stop()
        stopped = time.monotonic()
        prefill.forward(1, 1, range(8))
        assert not (await prefill.ended(1, 1)).ok
        assert time.monotonic() - stopped < ENDS_S
        await prefill.source_free(1, 1)
        prefill.content.poison(range(64))  # the source is free, and its next owner writes
        decode.resume()
        assert not (await decode.call("ended", room=1, gen=1))["ok"]
        tables = await asked(decode, "tables", lambda tables: tables["quarantine"])
        quarantine = tables["quarantine"]
        assert quarantine[0]["in_doubt"]
        assert quarantine[0]["why"]
        await asked(decode, "poisoned", lambda pages: pages < 8, room=1, gen=1)
        assert not await decode.call("free", room=1, gen=1), "that they landed is luck, not proof"

        async def served(room: int, source: int) -> None:
            await decode.call("expect", room=room, gen=1, peers=peers, tokens=8 * PAGE)
            prefill.forward(room, 1, range(source, source + 8), slot=room)
            assert (await decode.call("ended", room=room, gen=1))["ok"]
            assert await decode.call("wrong", room=room, gen=1) == []

        await decode.call("roll_over")
        await decode.call("freed", room=1, gen=1, patience=10)
        await decode.call("recycle", room=1, gen=1)
        await served(3, 0)  # on the pages that were in doubt: the most recently freed go first
        await served(4, 8)
        for room in (3, 4):
            assert await decode.call("wrong", room=room, gen=1) == []
            await decode.call("recycle", room=room, gen=1)
        tables = await decode.call("tables")
        assert (tables["taken"], tables["quarantine"], tables["fences"]) == (0, [], 1)
        assert (await decode.call("audit"))["strays"] == []


@pytest.mark.row("C4", "C2")
async def test_a_late_quiet_from_a_stopped_prefill_frees_what_was_unknown() -> None:
    """Silence ends the room and proves nothing; the word of the prefill, once it goes on, frees without a rollover."""
    async with DecodeHere() as decode, Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG) as prefill:
        address = prefill.started["address"]
        handle = decode.expect(1, 1, address, range(8))
        await prefill.call("send", room=1, gen=1, chunks=chunks(8), hold_after=2)
        await until(lambda: decode.content.strays(range(8)), "its first layers have landed")
        await prefill.stop()
        stopped = time.monotonic()
        result = await within(handle)
        assert "silent" in str(result.error)
        assert time.monotonic() - stopped < ENDS_S
        await until(lambda: decode.quarantined() == (9, 0), "eight pages and a slot are unknown")
        refused = await within(decode.expect(2, 1, address, range(4)))
        assert "holder=room 1.1" in str(refused.error)
        assert not handle.units_free()
        prefill.resume()
        await until(handle.units_free, "the prefill says quiet")
        assert decode.receiver.rollover.fences == 0
        assert decode.quarantined() == (0, 0)
        decode.content.poison(range(8))
        again = decode.expect(3, 1, address, range(8))
        await prefill.call("go", room=1, gen=1)  # the held forward fires its layers: nothing of it may be sent
        assert not (await prefill.call("ended", room=1, gen=1))["ok"]
        await prefill.call("send", room=3, gen=1, chunks=chunks(8, of=3))
        assert (await within(again)).ok
        await prefill.call("freed", room=1, gen=1)
        assert decode.wrong(3, 1, range(8)) == []


@pytest.mark.row("C2", "C4", "C5")
async def test_writes_unfinished_at_the_drain_deadline_turn_quiet_when_they_complete() -> None:
    """The decode stands still for less than the transport's patience: told unknown first, quiet later, on both sides
    the pages are held in between."""
    async with PrefillHere(LARGE, drain_timeout_s=0.3, silence_s=20.0) as prefill:
        settings = CONFIG | {"drain_timeout_s": 0.3, "silence_s": 20.0}
        async with Worker("decode", pool=LARGE, config=settings) as decode:
            await decode.call("expect", room=1, gen=1, peers=[prefill.address], tokens=32 * PAGE)
            await prefill.offered(1, 1)
            await decode.stop()
            prefill.forward(1, 1, range(32))
            engine = prefill.sender.engine
            await until(lambda: engine.pending > 0, "writes are in flight")
            prefill.prefill.abort(1, 1, "the client went away")
            room = next(iter(prefill.sender.rooms))
            await until(lambda: room.machine.state.name == "LINGERING", "the drain deadline has passed")
            assert not prefill.prefill.source_free(1, 1)
            assert len(prefill.sender.pins) == 32
            decode.resume()
            assert "went away" in (await decode.call("ended", room=1, gen=1))["error"]
            await prefill.source_free(1, 1)
            await decode.call("freed", room=1, gen=1, patience=10)
            assert len(prefill.sender.pins) == 0
            tables = await decode.call("tables")
            assert (tables["taken"], tables["quarantine"], tables["fences"]) == (0, [], 0)
            await decode.call("recycle", room=1, gen=1)
            await decode.call("expect", room=2, gen=1, peers=[prefill.address], tokens=32 * PAGE)
            prefill.forward(2, 1, range(32))
            assert (await decode.call("ended", room=2, gen=1))["ok"]
            assert await decode.call("wrong", room=2, gen=1) == []
            assert (await decode.call("audit"))["strays"] == []
