"""Many at once: cancelled, left open, stuck, or good. Afterwards the next request is served, and the log is short."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.decode import RoomHandle
from orchestrator.engines.faulty import Fault
from orchestrator.outcome import RoomStatus
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.blocks import Ints
from tests.service.scenes import config, faulty, outcomes, sender, spec, wrapped
from tests.support.waiting import until, within

ROOMS = 300


def wide(**changes: object) -> Cluster:
    """One page of its own for each of very many rooms."""
    fields: dict[str, object] = {"pages": ROOMS + 1, "layers": 1, "drafts": 0, "aux_slots": 1, "item_len": 16}
    source, target = Pool(**fields, seed=1), Pool(**fields)  # type: ignore[arg-type]
    more: dict[str, object] = {"config": config(), "wrap": wrapped(), "digest": False}
    return Cluster(prefills=[source], decodes=[target], **more | changes)  # type: ignore[arg-type]


def page(number: int) -> Ints:
    return np.array([number], np.int64)


def expect(cluster: Cluster, room: int, gen: int = 0) -> RoomHandle:
    return cluster.decode().expect(room, gen, cluster.addresses, page(room), total_tokens=4)


def lines(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= level]


async def is_served(cluster: Cluster) -> None:
    """One more request, over the page that no other had."""
    handle = expect(cluster, ROOMS)
    cluster.forward([spec(ROOMS, page(ROOMS))])
    prefill, decode = await outcomes(cluster, handle)
    assert prefill.ok, prefill.error
    assert decode.ok, decode.error
    assert cluster.prefill_pools[0].differences(cluster.decode_pools[0], page(ROOMS), page(ROOMS)) == []


def by_decode(cluster: Cluster, handle: RoomHandle) -> None:
    handle.abort("the client is gone")


def by_prefill(cluster: Cluster, handle: RoomHandle) -> None:
    cluster.prefill().abort(*handle.key, reason="the client is gone")


def by_both(cluster: Cluster, handle: RoomHandle) -> None:
    by_decode(cluster, handle)
    by_prefill(cluster, handle)


@pytest.mark.parametrize("cancel", [by_decode, by_prefill, by_both])
async def test_three_hundred_rooms_cancelled_at_once_leave_nothing_and_the_next_is_served(
    caplog: pytest.LogCaptureFixture, cancel: Callable[[Cluster, RoomHandle], None]
) -> None:
    """TRT-LLM#13713, sglang#28651: a third only expected, a third only registered, a third in flight or queued."""
    async with wide() as cluster:
        held = faulty(cluster).add(Fault(hold=True))
        handles = [expect(cluster, room) for room in range(ROOMS) if room % 3]
        cluster.forward([spec(room, page(room)) for room in range(ROOMS) if room % 3 != 1])
        await until(lambda: faulty(cluster).attempts, "something is in flight")
        for room in range(0, ROOMS, 3):
            cluster.prefill().abort(room, reason="the client is gone")
        for handle in handles:
            cancel(cluster, handle)
            assert handle.poll() is RoomStatus.FAILED or cancel is by_prefill
        for result in await within(asyncio.gather(*handles)):
            assert "the client is gone" in str(result.error)
        held.release()
        sender(cluster).pacer.kick()
        await until(lambda: cluster.balanced() == [], "every book is empty")
        assert all(handle.units_free() for handle in handles)
        await is_served(cluster)
    assert len(lines(caplog)) < 30


async def test_units_of_many_open_rooms_stay_leased_while_their_peer_lives() -> None:
    """vllm#53095: 128 rooms wait for a prefill that is well. No lease has a term that a heartbeat must extend."""
    settings = config(ping_interval_s=0.3, silence_s=1.5)
    async with wide(config=settings) as cluster:
        handles = [expect(cluster, room) for room in range(128)]
        await asyncio.sleep(2 * settings.silence_s)
        assert not any(handle.poll().ended for handle in handles)
        cluster.forward([spec(room, page(room)) for room in range(128)])
        assert all(result.ok for result in await within(asyncio.gather(*handles)))


@pytest.mark.usefixtures("quick_retries")
async def test_one_stuck_room_is_one_line_however_long_it_is_stuck(caplog: pytest.LogCaptureFixture) -> None:
    """TRT-LLM#14740: the same warning every second. Here the room is asked hundreds of times, and told once a side."""
    async with wide(config=config(progress_timeout_s=0.05, drain_timeout_s=0.05)) as cluster:
        held = faulty(cluster).add(Fault(hold=True))
        handle = expect(cluster, 1)
        cluster.forward([spec(1, page(1))])
        assert not (await within(handle)).ok
        await until(lambda: any("quarantined" in line for line in lines(caplog)), "its units are in quarantine")
        told, asked = lines(caplog), sender(cluster).pacer.passes
        await asyncio.sleep(0.4)
        await until(lambda: sender(cluster).pacer.passes > asked + 10, "it is asked again and again")
        assert lines(caplog) == told, "nothing is repeated"
        assert len(told) <= 2, told
        assert not handle.units_free()
        held.release()
        sender(cluster).pacer.kick()
        await until(handle.units_free, "the late word frees")


async def test_a_thousand_good_rooms_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    """vllm-ascend#6125: a line a request on the hot path. A success is DEBUG."""
    caplog.set_level(logging.INFO)
    async with wide() as cluster:
        for gen in range(4):
            handles = [expect(cluster, room, gen) for room in range(256)]
            cluster.forward([spec(room, page(room), gen=gen) for room in range(256)])
            assert all(result.ok for result in await within(asyncio.gather(*handles)))
    assert lines(caplog) == []
