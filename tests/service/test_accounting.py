"""Numbers are what happened: bytes that landed, times that were stamped, log lines that a person can bear."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.chunk import ChunkSpec
from orchestrator.clock import Timer
from orchestrator.engines.base import Engine, EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, nth
from orchestrator.engines.paced import PacedEngine
from orchestrator.log import PERIOD_S, RateLimited
from orchestrator.outcome import Outcome
from orchestrator.pages.ownership import owned_pages
from orchestrator.registry import Timelines
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from orchestrator.trace import Span, TransferResult, difference, union_length
from protocols.codec import decode
from protocols.ids import RoomKey
from protocols.messages import Done
from tests.service.scenes import (
    LateModel,
    both_kinds,
    both_modes,
    config,
    faulty,
    ints,
    live,
    outcomes,
    sender,
    spec,
    wrapped,
)
from tests.support.waiting import until, within

SOURCE, TARGET = ints(3, 4, 9), ints(20, 7, 8)
PAGE = 64
AUX, ROW = 32, 16


def page_buffers(pool: Pool) -> int:
    return len(pool.layout.unit_buffers("page"))


# -- D1, V9: bytes ------------------------------------------------------------------------------------------------


@pytest.mark.row("D1", "A15", "A16")
@both_modes
@both_kinds
@pytest.mark.parametrize("destinations", [1, 2, 3])
async def test_bytes_are_pages_times_item_bytes_for_each_destination(
    kind: Any, layerwise: bool, destinations: int
) -> None:
    """KV, state and aux; a page counts whole, however few of its tokens are valid."""
    src = Pool(kind=kind, seed=1, state_rows=4)
    decodes = [Pool(kind=kind, state_rows=4) for _ in range(destinations)]
    settings = config(layerwise=layerwise)
    async with Cluster(prefills=[src], decodes=decodes, config=settings, wrap=wrapped()) as cluster:
        handles = [
            each.expect(
                1,
                0,
                cluster.addresses,
                TARGET,
                total_tokens=9,
                aux_slot=1,
                state_rows=[2, 0],
                destinations=destinations,
            )
            for each in cluster.decodes
        ]
        cluster.forward([spec(1, SOURCE, end_token=9, aux_slot=2, state_rows=[0, 1])])
        one = 3 * PAGE * page_buffers(src) + AUX + 2 * ROW
        results = [await outcomes(cluster, handle) for handle in handles]
        assert [decode.bytes for _, decode in results] == [one] * destinations
        assert {prefill.bytes for prefill, _ in results} == {one * destinations}
        assert faulty(cluster).submitted_bytes == one * destinations
        assert sender(cluster).counters["bytes"] == one * destinations
        assert {prefill.blocks for prefill, _ in results} == {faulty(cluster).submitted_blocks}


@pytest.mark.row("D1", "F3", "A3")
@pytest.mark.parametrize("mode", ["contiguous", "zigzag"])
async def test_the_sum_over_ranks_and_chunks_is_the_bytes_of_the_request(mode: Any) -> None:
    """Three ranks, three chunks, a prefix on the decode: what was sent, and nothing of the prompt's length in it."""
    ranks = [Pool(seed=rank, cp_rank=rank, cp_size=3, cp_mode=mode) for rank in range(3)]
    dst = Pool()
    async with Cluster(prefills=ranks, decodes=[dst], config=config(), wrap=wrapped()) as cluster:
        handle = cluster.decode().expect(
            1, 0, cluster.addresses, np.arange(20, 32), total_tokens=54, prefix_tokens=8, aux_slot=None
        )
        for first, count, last in ((0, 5, False), (5, 7, False), (12, 2, True)):
            for rank in range(3):
                pages, positions = owned_pages(np.arange(first, first + count), first, mode, rank, 3)
                chunk = ChunkSpec(
                    room=1,
                    start_token=4 * first,
                    end_token=54 if last else 4 * (first + count),
                    pages=pages,
                    positions=positions,
                    last=last,
                )
                cluster.forward([chunk], prefill=rank)
        decode_result: TransferResult = await within(handle)
        ends = [await within(prefill.finished(1)) for prefill in cluster.prefills]
        sent = [faulty(cluster, rank).submitted_bytes for rank in range(3)]
        assert [end.bytes for end in ends] == sent
        assert all(sent)
        assert decode_result.bytes == sum(sent) == 12 * PAGE * page_buffers(dst)
        assert decode_result.blocks == sum(end.blocks or 0 for end in ends)


