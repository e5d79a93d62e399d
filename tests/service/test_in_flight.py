"""What is in flight: refusals, source pages in use, callbacks, rooms that are kept alive by nobody (B2, V2, V5, C5)."""

from __future__ import annotations

import gc
import weakref

import pytest

from orchestrator.destination import Destination
from orchestrator.engines.base import EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, nth
from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.errors import DeadlineError
from protocols.ids import RoomKey
from tests.service.scenes import (
    asked_again,
    both_modes,
    config,
    faulty,
    idle_turns,
    ints,
    live,
    outcomes,
    sender,
    spec,
    taken,
)
from tests.service.scripted import SOURCE, TARGET, RaiseOnce, differences, scene
from tests.support.waiting import until

# -- B2: refusals ------------------------------------------------------------------------------------------------------


@pytest.mark.row("B2")
@both_modes
async def test_empty_layers_are_skipped(layerwise: bool) -> None:
    """All pages of the chunk are in the decode's prefix: nothing is submitted for it, not even an empty batch."""
    async with scene(config=config(layerwise=layerwise)) as cluster:
        handle = cluster.decode().expect(1, 0, cluster.addresses, ints(20), prefix_tokens=8, total_tokens=12)
        cluster.forward([spec(1, ints(3, 4), last=False)])
        room = await live(cluster, 1)
        await until(lambda: room.concluded_chunks == 1, "the chunk concludes")
        assert faulty(cluster).attempts == 0
        assert room.spans == []
        cluster.forward([spec(1, ints(9), start_token=8)])
        prefill, decode = await outcomes(cluster, handle)
        assert prefill.bytes == decode.bytes == 10 * 64
        assert differences(cluster, ints(9), ints(20)) == []


@pytest.mark.row("B2", "B4")
@pytest.mark.parametrize("how", ["refused", "failed"])
@pytest.mark.parametrize("where", ["same hand-over", "other destination"])
async def test_after_a_refusal_what_was_sent_drains_and_nothing_follows(how: str, where: str) -> None:
    """One block a batch: the first is held in flight, the second is refused (or fails); three groups, the fallback and
    a second destination still have theirs to send, and must not."""
    limits = EngineLimits(max_batch_blocks=1, window_blocks=4)
    decodes = [Pool(), Pool()] if where == "other destination" else [Pool()]
    async with scene(config=config(layer_group=1), limits=limits, decodes=decodes) as cluster:
        engine = faulty(cluster)
        hold = engine.add(Fault(nth(0), hold=True))
        engine.add(Fault(nth(1), refuse=how == "refused", fail=EVERY if how == "failed" else ()))
        handles = [
            decode.expect(1, 0, cluster.addresses, ints(7), total_tokens=4, destinations=len(decodes))
            for decode in cluster.decodes
        ]
        room = await live(cluster, 1)
        await until(lambda: len(room.destinations) == len(decodes))
        forward = cluster.prefill().begin_forward([spec(1, ints(3))])
        forward.layer_end(0)
        await until(lambda: cluster.prefill().poll(1).ended, "the room fails at once")
        attempts = engine.attempts
        for layer in range(1, 4):
            forward.layer_end(layer)
        forward.end()
        await idle_turns()
        assert engine.attempts == attempts
        assert engine.pending == 1
        assert not cluster.prefill().source_free(1), "what was sent before still drains"
        hold.release()
        prefill, _ = await outcomes(cluster, handles[0])
        assert "by the script" in str(prefill.error)
        assert engine.attempts == attempts
        if how == "refused":
            assert attempts == 2, "nothing is submitted after it, not to the other destination either"


@pytest.mark.row("C3", "A9", "B2")
@pytest.mark.parametrize("how", ["abort", "refusal"])
async def test_a_room_that_only_queues_tells_its_peer_why_it_ends(how: str) -> None:
    """Stopping finishes its last hand-over at once: the peer must hear the reason all the same, and hear it first."""
    limits = EngineLimits(max_batch_blocks=1, window_blocks=1)
    async with scene(limits=limits) as cluster:
        engine = faulty(cluster)
        hold = engine.add(Fault(nth(0), hold=True))
        engine.add(Fault(nth(1), refuse=True))
        first = cluster.decode().expect(1, 0, cluster.addresses, ints(7), total_tokens=4)
        cluster.forward([spec(1, ints(3))])
        await until(lambda: engine.attempts)
        second = cluster.decode().expect(2, 0, cluster.addresses, ints(8), total_tokens=4)
        cluster.forward([spec(2, ints(4), last=False)])
        room = await live(cluster, 2)
        await until(lambda: room.outstanding, "it queues behind the first")
        if how == "abort":
            cluster.prefill().abort(2, reason="a word of the prefill")
        else:
            cluster.prefill().abort(1)
            hold.release()
        prefill, decode = await outcomes(cluster, second)
        cause = "a word of the prefill" if how == "abort" else "refused by the script"
        assert cause in str(prefill.error)
        assert cause in str(decode.error)
        await until(second.units_free)
        hold.release()
        await outcomes(cluster, first)


# -- V2, V5, C5: what is in flight -------------------------------------------------------------------------------------


