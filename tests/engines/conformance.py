"""What any engine must do, whatever moves its bytes. Subclass :class:`EngineConformance` and provide two fixtures.

``pair`` yields a connected :class:`Pair`, perhaps shared by several tests, which leave it as they found it;
``fresh_pair`` yields one that the test may close. Nothing here assumes when bytes land, only what is true once a batch
says so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pytest

from orchestrator.engines.base import Batch, Engine, Probe
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, ClosedError, ConfigError
from protocols.ids import Session

PATIENCE = 20.0
"""Seconds until a test gives up on a completion; real engines take one second to reopen a lane."""

NBYTES = 4 << 20
NOBODY = Session("127.0.0.1:1")


async def until(condition: Callable[[], bool], *engines: Engine, timeout: float = PATIENCE) -> None:
    """Poll ``engines`` until ``condition`` holds; fails after ``timeout`` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():
            for engine in engines:
                engine.poll()
            if not condition():
                await asyncio.sleep(0.001)


@dataclass
class Pair:
    """A writer and a reader with registered memory on both sides. Byte 0 of each is scratch for the probe."""

    writer: Engine
    reader: Engine
    src: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(NBYTES, np.uint8))
    dst: npt.NDArray[np.uint8] = field(default_factory=lambda: np.zeros(NBYTES, np.uint8))

    def __post_init__(self) -> None:
        self.writer.register(self.src.ctypes.data, self.src.nbytes)
        self.reader.register(self.dst.ctypes.data, self.dst.nbytes)

    @property
    def probe(self) -> Probe:
        return Probe(self.src.ctypes.data, self.dst.ctypes.data)

    async def prepare(self, seed: int = 0) -> None:
        """Connected, fresh random bytes in the source, none in the destination."""
        await self.writer.connect(self.reader.session, self.probe, PATIENCE)
        self.src[:] = np.random.default_rng(seed).integers(1, 256, NBYTES, np.uint8)
        self.dst[:] = 0

    async def close(self) -> None:
        await asyncio.gather(self.writer.close(0), self.reader.close(0))

    def blocks(self, *spans: tuple[int, int, int]) -> Blocks:
        """(source offset, destination offset, length) each."""
        src, dst, length = np.array(spans, np.int64).reshape(-1, 3).T
        return Blocks(self.src.ctypes.data + src, self.dst.ctypes.data + dst, length)

    def submit(self, *spans: tuple[int, int, int]) -> Batch:
        return self.writer.submit(self.reader.session, self.blocks(*spans))

    async def finish(self, *batches: Batch) -> None:
        await until(lambda: all(batch.done for batch in batches), self.writer)

    def expected(self, *spans: tuple[int, int, int]) -> npt.NDArray[np.uint8]:
        """The destination if exactly these spans landed."""
        image = np.zeros(NBYTES, np.uint8)
        for src, dst, length in spans:
            image[dst : dst + length] = self.src[src : src + length]
        return image


SPANS = ((100, 5000, 1), (8192, 70000, 4096), (20001, 90001, 777), (1 << 20, 2 << 20, 65536))
BAD = (0, 1 << 40, 64)
"""A destination that no peer has registered."""


