"""The coverage rule: what is not exactly the own list is never committed (N5)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from orchestrator.engines.faulty import Fault
from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.blocks import Blocks
from protocols.errors import MismatchError
from protocols.leases import UnitState
from protocols.messages import Abort, Coverage, Done, Hello, Offer
from tests.peers.raw import RawPrefill
from tests.peers.scenes import (
    KEY,
    SOON,
    cluster,
    expect,
    held,
    landed,
    receiver,
    spec,
)

# -- the coverage rule -----------------------------------------------------------------------------------------------

Told = tuple[Coverage, ...]


def edit(**changes: Any) -> Callable[[Told], Told]:
    """The first buffer's entry, changed."""
    return lambda told: (msgspec.structs.replace(told[0], **changes), *told[1:])


def aux_of(told: Told) -> Coverage:
    return told[-1]


LIES: dict[str, Callable[[Told], Told]] = {
    "nothing": lambda told: (),
    "a buffer missing": lambda told: told[1:],
    "the draft buffers missing": lambda told: told[:8] + told[10:],
    "the aux slot missing": lambda told: told[:-1],
    "the aux slot twice": lambda told: (*told, aux_of(told)),
    "another aux position": lambda told: (*told[:-1], msgspec.structs.replace(aux_of(told), runs=((1, 1),))),
    "the first page missing": edit(runs=((1, 3),)),
    "a page missing within": edit(runs=((0, 1), (2, 2))),
    "the last page missing": edit(runs=((0, 3),)),
    "chunk 1 over chunk 0": edit(runs=((0, 2), (0, 2))),
    "chunk 0 twice and chunk 1": edit(runs=((0, 2), (0, 2), (2, 2))),
    "a page twice": edit(runs=((0, 4), (3, 1))),
    "a page beyond": edit(runs=((0, 5),)),
    "far beyond": edit(runs=((2**62, 4),)),
    "one page of many times": edit(runs=((0, 1),) * 4),
    "half of each page": edit(length=32),
    "the second half of each page": edit(offset=32, length=32),
    "two halves": lambda told: (
        msgspec.structs.replace(told[0], length=32),
        msgspec.structs.replace(told[0], offset=32, length=32),
        *told[1:],
    ),
    "longer than a page": edit(length=128),
    "an unknown buffer": edit(buffers=(999,)),
    "the scratch buffer too": edit(buffers=(0, 11)),
    "the same buffer twice": edit(buffers=(0, 0)),
    "another buffer twice": edit(buffers=(1,)),
}


@pytest.mark.row("N5")
@pytest.mark.parametrize("name", LIES)
async def test_a_lie_about_what_landed_is_never_committed(name: str) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        truth = raw.coverage(offer)
        assert len(truth) == 11
        raw.done(offer, LIES[name](truth), bytes=2592, blocks=21)  # the totals are right, as always
        error = (await asyncio.wait_for(handle, SOON)).error
        assert isinstance(error, MismatchError)
        assert "coverage" in str(error)
        assert "coverage" in (await raw.hear(Abort, 5)).reason
        raw.done(offer)
        await raw.flushed()
        assert handle.poll() is RoomStatus.FAILED, "it had its word"


@pytest.mark.row("N5")
async def test_the_truth_is_committed_however_it_is_put() -> None:
    ways: list[Callable[[Told], Told]] = [
        lambda told: told,
        lambda told: tuple(reversed(told)),
        edit(runs=((2, 2), (0, 2))),
        lambda told: (
            msgspec.structs.replace(told[0], buffers=tuple(range(10))),
            msgspec.structs.replace(told[0], buffers=()),
            aux_of(told),
        ),
        lambda told: tuple(
            msgspec.structs.replace(entry, runs=(run,)) for entry in told for run in split_runs(entry.runs)
        ),
    ]
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        for gen, way in enumerate(ways):
            handle = expect(c, gen=gen, peers=[raw.address])
            offer = await raw.hear(Offer, nth=gen)
            raw.done(offer, way(raw.coverage(offer)))
            assert (await asyncio.wait_for(handle, SOON)).ok


def split_runs(runs: tuple[tuple[int, int], ...]) -> list[tuple[int, int]]:
    return [(first + nth, 1) for first, count in runs for nth in range(count)]


@pytest.mark.row("N5")
@pytest.mark.parametrize("runs, good", [(((0, 3),), False), (((1, 3),), True), (((0, 1), (1, 3)), False)])
async def test_what_the_decode_has_already_is_not_covered_again(runs: Any, good: bool) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address], prefix_tokens=4, pages=[1, 2, 3])
        offer = await raw.hear(Offer)
        truth = raw.coverage(offer)
        assert truth[0].runs == ((1, 3),)
        raw.done(offer, (msgspec.structs.replace(truth[0], runs=runs), *truth[1:]))
        assert (await asyncio.wait_for(handle, SOON)).ok is good


