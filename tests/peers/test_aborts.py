"""Aborts and failures, from whichever side and in whatever state: who is told, how often, and what is free when."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial

import pytest

from orchestrator.decode import RoomHandle
from orchestrator.engines.faulty import EVERY, Fault
from orchestrator.outcome import RoomStatus
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.errors import AbortedError
from protocols.messages import Abort, Bye, Offer, WrongIncarnation
from tests.peers.raw import HASTY, QUICK, RawPrefill, overhear, settled
from tests.peers.scenes import (
    KEY,
    NOWHERE,
    SOON,
    Bad,
    Losing,
    cluster,
    engine_of,
    expect,
    in_state,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

# -- C1: the decode tells every prefill, once ----------------------------------------------------------------------


@dataclass
class Scene:
    """One decode, one true prefill and one that a test plays; room 5.1 was offered to both."""

    cluster: Cluster
    raw: RawPrefill
    handle: RoomHandle
    offer: Offer


async def by_abort(scene: Scene) -> None:
    scene.handle.abort("no longer wanted")


async def by_deadline(scene: Scene) -> None:
    """Nothing happens until it passes."""


async def by_shutdown(scene: Scene) -> None:
    await scene.cluster.decode_nodes[0].stop()


async def by_failed_done(scene: Scene) -> None:
    scene.raw.done(scene.offer, (), status="failed", reason="no memory")


async def by_peers_abort(scene: Scene) -> None:
    scene.raw.abort(scene.offer, "pages were needed elsewhere")


async def by_bye(scene: Scene) -> None:
    scene.raw.send(Bye())


async def by_restart(scene: Scene) -> None:
    scene.raw.send(WrongIncarnation(meant=scene.raw.me))


async def by_silence(scene: Scene) -> None:
    scene.raw.alive = False


async def by_garbage(scene: Scene) -> None:
    for _ in range(65):
        scene.raw.send_frame(b"garbage")


async def by_coverage(scene: Scene) -> None:
    scene.cluster.forward([spec()])  # the other rank covers it all: together they cover it twice
    scene.raw.done(scene.offer)


@pytest.mark.row("C1")
@pytest.mark.parametrize("network", ["good", "bad"])
@pytest.mark.parametrize(
    "cause, reason",
    [
        (by_abort, "no longer wanted"),
        (by_deadline, "did not finish in time"),
        (by_shutdown, "shutting down"),
        (by_failed_done, "no memory"),
        (by_peers_abort, "needed elsewhere"),
        (by_bye, "goodbye"),
        (by_restart, "restarted"),
        (by_silence, "silent"),
        (by_garbage, "undecodable"),
        (by_coverage, "coverage"),
    ],
)
@pytest.mark.usefixtures("quick_retries")
async def test_every_prefill_hears_of_a_failure_once(
    monkeypatch: pytest.MonkeyPatch, cause: Callable[[Scene], Awaitable[None]], reason: str, network: str
) -> None:
    timeout = 0.1 if cause is by_deadline else 20.0
    bounds = HASTY if cause is by_silence else QUICK
    async with cluster(decode_config=dataclasses.replace(bounds, waiting_timeout_s=timeout)) as c:
        if network == "bad":
            c.network.filter = Bad()
        heard = overhear(monkeypatch, sender(c))
        raw = RawPrefill(c.network, Pool().layout)
        raw.copies = 1 if network == "good" else 3
        handle = expect(c, peers=[*c.addresses, raw.address])
        offer = await raw.hear(Offer)
        await until(lambda: sender(c).rooms.live(KEY))
        await cause(Scene(c, raw, handle, offer))
        result = await asyncio.wait_for(handle, 5)
        assert reason in str(result.error)
        await until(lambda: any(isinstance(message, Abort) for message in heard))
        link = receiver(c).dialer.links.get(c.addresses[0])
        await until(lambda: link is None or link.unacked == 0)
        await settled()
        aborts = [message for message in heard if isinstance(message, Abort)]
        assert [(abort.room, abort.gen, abort.origin) for abort in aborts] == [(5, 1, "decode")]
        assert reason in aborts[0].reason
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED
        await until(lambda: c.prefill().source_free(*KEY))
        if cause not in (by_bye, by_restart, by_silence, by_garbage):
            assert reason in (await raw.hear(Abort, 5)).reason
            assert len(raw.all(Abort, 5)) == 1


@pytest.mark.row("C1")
@pytest.mark.usefixtures("quick_retries")
async def test_an_abort_is_sent_until_it_is_acknowledged_and_not_once_more(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as c:
        heard = overhear(monkeypatch, sender(c))
        handle = expect(c)
        await until(lambda: sender(c).rooms.live(KEY))
        c.network.filter = losing = Losing("abort", direction="to_prefill")
        handle.abort("gone")
        await until(lambda: losing.lost >= 4)
        assert not heard[1:]
        assert not handle.units_free()
        losing.active = False
        await until(handle.units_free)
        await until(lambda: receiver(c).dialer.links[c.addresses[0]].unacked == 0)
        sent = len(c.network.frames)
        handle.abort("and again")
        await settled()
        assert len(c.network.frames) == sent, "an idle process sends nothing"
        await c.decode_nodes[0].stop()
        assert [type(message) for message in heard] == [Offer, Abort, Bye]


@pytest.mark.row("C1")
async def test_a_rank_that_was_not_offered_anything_yet_is_told_that_nothing_comes() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout, greets=False)
        handle = expect(c, peers=[*c.addresses, raw.address])
        await until(lambda: sender(c).rooms.live(KEY))
        handle.abort()
        await until(handle.units_free)
        raw.greets = True
        await until(lambda: receiver(c).dialer.links[raw.address].up)
        await raw.flushed()
        assert not raw.all(Offer)
        assert [abort.room for abort in raw.all(Abort)] == [5]


@pytest.mark.row("C1", "C3")
async def test_a_prefill_hears_at_once_of_a_room_that_never_got_its_units() -> None:
    async with cluster() as c:
        owner = expect(c, room=6)
        c.forward([spec()])
        await until(lambda: sender(c).rooms.live(KEY))
        assert "holder=room 6.1" in str((await expect(c)).error)
        await until(lambda: c.prefill().poll(*KEY) is RoomStatus.FAILED, timeout=SOON)
        assert "holder=room 6.1" in str(c.prefill().result(*KEY).error)
        assert c.prefill().source_free(*KEY)
        c.forward([spec(room=6)])
        assert (await owner).ok


# -- C3, C6: an abort at every stage, from either side -------------------------------------------------------------


async def nothing_yet(c: Cluster) -> RoomHandle | None:
    return None


async def registered(c: Cluster) -> RoomHandle | None:
    c.forward([spec()])
    await settled()
    return None


async def offered(c: Cluster) -> RoomHandle | None:
    handle = expect(c)
    await until(lambda: sender(c).rooms.live(KEY))
    return handle


async def sending(c: Cluster) -> RoomHandle | None:
    handle = expect(c)
    c.forward([spec()])
    await until(lambda: engine_of(c).attempts > 0)
    return handle


async def committing(c: Cluster) -> RoomHandle | None:
    """All of it landed; the decode still waits for another rank."""
    engine_of(c).faults[0].release()
    raw = RawPrefill(c.network, Pool().layout)
    raw.yields, raw.copies = True, 3
    handle = expect(c, peers=[*c.addresses, raw.address])
    c.forward([spec()])
    await raw.hear(Offer)
    await in_state(handle, sender(c), "COMMITTING")
    return handle


async def draining(c: Cluster) -> RoomHandle | None:
    handle = await sending(c)
    assert handle is not None
    handle.abort("the first cause")
    await in_state(handle, sender(c), "DRAINING")
    return handle


async def lingering(c: Cluster) -> RoomHandle | None:
    handle = await draining(c)
    assert handle is not None
    await in_state(handle, sender(c), "LINGERING")
    return handle


async def failed(c: Cluster) -> RoomHandle | None:
    handle = await draining(c)
    assert handle is not None
    engine_of(c).faults[0].release()
    await until(lambda: sender(c).rooms.live(KEY) is None)
    return handle


async def succeeded(c: Cluster) -> RoomHandle | None:
    engine_of(c).faults[0].release()
    handle = expect(c)
    c.forward([spec()])
    await handle
    await until(lambda: c.prefill().source_free(*KEY))
    return handle


Stage = Callable[[Cluster], Awaitable[RoomHandle | None]]
LIVE: list[Stage] = [nothing_yet, registered, offered, sending, committing]
OVER: list[Stage] = [draining, lingering, failed, succeeded]


@pytest.mark.row("C3", "C6", "C5")
@pytest.mark.parametrize("stage", LIVE)
@pytest.mark.usefixtures("quick_retries")
async def test_a_prefills_abort_reaches_the_decode_with_its_reason(stage: Stage) -> None:
    hold = Fault(hold=True)
    async with cluster(hold) as c:
        handle = await stage(c)
        assert c.prefill().abort(*KEY, "out of pages")
        error = c.prefill().result(*KEY).error
        assert isinstance(error, AbortedError)
        assert (error.what, error.data["origin"]) == ("out of pages", "prefill")
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED, "visible before abort returns"
        assert not c.prefill().abort(*KEY, "again")
        if handle is None:
            handle = expect(c)  # an offer that meets the tombstone
        result = await asyncio.wait_for(handle, SOON)
        assert "out of pages" in str(result.error)
        assert c.prefill().source_free(*KEY) is (stage is not sending)
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: c.prefill().source_free(*KEY) and handle.units_free())
        assert c.prefill().result(*KEY).error is error, "the first cause stands"
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C6")
@pytest.mark.parametrize("stage", OVER)
@pytest.mark.usefixtures("quick_retries")
async def test_an_abort_of_what_is_over_changes_nothing(stage: Stage) -> None:
    hold = Fault(hold=True)
    async with cluster(hold) as c:
        handle = await stage(c)
        assert handle is not None
        before = c.prefill().poll(*KEY), handle.poll(), handle.result().error
        for _ in range(2):
            assert not c.prefill().abort(*KEY, "too late")
            assert not handle.abort("too late")
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: c.balanced() == [])
        assert (c.prefill().poll(*KEY), handle.poll(), handle.result().error) == before
        assert (handle.poll() is RoomStatus.SUCCESS) is (stage is succeeded)


@pytest.mark.row("C3")
@pytest.mark.parametrize(
    "fault, reason", [(Fault(refuse=True), "refused by the script"), (Fault(fail=EVERY), "failed by the script")]
)
async def test_a_prefills_failure_reaches_every_decode_with_its_reason(fault: Fault, reason: str) -> None:
    async with cluster(fault, decodes=[Pool(), Pool()]) as c:
        handles = [expect(c, number=number, destinations=2) for number in range(2)]
        c.forward([spec()])
        for handle in handles:
            assert reason in str((await asyncio.wait_for(handle, SOON)).error)
        assert reason in str(c.prefill().result(*KEY).error)


@pytest.mark.row("C3")
@pytest.mark.parametrize("cause", ["shutdown", "bad registration", "forward raised"])
async def test_whatever_ends_it_on_the_prefill_the_decode_hears_at_once(cause: str) -> None:
    async with cluster() as c:
        handle = expect(c)
        await until(lambda: sender(c).rooms.live(KEY))
        if cause == "shutdown":
            await c.prefill_nodes[0].stop()
        elif cause == "bad registration":
            assert c.forward([spec(pages=[4, 5, 6, 10_000])]).refused
        else:
            with pytest.raises(RuntimeError), c.prefill().begin_forward([spec()]) as forward:
                forward.layer_end(0)
                forward.layer_end(1)
                forward.layer_end(2)
                forward.layer_end(3)
                raise RuntimeError("the forward raised")
        result = await asyncio.wait_for(handle, SOON)
        said = {"shutdown": "shutting down", "bad registration": "outside the registered", "forward raised": cause}
        assert said[cause] in str(result.error)
        await until(handle.units_free)


# The same for the decode.


async def before_the_loop_heard(c: Cluster) -> RoomHandle:
    return expect(c)


async def dialling(c: Cluster) -> RoomHandle:
    handle = expect(c, peers=[NOWHERE])
    await settled()
    return handle


async def half_done(c: Cluster) -> RoomHandle:
    raw = RawPrefill(c.network, Pool().layout)
    handle = expect(c, peers=[*c.addresses, raw.address])
    offer = await raw.hear(Offer)
    raw.done(offer)
    await until(lambda: (room := receiver(c).rooms.live(KEY)) is not None and "done=1/2" in repr(room))
    return handle


async def being_sent(c: Cluster) -> RoomHandle:
    handle = await sending(c)
    assert handle is not None
    return handle


@pytest.mark.row("C6", "C1")
@pytest.mark.parametrize("stage", [before_the_loop_heard, dialling, half_done, being_sent])
async def test_a_decodes_abort_is_legal_in_every_state(stage: Callable[[Cluster], Awaitable[RoomHandle]]) -> None:
    hold = Fault(hold=True)
    async with cluster(hold) as c:
        handle = await stage(c)
        assert handle.abort("enough")
        error = handle.result().error
        assert isinstance(error, AbortedError)
        assert (error.what, error.data["origin"]) == ("enough", "decode")
        assert handle.poll() is RoomStatus.FAILED, "visible before abort returns"
        assert not handle.abort("more than enough")
        hold.release()
        await until(handle.units_free)
        assert handle.result().error is error
        assert receiver(c).book.taken() == 0


@pytest.mark.row("C6")
@pytest.mark.parametrize("network", ["good", "bad"])
@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("stage", [offered, sending, committing])
@pytest.mark.usefixtures("quick_retries")
async def test_crossing_aborts_conclude_on_both_sides(stage: Stage, first: str, network: str) -> None:
    hold = Fault(hold=True)
    async with cluster(hold) as c:
        handle = await stage(c)
        assert handle is not None
        if network == "bad":
            c.network.filter = Bad()
        for side in ("prefill", "decode") if first == "prefill" else ("decode", "prefill"):
            abort = handle.abort if side == "decode" else partial(c.prefill().abort, *KEY)
            assert abort(f"from the {side}"), "neither has heard of the other's"
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: c.balanced() == [])
        mine, theirs = c.prefill().result(*KEY).error, handle.result().error
        assert mine is not None
        assert theirs is not None
        assert (mine.what, theirs.what) == ("from the prefill", "from the decode")
        assert c.prefill().source_free(*KEY)
        assert handle.units_free()


@pytest.mark.row("C6")
async def test_an_abort_shows_while_the_loop_is_busy_and_one_of_many_wins() -> None:
    async with cluster() as c:
        handle = expect(c)
        await until(lambda: sender(c).rooms.live(KEY))
        barrier = threading.Barrier(8)
        seen: list[tuple[str, str, bool, RoomStatus]] = []

        def race(number: int) -> None:
            reason = f"thread {number}"
            barrier.wait()
            if number % 2:
                seen.append(("prefill", reason, c.prefill().abort(*KEY, reason), c.prefill().poll(*KEY)))
            else:
                seen.append(("decode", reason, handle.abort(reason), handle.poll()))

        threads = [threading.Thread(target=race, args=(number,)) for number in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()  # the loop has not run since
        assert {status for *_, status in seen} == {RoomStatus.FAILED}
        for side, error in (("decode", handle.result().error), ("prefill", c.prefill().result(*KEY).error)):
            winners = [reason for which, reason, first, _ in seen if which == side and first]
            assert error is not None
            assert winners == [error.what]
            assert error.data["origin"] == side
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C6", "C1")
@pytest.mark.usefixtures("quick_retries")
async def test_an_abort_that_meets_the_commit_ends_both_sides() -> None:
    """The decode has committed, its Committed is on the way, and the prefill aborts: its word is FAILED, once."""
    async with cluster() as c:
        c.network.filter = losing = Losing("committed")
        handle = expect(c)
        c.forward([spec()])
        assert (await handle).ok
        assert c.prefill().abort(*KEY, "a moment too late to matter")
        losing.active = False
        await until(lambda: c.balanced() == [])
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED
        assert handle.poll() is RoomStatus.SUCCESS


@pytest.mark.row("C6", "N5")
@pytest.mark.parametrize("cause", ["abort", "peer", "shutdown"])
async def test_a_failure_while_the_digests_are_compared_ends_the_room_and_the_comparing(
    monkeypatch: pytest.MonkeyPatch, cause: str
) -> None:
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def slowly(*_: object) -> None:
        reached.set()
        await go_on.wait()

    monkeypatch.setattr("orchestrator.decode_room.check_digests", slowly)
    async with cluster(digest=True) as c:
        handle = expect(c)
        c.forward([spec()])
        await reached.wait()
        assert not handle.poll().ended
        if cause == "abort":
            assert handle.abort("changed my mind")
        elif cause == "peer":
            assert c.prefill().abort(*KEY, "pages were needed")
        else:
            await c.decode_nodes[0].stop()
            tasks = [task for task in asyncio.all_tasks() if "DecodeRoom._compare" in repr(task)]
            assert not tasks, "after the stop nobody reads the pool any more"
        assert not (await asyncio.wait_for(handle, SOON)).ok
        go_on.set()
        await settled()
        assert handle.poll() is RoomStatus.FAILED
        await until(lambda: c.prefill().poll(*KEY) is RoomStatus.FAILED)
        assert handle.units_free()
        assert receiver(c).book.taken() == 0
