import asyncio

import pytest

from orchestrator.engines.base import Batch
from orchestrator.engines.draining import drain
from orchestrator.engines.faulty import Fault, FaultyEngine
from orchestrator.engines.loopback import LoopbackFabric
from tests.engines.conformance import Pair


async def test_it_ends_when_nothing_is_pending() -> None:
    fabric = LoopbackFabric()
    pair = Pair(fabric.engine(copies_per_poll=1), fabric.engine())
    await pair.prepare()
    assert await drain(pair.writer, 0)
    batch = pair.submit((0, 0, 1), (1, 1, 1), (2, 2, 1))
    assert not await drain(pair.writer, 0)
    assert await asyncio.wait_for(drain(pair.writer, 100), 10)
    assert batch.landed


async def test_it_ends_at_its_timeout() -> None:
    fabric = LoopbackFabric()
    pair = Pair(FaultyEngine(fabric.engine(), Fault(hold=True)), fabric.engine())
    await pair.prepare()
    pair.submit((0, 0, 1))
    assert not await asyncio.wait_for(drain(pair.writer, 0.01), 10)


async def test_a_callback_that_raises_is_logged_and_does_not_end_it(caplog: pytest.LogCaptureFixture) -> None:
    fabric = LoopbackFabric()
    pair = Pair(fabric.engine(), fabric.engine())
    await pair.prepare()

    def fail(_: Batch) -> None:
        raise LookupError("from the callback")

    pair.submit((0, 0, 1)).add_callbacks(fail)
    last = pair.submit((1, 1, 1))
    assert await drain(pair.writer, 10)
    assert last.landed
    assert "from the callback" in caplog.text
