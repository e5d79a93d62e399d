"""Bugs that seeds of the simulation found, each as a scene of its own that needs no seed."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.decode import Decode, RoomHandle
from orchestrator.engines.faulty import Fault, FaultyEngine
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.network import MemoryNetwork
from orchestrator.testing.pool import Pool
from orchestrator.testing.simengine import SimEngine
from orchestrator.testing.simfabric import SimFabric
from orchestrator.testing.simflight import EngineFaults
from protocols.codec import decode_envelope
from protocols.errors import BusyError
from protocols.machines import RolloverState
from tests.support.waiting import until

CONFIG = Config(layer_group=2, connect_timeout_s=2.0, ping_interval_s=0.1, silence_s=1.0)


class Scene:
    """One prefill and decodes that come and go, over the simulated engine and the in-memory network."""

    def __init__(self, stack: AsyncExitStack) -> None:
        self.network = MemoryNetwork()
        self.fabric = SimFabric()
        self._stack = stack
        self._pool = Pool(seed=1)
        self.prefill: Prefill

    async def start(self, config: Config, bind: str = "tcp://127.0.0.1:0") -> None:
        node = await self._stack.enter_async_context(Node(network=self.network))
        self.prefill = node.start_prefill(SimEngine(self.fabric, "P"), self._pool.layout, bind, config)

    async def crash_and_restart(self) -> None:
        """The prefill's process ends without a word, and another listens on its address."""
        listener = self.network.find(self.prefill.address)
        assert listener is not None
        listener.close()
        listener.dealers.clear()
        await self.start(CONFIG, self.prefill.address)

    async def decode(self, port: int, then: int | Iterator[int], config: Config = CONFIG) -> tuple[Node, Decode]:
        """A decode whose engine has ``port``, and ``then``, or each of them, after a rollover."""
        node = await self._stack.enter_async_context(Node(network=self.network))
        pool = Pool()
        self._stack.callback(pool.poison)  # keeps it alive

        def engine(number: int) -> SimEngine:
            made = SimEngine(self.fabric, "D", port=number)
            made.ports = ()  # no real sockets hold them
            return made

        later = itertools.repeat(then) if isinstance(then, int) else then
        return node, node.start_decode(engine(port), pool.layout, config, lambda: engine(next(later)))

    def expect(self, decode: Decode, room: int) -> RoomHandle:
        handle = decode.expect(room, 1, [self.prefill.address], np.array([4, 5]), total_tokens=8, aux_slot=0)
        self.compute(room)
        return handle

    def compute(self, room: int) -> None:
        with self.prefill.begin_forward([ChunkSpec(room=room, gen=1, pages=[2, 3], last=True, aux_slot=0)]) as forward:
            for layer in range(4):
                forward.layer_end(layer)


@asynccontextmanager
async def a_scene(config: Config = CONFIG) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        scene = Scene(stack)
        await scene.start(config)
        yield scene


async def ended(handle: RoomHandle) -> bool:
    return (await asyncio.wait_for(handle, 10.0)).ok


async def test_a_digest_of_one_page_where_the_aux_slot_is_as_long_as_a_page() -> None:
    """Seed 17: buffers of one length with like runs share an entry of the coverage, pages and aux alike."""
    prefill, decode = (Pool(item_len=32, aux_len=32, pages=8, seed=seed) for seed in (1, None))
    async with Cluster(prefills=[prefill], decodes=[decode], digest=True) as cluster:
        handle = cluster.decode().expect(7, 1, cluster.addresses, np.array([5]), total_tokens=3, aux_slot=2)
        cluster.forward([ChunkSpec(room=7, gen=1, pages=[3], last=True, end_token=3, aux_slot=1)])
        result = await asyncio.wait_for(handle, 10.0)
        assert result.ok, result.error


