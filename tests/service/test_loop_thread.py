"""The embedded loop and its faces, from threads: starting, ending, waiting, and a forward thread that never waits."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import orchestrator.loop_thread
from orchestrator.decode import Decode
from orchestrator.engines.base import Engine
from orchestrator.engines.faulty import Fault, FaultyEngine
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.loop_thread import EmbeddedLoop, new_event_loop
from orchestrator.node import Node
from orchestrator.outcome import RoomStatus
from orchestrator.prefill import Prefill
from orchestrator.sender import Sender
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from protocols.errors import AbortedError, BusyError, ClosedError, ConfigError, LocalError, UnknownRoomError
from tests.service.scenes import PATIENCE_S, config, ints, spec


def eventually(condition: Callable[[], object], what: str = "the condition holds") -> None:
    """For a thread: wait until the condition holds, but not for ever."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"never: {what}"
        time.sleep(0.001)


class Pair:
    """A prefill and a decode, each on an embedded loop of its own, over real sockets."""

    def __init__(self, prefill_loop: EmbeddedLoop, decode_loop: EmbeddedLoop, **pools: Any) -> None:
        fabric = LoopbackFabric()
        self.src, self.dst = Pool(seed=1, **pools), Pool(**pools)
        self.loops = prefill_loop, decode_loop
        self.engine = FaultyEngine(fabric.engine())
        self.prefill: Prefill = prefill_loop.start_prefill(self.engine, self.src.layout)
        self.decode: Decode = decode_loop.start_decode(fabric.engine(), self.dst.layout)

    def expect(self, room: int, page: int, gen: int = 0) -> Any:
        return self.decode.expect(room, gen, [self.prefill.address], ints(page), total_tokens=4)

    def forward(self, room: int, page: int, gen: int = 0) -> None:
        with self.prefill.begin_forward([spec(room, ints(page), gen=gen)]) as forward:
            for layer in range(4):
                forward.layer_end(layer)


@contextlib.contextmanager
def pair(**pools: Any) -> Iterator[Pair]:
    with EmbeddedLoop(config()) as one, EmbeddedLoop(config()) as other:
        yield Pair(one, other, **pools)


@contextlib.contextmanager
def blocked(loop: EmbeddedLoop) -> Iterator[None]:
    """The loop thread stands still within."""
    entered, release = threading.Event(), threading.Event()

    def stand_still(_: Node) -> None:
        entered.set()
        assert release.wait(PATIENCE_S)

    caller = threading.Thread(target=lambda: loop.call(stand_still))
    caller.start()
    assert entered.wait(PATIENCE_S)
    try:
        yield
    finally:
        release.set()
        caller.join()


# -- starting -----------------------------------------------------------------------------------------------------


def test_the_thread_has_a_name_and_ends_with_the_context() -> None:
    with EmbeddedLoop(name="kv-test") as loop:
        thread = loop.call(lambda node: threading.current_thread())
        assert (thread.name, thread.daemon) == ("kv-test", True)
        assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_it_runs_uvloop_where_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    with contextlib.closing(new_event_loop()) as loop:
        assert type(loop).__module__.startswith("uvloop")
    monkeypatch.setitem(sys.modules, "uvloop", None)
    with contextlib.closing(new_event_loop()) as loop:
        assert not type(loop).__module__.startswith("uvloop")
    with EmbeddedLoop() as embedded:
        kind = embedded.call(lambda node: type(node.loop).__module__)
    assert kind.startswith("asyncio")


