"""The lane of one session: a window that is never exceeded, permits that come back by completion, rooms in turn."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from orchestrator.clock import Clock, LoopClock
from orchestrator.engines.base import Batch, Engine, EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, FaultyEngine, nth
from orchestrator.engines.loopback import LoopbackEngine, LoopbackFabric
from orchestrator.engines.paced import PacedEngine
from orchestrator.flow import LATE_S, Lane
from orchestrator.handover import Handover
from orchestrator.outcome import Outcome
from orchestrator.progress import Pacer
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from orchestrator.trace import Span
from protocols.blocks import Blocks
from protocols.errors import BrokenPeerError, KvferryError, TransferError
from protocols.ids import RoomKey, Session
from tests.service.scenes import config, outcomes, sender, spec
from tests.support.waiting import within

MEMORY = 1 << 20
STRICT = EngineLimits(max_batch_blocks=16, window_blocks=64, max_window_blocks=64, window_bytes=8192)


class Meter(FaultyEngine):
    """Records what is in flight to a session at every submission, and who submitted what."""

    def __init__(self, inner: Engine, *faults: Fault) -> None:
        super().__init__(inner, *faults)
        self.blocks: Counter[Session] = Counter()
        self.bytes: Counter[Session] = Counter()
        self.peak_blocks = 0
        self.sent: list[tuple[int, int]] = []
        """(source address, length) of every block, in the order of submission."""
        self.check: Callable[[Session, Blocks], None] = lambda session, blocks: None

    def submit(self, session: Session, blocks: Blocks) -> Batch:
        self.check(session, blocks)
        batch = super().submit(session, blocks)
        count, nbytes = len(blocks), blocks.nbytes
        self.blocks[session] += count
        self.bytes[session] += nbytes
        self.peak_blocks = max(self.peak_blocks, self.blocks[session])
        self.sent += zip(blocks.src.tolist(), blocks.length.tolist(), strict=True)

        def give_back(_: Batch) -> None:
            self.blocks[session] -= count
            self.bytes[session] -= nbytes

        batch.add_callbacks(give_back)
        return batch


class Standing(LoopClock):
    """Its loop is never late."""

    def now(self) -> float:
        return 1.0


class Bench:
    """One lane over loopback; a test polls by hand. Rooms are numbers."""

    def __init__(
        self, limits: EngineLimits = STRICT, *faults: Fault, quantum: int = 1 << 18, clock: Clock | None = None
    ) -> None:
        fabric = LoopbackFabric()
        self.inner: LoopbackEngine = fabric.engine(limits)
        self.engine = Meter(self.inner, *faults)
        self.peer = fabric.engine(limits)
        self.src = np.arange(MEMORY, dtype=np.uint8)
        self.dst = np.zeros(MEMORY, np.uint8)
        self.engine.register(self.src.ctypes.data, MEMORY)
        self.peer.register(self.dst.ctypes.data, MEMORY)
        self.outcomes: dict[int, Outcome] = {}
        self.done: list[Handover] = []
        self.failed: list[tuple[Handover, KvferryError]] = []
        self.due: list[float | None] = []
        self.after: dict[Callable[[], object], None] = {}
        self.lane = Lane(self.peer.session, self.engine, clock or LoopClock(), self, quantum)
        self._at = 0

    async def connect(self) -> Bench:
        await self.engine.connect(self.peer.session, None, 1.0)
        return self

    def expect(self, _: object, due: float | None) -> None:
        self.due.append(due)

    def after_pass(self, callback: Callable[[], object]) -> None:
        self.after[callback] = None

    def poll(self) -> None:
        """A pass of the pacer."""
        self.engine.poll()
        while self.after:
            callback = next(iter(self.after))
            del self.after[callback]
            callback()

    def handover(self, room: int, *lengths: int) -> Handover:
        """Blocks of these lengths, each somewhere of its own; not yet posted."""
        sizes = np.array(lengths, np.int64)
        offsets = self._at + np.cumsum(sizes) - sizes
        self._at += int(sizes.sum())
        assert self._at <= MEMORY
        blocks = Blocks(self.src.ctypes.data + offsets, self.dst.ctypes.data + offsets, sizes)
        span = Span(0, (), "group", blocks.nbytes, len(blocks))
        outcome = self.outcomes.setdefault(room, Outcome(RoomKey(room, 0)))
        return Handover(outcome, blocks, span, self.done.append, self._on_failed)

    def _on_failed(self, handover: Handover, error: KvferryError) -> None:
        """What the room does: it fails, and is stopped."""
        self.failed.append((handover, error))
        handover.outcome.fail(TransferError(error.what))
        self.lane.stop(handover.outcome.key)

    def post(self, room: int, *lengths: int) -> Handover:
        handover = self.handover(room, *lengths)
        self.lane.post(handover)
        return handover

    def finish(self) -> None:
        for _ in range(100_000):
            if not self.engine.pending:
                return
            self.poll()
        raise AssertionError("the engine never comes to rest")


# -- the window ---------------------------------------------------------------------------------------------------


@pytest.mark.row("B3")
@pytest.mark.parametrize("seed", range(12))
async def test_the_window_is_never_exceeded(seed: int) -> None:
    """Random rooms, lengths and polls: no batch, no sum of batches, neither in blocks nor in bytes. One block that is
    larger than the window goes alone."""
    rng = random.Random(seed)
    limits = EngineLimits(
        max_batch_blocks=rng.choice([1, 3, 16]),
        window_blocks=rng.choice([1, 5, 64]),
        max_window_blocks=64,
        window_bytes=rng.choice([100, 1000, 8192]),
        max_block_bytes=4096,
    )
    bench = await Bench(limits).connect()
    bench.inner.copies_per_poll = rng.choice([1, 7, None])
    widest = limits.window_blocks  # until it may have run dry, and widened

    def check(session: Session, blocks: Blocks) -> None:
        in_flight, nbytes = bench.engine.blocks[session], bench.engine.bytes[session]
        assert len(blocks) <= limits.max_batch_blocks
        assert in_flight + len(blocks) <= widest
        assert nbytes + blocks.nbytes <= limits.window_bytes or (in_flight, len(blocks)) == (0, 1)

    bench.engine.check = check
    handovers = []
    for _ in range(60):
        lengths = [rng.choice([1, 10, 64, 200, 3000]) for _ in range(rng.choice([1, 2, 9, 40]))]
        if bench._at + sum(lengths) > MEMORY:
            break
        handovers.append(bench.post(rng.randrange(5), *lengths))
        if rng.random() < 0.5:
            widest = limits.max_window_blocks
            bench.poll()
    widest = limits.max_window_blocks
    bench.finish()
    assert all(handover.landed for handover in handovers)
    assert len(bench.done) == len(handovers)
    assert bench.lane.idle
    assert np.array_equal(bench.dst[: bench._at], bench.src[: bench._at])
    statistics = bench.lane.statistics()
    assert (statistics.window.blocks, statistics.window.bytes, statistics.queued_blocks) == (0, 0, 0)
    assert statistics.window.peak_blocks == bench.engine.peak_blocks
    assert len(bench.engine.sent) == len(set(bench.engine.sent)), "every block is submitted once"


@pytest.mark.row("B3")
async def test_a_strict_window_stays_what_it_is() -> None:
    bench = await Bench().connect()
    for _ in range(4):
        bench.post(1, *[8] * 300)
    bench.finish()
    assert bench.engine.peak_blocks == 64


@pytest.mark.row("B3", "B4")
async def test_permits_come_back_by_completion_and_nothing_else() -> None:
    """The room fails, is stopped, is forgotten: as long as its blocks are in flight, nobody else gets their permits."""
    hold = Fault(nth(0, 1, 2, 3), hold=True)
    bench = await Bench(STRICT, hold).connect()
    gone = bench.post(1, *[8] * 100)
    assert bench.engine.blocks[bench.peer.session] == 64
    other = bench.post(2, 8)
    gone.outcome.fail(TransferError("aborted"))
    bench.lane.stop(gone.outcome.key)
    for _ in range(3):
        bench.poll()
    assert bench.engine.attempts == 4
    assert bench.lane.statistics().window.blocks == 64
    assert (gone.done, other.done) == (False, False)
    assert gone.unfinished() == list(range(64))
    hold.release()
    bench.finish()
    assert (gone.done, gone.landed, gone.in_doubt) == (True, False, [])
    assert other.landed
    assert bench.lane.idle


@pytest.mark.row("B3")
async def test_two_hundred_thousand_blocks_to_one_peer() -> None:
    """No two pages are neighbours on both sides: one block a page and buffer."""
    pages = 100_000
    src, dst = (Pool(pages=pages, layers=1, drafts=0, page_size=4, item_len=4, seed=seed) for seed in (1, None))
    meters: list[Meter] = []

    def wrap(inner: Engine) -> Engine:
        meters.append(Meter(inner))
        return meters[-1]

    source = np.arange(pages, dtype=np.int64)
    async with Cluster(prefills=[src], decodes=[dst], config=config(), wrap=wrap, digest=False) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, source[::-1].copy(), total_tokens=4 * pages)
        cluster.forward([spec(1, source)])
        prefill, decode = await outcomes(cluster, handle)
        assert prefill.ok
        assert prefill.blocks == decode.blocks == meters[0].submitted_blocks == 200_000
        limits = meters[0].limits
        assert max(len(entry.blocks) for entry in meters[0].log) <= limits.max_batch_blocks
        assert meters[0].peak_blocks <= limits.max_window_blocks
        for name in (("k", 0), ("v", 0)):
            assert np.array_equal(src.arrays[name], dst.arrays[name][::-1])
        assert cluster.balanced() == []


# -- fairness -----------------------------------------------------------------------------------------------------


@pytest.mark.row("B3")
@pytest.mark.parametrize("size", [1, 64, 128])
async def test_a_small_room_waits_for_less_than_a_window_of_a_huge_one(size: int) -> None:
    """However small the blocks: the huge room's turn ends after a part of the window, not after its bytes."""
    bench = await Bench().connect()
    bench.inner.copies_per_poll = 4
    huge = bench.post(1, *[size] * 4000)
    bench.poll()
    before = huge.posted
    small = bench.post(2, size)
    polls = 0
    while not small.posted:
        bench.poll()
        polls += 1
    assert huge.posted - before < STRICT.window_blocks
    assert polls * 4 <= STRICT.window_blocks, "not more than a window lands before it"
    bench.inner.copies_per_poll = None
    bench.finish()
    assert small.landed
    assert huge.landed
    assert bench.done == [small, huge]