async def test_a_rollover_between_hello_and_welcome() -> None:
    """Seed 88: the peer knew the old session for ever, and turned every Offer away."""
    async with a_scene() as scene:
        held: list[bytes] = []

        def hold_welcomes(direction: str, frame: bytes) -> list[bytes]:
            if decode_envelope(frame).type != "welcome":
                return [frame]
            held.append(frame)
            return []

        scene.network.filter = hold_welcomes
        _, decode = await scene.decode(port=1, then=2)
        first = scene.expect(decode, 1)
        await until(lambda: bool(held))
        decode.roll_over()
        scene.network.filter = lambda direction, frame: [frame]
        await asyncio.wait_for(first, 10.0)
        assert await ended(scene.expect(decode, 2))


async def test_a_session_that_an_earlier_process_had_is_left_by_itself() -> None:
    """Seed 45: a restarted decode that got its predecessor's port was refused until somebody restarted it again."""
    async with a_scene() as scene:
        node, decode = await scene.decode(port=1, then=2)
        assert await ended(scene.expect(decode, 1))
        await node.stop()
        _, decode = await scene.decode(port=1, then=3)
        refused = await asyncio.wait_for(scene.expect(decode, 2), 10.0)
        assert not refused.ok
        assert await ended(scene.expect(decode, 3))


async def test_a_refusal_within_a_hand_over_leaves_no_task_behind() -> None:
    """Seed 2058: the room failed from inside its chunk's own coroutine, which then waited for a next group for ever."""
    async with Cluster(
        prefills=[Pool(seed=1)],
        decodes=[Pool()],
        config=CONFIG,
        wrap=lambda engine: FaultyEngine(engine, Fault(refuse=True)),
    ) as cluster:
        handle = cluster.decode().expect(7, 1, cluster.addresses, np.array([5]), total_tokens=4, aux_slot=2)
        forward = cluster.prefill().begin_forward([ChunkSpec(room=7, gen=1, pages=[3], last=True, aux_slot=1)])
        forward.layer_end(0)
        forward.layer_end(1)  # a group of two
        assert not await ended(handle)
        sender = cluster.prefill_nodes[0].sender
        assert sender is not None
        await until(lambda: cluster.balanced() == [])
        await until(lambda: not sender._tasks)
        forward.end()


async def test_a_prefill_that_ends_before_its_rollover_ack_arrives() -> None:
    """Seed 1033: with no room open nobody asked the peer, its successor was never met, and no other rollover began."""
    async with a_scene() as scene:
        _, decode = await scene.decode(port=1, then=2)
        assert await ended(scene.expect(decode, 1))
        scene.network.filter = lambda _, frame: [] if decode_envelope(frame).type == "rollover_ack" else [frame]
        decode.roll_over()
        receiver = decode._receiver
        await until(lambda: receiver.rollover.machine.state is RolloverState.FENCED)
        link = next(iter(receiver.dialer.links.values()))
        await until(lambda: link.unacked == 0)  # all it was told has arrived; its answer is lost
        await scene.crash_and_restart()
        scene.network.filter = lambda direction, frame: [frame]
        await until(lambda: receiver.rollover.machine.state is RolloverState.IDLE)


async def test_a_rollover_whose_engine_cannot_be_made_is_tried_again() -> None:
    """Seed 4259: the machine stood in ANNOUNCED without a second engine, and no rollover was possible any more."""
    async with a_scene() as scene:
        _, decode = await scene.decode(port=1, then=2, config=replace(CONFIG, rollover_timeout_s=0.2))
        assert await ended(scene.expect(decode, 1))
        scene.fabric.hold_ports([2])
        with pytest.raises(BusyError):
            decode.roll_over()
        rollover = decode._receiver.rollover
        assert rollover.possible
        rollover.start_if_possible("a test")
        assert rollover.possible
        scene.fabric.release_ports([2])
        await until(lambda: rollover.fences == 1)
        assert await ended(scene.expect(decode, 2))


