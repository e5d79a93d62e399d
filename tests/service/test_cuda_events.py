"""Events: what any source of them promises, and how the loop asks them, oldest first."""

from __future__ import annotations

import asyncio
import gc
import sys
import threading
import types
from collections.abc import Callable, Hashable
from typing import Any

import pytest

from orchestrator.cuda_events import CudaEvents, Event, EventSource, EventWatcher, HostEvents
from orchestrator.testing.device import FakeDevice
from protocols.errors import EngineUnavailableError

# -- the contract, of every source --------------------------------------------------------------------------------


class Sources:
    """A source and what makes its device get to the end of what is enqueued."""

    def __init__(self, source: EventSource, launch: Callable[[], object], finish: Callable[[], object]) -> None:
        self.source, self.launch, self.finish = source, launch, finish


def fake() -> Sources:
    device = FakeDevice()
    return Sources(device, lambda: device.launch(lambda: None), device.run)


def host() -> Sources:
    return Sources(HostEvents(), lambda: None, lambda: None)


def cuda() -> Sources:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    held: list[Any] = []
    return Sources(
        CudaEvents(0), lambda: held.append(torch.ones(1 << 20, device="cuda").cumsum(0)), torch.cuda.synchronize
    )


every_source = pytest.mark.parametrize("make", [fake, host, pytest.param(cuda, marks=pytest.mark.gpu)])


@pytest.mark.row("A4", "A13")
@every_source
def test_an_event_completes_with_what_was_enqueued_before_it(make: Callable[[], Sources]) -> None:
    sources = make()
    sources.source.enter_loop_thread()
    events: list[Event] = []
    for _ in range(5):
        sources.launch()
        events.append(sources.source.record())
    assert len({event.stream for event in events}) == 1
    hash(events[0].stream)
    answers = [event.query() for event in events]
    assert answers == sorted(answers, reverse=True), "in the order of the stream"
    sources.finish()
    assert [event.query() for event in events] == [True] * 5
    assert [event.query() for event in events] == [True] * 5, "for good"
    assert sources.source.record().query() in (True, False)


@pytest.mark.row("A4")
@every_source
def test_events_are_asked_from_another_thread_than_recorded_them(make: Callable[[], Sources]) -> None:
    sources = make()
    sources.launch()
    event = sources.source.record()
    sources.finish()
    answers: list[bool] = []
    thread = threading.Thread(target=lambda: answers.append(event.query()))
    thread.start()
    thread.join()
    assert answers == [True]


# -- the watcher --------------------------------------------------------------------------------------------------


class Scripted:
    """An event that says what a test tells it to, and counts how often it was asked."""

    def __init__(self, stream: Hashable = "s") -> None:
        self.stream = stream
        self.answer: bool | Exception = False
        self.asked = 0

    def query(self) -> bool:
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def test_only_the_oldest_of_a_stream_is_asked() -> None:
    watcher = EventWatcher(asyncio.get_running_loop())
    streams = {name: [Scripted(name) for _ in range(50)] for name in "ab"}
    futures = {name: [watcher.watch(event) for event in events] for name, events in streams.items()}
    for _ in range(10):
        assert watcher.poll() == 0
    assert watcher.queries == 22, "the first of each when it was given, then only those"
    for events in streams.values():
        assert [event.asked for event in events] == [11] + [0] * 49
    assert watcher.pending == 100
    for event in streams["a"][:3]:
        event.answer = True
    assert watcher.poll() == 3, "all that completed, in one pass"
    assert [future.done() for future in futures["a"]] == [True] * 3 + [False] * 47
    assert not any(future.done() for future in futures["b"])
    assert watcher.queries == 22 + 4 + 1


async def test_a_later_event_that_answers_first_waits_for_the_older() -> None:
    watcher = EventWatcher(asyncio.get_running_loop())
    old, new = Scripted(), Scripted()
    first, second = watcher.watch(old), watcher.watch(new)
    new.answer = True
    assert watcher.poll() == 0
    old.answer = True
    assert watcher.poll() == 2
    await asyncio.gather(first, second)
    assert watcher.pending == 0
    assert watcher.poll() == 0