@pytest.mark.row("B3")
async def test_rooms_share_a_link_by_bytes() -> None:
    """Three rooms with blocks of very different size: while all of them queue, none gets more than its share."""
    limits = EngineLimits(max_batch_blocks=16, window_blocks=64, max_window_blocks=64, window_bytes=4096)
    bench = await Bench(limits, quantum=1024, clock=Standing()).connect()
    handovers = [bench.post(room, *[size] * (240_000 // size)) for room, size in enumerate((64, 512, 1024))]
    for _ in range(150):
        bench.poll()
    shares = [h.blocks.length[: h.posted].sum() for h in handovers]
    assert min(shares) > 30_000
    assert max(shares) - min(shares) <= 4096 + 2 * 1024, "the first filled a window alone, then they took turns"
    for handover in handovers:
        handover.outcome.fail(TransferError("enough"))
    bench.finish()
    assert bench.lane.idle


@pytest.mark.row("B3")
async def test_ten_small_rooms_take_turns_with_a_huge_one() -> None:
    bench = await Bench().connect()
    bench.inner.copies_per_poll = 8
    huge = bench.post(0, *[64] * 3000)
    small = [bench.post(room, *[64] * 20) for room in range(1, 11)]
    for _ in range(200):
        bench.poll()
        if all(handover.done for handover in small):
            break
    assert all(handover.landed for handover in small)
    assert not huge.done
    assert huge.posted < 500, "it got its turns, not all of them"
    huge.outcome.fail(TransferError("enough"))
    bench.finish()


@pytest.mark.row("B3")
async def test_a_small_room_finds_a_place_behind_ten_huge_ones() -> None:
    """They hold half of the window between them: nothing of theirs has to land first."""
    bench = await Bench(clock=Standing()).connect()
    huge = [bench.post(room, *[1] * 400) for room in range(10)]
    bench.poll()
    assert bench.lane.statistics().window.blocks <= 32
    small = bench.post(99, 8)
    assert small.posted == 1
    bench.finish()
    assert all(handover.landed for handover in (*huge, small))


@pytest.mark.row("B3")
async def test_however_many_small_rooms_come_the_huge_ones_go_on() -> None:
    bench = await Bench().connect()
    bench.inner.copies_per_poll = 16
    huge = [bench.post(room, *[1] * 5000) for room in range(2)]
    number = 100
    for _ in range(50):
        while bench.lane.statistics().rooms < 40:
            number += 1
            bench.post(number, *[1] * 16)
        bench.poll()
    assert all(handover.posted > 100 for handover in huge)
    for handover in huge:
        handover.outcome.fail(TransferError("enough"))
    bench.finish()


def be_late() -> None:
    """As after a wait for the GIL."""
    time.sleep(2 * LATE_S)


# -- refilling ----------------------------------------------------------------------------------------------------


async def test_what_one_pass_freed_is_filled_at_once_and_a_dry_window_shows() -> None:
    """All four batches had landed before the loop came round, late: then wider, and in fewer batches."""
    limits = EngineLimits(max_batch_blocks=256, window_blocks=64, max_window_blocks=256)
    bench = await Bench(limits).connect()
    bench.post(1, *[1] * 4000)
    assert bench.lane.batches == 4
    be_late()
    bench.poll()
    assert (bench.engine.attempts, bench.engine.blocks[bench.peer.session]) == (4 + 2, 128)
    be_late()
    bench.poll()
    assert (bench.engine.attempts, bench.engine.blocks[bench.peer.session]) == (4 + 2 + 1, 256)
    bench.finish()


async def test_a_late_loop_submits_whole_windows_also_for_many_rooms() -> None:
    """Beside a forward in Python each submission costs a switch interval: turns of 16 blocks moved 3 a millisecond, and
    the rooms that came meanwhile made it no better."""
    limits = EngineLimits(max_batch_blocks=256, window_blocks=64, max_window_blocks=256)
    bench = await Bench(limits, quantum=16).connect()
    handovers = [bench.post(room, *[1] * 2000) for room in range(5)]
    for _ in range(2):
        be_late()
        bench.poll()
    attempts, posted = bench.engine.attempts, sum(handover.posted for handover in handovers)
    for _ in range(10):
        bench.poll()
    assert bench.engine.attempts - attempts <= 20
    assert sum(handover.posted for handover in handovers) - posted == 10 * 256
    assert [handover.posted > 256 for handover in handovers] == [True] * 5, "in turn all the same"
    bench.finish()


async def test_a_window_that_is_never_dry_stays_as_it_is() -> None:
    limits = EngineLimits(max_batch_blocks=256, window_blocks=64, max_window_blocks=256)
    bench = await Bench(limits).connect()
    bench.inner.copies_per_poll = 16
    handover = bench.post(1, *[1] * 4000)
    bench.finish()
    assert handover.landed
    assert bench.engine.peak_blocks == 64
    assert bench.lane.batches == 4000 / 16


async def test_large_blocks_go_in_several_batches_too() -> None:
    """Eight of them fill the window: as one batch the link would stand still whenever it lands."""
    bench = await Bench(EngineLimits(window_bytes=8192)).connect()
    bench.post(1, *[1024] * 32)
    assert bench.lane.batches == 4
    bench.finish()


async def test_it_says_when_the_engine_is_worth_asking() -> None:
    bench = await Bench().connect()
    for _ in range(10):
        bench.post(1, *[8] * 10)
        bench.finish()
    assert bench.due[-1] is None, "nothing is in flight"
    bench.post(1, *[8] * 200)
    due = bench.due[-1]
    assert due is not None
    bench.poll()
    assert bench.due[-1] is not None
    assert bench.due[-1] > due
    bench.finish()


@pytest.mark.row("A5")
async def test_hand_overs_of_one_room_go_in_order() -> None:
    bench = await Bench().connect()
    handovers = [bench.post(1, *[8] * n) for n in (3, 40, 1, 100)]
    bench.finish()
    addresses = [address for address, _ in bench.engine.sent]
    assert addresses == [a for h in handovers for a in h.blocks.src.tolist()]
    assert bench.done == handovers
    assert bench.engine.attempts == bench.lane.statistics().batches


# -- stop ---------------------------------------------------------------------------------------------------------


@pytest.mark.row("B2", "C2")
async def test_stop_drops_what_is_queued_and_leaves_what_runs() -> None:
    hold = Fault(nth(0, 1, 2, 3), hold=True)
    bench = await Bench(STRICT, hold).connect()
    half, queued = bench.post(1, *[8] * 100), bench.post(1, *[8] * 5)
    other = bench.post(2, *[8] * 5)
    bench.lane.stop(half.outcome.key)
    assert bench.done == [queued], "nothing of it runs: it is done at once"
    assert (queued.landed, queued.posted) == (False, 0)
    assert half.posted == 64
    bench.lane.stop(half.outcome.key)
    bench.lane.stop(RoomKey(77, 0))
    hold.release()
    bench.finish()
    assert bench.done[1:] in ([half, other], [other, half])
    assert not half.landed
    assert half.span.landed is None
    assert other.landed
    assert bench.engine.submitted_blocks == 64 + 5
    assert bench.lane.idle
    again = bench.post(1, 8)
    bench.finish()
    assert again.landed, "stopping is not for ever"


@pytest.mark.row("C2")
async def test_of_a_failed_room_nothing_more_is_submitted() -> None:
    """The outcome is decided in another thread: the next turn sees it without having been told."""
    bench = await Bench().connect()
    bench.inner.copies_per_poll = 1
    handover = bench.post(1, *[8] * 200)
    other = bench.post(2, *[8] * 70)
    attempts = bench.engine.attempts
    handover.outcome.fail(TransferError("aborted"))
    late = bench.post(1, 8)
    assert late.done
    assert not late.landed
    bench.inner.copies_per_poll = None
    bench.finish()
    assert handover.done
    assert handover.posted == 16 * attempts
    assert other.landed


async def test_an_empty_hand_over_is_done_at_once() -> None:
    bench = await Bench().connect()
    handover = bench.post(1)
    assert handover.landed
    assert bench.lane.idle
    assert bench.engine.attempts == 0


async def test_idle_is_told_once_and_when_it_is_so() -> None:
    bench = await Bench().connect()
    told: list[str] = []
    bench.lane.when_idle(lambda: told.append("now"))
    bench.post(1, *[8] * 200)
    bench.lane.when_idle(lambda: told.append("later"))
    assert told == ["now"]
    bench.poll()
    assert told == ["now"]
    bench.finish()
    assert told == ["now", "later"]


# -- refusals and failures ----------------------------------------------------------------------------------------


@pytest.mark.row("B2")
@pytest.mark.parametrize("first", [0, 1, 3])
async def test_a_refusal_ends_the_room_and_drains_what_went_before(first: int) -> None:
    bench = await Bench(STRICT, Fault(nth(first), refuse=True)).connect()
    handover, behind = bench.handover(1, *[8] * 100), bench.handover(1, *[8] * 5)
    bench.lane.post(handover)
    assert [error for _, error in bench.failed] == [handover.error], "told at once, before anything drained"
    assert isinstance(handover.error, BrokenPeerError)
    bench.lane.post(behind)
    assert behind.done
    assert handover.done == (first == 0)
    other = bench.post(2, *[8] * 5)
    bench.finish()
    assert bench.engine.submitted_blocks == 16 * first + 5
    assert handover.done
    assert not handover.landed
    assert handover.in_doubt == []
    assert handover.span.failed
    assert handover.span.landed is None
    assert other.landed
    assert bench.lane.idle


@pytest.mark.row("B2", "B4", "A8")
async def test_a_failed_block_is_in_doubt_and_the_others_are_not() -> None:
    hold = Fault(nth(1), hold=True)
    bench = await Bench(STRICT, hold, Fault(nth(0), fail={3, 5})).connect()
    handover = bench.post(1, *[8] * 100)
    bench.poll()
    assert [error for _, error in bench.failed] == [handover.error]
    assert not handover.done, "its second batch is still in flight"
    hold.release()
    bench.finish()
    assert handover.in_doubt == [3, 5]
    assert bench.done == [handover]
    assert handover.posted == 64, "nothing was submitted after the failure"
    assert len(bench.failed) == 1


@pytest.mark.row("B2", "B4")
async def test_a_batch_that_the_engine_refuses_later_is_no_success() -> None:
    """Accepted by the link, refused behind it: nothing is in doubt, nothing has landed."""
    fabric = LoopbackFabric()
    inner = FaultyEngine(fabric.engine(), Fault(refuse=True))
    engine, peer = PacedEngine(inner, 1e6, lambda: 1.0), fabric.engine()
    src, dst = np.zeros(64, np.uint8), np.zeros(64, np.uint8)
    engine.register(src.ctypes.data, 64)
    peer.register(dst.ctypes.data, 64)
    await engine.connect(peer.session, None, 1.0)
    errors: list[KvferryError] = []
    done: list[Handover] = []
    lane = Lane(peer.session, engine, LoopClock(), Pacer(asyncio.get_running_loop(), LoopClock()), 1)
    one = np.array([8], np.int64)
    blocks = Blocks(one * 0 + src.ctypes.data, one * 0 + dst.ctypes.data, one)
    handover = Handover(
        Outcome(RoomKey(1, 0)), blocks, Span(0, (), "group", 8, 1), done.append, lambda _, error: errors.append(error)
    )
    lane.post(handover)
    engine._now = lambda: 2.0
    engine.poll()
    assert done == [handover]
    assert (handover.landed, handover.in_doubt, handover.missed) == (False, [], 1)
    assert len(errors) == 1
    assert lane.idle


@pytest.mark.row("B2")
@pytest.mark.parametrize("fail", [True, False])
async def test_every_other_room_goes_on(fail: bool) -> None:
    """Of twenty rooms every third fails; each of the others lands whole, and the books are empty in the end."""
    bad = Fault(lambda session, blocks, ordinal: bool(int(blocks.length[0]) == 7))
    bad.refuse, bad.fail = not fail, EVERY if fail else ()
    bench = await Bench(STRICT, bad).connect()
    handovers = [bench.post(room, *[7 if room % 3 == 0 else 8] * 50) for room in range(20)]
    bench.finish()
    assert [h.landed for h in handovers] == [room % 3 != 0 for room in range(20)]
    assert all(handover.done for handover in handovers)
    assert len(bench.failed) == 7
    assert bench.lane.idle


@pytest.mark.row("D2")
async def test_posted_is_stamped_before_the_engine_has_the_blocks() -> None:
    """And landed after it said so: what lies between is never shorter than the time on the link."""
    bench = await Bench().connect()
    entered: list[float] = []
    bench.engine.check = lambda session, blocks: entered.append(time.monotonic())
    handover = bench.post(1, *[8] * 100)
    bench.finish()
    done = time.monotonic()
    assert handover.span.posted is not None
    assert handover.span.landed is not None
    assert handover.span.posted <= entered[0] < handover.span.landed <= done


async def test_the_statistics_tell_what_queues() -> None:
    bench = await Bench().connect()
    bench.post(1, *[8] * 100)
    bench.post(2, *[8] * 10)
    statistics = bench.lane.statistics()
    assert (statistics.rooms, statistics.queued_blocks, statistics.window.blocks) == (2, 46, 64)
    bench.finish()
    assert bench.lane.statistics().rooms == 0


@pytest.mark.row("B3")
async def test_lanes_of_two_peers_do_not_wait_for_each_other() -> None:
    """One peer has stopped: its window is full for ever. The other's room lands."""
    held: list[Fault] = []

    def wrap(inner: Engine) -> Engine:
        engine = FaultyEngine(inner)
        held.append(engine.add(Fault(lambda session, blocks, _: session == stopped[0], hold=True)))
        return engine

    stopped: list[str] = [""]
    src, decodes = Pool(seed=1), [Pool(), Pool()]
    async with Cluster(prefills=[src], decodes=decodes, config=config(), wrap=wrap) as cluster:
        receiver = cluster.decode_nodes[0].receiver
        assert receiver is not None
        stopped[0] = receiver.session
        stuck = cluster.decode(0).expect(1, 0, cluster.addresses, [1, 2], total_tokens=8)
        free = cluster.decode(1).expect(2, 0, cluster.addresses, [1, 2], total_tokens=8)
        cluster.forward([spec(1, np.array([3, 4])), spec(2, np.array([5, 6]))])
        assert (await within(free)).ok
        assert not stuck.poll().ended
        assert sender(cluster).engine.pending > 0
        held[0].release()
        assert (await within(stuck)).ok
