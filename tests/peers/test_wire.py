"""The control wire under peers that send anything at all: what is answered, what is dropped, and who lives on (C7)."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.codec import decode_envelope, encode
from protocols.errors import BrokenPeerError, ConfigError, RefusedError
from protocols.ids import RoomKey
from protocols.leases import UnitState
from protocols.messages import (
    MAX_BYTES_OF,
    Abort,
    AbortAck,
    Committed,
    Done,
    Hello,
    Message,
    Offer,
    Ping,
    Refused,
    Welcome,
    WrongIncarnation,
)
from tests.peers.raw import HASTY, QUICK, RawDecode, RawPeer, RawPrefill, overhear, settled
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    TOKENS,
    Losing,
    cluster,
    expect,
    held,
    landed,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

unpickled: list[str] = []


class Bomb:
    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return unpickled.append, ("boom",)


def as_map(peer: RawPeer, **fields: Any) -> bytes:
    return msgspec.msgpack.encode(peer.envelope() | fields)


GARBAGE: dict[str, Callable[[RawPeer], bytes]] = {
    "nothing": lambda peer: b"",
    "another protocol": lambda peer: b"GET / HTTP/1.1\r\nHost: prefill\r\n\r\n",
    "a pickle": lambda peer: pickle.dumps(Bomb()),
    "torn": lambda peer: as_map(peer, type="ping", number=1)[:-3],
    "no map": lambda peer: msgspec.msgpack.encode(["ping", 1]),
    "nested without end": lambda peer: b"\x91" * 100_000,
    "a map of four billion": lambda peer: b"\xdf\xff\xff\xff\xff",
    "oversized": lambda peer: as_map(peer, type="ping", number=1, more=bytes(17 << 20)),
    "no type": lambda peer: as_map(peer, number=1),
    "unknown type": lambda peer: as_map(peer, type="teleport"),
    "unknown type, numbered": lambda peer: as_map(peer, type="teleport", seq=number(peer)),
    "of somebody else": lambda peer: as_map(peer, type="pong", number=0, src=bytes([1] * 16)),
    "of nobody": lambda peer: as_map(peer, type="pong", number=0, src=b""),
    "no incarnation": lambda peer: as_map(peer, type="pong", number=0, src=bytes(16)),
    "a number below zero": lambda peer: as_map(peer, type="committed", room=1, gen=1, status="ok", seq=-1),
    "a number beyond 63 bits": lambda peer: as_map(peer, type="committed", room=1, gen=1, status="ok", seq=2**63),
    "a text too long": lambda peer: as_map(
        peer, type="abort", room=99, gen=1, origin="decode", reason="x" * 5000, seq=number(peer)
    ),
    "a type that differs": lambda peer: as_map(peer, type="abort", room="five", gen=1, seq=number(peer)),
    "a wrong word": lambda peer: as_map(peer, type="done", room=98, gen=1, status="perhaps", seq=number(peer)),
    "numbered, but must not be": lambda peer: as_map(peer, type="pong", number=0, seq=number(peer)),
    "not numbered, but must be": lambda peer: as_map(peer, type="committed", room=97, gen=1, status="ok"),
    "of long ago": lambda peer: as_map(peer, type="bye", seq=1) if peer.next_seq > 1 else b"",
    "far ahead": lambda peer: as_map(peer, type="bye", seq=peer.next_seq + 5000),
    "not for this direction": lambda peer: as_map(peer, type="rollover_ack", session="x", seq=number(peer)),
    "acknowledges what was never sent": lambda peer: as_map(peer, type="pong", number=0, ack=2**62),
}


def number(peer: RawPeer) -> int:
    peer.next_seq += 1
    return peer.next_seq - 1


@pytest.mark.row("C7")
@pytest.mark.parametrize("name", GARBAGE)
async def test_a_prefill_outlives_any_frame_and_serves_the_next_room(name: str) -> None:
    async with cluster() as c:
        handle = expect(c)
        raw = await raw_decode(c)
        raw.send_frame(GARBAGE[name](raw))
        raw.send_frame(GARBAGE[name](raw))
        c.forward([spec()])
        assert (await handle).ok, "a bystander notices nothing"
        raw.send(raw.offer(6, 1, DST, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec(room=6)])
        done = await raw.hear(Done, 6)
        raw.send(Committed(room=6, gen=1, status="ok"))
        await until(lambda: c.prefill().poll(6, 1) is RoomStatus.SUCCESS)
        assert done.status == "ok"
        assert landed(c.prefill_pools[0], raw.pool)
        assert not unpickled
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C7")
@pytest.mark.parametrize("name", [name for name in GARBAGE if name != "of somebody else"])
async def test_a_decode_outlives_any_frame_and_its_room_goes_on(name: str) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        other = expect(c, room=7, pages=[20, 21, 22, 23], aux_slot=3)
        offer = await raw.hear(Offer)
        raw.send_frame(GARBAGE[name](raw))
        raw.send_frame(GARBAGE[name](raw))
        c.forward([spec(room=7)])
        assert (await other).ok, "a bystander notices nothing"
        raw.done(offer)
        assert (await handle).ok
        again = expect(c, peers=[raw.address], gen=2)
        raw.done(await raw.hear(Offer, nth=1))
        assert (await again).ok
        assert not unpickled
        await until(lambda: c.balanced() == [])


@pytest.mark.row("C7")
async def test_fields_that_nobody_knows_are_ignored() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        offer = encode(msgspec.structs.replace(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2), seq=number(raw)))
        raw.send_frame(msgspec.msgpack.encode(msgspec.msgpack.decode(offer) | raw.envelope() | {"of_tomorrow": [1]}))
        c.forward([spec()])
        assert (await raw.hear(Done)).status == "ok"


@pytest.mark.row("C7")
async def test_messages_are_taken_in_order_whatever_order_they_arrive_in(monkeypatch: pytest.MonkeyPatch) -> None:
    async with cluster() as c:
        heard = overhear(monkeypatch, sender(c))
        raw = await raw_decode(c)
        messages: list[Message] = [
            raw.offer(5, 1, DST),
            Abort(room=5, gen=1, origin="decode", reason="1"),
            Abort(room=6, gen=1, origin="decode", reason="2"),
        ]
        for seq in (3, 2, 2, 3, 1, 1, 2):
            raw.send(messages[seq - 1], seq=seq)
        await raw.flushed()
        assert [type(message) for message in heard] == [Offer, Abort, Abort]
        assert [message.seq for message in heard] == [1, 2, 3]


@pytest.mark.row("C7")
@pytest.mark.parametrize("kind", ["offer", "committed", "teleport"])
@pytest.mark.parametrize("known", ["never heard of", "registered", "offered", "ended"])
async def test_a_body_that_does_not_decode_fails_the_room_it_names_and_its_sender_is_told(
    kind: str, known: str
) -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        if known in ("registered", "ended"):
            c.forward([spec()])
        if known in ("offered", "ended"):
            raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        if known == "ended":
            await raw.hear(Done)
            raw.send(Committed(room=5, gen=1, status="ok"))
            await until(lambda: c.prefill().poll(*KEY) is RoomStatus.SUCCESS)
        raw.send_map(type=kind, room=5, gen=1, status=7, pages="none", seq=number(raw))
        abort, ack = await raw.hear(Abort, 5), await raw.hear(AbortAck, 5)
        assert (ack.in_doubt.pages, ack.unknown.pages) == (b"", b"")
        if known == "ended":
            assert c.prefill().poll(*KEY) is RoomStatus.SUCCESS
        else:
            assert "does not decode" in abort.reason
            assert c.prefill().poll(*KEY) is RoomStatus.FAILED
            assert c.forward([spec()]).refused


@pytest.mark.row("C7", "C1")
async def test_a_bad_body_fails_the_decodes_room_and_no_other() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        other = expect(c, room=7, pages=[20, 21, 22, 23], aux_slot=3)
        await raw.hear(Offer)
        raw.send_map(type="done", room=7, gen=1, status=7, seq=number(raw))  # not a room of this peer's
        raw.send_map(type="done", room=5, gen=1, status=7, seq=number(raw))
        assert "does not decode" in str((await handle).error)
        assert "does not decode" in (await raw.hear(Abort, 5)).reason
        c.forward([spec(room=7)])
        assert (await other).ok


# -- a peer that keeps sending such frames -------------------------------------------------------------------------

BAD_FRAMES: dict[str, Callable[[RawPeer], bytes]] = {
    "no envelope": lambda peer: b"garbage",
    "bad body": lambda peer: as_map(peer, type="pong", number=-1),
    "bad body, numbered": lambda peer: as_map(peer, type="teleport", seq=number(peer)),
    "of somebody else": lambda peer: as_map(peer, type="pong", number=0, src=bytes([1] * 16)),
}


@pytest.mark.row("C7")
@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_decode_that_keeps_sending_bad_frames_is_disconnected(name: str) -> None:
    async with cluster(config=dataclasses.replace(QUICK, max_bad_frames=10)) as c:
        handle = expect(c)
        raw = await raw_decode(c)
        raw.send(raw.offer(6, 1, DST, total_tokens=TOKENS))
        await until(lambda: len(sender(c).rooms) == 2)
        for _ in range(10):
            raw.send_frame(BAD_FRAMES[name](raw))
        await raw.flushed()
        assert c.prefill().poll(6, 1) is RoomStatus.WAITING, "ten are forgiven"
        raw.send_frame(BAD_FRAMES[name](raw))
        await until(lambda: c.prefill().poll(6, 1) is RoomStatus.FAILED)
        assert "undecodable" in str(c.prefill().result(6, 1).error)
        assert raw.me not in sender(c).reception.links
        for _ in range(100):
            raw.send_frame(BAD_FRAMES[name](raw))
        raw.send(raw.offer(7, 1, DST))
        assert "Hello" in (await raw.hear(Refused)).reason
        c.forward([spec()])
        assert (await handle).ok
        raw.next_seq, raw.ack = 1, 0
        await raw.connect(dial=2)
        raw.send(raw.offer(7, 1, DST, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec(room=7)])
        assert (await raw.hear(Done, 7)).status == "ok", "it may come back"


@pytest.mark.row("C7")
@pytest.mark.parametrize(
    "name",
    ["no envelope", "bad body", "bad body, numbered", "for somebody else", "a second Welcome", "a second Hello"],
)
async def test_a_prefill_that_keeps_sending_bad_frames_is_left(name: str) -> None:
    frames = BAD_FRAMES | {
        "for somebody else": lambda peer: as_map(peer, type="pong", number=0, dst=bytes([1] * 16)),
        "a second Welcome": lambda peer: as_map(peer, type="welcome", chosen="none"),
        "a second Hello": lambda peer: as_map(peer, type="hello", v=2),
    }
    async with cluster(config=dataclasses.replace(QUICK, max_bad_frames=10)) as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        for _ in range(10):
            raw.send_frame(frames[name](raw))
        await raw.flushed()
        assert not handle.poll().ended, "ten are forgiven"
        raw.send_frame(frames[name](raw))
        assert "undecodable" in str((await asyncio.wait_for(handle, SOON)).error)
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": DST, "aux": [2]}
        again = expect(c, gen=2, peers=[raw.address], pages=[20, 21, 22, 23], aux_slot=3)
        raw.done(await raw.hear(Offer, nth=1))
        assert (await again).ok, "the next room dials anew"
        raw.done(offer)  # of the connection that was left: means nothing any more
        await raw.flushed()
        assert not handle.units_free()


@pytest.mark.row("C4", "C7")
async def test_a_frame_of_another_process_means_that_ours_was_replaced() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        raw.send(AbortAck(room=5, gen=1, session=offer.session), src=bytes([1] * 16))
        assert "restarted" in str((await handle).error)
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": DST, "aux": [2]}, "it speaks for itself only"


# -- Hello and what answers it -------------------------------------------------------------------------------------


@pytest.mark.row("C7")
@pytest.mark.parametrize("lost", ["hello", "welcome"])
async def test_hello_is_repeated_until_it_is_answered(lost: str) -> None:
    async with cluster() as c:
        c.network.filter = losing = Losing(lost)
        handle = expect(c)
        await until(lambda: losing.lost >= 2)
        losing.active = False
        c.forward([spec()])
        assert (await handle).ok
        assert len(sender(c).reception.links) == 1


@pytest.mark.row("C7")
async def test_a_hello_that_comes_again_is_answered_again_and_changes_nothing() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        await until(lambda: sender(c).rooms.live(KEY))
        link = sender(c).reception.links[raw.me]
        welcomes = len(raw.all(Welcome))
        for dst in (b"", raw.peer, bytes([9] * 16)):
            raw.send(raw.hello(), dst=dst)
        await raw.flushed()
        assert len(raw.all(Welcome)) == welcomes + 3
        assert sender(c).reception.links == {raw.me: link}
        c.forward([spec()])
        assert (await raw.hear(Done)).status == "ok"


@pytest.mark.row("C7")
async def test_a_hello_of_a_new_dial_ends_the_old_one_and_an_old_one_nothing() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS))
        await until(lambda: sender(c).rooms.live(KEY))
        await raw.connect(dial=3)
        assert "dialled anew" in str(c.prefill().result(*KEY).error)
        raw.next_seq, raw.ack = 1, 0
        link = sender(c).reception.links[raw.me]
        raw.send(raw.hello(dial=1), dst=b"")  # it was on its way all the time
        raw.send(raw.hello(dial=2), dst=b"")
        raw.send(raw.offer(6, 1, DST, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec(room=6)])
        assert (await raw.hear(Done, 6)).status == "ok"
        assert sender(c).reception.links == {raw.me: link}


@pytest.mark.row("C7")
async def test_a_restarted_worker_is_known_by_its_name() -> None:
    async with cluster() as c:
        old, new, stranger = [await raw_decode(c, name=name) for name in ("decode-0", "", "")]
        for room, raw in enumerate((old, stranger), 5):
            raw.send(raw.offer(room, 1, DST, total_tokens=TOKENS))
        await until(lambda: len(sender(c).rooms) == 2)
        new.close()
        new = await raw_decode(c, name="decode-0")
        assert "restarted" in str(c.prefill().result(*KEY).error)
        assert c.prefill().poll(6, 1) is RoomStatus.WAITING
        assert old.me not in sender(c).reception.links


@pytest.mark.row("E3", "C7")
@pytest.mark.parametrize(
    "changes, reason, field",
    [
        ({"v": 2}, "another protocol version", "protocol"),
        ({"v": 0}, "another protocol version", "protocol"),
        ({"v_min": 2, "v_max": 3}, "no common protocol version", "protocol"),
        ({"v_min": 0, "v_max": 0}, "no common protocol version", "protocol"),
        ({"role": "prefill"}, "serves decode workers only", "role"),
    ],
)
async def test_a_hello_that_does_not_fit_is_refused_with_the_field(
    changes: dict[str, Any], reason: str, field: str
) -> None:
    async with cluster() as c:
        raw = RawDecode(c.network, c.addresses[0], Pool().layout)
        raw.send(raw.hello(**changes), dst=b"")
        refused = await raw.hear(Refused)
        assert reason in refused.reason
        assert field in refused.fields
        assert not sender(c).reception.links
        assert sender(c).counters["hello_refused"] == 1
        await raw.connect()


@pytest.mark.row("C7")
async def test_a_hello_that_does_not_decode_is_refused() -> None:
    async with cluster() as c:
        raw = RawDecode(c.network, c.addresses[0], Pool().layout)
        raw.send_map(type="hello", role="decode", layout={"page_size": -1})
        assert "bad body" in (await raw.hear(Refused)).reason
        await raw.connect()


@pytest.mark.row("E3", "C7")
@pytest.mark.parametrize(
    "changes, reason",
    [
        ({"v": 2}, "another protocol version"),
        ({"role": "decode"}, "dials prefill workers only"),
        ({"layout": None}, "no prefill worker of this version"),
    ],
)
async def test_a_decode_refuses_a_prefill_that_does_not_fit(changes: dict[str, Any], reason: str) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout, greets=False)
        handle = expect(c, peers=[raw.address])
        await raw.hear(Hello)
        raw.send_frame(msgspec.msgpack.encode(msgspec.msgpack.decode(encode(raw.hello())) | raw.envelope() | changes))
        error = (await handle).error
        assert error is not None
        assert isinstance(error.__cause__, RefusedError)
        assert reason in str(error)
        assert handle.units_free()


@pytest.mark.row("C4", "C7")
async def test_a_session_that_another_process_had_is_not_served() -> None:
    """Late writes of the earlier process's rooms may still arrive through that name."""
    async with cluster() as c:
        raw = RawDecode(c.network, c.addresses[0], Pool().layout, receiver(c).session)
        await raw.connect()
        handle = expect(c)
        error = (await handle).error
        assert error is not None
        assert isinstance(error.__cause__, RefusedError)
        assert "earlier process had this engine session" in str(error)
        assert handle.units_free()