@pytest.mark.row("D1", "A11")
async def test_a_dummy_reports_no_bytes() -> None:
    """On the decode that takes none; and on the prefill, where every destination is one."""
    src, decodes = Pool(seed=1), [Pool(), Pool()]
    async with Cluster(prefills=[src], decodes=decodes, config=config(), wrap=wrapped()) as cluster:
        real = cluster.decode(0).expect(1, 0, cluster.addresses, TARGET, total_tokens=12, destinations=2)
        dummy = cluster.decode(1).expect(1, 0, [], None, total_tokens=12, dummy_peers=cluster.addresses, destinations=2)
        alone = cluster.decode(1).expect(2, 0, [], None, total_tokens=8, dummy_peers=cluster.addresses)
        cluster.forward([spec(1, SOURCE), spec(2, ints(1, 2))])
        prefill, decode_result = await outcomes(cluster, real)
        assert prefill.bytes == decode_result.bytes == 3 * PAGE * page_buffers(src)
        _, none = await outcomes(cluster, dummy)
        assert (none.ok, none.bytes, none.blocks) == (True, None, None)
        prefill, none = await outcomes(cluster, alone)
        assert (prefill.ok, prefill.bytes, prefill.blocks) == (True, None, None)
        assert (none.ok, none.bytes) == (True, None)
        assert decodes[1].untouched(np.empty(0, np.int64))
        assert faulty(cluster).submitted_bytes == decode_result.bytes


@pytest.mark.row("D1")
async def test_a_fake_room_reports_no_bytes() -> None:
    device = FakeDevice()
    async with Cluster(
        prefills=[Pool(seed=1)], decodes=[Pool()], config=config(), wrap=wrapped(), events=device
    ) as cluster:
        handle = cluster.decode().expect(1, 0, [], [3, 4], total_tokens=12, aux_slot=2)
        result: TransferResult = await within(handle)
        assert (result.ok, result.bytes, result.blocks) == (True, None, None)
        assert handle.units_free()
        cluster.forward([ChunkSpec(room=2, pages=[1], last=False, fake=True)])
        assert not cluster.prefill().poll(2).ended
        cluster.forward([ChunkSpec(room=2, start_token=4, pages=[2], last=True, fake=True)])
        result = await within(cluster.prefill().finished(2))
        assert (result.ok, result.bytes, result.blocks, result.chunks) == (True, None, None, 2)
        assert cluster.prefill().source_free(2)
        assert faulty(cluster).attempts == 0
        assert cluster.balanced() == []


@pytest.mark.row("D1")
async def test_a_failed_room_counts_what_landed_once_it_has_drained() -> None:
    """Layer by layer: two landed, the third failed. While it drains nobody knows the number, so there is none."""
    src, dst = Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(layer_group=1), wrap=wrapped()) as cluster:
        engine = faulty(cluster)
        engine.add(Fault(nth(2), fail=EVERY))
        hold = engine.add(Fault(nth(3), hold=True))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(1, SOURCE)])
        await until(lambda: cluster.prefill().poll(1).ended)
        assert cluster.prefill().result(1).bytes is None
        hold.release()
        prefill, decode_result = await outcomes(cluster, handle)
        landed = [span for span in prefill.spans if span.landed is not None]
        assert not prefill.ok
        assert prefill.bytes == sum(span.bytes for span in landed)
        assert [span.layers for span in prefill.spans if span.failed] == [(2,)]
        assert (2,) not in [span.layers for span in landed]
        assert 2 * 2 * 3 * PAGE <= prefill.bytes < 3 * PAGE * page_buffers(src)
        assert not decode_result.bytes


