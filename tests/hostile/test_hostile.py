"""Peers that lie: replays, pickles, other people's names and memory, answers made to break their reader.

Incidents of other systems are named where a test is about one: what it must never be here.
"""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.outcome import RoomStatus
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import POISON, Pool
from protocols.codec import decode_envelope
from protocols.errors import KvferryError, RefusedError
from protocols.ids import RoomKey
from protocols.layout import LayerBuffer, Layout
from protocols.leases import UnitState
from protocols.messages import (
    Abort,
    AbortAck,
    Bye,
    Committed,
    Coverage,
    Done,
    Offer,
    Refused,
    Rollover,
    Units,
    Welcome,
    WrongIncarnation,
)
from tests.peers.raw import QUICK, RawDecode, RawPrefill, settled
from tests.peers.scenes import (
    DST,
    KEY,
    TOKENS,
    cluster,
    engine_of,
    expect,
    held,
    raw_decode,
    receiver,
    sender,
    spec,
)
from tests.peers.test_zmq import real, stranger
from tests.support.waiting import until

pytestmark = [pytest.mark.row("N9"), pytest.mark.row("C7")]

NOTHING = np.array([], np.int64)


# -- replays -------------------------------------------------------------------------------------------------------


async def recorded(c: Cluster) -> list[bytes]:
    """Every frame with which a decode had its room served, from Hello to Committed."""
    handle = expect(c)
    c.forward([spec()])
    assert (await handle).ok
    await until(lambda: c.prefill().poll(*KEY) is RoomStatus.SUCCESS)
    await settled()
    frames = [frame for direction, frame in c.network.frames if direction == "to_prefill"]
    assert {decode_envelope(frame).type for frame in frames} >= {"hello", "offer", "committed"}
    return frames


async def test_frames_of_another_session_replayed_over_ones_own_connection() -> None:
    """Incident (TRT-LLM 17223): a control channel that takes whatever decodes. Here a frame counts only from the
    connection whose identity it names, with its number, once."""
    async with cluster() as c:
        frames = await recorded(c)
        thief = await raw_decode(c)
        before = sender(c).counters["bad_frames"]
        c.decode_pools[0].poison()
        for frame in frames[: QUICK.max_bad_frames - 1]:
            thief.send_frame(frame)
        await thief.flushed()
        assert sender(c).counters["bad_frames"] == before + min(len(frames), QUICK.max_bad_frames - 1)
        assert c.decode_pools[0].untouched(NOTHING)
        assert thief.pool.untouched(NOTHING)
        assert sender(c).counters["rooms_ok"] == 1


@pytest.mark.parametrize("gone", [False, True], ids=["its owner is here", "its owner has left"])
async def test_a_whole_session_replayed_under_its_own_identity(gone: bool) -> None:
    """Who can do this without keys is on the network path. It opens no room and writes nothing."""
    async with cluster() as c:
        frames = await recorded(c)
        me = receiver(c).dialer._me
        if gone:
            link = sender(c).reception.links[me]
            sender(c).peer_gone(link, "it left")
        c.decode_pools[0].poison()
        ghost = RawDecode(c.network, c.addresses[0], Pool().layout, me=me)
        for _ in range(3):
            for frame in frames:
                ghost.send_frame(frame)
        await settled(50)
        assert sender(c).counters["rooms_ok"] == 1
        assert c.decode_pools[0].untouched(NOTHING)
        assert sender(c).counters["repeated_frames"] > 0
        assert len(sender(c).rooms) == 0
        assert sender(c).counters["handler_errors"] == 0
        c.forward([spec()])
        assert c.prefill().poll(*KEY) is RoomStatus.SUCCESS, "the verdict stands"


