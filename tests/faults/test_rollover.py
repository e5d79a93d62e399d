"""The decode's engine is rolled over in the middle of traffic: rooms finish or fail, quarantine empties, ports stay
held until every prefill is done with the old session."""

from __future__ import annotations

import time
from collections.abc import Iterable

import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.engines.ports import listening_ports
from protocols.machines import RolloverState
from scripts.soaking.process import Worker
from tests.faults.scenes import CONFIG, POOL, DecodeHere, PrefillHere, chunks
from tests.support.waiting import until, within

pytestmark = [pytest.mark.mooncake, pytest.mark.timeout(60)]


def held(ports: Iterable[int]) -> list[int]:
    """Those of the ports on which this process listens, with an engine or with a plain socket."""
    return sorted(set(ports) & listening_ports())


def state(decode: DecodeHere) -> RolloverState:
    found: RolloverState = decode.receiver.rollover.machine.state
    return found


@pytest.mark.row("N11")
async def test_rooms_of_the_old_session_finish_while_new_ones_use_the_new_engine() -> None:
    async with PrefillHere() as prefill, DecodeHere() as decode:
        old, ports = decode.receiver.session, decode.engine.ports
        assert len(ports) >= 2, "the engine's own and its data port"
        first = decode.expect(1, 1, prefill.address, range(8), slot=1)
        spec = ChunkSpec(room=1, gen=1, pages=list(range(8)), last=True, aux_slot=1)
        forward = prefill.prefill.begin_forward([spec])
        for layer in range(2):
            prefill.content.write_layer(layer, 1, 1, range(8), 0)
            forward.layer_end(layer)
        await until(lambda: decode.content.strays(range(8)), "its first layers have landed")
        decode.decode.roll_over()
        assert state(decode) is RolloverState.ANNOUNCED
        for number, room in enumerate(range(2, 6)):
            pages = range(8 + 8 * number, 16 + 8 * number)
            handle = decode.expect(room, 1, prefill.address, pages, slot=room)
            prefill.forward(room, 1, pages, slot=room)
            assert (await within(handle)).ok
            assert decode.wrong(room, 1, pages, slot=room) == []
        assert decode.receiver.session != old
        assert state(decode) is RolloverState.ANNOUNCED, "a room of the old session still runs"
        for layer in range(2, 4):
            prefill.content.write_layer(layer, 1, 1, range(8), 0)
            forward.layer_end(layer)
        prefill.content.write_drafts(1, 1, range(8), 0)
        prefill.content.write_aux(1, 1, 1)
        forward.end()
        assert (await within(first)).ok, "to its end through the old engine"
        assert decode.wrong(1, 1, range(8), slot=1) == []
        await until(lambda: state(decode) is RolloverState.IDLE)
        assert decode.receiver.rollover.fences == 1
        assert old not in prefill.sender.sessions.lanes
        assert held(ports) == []
        decode.decode.roll_over("once more")
        await until(lambda: decode.receiver.rollover.fences == 2)


@pytest.mark.row("N11", "C4")
async def test_rooms_that_do_not_finish_fail_and_quarantine_is_empty_while_a_prefill_owes_its_ack() -> None:
    """One prefill is stopped with a room open: its units are in quarantine. The rollover fails the other prefill's
    room that does not end in time, deletes the old engine, and frees everything; only the ports wait for the stopped
    prefill, whatever it does when it goes on."""
    async with (
        PrefillHere() as prefill,
        DecodeHere(rollover_timeout_s=0.5) as decode,
        Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG) as stopped,
    ):
        ports = decode.engine.ports
        unknown = decode.expect(1, 1, stopped.started["address"], range(8))
        await stopped.call("send", room=1, gen=1, chunks=chunks(8), hold_after=2)
        await until(lambda: decode.content.strays(range(8)), "its first layers have landed")
        await stopped.stop()
        assert "silent" in str((await within(unknown)).error)
        await until(lambda: decode.quarantined() == (9, 0), "eight pages and a slot are unknown")
        running = decode.expect(2, 1, prefill.address, range(8, 16), slot=1)
        forward = prefill.prefill.begin_forward([ChunkSpec(room=2, gen=1, pages=list(range(8)), last=True, aux_slot=1)])
        prefill.content.write_layer(0, 2, 1, range(8), 0)
        forward.layer_end(0)
        await until(lambda: decode.content.strays(range(8, 16)), "its first layer has landed")
        decode.decode.roll_over()
        for result in (await within(running), await prefill.ended(2, 1)):
            assert "rolled over" in str(result.error)
        forward.discard()
        await until(lambda: state(decode) is RolloverState.FENCED)
        assert decode.receiver.book.taken() == 0
        assert unknown.units_free()
        assert running.units_free()
        assert held(ports) == sorted(ports), "held for the prefill that has not acknowledged"
        decode.content.poison(range(16))
        handle = decode.expect(3, 1, prefill.address, range(16), slot=2)
        prefill.forward(3, 1, range(16), slot=2)
        assert (await within(handle)).ok
        stopped.resume()
        await stopped.call("go", room=1, gen=1)
        await until(lambda: state(decode) is RolloverState.IDLE, "the last prefill has acknowledged")
        assert held(ports) == []
        assert decode.wrong(3, 1, range(16), slot=2) == []
        assert not (await stopped.call("ended", room=1, gen=1))["ok"]


