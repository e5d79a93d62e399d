"""Heartbeats, silence, and the bounds on what a peer is waited for (C1, C7)."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np
import pytest

from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.codec import decode_envelope
from protocols.errors import BrokenPeerError, ConfigError
from protocols.ids import RoomKey
from protocols.messages import (
    MAX_BYTES_OF,
    Abort,
    AbortAck,
    Done,
    Offer,
    Ping,
    Refused,
    Welcome,
    WrongIncarnation,
)
from tests.peers.raw import HASTY, QUICK, RawPrefill, settled
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    TOKENS,
    cluster,
    expect,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

# -- heartbeats ----------------------------------------------------------------------------------------------------


@pytest.mark.row("C1", "C3")
async def test_peers_are_pinged_while_a_room_is_open_and_never_else() -> None:
    async with cluster() as c:
        loop = asyncio.get_running_loop()
        handle = expect(c)
        await until(lambda: types(c.network.frames).count("ping") >= 4)
        assert {direction for direction, frame in c.network.frames if decode_envelope(frame).type == "ping"} == {
            "to_prefill",
            "to_decode",
        }
        c.forward([spec()])
        await handle
        await until(lambda: c.balanced() == [] and receiver(c).dialer.links[c.addresses[0]].unacked == 0)
        await settled()
        sent, now = len(c.network.frames), loop.time()
        await until(lambda: loop.time() > now + 4 * QUICK.ping_interval_s)
        assert len(c.network.frames) == sent


def types(frames: list[tuple[str, bytes]]) -> list[str]:
    return [decode_envelope(frame).type for _, frame in frames]


@pytest.mark.row("C1", "C3")
@pytest.mark.parametrize("silent", ["prefill", "decode"])
async def test_silence_ends_the_rooms_of_that_peer_in_time_and_nobody_elses(silent: str) -> None:
    loop = asyncio.get_running_loop()
    async with cluster(decodes=[Pool(), Pool()], config=HASTY) as c:
        bystander = expect(c, number=1, room=8)
        await until(lambda: sender(c).rooms.live(RoomKey(8, 1)))
        if silent == "prefill":
            prefill = RawPrefill(c.network, Pool().layout)
            handle = expect(c, peers=[prefill.address])
            await prefill.hear(Offer, 5)
            prefill.alive, status = False, handle.poll
        else:
            decode = await raw_decode(c)
            decode.send(decode.offer(5, 1, DST, total_tokens=TOKENS))
            await until(lambda: sender(c).rooms.live(KEY))
            decode.alive, status = False, lambda: c.prefill().poll(*KEY)
        since = loop.time()
        await until(lambda: status() is RoomStatus.FAILED, timeout=2)
        assert HASTY.silence_s - HASTY.ping_interval_s <= loop.time() - since
        assert loop.time() - since < HASTY.silence_s + 2 * HASTY.ping_interval_s + 0.2
        assert not bystander.poll().ended
        c.forward([spec(room=8)])
        assert (await bystander).ok


@pytest.mark.row("C1", "C3")
async def test_a_room_to_a_peer_that_is_still_silent_ends_in_time_too() -> None:
    async with cluster(config=HASTY) as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        await raw.hear(Offer)
        raw.alive = False
        assert "silent" in str((await asyncio.wait_for(handle, 3)).error)
        again = expect(c, gen=2, peers=[raw.address], pages=[20, 21, 22, 23], aux_slot=3)
        assert "silent" in str((await asyncio.wait_for(again, 3)).error)
        raw.alive = True
        third = expect(c, gen=3, peers=[raw.address], pages=[24, 25, 26, 27], aux_slot=4)
        raw.done(await raw.hear(Offer, nth=1))  # the second was asked for, and never offered
        assert (await third).ok, "it is back"


# -- bounds --------------------------------------------------------------------------------------------------------


@pytest.mark.row("C7")
async def test_a_message_larger_than_a_frame_fails_its_room_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MAX_BYTES_OF, "offer", 1 << 16)
    src, dst = Pool(seed=1, pages=20_480, layers=1), Pool(pages=20_480, layers=1)
    async with cluster(prefills=[src], decodes=[dst]) as c:
        handle = expect(c, pages=np.arange(20_000), total_tokens=80_000)
        error = (await asyncio.wait_for(handle, SOON)).error
        assert error is not None
        assert isinstance(error.__cause__, ConfigError)
        assert "larger than one frame" in str(error)
        assert "fewer pages" in str(error), "it says what to do"
        await until(handle.units_free)
        again = expect(c, gen=2)
        c.forward([spec(gen=2)])
        assert (await again).ok
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C7", "C1")
@pytest.mark.parametrize("silent", ["prefill", "decode"])
async def test_a_peer_that_acknowledges_nothing_is_broken_when_its_buffer_is_full(
    monkeypatch: pytest.MonkeyPatch, silent: str
) -> None:
    rooms = 300
    monkeypatch.setattr("protocols.channel.MAX_UNACKED", rooms)
    pool = Pool(pages=2 * rooms)
    async with cluster(decodes=[pool]) as c:
        if silent == "decode":
            raw = await raw_decode(c)
            for room in range(rooms):
                raw.send(raw.offer(room, 1, [room % 60]))
            await until(lambda: len(sender(c).rooms) == rooms)
            raw.alive = False
            for room in range(rooms):
                c.prefill().abort(room, 1)
            await until(lambda: not len(sender(c).rooms), timeout=2)
            assert not sender(c).reception.links
        else:
            prefill = RawPrefill(c.network, Pool(pages=2 * rooms).layout)
            prefill.alive = False
            handles = [
                expect(c, room=room, peers=[prefill.address], pages=[room], total_tokens=4, aux_slot=None)
                for room in range(rooms + 1)
            ]
            for handle in handles:
                assert "acknowledges nothing" in str((await asyncio.wait_for(handle, 2)).error)
            assert not receiver(c).dialer.links


@pytest.mark.row("C7")
async def test_nobody_there_and_nobody_answering_are_said_so_in_time() -> None:
    loop = asyncio.get_running_loop()
    async with cluster(config=HASTY) as c:
        raw = RawPrefill(c.network, Pool().layout, greets=False)
        for number_of, (address, text) in enumerate(
            [("tcp://127.0.0.1:19999", "does not answer"), (raw.address, "does not answer")]
        ):
            since = loop.time()
            handle = expect(c, gen=number_of, peers=[address])
            error = (await handle).error
            assert error is not None
            assert isinstance(error.__cause__, BrokenPeerError)
            assert text in str(error)
            assert loop.time() - since < HASTY.connect_timeout_s + 1.2
            assert handle.units_free()
        raw.greets = True
        handle = expect(c, gen=7, peers=[raw.address])
        raw.done(await raw.hear(Offer))
        assert (await handle).ok, "the next room dials anew"


@pytest.mark.row("C7")
async def test_what_belongs_to_an_earlier_dial_is_late_on_both_sides() -> None:
    """Found by simulation: a Welcome of an earlier dial brought a link up whose Hello came later and ended it; from
    then on one side counted from 1, and the other waited for what it had sent before."""
    async with cluster(config=HASTY) as c:
        raw = RawPrefill(c.network, Pool().layout, greets=False)
        result = await expect(c, gen=1, peers=[raw.address], pages=[20, 21, 22, 23], aux_slot=3)
        assert "does not answer" in str(result.error)
        handle = expect(c, gen=2, peers=[raw.address])
        await until(lambda: raw.dial > 1)
        raw.send(raw.hello(dial=1))
        raw.send(Welcome(chosen=1, dial=1))
        raw.send(Refused(reason="say Hello first", dial=1))
        raw.send(WrongIncarnation(meant=raw.peer, dial=1))
        await settled()
        assert not raw.all(Offer)
        assert receiver(c).counters["late_messages"] == 4
        raw.greet()
        raw.done(await raw.hear(Offer))
        assert (await handle).ok

        decode = await raw_decode(c)
        decode.send(decode.offer(5, 1, DST, total_tokens=TOKENS), dial=2)
        assert "Hello" in (await decode.hear(Refused)).reason, "one that was never greeted"
        await decode.connect(dial=3)
        decode.next_seq, decode.ack = 1, 0
        decode.send(decode.offer(6, 1, DST, total_tokens=TOKENS), dial=1)
        decode.next_seq = 1
        decode.send(decode.offer(7, 1, DST, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec(room=7)])
        assert (await decode.hear(Done, 7)).status == "ok"
        assert sender(c).counters["late_messages"] == 1


@pytest.mark.row("C7")
async def test_a_peer_that_talks_and_acknowledges_nothing_is_given_up() -> None:
    async with cluster(config=dataclasses.replace(QUICK, silence_s=1.0, tombstone_s=1.0)) as c:
        raw = await raw_decode(c)
        raw.alive = False
        raw.send(Abort(room=5, gen=1, origin="decode", reason="for what is never here"))
        await raw.hear(AbortAck, 5)
        async with asyncio.timeout(10):
            while raw.me in sender(c).reception.links:
                raw.send(Ping(number=1), ack=0)
                await asyncio.sleep(0.01)


@pytest.mark.row("C7")
async def test_verdicts_that_are_soon_forgotten_make_nobody_impatient() -> None:
    """`tombstone_s` bounds how long a peer is waited for, but never below the silence that a peer may keep."""
    async with cluster(config=dataclasses.replace(QUICK, tombstone_s=0.01)) as c:
        raw = await raw_decode(c)
        raw.alive = False
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        await until(lambda: sender(c).rooms.live(KEY))
        raw.send(Abort(room=9, gen=1, origin="decode", reason="for what is never here"))
        await raw.hear(AbortAck, 9)
        await asyncio.sleep(1.0)  # resent, and not acknowledged
        assert raw.me in sender(c).reception.links
        assert c.prefill().poll(*KEY) is RoomStatus.WAITING
        raw.alive = True
        c.forward([spec()])
        assert (await raw.hear(Done)).status == "ok"
