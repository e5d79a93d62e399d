"""The timer of the pacer: finer than a millisecond, one shot, and no descriptor left behind."""

from __future__ import annotations

import asyncio
import ctypes
import os
import select
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import uvloop

from orchestrator.timerfd import CallLater, TimerFd, make_timer
from protocols.errors import EngineUnavailableError
from tests.service.scenes import PATIENCE_S

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "asyncio": asyncio.new_event_loop,
    "uvloop": uvloop.new_event_loop,
}
Make = Callable[[asyncio.AbstractEventLoop, Callable[[], object]], TimerFd | CallLater]
on_both_loops = pytest.mark.parametrize("factory", LOOPS.values(), ids=LOOPS)
both_timers = pytest.mark.parametrize("make", [TimerFd, CallLater], ids=["timerfd", "call_later"])


def run(factory: Callable[[], asyncio.AbstractEventLoop], test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(PATIENCE_S):
            await test()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(bounded())


class Shots:
    """A timer, and when it fired."""

    def __init__(self, make: Make) -> None:
        self.at: list[float] = []
        self._fired = asyncio.Event()
        self.timer = make(asyncio.get_running_loop(), self._fire)

    def _fire(self) -> None:
        self.at.append(time.monotonic())
        self._fired.set()

    async def next(self) -> float:
        await self._fired.wait()
        self._fired.clear()
        return self.at[-1]


@on_both_loops
def test_its_grain_is_below_a_millisecond(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    async def test() -> None:
        shots, waited = Shots(TimerFd), []
        for _ in range(60):
            begun = time.monotonic()
            shots.timer.arm(0.0003)
            waited.append(await shots.next() - begun)
        shots.timer.close()
        assert min(waited) >= 0.0003
        assert sorted(waited)[10] < 0.001, "on a busy machine some come late, but not all"

    run(factory, test)


@on_both_loops
@both_timers
def test_it_fires_once_and_not_before_its_time(factory: Callable[[], asyncio.AbstractEventLoop], make: Make) -> None:
    async def test() -> None:
        shots = Shots(make)
        begun = time.monotonic()
        shots.timer.arm(0.01)
        assert await shots.next() - begun >= 0.009
        await asyncio.sleep(0.025)
        assert len(shots.at) == 1
        shots.timer.close()

    run(factory, test)


@on_both_loops
@both_timers
def test_arming_again_replaces_what_was_armed(factory: Callable[[], asyncio.AbstractEventLoop], make: Make) -> None:
    async def test() -> None:
        shots = Shots(make)
        shots.timer.arm(0.005)
        shots.timer.arm(30.0)
        shots.timer.arm(0.015)
        begun = time.monotonic()
        assert await shots.next() - begun >= 0.01
        await asyncio.sleep(0.01)
        assert len(shots.at) == 1
        shots.timer.close()

    run(factory, test)


@on_both_loops
@both_timers
@pytest.mark.parametrize("delay", [0.0, -1.0, 1e-12])
def test_no_delay_is_soon_and_not_never(
    factory: Callable[[], asyncio.AbstractEventLoop], make: Make, delay: float
) -> None:
    """A zero would disarm a timerfd."""

    async def test() -> None:
        shots = Shots(make)
        shots.timer.arm(delay)
        await shots.next()
        shots.timer.close()

    run(factory, test)


@on_both_loops
@both_timers
def test_it_can_be_armed_from_its_own_callback(factory: Callable[[], asyncio.AbstractEventLoop], make: Make) -> None:
    async def test() -> None:
        count = 0
        done = asyncio.Event()

        def fire() -> None:
            nonlocal count
            count += 1
            timer.arm(0.0001) if count < 5 else done.set()

        timer = make(asyncio.get_running_loop(), fire)
        timer.arm(0.0001)
        await done.wait()
        timer.close()
        assert count == 5

    run(factory, test)


@on_both_loops
@both_timers
def test_closed_it_never_fires(factory: Callable[[], asyncio.AbstractEventLoop], make: Make) -> None:
    async def test() -> None:
        shots = Shots(make)
        shots.timer.arm(0.002)
        shots.timer.close()
        shots.timer.close()
        await asyncio.sleep(0.01)
        assert shots.at == []

    run(factory, test)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_it_leaves_no_descriptor_behind() -> None:
    before = open_files()
    timers = [TimerFd(asyncio.get_running_loop(), lambda: None) for _ in range(10)]
    assert open_files() == before + 10
    for timer in timers:
        timer.close()
    assert open_files() == before


async def test_where_there_is_no_timerfd_call_later_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(sys, "platform", "darwin")
        with pytest.raises(EngineUnavailableError, match="Linux"):
            TimerFd(asyncio.get_running_loop(), lambda: None)
        timer = make_timer(asyncio.get_running_loop(), lambda: None)
    assert isinstance(timer, CallLater)


async def test_a_loop_that_takes_no_readers_gets_call_later_and_keeps_no_descriptor() -> None:
    class NoReaders:
        def add_reader(self, *_: object) -> None:
            raise NotImplementedError

    before = open_files()
    loop: Any = NoReaders()
    assert isinstance(make_timer(loop, lambda: None), CallLater)
    assert open_files() == before


async def test_a_process_without_descriptors_left_gets_call_later(monkeypatch: pytest.MonkeyPatch) -> None:
    class Libc:
        timerfd_settime = None

        def timerfd_create(self, *_: object) -> int:
            return -1

    monkeypatch.setattr(ctypes, "PyDLL", lambda *_, **__: Libc())
    assert isinstance(make_timer(asyncio.get_running_loop(), lambda: None), CallLater)


async def test_on_linux_it_is_a_timerfd() -> None:
    timer = make_timer(asyncio.get_running_loop(), lambda: None)
    assert isinstance(timer, TimerFd)
    timer.close()


@on_both_loops
def test_firing_does_not_leave_the_gil(
    factory: Callable[[], asyncio.AbstractEventLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read would, and so would a call through `ctypes.CDLL`: beside a forward in Python each costs up to 5 ms."""

    def read(*_: object) -> bytes:
        raise AssertionError("the descriptor is read")

    async def test() -> None:
        shots = Shots(TimerFd)
        monkeypatch.setattr(os, "read", read)
        shots.timer.arm(0.0003)
        await shots.next()
        assert isinstance(shots.timer, TimerFd)
        assert shots.timer._settime._flags_ & ctypes._FUNCFLAG_PYTHONAPI  # type: ignore[attr-defined]
        monkeypatch.undo()
        shots.timer.close()

    run(factory, test)


@on_both_loops
def test_what_has_fired_is_not_readable_any_more(factory: Callable[[], asyncio.AbstractEventLoop]) -> None:
    """Else the loop would spin on it."""

    async def test() -> None:
        shots = Shots(TimerFd)
        shots.timer.arm(0.0003)
        await shots.next()
        await asyncio.sleep(0.002)
        assert isinstance(shots.timer, TimerFd)
        assert select.select([shots.timer._fd], [], [], 0)[0] == []
        shots.timer.close()

    run(factory, test)


@on_both_loops
def test_armed_again_between_its_expiry_and_its_turn_it_waits(
    factory: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def test() -> None:
        shots = Shots(TimerFd)
        shots.timer.arm(0.0001)
        time.sleep(0.001)  # noqa: ASYNC251 - expired, and the loop has not come round
        assert isinstance(shots.timer, TimerFd)
        shots.timer.arm(30.0)
        shots.timer._fire()
        assert shots.at == []
        shots.timer.close()

    run(factory, test)
