import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.engines.faulty import EVERY, Fault, FaultyEngine, nth, take, to
from orchestrator.engines.loopback import LoopbackFabric
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError
from protocols.ids import Session
from tests.engines.conformance import Pair

A, B, C = (0, 100, 8), (16, 200, 8), (32, 300, 8)


class FaultyPair(Pair):
    """A pair over loopback whose writer follows a script."""

    writer: FaultyEngine

    @classmethod
    async def connected(cls, *faults: Fault) -> "FaultyPair":
        fabric = LoopbackFabric()
        pair = cls(FaultyEngine(fabric.engine(), *faults), fabric.engine())
        await pair.prepare()
        return pair

    def holds(self, *spans: tuple[int, int, int]) -> bool:
        return np.array_equal(self.dst, self.expected(*spans))


async def test_a_held_batch_is_handed_on_when_released() -> None:
    hold = Fault(nth(0), hold=True)
    pair = await FaultyPair.connected(hold)
    held, free = pair.submit(A), pair.submit(B)
    for _ in range(3):
        pair.writer.poll()
    assert (held.done, free.landed) == (False, True)
    assert pair.holds(B)
    assert pair.writer.pending == 1
    pair.src[0] = 99
    hold.release()
    assert pair.writer.poll() == 1
    assert held.landed
    assert pair.dst[100] == 99, "a held batch has not read its source"


async def test_a_delay_counts_polls() -> None:
    pair = await FaultyPair.connected(Fault(delay_polls=2))
    batch = pair.submit(A, B)
    assert [pair.writer.poll() for _ in range(4)] == [0, 0, 2, 0]
    assert batch.landed


@pytest.mark.row("B2")
async def test_the_nth_submission_is_refused_and_leaves_no_trace() -> None:
    pair = await FaultyPair.connected(Fault(nth(1), refuse=True))
    first = pair.submit(A)
    with pytest.raises(BrokenPeerError):
        pair.submit(B)
    third = pair.submit(C)
    pair.writer.poll()
    assert first.landed
    assert third.landed
    assert pair.holds(A, C)
    assert [entry.ordinal for entry in pair.writer.log] == [0, 2]
    assert pair.writer.attempts == 3


async def test_chosen_blocks_fail_without_being_written() -> None:
    pair = await FaultyPair.connected(Fault(fail={1}))
    order: list[str] = []
    batch = pair.submit(A, B, C)
    batch.add_callbacks(lambda _: order.append("done"), lambda _: order.append("failed"))
    assert order == []
    pair.writer.poll()
    assert batch.in_doubt == [1]
    assert order == ["failed", "done"]
    assert pair.holds(A, C)
    assert pair.writer.land_late() == 0
    assert pair.holds(A, C)


@pytest.mark.row("B4")
@pytest.mark.parametrize("landing, value", [("snapshot", 11), ("late-read", 22)])
async def test_a_failed_block_lands_later(landing: str, value: int) -> None:
    pair = await FaultyPair.connected(Fault(fail=EVERY, landing=landing))  # type: ignore[arg-type]
    pair.src[:] = 11
    batch = pair.submit(A, B)
    pair.writer.poll()
    assert batch.in_doubt == [0, 1]
    assert pair.writer.pending == 0
    assert not pair.dst.any()
    pair.src[:] = 22  # the source is free: its owner writes the next request into it
    assert pair.writer.land_late() == 2
    assert pair.dst[100:108].tolist() == [value] * 8
    assert np.count_nonzero(pair.dst) == 16
    assert pair.writer.land_late() == 0


async def test_a_fence_ends_the_doubt() -> None:
    pair = await FaultyPair.connected(Fault(fail=EVERY, landing="snapshot"))
    pair.submit(A)
    pair.writer.poll()
    await pair.reader.close(0)
    pair.writer.land_late()
    assert not pair.dst.any()


async def test_a_batch_may_land_and_never_be_reported() -> None:
    pair = await FaultyPair.connected(Fault(unfinished=True))
    batch = pair.submit(A)
    for _ in range(3):
        assert pair.writer.poll() == 0
    assert pair.holds(A)
    assert not batch.done
    await pair.writer.close(0)
    assert batch.in_doubt == [0]


def drop_first(blocks: Blocks) -> Blocks:
    return blocks[1:]


def drop_all(blocks: Blocks) -> Blocks:
    return Blocks.empty()


def wrong_place(blocks: Blocks) -> Blocks:
    return Blocks(blocks.src, blocks.dst + 1000, blocks.length)


