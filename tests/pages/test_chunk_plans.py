"""Ranges, page tables, the owner filter and the planner together: what a chunk writes, byte for byte."""

from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.pages.ownership import owned_pages
from orchestrator.pages.ranges import Range, chunk_ranges
from orchestrator.pages.tables import mask_table
from protocols.blocks import Blocks, Ints, layer_blocks
from protocols.coverage import Expected, Ledger
from protocols.layout import CpMode
from protocols.planning import ChunkPlan, plan_chunk

ITEM_LEN = 24
SRC_BASE, DST_BASE = 1 << 20, 1 << 30
BUFFER = 5
MODES: list[CpMode] = ["none", "contiguous", "zigzag"]


@dataclass(frozen=True)
class Request:
    """A request on both sides: the prefill's table row, the decode's offer (its prefix pages left out)."""

    prompt: int
    chunks: list[int]
    page_size: int
    prefix: int
    row: list[int]
    offer: Ints
    decode_prefix_pages: int
    mode: CpMode
    size: int

    @property
    def pages(self) -> int:
        return -(-self.prompt // self.page_size)

    def ranges(self) -> tuple[Range, ...]:
        return chunk_ranges(self.prompt, self.chunks, self.page_size, self.prefix)

    def plan(self, part: Range, rank: int, mode: CpMode, size: int) -> ChunkPlan:
        """One rank's plan of one range."""
        table = mask_table(self.row, part.end_token, self.page_size)
        first, count = part.positions(self.page_size)
        pages, positions = owned_pages(table[first : first + count], first, mode, rank, size)
        return plan_chunk(pages, positions, self.decode_prefix_pages, self.offer)

    def blocks(self, part: Range, rank: int, mode: CpMode, size: int) -> Blocks:
        return layer_blocks(self.plan(part, rank, mode, size).runs, SRC_BASE, DST_BASE, ITEM_LEN)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    page_size = draw(st.sampled_from([1, 4, 16]))
    prefix = draw(st.integers(0, 3 * page_size))
    chunks = draw(st.lists(st.integers(1, 4 * page_size), min_size=1, max_size=6))
    prompt = prefix + sum(chunks)
    pages = -(-prompt // page_size)
    decode_prefix_pages = draw(st.one_of(st.just(0), st.integers(0, pages)))
    mode: CpMode = draw(st.sampled_from(MODES))
    size = 1 if mode == "none" else draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    pool = 2 * pages + 4
    # Mostly runs with breaks in them, as allocators give; fully shuffled now and then.
    order = np.arange(pool) if seed % 3 else rng.permutation(pool)
    row = np.roll(order, int(rng.integers(pool)))[: pages + 3]
    row[pages:] = [-1, row[0], pool - 1]  # a stale tail
    offer = np.roll(rng.permutation(pool) if seed % 5 == 0 else np.arange(pool), 7)[: pages - decode_prefix_pages]
    return Request(
        prompt, chunks, page_size, prefix, row.tolist(), offer.astype(np.int64), decode_prefix_pages, mode, size
    )


def bytes_of(blocks: Blocks) -> Counter[tuple[int, int]]:
    """Every (source byte, destination byte) the blocks move, with how often."""
    moved: Counter[tuple[int, int]] = Counter()
    for src, dst, length in zip(blocks.src.tolist(), blocks.dst.tolist(), blocks.length.tolist(), strict=True):
        moved.update((src + nth, dst + nth) for nth in range(length))
    return moved


def run_pages(firsts: Ints, counts: Ints) -> list[int]:
    runs = zip(firsts.tolist(), counts.tolist(), strict=True)
    return [first + nth for first, count in runs for nth in range(count)]


def whole(request: Request) -> Counter[tuple[int, int]]:
    """The monolithic send of the request, page by page."""
    moved: Counter[tuple[int, int]] = Counter()
    for position in range(request.decode_prefix_pages, request.pages):
        src = SRC_BASE + request.row[position] * ITEM_LEN
        dst = DST_BASE + int(request.offer[position - request.decode_prefix_pages]) * ITEM_LEN
        moved.update((src + nth, dst + nth) for nth in range(ITEM_LEN))
    return moved


@pytest.mark.row("A3")
@given(requests())
def test_chunks_and_ranks_together_are_the_whole_request(request_: Request) -> None:
    moved: Counter[tuple[int, int]] = Counter()
    for part in request_.ranges():
        for rank in range(request_.size):
            moved += bytes_of(request_.blocks(part, rank, request_.mode, request_.size))
    assert moved == whole(request_)


@pytest.mark.row("A3")
@given(requests())
def test_the_ranks_of_one_chunk_are_that_chunk(request_: Request) -> None:
    for part in request_.ranges():
        shares: Counter[tuple[int, int]] = Counter()
        for rank in range(request_.size):
            shares += bytes_of(request_.blocks(part, rank, request_.mode, request_.size))
        assert shares == bytes_of(request_.blocks(part, 0, "none", 1))


@pytest.mark.row("A3")
@given(requests())
def test_no_chunk_touches_another_chunks_destination_pages(request_: Request) -> None:
    owner: dict[int, int] = {}
    for nth, part in enumerate(request_.ranges()):
        for rank in range(request_.size):
            runs = request_.plan(part, rank, request_.mode, request_.size).runs
            for page in run_pages(runs.dst, runs.count):
                assert owner.setdefault(page, nth) == nth
    assert sorted(owner) == sorted(request_.offer.tolist())


@pytest.mark.row("E6")
@given(requests())
def test_no_plan_reads_a_page_of_the_stale_tail(request_: Request) -> None:
    mine = set(request_.row[: request_.pages])
    for part in request_.ranges():
        for rank in range(request_.size):
            runs = request_.plan(part, rank, request_.mode, request_.size).runs
            assert set(run_pages(runs.src, runs.count)) <= mine


@pytest.mark.row("N5")
@given(requests())
def test_what_the_ranks_report_is_exactly_what_the_decode_expects(request_: Request) -> None:
    count = request_.pages - request_.decode_prefix_pages
    expected = Expected({BUFFER: (ITEM_LEN, request_.decode_prefix_pages, count)})
    for rank in range(request_.size):
        ledger = Ledger()
        for part in request_.ranges():
            plan = request_.plan(part, rank, request_.mode, request_.size)
            ledger.landed([BUFFER], {BUFFER: ITEM_LEN}, plan.positions)
        expected.add(ledger.coverage())
    expected.check()
