"""What goes wrong on the prefill side: the room fails with its first cause, or the chunk goes after its forward and
arrives all the same. The forward thread never sees an exception, and no page is free while a batch may read it."""

from __future__ import annotations

import logging
from functools import partial

import pytest

from orchestrator.chunk import ChunkSpec
from orchestrator.engines.base import EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, nth
from orchestrator.forward import ForwardPass
from orchestrator.outcome import RoomStatus
from orchestrator.testing.device import FakeDevice
from orchestrator.testing.pool import Pool
from protocols.errors import DeadlineError
from protocols.ids import RoomKey
from tests.service.scenes import (
    LateModel,
    config,
    faulty,
    ints,
    live,
    outcomes,
    quarantined,
    sender,
    spec,
    taken,
)
from tests.service.scripted import SOURCE, TARGET, scene
from tests.support.waiting import until, within

# -- A8: errors of the engine ------------------------------------------------------------------------------------------


@pytest.mark.row("A8", "B4")
@pytest.mark.parametrize("how", ["every block", "one block", "refused"])
@pytest.mark.parametrize("k", range(6))
async def test_an_engine_error_in_any_layer_fails_the_room_with_the_first_cause(k: int, how: str) -> None:
    """Four layers one by one, the draft layer, aux: six submissions, each of them in its turn the one that fails."""
    async with scene(config=config(layer_group=1)) as cluster:
        engine = faulty(cluster)
        engine.add(Fault(nth(k), fail=EVERY if how == "every block" else {0} if how == "one block" else ()))
        engine.faults[0].refuse = how == "refused"
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        cluster.forward([spec(1, SOURCE, aux_slot=5)])
        prefill, decode = await outcomes(cluster, handle)
        assert (prefill.ok, decode.ok) == (False, False)
        cause = "refused by the script" if how == "refused" else "failed by the script"
        assert cause in str(prefill.error)
        assert cause in str(decode.error), "the decode hears the first cause"
        assert cluster.prefill().poll(1) is RoomStatus.FAILED
        if how == "refused":
            await until(lambda: taken(cluster) == 0, "what was never submitted is quiet")
        else:
            await until(lambda: quarantined(cluster), "what failed is in doubt")
            if k == 5:
                assert quarantined(cluster) == 1, "only the aux slot"
        assert not handle.units_free() or how == "refused"


@pytest.mark.row("A8", "A16")
@pytest.mark.parametrize("k", range(2))
async def test_the_same_without_layerwise(k: int) -> None:
    async with scene(config=config(layerwise=False)) as cluster:
        faulty(cluster).add(Fault(nth(k), fail=EVERY))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12, aux_slot=3)
        cluster.forward([spec(1, SOURCE, aux_slot=5)])
        prefill, decode = await outcomes(cluster, handle)
        assert "failed by the script" in str(prefill.error)
        assert "failed by the script" in str(decode.error)


@pytest.mark.row("A8")
async def test_a_second_error_does_not_change_the_cause() -> None:
    async with scene(config=config(layer_group=1)) as cluster:
        engine = faulty(cluster)
        first = engine.add(Fault(nth(0), hold=True, fail=EVERY))
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        cluster.forward([spec(1, SOURCE)])
        await until(lambda: engine.attempts)
        cluster.prefill().abort(1, reason="first")
        cluster.prefill().abort(1, reason="second")
        handle.abort("third")
        first.release()
        prefill, decode = await outcomes(cluster, handle)
        assert "first" in str(prefill.error)
        assert "third" in str(decode.error), "each side keeps the cause that came first there"


@pytest.mark.row("A8")
async def test_a_timeout_names_where_every_layer_stands() -> None:
    """Layers fired, queued, posted, landed, failed; room, chunk and peer."""
    device, src = FakeDevice(), Pool(seed=1)
    limits = EngineLimits(max_batch_blocks=10, window_blocks=10)
    settings = config(layer_group=1, room_timeout_s=0.3)
    async with scene(prefills=[src], config=settings, decode_config=config(), events=device, limits=limits) as cluster:
        engine = faulty(cluster)
        hold = engine.add(Fault(nth(1, 2, 3), hold=True))
        handle = cluster.decode().expect(77, 3, cluster.addresses, TARGET, total_tokens=12)
        forward = cluster.prefill().begin_forward([spec(77, SOURCE, gen=3)])
        LateModel(src, device).forward(forward, SOURCE, 4)
        device.step(3)  # layer 3, the draft layer and the end stand still
        room = await live(cluster, 77, 3)
        await until(lambda: room.destinations)
        peer = next(iter(room.destinations)).hex()[:8]
        await until(lambda: cluster.prefill().poll(77, 3).ended)
        error = cluster.prefill().result(77, 3).error
        assert isinstance(error, DeadlineError)
        text = str(error)
        for fact in ("fired 3", "queued 3", "posted 3", "landed 1", "failed 0", "77.3", "77.3@0", peer):
            assert fact in text, text
        hold.release()
        _, decode = await outcomes(cluster, handle)
        assert "landed 1" in str(decode.error)


