import pytest

from orchestrator.engines.faulty import Fault, FaultyEngine, nth
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.engines.paced import PacedEngine
from protocols.errors import ConfigError
from tests.engines.conformance import Pair

MEGABYTE = (0, 0, 1_000_000)
"""At 8 gigabits per second: one millisecond."""


class Clock:
    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


async def connected(*faults: Fault) -> tuple[Pair, PacedEngine, Clock]:
    fabric, clock = LoopbackFabric(), Clock()
    writer = PacedEngine(FaultyEngine(fabric.engine(), *faults), 8.0, clock)
    pair = Pair(writer, fabric.engine())
    await pair.prepare()
    return pair, writer, clock


async def test_a_batch_lands_when_the_link_has_carried_it() -> None:
    pair, writer, clock = await connected()
    batch = pair.submit(MEGABYTE)
    assert writer.next_due() == pytest.approx(100.001)
    clock.seconds = 100.0009
    assert writer.poll() == 0
    assert not pair.dst.any()
    assert writer.pending == 1
    clock.seconds = 100.0011
    assert writer.poll() == 1
    assert batch.landed
    assert writer.next_due() is None


async def test_one_link_carries_one_batch_at_a_time() -> None:
    pair, writer, clock = await connected()
    batches = [pair.submit(MEGABYTE) for _ in range(3)]
    clock.seconds = 100.0021
    writer.poll()
    assert [batch.done for batch in batches] == [True, True, False]
    assert writer.next_due() == pytest.approx(100.003)


async def test_an_idle_link_saves_nothing_up() -> None:
    pair, writer, clock = await connected()
    pair.submit(MEGABYTE)
    clock.seconds = 200.0
    writer.poll()
    pair.submit(MEGABYTE)
    assert writer.next_due() == pytest.approx(200.001)
    clock.seconds = 201.0
    writer.poll()


async def test_the_source_is_in_use_until_then() -> None:
    pair, writer, clock = await connected()
    pair.submit((0, 0, 4))
    pair.src[:4] = 77
    clock.seconds += 1
    writer.poll()
    assert pair.dst[:4].tolist() == [77] * 4


async def test_a_late_refusal_is_never_submitted() -> None:
    pair, writer, clock = await connected(Fault(nth(0), refuse=True))
    refused, good = pair.submit((0, 0, 4), (4, 4, 4)), pair.submit((8, 8, 4))
    clock.seconds += 1
    writer.poll()
    assert refused.never_submitted == [0, 1]
    assert refused.quiet
    assert good.landed


async def test_what_the_link_carries_at_the_end_is_in_doubt() -> None:
    pair, writer, _ = await connected()
    batch = pair.submit((0, 0, 4))
    await writer.close(0)
    assert batch.in_doubt == [0]
    assert not pair.dst.any()


@pytest.mark.parametrize("rate", [0.0, -1.0, float("nan")])
def test_a_link_has_a_rate(rate: float) -> None:
    with pytest.raises(ConfigError):
        PacedEngine(LoopbackFabric().engine(), rate, Clock())
