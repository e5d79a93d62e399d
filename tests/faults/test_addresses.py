"""Destinations that are not there: memory that the peer never registered, a peer that comes and goes, a black hole."""

from __future__ import annotations

import time
from typing import Any

import pytest

from orchestrator.engines.mooncake import MooncakeEngine
from orchestrator.outcome import RoomStatus
from protocols import breaker
from protocols.breaker import THRESHOLD, BreakerState
from tests.faults.scenes import DecodeHere, PrefillHere
from tests.support.waiting import until, within

PAUSE_S = 4.0
"""Of the breaker, so long that a busy machine does not make the next room its probe."""
pytestmark = [pytest.mark.mooncake, pytest.mark.timeout(60)]


class Forgetful(MooncakeEngine):
    """An engine that does not register one region of its pool, although its layout names it."""

    def __init__(self) -> None:
        super().__init__()
        self.ignored: list[tuple[int, int]] = []
        self._seen = 0

    def register(self, address: int, nbytes: int) -> None:
        self._seen += 1
        if self._seen == 3:
            self.ignored.append((address, nbytes))
        else:
            super().register(address, nbytes)

    def remember(self) -> None:
        """Register it after all."""
        while self.ignored:
            super().register(*self.ignored.pop())


def breaker_state(contact: Any) -> BreakerState:
    found: BreakerState = contact.breaker.state
    return found


@pytest.mark.row("B4", "C4", "E5")
async def test_memory_that_was_never_registered_fails_rooms_opens_the_breaker_and_heals(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The transport refuses each write into one buffer. The room fails with exactly what was refused in doubt; one
    failure blacklists nobody, the third opens the peer's breaker: rooms fail at once then, with nothing submitted and
    their units free. After the pause one room is the probe, and once the probe lands the peer is used again."""
    monkeypatch.setattr(breaker, "FIRST_PAUSE_S", PAUSE_S)
    async with PrefillHere() as prefill, DecodeHere(engine=Forgetful) as decode, DecodeHere() as healthy:
        engine = decode.engine
        assert isinstance(engine, Forgetful)
        for number in range(THRESHOLD):
            room, pages = 1 + number, range(8 * number, 8 * number + 8)
            handle = decode.expect(room, 1, prefill.address, pages, slot=room)
            fine = healthy.expect(100 + room, 1, prefill.address, pages, slot=room)
            prefill.forward(room, 1, pages, slot=room)
            prefill.forward(100 + room, 1, pages, slot=room)
            result = await within(handle)
            assert "the engine failed a write" in str(result.error)
            assert not (await prefill.ended(room, 1)).ok
            await prefill.source_free(room, 1)
            assert (await within(fine)).ok, "its neighbour is served"
            assert (await prefill.ended(100 + room, 1)).ok, "and counted"
            assert healthy.wrong(100 + room, 1, pages, slot=room) == []
            await until(lambda count=number + 1: decode.quarantined() == (0, 8 * count))  # type: ignore[misc]
            assert not handle.units_free()
        (contact,) = [c for c in prefill.sender._contacts._peers.values() if c.hello.session == decode.receiver.session]
        assert breaker_state(contact) is BreakerState.OPEN
        opened, submitted = time.monotonic(), prefill.sender.counters["bytes"]
        at_once = decode.expect(10, 1, prefill.address, range(32, 40), slot=10)
        prefill.forward(10, 1, range(32, 40), slot=10)
        result = await within(at_once)
        assert "left alone for a while" in str(result.error)
        assert time.monotonic() - opened < PAUSE_S / 2
        await until(at_once.units_free, "nothing was submitted")
        assert prefill.sender.counters["bytes"] == submitted
        engine.remember()
        await until(lambda: contact.breaker.retry_in(time.monotonic()) == 0, "the pause is over")
        probe = decode.expect(11, 1, prefill.address, range(40, 48), slot=11)
        prefill.forward(11, 1, range(40, 48), slot=11)
        assert (await within(probe)).ok, "the lanes that the transport closed are open again"
        assert decode.wrong(11, 1, range(40, 48), slot=11) == []
        assert breaker_state(contact) is BreakerState.CLOSED
        decode.decode.roll_over()
        await until(lambda: decode.receiver.book.taken() == 0)


@pytest.mark.row("B4", "C4")
async def test_one_failed_write_blacklists_nobody() -> None:
    async with PrefillHere() as prefill, DecodeHere(engine=Forgetful) as decode:
        engine = decode.engine
        assert isinstance(engine, Forgetful)
        handle = decode.expect(1, 1, prefill.address, range(8))
        prefill.forward(1, 1, range(8))
        assert not (await within(handle)).ok
        await prefill.source_free(1, 1)
        engine.remember()
        again = decode.expect(2, 1, prefill.address, range(8, 16), slot=1)
        prefill.forward(2, 1, range(8, 16), slot=1)
        assert (await within(again)).ok
        assert decode.wrong(2, 1, range(8, 16), slot=1) == []
        assert prefill.prefill.poll(2, 1) in (RoomStatus.TRANSFERRING, RoomStatus.SUCCESS)
