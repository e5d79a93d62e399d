"""One peer of four is stopped or swallows everything: the other three do not notice."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from orchestrator.engines.mooncake import MooncakeEngine
from protocols.ids import Session
from scripts.soaking.process import Worker
from tests.faults.scenes import CONFIG, LARGE, PAGE, DecodeHere, asked, chunks
from tests.support.waiting import until, within

pytestmark = [pytest.mark.mooncake, pytest.mark.long, pytest.mark.timeout(300)]

PHASES = 6
"""Of each kind, in turn: what else the machine does meanwhile falls on both."""
ROOMS = 50
"""A phase and decode."""
ATTEMPTS = 3
"""A busy machine may spoil a measurement, not three of them."""
WORSE = 1.5
GRAIN_S = 0.002
"""Of the pacer: a difference below it is none."""
PATIENT = CONFIG | {"silence_s": 2.0, "connect_timeout_s": 3.0}

Trouble = Callable[[], AbstractAsyncContextManager[None]]


class Numbers:
    """Room ids, each once."""

    def __init__(self) -> None:
        self._last = 0

    def next(self) -> int:
        self._last += 1
        return self._last


async def latencies(prefill: Worker, decode: DecodeHere, slot: int, numbers: Numbers) -> list[float]:
    """Seconds from the request to the committed room, one after the other."""
    address, found = prefill.started["address"], []
    for _ in range(ROOMS):
        room = numbers.next()
        began = time.monotonic()
        handle = decode.expect(room, 1, address, range(4), slot=slot)
        sent = prefill.ask("room", room=room, gen=1, chunks=chunks(4, of=2), abort_at=None, late=0)
        result = await within(handle)
        found.append(time.monotonic() - began)
        assert result.ok, result.error
        assert decode.wrong(room, 1, range(4), slot=slot) == []
        await sent
    return found


async def compare(
    prefill: Worker, healthy: list[DecodeHere], numbers: Numbers, trouble: Trouble
) -> tuple[float, float]:
    """p99 of the three without the trouble, and with it, in seconds."""

    async def phase() -> list[float]:
        runs = [latencies(prefill, decode, slot, numbers) for slot, decode in enumerate(healthy)]
        return [seconds for run in await asyncio.gather(*runs) for seconds in run]

    calm: list[float] = []
    troubled: list[float] = []
    await phase()  # connections are made, the link model learns
    for _ in range(PHASES):
        calm += await phase()
        async with trouble():
            troubled += await phase()
    return float(np.percentile(calm, 99)), float(np.percentile(troubled, 99))


async def unchanged(make_trouble: Callable[[Worker, Numbers, AsyncExitStack], Trouble]) -> None:
    async with AsyncExitStack() as stack:
        pool = {"seed": 1, "pages": 256} | {key: value for key, value in LARGE.items() if key != "pages"}
        prefill = await stack.enter_async_context(Worker("prefill", pool=pool, config=PATIENT))
        healthy = [await stack.enter_async_context(DecodeHere(LARGE, **PATIENT)) for _ in range(3)]
        numbers = Numbers()
        trouble = make_trouble(prefill, numbers, stack)
        seen = []
        for _ in range(ATTEMPTS):
            before, after = await compare(prefill, healthy, numbers, trouble)
            seen.append(f"{1000 * before:.1f} ms without, {1000 * after:.1f} ms with")
            if after <= WORSE * before + GRAIN_S:
                return
        raise AssertionError(f"p99 of the other three: {'; '.join(seen)}")


@pytest.mark.row("B5")
async def test_a_stopped_decode_leaves_its_neighbours_latency_alone() -> None:
    """Every phase begins with rooms offered by the fourth; it is stopped, and they are sent to it."""

    def make(prefill: Worker, numbers: Numbers, stack: AsyncExitStack) -> Trouble:
        @asynccontextmanager
        async def trouble() -> AsyncIterator[None]:
            async with Worker("decode", pool=LARGE, config=PATIENT | {"name": "fourth"}) as fourth:
                rooms = [numbers.next() for _ in range(4)]
                for room in rooms:
                    await fourth.call("expect", room=room, gen=1, peers=[prefill.started["address"]], tokens=8 * PAGE)
                await asked(prefill, "tables", lambda tables: len(tables["rooms"]) >= len(rooms))
                await fourth.stop()
                for room in rooms:  # what they cost the one forward thread is no matter of the transfer
                    await prefill.call("send", room=room, gen=1, chunks=chunks(8))
                    await prefill.call("written", room=room, gen=1)
                yield
            for room in rooms:
                assert not (await prefill.call("ended", room=room, gen=1))["ok"]
                await prefill.call("freed", room=room, gen=1)
                await prefill.call("recycle", room=room, gen=1)

        return trouble

    await unchanged(make)


class Swallowed(MooncakeEngine):
    """Its Hello names a session where somebody accepts connections and never answers."""

    def __init__(self, hole: socket.socket) -> None:
        super().__init__()
        self.session = Session(f"127.0.0.1:{hole.getsockname()[1]}")


@pytest.mark.row("B5")
async def test_a_black_hole_leaves_its_neighbours_latency_alone() -> None:
    """First contact with the fourth hangs for the whole of each phase, and its rooms keep coming."""

    def make(prefill: Worker, numbers: Numbers, stack: AsyncExitStack) -> Trouble:
        @asynccontextmanager
        async def trouble() -> AsyncIterator[None]:
            hole = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=16))
            async with DecodeHere(LARGE, engine=lambda: Swallowed(hole), **PATIENT) as fourth:
                ended: list[str] = []

                async def keep_asking() -> None:
                    while True:
                        room = numbers.next()
                        handle = fourth.expect(room, 1, prefill.started["address"], range(1))
                        prefill.ask("room", room=room, gen=1, chunks=chunks(1), abort_at=None, late=0)
                        ended.append(str((await handle).error))
                        await until(handle.units_free)

                asking = asyncio.create_task(keep_asking())
                yield
                await until(lambda: ended, "a room of the fourth ends")
                asking.cancel()
                await asyncio.gather(asking, return_exceptions=True)
                assert all("peer" in error for error in ended), ended

        return trouble

    await unchanged(make)
