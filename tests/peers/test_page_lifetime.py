"""When a page, slot or row may be used again, on either side, whatever became of the room."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from typing import Any

import numpy as np
import pytest

from orchestrator.engines.base import EngineLimits
from orchestrator.engines.faulty import EVERY, Fault, nth
from orchestrator.outcome import RoomStatus
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.blocks import Blocks
from protocols.codec import pack_indices
from protocols.errors import BusyError
from protocols.ids import RoomKey, Session
from protocols.leases import LeaseBook, UnitSet, UnitState
from protocols.messages import (
    Abort,
    AbortAck,
    Bye,
    Offer,
    Refused,
    Units,
    WrongIncarnation,
)
from tests.peers.raw import HASTY, QUICK, RawDecode, RawPrefill, overhear, pages_of, settled
from tests.peers.scenes import (
    DST,
    KEY,
    NOWHERE,
    SOON,
    SRC,
    TOKENS,
    cluster,
    engine_of,
    expect,
    held,
    in_state,
    into,
    landed,
    pages_of_blocks,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

# -- C2: what a prefill does about it ------------------------------------------------------------------------------

NARROW = EngineLimits(window_blocks=2, max_batch_blocks=1)


@pytest.mark.row("C2", "C5")
@pytest.mark.usefixtures("quick_retries")
async def test_after_an_abort_nothing_is_submitted_and_what_runs_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    hold = Fault(hold=True)
    config = dataclasses.replace(QUICK, drain_timeout_s=5.0, layer_group=1)
    async with cluster(hold, limits=NARROW, config=config) as c:
        engine, dst = engine_of(c), c.decode_pools[0]
        heard = overhear(monkeypatch, receiver(c))
        handle = expect(c)
        with c.prefill().begin_forward([spec()]) as forward:
            forward.layer_end(0)
            await until(lambda: engine.attempts == 2)
            handle.abort("stop")
            await until(lambda: c.prefill().poll(*KEY) is RoomStatus.FAILED)
            for layer in range(1, 4):
                forward.layer_end(layer)
            await settled()
        await settled()
        assert engine.attempts == 2
        assert not any(isinstance(message, AbortAck) for message in heard), "it is not quiet yet"
        assert not c.prefill().source_free(*KEY)
        assert not handle.units_free()
        assert held(receiver(c), UnitState.DRAINING) == {"page": DST, "aux": [2]}
        hold.release()
        sender(c).pacer.kick()
        await until(handle.units_free)
        await until(lambda: c.prefill().source_free(*KEY))
        assert engine.attempts == 2
        acks = [message for message in heard if isinstance(message, AbortAck)]
        assert [(ack.unknown, ack.in_doubt) for ack in acks] == [(Units(), Units())]
        written = pages_of_blocks(dst, Blocks.join([entry.blocks for entry in engine.log]), [0, 1])
        assert dst.untouched(np.array(written))
        assert c.balanced() == []


@pytest.mark.row("C2", "C4", "B4")
@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
async def test_a_failed_write_is_told_with_its_exact_pages(monkeypatch: pytest.MonkeyPatch, failing: list[int]) -> None:
    async with cluster(Fault(nth(0), fail=failing)) as c:
        dst, book = c.decode_pools[0], receiver(c).book
        heard = overhear(monkeypatch, receiver(c))
        handle = expect(c)
        c.forward([spec()])
        result = await handle
        assert "failed a write" in str(result.error)
        await until(lambda: any(isinstance(message, AbortAck) for message in heard))
        doubtful = pages_of_blocks(dst, engine_of(c).log[0].blocks, failing)
        ack = next(message for message in heard if isinstance(message, AbortAck))
        assert pages_of(ack.in_doubt.pages) == doubtful
        assert (ack.in_doubt.aux, ack.in_doubt.state, ack.unknown) == ((), b"", Units())
        assert held(receiver(c), UnitState.IN_DOUBT) == held(receiver(c)) == {"page": doubtful}
        assert not handle.units_free()
        assert c.prefill().source_free(*KEY), "every task is terminal: the source is free, whatever the destination is"
        await until(lambda: book.quarantined() == len(doubtful))
        free = sorted({*DST} - {*doubtful})
        refused = await expect(c, gen=2, pages=[*free, doubtful[0]], total_tokens=4 * len(free) + 4)
        assert isinstance(refused.error.__cause__ if refused.error else None, BusyError)
        assert "holder=room 5.1" in str(refused.error)
        if free:
            handle = expect(c, gen=3, pages=free, total_tokens=4 * len(free))
            c.forward([spec(gen=3, pages=SRC[: len(free)], end_token=None)])
            assert (await handle).ok
            assert landed(c.prefill_pools[0], dst, SRC[: len(free)], free)


@pytest.mark.row("C2", "C4")
@pytest.mark.parametrize("kind, units", [("aux", {"aux": [2]}), ("state", {"state": [6, 7]})])
async def test_slots_and_rows_are_told_too(kind: str, units: dict[str, list[int]]) -> None:
    src, dst = Pool(seed=1, state_rows=8), Pool(state_rows=8)
    async with cluster(Fault(into(dst, kind), fail=EVERY), prefills=[src], decodes=[dst]) as c:
        handle = expect(c, state_rows=[7, 6])
        c.forward([spec(state_rows=[1, 2])])
        await handle
        await until(lambda: held(receiver(c)) == units)
        assert held(receiver(c), UnitState.IN_DOUBT) == units


@pytest.mark.row("C2")
async def test_an_abort_of_an_unknown_room_is_acknowledged_and_remembered() -> None:
    async with cluster() as c:
        raw = RawDecode(c.network, c.addresses[0], Pool().layout)
        await raw.connect()
        for _ in range(2):  # as a peer that was restarted in between would
            raw.send(Abort(room=5, gen=1, origin="decode", reason="changed my mind"))
        for nth_ack in range(2):
            ack = await raw.hear(AbortAck, 5, nth_ack)
            assert (ack.unknown, ack.in_doubt) == (Units(), Units())
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED
        forward = c.forward([spec()])  # the registration comes late
        assert "changed my mind" in forward.refused[0]
        assert c.prefill().source_free(*KEY)
        raw.send(raw.offer(5, 1, DST))  # so does an offer
        assert "changed my mind" in (await raw.hear(Abort, 5)).reason
        await raw.hear(AbortAck, 5, 2)
        assert engine_of(c).attempts == 0
        assert c.balanced() == []


@pytest.mark.row("C2")
async def test_what_is_in_doubt_outlives_the_room_and_its_tombstone() -> None:
    config = dataclasses.replace(QUICK, tombstone_s=0.1)
    async with cluster(Fault(nth(0), fail=[0]), config=config) as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec()])
        first = await raw.hear(AbortAck, 5)
        assert pages_of(first.in_doubt.pages) == [1, 2, 3]
        raw.send(Abort(room=6, gen=1, origin="decode", reason="only to see it forgotten"))
        await raw.hear(AbortAck, 6)
        await until(lambda: sender(c).rooms.verdict(RoomKey(6, 1)) is None)
        raw.send(Abort(room=5, gen=1, origin="decode", reason="asking again"))
        again = await raw.hear(AbortAck, 5, 1)
        assert again.in_doubt == first.in_doubt
        assert c.prefill().poll(*KEY) is RoomStatus.FAILED
        raw.send(Abort(room=6, gen=1, origin="decode", reason="this one is forgotten: unknown again, and quiet"))
        assert (await raw.hear(AbortAck, 6, 1)).in_doubt == Units()


@pytest.mark.row("C2", "C3")
async def test_every_requester_is_acknowledged() -> None:
    hold = Fault(hold=True)
    config = dataclasses.replace(QUICK, drain_timeout_s=5.0)
    async with cluster(hold, decodes=[Pool(), Pool()], config=config) as c:
        one, two = (expect(c, number=number, destinations=2) for number in range(2))
        c.forward([spec()])
        await until(lambda: engine_of(c).attempts >= 2)
        one.abort("one is enough")
        assert "one is enough" in str((await asyncio.wait_for(two, SOON)).error)
        await settled()
        assert not one.units_free()
        assert not two.units_free()
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: one.units_free() and two.units_free())
        assert c.balanced() == []


# -- C4, C5: when a unit is free -----------------------------------------------------------------------------------


def stages(**changes: Any) -> list[Pool]:
    """Two pipeline stages of one model; the second has the aux buffer."""
    first = Pool(seed=1, own_layers=range(2), with_aux=False, pp_rank=0, pp_size=2, **changes)
    return [first, Pool(seed=2, own_layers=range(2, 5), pp_rank=1, pp_size=2, **changes)]


def forward_stage(c: Cluster, number: int) -> None:
    layers = (range(2), range(2, 4))[number]
    aux_slot = None if number == 0 else 1
    c.forward([spec(aux_slot=aux_slot)], prefill=number, layers=layers)


@pytest.mark.row("C4")
@pytest.mark.parametrize("second", ["done", "quiet", "never offered to"])
async def test_a_unit_is_free_when_every_rank_has_said_so(second: str) -> None:
    config = dataclasses.replace(QUICK, drain_timeout_s=5.0)
    async with cluster(prefills=stages(), config=config) as c:
        hold = engine_of(c, 0).add(Fault(hold=True))
        peers = c.addresses
        if second == "never offered to":
            peers = [c.addresses[0], NOWHERE]
        handle = expect(c, peers=peers)
        forward_stage(c, 0)
        await until(lambda: engine_of(c, 0).attempts > 0)
        if second == "done":
            forward_stage(c, 1)
            await until(lambda: "done=1/2" in repr(receiver(c).rooms.live(KEY)))
        freed: list[bool] = []
        handle.on_units_free(lambda: freed.append(handle.units_free()))
        handle.abort()
        link = receiver(c).dialer.links[c.addresses[-1]] if second != "never offered to" else None
        await until(lambda: link is None or link.unacked == 0)
        await settled()
        assert held(receiver(c)) == {"page": DST, "aux": [2]}
        assert not handle.units_free()
        hold.release()
        sender(c).pacer.kick()
        await until(handle.units_free)
        assert freed == [True]
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C4")
async def test_a_timeout_frees_nothing_and_a_late_quiet_does() -> None:
    hold = Fault(hold=True)
    async with cluster(hold) as c:
        book = receiver(c).book
        handle = expect(c)
        c.forward([spec()])
        await until(lambda: engine_of(c).attempts > 0)
        handle.abort("slow")
        await in_state(handle, receiver(c), "QUARANTINED")
        units = held(receiver(c), UnitState.UNKNOWN)
        assert units == held(receiver(c)), "what is quiet went back at once"
        assert book.quarantined() == book.taken() == sum(map(len, units.values())) > 0
        assert [(entry.key, entry.unknown, entry.in_doubt) for entry in c.decode().quarantine()] == [
            (KEY, book.taken(), 0)
        ]
        assert "slow" in c.decode().quarantine()[0].why
        assert receiver(c).counters["quarantines"] == 1
        assert handle.result().error is not None
        assert not handle.units_free()
        again = await expect(c, gen=2)
        assert "holder=room 5.1" in str(again.error)
        hold.release()
        sender(c).pacer.kick()
        await until(handle.units_free)
        assert (book.quarantined(), book.taken()) == (0, 0)
        assert receiver(c).counters["quarantines"] == 1
        handle = expect(c, gen=3)
        c.forward([spec(gen=3)])
        assert (await handle).ok


@pytest.mark.row("C4")
async def test_a_rank_that_says_nothing_keeps_every_unit() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[*c.addresses, raw.address])
        offer = await raw.hear(Offer)
        handle.abort()
        await in_state(handle, receiver(c), "QUARANTINED")
        assert held(receiver(c), UnitState.UNKNOWN) == {"page": DST, "aux": [2]}
        raw.quiet(offer, unknown=Units(pages=pack_indices(np.array([9]))))
        await raw.flushed()
        assert held(receiver(c), UnitState.UNKNOWN) == {"page": [9]}, "quiet of what it does not list, late as it is"
        raw.quiet(offer)
        await raw.flushed()
        assert handle.units_free()


@pytest.mark.row("C4")
@pytest.mark.parametrize("end", ["wrong incarnation", "bye", "refused"])
async def test_quiet_counts_only_from_the_incarnation_that_was_offered_to(end: str) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        handle.abort()
        await raw.hear(Abort)
        raw.close()
        successor = RawPrefill(c.network, Pool().layout, raw.address, greets=False)
        if end == "wrong incarnation":  # what was meant for the dead process reaches the next one on its port
            raw.send(WrongIncarnation(meant=raw.me), src=successor.me)
        elif end == "bye":
            raw.send(Bye())
        else:
            raw.send(Refused(reason="say Hello first"))
        await settled()
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": DST, "aux": [2]}
        successor.greets = True
        other = expect(c, gen=2, peers=[successor.address], pages=[20, 21, 22, 23], aux_slot=3)
        await successor.hear(Offer)
        successor.quiet(offer)
        await successor.flushed()
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": DST, "aux": [2]}
        assert not handle.units_free()
        successor.done(successor.all(Offer)[0])
        assert (await other).ok, "the other units are served"


@pytest.mark.row("C4", "B4")
async def test_in_doubt_stays_held_until_the_engine_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer frees it, however late or often: only the engine's end, which is the fence."""
    src, dst = Pool(seed=1), Pool()
    c = cluster(Fault(nth(0), fail=[0], landing="snapshot"), prefills=[src], decodes=[dst])
    async with c:
        handle = expect(c)
        c.forward([spec()])
        await handle
        await in_state(handle, receiver(c), "QUARANTINED")
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": [1, 2, 3]}
        link = next(iter(sender(c).reception.links.values()))
        link.post(AbortAck(room=5, gen=1, session=c.decode_nodes[0].receiver.session))  # type: ignore[union-attr]
        await until(lambda: link.unacked == 0)
        assert engine_of(c).land_late() == 1
        assert not dst.untouched(np.array([9])), "it did land late: these pages were rightly kept"
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": [1, 2, 3]}
        assert not handle.units_free()
        freed: list[str] = []
        handle.on_units_free(lambda: freed.append("once"))
    assert handle.units_free()
    assert freed == ["once"]
    assert receiver(c).book.taken() == 0


