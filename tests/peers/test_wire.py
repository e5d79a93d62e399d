"""The control wire under peers that send anything at all: what is answered, what is dropped, and who lives on (C7)."""

from __future__ import annotations

import asyncio
import dataclasses
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.codec import encode
from protocols.leases import UnitState
from protocols.messages import (
    Abort,
    AbortAck,
    Committed,
    Done,
    Message,
    Offer,
    Refused,
)
from tests.peers.raw import QUICK, RawPeer, RawPrefill, number, overhear
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    TOKENS,
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
