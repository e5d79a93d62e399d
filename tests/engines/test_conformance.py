"""The conformance suite over every engine of the package."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator

import pytest

from orchestrator.engines.base import Engine
from orchestrator.engines.faulty import FaultyEngine
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.engines.paced import PacedEngine
from tests.engines.conformance import EngineConformance, Pair

Maker = Callable[[], tuple[Engine, Engine]]


def loopback() -> tuple[Engine, Engine]:
    fabric = LoopbackFabric()
    return fabric.engine(), fabric.engine()


def slow_loopback() -> tuple[Engine, Engine]:
    fabric = LoopbackFabric()
    return fabric.engine(copies_per_poll=50), fabric.engine(copies_per_poll=50)


def faulty() -> tuple[Engine, Engine]:
    writer, reader = loopback()
    return FaultyEngine(writer), FaultyEngine(reader)


def paced() -> tuple[Engine, Engine]:
    writer, reader = loopback()
    return PacedEngine(writer, 40.0, time.monotonic), PacedEngine(reader, 40.0, time.monotonic)


def mooncake_one_block() -> tuple[Engine, Engine]:
    from orchestrator.engines.mooncake import MooncakeEngine

    return MooncakeEngine(), MooncakeEngine()


def mooncake_batch_status() -> tuple[Engine, Engine]:
    from orchestrator.engines.mooncake import MooncakeEngine

    return MooncakeEngine(completion="batch-status"), MooncakeEngine(completion="batch-status")


MAKERS = [
    *(pytest.param(maker, id=maker.__name__) for maker in (loopback, slow_loopback, faulty, paced)),
    *(
        pytest.param(maker, id=maker.__name__, marks=pytest.mark.mooncake)
        for maker in (mooncake_one_block, mooncake_batch_status)
    ),
]


@pytest.fixture(scope="module", params=MAKERS)
def shared(request: pytest.FixtureRequest) -> Iterator[Pair]:
    pair = Pair(*request.param())
    yield pair
    asyncio.run(pair.close())


@pytest.fixture
async def pair(shared: Pair) -> AsyncIterator[Pair]:
    await shared.prepare()
    yield shared
    assert shared.writer.pending == 0, "a test leaves the pair as it found it"


@pytest.fixture(params=MAKERS)
async def fresh_pair(request: pytest.FixtureRequest) -> AsyncIterator[Pair]:
    pair = Pair(*request.param())
    yield pair
    await pair.close()


@pytest.mark.row("B6")
class TestConformance(EngineConformance):
    pass
