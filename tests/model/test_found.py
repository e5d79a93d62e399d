"""Faults that the exhaustive model found, each as a scene of the service itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from orchestrator import rollover
from orchestrator.chunk import ChunkSpec
from orchestrator.config import Config
from orchestrator.decode import Decode, RoomHandle
from orchestrator.node import Node
from orchestrator.prefill import Prefill
from orchestrator.receiver import Receiver
from orchestrator.testing.network import MemoryNetwork
from orchestrator.testing.pool import Pool
from orchestrator.testing.simengine import SimEngine
from orchestrator.testing.simfabric import SimFabric
from protocols.codec import decode, decode_envelope
from protocols.errors import BrokenPeerError
from protocols.machines import RolloverState
from protocols.messages import Hello
from tests.support.waiting import until

CONFIG = Config(layer_group=2, connect_timeout_s=8.0, ping_interval_s=0.1, silence_s=2.0, rollover_timeout_s=0.2)


class Scene:
    """One prefill and one decode, whose engines take these ports one after the other."""

    def __init__(self, stack: AsyncExitStack, ports: list[int]) -> None:
        self.network = MemoryNetwork()
        self.fabric = SimFabric()
        self.ports = ports
        self._stack = stack
        self._pools = [Pool(seed=1), Pool()]
        self.prefill: Prefill
        self.decode: Decode

    async def start(self) -> None:
        node = await self._stack.enter_async_context(Node(network=self.network))
        self.prefill = node.start_prefill(
            SimEngine(self.fabric, "P"), self._pools[0].layout, "tcp://127.0.0.1:0", CONFIG
        )
        node = await self._stack.enter_async_context(Node(network=self.network))
        self.decode = node.start_decode(self._engine(), self._pools[1].layout, CONFIG, self._engine)

    def _engine(self) -> SimEngine:
        return SimEngine(self.fabric, "D", port=self.ports.pop(0))

    @property
    def receiver(self) -> Receiver:
        return self.decode._receiver

    def expect(self, room: int) -> RoomHandle:
        handle = self.decode.expect(room, 1, [self.prefill.address], np.array([4, 5]), total_tokens=8, aux_slot=0)
        with self.prefill.begin_forward([ChunkSpec(room=room, gen=1, pages=[2, 3], last=True, aux_slot=0)]) as forward:
            for layer in range(4):
                forward.layer_end(layer)
        return handle

    async def rolled_over(self) -> None:
        self.decode.roll_over()
        await until(lambda: self.receiver.rollover.machine.state is RolloverState.IDLE)


@asynccontextmanager
async def a_scene(*ports: int) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        scene = Scene(stack, list(ports))
        await scene.start()
        yield scene


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The ports that are held now. Plain sockets do so in the service."""
    now: set[int] = set()

    class Recorder:
        def __init__(self, loop: asyncio.AbstractEventLoop, ports: Iterable[int]) -> None:
            self.ports = set(ports)
            now.update(self.ports)

        def release(self) -> None:
            now.difference_update(self.ports)

    monkeypatch.setattr(rollover, "HeldPorts", Recorder)
    return now


async def ended(handle: RoomHandle) -> bool:
    return (await asyncio.wait_for(handle, 10.0)).ok


@pytest.mark.row("N11")
@pytest.mark.parametrize("how", ["before the rollover", "while the old engine ends", "refused"])
async def test_the_ports_of_an_engine_are_kept_from_writers_that_were_given_up(held: set[int], how: str) -> None:
    """The decode gave a link up whose prefill was well and writing. Nobody waited for that prefill any more, the old
    engine's ports were released, another engine could take them, and the write would have landed there."""
    async with a_scene(1, 2, 3, 4) as scene:
        assert await ended(scene.expect(1))
        link = next(iter(scene.receiver.dialer.links.values()))
        if how == "while the old engine ends":
            scene.decode.roll_over()
        if how == "refused":  # the prefill has forgotten us
            sender = scene.prefill._sender
            sender.on_broken(next(iter(sender.reception.links.values())), BrokenPeerError("too many bad frames"))
            await ended(scene.expect(2))
        else:
            scene.receiver.on_broken(link, BrokenPeerError("too many bad frames"))
        assert link.closed
        if how != "while the old engine ends":
            scene.decode.roll_over()
        await until(lambda: scene.receiver.rollover.machine.state is RolloverState.IDLE)
        assert held == {1}
        await scene.rolled_over()
        assert (2 in held) is (how == "while the old engine ends")  # it was writing to neither, but who knows that
        await scene.rolled_over()
        assert 3 not in held
    assert not held


@pytest.mark.row("N11")
async def test_the_ports_of_an_engine_are_released_once_every_writer_has_said_so(held: set[int]) -> None:
    async with a_scene(1, 2, 3) as scene:
        assert await ended(scene.expect(1))
        await scene.rolled_over()
        assert await ended(scene.expect(2))
        await scene.rolled_over()
        assert not held


@pytest.mark.row("N11")
async def test_two_rollovers_between_hello_and_welcome_that_come_back_to_the_first_session(held: set[int]) -> None:
    """The prefill heard the Hello in between. What the decode says is now what it said first, so the prefill was not
    told, and turned every Offer away."""
    async with a_scene(1, 2, 1) as scene:

        def only_the_second(direction: str, frame: bytes) -> list[bytes]:
            kind = decode_envelope(frame).type
            if kind == "hello" and direction == "to_prefill":
                message = decode(frame)
                return [frame] if isinstance(message, Hello) and message.session == "D:2" else []
            return [] if kind == "welcome" else [frame]

        scene.network.filter = only_the_second
        first = scene.expect(1)
        await until(lambda: bool(scene.receiver.dialer.links))
        await scene.rolled_over()
        links = scene.prefill._sender.reception.links
        await until(lambda: bool(links))
        await scene.rolled_over()
        assert scene.receiver.session == "D:1"
        link = next(iter(links.values()))
        assert link.hello is not None
        assert link.hello.session == "D:2"
        scene.network.filter = lambda direction, frame: [frame]
        await asyncio.wait_for(first, 10.0)
        assert await ended(scene.expect(2))