@pytest.mark.row("N11")
async def test_a_prefill_that_never_acknowledges_does_not_stop_the_next_rollover() -> None:
    """Nobody is at its address any more, so nothing will ever say that it is gone. Its word only keeps ports held:
    quarantine is emptied as often as need be."""
    async with PrefillHere() as prefill, DecodeHere(POOL, rollover_timeout_s=0.2) as decode:
        async with Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG) as dead:
            handle = decode.expect(1, 1, dead.started["address"], range(8))
            await dead.call("send", room=1, gen=1, chunks=chunks(8))
            assert (await within(handle)).ok
        ports: list[int] = []
        for number in range(2, 4):
            ports += decode.receiver.engine.ports
            decode.decode.roll_over(f"number {number - 1}")
            await until(lambda fences=number - 1: decode.receiver.rollover.fences == fences)  # type: ignore[misc]
            assert held(ports) == sorted(ports)
            handle = decode.expect(number, 1, prefill.address, range(8), slot=1)
            prefill.forward(number, 1, range(8), slot=1)
            assert (await within(handle)).ok
        ended = time.monotonic()
    assert time.monotonic() - ended < 10
    assert held(ports) == []


@pytest.mark.row("N11", "C4")
async def test_a_full_quarantine_rolls_the_engine_over_by_itself() -> None:
    async with PrefillHere() as prefill, DecodeHere(rollover_at_units=9, rollover_timeout_s=0.2) as decode:
        async with Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG) as dying:
            doubtful = decode.expect(1, 1, dying.started["address"], range(8))
            await dying.call("send", room=1, gen=1, chunks=chunks(8), hold_after=2)
            await until(lambda: decode.content.strays(range(8)), "its first layers have landed")
        assert not (await within(doubtful)).ok
        await until(doubtful.units_free, "nobody asked for it")
        assert decode.receiver.rollover.fences == 1
        assert decode.quarantined() == (0, 0)
        decode.content.poison(range(8))
        handle = decode.expect(2, 1, prefill.address, range(8))
        prefill.forward(2, 1, range(8))
        assert (await within(handle)).ok
        assert decode.wrong(2, 1, range(8)) == []


@pytest.mark.row("C4")
async def test_a_decode_that_cannot_roll_over_refuses_new_rooms_at_its_limit() -> None:
    async with (
        PrefillHere() as prefill,
        DecodeHere(rollover=False, quarantine_limit_units=9, rollover_at_units=9) as decode,
    ):
        async with Worker("prefill", pool=POOL | {"seed": 1}, config=CONFIG) as dying:
            doubtful = decode.expect(1, 1, dying.started["address"], range(8))
            await dying.call("send", room=1, gen=1, chunks=chunks(8), hold_after=2)
            await until(lambda: decode.content.strays(range(8)), "its first layers have landed")
        assert not (await within(doubtful)).ok
        fine = decode.expect(2, 1, prefill.address, range(16, 24), slot=1)
        prefill.forward(2, 1, range(16, 24), slot=1)
        assert (await within(fine)).ok, "below the limit"
        await until(lambda: decode.quarantined() == (9, 0))
        refused = await within(decode.expect(3, 1, prefill.address, range(24, 32), slot=2))
        assert "too many units are quarantined (units=9)" in str(refused.error)
        assert "Roll the engine over, or restart" in str(refused.error)
        assert not doubtful.units_free()
        assert [entry.key.room for entry in decode.decode.quarantine()] == [1]
