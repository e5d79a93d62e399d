import numpy as np
import pytest

from orchestrator.engines.base import EngineLimits
from orchestrator.engines.loopback import LoopbackEngine, LoopbackFabric
from tests.engines.conformance import BAD, Pair


async def connected(copies_per_poll: int | None = None, limits: EngineLimits | None = None) -> Pair:
    fabric = LoopbackFabric()
    pair = Pair(fabric.engine(limits, copies_per_poll=copies_per_poll), fabric.engine())
    await pair.prepare()
    return pair


def lane(count: int) -> list[tuple[int, int, int]]:
    return [(at * 10, at * 10, 10) for at in range(count)]


async def test_bytes_land_at_poll_and_are_those_of_that_moment() -> None:
    pair = await connected()
    pair.submit((0, 0, 4))
    assert not pair.dst.any()
    pair.src[:4] = 77
    pair.writer.poll()
    assert pair.dst[:4].tolist() == [77] * 4


async def test_a_bounded_poll_shows_partial_completion_in_order_of_submission() -> None:
    pair = await connected(copies_per_poll=2)
    first, second = pair.submit(*lane(3)), pair.submit((500, 500, 10))
    assert pair.writer.poll() == 2
    assert not first.done
    assert np.array_equal(pair.dst, pair.expected(*lane(2)))
    assert pair.writer.pending == 2
    assert pair.writer.poll() == 2
    assert first.landed
    assert second.landed
    assert pair.writer.poll() == 0


async def test_a_fence_in_the_middle_leaves_the_rest_in_doubt() -> None:
    pair = await connected(copies_per_poll=2)
    batch = pair.submit(*lane(4))
    pair.writer.poll()
    await pair.reader.close(0)
    pair.writer.poll()
    assert batch.in_doubt == [2, 3]
    assert "gone" in batch.reason
    assert np.array_equal(pair.dst, pair.expected(*lane(2)))


async def test_closing_the_writer_in_the_middle_leaves_the_rest_in_doubt() -> None:
    pair = await connected(copies_per_poll=2)
    batch = pair.submit(*lane(3))
    pair.writer.poll()
    await pair.writer.close(0)
    assert batch.in_doubt == [2]
    assert np.array_equal(pair.dst, pair.expected(*lane(2)))


async def test_the_first_failure_names_the_reason() -> None:
    pair = await connected()
    batch = pair.submit(BAD, BAD)
    pair.writer.poll()
    assert batch.in_doubt == [0, 1]
    assert "not registered" in batch.reason


async def test_limits_are_the_callers() -> None:
    pair = await connected(limits=EngineLimits(max_batch_blocks=2))
    assert pair.writer.limits.max_batch_blocks == 2
    with pytest.raises(Exception, match="limit=2"):
        pair.submit(*lane(3))


async def test_a_session_is_never_given_out_twice() -> None:
    fabric = LoopbackFabric()
    seen = set()
    for _ in range(5):
        engine: LoopbackEngine = fabric.engine()
        seen.add(engine.session)
        await engine.close(0)
        assert fabric.find(engine.session) is None
    assert len(seen) == 5
