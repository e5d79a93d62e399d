"""Hello and what answers it: who may talk, who was replaced, which dial a frame belongs to (C7)."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from orchestrator.outcome import RoomStatus
from orchestrator.testing.pool import Pool
from protocols.codec import encode
from protocols.errors import RefusedError
from protocols.messages import (
    Abort,
    Done,
    Hello,
    Refused,
    Welcome,
    WrongIncarnation,
)
from tests.peers.raw import RawDecode, RawPrefill
from tests.peers.scenes import (
    DST,
    KEY,
    SOON,
    TOKENS,
    Losing,
    cluster,
    expect,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.support.waiting import until

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