@pytest.mark.row("D1", "A16")
@both_modes
@pytest.mark.parametrize("seed", range(4))
async def test_both_sides_agree_whatever_the_rooms(layerwise: bool, seed: int) -> None:
    """V9 over random rooms: result, Done on the wire, engine and counters say one number."""
    rng = random.Random(seed)
    src, dst = Pool(seed=1, pages=256), Pool(pages=256)
    settings = config(layerwise=layerwise)
    async with Cluster(prefills=[src], decodes=[dst], config=settings, wrap=wrapped()) as cluster:
        sources, targets = (rng.sample(range(256), 256) for _ in range(2))
        total = 0
        for room in range(12):
            size, prefix = rng.randrange(1, 20), 0
            prefix = rng.randrange(size + 1)
            pages = np.array([sources.pop() for _ in range(size)], np.int64)
            target = np.array([targets.pop() for _ in range(size - prefix)], np.int64)
            slot = rng.choice([None, 3])
            handle = cluster.decode().expect(
                room, 0, cluster.addresses, target, prefix_tokens=4 * prefix, total_tokens=4 * size, aux_slot=slot
            )
            cluster.forward([spec(room, pages, aux_slot=slot)], layers=rng.sample(range(4), rng.randrange(5)))
            prefill, decode_result = await outcomes(cluster, handle)
            want = (size - prefix) * PAGE * page_buffers(src) + (AUX if slot is not None else 0)
            assert prefill.bytes == decode_result.bytes == want
            total += want
        assert faulty(cluster).submitted_bytes == total
        receiver = cluster.decode_nodes[0].receiver
        assert receiver is not None
        assert sender(cluster).counters["bytes"] == receiver.counters["bytes"] == total
        frames = [decode(frame) for direction, frame in cluster.network.frames if direction == "to_decode"]
        said = {message.room: message.bytes for message in frames if isinstance(message, Done)}
        assert sum(said.values()) == total


# -- D2: times ----------------------------------------------------------------------------------------------------

stamps = st.one_of(st.none(), st.integers(0, 30).map(float))


@pytest.mark.row("D2")
@given(st.lists(st.tuples(stamps, stamps), max_size=12))
def test_the_union_of_intervals(intervals: list[tuple[float | None, float | None]]) -> None:
    known = [(a, b) for a, b in intervals if a is not None and b is not None]
    seconds = {second for a, b in known for second in range(int(a), int(b))}
    assert union_length(intervals) == len(seconds)


@pytest.mark.row("D2")
@given(stamps, stamps)
def test_a_duration_is_there_and_not_negative_or_absent(start: float | None, end: float | None) -> None:
    seconds = difference(start, end)
    if start is None or end is None or end < start:
        assert seconds is None
    else:
        assert seconds == end - start


@pytest.mark.row("D2")
async def test_a_missing_stamp_leaves_its_durations_out() -> None:
    src, dst = Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), wrap=wrapped()) as cluster:
        cluster.prefill().begin_forward([spec(1, SOURCE)])
        await live(cluster, 1)
        cluster.prefill().abort(1)
        result = await within(cluster.prefill().finished(1))
        await until(lambda: cluster.prefill().source_free(1))
        result = cluster.prefill().result(1)
        assert result.timing == {}, "no offer, no forward, nothing sent"
        assert set(result.stamps) == {"known", "ended"}
        assert result.bytes_per_s is None

        handle = cluster.decode().expect(2, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(2, SOURCE)])
        prefill, decode_result = await outcomes(cluster, handle)
        assert set(prefill.timing) >= {"wait_offer", "wait_event", "wait_engine", "fallback", "exposed", "commit"}
        assert all(seconds >= 0 for seconds in (*prefill.timing.values(), *decode_result.timing.values()))

        faulty(cluster).add(Fault(fail=EVERY))
        handle = cluster.decode().expect(3, 0, cluster.addresses, ints(40), total_tokens=4)
        cluster.forward([spec(3, ints(5))])
        prefill, _ = await outcomes(cluster, handle)
        assert "commit" not in prefill.timing
        assert "wait_engine" not in prefill.timing, "nothing landed"
        assert "exposed" not in prefill.timing