@pytest.mark.row("C7", "C2")
async def test_a_frame_for_another_incarnation_is_answered_and_nothing_else() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        await until(lambda: sender(c).rooms.live(KEY))
        for dst in (bytes([7] * 16), b""):
            raw.send(Abort(room=5, gen=1, origin="decode", reason="for the dead"), dst=dst, seq=raw.next_seq)
        await until(lambda: len(raw.all(WrongIncarnation)) == 2)
        answer = raw.all(WrongIncarnation)[0]
        assert (answer.src, answer.meant) == (sender(c).me, bytes([7] * 16))
        assert c.prefill().poll(*KEY) is RoomStatus.WAITING
        c.forward([spec()])
        assert (await raw.hear(Done)).status == "ok", "nor was its number used up"
        assert not raw.all(Abort)


@pytest.mark.row("C7")
async def test_who_never_said_hello_is_told_to() -> None:
    async with cluster() as c:
        raw = RawDecode(c.network, c.addresses[0], Pool().layout)
        raw.peer = sender(c).me
        raw.send(raw.offer(5, 1, DST))
        assert "Hello" in (await raw.hear(Refused)).reason
        assert len(sender(c).rooms) == 0


@pytest.mark.row("C1", "C7")
async def test_a_prefill_that_forgot_us_ends_our_rooms_and_is_dialled_anew() -> None:
    async with cluster() as c:
        handle = expect(c)
        await until(lambda: sender(c).rooms.live(KEY))
        link = next(iter(sender(c).reception.links.values()))
        sender(c).peer_gone(link, "the test made it forget")
        assert "refused us" in str((await asyncio.wait_for(handle, SOON)).error)
        again = expect(c, gen=2, pages=[20, 21, 22, 23], aux_slot=3)
        c.forward([spec(gen=2)])
        assert (await again).ok


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
