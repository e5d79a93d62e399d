"""The one poller: it runs while something is pending, at a bounded pace, and an idle process uses no CPU."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

import orchestrator.progress
from orchestrator.clock import Timer
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.loop_thread import EmbeddedLoop
from orchestrator.progress import FRACTION, LONGEST_S, SHORTEST_S, Pacer
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from tests.service.scenes import PATIENCE_S, LateModel, config, idle_turns, ints, outcomes, spec
from tests.support.waiting import until


class Scripted:
    """A source: so much is pending, so much completes at the next question."""

    def __init__(self, pending: int = 0) -> None:
        self.pending = pending
        self.completes = 0
        self.asked = 0
        self.then: Callable[[], None] = lambda: None

    def poll(self) -> int:
        self.asked += 1
        done, self.completes = min(self.completes, self.pending), 0
        self.pending -= done
        self.then()
        return done


class Manual:
    """A timer that a test fires, and a clock that a test moves."""

    def __init__(self) -> None:
        self.seconds = 10.0
        self.armed: list[float] = []
        self.fire: Callable[[], object] = lambda: None
        self.closed = False

    def make(self, _: asyncio.AbstractEventLoop, callback: Callable[[], object]) -> Manual:
        self.fire = callback
        return self

    def arm(self, delay: float) -> None:
        self.armed.append(delay)

    def close(self) -> None:
        self.closed = True

    def now(self) -> float:
        return self.seconds

    def call_later(self, delay: float, callback: Callable[[], object]) -> Timer:
        raise NotImplementedError

    def pass_after(self, seconds: float) -> float:
        """Let time go by, fire, and return the delay that was armed for the next pass."""
        self.seconds += seconds
        self.fire()
        return self.armed[-1]


@pytest.fixture
def manual(monkeypatch: pytest.MonkeyPatch) -> Manual:
    manual = Manual()
    monkeypatch.setattr(orchestrator.progress, "make_timer", manual.make)
    return manual


async def test_nothing_pending_is_never_asked(manual: Manual) -> None:
    pacer, source = Pacer(asyncio.get_running_loop(), manual), Scripted()
    pacer.add(source)
    await idle_turns()
    assert (pacer.passes, source.asked, manual.armed) == (0, 0, [])
    pacer.kick()
    await idle_turns()
    assert (pacer.passes, source.asked, manual.armed) == (1, 0, []), "one look, and no timer after it"


async def test_kicks_add_up_to_one_pass(manual: Manual) -> None:
    pacer, source = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1)
    pacer.add(source)
    pacer.add(source)
    for _ in range(10):
        pacer.kick()
    await idle_turns()
    assert (pacer.passes, source.asked, len(manual.armed)) == (1, 1, 1)
    pacer.kick()
    await idle_turns()
    assert pacer.passes == 1, "it keeps its own pace while it runs"


async def test_it_stops_with_the_last_completion_and_starts_again(manual: Manual) -> None:
    pacer, source = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=2)
    pacer.add(source)
    pacer.kick()
    await idle_turns()
    source.completes = 2
    manual.fire()
    assert len(manual.armed) == 1, "nothing is pending: no timer"
    source.pending = 1
    pacer.kick()
    await idle_turns()
    assert (pacer.passes, len(manual.armed)) == (3, 2)


async def test_the_pace_follows_the_wait_and_is_bounded(manual: Manual) -> None:
    """The longer nothing completes, the rarer the question: by a fraction of that time, within bounds."""
    pacer, source = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=3)
    pacer.add(source)
    pacer.kick()
    await idle_turns()
    assert manual.armed == [SHORTEST_S]
    begun = 10.0
    for seconds in (0.0001, 0.0009, 0.003, 0.004, 0.008, 0.1, 100.0):
        delay = manual.pass_after(seconds)
        waited = manual.seconds - begun
        assert delay == pytest.approx(min(max(waited * FRACTION, SHORTEST_S), LONGEST_S))
        assert SHORTEST_S <= delay <= LONGEST_S
    source.completes = 1
    assert manual.pass_after(1.0) == SHORTEST_S, "a completion starts the wait anew"


async def test_a_source_that_raises_does_not_stop_the_others(manual: Manual, caplog: pytest.LogCaptureFixture) -> None:
    pacer, broken, good = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1), Scripted(pending=1)

    def fail() -> None:
        raise ZeroDivisionError("a source's bug")

    broken.then = fail
    pacer.add(broken)
    pacer.add(good)
    pacer.kick()
    await idle_turns()
    assert (broken.asked, good.asked, len(manual.armed)) == (1, 1, 1)
    manual.fire()
    assert good.asked == 2
    assert "a source's bug" in caplog.text
    caplog.clear()


async def test_what_turns_pending_amid_a_pass_is_not_forgotten(manual: Manual) -> None:
    """The completion of a later source submits to an earlier one, which was looked at already; its kick finds the
    pacer running."""
    pacer, earlier, later = Pacer(asyncio.get_running_loop(), manual), Scripted(), Scripted(pending=1)

    def submit() -> None:
        earlier.pending = 1
        pacer.kick()

    later.then, later.completes = submit, 1
    pacer.add(earlier)
    pacer.add(later)
    pacer.kick()
    await idle_turns()
    assert len(manual.armed) == 1
    manual.fire()
    assert earlier.asked == 1


# -- what is foreseen ---------------------------------------------------------------------------------------------


async def test_nobody_asks_before_it_is_due(manual: Manual) -> None:
    """Neither at the start nor after a pass; beyond it the pace follows the wait."""
    pacer, engine = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1)
    pacer.add(engine, foreseen=True)
    pacer.expect("a lane", 10.001)
    await idle_turns()
    assert pacer.passes == 0
    assert manual.armed == [pytest.approx(0.001)]
    engine.pending = 2
    engine.completes = 1
    engine.then = lambda: pacer.expect("a lane", manual.seconds + 0.0015)
    assert manual.pass_after(0.001) == pytest.approx(0.0015)
    engine.then = lambda: None
    assert manual.pass_after(0.0016) == SHORTEST_S
    assert manual.pass_after(0.004) == pytest.approx(0.0056 * FRACTION)


async def test_however_late_it_is_foreseen_the_pace_is_bounded(manual: Manual) -> None:
    pacer, engine = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1)
    pacer.add(engine, foreseen=True)
    pacer.expect("a lane", 99.0)
    assert manual.armed == [LONGEST_S]
    assert manual.pass_after(LONGEST_S) == LONGEST_S


async def test_what_is_due_at_once_is_asked_at_once(manual: Manual) -> None:
    pacer, engine = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1)
    pacer.add(engine, foreseen=True)
    pacer.expect("a link of which nothing is known", 10.0)
    await idle_turns()
    assert (pacer.passes, manual.armed) == (1, [SHORTEST_S])


async def test_the_earliest_counts_and_nothing_any_more_is_forgotten(manual: Manual) -> None:
    pacer, engine = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=2)
    pacer.add(engine, foreseen=True)
    pacer.expect("one", 10.0018)
    pacer.expect("other", 10.0005)
    assert manual.armed == [pytest.approx(0.0018), pytest.approx(0.0005)], "the newcomer is due before the next pass"
    pacer.expect("third", 10.0017)
    assert len(manual.armed) == 2, "this one is not"
    engine.then = lambda: pacer.expect("other", None)
    assert manual.pass_after(0.0005) == pytest.approx(0.0012)


async def test_what_nobody_foresees_sets_the_pace(manual: Manual) -> None:
    """An event on the device has no due time: it is not to wait for that of a batch."""
    pacer, engine, events = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1), Scripted()
    pacer.add(engine, foreseen=True)
    pacer.add(events)
    pacer.expect("a lane", 10.0019)
    events.pending = 1
    pacer.kick()
    assert manual.armed == [pytest.approx(0.0019), SHORTEST_S]
    assert manual.pass_after(SHORTEST_S) == SHORTEST_S


async def test_after_a_pass_each_is_called_once(manual: Manual, caplog: pytest.LogCaptureFixture) -> None:
    pacer, first, second = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1), Scripted(pending=1)
    called: list[tuple[str, int]] = []

    def refill() -> None:
        called.append(("refill", second.asked))
        raise ZeroDivisionError("a bug")

    def other() -> None:
        called.append(("other", second.asked))

    def completion() -> None:
        for callback in (refill, other, refill):
            pacer.after_pass(callback)
        assert called == []

    first.then = completion
    pacer.add(first)
    pacer.add(second)
    pacer.kick()
    await idle_turns()
    assert called == [("refill", 1), ("other", 1)], "when every source has said what it knows"
    assert "a bug" in caplog.text
    caplog.clear()
    pacer.after_pass(other)
    assert len(called) == 3, "at once when no pass is under way"


async def test_closed_it_asks_nobody(manual: Manual) -> None:
    pacer, source = Pacer(asyncio.get_running_loop(), manual), Scripted(pending=1)
    pacer.add(source)
    pacer.kick()
    pacer.close()
    await idle_turns()
    manual.fire()
    pacer.kick()
    await idle_turns()
    assert (pacer.passes, source.asked, manual.closed) == (0, 0, True)


@pytest.mark.row("A4")
async def test_many_events_are_asked_one_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred groups wait for a device that stands still: each pass asks one event, not a hundred."""
    device, src, dst = FakeDevice(), Pool(layers=100), Pool(layers=100)
    async with Cluster(prefills=[src], decodes=[dst], config=config(layer_group=1), events=device) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, ints(5), total_tokens=4)
        asked: list[Any] = []
        reached = device.reached
        monkeypatch.setattr(device, "reached", lambda *at: asked.append(at) or reached(*at))  # type: ignore[func-returns-value]
        LateModel(src, device).forward(cluster.prefill().begin_forward([spec(1, ints(3))]), ints(3), 100)
        pacer = cluster.prefill_nodes[0].pacer
        await until(lambda: pacer.passes >= 20)
        assert set(asked) == {("compute", 1)}
        assert len(asked) <= pacer.passes + 1, "and once when it was recorded"
        device.run()
        await outcomes(cluster, handle)


def test_an_idle_process_uses_no_cpu() -> None:
    """Connected, with a transfer behind it, and nothing to do: nobody is asked, nothing is sent, no time is used."""
    fabric, src, dst = LoopbackFabric(), Pool(seed=1), Pool()
    with EmbeddedLoop(config()) as loop:
        prefill = loop.start_prefill(fabric.engine(), src.layout)
        with EmbeddedLoop(config()) as other:
            decode = other.start_decode(fabric.engine(), dst.layout)
            handle = decode.expect(1, 0, [prefill.address], ints(5), total_tokens=4)
            with prefill.begin_forward([spec(1, ints(3))]):
                pass
            assert handle.wait(PATIENCE_S).ok
            assert prefill.wait(1, timeout=PATIENCE_S).ok
            time.sleep(0.1)
            passes = [side.call(lambda node: node.pacer.passes) for side in (loop, other)]
            begun = time.process_time()
            time.sleep(1.0)
            used = time.process_time() - begun
            assert [side.call(lambda node: node.pacer.passes) for side in (loop, other)] == passes
            assert used < 0.03, f"{used * 1000:.1f} ms in a second"