class Ticking:
    """A clock that moves by a fixed step with every look at it: no two stamps are equal, whoever takes them."""

    def __init__(self, step: float) -> None:
        self.seconds = 50.0
        self.step = step

    def now(self) -> float:
        self.seconds += self.step
        return self.seconds

    def call_later(self, delay: float, callback: Any) -> Timer:
        return asyncio.get_running_loop().call_later(delay, callback)


@pytest.mark.row("D2", "A16")
@both_modes
@pytest.mark.parametrize("step", [1e-7, 1e-5, 1e-3])
@pytest.mark.parametrize("rooms", [1, 3])
async def test_no_speed_is_above_the_line_rate(layerwise: bool, step: float, rooms: int) -> None:
    """A link of 0.8 gigabits, shared by rooms and destinations. Whenever the stamps are taken, none is too fast."""
    clock, rate = Ticking(step), 0.1e9
    src, decodes = Pool(seed=1), [Pool(), Pool()]

    def wrap(inner: Engine) -> Engine:
        return PacedEngine(inner, rate * 8 / 1e9, clock.now)

    limits = EngineLimits(max_batch_blocks=3, window_blocks=8, max_window_blocks=8)
    async with Cluster(
        prefills=[src], decodes=decodes, config=config(layerwise=layerwise), wrap=wrap, clock=clock, limits=limits
    ) as cluster:
        handles = [
            each.expect(room, 0, cluster.addresses, ints(room, 9 + 2 * room), total_tokens=8, destinations=2)
            for room in range(rooms)
            for each in cluster.decodes
        ]
        cluster.forward([spec(room, ints(10 + 3 * room, 40 + room)) for room in range(rooms)])
        for handle in handles:
            prefill, _ = await outcomes(cluster, handle)
            assert prefill.bytes == 2 * 2 * PAGE * page_buffers(src)
            assert prefill.bytes_per_s is not None
            assert prefill.bytes_per_s <= rate * (1 + 1e-9)


@pytest.mark.row("D2")
def test_a_speed_counts_the_bytes_of_the_intervals_it_divides_by() -> None:
    """A room of very many hand-overs keeps only the first of them: the speed is theirs."""
    kept = tuple(Span(0, (layer,), "group", 100, 1, posted=layer, landed=layer + 1.0) for layer in range(10))
    fields: dict[str, Any] = {"key": RoomKey(1, 0), "ok": True, "error": None, "blocks": 1, "chunks": 1}
    fields |= {"layers_fired": 1, "layers_fallback": 0, "timing": {}, "spans": kept}
    assert TransferResult(**fields, bytes=1000).bytes_per_s == 100
    assert TransferResult(**fields, bytes=1_000_000).bytes_per_s == 100
    assert TransferResult(**fields | {"spans": ()}, bytes=1000).bytes_per_s is None


@pytest.mark.row("D2")
def test_only_the_timelines_of_the_latest_rooms_are_kept() -> None:
    fields: dict[str, Any] = {"ok": True, "error": None, "bytes": 100, "blocks": 1, "chunks": 1, "layers_fired": 1}
    fields |= {"layers_fallback": 0, "timing": {"transfer": 1.0}}
    ended = [Outcome(RoomKey(room, 1)) for room in range(5)]
    timelines = Timelines(at_most=7)
    for outcome, spans in zip(ended, (3, 3, 0, 3, 9), strict=True):
        span = Span(0, (1,), "group", 100, 1)
        outcome.succeed(TransferResult(key=outcome.key, spans=(span,) * spans, **fields))
        timelines.keep(outcome)
        if outcome is ended[3]:
            assert [len(result.spans) for each in ended if (result := each.result) is not None] == [0, 3, 0, 3]
    results = [outcome.result for outcome in ended]
    assert all(result is not None and not result.spans and result.timing == {"transfer": 1.0} for result in results)