@pytest.mark.row("C4")
@pytest.mark.parametrize(
    "wild",
    [
        {"in_doubt": Units(pages=pack_indices(np.array([40, 41])), aux=(7,), state=pack_indices(np.array([3])))},
        {"unknown": Units(pages=pack_indices(np.array([1000])), aux=(2**62,))},
    ],
)
async def test_an_answer_about_others_units_touches_none(wild: dict[str, Units]) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        other = expect(c, gen=2, room=6, peers=[raw.address], pages=[40, 41, 42, 43], aux_slot=7)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer, 5)
        handle.abort()
        raw.quiet(offer, **wild)
        await raw.flushed()
        raw.quiet(offer)
        await raw.flushed()
        assert handle.units_free()
        assert held(receiver(c), UnitState.LEASED, key=RoomKey(6, 2)) == {"page": [40, 41, 42, 43], "aux": [7]}
        raw.done(raw.all(Offer, 6)[0])
        assert (await other).ok


@pytest.mark.row("C4")
@pytest.mark.parametrize("torn", [Units(pages=b"123"), Units(state=b"\xff\xff\xff\xff")])
async def test_an_answer_that_cannot_be_read_proves_nothing(torn: Units) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        raw.quiet(offer, unknown=torn)
        assert not (await handle).ok
        await in_state(handle, receiver(c), "QUARANTINED")
        assert held(receiver(c), UnitState.UNKNOWN) == {"page": DST, "aux": [2]}
        raw.quiet(offer)
        await raw.flushed()
        assert handle.units_free()


