"""The real Mooncake against real faults: peers that are silent, hang up, stop, go on, and die."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType
from typing import Any

import pytest

from orchestrator.engines import mooncake_abi, mooncake_env
from orchestrator.engines.base import Probe
from orchestrator.engines.mooncake import CompletionMode, MooncakeEngine
from protocols.errors import BrokenPeerError
from protocols.ids import Session
from tests.engines.conformance import PATIENCE, until
from tests.engines.memory import Memory
from tests.engines.native_double import ALLOWED
from tests.engines.peer_process import PeerProcess

pytestmark = pytest.mark.mooncake

MODES: list[CompletionMode] = ["one-block", "batch-status"]


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


def test_a_process_may_exit_in_the_middle_of_everything() -> None:
    with silent_listener() as listener:
        command = [sys.executable, "-c", ABRUPT_EXIT, session_of(listener)]
        assert subprocess.run(command, timeout=30, check=False).returncode == 7
