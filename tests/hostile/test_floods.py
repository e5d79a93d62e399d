"""Floods and slow peers: what one origin can make us keep or do is bounded, and its neighbours do not notice."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import numpy as np
import pytest
import zmq

from orchestrator.clock import LoopClock
from orchestrator.config import Config
from orchestrator.contacts import ATTEMPTS_PER_ORIGIN
from orchestrator.engines.base import Engine, Probe
from orchestrator.engines.faulty import FaultyEngine
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.guests import MAX_INCARNATIONS, MAX_SESSIONS, Guests
from orchestrator.node import Node
from orchestrator.sender import MAX_OWED
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from orchestrator.wire import BURST, Origin
from protocols.channel import MAX_HELD
from protocols.codec import encode
from protocols.errors import AbortedError, BrokenPeerError
from protocols.ids import Incarnation, RoomKey, Session
from protocols.messages import Abort, AbortAck, Bye, Offer, Ping, Refused, Rollover, RolloverAck
from tests.hostile import zmtp
from tests.peers.raw import QUICK, RawDecode, RawPrefill
from tests.peers.scenes import DST, TOKENS, cluster, expect, raw_decode, receiver, sender, spec
from tests.peers.test_zmq import real
from tests.support.waiting import until

pytestmark = [pytest.mark.row("N9"), pytest.mark.row("C7")]

SMALL = dataclasses.replace(
    QUICK, max_peers=20, max_peers_per_origin=8, max_kept_offers=16, max_peer_tombstones=50, silence_s=30.0
)
HERE, THERE = Origin(address="192.0.2.1"), Origin(address="192.0.2.2")
numbers = itertools.count(1)


def fresh(c: Cluster, origin: Origin, **hello: Any) -> RawDecode:
    """A decode nobody has seen before says Hello."""
    raw = RawDecode(c.network, c.addresses[0], Pool().layout, f"nowhere:{next(numbers)}")
    c.network.origins[raw.me] = origin
    raw.send(raw.hello(**hello), dst=b"")
    return raw


async def played(c: Cluster, origin: Origin) -> RawDecode:
    """A decode that a test plays, with an engine, from that origin."""
    pool, engine = Pool(), c.fabric.engine()
    for buffer in pool.layout.buffers:
        engine.register(buffer.address, buffer.nbytes)
    raw = RawDecode(c.network, c.addresses[0], pool.layout, engine.session)
    raw.pool = pool
    c.network.origins[raw.me] = origin
    await raw.connect()
    return raw


# -- who there is --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("origin", [HERE, Origin(key="k" * 40)], ids=["address", "key"])
async def test_a_flood_of_fresh_identities_fills_its_own_share_and_nothing_else(origin: Origin) -> None:
    async with cluster(config=SMALL) as c:
        reception = sender(c).reception
        good = await played(c, THERE)
        flood = [fresh(c, origin) for _ in range(300)]
        await good.flushed()
        assert len(reception.links) == 1 + SMALL.max_peers_per_origin
        assert len(sender(c)._contacts._peers) == len(reception.links)
        assert len(sender(c)._tasks) <= len(reception.links)
        assert len(reception.guests._users) == len(reception.links), "whose rooms were never here has no session"
        assert sender(c).counters["peers_refused"] == 300 - SMALL.max_peers_per_origin
        assert "too many" in (await flood[-1].hear(Refused)).reason
        await played(c, THERE)
        handle = expect(c)
        c.forward([spec()])
        assert (await handle).ok


async def test_at_the_limit_of_all_it_is_the_largest_crowd_that_makes_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.guests.FRESH_S", 0.0)
    async with cluster(config=SMALL) as c:
        links = sender(c).reception.links
        for nth in range(5):
            fresh(c, Origin(address=f"192.0.2.{nth + 10}"))
        for _ in range(8):
            fresh(c, HERE)
        for _ in range(7):
            fresh(c, THERE)
        await until(lambda: len(links) == SMALL.max_peers)
        late = fresh(c, Origin(address="192.0.2.99"))
        await until(lambda: late.me in links)
        counts = [sum(link.origin == origin for link in links.values()) for origin in (HERE, THERE)]
        assert counts == [7, 7]
        assert len(links) == SMALL.max_peers


async def test_whose_rooms_were_here_does_not_make_place_for_a_flood(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.guests.FRESH_S", 0.0)
    async with cluster(config=SMALL) as c:
        links = sender(c).reception.links
        proven = await played(c, HERE)
        proven.send(proven.offer(7, 1, DST))
        await proven.flushed()
        proven.send(Abort(room=7, gen=1, origin="decode", reason="done with it"))
        await proven.hear(AbortAck, 7)
        assert not links[proven.me].rooms
        for _ in range(100):
            fresh(c, HERE)
        await proven.flushed()
        assert proven.me in links
        assert len(links) == SMALL.max_peers_per_origin
        assert sender(c).counters["peers_sent_away"] == 101 - SMALL.max_peers_per_origin


async def test_workers_that_died_without_a_name_make_place_for_their_successors() -> None:
    async with cluster(config=SMALL) as c:
        for nth in range(30):
            raw = await played(c, HERE)
            raw.send(raw.offer(100 + nth, 1, DST, total_tokens=TOKENS, aux_slot=2))
            c.forward([spec(room=100 + nth)])
            await until(lambda nth=nth: c.prefill().poll(100 + nth, 1).name == "TRANSFERRING")  # type: ignore[misc]
            raw.close()  # and never heard of again
            sender(c).abort(RoomKey(100 + nth, 1), AbortedError("its silence was noticed"))
        assert len(sender(c).reception.links) <= SMALL.max_peers_per_origin
        await until(lambda: not c.balanced())


async def test_whose_rooms_are_open_stays() -> None:
    async with cluster(config=SMALL) as c:
        mine = [await played(c, HERE) for _ in range(SMALL.max_peers_per_origin)]
        for nth, raw in enumerate(mine):
            raw.send(raw.offer(nth, 1, DST))
            await raw.flushed()
        refused = await fresh(c, HERE).hear(Refused)
        assert refused.fields["limit_per_origin"] == str(SMALL.max_peers_per_origin)
        assert all(raw.me in sender(c).reception.links for raw in mine)


def test_what_is_remembered_of_names_is_bounded() -> None:
    guests = Guests(Config(), LoopClock(), Counter())
    for nth in range(MAX_INCARNATIONS + 1000):
        guests.note(Incarnation(nth.to_bytes(16, "big")), Origin(key="flood"))
        guests.claim(f"flood:{nth}", Incarnation(nth.to_bytes(16, "big")), HERE)
        if nth == 0:
            guests.note(Incarnation(b"g" * 16), Origin(key="good"))
            guests.claim("good:1", Incarnation(b"g" * 16), THERE)
    assert len(guests._keys) == MAX_INCARNATIONS
    assert len(guests._users) == len(guests._sessions) == MAX_SESSIONS
    assert guests.owns("good:1", Incarnation(b"g" * 16)), "who names little is not forgotten for who names much"
    assert guests.is_foreign(Incarnation(b"g" * 16), Origin(key="flood"), None)


class BlackHoles(FaultyEngine):
    """Sessions called ``nowhere`` accept and never answer; how many are being tried at once is counted."""

    trying = tried = most = 0

    async def connect(self, session: Session, probe: Probe | None, timeout: float) -> None:
        if not session.startswith("nowhere"):
            return await super().connect(session, probe, timeout)
        self.trying, self.tried = self.trying + 1, self.tried + 1
        self.most = max(self.most, self.trying)
        try:
            await asyncio.sleep(timeout)
            raise BrokenPeerError("the peer did not answer in time")
        finally:
            self.trying -= 1


async def test_first_contacts_take_turns_within_an_origin_and_no_other_waits_for_them() -> None:
    holes: list[BlackHoles] = []

    def wrap(engine: Engine) -> Engine:
        holes.append(BlackHoles(engine))
        return holes[0]

    config = dataclasses.replace(QUICK, connect_timeout_s=1.0)
    async with Cluster(prefills=[Pool(seed=1)], decodes=[Pool()], config=config, wrap=wrap, digest=False) as c:
        flood = [fresh(c, HERE) for _ in range(3 * ATTEMPTS_PER_ORIGIN)]
        await until(lambda: holes[0].trying == ATTEMPTS_PER_ORIGIN)
        handle = expect(c)
        c.forward([spec()])
        assert (await asyncio.wait_for(handle, 2)).ok
        for raw in flood:
            raw.send(Bye(), dst=sender(c).me)
        for dial in range(5, 10):
            flood[0].send(flood[0].hello(dial=dial), dst=b"")
        await until(lambda: holes[0].tried > ATTEMPTS_PER_ORIGIN and holes[0].trying == 0)
        assert holes[0].most == ATTEMPTS_PER_ORIGIN, "who leaves frees no turn: the engine's thread goes on"
        assert holes[0].tried == ATTEMPTS_PER_ORIGIN + 1, "who left, or dialled anew, while it waited never had one"


# -- what is kept for them -----------------------------------------------------------------------------------------


async def test_a_flood_of_offers_pushes_out_its_own() -> None:
    async with cluster(config=SMALL) as c:
        good, flood = await played(c, THERE), await played(c, HERE)
        good.send(good.offer(7, 1, DST, total_tokens=TOKENS, aux_slot=2))
        await good.flushed()
        for room in range(1000, 1200):
            flood.send(flood.offer(room, 1, DST))
        await flood.flushed()
        assert len(sender(c).kept) == len(sender(c).rooms) == SMALL.max_kept_offers
        assert [abort.room for abort in flood.all(Abort)] == list(range(1000, 1200 - SMALL.max_kept_offers + 1))
        assert not good.all(Abort)
        c.forward([spec(room=7)])
        await until(lambda: c.prefill().poll(7, 1).name == "TRANSFERRING")
        assert sender(c).rooms.remembered <= SMALL.max_peer_tombstones
        assert len(sender(c).rooms._outcomes) <= SMALL.max_peer_tombstones + SMALL.max_kept_offers + 1


async def test_offers_are_weighed_by_their_pages() -> None:
    config = dataclasses.replace(SMALL, max_kept_pages=200)
    async with cluster(config=config) as c:
        good, flood = await played(c, THERE), await played(c, HERE)
        for room in range(10, 14):
            good.send(good.offer(room, 1, DST))
        for room in range(20, 25):
            flood.send(flood.offer(room, 1, list(range(60))))
        await good.flushed()
        await flood.flushed()
        assert [abort.room for abort in flood.all(Abort)] == [20, 21]
        assert not good.all(Abort)
        assert sender(c).kept._offers.weight == 4 * 4 + 3 * 60
        for room in (10, 22):
            sender(c).abort(RoomKey(room, 1), AbortedError("over"))
        assert sender(c).kept._offers.weight == 3 * 4 + 2 * 60, "what has ended weighs nothing"
        c.forward([spec(room=11, last=False, end_token=None, pages=[4])])
        await until(lambda: sender(c).kept._offers.weight == 2 * 4 + 2 * 60)


@pytest.mark.row("E5")
async def test_the_same_offer_a_thousand_times_is_one() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        offer = raw.offer(5, 1, DST, total_tokens=TOKENS, aux_slot=2)
        for _ in range(1000):
            raw.send(offer)
        for nth in range(100):
            raw.send(raw.offer(5, 1, [10 + nth % 40], total_tokens=4))
        await raw.flushed()
        room = sender(c).rooms.live(RoomKey(5, 1))
        assert room is not None
        assert len(room.destinations) == 1
        assert sender(c).counters["repeated_offers"] == 999
        assert sender(c).counters["other_offers"] == 100
        c.forward([spec()])
        await until(lambda: c.prefill().poll(5, 1).name == "TRANSFERRING")
        assert raw.pool.untouched(np.array(DST))
        assert not raw.all(Abort)


async def test_rooms_that_only_a_peer_named_are_remembered_within_a_bound() -> None:
    async with cluster(config=SMALL) as c:
        good, flood = await played(c, THERE), await played(c, HERE)
        good.send(Abort(room=7, gen=1, origin="decode", reason="before the prefill knew it"))
        await good.hear(AbortAck, 7)
        c.prefill().abort(8, 1)
        for room in range(1000, 2000):
            flood.send(Abort(room=room, gen=1, origin="decode", reason="x" * 1000))
        await flood.hear(AbortAck, 1999)
        assert len(flood.all(AbortAck)) == 1000, "each is answered"
        assert sender(c).rooms.remembered == SMALL.max_peer_tombstones + 1
        assert len(sender(c).rooms._outcomes) == SMALL.max_peer_tombstones + 1
        for room in (7, 8):
            assert c.forward([spec(room=room)]).refused, "the good peer's, and our own, are remembered"


async def test_a_peer_that_asks_and_acknowledges_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.sender.MAX_OWED", 100)
    assert MAX_OWED >= 2 * MAX_HELD, "a good one may have as many of its own under way"
    async with cluster(config=SMALL) as c:
        raw = await played(c, HERE)
        raw.alive = False
        raw.ack = 0
        link = sender(c).reception.links[raw.me]
        for room in range(1000, 1200):
            raw.send(Abort(room=room, gen=1, origin="decode", reason=""), ack=0)
        await until(lambda: raw.me not in sender(c).reception.links)
        assert link.closed
        assert link.unacked <= 101


async def test_replays_and_frames_from_the_future_are_counted_and_dropped() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        raw.send(raw.offer(6, 1, DST))
        await raw.flushed()
        for _ in range(500):
            raw.send(raw.offer(6, 1, DST), seq=1)
        for nth in range(500):
            raw.send(raw.offer(100 + nth, 1, DST), seq=raw.next_seq + MAX_HELD + nth)
        await raw.flushed()
        assert sender(c).counters["repeated_frames"] == 500
        assert sender(c).counters["early_frames"] == 500
        assert len(sender(c).rooms) == 1


async def test_a_flood_of_rollovers_leaves_one_timer_one_contact_and_everybody_elses_lane() -> None:
    async with cluster() as c:
        handle = expect(c)
        c.forward([spec()])
        assert (await handle).ok
        victim = Session(receiver(c).session)
        lane = sender(c).sessions.lanes[victim]
        raw = await raw_decode(c)
        before = raw.session
        for nth in range(300):
            raw.send(Rollover(old_session=before, session=f"x:{nth}", layout=raw.layout, deadline_ms=2_000_000_000))
            before = f"x:{nth}"
        raw.send(Rollover(old_session=victim, session="x:299", layout=raw.layout, deadline_ms=0))
        assert (await raw.hear(RolloverAck)).session == victim
        assert sender(c).sessions.lanes[victim] is lane
        assert len(sender(c).sessions._ending) == 1
        assert len(sender(c)._contacts._peers) == 2
        raw.send(Bye())
        await until(lambda: len(sender(c).sessions._ending) == 0)


# -- over real sockets ---------------------------------------------------------------------------------------------


@contextmanager
def flooding(address: str, make: Callable[[], list[bytes]], identity: bytes = b"") -> Iterator[list[int]]:
    """A thread that sends as fast as the socket takes it; the list holds how many it sent."""
    sent, stop = [0], threading.Event()

    def run() -> None:
        context = zmq.Context()
        sock = context.socket(zmq.DEALER)
        sock.setsockopt(zmq.LINGER, 0)
        sock.setsockopt(zmq.SNDTIMEO, 50)
        if identity:
            sock.setsockopt(zmq.IDENTITY, identity)
        sock.connect(address)
        while not stop.is_set():
            try:
                sock.send_multipart(make())
                sent[0] += 1
            except zmq.Again:
                pass
        sock.close()
        context.term()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield sent
    finally:
        stop.set()
        thread.join()


def frame(**fields: Any) -> bytes:
    return encode(Ping(number=1, src=b"f" * 16, dst=b"d" * 16, **fields))


FLOODS: dict[str, Callable[[], list[bytes]]] = {
    "garbage": lambda: [b"garbage"],
    "pings of nobody": lambda: [frame()],
    "a thousand parts": lambda: [b""] * 1000,
    "large ones": lambda: [bytes(1 << 20)],
}


@pytest.mark.parametrize("name", FLOODS)
async def test_a_flood_over_one_connection_leaves_the_others_their_turn(name: str) -> None:
    async with real(dataclasses.replace(QUICK, silence_s=5.0)) as pair:
        before = pair.expect()
        pair.forward()
        assert (await before).ok
        with flooding(pair.prefill.address, FLOODS[name], b"f" * 16) as sent:
            await until(lambda: sent[0] > 100)
            for gen in range(2, 12):
                handle = pair.expect(gen)
                pair.forward(gen=gen)
                assert (await asyncio.wait_for(handle, 3)).ok
        assert sum(pair.sender.counters[it] for it in ("bad_frames", "wrong_incarnation")) > 0


async def test_a_message_of_a_million_parts_does_not_hold_the_loop() -> None:
    async with real() as pair:
        connection = await zmtp.Connection.to(pair.prefill.address)
        await connection.shake_hands(b"m" * 16)
        connection.send(bytes([zmtp.MORE, 0]) * 200_000 + bytes([0, 0]))
        await connection.writer.drain()
        turns, most = 0, 0.0
        async with asyncio.timeout(10):
            while pair.sender.counters["bad_frames"] == 0:
                start = time.thread_time()
                await asyncio.sleep(0)
                turns, most = turns + 1, max(most, time.thread_time() - start)
        assert turns > 200_000 // BURST, "the loop had its turns"
        assert most < 0.05, "taken at once they are 0.2 s and more"
        connection.close()


async def trickle(connection: zmtp.Connection, data: bytes, pause: float = 0.02) -> None:
    """One byte, and a while nothing."""
    for nth in range(len(data)):
        connection.send(data[nth : nth + 1])
        await asyncio.sleep(pause)


async def test_peers_that_send_a_byte_now_and_then_block_nobody_and_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("orchestrator.wire.HANDSHAKE_MS", 400)
    async with real() as pair:
        slow = [await zmtp.Connection.to(pair.prefill.address) for _ in range(20)]
        mute = [await zmtp.Connection.to(pair.prefill.address) for _ in range(200)]
        tasks = [asyncio.ensure_future(trickle(each, zmtp.GREETING + zmtp.ready(b"s" * 16))) for each in slow]
        for gen in range(1, 6):
            handle = pair.expect(gen)
            pair.forward(gen=gen)
            assert (await asyncio.wait_for(handle, 3)).ok
        async with asyncio.timeout(5):
            await asyncio.gather(*(each.ended() for each in (*slow, *mute)))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in (*slow, *mute):
            each.close()


async def test_a_frame_that_never_ends_is_never_heard() -> None:
    async with real() as pair:
        half = await zmtp.Connection.to(pair.prefill.address)
        await half.shake_hands(b"h" * 16)
        half.send(zmtp.header(16 << 20))  # and then a byte now and then
        task = asyncio.ensure_future(trickle(half, bytes(1000)))
        handle = pair.expect()
        pair.forward()
        assert (await asyncio.wait_for(handle, 3)).ok
        assert pair.sender.counters["bad_frames"] == 0
        task.cancel()
        half.close()


@pytest.mark.parametrize("length", [(16 << 20) + 1, 1 << 40, (1 << 63) - 1])
async def test_a_frame_that_claims_to_be_larger_than_any_ends_its_connection(length: int) -> None:
    async with real() as pair:
        liar = await zmtp.Connection.to(pair.prefill.address)
        await liar.shake_hands(b"l" * 16)
        liar.send(zmtp.header(length) + b"x")
        async with asyncio.timeout(3):
            await liar.ended()
        handle = pair.expect()
        pair.forward()
        assert (await handle).ok
        liar.close()


@asynccontextmanager
async def slow_server(answer: bytes, pause: float) -> AsyncIterator[str]:
    """A server that says this to everybody, a byte after each pause, and nothing more; its address."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        tasks.append(asyncio.ensure_future(trickle(zmtp.Connection(reader, writer), answer, pause)))

    writers: list[asyncio.StreamWriter] = []
    tasks: list[asyncio.Future[None]] = []
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for writer in writers:
            writer.transport.abort()
        await server.wait_closed()