@pytest.mark.row("N5", "C1")
@pytest.mark.parametrize(
    "first, second, good",
    [
        ("all", "nothing", True),
        ("all", "all", False),
        ("first half", "second half", True),
        ("first half", "first half", False),
        ("first half", "nothing", False),
    ],
)
async def test_the_union_of_all_ranks_must_be_the_list(first: str, second: str, good: bool) -> None:
    async with cluster() as c:
        ranks = [RawPrefill(c.network, Pool().layout) for _ in range(2)]
        handle = expect(c, peers=[rank.address for rank in ranks])
        for rank, told in zip(ranks, (first, second), strict=True):
            offer = await rank.hear(Offer)
            truth = rank.coverage(offer)
            halves = {"all": truth, "nothing": (), "first half": truth[:5], "second half": truth[5:]}
            rank.done(offer, halves[told])
            await rank.flushed()
            assert handle.poll().ended is (rank is ranks[1]), "one rank's word is not enough"
        assert (await handle).ok is good


@pytest.mark.row("N5", "C7")
async def test_done_is_heard_once_and_of_its_own_room() -> None:
    async with cluster() as c:
        raw, other = RawPrefill(c.network, Pool().layout), RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address, other.address])
        offer = await raw.hear(Offer)
        truth = raw.coverage(offer)
        raw.done(offer, truth[:5])
        raw.done(offer, truth[5:])  # nothing may be added afterwards
        for room, gen in ((6, 1), (5, 2)):
            other.send(Done(room=room, gen=gen, status="ok", coverage=truth))
        await raw.flushed()
        await other.flushed()
        assert not handle.poll().ended
        other.done(await other.hear(Offer), ())
        assert isinstance((await asyncio.wait_for(handle, SOON)).error, MismatchError)
        assert held(receiver(c), UnitState.LEASED) == {}


MOVES: dict[str, Callable[[Blocks], Blocks]] = {
    "dropped": lambda blocks: blocks[1:],
    "swapped": lambda blocks: Blocks(blocks.src[::-1], blocks.dst, blocks.length),
    "one page further": lambda blocks: Blocks(blocks.src, blocks.dst + 64, blocks.length),
    "cut short": lambda blocks: Blocks(blocks.src, blocks.dst, blocks.length // 2),
}


@pytest.mark.row("N5")
@pytest.mark.parametrize("name", MOVES)
async def test_with_digests_an_engine_that_lies_is_found_out(name: str) -> None:
    """The control experiment: coverage believes the engine, the digest does not."""
    src, dst = Pool(seed=1), Pool()
    for digest in (False, True):
        dst.poison()
        fault = Fault(lambda session, blocks, ordinal: len(blocks) > 2, rewrite=MOVES[name])
        async with cluster(fault, prefills=[src], decodes=[dst], digest=digest) as c:
            handle = expect(c)
            c.forward([spec()])
            result = await asyncio.wait_for(handle, SOON)
            assert not landed(src, dst)
            assert result.ok is not digest
            assert (await asyncio.wait_for(c.prefill().finished(*KEY), SOON)).ok is not digest


@pytest.mark.row("N5", "A3")
async def test_a_chunk_written_over_the_one_before_is_found_out() -> None:
    src, dst = Pool(seed=1), Pool()
    first = {buffer.address for buffer in dst.layout.unit_buffers("page")}

    def over(blocks: Blocks) -> Blocks:
        return Blocks(blocks.src, blocks.dst - 2 * 64, blocks.length)

    fault = Fault(lambda session, blocks, ordinal: int(blocks.dst[0]) - 3 * 64 in first, rewrite=over)
    async with cluster(fault, prefills=[src], decodes=[dst], digest=True) as c:
        handle = expect(c, pages=[1, 2, 3, 4], total_tokens=16)
        c.forward([spec(pages=[4, 5], last=False, end_token=8, aux_slot=None)])
        c.forward([spec(pages=[6, 7], start_token=8, end_token=16)])
        error = (await asyncio.wait_for(handle, SOON)).error
        assert isinstance(error, MismatchError)
        assert not (await asyncio.wait_for(c.prefill().finished(*KEY), SOON)).ok


@pytest.mark.row("E3")
async def test_a_hello_says_who_it_is() -> None:
    async with cluster() as c:
        hello = await asyncio.to_thread(c.decode().check, c.addresses[0])
        assert isinstance(hello, Hello)
        assert hello.fingerprint == c.prefill_pools[0].layout.fingerprint
        assert hello.layout == c.prefill_pools[0].layout