@pytest.mark.parametrize("where", ["new_event_loop", "Node"])
def test_what_fails_while_the_loop_starts_reaches_the_caller(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise OSError("no descriptors left")

    monkeypatch.setattr(orchestrator.loop_thread, where, broken)
    loop = EmbeddedLoop()
    entered: list[BaseException] = []

    def enter() -> None:
        try:
            loop.__enter__()
        except OSError as exc:
            entered.append(exc)

    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert [str(exc) for exc in entered] == ["no descriptors left"]
    loop.close()
    with pytest.raises(ClosedError):
        loop.call(lambda node: None)


def test_a_port_that_is_taken_reaches_the_caller_and_another_one_works() -> None:
    fabric, pool = LoopbackFabric(), Pool(seed=1)
    engine = fabric.engine()
    with socket.socket() as taken, EmbeddedLoop(config()) as loop:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(BusyError):
            loop.start_prefill(engine, pool.layout, bind=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError):
            loop.start_prefill(engine, pool.layout, bind="nonsense")
        assert loop.start_prefill(engine, pool.layout).address.startswith("tcp://127.0.0.1:")


def test_memory_that_cannot_be_registered_reaches_the_caller_and_is_tried_again() -> None:
    """The kernel refuses a pin once. The second start must not take the region for registered."""

    class Reluctant(FaultyEngine):
        refusals = 1

        def register(self, address: int, nbytes: int) -> None:
            if self.refusals:
                self.refusals -= 1
                raise ConfigError("cannot lock memory")
            super().register(address, nbytes)

    fabric, src, dst = LoopbackFabric(), Pool(seed=1), Pool()
    engine = Reluctant(fabric.engine())
    with EmbeddedLoop(config()) as loop, EmbeddedLoop(config()) as other:
        with pytest.raises(ConfigError, match="cannot lock"):
            loop.start_prefill(engine, src.layout)
        prefill = loop.start_prefill(engine, src.layout)
        decode = other.start_decode(fabric.engine(), dst.layout)
        handle = decode.expect(1, 0, [prefill.address], ints(5), total_tokens=4)
        with prefill.begin_forward([spec(1, ints(3))]):
            pass
        assert handle.wait(PATIENCE_S).ok, handle.result().error


# -- calls --------------------------------------------------------------------------------------------------------


def test_a_call_returns_what_the_function_returns_or_raises() -> None:
    with EmbeddedLoop() as loop:
        assert loop.call(lambda node: node.loop.is_running()) is True
        with pytest.raises(ZeroDivisionError):
            loop.call(lambda node: 1 // 0)
        with pytest.raises(KeyboardInterrupt):
            loop.call(interrupt)
        assert loop.call(lambda node: 7) == 7, "the loop survives all of them"


def interrupt(_: Node) -> None:
    raise KeyboardInterrupt


def test_outside_of_its_context_it_is_closed() -> None:
    loop = EmbeddedLoop()
    with pytest.raises(ClosedError):
        loop.call(lambda node: None)
    loop.close()
    with loop, pytest.raises(LocalError, match="entered before"):
        loop.__enter__()
    loop.close()
    with pytest.raises(ClosedError):
        loop.call(lambda node: None)
    with pytest.raises(LocalError):
        loop.__enter__()


def test_what_would_wait_for_itself_is_refused() -> None:
    with pair() as both:
        handle = both.expect(1, 5)
        both.prefill.begin_forward([spec(1, ints(3))])
        prefill_loop, decode_loop = both.loops
        refused: list[Callable[[Node], object]] = [
            lambda node: prefill_loop.call(lambda node: None),
            lambda node: prefill_loop.close(),
            lambda node: prefill_loop.start_decode(both.engine, both.dst.layout),
            lambda node: both.prefill.wait(1, timeout=0.1),
        ]
        for function in refused:
            with pytest.raises(LocalError):
                prefill_loop.call(function)
        for function in (lambda node: handle.wait(0.1), lambda node: both.decode.check(both.prefill.address)):
            with pytest.raises(LocalError):
                decode_loop.call(function)


# -- waiting ------------------------------------------------------------------------------------------------------


def test_a_wait_ends_with_the_room_or_with_its_own_patience() -> None:
    with pair() as both:
        handle = both.expect(1, 5)
        forward = both.prefill.begin_forward([spec(1, ints(3))])
        for wait in (lambda: handle.wait(0.02), lambda: both.prefill.wait(1, timeout=0.02)):
            with pytest.raises(TimeoutError, match=r"1\.0"):
                wait()
        with pytest.raises(UnknownRoomError):
            both.prefill.wait(2)
        with pytest.raises(LocalError):
            both.prefill.result(1)
        with ThreadPoolExecutor(4) as threads:
            waits = [threads.submit(handle.wait), threads.submit(both.prefill.wait, 1)]
            waits += [threads.submit(handle.wait, PATIENCE_S), threads.submit(both.prefill.wait, 1, 0, PATIENCE_S)]
            forward.end()
            assert [wait.result(PATIENCE_S).ok for wait in waits] == [True] * 4


def test_a_coroutine_of_any_loop_may_wait_and_stop_waiting() -> None:
    with pair() as both:
        handle = both.expect(1, 5)
        forward = both.prefill.begin_forward([spec(1, ints(3))])

        async def main() -> None:
            impatient = [asyncio.ensure_future(both.prefill.finished(1)), asyncio.create_task(as_coroutine(handle))]
            patient = [asyncio.ensure_future(both.prefill.finished(1)), asyncio.create_task(as_coroutine(handle))]
            await asyncio.sleep(0.01)
            for task in impatient:
                task.cancel()
            assert all(isinstance(e, asyncio.CancelledError) for e in await gathered(impatient))
            assert not both.prefill.poll(1).ended, "leaving a wait leaves the room alone"
            forward.end()
            async with asyncio.timeout(PATIENCE_S):
                assert [result.ok for result in await asyncio.gather(*patient)] == [True, True]

        asyncio.run(main())


async def as_coroutine(handle: Any) -> Any:
    return await handle


async def gathered(tasks: list[Any]) -> list[Any]:
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_ending_the_loop_ends_every_room_and_every_wait() -> None:
    with ThreadPoolExecutor(2) as threads, EmbeddedLoop(config()) as other:
        with EmbeddedLoop(config()) as loop:
            both = Pair(loop, other)
            hold = both.engine.add(Fault(hold=True))
            handle = both.expect(1, 5)
            both.forward(1, 3)
            eventually(lambda: both.engine.attempts, "it is in flight")
            waits = [threads.submit(both.prefill.wait, 1), threads.submit(handle.wait)]
        assert hold.hold, "nobody released it: the engine was deleted under it"
        for wait in waits:
            result = wait.result(PATIENCE_S)
            assert not result.ok
            assert "shutting down" in str(result.error) or "goodbye" in str(result.error)
        assert both.prefill.source_free(1), "no engine, no reader"


# -- the forward thread -------------------------------------------------------------------------------------------


@pytest.mark.row("A4", "A10")
def test_the_forward_thread_never_waits_for_the_loop() -> None:
    """V6: the loop stands still for a whole forward, and longer. Nothing of it blocks; then everything arrives."""
    with pair() as both:
        handles = [both.expect(room, room) for room in range(50)]
        with blocked(both.loops[0]):
            for room in range(50):
                both.forward(room, 10 + room)
                assert both.prefill.poll(room) is RoomStatus.WAITING
            assert both.engine.attempts == 0
        assert all(handle.wait(PATIENCE_S).ok for handle in handles)
        assert both.src.differences(both.dst, np.arange(10, 60), np.arange(50)) == []


@pytest.mark.row("C6")
@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_an_abort_is_visible_before_it_returns(side: str) -> None:
    """To every thread, though the loop stands still and has not heard of it; and it is the first cause that stands."""
    with pair() as both:
        handle = both.expect(1, 5)
        both.prefill.begin_forward([spec(1, ints(3))])
        eventually(lambda: both.prefill.poll(1) is RoomStatus.TRANSFERRING, "the offer has arrived")
        loop = both.loops[side == "decode"]
        abort = handle.abort if side == "decode" else lambda reason: both.prefill.abort(1, reason=reason)
        poll = handle.poll if side == "decode" else lambda: both.prefill.poll(1)
        result = handle.result if side == "decode" else lambda: both.prefill.result(1)
        with blocked(loop), ThreadPoolExecutor(1) as thread:
            assert abort("the first") is True
            assert thread.submit(poll).result(PATIENCE_S) is RoomStatus.FAILED
            assert abort("the second") is False
            error = thread.submit(result).result(PATIENCE_S).error
            assert isinstance(error, AbortedError)
            assert "the first" in str(error)
            assert side in str(error)
        assert not handle.wait(PATIENCE_S).ok
        assert not both.prefill.wait(1, timeout=PATIENCE_S).ok
        eventually(handle.units_free)
        eventually(lambda: both.prefill.source_free(1))
        assert "the first" in str(handle.result().error)
        assert "the first" in str(both.prefill.result(1).error)


@pytest.mark.row("C6")
def test_an_abort_of_a_room_that_nobody_knows_turns_away_what_comes_later() -> None:
    with pair() as both:
        assert both.prefill.abort(9, reason="never wanted") is True
        assert both.prefill.poll(9) is RoomStatus.FAILED
        assert both.prefill.begin_forward([spec(9, ints(3))]).refused
        result = both.expect(9, 5).wait(PATIENCE_S)
        assert "never wanted" in str(result.error)
        with pytest.raises(UnknownRoomError):
            both.decode.abort(77)


@pytest.mark.row("C6", "A8")
@pytest.mark.parametrize("seed", range(3))
def test_polling_and_aborting_from_many_threads(seed: int) -> None:
    """Six threads abort at random from both sides while forwards run: exactly one abort of each side and room wins,
    no status ever changes once it has ended, and both sides end."""
    rooms = 60
    rng = random.Random(seed)
    with pair(pages=128) as both:
        wins: Counter[tuple[str, int]] = Counter()
        lock = threading.Lock()
        handles = {room: both.expect(room, room) for room in range(rooms)}
        for room in range(rooms):
            both.prefill.begin_forward([spec(room, ints(64 + room))]).discard()
        stop = threading.Event()
        changed: list[str] = []

        def watch() -> None:
            ended: dict[tuple[str, int], RoomStatus] = {}
            while not stop.is_set():
                for room, handle in handles.items():
                    for side, status in (("decode", handle.poll()), ("prefill", both.prefill.poll(room))):
                        before = ended.get((side, room))
                        if before is not None and before is not status:
                            changed.append(f"{side} {room}: {before} then {status}")
                        if status.ended:
                            ended[side, room] = status

        def abort(seed: int) -> None:
            mine = random.Random(seed)
            for _ in range(rooms):
                room = mine.randrange(rooms // 2)
                side = mine.choice(["prefill", "decode"])
                won = both.prefill.abort(room) if side == "prefill" else handles[room].abort()
                status = both.prefill.poll(room) if side == "prefill" else handles[room].poll()
                assert status.ended
                if won:
                    assert status is RoomStatus.FAILED
                    with lock:
                        wins[side, room] += 1

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            with ThreadPoolExecutor(6) as threads:
                jobs = [threads.submit(abort, rng.random()) for _ in range(6)]  # type: ignore[arg-type]
                for room in rng.sample(range(rooms), rooms):
                    both.forward(room, 64 + room)
                for job in jobs:
                    job.result(PATIENCE_S)
            results = {room: handle.wait(PATIENCE_S) for room, handle in handles.items()}
            for room in range(rooms):
                both.prefill.wait(room, timeout=PATIENCE_S)
        finally:
            stop.set()
            watcher.join()
        assert changed == []
        assert set(wins.values()) == {1}
        assert all(results[room].ok for room in range(rooms // 2, rooms))
        for room, result in results.items():
            assert result.ok == both.prefill.result(room).ok or ("prefill", room) in wins
            if result.ok:
                assert both.src.differences(both.dst, ints(64 + room), ints(room)) == []
        eventually(lambda: all(both.prefill.source_free(room) for room in range(rooms)))
        eventually(lambda: all(handle.units_free() for handle in handles.values()))


@pytest.mark.row("A10")
def test_hooks_of_a_loop_that_died_are_harmless(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not closed: dead, amid its own shutdown. The forward thread neither hangs nor hears of it."""

    async def broken(self: Sender, reason: str = "") -> None:
        raise RuntimeError("a bug in the shutdown")

    device, fabric = FakeDevice(), LoopbackFabric()
    engine: Engine = fabric.engine()
    with EmbeddedLoop(config()) as loop:
        prefill = loop.start_prefill(engine, Pool(seed=1).layout, events=device)
        forward = prefill.begin_forward([spec(1, ints(3))])
        monkeypatch.setattr(Sender, "stop", broken)
    assert "a bug in the shutdown" in caplog.text
    caplog.clear()
    assert fabric.find(engine.session) is None, "the fence was made all the same"
    for layer in range(4):
        forward.layer_end(layer)
    forward.end()
    late = prefill.begin_forward([spec(2, ints(3))])
    late.layer_end(0)
    late.end()
    prefill.abort(1)
    assert prefill.poll(1) is RoomStatus.FAILED
    assert prefill.poll(2) is RoomStatus.FAILED
    assert not prefill.wait(1, timeout=PATIENCE_S).ok
    with pytest.raises(ClosedError):
        loop.call(lambda node: None)
    del loop, prefill, forward, late
    gc.collect()  # what was left pending would be told here