@pytest.mark.parametrize("pause", [0.05, 0.0], ids=["a byte now and then", "the handshake, then nothing"])
async def test_a_prefill_that_answers_slowly_fails_its_own_rooms_only(pause: float) -> None:
    answer = zmtp.GREETING + zmtp.ready(b"").replace(b"DEALER", b"ROUTER")
    impatient = dataclasses.replace(QUICK, connect_timeout_s=0.5)
    async with real(decode_config=impatient) as pair, slow_server(answer, pause) as slow:
        handles = pair.expect(1, at=slow), pair.decode.expect(6, 1, [pair.prefill.address], [20], total_tokens=4)
        with pair.prefill.begin_forward([spec(room=6, pages=[4], end_token=4, aux_slot=None)]) as forward:
            forward.layer_end(0)
        assert (await asyncio.wait_for(handles[1], 3)).ok
        assert "does not answer" in str((await asyncio.wait_for(handles[0], 3)).error)
        assert handles[0].units_free(), "it was never offered anything"
        await pair.decode_node.stop()


async def test_a_prefill_that_asks_a_byte_of_nothing_holds_up_no_room_of_another() -> None:
    """A hostile prefill floods its decode: another prefill's room goes on."""
    async with cluster() as c:
        raw = RawPrefill(c.network, Pool().layout)
        doomed = expect(c, gen=1, peers=[raw.address])
        offer = await raw.hear(Offer)
        for nth in range(200):
            raw.send(AbortAck(room=nth, gen=9, session=""))
            raw.send(Ping(number=nth))
        good = expect(c, room=6, pages=[20, 21, 22, 23], aux_slot=3)
        c.forward([spec(room=6)])
        assert (await good).ok
        assert receiver(c).counters["late_messages"] >= 200
        raw.done(offer)
        assert (await doomed).ok


async def test_nothing_of_a_flooded_prefill_is_left_when_it_stops() -> None:
    fabric, src = LoopbackFabric(), Pool(seed=1)
    node = Node()
    prefill = node.start_prefill(fabric.engine(), src.layout, config=SMALL)
    with flooding(prefill.address, FLOODS["pings of nobody"]) as sent:
        await until(lambda: sent[0] > 100)
        async with asyncio.timeout(5):
            await node.stop()