@pytest.mark.row("C4")
async def test_done_after_the_abort_frees_what_it_stands_for() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        handle.abort()
        await raw.hear(Abort)
        raw.done(offer)  # it crossed the abort: everything landed, nothing is on its way
        await raw.flushed()
        assert handle.units_free()
        assert handle.poll() is RoomStatus.FAILED


@pytest.mark.row("C5")
@pytest.mark.parametrize("outcome", ["success", "failure"])
async def test_the_source_is_free_when_nothing_reads_it(outcome: str) -> None:
    hold = Fault(hold=True)
    async with cluster(hold) as c:
        handle = expect(c)
        c.forward([spec()])
        await until(lambda: engine_of(c).attempts > 0)
        calls: list[tuple[bool, int]] = []
        c.prefill().on_source_free(*KEY, lambda: calls.append((c.prefill().source_free(*KEY), threading.get_ident())))
        if outcome == "failure":
            c.prefill().abort(*KEY)
            await handle
            await in_state(handle, sender(c), "LINGERING")
        assert not c.prefill().source_free(*KEY)
        assert not calls
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: c.prefill().source_free(*KEY))
        assert calls == [(True, threading.get_ident())]
        c.prefill().on_source_free(*KEY, lambda: calls.append((True, 0)))
        assert calls[1:] == [(True, 0)], "at once where it has happened already"
        assert c.prefill().poll(*KEY) is (RoomStatus.SUCCESS if outcome == "success" else RoomStatus.FAILED)


