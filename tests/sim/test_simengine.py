"""The simulated engine: faultless it is an engine like any other, and with faults it does what real transports did."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from typing import Any, TypeVar

import numpy as np
import pytest

from orchestrator.engines.base import Batch
from orchestrator.testing.simengine import SimEngine
from orchestrator.testing.simfabric import SimFabric
from orchestrator.testing.simflight import EngineFaults, Flight
from orchestrator.testing.virtual import Domain, VirtualLoop, run_virtual
from protocols.errors import BrokenPeerError, BusyError
from tests.engines.conformance import EngineConformance, Pair

T = TypeVar("T")


def fast() -> Pair:
    fabric = SimFabric()
    return Pair(SimEngine(fabric), SimEngine(fabric))


def slow() -> Pair:
    faults = EngineFaults(bytes_per_s=4e9, latency_s=(0.0001, 0.001), connect_s=(0.001, 0.01), close_s=(0.0, 0.01))
    fabric = SimFabric(faults=faults)
    return Pair(SimEngine(fabric), SimEngine(fabric))


def in_pieces() -> Pair:
    fabric = SimFabric(faults=EngineFaults(in_pieces=1.0))
    return Pair(SimEngine(fabric), SimEngine(fabric))


MAKERS = [pytest.param(maker, id=maker.__name__) for maker in (fast, slow, in_pieces)]


@pytest.fixture(scope="module", params=MAKERS)
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = request.param()
    yield pair
    asyncio.run(pair.close())


@pytest.fixture
async def pair(shared: Pair) -> AsyncIterator[Pair]:
    await shared.prepare()
    yield shared
    assert shared.writer.pending == 0, "a test leaves the pair as it found it"


@pytest.fixture(params=MAKERS)
async def fresh_pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = request.param()
    yield pair
    await pair.close()


@pytest.mark.row("B6")
class TestConformance(EngineConformance):
    pass


# -- faults, in virtual time -----------------------------------------------------------------------------------------


class Witness:
    """An observer that writes down what happened."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def on_read(self, flight: Flight) -> None:
        self.lines.append(f"read {flight.number}")

    def on_landing(self, flight: Flight, offset: int, nbytes: int) -> None:
        self.lines.append(f"landing {flight.number} at {offset} of {nbytes}, {flight.verdict}")

    def on_verdict(self, flight: Flight) -> None:
        self.lines.append(f"{flight.verdict} {flight.number}")


class World(Pair):
    """A pair of two simulated processes in virtual time."""

    def __init__(self, loop: VirtualLoop, seed: int, **faults: Any) -> None:
        calm = {"latency_s": (0.01, 0.02), "late_s": (1.0, 5.0), "progress_timeout_s": 3.0, "survive": 1.0}
        self.loop = loop
        self.fabric = SimFabric(loop, seed, EngineFaults(**{**calm, **faults}))
        self.fabric.observer = self.witness = Witness()
        self.prefill, self.prefill_io = Domain("P"), Domain("P/io")
        self.decode, self.decode_io = Domain("D"), Domain("D/io")
        writer = SimEngine(self.fabric, "P", domain=self.prefill, io=self.prefill_io)
        reader = SimEngine(self.fabric, "D", domain=self.decode, io=self.decode_io)
        super().__init__(writer, reader)

    async def poll_for(self, seconds: float) -> None:
        end = self.loop.time() + seconds
        while self.loop.time() < end:
            self.writer.poll()
            await asyncio.sleep(0.01)

    def landed(self, *spans: tuple[int, int, int]) -> bool:
        return np.array_equal(self.dst, self.expected(*spans))

    def kill(self, domain: Domain, io: Domain) -> None:
        self.loop.kill(domain)
        self.loop.kill(io)
        self.fabric.kill(domain)


def in_world(scene: Callable[[World], Coroutine[Any, Any, T]], seed: int = 0, **faults: Any) -> T:
    async def main(loop: VirtualLoop) -> T:
        world = World(loop, seed, **faults)
        await world.prepare(seed)
        return await scene(world)

    return run_virtual(main, seed)


ONE = (64, 4096, 64)
TWO = (640, 8192, 64)