async def test_a_session_replayed_to_the_next_process_on_that_address() -> None:
    async with cluster() as c, cluster(prefills=[Pool(seed=2)], decodes=[], seed=1) as other:
        frames = await recorded(c)
        ghost = RawDecode(other.network, other.addresses[0], Pool().layout, me=receiver(c).dialer._me)
        offers = [frame for frame in frames if decode_envelope(frame).type != "hello"]
        for frame in offers:
            ghost.send_frame(frame)
        await ghost.hear(WrongIncarnation, nth=len(offers) - 1)
        assert sender(other).counters["wrong_incarnation"] == len(offers)
        assert not len(sender(other).rooms)
        assert sender(other).rooms.remembered == 0


async def test_a_decode_hears_no_frame_twice() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        raw.done(offer)
        assert (await handle).ok
        again = expect(c, gen=2, peers=[raw.address])
        await raw.hear(Offer, nth=1)
        for direction, frame in list(c.network.frames):
            if direction == "to_decode":
                raw.send_frame(frame)
        await raw.flushed()
        assert not again.poll().ended
        assert receiver(c).counters["repeated_frames"] > 0
        raw.done(raw.all(Offer)[1])
        assert (await again).ok


# -- what does not decode ------------------------------------------------------------------------------------------


class Exploit:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_a_pickle_on_the_open_port_is_a_bad_frame(tmp_path: Path, side: str) -> None:
    """Incident (GHSA-hj4w-hm2g-p6w5): code execution through a pickle on a ZMQ port."""
    bombs = [pickle.dumps(Exploit(tmp_path / "executed"), protocol) for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]
    async with real() as pair:
        if side == "prefill":
            async with stranger(pair.prefill.address, identity=b"p" * 16) as sock:
                for bomb in bombs:
                    sock.send(bomb, zmq.NOBLOCK)
                    sock.send_multipart([bomb, bomb], zmq.NOBLOCK)
                await until(lambda: pair.sender.counters["bad_frames"] == 2 * len(bombs))
            handle = pair.expect()
            pair.forward()
        else:
            raw = RawPrefill(pair.decode_node.network, Pool().layout)
            handle = pair.expect(at=raw.address)
            offer = await raw.hear(Offer)
            for bomb in bombs:
                raw.send_frame(bomb)
                raw.send_map(type="done", seq=raw.next_seq + 1000, room=55, gen=1, reason=bomb)
            await until(lambda: pair.receiver.counters["bad_frames"] == len(bombs))
            raw.done(offer)
        assert (await asyncio.wait_for(handle, 3)).ok
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    "tag", sorted({"done", "abort_ack", "welcome", "refused", "rollover_ack", "wrong_incarnation"})
)
async def test_what_only_a_prefill_may_say_is_not_heard_from_a_decode(tag: str) -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(6, 1, DST))
        for nth in range(QUICK.max_bad_frames):
            numbered = {} if tag in ("welcome", "refused", "wrong_incarnation") else {"seq": raw.next_seq + nth}
            raw.send_map(type=tag, room=6, gen=1, junk=nth, **numbered)
        await settled()
        assert sender(c).counters["unexpected_messages"] == QUICK.max_bad_frames
        assert c.prefill().poll(6, 1) is RoomStatus.WAITING
        raw.send_map(type=tag, room=6, gen=1)
        await until(lambda: raw.me not in sender(c).reception.links)
        assert c.prefill().poll(6, 1) is RoomStatus.FAILED


async def test_what_follows_a_goodbye_is_not_heard() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.next_seq = 2
        raw.send(Bye())
        raw.send(raw.offer(6, 1, DST))
        raw.send(Abort(room=7, gen=1, origin="decode", reason=""))
        raw.next_seq = 1
        raw.send(Abort(room=9, gen=1, origin="decode", reason="the gap closes, and four messages are ready at once"))
        await settled()
        assert not len(sender(c).rooms)
        assert [sender(c).rooms.verdict(RoomKey(room, 1)) is None for room in (9, 6, 7)] == [False, True, True]
        assert raw.me not in sender(c).reception.links