class EngineConformance:
    """The suite."""

    async def test_names_itself(self, pair: Pair) -> None:
        assert pair.writer.session != pair.reader.session
        assert pair.writer.info.name
        assert pair.writer.info.completion_mode in ("one-block", "batch-status", "ticket")
        assert pair.writer.pending == 0

    async def test_writes_these_bytes_and_no_others(self, pair: Pair) -> None:
        batch = pair.submit(*SPANS)
        assert not batch.done
        await pair.finish(batch)
        assert batch.landed
        assert batch.quiet
        assert np.array_equal(pair.dst, pair.expected(*SPANS))

    async def test_counts_pending_batches_and_terminal_blocks(self, pair: Pair) -> None:
        batches = [pair.submit(*SPANS), pair.submit((0, 100, 50))]
        assert pair.writer.pending == 2
        terminal = 0
        async with asyncio.timeout(PATIENCE):
            while pair.writer.pending:
                terminal += pair.writer.poll()
                await asyncio.sleep(0)
        assert all(batch.landed for batch in batches)
        assert terminal == 5
        assert pair.writer.poll() == 0

    async def test_callbacks_run_once_and_late_ones_at_once(self, pair: Pair) -> None:
        calls: list[str] = []
        batch = pair.submit(*SPANS)
        batch.add_callbacks(lambda b: calls.append(f"done {b.done}"), lambda b: calls.append("failed"))
        assert calls == []
        await pair.finish(batch)
        pair.writer.poll()
        assert calls == ["done True"]
        batch.add_callbacks(lambda b: calls.append("late"))
        assert calls == ["done True", "late"]

    async def test_leaving_a_wait_leaves_the_batch(self, pair: Pair) -> None:
        batch = pair.submit(*SPANS)
        waiter = asyncio.create_task(batch.wait())
        await asyncio.sleep(0)
        waiter.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiter
        second = asyncio.create_task(batch.wait())
        await until(second.done, pair.writer)
        assert second.result() is batch
        assert np.array_equal(pair.dst, pair.expected(*SPANS))

    async def test_a_callback_may_submit(self, pair: Pair) -> None:
        chain: list[Batch] = []

        def go_on(_: Batch) -> None:
            if len(chain) < 5:
                at = len(chain) * 1000
                chain.append(pair.submit((at, at, 1000)))
                chain[-1].add_callbacks(go_on)

        go_on(pair.submit((4 << 10, 1 << 20, 10)))
        await until(lambda: len(chain) == 5 and pair.writer.pending == 0, pair.writer)
        assert np.array_equal(pair.dst, pair.expected((0, 0, 5000), (4 << 10, 1 << 20, 10)))

    async def test_a_callback_that_raises_loses_no_completion(self, pair: Pair) -> None:
        def fail(_: Batch) -> None:
            raise LookupError("from the callback")

        batches = [pair.submit((at, at, 100)) for at in (0, 1000, 2000)]
        batches[0].add_callbacks(fail)
        raised = 0
        async with asyncio.timeout(PATIENCE):
            while pair.writer.pending:
                try:
                    pair.writer.poll()
                except LookupError:
                    raised += 1
                await asyncio.sleep(0)
        assert raised == 1
        assert all(batch.landed for batch in batches)

    @pytest.mark.row("B4")
    async def test_a_failed_block_is_in_doubt_and_the_others_land(self, pair: Pair) -> None:
        calls: list[str] = []
        batch = pair.submit(SPANS[0], BAD, SPANS[1])
        batch.add_callbacks(lambda b: calls.append("done"), lambda b: calls.append(f"failed, done {b.done}"))
        await pair.finish(batch)
        assert batch.in_doubt == [1]
        assert batch.never_submitted == []
        assert batch.reason
        assert not batch.landed
        assert not batch.quiet
        assert [call.split(",")[0] for call in calls] == ["failed", "done"]
        assert np.array_equal(pair.dst, pair.expected(SPANS[0], SPANS[1]))
        batch.add_callbacks(lambda b: calls.append("done"), lambda b: calls.append("failed"))
        assert calls[2:] == ["failed", "done"]

    async def test_a_write_past_the_end_of_a_region_fails(self, pair: Pair) -> None:
        batch = pair.submit((0, NBYTES - 99, 100))
        await pair.finish(batch)
        assert batch.in_doubt == [0]
        assert not pair.dst.any()

    async def test_refuses_what_no_transport_should_see(self, pair: Pair) -> None:
        limits = pair.writer.limits
        outside = Blocks(*(np.array([number]) for number in (pair.src.ctypes.data + NBYTES - 1, 1, 2)))
        uneven = Blocks(np.array([1, 2]), np.array([1]), np.array([1, 1]))
        wrong = {
            "no block": Blocks.empty(),
            "too many": pair.blocks(*[(0, 0, 1)] * (limits.max_batch_blocks + 1)),
            "empty block": pair.blocks((0, 0, 4), (0, 0, 0)),
            "large block": pair.blocks((0, 0, limits.max_block_bytes + 1)),
            "foreign source": outside,
            "uneven": uneven,
            "negative": Blocks(np.array([pair.src.ctypes.data]), np.array([-1]), np.array([1])),
        }
        for name, blocks in wrong.items():
            with pytest.raises(ConfigError):
                pytest.fail(f"accepted: {name} {pair.writer.submit(pair.reader.session, blocks)}")
        assert pair.writer.pending == 0

    async def test_takes_batches_and_blocks_at_the_limit(self, pair: Pair) -> None:
        limits = pair.writer.limits
        count = limits.max_batch_blocks
        spans = [(at * 256, at * 256, 256) for at in range(count)]
        large = (0, 1 << 20, limits.max_block_bytes)
        batches = [pair.submit(*spans), pair.submit(large)]
        await pair.finish(*batches)
        assert all(batch.landed for batch in batches)
        assert np.array_equal(pair.dst, pair.expected(*spans, large))

    async def test_moves_many_blocks_through_a_window(self, pair: Pair) -> None:
        size, count = 512, NBYTES // 512
        order = np.random.default_rng(7).permutation(count).tolist()
        spans = [(src * size, dst * size, size) for src, dst in enumerate(order)]
        batch_blocks = pair.writer.limits.max_batch_blocks
        open_batches: list[Batch] = []
        for first in range(0, count, batch_blocks):
            open_batches.append(pair.submit(*spans[first : first + batch_blocks]))
            if len(open_batches) == 4:
                await pair.finish(open_batches.pop(0))
        await pair.finish(*open_batches)
        assert np.array_equal(pair.dst, pair.expected(*spans))

    async def test_submits_to_connected_peers_only(self, pair: Pair) -> None:
        with pytest.raises(BrokenPeerError):
            pair.writer.submit(NOBODY, pair.blocks((0, 0, 1)))
        assert pair.writer.pending == 0

    @pytest.mark.row("B5")
    async def test_first_contact_with_nobody_fails(self, pair: Pair) -> None:
        with pytest.raises(BrokenPeerError):
            await pair.writer.connect(NOBODY, None, 10.0)

    async def test_first_contact_again_does_nothing(self, pair: Pair) -> None:
        await pair.writer.connect(pair.reader.session, Probe(pair.src.ctypes.data, 1 << 40), PATIENCE)
        assert not pair.dst.any()

    async def test_memory_is_registered_once(self, pair: Pair) -> None:
        address = pair.src.ctypes.data
        for bad_address, nbytes in ((address, 1), (address + NBYTES - 1, 2), (address - 1, 2), (address + NBYTES, 0)):
            with pytest.raises(ConfigError):
                pair.writer.register(bad_address, nbytes)
        with pytest.raises(ConfigError):
            pair.writer.unregister(address + 1)

    async def test_unregistered_memory_takes_no_writes_until_it_is_back(self, pair: Pair) -> None:
        pair.reader.unregister(pair.dst.ctypes.data)
        refused = pair.submit(SPANS[0])
        await pair.finish(refused)
        pair.reader.register(pair.dst.ctypes.data, NBYTES)
        assert refused.in_doubt == [0]
        assert not pair.dst.any()
        batch = pair.submit(SPANS[1])
        await pair.finish(batch)
        assert np.array_equal(pair.dst, pair.expected(SPANS[1]))

    async def test_the_probe_is_one_byte(self, fresh_pair: Pair) -> None:
        pair = fresh_pair
        pair.src[:] = 9
        await pair.writer.connect(pair.reader.session, pair.probe, PATIENCE)
        assert pair.dst[0] == 9
        assert np.count_nonzero(pair.dst) == 1

    async def test_a_refused_probe_is_no_contact(self, fresh_pair: Pair) -> None:
        pair = fresh_pair
        with pytest.raises(ConfigError):
            await pair.writer.connect(pair.reader.session, Probe(1 << 40, pair.dst.ctypes.data), PATIENCE)
        with pytest.raises(BrokenPeerError):
            await pair.writer.connect(pair.reader.session, Probe(pair.src.ctypes.data, 1 << 40), PATIENCE)
        with pytest.raises(BrokenPeerError):
            pair.submit((0, 0, 1))
        await pair.writer.connect(pair.reader.session, pair.probe, PATIENCE)
        await pair.finish(pair.submit((0, 0, 1)))

    @pytest.mark.row("B4")
    async def test_a_closed_destination_is_a_fence(self, fresh_pair: Pair) -> None:
        pair = fresh_pair
        await pair.prepare()
        running = [pair.submit(*[(at * 4096, at * 4096, 4096) for at in range(64)]) for _ in range(4)]
        await pair.reader.close(0)
        frozen = pair.dst.copy()
        await pair.finish(*running)
        late = pair.submit((0, 3 << 20, 4096))
        await pair.finish(late)
        assert late.in_doubt == [0]
        assert not late.quiet
        assert np.array_equal(pair.dst, frozen)

    async def test_close_drains(self, fresh_pair: Pair) -> None:
        pair = fresh_pair
        await pair.prepare()
        batch = pair.submit(*SPANS)
        await pair.writer.close(PATIENCE)
        assert batch.landed
        assert np.array_equal(pair.dst, pair.expected(*SPANS))

    async def test_close_without_patience_leaves_nothing_open(self, fresh_pair: Pair) -> None:
        pair = fresh_pair
        await pair.prepare()
        calls: list[Batch] = []
        batches = [pair.submit(*[(at * 4096, at * 4096, 4096) for at in range(64)]) for _ in range(4)]
        for batch in batches:
            batch.add_callbacks(calls.append)
        await pair.writer.close(0)
        assert calls == batches
        assert pair.writer.pending == 0
        assert pair.writer.poll() == 0
        for batch in batches:
            landed = set(range(64)) - set(batch.in_doubt) - set(batch.never_submitted)
            for at in landed:
                assert np.array_equal(pair.dst[at * 4096 : (at + 1) * 4096], pair.src[at * 4096 : (at + 1) * 4096])
        await pair.writer.close(0)
        with pytest.raises(ClosedError):
            pair.submit((0, 0, 1))
        with pytest.raises(ClosedError):
            await pair.writer.connect(pair.reader.session, None, 1.0)