@pytest.mark.row("D2")
async def test_the_exposed_time_is_from_the_end_of_the_forward_to_the_last_landing() -> None:
    device, src, dst = FakeDevice(), Pool(), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(), events=device, wrap=wrapped()) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
        LateModel(src, device).forward(forward, SOURCE, 4)
        device.run()
        prefill, _ = await outcomes(cluster, handle)
        last = max(span.landed for span in prefill.spans if span.landed is not None)
        assert prefill.timing["exposed"] == last - prefill.stamps["forward_end"] > 0
        for span in prefill.spans:
            order = [span.fired, span.ready, span.queued, span.posted, span.landed]
            known = [at for at in order if at is not None]
            assert len(known) == 5
            assert known == sorted(known)


# -- D3: logs -----------------------------------------------------------------------------------------------------


def lines(caplog: pytest.LogCaptureFixture, least: int) -> list[str]:
    return [
        record.getMessage()
        for record in caplog.records
        if record.levelno >= least and record.name.startswith("kvferry")
    ]


@pytest.mark.row("D3", "A16")
@both_modes
async def test_success_is_debug_with_its_breakdown(layerwise: bool, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    src, dst = Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(layerwise=layerwise)) as cluster:
        for room in range(20):
            handle = cluster.decode().expect(room, 0, cluster.addresses, TARGET, total_tokens=12)
            cluster.forward([spec(room, SOURCE)])
            await outcomes(cluster, handle)
        assert lines(caplog, logging.INFO) == []
        done = [line for line in lines(caplog, logging.DEBUG) if "room 7.0 done" in line]
        assert len(done) == 1
        for part in ("wait_event", "fallback", "wait_engine"):
            assert part in done[0]
        assert len([line for line in lines(caplog, logging.DEBUG) if "room 7.0 committed" in line]) == 1


@pytest.mark.row("D3")
async def test_a_failed_finish_is_one_warning_with_its_cause(caplog: pytest.LogCaptureFixture) -> None:
    src, dst = Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config()) as cluster:
        cluster.prefill().begin_forward([spec(1, SOURCE)])
        cluster.prefill().abort(1, reason="why it ended")
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        await outcomes(cluster, handle)
        warnings = lines(caplog, logging.WARNING)
        assert len(warnings) == 2, "one on each side"
        assert all("room 1.0 failed" in line and "why it ended" in line for line in warnings)
        assert lines(caplog, logging.ERROR) == []


@pytest.mark.row("D3")
async def test_a_storm_of_failures_is_a_few_lines(caplog: pytest.LogCaptureFixture) -> None:
    src, dst = Pool(seed=1), Pool()
    async with Cluster(prefills=[src], decodes=[dst], config=config(log_burst=3)) as cluster:
        for room in range(50):
            cluster.prefill().abort(room)
        await until(lambda: sender(cluster).counters["rooms_failed"] == 50)
        assert len(lines(caplog, logging.WARNING)) == 3


@pytest.mark.row("D3")
def test_lines_are_limited_for_each_kind_and_none_is_lost_silently(caplog: pytest.LogCaptureFixture) -> None:
    seconds = itertools.count(0.0, 1.0)
    now = [0.0]
    log = RateLimited("kvferry.test", lambda: now[0], burst=2)
    for _ in range(10):
        log.warning("storm", "storm at %s", next(seconds))
    log.warning("other", "another kind")
    assert lines(caplog, logging.WARNING) == ["storm at 0.0", "storm at 1.0", "another kind"]
    now[0] = PERIOD_S - 0.001
    log.warning("storm", "too early")
    now[0] = PERIOD_S
    caplog.clear()
    log.warning("storm", "again")
    log.warning("other", "also again")
    assert lines(caplog, logging.WARNING) == [
        "storm: 9 more lines of this kind in the last minute",
        "again",
        "also again",
    ]