@pytest.mark.parametrize("name", ["what", "self", "hint", "address", "args", "data", "__class__", "dtype", "x" * 3000])
async def test_a_refusal_may_name_its_fields_as_it_likes(name: str) -> None:
    """The names became arguments of an error: `what` and `address` raised in the dialer, and the room hung."""
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout, greets=False)
        handle = expect(c, peers=[raw.address])
        await until(lambda: raw.peer)
        raw.send(Refused(reason="because", fields={name: "y" * 10_000} | {f"f{nth}": "z" for nth in range(200)}))
        error = (await asyncio.wait_for(handle, 1)).error
        assert error is not None
        assert "because" in str(error)
        assert isinstance(error.__cause__, RefusedError)
        assert error.__cause__.data["address"] == raw.address
        assert len(str(error)) < 10_000


async def test_what_a_peer_says_starts_no_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(6, 1, DST))
        raw.send(Abort(room=6, gen=1, origin="decode", reason="over\nWARNING kvferry: all is well \x1b[2J\u202e"))
        await raw.hear(AbortAck)
        line = next(record.getMessage() for record in caplog.records if "room 6.1" in record.getMessage())
        assert line.isprintable()
        assert "over\\nWARNING" in line


# -- generations and answers ---------------------------------------------------------------------------------------


async def test_answers_for_another_generation_change_nothing() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, gen=5, peers=[raw.address])
        offer = await raw.hear(Offer)
        for gen in (0, 1, 4, 6, 2**64 - 1):
            raw.done(offer, gen=gen)
            raw.send(Abort(room=5, gen=gen, origin="prefill", reason="not yours"))
            raw.send(AbortAck(room=5, gen=gen, session=offer.session))
        await raw.flushed()
        assert not handle.poll().ended
        assert receiver(c).counters["late_messages"] == 15
        raw.done(offer)
        assert (await handle).ok


TORN: dict[str, Units] = {
    "torn": Units(pages=b"123"),
    "negative": Units(pages=(-1).to_bytes(4, "little", signed=True)),
    "torn rows": Units(state=b"1"),
}


@pytest.mark.parametrize("name", TORN)
@pytest.mark.row("C4")
async def test_an_acknowledgement_that_cannot_be_read_frees_nothing(name: str) -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        raw.quiet(offer, in_doubt=TORN[name])
        await raw.flushed()
        assert receiver(c).counters["bad_messages"] == 1
        assert receiver(c).counters["handler_errors"] == 0
        assert not handle.units_free()
        raw.quiet(offer)
        await until(handle.units_free)


@pytest.mark.row("C4")
async def test_an_acknowledgement_that_names_units_of_others_touches_none_of_them() -> None:
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        other = expect(c, room=6, pages=[20, 21, 22, 23], aux_slot=3)
        handle = expect(c, peers=[raw.address])
        offer = await raw.hear(Offer)
        everything = Units(pages=np.arange(60, dtype="<i4").tobytes(), aux=(0, 1, 2, 3, 2**40), state=b"")
        raw.quiet(offer, in_doubt=everything, unknown=everything)
        await raw.flushed()
        assert held(receiver(c), UnitState.LEASED, key=RoomKey(6, 1)) == {"page": [20, 21, 22, 23], "aux": [3]}
        assert held(receiver(c), UnitState.IN_DOUBT) == {"page": DST, "aux": [2]}
        c.forward([spec(room=6)])
        assert (await other).ok
        assert not handle.units_free()


BOMBS: dict[str, tuple[Coverage, ...]] = {
    "a buffer thousands of times": (Coverage((0,) * 4096, 0, 64, tuple((nth, 1) for nth in range(2000))),),
    "positions beyond any": (Coverage((0,), 0, 64, ((0, 2**62), (2**62, 2**62))),),
    "a part of an item": (Coverage((0,), 1, 2**62, ((0, 4),)),),
    "a buffer that is not there": (Coverage((2**62,), 0, 64, ((0, 4),)),),
    "nothing": (),
}