@pytest.mark.row("A10")
async def test_an_event_that_cannot_be_asked_carries_its_error_and_the_next_goes_on() -> None:
    watcher = EventWatcher(asyncio.get_running_loop())
    broken, good = Scripted(), Scripted()
    first, second = watcher.watch(broken), watcher.watch(good)
    broken.answer, good.answer = RuntimeError("sticky"), True
    assert watcher.poll() == 2
    with pytest.raises(RuntimeError, match="sticky"):
        await asyncio.shield(first)
    await second
    assert watcher.pending == 0


async def test_an_error_that_nobody_waits_for_is_no_noise(caplog: pytest.LogCaptureFixture) -> None:
    """A pass whose chunks are all gone: its events fail unheard."""
    watcher = EventWatcher(asyncio.get_running_loop())
    broken = Scripted()
    watcher.watch(broken)
    broken.answer = RuntimeError("unheard")
    watcher.poll()
    gc.collect()
    await asyncio.sleep(0)
    assert caplog.records == []


@pytest.mark.parametrize("answer", [True, RuntimeError("late")])
async def test_a_waiter_that_went_away_disturbs_nobody(answer: bool | Exception) -> None:
    """Even one that forgot the shield and cancelled the future itself."""
    watcher = EventWatcher(asyncio.get_running_loop())
    event, next_one = Scripted(), Scripted()
    future, other = watcher.watch(event), watcher.watch(next_one)
    future.cancel()
    event.answer, next_one.answer = answer, True
    assert watcher.poll() == 2
    await other


async def test_an_event_that_has_completed_is_not_pending() -> None:
    """Nobody need come round to ask for it: that of a cache the CPU writes, or of a stream that is idle."""
    watcher, done, broken = EventWatcher(asyncio.get_running_loop()), Scripted(), Scripted()
    done.answer, broken.answer = True, RuntimeError("the device is lost")
    future = watcher.watch(done)
    assert future.done()
    with pytest.raises(RuntimeError, match="lost"):
        await watcher.watch(broken)
    assert (watcher.pending, watcher._streams) == (0, {})


async def test_streams_come_and_go_without_a_trace() -> None:
    watcher = EventWatcher(asyncio.get_running_loop())
    for number in range(1000):
        event = Scripted(number)
        watcher.watch(event)
        event.answer = True
    assert watcher.pending == 1000
    assert watcher.poll() == 1000
    assert watcher.pending == 0
    assert watcher._streams == {}


# -- sources ------------------------------------------------------------------------------------------------------


def test_without_torch_there_are_no_cuda_events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(EngineUnavailableError, match="torch is not installed") as caught:
        CudaEvents(0)
    assert "pip install" in caught.value.hint


class Torch(types.ModuleType):
    """As much of torch as events need; remembers what it was asked for."""

    def __init__(self, available: bool = True) -> None:
        super().__init__("torch")
        self.calls: list[tuple[Any, ...]] = []
        self.cuda = self
        self.reached = False
        self._available = available

    def is_available(self) -> bool:
        return self._available

    def current_stream(self, device: int) -> Any:
        self.calls.append(("current_stream", device))
        return types.SimpleNamespace(cuda_stream=4242)

    def set_device(self, device: int) -> None:
        self.calls.append(("set_device", device))

    def Event(self, *, enable_timing: bool) -> Any:
        self.calls.append(("Event", enable_timing))
        return types.SimpleNamespace(
            record=lambda stream: self.calls.append(("record", stream.cuda_stream)), query=lambda: self.reached
        )


def test_without_a_device_there_are_none_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", Torch(available=False))
    with pytest.raises(EngineUnavailableError, match="no CUDA device"):
        CudaEvents(0)


@pytest.mark.row("A13", "A4")
def test_a_cuda_event_is_recorded_on_the_stream_that_is_current_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Never timed, never synchronised, and of the device that was asked for."""
    torch = Torch()
    monkeypatch.setitem(sys.modules, "torch", torch)
    events = CudaEvents(3)
    event = events.record()
    assert torch.calls == [("current_stream", 3), ("Event", False), ("record", 4242)]
    assert event.stream == 4242
    assert event.query() is False
    torch.reached = True
    assert event.query() is True
    events.enter_loop_thread()
    assert torch.calls[-1] == ("set_device", 3)
