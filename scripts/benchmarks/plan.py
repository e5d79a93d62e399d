"""Planning: owner filter, pairing and merge, to the arrays of a layer, for one of eight context-parallel ranks.

Pages are scattered on both sides, so nothing merges: the dearest case. The longest slice is the longest time that one
callback of the loop took while eight ranks sent such a request to one decode, in CPU time: what a machine that is busy
with something else does to a slice is not in it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator import ChunkSpec, Config
from orchestrator.pages.ownership import owned_pages
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.layout import pair_layouts
from protocols.planning import plan_chunk
from scripts.benchmarks.figures import Figure, bounded

RANKS = 8
RANK = 3
TOKENS = 100_000
GROWTH = (1_000, 10_000, 100_000, 1_000_000)
TARGET_MS = {64: 0.3, 1: 3.0}
SLICE_MS = 2.0


def run(quick: bool) -> list[Figure]:
    return measure(30, GROWTH, (TOKENS,)) if quick else measure(200, GROWTH, (TOKENS, GROWTH[-1]))


def measure(runs: int, growth: Sequence[int], slices: Sequence[int]) -> list[Figure]:
    """``growth`` and ``slices`` are tokens."""
    figures = [
        bounded(
            "plan",
            f"{TOKENS:,} tokens, page {size}, rank {RANK} of {RANKS}",
            "owner filter to arrays",
            "ms",
            _plan_ms(TOKENS, size, runs),
            at_most=target,
        )
        for size, target in TARGET_MS.items()
    ]
    figures += [
        bounded(
            "plan",
            f"{tokens:,} tokens, page 1, rank {RANK} of {RANKS}",
            "owner filter to arrays, a token",
            "ns",
            [ms * 1e6 / tokens for ms in _plan_ms(tokens, 1, max(5, runs // 10))],
        )
        for tokens in growth
    ]
    return figures + [longest_slice(tokens, 1) for tokens in slices]


def _plan_ms(tokens: int, page_size: int, runs: int) -> list[float]:
    rng = np.random.default_rng(1)
    count = -(-tokens // page_size)
    source, target = 2 * rng.permutation(count), 2 * rng.permutation(count)
    layout = _pool(2 * count, page_size).layout
    pairs = [pair for pair in pair_layouts(layout, layout) if pair.src.kind == "mla"]
    found = []
    for number in range(runs + 2):
        start = time.perf_counter()
        pages, positions = owned_pages(source, 0, "zigzag", RANK, RANKS)
        blocks = plan_chunk(pages, positions, 0, target).blocks(pairs, 1 << 20)
        spent = time.perf_counter() - start
        if len(blocks) != len(pages):
            raise RuntimeError("scattered pages were merged")
        if number >= 2:
            found.append(spent * 1e3)
    return found


def longest_slice(tokens: int, page_size: int) -> Figure:
    slices = Slices()
    with slices:
        loop = asyncio.SelectorEventLoop()  # its callbacks run through a method that can be timed, uvloop's do not
        try:
            loop.run_until_complete(_request(tokens, page_size, slices))
        finally:
            loop.close()
    return bounded(
        "plan",
        f"{tokens:,} tokens, page {page_size}, {RANKS} ranks to one decode",
        "longest slice of the loop",
        "ms",
        [slices.longest * 1e3],
        at_most=SLICE_MS,
    )


class Slices:
    """While entered, times every callback of asyncio's own loop that finds it on and leaves it on."""

    def __init__(self) -> None:
        self.all: list[tuple[float, str]] = []
        """CPU seconds of the longest ones so far, and what they ran."""
        self.longest = 0.0
        self.on = False
        self._run: Callable[[asyncio.Handle], Any] = asyncio.Handle._run

    def __enter__(self) -> None:
        slices, run = self, self._run

        def timed(handle: asyncio.Handle) -> None:
            was_on, start = slices.on, time.thread_time()
            run(handle)
            spent = time.thread_time() - start
            if was_on and slices.on and spent > slices.longest:
                slices.longest = spent
                slices.all.append((spent, repr(handle)))

        setattr(asyncio.Handle, "_run", timed)  # noqa: B010 - mypy's types have no place for it

    def __exit__(self, *_: object) -> None:
        setattr(asyncio.Handle, "_run", self._run)  # noqa: B010


async def _request(tokens: int, page_size: int, slices: Slices) -> None:
    """One request, scattered on both sides, from all ranks. The embedder's own calls are no slices of the loop."""
    count = -(-tokens // page_size)
    rng = np.random.default_rng(2)
    source, target = rng.permutation(count), rng.permutation(count)
    prefills = [_pool(count, page_size, rank=rank, seed=rank + 1) for rank in range(RANKS)]
    decode = _pool(count, page_size)
    async with Cluster(prefills=prefills, decodes=[decode], config=Config(), digest=False) as cluster:
        handle = cluster.decode().expect(1, 1, cluster.addresses, target, total_tokens=tokens)
        slices.on = True
        await asyncio.sleep(0.1)
        slices.on = False
        shares = [owned_pages(source, 0, "zigzag", rank, RANKS) for rank in range(RANKS)]
        for rank, (pages, positions) in enumerate(shares):
            spec = ChunkSpec(room=1, gen=1, pages=pages, positions=positions, end_token=tokens, last=True)
            cluster.forward([spec], prefill=rank)
            slices.on = True
            await asyncio.sleep(0)
            slices.on = False
        slices.on = True
        result = await handle
        slices.on = False
        if not result.ok:
            raise RuntimeError(f"the request failed: {result.error}")
        for prefill, (pages, positions) in zip(prefills, shares, strict=True):
            if prefill.differences(decode, pages, target[positions]):
                raise RuntimeError("the decode holds other bytes than the prefill")


def _pool(pages: int, page_size: int, *, rank: int | None = None, seed: int | None = None) -> Pool:
    """One MLA layer; ``rank`` makes it a context-parallel prefill's."""
    place: dict[str, Any] = {} if rank is None else {"cp_rank": rank, "cp_size": RANKS, "cp_mode": "zigzag"}
    return Pool(
        pages=pages,
        layers=1,
        drafts=0,
        page_size=page_size,
        item_len=64,
        kind="mla",
        aux_slots=0,
        seed=seed,
        **place,
    )