@pytest.mark.parametrize("name", BOMBS)
@pytest.mark.parametrize("digest", [False, True])
async def test_a_proof_that_proves_nothing_commits_nothing(name: str, digest: bool) -> None:
    async with cluster(digest=digest) as c:
        raw = RawPrefill(c.network, Pool().layout)
        handle = expect(c, peers=[raw.address])
        good = expect(c, room=6, pages=[20, 21, 22, 23], aux_slot=3)
        raw.done(await raw.hear(Offer), coverage=BOMBS[name])
        assert "overage" in str((await asyncio.wait_for(handle, 2)).error)
        c.forward([spec(room=6)])
        assert (await good).ok
        assert receiver(c).counters["handler_errors"] == 0


async def test_committed_before_anything_was_sent_is_no_success() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2))
        raw.send(Committed(room=5, gen=1, status="ok"))
        await raw.flushed()
        assert c.prefill().poll(*KEY) is RoomStatus.WAITING
        c.forward([spec()])
        await raw.hear(Done)
        assert c.prefill().poll(*KEY) is not RoomStatus.SUCCESS
        raw.send(Committed(room=5, gen=1, status="ok"))
        await until(lambda: c.prefill().poll(*KEY) is RoomStatus.SUCCESS)


# -- other people's memory -----------------------------------------------------------------------------------------


def lies(pool: Pool, about: Pool) -> Layout:
    """The layout of ``pool`` with the addresses of ``about``."""
    theirs = {(buffer.kind, buffer.layer): buffer for buffer in about.layout.buffers}
    moved = tuple(
        msgspec.structs.replace(buffer, address=theirs[(buffer.kind, buffer.layer)].address)
        for buffer in pool.layout.buffers
    )
    return msgspec.structs.replace(pool.layout, buffers=moved)


async def victim(c: Cluster) -> None:
    """A decode whose engine the prefill knows, and whose memory is poison again."""
    handle = expect(c, room=99)
    c.forward([spec(room=99)])
    assert (await handle).ok
    c.decode_pools[0].poison()


@pytest.mark.row("E5")
@pytest.mark.parametrize("how", ["Hello", "Rollover"])
async def test_nobody_is_written_to_for_somebody_else(how: str) -> None:
    """A worker names another's session and memory: the prefill would be the one that overwrites it."""
    async with cluster() as c:
        await victim(c)
        theirs = receiver(c).session
        thief = (
            await raw_decode(c) if how == "Rollover" else RawDecode(c.network, c.addresses[0], Pool().layout, theirs)
        )
        layout = lies(Pool(), c.decode_pools[0])
        if how == "Hello":
            await thief.connect(layout=layout)
            assert thief.all(Welcome)[-1].session_reused
            assert thief.me not in sender(c)._contacts._peers, "nor is that session probed for it"
        else:
            thief.send(Rollover(old_session=thief.session, session=theirs, layout=layout, deadline_ms=5000))
            assert "another decode worker's" in (await thief.hear(Refused)).reason
        thief.send(thief.offer(5, 1, [40, 41, 42, 43], session=theirs, total_tokens=TOKENS, aux_slot=7))
        c.forward([spec()])
        if how == "Hello":
            assert "session" in (await thief.hear(Abort, 5)).reason
        else:
            assert "Hello first" in (await thief.hear(Refused, nth=1)).reason
        await settled()
        assert c.decode_pools[0].untouched(NOTHING)
        assert bool((c.decode_pools[0].arrays[("aux", 0)] == POISON).all())
        assert bool((c.decode_pools[0].arrays[("scratch", 0)] == POISON).all()), "not even the probe's byte"
        again = expect(c, room=100)
        c.forward([spec(room=100)])
        assert (await again).ok, "and its owner goes on"


