"""The simulated control network: what ZMQ promises, what it does not, and that a seed is a run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

import pytest

from orchestrator.testing.simnet import HIGH_WATER, NetFaults, SimNet, describe_frame
from orchestrator.testing.virtual import Domain, VirtualLoop, run_virtual
from orchestrator.wire import Listener, Wire
from protocols.codec import encode
from protocols.errors import BusyError, ConfigError
from protocols.ids import Incarnation
from protocols.messages import Abort, AbortAck, Units

T = TypeVar("T")
ADDRESS = "tcp://127.0.0.1:7000"
NAME = Incarnation(b"d" * 16)


class World:
    """One prefill host that listens, one decode host that dials."""

    def __init__(self, loop: VirtualLoop, seed: int = 0, **faults: Any) -> None:
        self.history: list[tuple[Any, ...]] = []
        self.loop = loop
        self.net = SimNet(loop, seed, lambda *line: self.history.append(line), NetFaults(**faults))
        self.heard_by_prefill: list[tuple[str, bytes]] = []
        self.heard_by_decode: list[bytes] = []
        self.prefill = Domain("P")
        self.decode = Domain("D")
        self.listener: Listener | None = None

    def listen(self, name: str = "P", domain: Domain | None = None) -> Listener:
        network = self.net.process("P", domain or self.prefill)
        self.listener = network.listen(ADDRESS, lambda _, frame: self.heard_by_prefill.append((name, frame)))
        return self.listener

    def dial(self) -> Wire:
        return self.net.process("D", self.decode).dial(ADDRESS, NAME, self.heard_by_decode.append)


def in_world(scene: Callable[[World], Coroutine[Any, Any, T]], seed: int = 0, **faults: Any) -> T:
    return run_virtual(lambda loop: scene(World(loop, seed, **faults)), seed)


def numbered(count: int) -> list[bytes]:
    return [bytes([number]) for number in range(count)]


def test_frames_arrive_once_and_in_order_both_ways() -> None:
    async def scene(world: World) -> None:
        listener, dealer = world.listen(), world.dial()
        for frame in numbered(50):
            assert dealer.send(frame)
        await asyncio.sleep(1.0)
        back = listener.wire_to(NAME)
        for frame in numbered(50):
            assert back.send(frame)
        await asyncio.sleep(1.0)
        assert [frame for _, frame in world.heard_by_prefill] == numbered(50)
        assert world.heard_by_decode == numbered(50)
        assert world.loop.timers == []

    in_world(scene)


def test_a_router_knows_only_who_is_connected() -> None:
    async def scene(world: World) -> None:
        wire = world.listen().wire_to(NAME)
        assert not wire.send(b"early")
        dealer = world.dial()
        await asyncio.sleep(1.0)
        assert wire.send(b"now")
        dealer.close()
        assert not wire.send(b"late")
        assert not dealer.send(b"late")
        await asyncio.sleep(1.0)
        assert world.heard_by_decode == []  # closed while it was under way

    in_world(scene)


def test_a_dealer_keeps_frames_until_somebody_listens() -> None:
    async def scene(world: World) -> None:
        dealer = world.dial()
        await asyncio.sleep(5.0)
        assert [dealer.send(b"x") for _ in range(HIGH_WATER + 1)] == [True] * HIGH_WATER + [False]
        world.listen()
        await asyncio.sleep(5.0)
        assert len(world.heard_by_prefill) == HIGH_WATER

    in_world(scene)


def test_what_was_queued_for_a_dead_process_reaches_the_next() -> None:
    async def scene(world: World) -> None:
        world.listen("first")
        dealer = world.dial()
        await asyncio.sleep(1.0)
        world.loop.kill(world.prefill)
        world.net.kill(world.prefill)
        dealer.send(b"for the first")
        await asyncio.sleep(10.0)
        world.listen("second", Domain("P2"))
        await asyncio.sleep(10.0)
        assert world.heard_by_prefill == [("second", b"for the first")]

    in_world(scene)


def test_a_dead_process_hears_and_says_nothing() -> None:
    async def scene(world: World) -> None:
        wire, dealer = world.listen().wire_to(NAME), world.dial()
        await asyncio.sleep(1.0)
        dealer.send(b"last words")
        wire.send(b"too late")
        world.loop.kill(world.decode)
        world.net.kill(world.decode)
        await asyncio.sleep(10.0)
        assert world.heard_by_prefill == [("P", b"last words")]
        assert world.heard_by_decode == []
        assert not wire.send(b"nobody")

    in_world(scene)


def test_a_port_has_one_owner() -> None:
    async def scene(world: World) -> None:
        listener = world.listen()
        with pytest.raises(BusyError):
            world.listen()
        listener.close()
        world.listen()
        network = world.net.process("P", world.prefill)
        assert network.listen("tcp://127.0.0.1:0", lambda *_: None).address != ADDRESS
        with pytest.raises(ConfigError):
            network.listen("ipc://x", lambda *_: None)
        with pytest.raises(ConfigError):
            network.dial("nowhere", NAME, lambda _: None)

    in_world(scene)


def test_a_partition_holds_one_way_only() -> None:
    async def scene(world: World) -> None:
        wire, dealer = world.listen().wire_to(NAME), world.dial()
        await asyncio.sleep(1.0)
        world.net.partition("D", "P", "hold")
        dealer.send(b"held")
        wire.send(b"free")
        await asyncio.sleep(5.0)
        assert world.heard_by_prefill == []
        assert world.heard_by_decode == [b"free"]
        world.net.heal("D", "P")
        await asyncio.sleep(1.0)
        assert world.heard_by_prefill == [("P", b"held")]

    in_world(scene)


def test_a_partition_can_lose_and_keeps_newcomers_out() -> None:
    async def scene(world: World) -> None:
        world.listen()
        world.net.partition("P", "D", "drop")
        dealer = world.dial()
        dealer.send(b"waits for a connection")
        await asyncio.sleep(5.0)
        assert world.heard_by_prefill == []
        world.net.heal("P", "D")
        await asyncio.sleep(5.0)
        assert len(world.heard_by_prefill) == 1
        world.net.partition("D", "P", "drop")
        dealer.send(b"lost")
        await asyncio.sleep(1.0)
        world.net.heal("D", "P")
        await asyncio.sleep(5.0)
        assert len(world.heard_by_prefill) == 1
        assert world.net.lost == 1

    in_world(scene)


def test_a_half_open_connection_swallows_until_it_is_taken_over() -> None:
    async def scene(world: World) -> None:
        wire, dealer = world.listen().wire_to(NAME), world.dial()
        await asyncio.sleep(1.0)
        world.net.half_open("P", "D", 3.0)
        assert wire.send(b"swallowed")
        assert dealer.send(b"swallowed")
        await asyncio.sleep(6.0)
        assert wire.send(b"through")
        assert dealer.send(b"through")
        await asyncio.sleep(1.0)
        assert world.heard_by_decode == [b"through"]
        assert world.heard_by_prefill == [("P", b"through")]

    in_world(scene)


def test_a_reset_loses_what_was_under_way_and_reconnects() -> None:
    async def scene(world: World) -> None:
        wire, _ = world.listen().wire_to(NAME), world.dial()
        await asyncio.sleep(1.0)
        wire.send(b"under way")
        world.net.reset("D", "P")
        assert not wire.send(b"not connected")
        await asyncio.sleep(5.0)
        assert wire.send(b"again")
        await asyncio.sleep(1.0)
        assert world.heard_by_decode == [b"again"]

    in_world(scene)


def test_a_stopped_process_hears_everything_once_it_goes_on() -> None:
    async def scene(world: World) -> None:
        world.listen()
        dealer = world.dial()
        await asyncio.sleep(1.0)
        world.loop.hold(world.prefill)
        for frame in numbered(5):
            dealer.send(frame)
        await asyncio.sleep(20.0)
        assert world.heard_by_prefill == []
        world.loop.resume(world.prefill)
        await asyncio.sleep(1.0)
        assert [frame for _, frame in world.heard_by_prefill] == numbered(5)

    in_world(scene)


async def _storm(world: World) -> list[tuple[Any, ...]]:
    world.listen()
    dealer = world.dial()
    for frame in numbered(200):
        dealer.send(frame)
    await asyncio.sleep(60.0)
    return world.history


def test_faults_lose_duplicate_and_reorder_as_the_seed_says() -> None:
    faults = {"loss": 0.2, "duplicate": 0.2, "reorder": 0.2}
    histories = [in_world(_storm, seed, **faults) for seed in (1, 1, 2)]
    assert histories[0] == histories[1] != histories[2]
    arrived = [line[3] for line in histories[0] if line[1] == "receives from"]
    assert set(arrived) < set(numbered(200))
    assert len(arrived) > len(set(arrived))
    assert arrived != sorted(arrived)


def test_a_frame_in_words() -> None:
    assert describe_frame(encode(Abort(room=7, gen=2, origin="decode", reason="why", seq=3))) == (
        "Abort 7.2 #3 ack 0 (origin=decode, reason=why)"
    )
    ack = AbortAck(room=7, gen=2, session="s", in_doubt=Units(pages=b"\x01\0\0\0", aux=(3,)))
    assert "in_doubt=2 units" in describe_frame(encode(ack))
    assert describe_frame(b"\xff") == "1 undecodable bytes"
