"""The Mooncake engine: its own decisions against a double of the library, then the real one against real faults."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from orchestrator.engines import mooncake_abi, mooncake_contact, mooncake_env
from orchestrator.engines.base import Probe
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ClosedError, ConfigError, EngineUnavailableError
from protocols.ids import Session
from tests.engines.conformance import PATIENCE, until
from tests.engines.native_double import LANDED, ModuleDouble, NativeDouble
from tests.engines.peer_process import PeerProcess

PEER = Session("127.0.0.1:9")
MODES: list[CompletionMode] = ["one-block", "batch-status"]


class Memory:
    """Some bytes with an address."""

    def __init__(self, nbytes: int, value: int = 0) -> None:
        self.bytes = np.full(nbytes, value, np.uint8)
        self.address: int = self.bytes.ctypes.data

    def blocks(self, dst: int, block: int, count: int) -> Blocks:
        """``count`` blocks of ``block`` bytes from here to ``dst``, one after the other."""
        offset = np.arange(count) * block
        return Blocks(self.address + offset, dst + offset, np.full(count, block))


# -- against a double ---------------------------------------------------------------------------------------------


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleDouble]:
    double = ModuleDouble()
    monkeypatch.setattr(mooncake_env, "load", lambda: double)
    monkeypatch.setattr(mooncake_env, "installed_version", lambda: "0.3.14")
    monkeypatch.setattr(mooncake_abi, "trusted", frozenset)
    mooncake_contact._make_scout.cache_clear()
    yield double
    mooncake_contact._make_scout.cache_clear()


@pytest.fixture
def memory() -> Memory:
    return Memory(4096, 7)


@pytest.fixture
async def engine(module: ModuleDouble, memory: Memory) -> AsyncIterator[MooncakeEngine]:
    engine = MooncakeEngine()
    engine.register(memory.address, 4096)
    yield engine
    for native in module.made:
        native.probe_gate.set()
    await engine.close(0)


@pytest.fixture
def native(engine: MooncakeEngine, module: ModuleDouble) -> NativeDouble:
    return module.made[0]


def scout_of() -> NativeDouble:
    """The engine that probes: never the one that carries data."""
    scout: NativeDouble = mooncake_contact._make_scout("127.0.0.1")
    return scout


class TestAgainstADouble:
    async def test_names_itself(self, engine: MooncakeEngine) -> None:
        assert engine.info.name == "mooncake"
        assert engine.info.version == "0.3.14"
        assert engine.info.completion_mode == "one-block"
        assert engine.session.startswith("127.0.0.1:15")

    async def test_says_when_it_does_not_start(self, module: ModuleDouble) -> None:
        with pytest.raises(EngineUnavailableError, match="could not start"):
            MooncakeEngine(transport="carrier pigeon")

    async def test_falls_back_where_the_self_test_failed(
        self, module: ModuleDouble, caplog: pytest.LogCaptureFixture
    ) -> None:
        engine = MooncakeEngine(completion="batch-status")
        assert engine.info.completion_mode == "one-block"
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        await engine.close(0)

    async def test_memory_answers_become_words(self, engine: MooncakeEngine, native: NativeDouble) -> None:
        native.memory_code = -7
        with pytest.raises(ConfigError, match="overlaps"):
            engine.register(1 << 20, 10)
        native.memory_code = -99
        with pytest.raises(ConfigError, match="code=-99"):
            engine.register(1 << 20, 10)
        native.memory_code = 0
        engine.register(1 << 20, 10)
        native.memory_code = -3
        with pytest.raises(ConfigError, match="no such region"):
            engine.unregister(1 << 20)

    async def test_contact_is_a_probe_and_an_empty_write_where_no_symbol_is_trusted(
        self, engine: MooncakeEngine, native: NativeDouble, module: ModuleDouble
    ) -> None:
        await engine.connect(PEER, None, PATIENCE)
        assert native.calls == ["transfer_submit_write", "transfer_check_status"]
        assert not native.written
        assert scout_of().calls == ["send_probe"]

    async def test_one_contact_for_all_who_ask(
        self, engine: MooncakeEngine, native: NativeDouble, module: ModuleDouble
    ) -> None:
        await asyncio.gather(*(engine.connect(PEER, None, PATIENCE) for _ in range(5)))
        await engine.connect(PEER, None, PATIENCE)
        assert scout_of().calls == ["send_probe"]

    async def test_the_probe_byte_is_written_and_awaited(
        self, engine: MooncakeEngine, native: NativeDouble, memory: Memory
    ) -> None:
        connecting = asyncio.create_task(engine.connect(PEER, Probe(memory.address, 77), PATIENCE))
        await until(lambda: len(native.written) > 0)
        assert list(native.written) == [(PEER, memory.address, 77, 1)]
        assert not connecting.done()
        with pytest.raises(BrokenPeerError):
            engine.submit(PEER, memory.blocks(0, 8, 1))
        native.always = LANDED
        await connecting
        engine.submit(PEER, memory.blocks(0, 8, 1))
        await until(lambda: engine.pending == 0, engine)

    async def test_a_peer_that_does_not_answer_or_open(
        self, engine: MooncakeEngine, native: NativeDouble, module: ModuleDouble
    ) -> None:
        scout_of().probe_code = -102
        with pytest.raises(BrokenPeerError, match="does not answer"):
            await engine.connect(PEER, None, PATIENCE)
        assert native.calls == []
        scout_of().probe_code = 0
        native.refuse_after = 0
        with pytest.raises(BrokenPeerError, match="cannot be opened"):
            await engine.connect(PEER, None, PATIENCE)
        native.refuse_after = None
        await engine.connect(PEER, None, PATIENCE)

    async def test_a_stuck_probe_is_joined_by_the_next_call_and_not_waited_for_at_the_end(
        self, engine: MooncakeEngine, native: NativeDouble, module: ModuleDouble
    ) -> None:
        scout = scout_of()
        scout.probe_gate.clear()
        for _ in range(2):
            with pytest.raises(BrokenPeerError, match="in time"):
                await engine.connect(PEER, None, 0.01)
        assert scout.calls == ["send_probe"]
        await asyncio.wait_for(engine.close(0), PATIENCE)
        scout.probe_gate.set()
        await until(lambda: not engine._contacts)
        assert native.calls == [], "a contact that comes back late leaves a closed engine alone"

    async def test_cancelling_a_contact_leaves_the_engine_usable(
        self, engine: MooncakeEngine, module: ModuleDouble
    ) -> None:
        scout = scout_of()
        scout.probe_gate.clear()
        connecting = asyncio.create_task(engine.connect(PEER, None, PATIENCE))
        await until(lambda: scout.calls != [])
        connecting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await connecting
        scout.probe_gate.set()
        await engine.connect(PEER, None, PATIENCE)
        assert scout.calls == ["send_probe"]

    async def test_the_native_engine_goes_with_the_close(
        self, engine: MooncakeEngine, module: ModuleDouble, memory: Memory
    ) -> None:
        scout_of().probe_code = -1
        with pytest.raises(BrokenPeerError) as kept:
            await engine.connect(PEER, None, PATIENCE)
        scout_of().probe_code = 0
        await engine.connect(PEER, None, PATIENCE)
        batch = engine.submit(PEER, memory.blocks(0, 8, 2))
        gone = weakref.ref(module.made.pop(0))
        await engine.close(0)
        gc.collect()
        assert gone() is None, "whoever still holds it keeps its ports open: no fence"
        assert batch.in_doubt == [0, 1]
        assert kept.value is not None

    async def test_a_cancelled_close_ends_all_the_same(self, engine: MooncakeEngine, module: ModuleDouble) -> None:
        closing = asyncio.create_task(engine.close(0))
        await asyncio.sleep(0)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        await engine.close(0)
        with pytest.raises(ClosedError):
            engine.register(1, 1)

    def test_a_result_that_comes_after_the_loop_closed_is_dropped(self, module: ModuleDouble) -> None:
        scout = scout_of()
        scout.probe_gate.clear()

        async def give_up() -> None:
            with pytest.raises(BrokenPeerError):
                await MooncakeEngine().connect(PEER, None, 0.01)

        asyncio.run(give_up())
        scout.probe_gate.set()
        for thread in threading.enumerate():
            if thread.name.startswith("kvferry-connect"):
                thread.join(PATIENCE)  # its exception would fail the test as an unhandled one


# -- the real one -------------------------------------------------------------------------------------------------


@asynccontextmanager
async def real_engine(mode: CompletionMode, memory: Memory) -> AsyncIterator[MooncakeEngine]:
    engine = MooncakeEngine(completion=mode)
    assert engine.info.completion_mode == mode
    engine.register(memory.address, len(memory.bytes))
    try:
        yield engine
    finally:
        await engine.close(0)


def silent_listener() -> socket.socket:
    """A port that accepts connections, by the kernel's grace, and never answers."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(16)
    return listener