async def test_a_session_that_no_room_ever_used_is_not_kept_from_its_owner() -> None:
    """Nobody can squat on the names of engines by saying Hello and leaving."""
    async with cluster() as c:
        squatter = RawDecode(c.network, c.addresses[0], Pool().layout, receiver(c).session)
        await squatter.connect()
        squatter.send(Bye())
        await until(lambda: squatter.me not in sender(c).reception.links)
        handle = expect(c)
        c.forward([spec()])
        assert (await handle).ok


numbers_ = st.one_of(
    st.integers(0, 2**63 - 1),
    st.sampled_from([0, 1, 63, 64, 65, 4096, 2**31 - 1, 2**31, 2**62, 2**63 - 1, 2**63 - 4096]),
)
crafted = st.lists(
    st.tuples(
        st.integers(0, 11),
        st.sampled_from(["address", "nbytes", "item_len", "id", "kind", "layer", "hooked"]),
        numbers_,
        st.sampled_from(["k", "v", "aux", "state", "scratch", "draft_k", "mla", "x"]),
    ),
    max_size=6,
)


def changed(layout: Layout, changes: list[tuple[int, str, int, str]]) -> dict[str, Any] | None:
    """The layout as it travels, with fields of its buffers replaced; None where that is no layout."""
    plain: dict[str, Any] = msgspec.to_builtins(layout)
    for at, field, number, kind in changes:
        buffer = plain["buffers"][at % len(plain["buffers"])]
        buffer[field] = kind if field == "kind" else bool(number & 1) if field == "hooked" else number
        if field == "item_len" and number:
            buffer["nbytes"] = max(number, number * (buffer["nbytes"] // number))
    try:
        msgspec.convert(plain, Layout)
    except (msgspec.ValidationError, KvferryError):
        return None
    return plain


def inside(buffers: tuple[LayerBuffer, ...], address: int, length: int) -> bool:
    return any(b.address <= address and address + length <= b.address + b.nbytes for b in buffers)


@pytest.mark.row("E5")
@settings(max_examples=60, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])
@given(crafted, st.lists(st.integers(-1, 70), min_size=4, max_size=4))
def test_a_crafted_layout_moves_no_read_and_no_write_out_of_its_regions(
    changes: list[tuple[int, str, int, str]], pages: list[int]
) -> None:
    """Whatever a Hello claims: what the prefill submits is read from its own regions and goes to the claimed ones,
    and the engine at the other end, which knows its real ones, lets nothing else be written."""
    asyncio.run(crafted_layout(changes, pages))


async def crafted_layout(changes: list[tuple[int, str, int, str]], pages: list[int]) -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        honest = raw.layout
        plain = changed(honest, changes)
        hello = msgspec.msgpack.decode(msgspec.msgpack.encode(raw.hello(dial=2)))
        raw.send_map(**hello | {"layout": plain or {}, "src": raw.me})
        await settled(60)
        link = sender(c).reception.links.get(raw.me)
        if link is None or link.hello is None or link.dial != 2:
            assert sender(c).counters["hello_refused"] == 1
            return
        raw.next_seq, raw.ack, raw.dial = 1, 0, 2
        raw.send(raw.offer(5, 1, pages, total_tokens=TOKENS, aux_slot=2))
        c.forward([spec()])
        await until(lambda: raw.all(Done, 5) or raw.all(AbortAck, 5))
        for entry in engine_of(c).log:
            for at in range(len(entry.blocks)):
                length = int(entry.blocks.length[at])
                assert inside(sender(c).layout.buffers, int(entry.blocks.src[at]), length)
                assert inside(link.hello.layout.buffers, int(entry.blocks.dst[at]), length)
        clean = [page for page in pages if 0 <= page < 64] if len(set(pages)) == 4 else []
        assert raw.pool.untouched(np.array(clean, np.int64))
        assert sender(c).counters["handler_errors"] == 0
