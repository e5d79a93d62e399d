"""What went wrong elsewhere, in small, where no other test has that very scene. docs/incidents.md names them all."""

from __future__ import annotations

import random

import pytest

import protocols.breaker
from orchestrator.clock import LoopClock
from orchestrator.config import Config
from orchestrator.engines.base import EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, nth
from orchestrator.node import Node
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.blocks import Ints
from tests.peers.scenes import into
from tests.service.scenes import (
    config,
    faulty,
    idle_turns,
    ints,
    live,
    outcomes,
    quarantined,
    sender,
    spec,
    taken,
    wrapped,
)
from tests.support.waiting import until, within

SOURCE, TARGET = ints(3, 4, 9), ints(20, 7, 8)


def scene(**changes: object) -> Cluster:
    """One prefill whose engine follows a script, one decode."""
    fields: dict[str, object] = {"prefills": [Pool(seed=1)], "decodes": [Pool()], "config": config(), "wrap": wrapped()}
    return Cluster(**fields | changes)  # type: ignore[arg-type]


def equal(cluster: Cluster, source: Ints = SOURCE, target: Ints = TARGET, decode: int = 0) -> bool:
    return not cluster.prefill_pools[0].differences(cluster.decode_pools[decode], source, target)


async def is_served(cluster: Cluster, room: int = 99, gen: int = 0) -> None:
    """The next request arrives byte for byte."""
    source, target = ints(30, 31, 33), ints(40, 45, 41)
    handle = cluster.decode().expect(room, gen, cluster.addresses, target, total_tokens=12)
    cluster.forward([spec(room, source, gen=gen)])
    assert all(result.ok for result in await outcomes(cluster, handle))
    assert equal(cluster, source, target)


def extra_decode(cluster: Cluster, settings: Config, clock: LoopClock | None = None) -> Pool:
    """One more decode in the cluster."""
    pool = Pool()
    node = Node(clock=clock, network=cluster.network, rng=random.Random(len(cluster.nodes)))
    cluster.decodes.append(node.start_decode(cluster.fabric.engine(), pool.layout, config=settings))
    cluster.decode_pools.append(pool)
    cluster.nodes.append(node)
    cluster.decode_nodes.append(node)
    return pool


class Skewed(LoopClock):
    """A clock that is wrong by a constant."""

    def __init__(self, ahead: float) -> None:
        self.ahead = ahead

    def now(self) -> float:
        return super().now() + self.ahead


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
async def test_a_decode_whose_clock_is_an_hour_off_is_served_and_its_pages_are_kept(ahead: float) -> None:
    """vllm#47021: the clocks of two processes were compared, and pages were free while they were read."""
    async with scene(decodes=[]) as cluster:
        extra_decode(cluster, config(digest=True), Skewed(ahead))
        await is_served(cluster, 1)
        held = faulty(cluster).add(Fault(hold=True))
        handle = cluster.decode().expect(2, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(2, SOURCE)])
        await until(lambda: faulty(cluster).attempts > 1, "it is in flight")
        assert not handle.poll().ended
        assert not cluster.prefill().source_free(2)
        assert not handle.units_free()
        held.release()
        sender(cluster).pacer.kick()
        assert all(result.ok for result in await outcomes(cluster, handle))
        assert equal(cluster)


@pytest.mark.parametrize("who", ["decode", "prefill"])
async def test_add_and_abort_in_one_tick(who: str) -> None:
    """vllm#18485: aborted before it was scheduled. Nothing of the room exists yet on the other side."""
    async with scene() as cluster:
        if who == "decode":
            handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
            assert handle.abort("gone")
            assert "gone" in str((await within(handle)).error)
            await until(handle.units_free)
        else:
            forward = cluster.prefill().begin_forward([spec(1, SOURCE)])
            assert cluster.prefill().abort(1, reason="gone")
            forward.layer_end(0)
            forward.end()
            assert "gone" in str((await within(cluster.prefill().finished(1))).error)
            await until(lambda: cluster.prefill().source_free(1))
        assert faulty(cluster).attempts == 0
        await is_served(cluster)


async def test_cancelled_before_the_prefill_has_begun_the_request_is_made_again() -> None:
    """dynamo#4178: a cancel ahead of the prefill left something behind, and the next request hung."""
    async with scene() as cluster:
        for gen in range(3):
            handle = cluster.decode().expect(1, gen, cluster.addresses, TARGET, total_tokens=12)
            await until(lambda: len(sender(cluster).kept), "the offer is there before the prompt")
            handle.abort("the client is gone")
            await until(handle.units_free, "the cancel is acknowledged")
            assert "has ended" in cluster.forward([spec(1, SOURCE, gen=gen)]).refused[0]
        assert faulty(cluster).attempts == 0
        await is_served(cluster, 1, 3)


async def test_a_request_that_the_decode_never_admits_is_let_go_by_the_router() -> None:
    """vllm#41269: the decode answered 400 at its door, and the prefill kept the blocks for eight minutes."""
    async with scene() as cluster:
        cluster.forward([spec(1, SOURCE)])
        await live(cluster, 1)
        assert not cluster.prefill().source_free(1)
        assert cluster.prefill().abort(1, reason="refused at the decode's door")
        await until(lambda: cluster.prefill().source_free(1), "nobody else has to say anything")
        assert cluster.balanced() == []