async def test_doubt_is_forgotten_with_the_decode_that_could_ask() -> None:
    """Seed 0: a verdict in doubt outlived its destination, one for ever with every restarted decode."""
    async with a_scene(replace(CONFIG, tombstone_s=0.2, drain_timeout_s=0.2)) as scene:
        node, decode = await scene.decode(port=1, then=2)
        assert await ended(scene.expect(decode, 1))
        scene.fabric.faults.ack_lost = 1.0
        assert not await ended(scene.expect(decode, 2))
        scene.fabric.faults.ack_lost = 0.0
        rooms = scene.prefill._sender.rooms
        await asyncio.sleep(0.3)
        rooms.forget_expired()
        assert rooms.remembered == 1
        await node.stop()

        def forgotten() -> bool:
            rooms.forget_expired()
            return rooms.remembered == 0

        await until(forgotten)


async def test_doubt_of_a_fenced_session_is_not_noted_when_its_room_drains_later() -> None:
    """Seed 52: the second Rollover came while a room of two destinations was still drained at the other one."""
    async with a_scene(replace(CONFIG, tombstone_s=0.2, drain_timeout_s=0.2)) as scene:
        _, first = await scene.decode(port=1, then=2)
        _, second = await scene.decode(port=3, then=4)
        for number, decode in enumerate((first, second), 1):
            assert await ended(scene.expect(decode, number))
        scene.fabric.faults = EngineFaults(stuck=1.0)
        address = scene.prefill.address
        both = [
            decode.expect(9, 1, [address], np.array([4, 5]), total_tokens=8, aux_slot=0, destinations=2)
            for decode in (first, second)
        ]
        scene.compute(9)
        lanes = scene.prefill._sender.sessions.lanes
        await until(lambda: len(lanes) == 2 and not any(lane.idle for lane in lanes.values()))
        scene.fabric.faults = EngineFaults()
        both[0].abort()
        for decode in (first, second):
            decode.roll_over()
            await until(lambda decode=decode: decode._receiver.rollover.fences == 1)  # type: ignore[misc]
        rooms = scene.prefill._sender.rooms

        def forgotten() -> bool:
            rooms.forget_expired()
            return len(rooms) + rooms.remembered == 0

        await until(forgotten)


async def test_a_rollover_to_a_session_that_another_process_had_goes_on_to_a_third() -> None:
    """Seed 81: the prefill dropped such a Rollover without a word, and turned every later Offer away."""
    async with a_scene() as scene:
        node, decode = await scene.decode(port=1, then=9)
        assert await ended(scene.expect(decode, 1))
        await node.stop()
        ports = iter((1, 3))
        _, decode = await scene.decode(port=2, then=ports)
        assert await ended(scene.expect(decode, 2))
        decode.roll_over()
        await until(lambda: decode._receiver.rollover.fences == 1)
        results = []
        for room in range(3, 9):
            results.append(await ended(scene.expect(decode, room)))
            if results[-1]:
                break
        assert results[-1]
        assert decode._receiver.session == "D:3"


async def test_a_prefill_that_dies_before_its_rollover_ack_is_not_asked_for_ever() -> None:
    """Seed 201233: it was pinged for as long as the decode lived."""
    brief = replace(CONFIG, silence_s=0.3, tombstone_s=0.8)
    async with a_scene() as scene:
        node, decode = await scene.decode(port=1, then=2, config=brief)
        assert await ended(scene.expect(decode, 1))
        scene.network.filter = lambda direction, frame: [] if b"rollover_ack" in frame else [frame]
        decode.roll_over("an operator asks")
        receiver = node.receiver
        assert receiver is not None
        await until(lambda: receiver.rollover.fences == 1)
        await until(lambda: all(link.unacked == 0 for link in receiver.dialer.links.values()))
        scene.network.filter = lambda direction, frame: []
        await until(lambda: not receiver.dialer.links)
        frames = sum(direction == "to_prefill" for direction, _ in scene.network.frames)
        await asyncio.sleep(0.3)
        assert sum(direction == "to_prefill" for direction, _ in scene.network.frames) == frames