def session_of(listener: socket.socket) -> Session:
    return Session(f"127.0.0.1:{listener.getsockname()[1]}")


ALLOWED = {
    "initialize",
    "get_rpc_port",
    "get_engine_ptr",
    "register_memory",
    "unregister_memory",
    "send_probe",
    "transfer_submit_write",
    "transfer_check_status",
    "batch_transfer_async_write",
}


@pytest.mark.mooncake
@pytest.mark.row("B1")
@pytest.mark.parametrize("mode", MODES)
async def test_only_asynchronous_writes_and_their_status_are_used(
    mode: CompletionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = mooncake_env.load()
    used: set[str] = set()

    class Recorder:
        def __init__(self) -> None:
            self.native = real.TransferEngine()

        def __getattr__(self, name: str) -> Any:
            used.add(name)
            return getattr(self.native, name)

    recording = ModuleType("mooncake.engine")
    recording.__file__ = real.__file__
    recording.TransferEngine = Recorder  # type: ignore[attr-defined]
    monkeypatch.setattr(mooncake_env, "load", lambda: recording)
    source, target = Memory(1 << 16, 7), Memory(1 << 16)
    async with real_engine(mode, source) as writer, real_engine(mode, target) as reader:
        await writer.connect(reader.session, Probe(source.address, target.address), PATIENCE)
        good = writer.submit(reader.session, source.blocks(target.address, 256, 64))
        bad = writer.submit(reader.session, source.blocks(1 << 40, 256, 2))
        await until(lambda: writer.pending == 0, writer)
        assert good.landed
        assert bad.in_doubt == [0, 1]
        writer.unregister(source.address)
    assert used <= ALLOWED


@pytest.mark.mooncake
@pytest.mark.row("B5")
@pytest.mark.parametrize("trust", ["symbols", "plain calls"])
async def test_a_black_hole_costs_its_deadline_and_nobody_else(trust: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if trust == "plain calls":
        monkeypatch.setattr(mooncake_abi, "trusted", frozenset)
    source, target = Memory(1 << 16, 7), Memory(1 << 16)
    async with real_engine("one-block", source) as writer, real_engine("one-block", target) as reader:
        await writer.connect(reader.session, Probe(source.address, target.address), PATIENCE)
        with silent_listener() as listener:
            began = time.monotonic()
            contact = asyncio.create_task(writer.connect(session_of(listener), None, 1.0))
            longest = 0.0
            while not contact.done():
                start = time.monotonic()
                batch = writer.submit(reader.session, source.blocks(target.address, 64, 8))
                longest = max(longest, time.monotonic() - start)
                await until(lambda: writer.pending == 0, writer)
                assert batch.landed
            with pytest.raises(BrokenPeerError, match="in time"):
                await contact
            assert 0.9 < time.monotonic() - began < 10
            assert longest < 0.5, "blocked behind the black hole it would be a minute"
            start = time.monotonic()
            await writer.close(0)
            assert time.monotonic() - start < 10, "nor does the end wait for the stuck probe"


@pytest.mark.mooncake
@pytest.mark.row("B5")
async def test_a_peer_that_hangs_up_is_no_peer() -> None:
    source = Memory(1 << 12)

    async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
    async with server, real_engine("one-block", source) as engine:
        with pytest.raises(BrokenPeerError, match="does not answer"):
            await engine.connect(session_of(server.sockets[0]), None, PATIENCE)


@pytest.mark.mooncake
@pytest.mark.row("B4", "B5")
@pytest.mark.parametrize("mode", MODES)
async def test_a_killed_peer_ends_its_batches_and_leaves_others_alone(mode: CompletionMode) -> None:
    block, count = 1 << 20, 8
    source = Memory(block * count, 7)
    async with (
        real_engine(mode, source) as engine,
        PeerProcess(block * count) as peer,
        PeerProcess(1 << 16) as healthy,
    ):
        for other in (peer, healthy):
            await engine.connect(other.session, Probe(source.address, other.address), PATIENCE)
        await peer.stop()  # nothing is acknowledged before it dies
        batches = [engine.submit(peer.session, source.blocks(peer.address, block, count)) for _ in range(4)]
        await peer.kill()
        await until(lambda: engine.pending == 0, engine)
        assert [batch.in_doubt for batch in batches] == [list(range(count))] * 4
        late = engine.submit(peer.session, source.blocks(peer.address, block, 1))
        await until(lambda: late.done, engine)
        assert late.in_doubt == [0]
        fine = engine.submit(healthy.session, source.blocks(healthy.address, 1024, 64))
        await until(lambda: fine.done, engine)
        assert fine.landed
        assert await healthy.count(7, 1024, 64) == 64


@pytest.mark.slow
@pytest.mark.mooncake
@pytest.mark.row("B4")
@pytest.mark.parametrize("mode", MODES)
async def test_failed_blocks_land_after_all_when_a_stopped_peer_goes_on(
    mode: CompletionMode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", "1")
    monkeypatch.setenv("MC_TCP_STATUS_TIMEOUT_SEC", "1")
    block, count = 1 << 16, 8
    source = Memory(block * count, 7)
    async with real_engine(mode, source) as engine, PeerProcess(block * count) as peer:
        await engine.connect(peer.session, Probe(source.address, peer.address), PATIENCE)
        assert await peer.count(7, block, count) == 0
        await peer.stop()
        batch = engine.submit(peer.session, source.blocks(peer.address, block, count))
        await until(lambda: batch.done, engine, timeout=40)
        assert sorted(batch.in_doubt) == list(range(count))
        assert not batch.quiet
        source.bytes[:] = 9  # done: the source is free, and its next owner writes
        peer.resume()
        async with asyncio.timeout(PATIENCE):
            while await peer.count(7, block, count) < count:
                pass
        assert await peer.count(9, block, count) == 0


@pytest.mark.mooncake
async def test_the_gil_is_free_while_an_engine_ends() -> None:
    memory = Memory(1 << 12)
    engine = MooncakeEngine()
    engine.register(memory.address, 1 << 12)
    longest, last, ended = 0.0, time.monotonic(), threading.Event()

    def tick() -> None:
        nonlocal longest, last
        while not ended.wait(0.001):
            now = time.monotonic()
            longest, last = max(longest, now - last), now

    ticker = threading.Thread(target=tick)
    ticker.start()
    await engine.close(0)
    ended.set()
    ticker.join()
    assert longest < 0.4, "with the GIL held it is most of a second"


ABRUPT_EXIT = """
import asyncio, sys
import numpy as np
from orchestrator.engines.base import Probe
from orchestrator.engines.mooncake import MooncakeEngine
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError

half = 32 << 20
memory = np.zeros(2 * half, np.uint8)
base = memory.ctypes.data

async def main():
    writer, reader = MooncakeEngine(), MooncakeEngine()
    writer.register(base, half)
    reader.register(base + half, half)
    await writer.connect(reader.session, Probe(base, base + half), 10)
    try:
        await writer.connect(sys.argv[1], None, 0.1)
    except BrokenPeerError:
        at = np.arange(32) << 20
        writer.submit(reader.session, Blocks(base + at, base + half + at, np.full(32, 1 << 20)))
        return writer, reader

kept = asyncio.run(main())
sys.exit(7)
"""


@pytest.mark.mooncake
def test_a_process_may_exit_in_the_middle_of_everything() -> None:
    with silent_listener() as listener:
        command = [sys.executable, "-c", ABRUPT_EXIT, session_of(listener)]
        assert subprocess.run(command, timeout=30, check=False).returncode == 7


def test_the_double_has_no_call_that_is_not_allowed() -> None:
    public = {name for name in vars(NativeDouble) if not name.startswith("_")}
    assert public <= ALLOWED
    assert ctypes.sizeof(ctypes.c_void_p) == 8, "addresses travel as 64-bit integers"