def test_bytes_take_the_time_of_the_link() -> None:
    async def scene(world: World) -> float:
        start = world.loop.time()
        await world.finish(world.submit((0, 0, 1 << 20)))
        return world.loop.time() - start

    assert 1.0 < in_world(scene, bytes_per_s=1 << 20, progress_timeout_s=30.0) < 1.1


def test_a_failed_block_may_land_later_or_never() -> None:
    async def scene(world: World) -> tuple[bool, int]:
        batch = world.submit(ONE)
        await world.finish(batch)
        assert batch.in_doubt == [0]
        assert not world.dst.any()
        assert world.fabric.in_doubt == 1
        await asyncio.sleep(10.0)
        assert world.fabric.live == {}
        return world.landed(ONE), world.fabric.late_landings

    assert {in_world(scene, seed, fail=1.0) for seed in range(20)} == {(False, 0), (True, 1)}


def test_a_late_block_brings_what_was_read_before_its_verdict() -> None:
    async def scene(world: World) -> None:
        batch = world.submit(ONE)
        before = world.expected(ONE)
        await world.finish(batch)
        assert batch.in_doubt == [0]
        world.src[:] = 0
        await asyncio.sleep(10.0)
        assert np.array_equal(world.dst, before) or not world.dst.any()

    for seed in range(10):
        in_world(scene, seed, fail=1.0)


def test_a_lost_acknowledgement_fails_what_landed() -> None:
    async def scene(world: World) -> None:
        batch = world.submit(ONE, TWO)
        await world.finish(batch)
        assert sorted(batch.in_doubt) == [0, 1]
        assert world.landed(ONE, TWO)
        assert world.fabric.late_landings == 0

    in_world(scene, ack_lost=1.0)


def test_a_stuck_block_never_gets_a_verdict() -> None:
    async def scene(world: World) -> None:
        batch = world.submit(ONE)
        await world.poll_for(100.0)
        assert not batch.done
        assert world.writer.pending == 1
        await world.writer.close(0)
        assert batch.done
        assert batch.in_doubt == [0]

    in_world(scene, stuck=1.0)


def test_a_block_may_land_in_two_parts() -> None:
    async def scene(world: World) -> None:
        await world.finish(world.submit(ONE))
        landings = [line for line in world.witness.lines if line.startswith("landing")]
        assert len(landings) == 2
        assert world.landed(ONE)

    in_world(scene, in_pieces=1.0)


def test_submissions_are_refused_whole_or_in_part() -> None:
    async def whole(world: World) -> None:
        with pytest.raises(BrokenPeerError):
            world.submit(ONE)
        assert world.writer.pending == 0

    async def partly(world: World) -> None:
        batch = world.submit(ONE, TWO)
        await world.finish(batch)
        assert batch.never_submitted == [1]
        assert batch.in_doubt == []
        assert world.landed(ONE)

    in_world(whole, refuse=1.0)
    in_world(partly, refuse_rest=1.0)


def test_a_stopped_destination_takes_everything_once_it_goes_on() -> None:
    async def scene(world: World) -> None:
        batch = world.submit(ONE)
        world.loop.hold(world.decode_io)
        await world.poll_for(5.0)
        assert batch.in_doubt == [0]
        assert not world.dst.any()
        world.loop.resume(world.decode_io)
        await asyncio.sleep(0)
        await asyncio.sleep(1.0)
        assert world.landed(ONE)
        assert world.fabric.late_landings == 1

    in_world(scene)


def test_writer_death_is_no_fence() -> None:
    async def scene(world: World) -> None:
        world.submit(ONE)
        world.submit(TWO)
        await asyncio.sleep(0.021)
        read = [line for line in world.witness.lines if line.startswith("read")]
        world.kill(world.prefill, world.prefill_io)
        await asyncio.sleep(10.0)
        landings = [line for line in world.witness.lines if line.startswith("landing")]
        assert len(landings) == len(read) == 2
        assert world.landed(ONE, TWO)
        assert world.fabric.late_landings == 2

    in_world(scene, latency_s=(0.015, 0.02))


def test_what_a_dead_writer_had_not_read_is_gone() -> None:
    async def scene(world: World) -> None:
        world.submit(ONE)
        world.kill(world.prefill, world.prefill_io)
        await asyncio.sleep(10.0)
        assert world.witness.lines == []
        assert not world.dst.any()

    in_world(scene)


