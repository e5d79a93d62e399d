"""The Mooncake engine's own decisions, against a double of the library. The real one: ``test_mooncake_real``."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Iterator

import pytest

from orchestrator.engines import mooncake as mooncake_engine
from orchestrator.engines import mooncake_abi, mooncake_contact, mooncake_env
from orchestrator.engines.base import Probe
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from protocols.errors import BrokenPeerError, ClosedError, ConfigError, EngineUnavailableError
from protocols.ids import Session
from tests.engines.conformance import PATIENCE, until
from tests.engines.memory import Memory
from tests.engines.native_double import ALLOWED, LANDED, ModuleDouble, NativeDouble

PEER = Session("127.0.0.1:9")


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

    async def test_takes_the_cheaper_way_where_the_self_test_passed(
        self, module: ModuleDouble, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        class AbiDouble:
            def __init__(self, *_: object) -> None: ...

        monkeypatch.setattr(mooncake_abi, "trusted", lambda: frozenset({mooncake_abi.BATCH_STATUS}))
        monkeypatch.setattr(mooncake_engine, "Abi", AbiDouble)
        monkeypatch.setattr(NativeDouble, "batch_transfer_async_write", lambda *_: 0, raising=False)
        wishes: tuple[CompletionMode, ...] = ("auto", "batch-status")
        for wish in wishes:
            engine = MooncakeEngine(completion=wish)
            assert engine.info.completion_mode == "batch-status"
            await engine.close(0)
        engine = MooncakeEngine(completion="one-block")
        assert engine.info.completion_mode == "one-block"
        await engine.close(0)
        assert caplog.records == []

    @pytest.mark.parametrize(
        "lanes, timeout, window", [("16", "5", 160), ("4", "30", 7), ("16", "1", 480), ("64", "1", 512)]
    )
    async def test_the_window_is_what_a_stopped_peer_may_leave_behind(
        self, module: ModuleDouble, monkeypatch: pytest.MonkeyPatch, lanes: str, timeout: str, window: int
    ) -> None:
        monkeypatch.setenv("MC_TCP_LANES_PER_PEER", lanes)
        monkeypatch.setenv("MC_TCP_PROGRESS_TIMEOUT_SEC", timeout)
        limits = MooncakeEngine().limits
        assert (limits.window_blocks, limits.max_window_blocks, limits.max_batch_blocks) == (window, window, window)

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


def test_the_double_has_no_call_that_is_not_allowed() -> None:
    public = {name for name in vars(NativeDouble) if not name.startswith("_")}
    assert public <= ALLOWED