@pytest.mark.row("A8")
async def test_a_timeout_without_an_offer_says_so() -> None:
    async with scene(config=config(room_timeout_s=0.05)) as cluster:
        cluster.forward([spec(5, SOURCE)])
        result = await within(cluster.prefill().finished(5))
        assert isinstance(result.error, DeadlineError)
        assert "offers=0 of unknown" in str(result.error)
        await until(lambda: cluster.prefill().source_free(5))
        assert cluster.balanced() == []


# -- V6: after the loop has ended --------------------------------------------------------------------------------------


@pytest.mark.row("A10", "C6")
@pytest.mark.parametrize("when", ["before begin", "before the hooks", "before the end"])
async def test_hooks_after_the_loop_has_ended_are_harmless(when: str) -> None:
    device = FakeDevice()
    cluster = scene(events=device)
    forward: ForwardPass | None = None
    async with cluster:
        prefill = cluster.prefill()
        if when != "before begin":
            forward = prefill.begin_forward([spec(1, SOURCE)])
        if when == "before the end":
            for layer in range(4):
                forward.layer_end(layer) if forward else None
    if forward is None:
        forward = prefill.begin_forward([spec(1, SOURCE)])
    for layer in range(4):
        forward.layer_end(layer)
    forward.end()
    assert prefill.poll(1) is RoomStatus.FAILED, "a room that nobody will ever serve has failed"
    assert prefill.result(1).error is not None
    assert prefill.source_free(1)
    assert prefill.abort(1) is False
    prefill.abort(2)
    assert prefill.source_free(2)
    assert not (await within(prefill.finished(1))).ok


@pytest.mark.row("A10", "C6")
async def test_what_is_registered_while_the_node_stops_ends_too() -> None:
    """Between the last room of `stop` and the closing of the inbox: accepted means processed, and processed means
    that the room ends."""
    async with scene() as cluster:
        receiver = cluster.decode_nodes[0].receiver
        assert receiver is not None
        await receiver.stop()
        late = cluster.decode().expect(2, 0, cluster.addresses, ints(8), total_tokens=4)
        await cluster.decode_nodes[0].stop()
        assert late.poll() is RoomStatus.FAILED
        assert late.units_free()
        await sender(cluster).stop()
        cluster.prefill().begin_forward([spec(2, ints(4)), ChunkSpec(room=3, fake=True, last=True)])
        await cluster.prefill_nodes[0].stop()
        for room in (2, 3):
            assert cluster.prefill().poll(room).ended
            assert cluster.prefill().source_free(room)


# -- rooms that ask for no transfer ------------------------------------------------------------------------------------


@pytest.mark.row("D1", "A10")
@pytest.mark.parametrize("offer", ["before", "amid", "after"])
async def test_a_fake_room_that_was_offered_pages_fails_and_holds_up_nobody(
    offer: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The sides contradict each other. The decode must not wait for its deadline, and the pass has other chunks."""
    caplog.set_level(logging.ERROR)
    async with scene() as cluster:
        expect = partial(cluster.decode().expect, 2, 0, cluster.addresses, ints(30), total_tokens=4)
        handle = cluster.decode().expect(1, 0, cluster.addresses, TARGET, total_tokens=12)
        fake = expect() if offer == "before" else None
        if fake:
            await live(cluster, 2)
        forward = cluster.prefill().begin_forward([ChunkSpec(room=2, last=True, fake=True), spec(1, SOURCE)])
        if offer == "amid":
            await live(cluster, 2)
            fake = expect()
            rooms, key = sender(cluster).rooms, RoomKey(2, 0)
            await until(lambda: (room := rooms.live(key)) is None or room.destinations, "the offer has arrived")
        forward.end()
        prefill, _ = await outcomes(cluster, handle)
        assert prefill.ok
        fake = fake or expect()
        assert not (await within(fake)).ok
        await until(lambda: cluster.prefill().poll(2).ended)
        await until(lambda: cluster.balanced() == [], "nothing is left")
        assert caplog.records == []