def test_the_end_of_the_destination_is_a_fence() -> None:
    async def scene(world: World, *, kill: bool) -> None:
        batch = world.submit(ONE)
        await asyncio.sleep(0.021)  # read, not landed
        assert world.fabric.may_land(world.reader, world.dst.ctypes.data + 4100, 8)  # type: ignore[arg-type]
        if kill:
            world.kill(world.decode, world.decode_io)
        else:
            await world.reader.close(0)
        assert world.fabric.may_land(world.reader, world.dst.ctypes.data, world.dst.nbytes) == []  # type: ignore[arg-type]
        await world.finish(batch)
        assert batch.in_doubt == [0]
        assert not world.dst.any()
        assert world.fabric.fences == 1

    for kill in (False, True):
        in_world(lambda world: scene(world, kill=kill), latency_s=(0.015, 0.02))  # noqa: B023


def test_a_session_name_reaches_the_next_engine_that_has_it() -> None:
    async def scene(world: World) -> None:
        port = world.reader.ports[0]
        world.submit(ONE)
        await world.reader.close(0)
        late = SimEngine(world.fabric, "D", port=port)
        late.register(world.dst.ctypes.data, world.dst.nbytes)
        await asyncio.sleep(5.0)
        assert world.landed(ONE)

    in_world(scene, latency_s=(0.05, 0.05))


def test_held_ports_reach_nobody() -> None:
    async def scene(world: World) -> None:
        ports = world.reader.ports
        with pytest.raises(BusyError):
            SimEngine(world.fabric, "D", port=ports[0])
        batch = world.submit(ONE)
        await world.reader.close(0)
        world.fabric.hold_ports(ports)
        assert world.fabric.free_ports("D", ports) == []
        with pytest.raises(BusyError):
            SimEngine(world.fabric, "D", port=ports[0])
        await world.finish(batch)
        assert batch.in_doubt == [0]
        world.fabric.release_ports(ports)
        assert world.fabric.free_ports("D", ports) == list(ports)

    in_world(scene)


def test_a_partition_stalls_and_then_lets_through() -> None:
    async def scene(world: World) -> None:
        batch = world.submit(ONE)
        world.fabric.partition("D", "P")
        await world.poll_for(5.0)
        assert batch.in_doubt == [0]
        assert not world.dst.any()
        world.fabric.heal("P", "D")
        await asyncio.sleep(1.0)
        assert world.landed(ONE)

    in_world(scene)


def test_contact_with_a_black_hole_takes_its_time_and_fails() -> None:
    async def scene(world: World) -> float:
        other = SimEngine(world.fabric, "X")
        world.fabric.black_holes.add("X")
        start = world.loop.time()
        with pytest.raises(BrokenPeerError):
            await world.writer.connect(other.session, None, 2.5)
        waited = world.loop.time() - start
        world.fabric.black_holes.clear()
        await world.writer.connect(other.session, None, 2.5)
        return waited

    assert 2.5 <= in_world(scene) < 2.8


def test_a_question_names_what_may_still_be_read() -> None:
    async def scene(world: World) -> None:
        batch = world.submit(ONE)
        writer, source = world.writer, world.src.ctypes.data
        assert isinstance(writer, SimEngine)
        assert [flight.index for flight in world.fabric.may_read(writer, source + 64, 1)] == [0]
        assert world.fabric.may_read(writer, source + 128, 64) == []
        await world.finish(batch)
        assert world.fabric.may_read(writer, source + 64, 1) == []

    in_world(scene)


async def _mix(world: World) -> tuple[list[str], list[list[int]]]:
    batches: list[Batch] = []
    for at in range(60):
        batches.append(world.submit((at * 64, at * 64, 64), (at * 64 + 16384, at * 64 + 16384, 64)))
        await world.poll_for(0.02)
    await world.poll_for(30.0)
    return world.witness.lines, [batch.in_doubt for batch in batches]


def test_one_seed_is_one_fate() -> None:
    faults = {"fail": 0.2, "ack_lost": 0.1, "stuck": 0.1, "in_pieces": 0.3, "refuse_rest": 0.2}
    first, again, other = (in_world(_mix, seed, **faults) for seed in (3, 3, 4))
    assert first == again != other