async def test_two_ranks_with_one_configuration_are_two() -> None:
    """ray#65756: ranks with the same engine id and port base collided."""
    async with scene(decodes=[Pool(), Pool()]) as cluster:
        handles = [cluster.decode(n).expect(n, 0, cluster.addresses, TARGET, total_tokens=12) for n in range(2)]
        for room in range(2):
            cluster.forward([spec(room, SOURCE + room)])
        for number, handle in enumerate(handles):
            assert (await within(handle)).ok
            assert equal(cluster, SOURCE + number, TARGET, number)
        assert len({entry.session for entry in faulty(cluster).log}) == 2


async def test_one_completion_of_ten_is_lost() -> None:
    """nixl#1862: the count of completions stood still, and so did everything. Here one room fails, with the reason."""
    async with scene(config=config(layer_group=1, progress_timeout_s=0.1)) as cluster:
        faulty(cluster).add(Fault(nth(3), unfinished=True))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        cluster.forward([spec(1, SOURCE, aux_slot=5)])
        result = await within(handle)
        assert "waited to land" in str(result.error)
        await until(lambda: quarantined(cluster), "what was not heard of is not free")
        assert not cluster.prefill().source_free(1)
        await is_served(cluster)
        assert taken(cluster) == 3


async def test_a_peer_that_fails_and_heals_is_found_again_by_one_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """vllm-backport#33, sglang#25287: a fixed pair never healed; or one failure blacklisted the peer for good."""
    monkeypatch.setattr(protocols.breaker, "FIRST_PAUSE_S", 0.2)
    async with scene() as cluster:
        broken = faulty(cluster).add(Fault(refuse=True))

        async def room(number: int) -> str:
            handle = cluster.decode().expect(number, 0, cluster.addresses, TARGET, total_tokens=12)
            cluster.forward([spec(number, SOURCE)])
            result = await within(handle)
            await until(handle.units_free)
            return str(result.error) if result.error else ""

        assert "refused by the script" in await room(0)
        for number in range(1, 3):
            assert "refused by the script" in await room(number), "one failure blacklists nobody"
        attempts = faulty(cluster).attempts
        assert "left alone" in await room(3)
        assert faulty(cluster).attempts == attempts, "it fails at once, and nothing is tried"
        faulty(cluster).faults.remove(broken)
        number = 4
        while await room(number):
            number += 1
        assert equal(cluster)
        assert not await room(number + 1), "no request after the recovery fails"


async def test_a_queued_chunk_of_an_old_generation_never_runs_under_the_new_one() -> None:
    """An aborted, acknowledged room, of which a chunk was queued; its id is used again, for other pages."""
    limits = EngineLimits(window_blocks=1, max_window_blocks=1, max_batch_blocks=1)
    async with scene(limits=limits, config=config(drain_timeout_s=5.0)) as cluster:
        held = faulty(cluster).add(Fault(hold=True))
        target = cluster.decode_pools[0]
        old = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(1, SOURCE[:2], end_token=8, last=False)])
        cluster.forward([spec(1, SOURCE[2:], start_token=8, end_token=12)])
        await until(lambda: faulty(cluster).attempts == 1, "one block is in flight, the rest is queued")
        old.abort("gone")
        assert "gone" in str((await within(old)).error)
        pages = ints(50, 51, 52)
        new = cluster.decode().expect(1, 1, cluster.addresses, pages, total_tokens=12)
        held.release()
        sender(cluster).pacer.kick()
        await until(old.units_free, "the old room is quiet")
        await until(lambda: len(sender(cluster).kept), "the new offer is there")
        await idle_turns()
        assert faulty(cluster).attempts == 1, "what was queued never ran"
        assert not new.poll().ended, "nothing was sent for it"
        assert target.untouched(TARGET), "nor was anything written into its pages"
        cluster.forward([spec(1, ints(10, 11, 12), gen=1)])
        assert all(result.ok for result in await outcomes(cluster, new))
        assert equal(cluster, ints(10, 11, 12), pages)


async def test_state_that_fails_alone_fails_the_room() -> None:
    """sglang#30890: the rows of state failed, the aux data arrived, and the room was a success."""
    src, dst = Pool(seed=1, state_rows=4), Pool(state_rows=4)
    async with scene(prefills=[src], decodes=[dst]) as cluster:
        faulty(cluster).add(Fault(into(dst, "state"), fail=EVERY))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3, state_rows=[2])
        cluster.forward([spec(1, SOURCE, aux_slot=5, state_rows=[1])])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (False, False)
        assert "failed by the script" in str(prefill.error)


async def test_a_prefill_that_comes_back_elsewhere_is_dialled_there() -> None:
    """sglang#31306: after the restart of a prefill on another port its decodes kept the old one."""
    async with scene(prefills=[Pool(seed=1), Pool(seed=2)]) as cluster:
        await cluster.prefill_nodes[0].stop()
        gone = cluster.decode().expect(1, 0, cluster.addresses[:1], TARGET, total_tokens=12)
        later = cluster.decode().expect(2, 0, cluster.addresses[1:], ints(1, 2, 5), total_tokens=12)
        cluster.forward([spec(2, SOURCE)], prefill=1)
        assert (await within(later)).ok, "at once, though the first is still being tried"
        gone.abort("its prefill is elsewhere")
        assert not (await within(gone)).ok
        assert cluster.prefill_pools[1].differences(cluster.decode_pools[0], SOURCE, ints(1, 2, 5)) == []
