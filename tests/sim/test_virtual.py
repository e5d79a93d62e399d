"""The loop whose clock jumps: order, time, domains, and what it says when all wait for ever."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from orchestrator.progress import Pacer
from orchestrator.testing.virtual import (
    START,
    BudgetError,
    DeadlockError,
    Domain,
    Order,
    SimClock,
    VirtualLoop,
    current_domain,
    run_virtual,
)
from orchestrator.timerfd import CallLater


def test_time_jumps_to_the_next_timer() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        stamps = [loop.time()]
        await asyncio.sleep(3000)
        stamps.append(loop.time())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(5):
                await asyncio.Event().wait()
        stamps.append(loop.time())
        return stamps

    assert run_virtual(main) == [START, START + 3000, START + 3005]


def test_a_cancelled_timer_moves_no_clock() -> None:
    async def main(loop: VirtualLoop) -> float:
        for _ in range(1000):
            loop.call_later(1.0, lambda: None).cancel()
        assert loop.timers == []
        loop.call_later(7.0, lambda: None)
        await asyncio.sleep(2.0)
        assert [handle.when() for handle in loop.timers] == [START + 7.0]
        return loop.time()

    assert run_virtual(main) == START + 2.0


async def _interleaved(loop: VirtualLoop) -> str:
    """Three tasks of two domains, three steps each."""
    steps: list[str] = []

    async def work(name: str) -> None:
        for _ in range(3):
            await asyncio.sleep(0)
            steps.append(name)

    first, second = Domain("first"), Domain("second")
    tasks = [loop.spawn(work(name), domain, name) for name, domain in (("a", first), ("b", first), ("x", second))]
    await asyncio.gather(*tasks)
    return "".join(steps)


@pytest.mark.parametrize("order", ["domains", "any"])
def test_one_seed_is_one_order(order: Order) -> None:
    runs = [[run_virtual(_interleaved, seed, order=order) for seed in range(20)] for _ in range(2)]
    assert runs[0] == runs[1]
    assert len(set(runs[0])) > 5


def test_a_domain_keeps_the_order_of_a_real_loop() -> None:
    for seed in range(20):
        assert run_virtual(_interleaved, seed).replace("x", "") == "ababab"
    assert len({run_virtual(_interleaved, seed, order="any").replace("x", "") for seed in range(20)}) > 1


def test_timers_of_one_moment_come_in_a_seeded_order() -> None:
    async def main(loop: VirtualLoop) -> str:
        fired: list[str] = []
        for name in "abcd":
            loop.call_later(1.0, fired.append, name)
        await asyncio.sleep(2.0)
        return "".join(fired)

    orders = [run_virtual(main, seed) for seed in range(10)]
    assert orders == [run_virtual(main, seed) for seed in range(10)]
    assert len(set(orders)) > 1


def test_a_deadlock_names_who_waits_for_what() -> None:
    async def patient() -> None:
        await asyncio.Event().wait()

    async def main(loop: VirtualLoop) -> None:
        loop.reporters.append(lambda: ["room 7.1 WAITING"])
        task = loop.spawn(patient(), Domain("decode-0"), "patience")
        await task

    with pytest.raises(DeadlockError) as caught:
        run_virtual(main)
    text = str(caught.value)
    assert "decode-0: patience waits at Event.wait" in text
    assert "patient (test_virtual.py" in text
    assert "room 7.1 WAITING" in text


def test_budgets_end_a_run_that_does_not() -> None:
    async def spin(_: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(0)

    async def doze(_: VirtualLoop) -> None:
        while True:  # noqa: ASYNC110
            await asyncio.sleep(10.0)

    with pytest.raises(BudgetError, match="steps"):
        run_virtual(spin, max_steps=1000)
    with pytest.raises(BudgetError, match="virtual time"):
        run_virtual(doze, max_virtual_s=100.0)


def test_a_held_domain_waits_and_its_timers_turn_due() -> None:
    async def main(loop: VirtualLoop) -> list[float]:
        domain = Domain("p")
        ticks: list[float] = []

        async def tick() -> None:
            while len(ticks) < 3:
                await asyncio.sleep(1.0)
                ticks.append(loop.time() - START)

        task = loop.spawn(tick(), domain, "tick")
        await asyncio.sleep(1.5)
        loop.hold(domain)
        await asyncio.sleep(10.0)
        assert ticks == [1.0]
        loop.resume(domain)
        await task
        return ticks

    assert run_virtual(main) == [1.0, 11.5, 12.5]


def test_a_killed_domain_runs_nothing_again() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        domain = Domain("p")
        heard: list[str] = []

        async def die() -> None:
            try:
                heard.append("alive")
                await asyncio.sleep(1.0)
                heard.append("woke")
            finally:
                heard.append("finally")

        loop.spawn(die(), domain, "die")
        domain.context.run(loop.call_later, 1.0, heard.append, "timer")
        await asyncio.sleep(0.5)
        loop.kill(domain)
        loop.call_soon(heard.append, "called", context=domain.context)
        assert loop.timers == []
        await asyncio.sleep(5.0)
        return list(heard)

    assert run_virtual(main) == ["alive"]


def test_callbacks_know_their_domain() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        names: list[str] = []

        def note() -> None:
            domain = current_domain()
            names.append(domain.name if domain is not None else "world")

        async def inside() -> None:
            note()
            loop.call_soon(note)
            loop.call_later(1.0, note)
            await asyncio.sleep(2.0)

        note()
        await loop.spawn(inside(), Domain("p"), "inside")
        return names

    assert run_virtual(main) == ["world", "p", "p", "p"]


def test_what_nobody_handled_is_kept() -> None:
    async def main(loop: VirtualLoop) -> list[str]:
        loop.call_soon(lambda: 1 // 0)
        await asyncio.sleep(1.0)
        return loop.unhandled

    assert "ZeroDivisionError" in run_virtual(main)[0]


def test_the_clock_of_a_process_is_its_own() -> None:
    async def main(loop: VirtualLoop) -> tuple[float, float]:
        clock = SimClock(loop, offset=500.0)
        fired: list[float] = []
        clock.call_later(2.0, lambda: fired.append(clock.now()))
        await asyncio.sleep(3.0)
        return clock.now(), fired[0]

    assert run_virtual(main) == (START + 503.0, START + 502.0)


class _Counter:
    """A pacer source that has three things to tell, one every ten milliseconds."""

    def __init__(self, clock: SimClock) -> None:
        self._clock = clock
        self._start = clock.now()
        self.pending = 3

    def poll(self) -> int:
        due = 3 - min(3, int((self._clock.now() - self._start) / 0.01))
        completed, self.pending = self.pending - due, due
        return completed


def test_the_pacer_keeps_pace_and_rests() -> None:
    async def main(loop: VirtualLoop) -> int:
        clock = SimClock(loop)
        pacer = Pacer(loop, clock)
        assert isinstance(pacer._timer, CallLater)
        source = _Counter(clock)
        pacer.add(source)
        pacer.kick()
        await asyncio.sleep(1.0)
        assert source.pending == 0
        assert loop.timers == []
        pacer.close()
        return pacer.passes

    assert 10 < run_virtual(main) < 100


def test_a_pacer_without_descriptors_leaves_none_open() -> None:
    async def main(loop: VirtualLoop) -> None:
        for _ in range(20):
            Pacer(loop, SimClock(loop)).close()

    before = len(list(Path(f"/proc/{os.getpid()}/fd").iterdir()))
    run_virtual(main)
    assert len(list(Path(f"/proc/{os.getpid()}/fd").iterdir())) == before