@pytest.mark.row("C5", "C2", "B4")
@both_modes
@pytest.mark.parametrize("end", ["abort", "decode abort", "deadline", "failed write", "shutdown"])
async def test_source_pages_are_not_free_while_a_batch_may_read_them(layerwise: bool, end: str) -> None:
    """However the room ends: FAILED at once, and free only when the held batch is terminal."""
    settings = config(layerwise=layerwise, layer_group=1, room_timeout_s=0.1 if end == "deadline" else 10)
    limits = EngineLimits(max_batch_blocks=1, window_blocks=4)
    async with scene(config=settings, limits=limits) as cluster:
        engine, freed = faulty(cluster), list[bool]()
        engine.add(Fault(nth(0), hold=True))
        engine.add(Fault(nth(1), fail=EVERY, hold=end != "failed write"))
        handle = cluster.decode().expect(1, 0, cluster.addresses, ints(7), total_tokens=4)
        cluster.forward([spec(1, ints(3))])
        await until(lambda: engine.attempts >= 2)
        room = await live(cluster, 1)
        lane = next(iter(room.destinations.values())).lane
        assert lane is not None
        cluster.prefill().on_source_free(1, 0, lambda: freed.append(engine.pending == 0))
        match end:
            case "abort":
                assert cluster.prefill().abort(1)
                assert cluster.prefill().poll(1) is RoomStatus.FAILED
            case "decode abort":
                handle.abort()
            case "shutdown":
                for room in sender(cluster).rooms:
                    room.fail(DeadlineError("as a shutdown does"))
        await until(lambda: cluster.prefill().poll(1) is RoomStatus.FAILED)
        in_flight = lane.statistics().window.blocks
        assert in_flight >= 1
        await until(lambda: handle.poll().ended)
        await asked_again(cluster, 20)
        assert (cluster.prefill().source_free(1), freed) == (False, [])
        assert not handle.units_free()
        assert lane.statistics().window.blocks == engine.pending >= 1, "permits come back by completion"
        assert taken(cluster) == 1
        for fault in engine.faults:
            fault.release()
        await until(lambda: freed == [True], "free with the completion")
        assert cluster.prefill().source_free(1)
        assert lane.idle
        cluster.prefill().on_source_free(1, 0, lambda: freed.append(True))
        assert freed == [True, True], "at once when it is free already"


@pytest.mark.row("C5")
async def test_a_callback_that_raises_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Neither the other callbacks of its room, nor the room that waits for the permits of the same lane."""
    limits = EngineLimits(max_batch_blocks=1, window_blocks=1)
    async with scene(limits=limits) as cluster:
        engine, freed = faulty(cluster), list[int]()
        hold = engine.add(Fault(nth(0), hold=True))
        first = cluster.decode().expect(1, 0, cluster.addresses, ints(7), total_tokens=4)
        second = cluster.decode().expect(2, 0, cluster.addresses, ints(8), total_tokens=4)
        cluster.forward([spec(1, ints(3))])
        await until(lambda: engine.attempts)
        cluster.forward([spec(2, ints(4))])
        await idle_turns()

        def broken() -> None:
            raise RuntimeError("the embedder's bug")

        cluster.prefill().on_source_free(1, 0, broken)
        cluster.prefill().on_source_free(1, 0, lambda: freed.append(1))
        first.on_units_free(broken)
        cluster.prefill().abort(1)
        await idle_turns()
        hold.release()
        await outcomes(cluster, second)
        await outcomes(cluster, first)
        assert second.result().ok
        assert freed == [1]
        assert "the embedder's bug" in caplog.text
        await until(lambda: cluster.balanced() == [], "nothing is left")
        caplog.clear()


@pytest.mark.row("C5", "C6")
async def test_a_stale_generation_fails_and_holds_nothing() -> None:
    """A chunk of an older generation than the live one, a late abort of one: ended at once, and its pages are free."""
    async with scene() as cluster:
        cluster.forward([spec(1, ints(3), gen=5)])
        await live(cluster, 1, 5)
        cluster.forward([spec(1, ints(4), gen=4)])
        await until(lambda: cluster.prefill().poll(1, 4).ended, "the stale one fails")
        await until(lambda: cluster.prefill().source_free(1, 4), "and holds no page")
        cluster.prefill().abort(1, 3)
        await until(lambda: cluster.prefill().source_free(1, 3), "an abort of a stale one as well")
        assert not cluster.prefill().poll(1, 5).ended
        cluster.forward([spec(1, ints(4), gen=6)])
        await until(lambda: cluster.prefill().poll(1, 5).ended, "a newer one ends it")
        assert cluster.prefill().source_free(1, 5)
        assert "newer" in str(cluster.prefill().result(1, 5).error)
        rooms = sender(cluster).rooms
        assert rooms.remembered == 3, "each ended one is remembered, and forgotten in its time"
        assert rooms.verdict(RoomKey(1, 4)) is not None


@pytest.mark.row("A8", "C5")
@pytest.mark.parametrize("how", ["refused", "failed", "mismatch", "abort", "set-up", "success"])
async def test_an_ended_room_is_not_kept_alive_by_its_error(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """V8: the verdict is remembered for ten minutes, one in doubt for longer; the room, its plans and its page lists
    are not. An exception keeps the frames it was raised through, and they keep everything."""
    if how == "set-up":
        monkeypatch.setattr(Destination, "plan", RaiseOnce(Destination.plan, *range(9)))
    async with scene() as cluster:
        faulty(cluster).add(Fault(refuse=how == "refused", fail=EVERY if how == "failed" else ()))
        tokens = 16 if how == "mismatch" else 12
        target = ints(20, 7, 8, 9) if how == "mismatch" else TARGET
        handle = cluster.decode().expect(1, 0, cluster.addresses, target, total_tokens=tokens)
        room = weakref.ref(await live(cluster, 1))
        if how == "abort":
            cluster.prefill().begin_forward([spec(1, SOURCE)])
            await idle_turns()
            cluster.prefill().abort(1)
        else:
            cluster.forward([spec(1, SOURCE)])
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok == (how == "success")
        cause: BaseException | None = prefill.error
        while cause is not None:
            assert cause.__traceback__ is None
            cause = cause.__cause__ or cause.__context__
        await idle_turns()
        gc.collect()
        assert room() is None