@pytest.mark.parametrize(
    "rewrite, landing",
    [(drop_first, [B]), (drop_all, []), (wrong_place, [(0, 1100, 8), (16, 1200, 8)])],
)
async def test_blocks_are_altered_beneath_a_caller_who_hears_of_success(
    rewrite: Callable[[Blocks], Blocks], landing: list[tuple[int, int, int]]
) -> None:
    pair = await FaultyPair.connected(Fault(rewrite=rewrite))
    batch = pair.submit(A, B)
    assert not batch.done
    assert pair.writer.poll() == 2
    assert batch.landed
    assert pair.holds(*landing)
    assert np.array_equal(pair.writer.log[0].blocks.dst, pair.blocks(A, B).dst), "the log keeps what was asked for"


async def test_a_failure_among_rewritten_blocks_answers_for_the_right_ones() -> None:
    def spoil_last(blocks: Blocks) -> Blocks:
        return Blocks(blocks.src, np.append(blocks.dst[:-1], 1 << 40), blocks.length)

    pair = await FaultyPair.connected(
        Fault(nth(0), rewrite=spoil_last), Fault(nth(1), rewrite=lambda b: spoil_last(b)[1:])
    )
    same_number, fewer = pair.submit(A, B), pair.submit(A, B)
    pair.writer.poll()
    assert same_number.in_doubt == [1]
    assert fewer.in_doubt == [0, 1], "without a mapping every block is in doubt"


async def test_the_first_matching_line_applies() -> None:
    pair = await FaultyPair.connected()
    elsewhere = pair.writer.add(Fault(to(Session("elsewhere")), refuse=True))
    pair.writer.add(Fault(lambda session, blocks, ordinal: blocks.nbytes == 16, fail={0}))
    small, large = pair.submit(A), pair.submit(A, B)
    pair.writer.poll()
    assert small.landed
    assert large.in_doubt == [0]
    pair.writer.faults.remove(elsewhere)


async def test_faults_combine() -> None:
    fault = Fault(hold=True, fail={0}, landing="late-read", rewrite=wrong_place)
    pair = await FaultyPair.connected(fault)
    batch = pair.submit(A, B)
    pair.writer.poll()
    assert not batch.done
    fault.release()
    pair.writer.poll()
    assert batch.in_doubt == [0]
    assert pair.holds((16, 1200, 8))
    pair.writer.land_late()
    assert pair.holds((0, 1100, 8), (16, 1200, 8))


async def test_a_refusal_after_submit_returned_is_never_submitted() -> None:
    fabric = LoopbackFabric()
    inner = FaultyEngine(fabric.engine(), Fault(refuse=True))
    pair = Pair(FaultyEngine(inner, Fault(delay_polls=1)), fabric.engine())
    await pair.prepare()
    calls: list[str] = []
    batch = pair.submit(A, B)
    batch.add_callbacks(lambda _: calls.append("done"), lambda _: calls.append("failed"))
    pair.writer.poll()
    pair.writer.poll()
    assert batch.never_submitted == [0, 1]
    assert batch.in_doubt == []
    assert batch.quiet
    assert not batch.landed
    assert "refused by the script" in batch.reason
    assert calls == ["failed", "done"]


async def test_what_is_held_at_the_end_is_in_doubt() -> None:
    pair = await FaultyPair.connected(Fault(nth(0), hold=True))
    held, free = pair.submit(A, B), pair.submit(C)
    await pair.writer.close(0.01)
    assert free.landed
    assert held.in_doubt == [0, 1]
    assert pair.holds(C)


async def test_the_log_is_a_byte_oracle() -> None:
    pair = await FaultyPair.connected()
    pair.submit(A, B)
    pair.submit(C)
    log = pair.writer.log
    assert [(entry.session, len(entry.blocks), entry.ordinal) for entry in log] == [
        (pair.reader.session, 2, 0),
        (pair.reader.session, 1, 1),
    ]
    assert (pair.writer.submitted_blocks, pair.writer.submitted_bytes) == (3, 24)
    pair.writer.poll()


@pytest.mark.row("B5")
async def test_a_silent_peer_costs_its_timeout_only() -> None:
    fabric = LoopbackFabric()
    writer, reader = FaultyEngine(fabric.engine()), fabric.engine()
    writer.silent.add(reader.session)
    with pytest.raises(BrokenPeerError, match="in time"):
        await asyncio.wait_for(writer.connect(reader.session, None, 0.01), 5)
    writer.silent.clear()
    await writer.connect(reader.session, None, 0.01)


def test_take_keeps_the_order_asked_for() -> None:
    blocks = Blocks(np.arange(4), np.arange(4) + 10, np.arange(4) + 20)
    assert take(blocks, [2, 0]).dst.tolist() == [12, 10]