@pytest.mark.row("C5", "C3")
async def test_a_decode_that_goes_silent_leaves_the_source_in_use_until_the_engine_lets_go() -> None:
    hold = Fault(hold=True)
    async with cluster(hold, config=HASTY) as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec()])
        await until(lambda: engine_of(c).attempts > 0)
        raw.alive = False
        await until(lambda: c.prefill().poll(*KEY) is RoomStatus.FAILED, timeout=3)
        assert "silent" in str(c.prefill().result(*KEY).error)
        assert not c.prefill().source_free(*KEY)
        hold.release()
        sender(c).pacer.kick()
        await until(lambda: c.prefill().source_free(*KEY))
        assert c.balanced() == []


@pytest.mark.row("C4")
def test_counting_what_is_quarantined_costs_little_however_many_rooms_are_live() -> None:
    """It is asked on the loop before every grant, and no callback there may take 2 ms (V7)."""
    book = LeaseBook({"page": 4000})
    for room in range(1000):
        book.grant(RoomKey(room, 1), Session("s"), UnitSet(pages=np.arange(4 * room, 4 * room + 4)), ["w"], 0.0)
    for room in range(10):
        book.fail(RoomKey(room, 1), "failed")
        book.expire(RoomKey(room, 1))
    before = time.thread_time()
    for _ in range(20):
        assert book.quarantined() == 40
    assert (time.thread_time() - before) / 20 < 0.002
    book.ack(RoomKey(3, 1), "w", UnitSet(), UnitSet(pages=np.array([12])))
    assert book.quarantined() == 37
    book.fence(Session("s"))
    assert book.quarantined() == 0
