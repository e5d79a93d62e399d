"""Real sockets over loopback: connections that break, freeze, come back, belong to somebody else, or speak nonsense."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import pytest
import zmq

from orchestrator.config import Config
from orchestrator.decode import Decode, RoomHandle
from orchestrator.engines.faulty import Fault, FaultyEngine
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.node import Node
from orchestrator.outcome import RoomStatus
from orchestrator.prefill import Prefill
from orchestrator.receiver import Receiver
from orchestrator.sender import Sender
from orchestrator.testing.pool import Pool
from orchestrator.wire import ZmqNetwork
from protocols.codec import encode
from protocols.errors import BrokenPeerError, BusyError, ConfigError
from protocols.leases import UnitState
from protocols.messages import Bye, Committed, Done, Offer, Refused
from tests.peers.raw import HASTY, QUICK, RawDecode, RawPrefill, overhear, settled
from tests.peers.scenes import DST, KEY, TOKENS, held, landed, spec
from tests.support.waiting import until

LOCALHOST = "127.0.0.1"
pytestmark = pytest.mark.row("C7")


class Pair:
    """A prefill and a decode with sockets of their own, engines of one fabric, and the stack that ends them."""

    def __init__(self, stack: AsyncExitStack, config: Config, decode_config: Config) -> None:
        self.stack = stack
        self.config = config
        self.decode_config = decode_config
        self.fabric = LoopbackFabric()
        self.src, self.dst = Pool(seed=1), Pool()
        self.hold = Fault()
        self.decode: Decode
        self.prefill: Prefill

    async def start(self) -> None:
        self.prefill_node, self.prefill = await self.start_prefill("tcp://127.0.0.1:0")
        self.decode_node = await self.stack.enter_async_context(Node())
        self.decode = self.decode_node.start_decode(self.fabric.engine(), self.dst.layout, self.decode_config)

    async def start_prefill(self, bind: str) -> tuple[Node, Prefill]:
        node = await self.stack.enter_async_context(Node())
        engine = FaultyEngine(self.fabric.engine(), self.hold)
        return node, node.start_prefill(engine, self.src.layout, bind, self.config)

    @property
    def sender(self) -> Sender:
        assert self.prefill_node.sender is not None
        return self.prefill_node.sender

    @property
    def receiver(self) -> Receiver:
        assert self.decode_node.receiver is not None
        return self.decode_node.receiver

    def expect(self, gen: int = 1, *, at: str = "", pages: list[int] | None = None, aux_slot: int = 2) -> RoomHandle:
        address = at or self.prefill.address
        return self.decode.expect(5, gen, [address], pages or DST, total_tokens=TOKENS, aux_slot=aux_slot)

    def forward(self, prefill: Prefill | None = None, **changes: int) -> None:
        with (prefill or self.prefill).begin_forward([spec(**changes)]) as forward:
            for layer in range(4):
                forward.layer_end(layer)

    def release(self) -> None:
        self.hold.release()
        self.prefill_node.pacer.kick()


@asynccontextmanager
async def real(config: Config = QUICK, decode_config: Config | None = None) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        pair = Pair(stack, config, decode_config or config)
        await pair.start()
        yield pair


class Road:
    """A TCP relay in front of a prefill. It can be cut, and frozen: then bytes vanish, and nobody sees an end."""

    def __init__(self, target: str) -> None:
        self._port = int(target.rpartition(":")[2])
        self._writers: set[asyncio.StreamWriter] = set()
        self._upstream: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0
        self._frozen = 0
        self.address = ""

    async def __aenter__(self) -> Road:
        self._server = await asyncio.start_server(self._serve, LOCALHOST, 0)
        self.address = f"tcp://{LOCALHOST}:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.cut()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there, back = await asyncio.open_connection(LOCALHOST, self._port)
        self._writers.add(writer)
        self._upstream.add(back)
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.get_running_loop().create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        mine = self.connections
        with suppress(OSError):
            while data := await source.read(1 << 16):
                if mine > self._frozen:
                    sink.write(data)
                    await sink.drain()

    def freeze(self) -> None:
        """What is sent over the connections there are vanishes from now on; a new one carries again."""
        self._frozen = self.connections

    def cut(self) -> None:
        """Both ends see the connection break."""
        self.leave()
        for writer in self._upstream:
            writer.transport.abort()
        self._upstream.clear()

    def leave(self) -> None:
        """Only the decode sees it break: to the prefill the old connection looks alive."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()


# -- connections ---------------------------------------------------------------------------------------------------


@pytest.mark.row("C1")
@pytest.mark.parametrize("end", ["both ends see it", "half open"])
@pytest.mark.usefixtures("quick_retries")
async def test_a_room_survives_a_broken_connection(monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """The same identity comes back, and takes the place of the connection that the prefill may still believe in."""
    async with real() as pair, Road(pair.prefill.address) as road:
        to_prefill, to_decode = overhear(monkeypatch, pair.sender), overhear(monkeypatch, pair.receiver)
        pair.hold.hold = True
        handle = pair.expect(at=road.address)
        pair.forward()
        await until(lambda: pair.sender.engine.pending > 0)
        if end == "half open":
            road.leave()
        else:
            road.cut()
        pair.release()
        assert (await asyncio.wait_for(handle, 5)).ok
        await until(lambda: pair.prefill.poll(*KEY) is RoomStatus.SUCCESS)
        assert road.connections == 2
        assert [type(message) for message in to_prefill] == [Offer, Committed]
        assert [type(message) for message in to_decode] == [Done]
        assert landed(pair.src, pair.dst)
        await pair.decode_node.stop()


@pytest.mark.row("C1")
@pytest.mark.usefixtures("quick_retries")
async def test_what_a_broken_connection_swallowed_is_sent_again_and_heard_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async with real() as pair, Road(pair.prefill.address) as road:
        first = pair.expect(at=road.address)
        pair.forward()
        assert (await first).ok
        await until(lambda: pair.receiver.dialer.links[road.address].unacked == 0)
        to_prefill, to_decode = overhear(monkeypatch, pair.sender), overhear(monkeypatch, pair.receiver)
        road.freeze()
        handle = pair.expect(2, at=road.address)
        await until(lambda: pair.receiver.dialer.links[road.address].unacked == 1)
        await settled()
        assert not to_prefill, "the Offer was swallowed"
        road.cut()
        await until(lambda: to_prefill, timeout=5)
        road.freeze()
        pair.forward(gen=2)
        link = next(iter(pair.sender.reception.links.values()))
        await until(lambda: link.unacked)
        await settled()
        assert not to_decode, "the Done was swallowed"
        road.cut()
        assert (await asyncio.wait_for(handle, 5)).ok
        await until(lambda: pair.prefill.poll(5, 2) is RoomStatus.SUCCESS)
        assert [type(message) for message in to_prefill] == [Offer, Committed]
        assert [type(message) for message in to_decode] == [Done]
        await pair.decode_node.stop()


@pytest.mark.row("C4", "C1")
@pytest.mark.usefixtures("quick_retries")
async def test_what_was_queued_for_a_dead_process_is_refused_by_the_next_on_its_port() -> None:
    async with real() as pair:
        pair.hold.hold = True
        address = pair.prefill.address
        handle = pair.expect()
        pair.forward()
        await until(lambda: pair.sender.engine.pending > 0)
        pair.prefill_node.network.close()  # the process is gone without a word
        pair.hold.release()
        handle.abort("cannot be told to anybody")
        await settled()
        assert held(pair.receiver, UnitState.DRAINING) == {"page": DST, "aux": [2]}
        node, successor = await pair.start_prefill(address)
        await until(lambda: held(pair.receiver, UnitState.IN_DOUBT) == {"page": DST, "aux": [2]}, timeout=5)
        assert node.sender is not None
        assert node.sender.counters["wrong_incarnation"] >= 1
        assert len(node.sender.rooms) == 0, "the dead one's message did nothing here"
        again = pair.expect(2, pages=[20, 21, 22, 23], aux_slot=3)
        pair.forward(successor, gen=2)
        assert (await asyncio.wait_for(again, 5)).ok, "the next room dials anew"
        assert not handle.units_free()


async def test_a_prefill_that_comes_later_is_found() -> None:
    """The decode dials first: ZMQ goes on trying, and Hello is repeated."""
    with socket.create_server((LOCALHOST, 0)) as server:
        address = f"tcp://{LOCALHOST}:{server.getsockname()[1]}"
    async with real() as pair:
        handle = pair.expect(at=address)
        await settled()
        _, late = await pair.start_prefill(address)
        pair.forward(late)
        assert (await asyncio.wait_for(handle, 5)).ok


async def test_nobody_there_and_somebody_who_never_answers_are_said_so_in_time() -> None:
    loop = asyncio.get_running_loop()
    with socket.create_server((LOCALHOST, 0)) as closed, socket.create_server((LOCALHOST, 0)) as mute:
        nobody, silent = (f"tcp://{LOCALHOST}:{server.getsockname()[1]}" for server in (closed, mute))
        closed.close()
        async with real(HASTY) as pair:
            for address in (nobody, silent):
                since = loop.time()
                with pytest.raises(BrokenPeerError, match="does not answer") as caught:
                    await asyncio.to_thread(pair.decode.check, address)
                assert caught.value.data["address"] == address
                assert HASTY.connect_timeout_s <= loop.time() - since < HASTY.connect_timeout_s + 1.2
            hello = await asyncio.to_thread(pair.decode.check, pair.prefill.address)
            assert (hello.role, hello.engine) == ("prefill", "loopback")


# -- addresses -----------------------------------------------------------------------------------------------------


async def test_a_port_that_is_taken_is_busy() -> None:
    async with real() as pair:
        with pytest.raises(BusyError) as caught:
            await pair.start_prefill(pair.prefill.address)
        assert caught.value.data["bind"] == pair.prefill.address
        assert "another port" in caught.value.hint


@pytest.mark.row("N9")
@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:5", "tcp://[::]:0"])
async def test_an_address_that_others_can_reach_is_not_bound(bind: str) -> None:
    async with real() as pair:
        with pytest.raises(ConfigError) as caught:
            await pair.start_prefill(bind)
        assert "127.0.0.1" in caught.value.hint


@pytest.mark.parametrize("address", ["", "127.0.0.1:5", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:x", "ipc://a:1"])
async def test_what_is_no_address_is_said_at_once(address: str) -> None:
    async with real() as pair:
        with pytest.raises(ConfigError):
            pair.expect(at=address or "tcp:127.0.0.1")


async def test_a_host_that_does_not_exist_fails_the_room() -> None:
    async with real(HASTY) as pair:
        error = (await asyncio.wait_for(pair.expect(at="tcp://nowhere.invalid:5"), 3)).error
        assert error is not None
        assert isinstance(error.__cause__, BrokenPeerError | ConfigError)


# -- nonsense ------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def stranger(address: str, kind: int = zmq.DEALER, identity: bytes = b"") -> AsyncIterator[zmq.Socket[bytes]]:
    """A socket of plain ZMQ."""
    context = zmq.Context()
    sock = context.socket(kind)
    sock.setsockopt(zmq.LINGER, 1000)
    if identity:
        sock.setsockopt(zmq.IDENTITY, identity)
    sock.connect(address)
    try:
        yield sock
    finally:
        sock.close()
        context.term()


MULTIPARTS: dict[str, Callable[[bytes], list[bytes]]] = {
    "an empty frame": lambda hello: [b""],
    "an empty frame before a good one": lambda hello: [b"", hello],
    "a good frame and one more": lambda hello: [hello, b"more"],
    "the same twice": lambda hello: [hello, hello],
    "a thousand": lambda hello: [b"x"] * 1000,
    "a thousand empty ones": lambda hello: [b""] * 1000,
}


@pytest.mark.parametrize("name", MULTIPARTS)
@pytest.mark.parametrize("named", [True, False])
async def test_a_prefill_outlives_any_multipart_message(name: str, named: bool) -> None:
    async with real() as pair:
        network = ZmqNetwork(pair.decode_node.loop)
        raw = RawDecode(network, pair.prefill.address, Pool().layout)
        hello = encode(raw.hello())
        async with stranger(pair.prefill.address, identity=raw.me[:1] + bytes([9] * 15) if named else b"") as sock:
            before = pair.sender.counters["bad_frames"]
            sock.send_multipart(MULTIPARTS[name](hello), zmq.NOBLOCK)
            await until(lambda: pair.sender.counters["bad_frames"] > before)
        handle = pair.expect()
        pair.forward()
        assert (await handle).ok
        await raw.connect()
        raw.send(Bye())
        await until(lambda: raw.me not in pair.sender.reception.links)
        network.close()


async def test_a_prefill_outlives_what_is_not_zmq_at_all() -> None:
    async with real() as pair:
        port = int(pair.prefill.address.rpartition(":")[2])
        connections = [socket.create_connection((LOCALHOST, port)) for _ in range(20)]
        for number, connection in enumerate(connections):
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else bytes([255, 0, 0, 0]))
        handle = pair.expect()
        pair.forward()
        assert (await handle).ok
        for connection in connections:
            connection.close()


async def test_an_oversized_frame_ends_its_connection_and_no_other() -> None:
    async with real() as pair:
        handle = pair.expect()
        await until(lambda: len(pair.sender.rooms) == 1)
        identity = bytes([5] * 16)
        async with stranger(pair.prefill.address, identity=identity) as sock:
            monitor = sock.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            sock.send(bytes(17 << 20), zmq.NOBLOCK)
            await until(lambda: monitor.poll(0))
            sock.disable_monitor()
            monitor.close()
        assert pair.sender.counters["bad_frames"] == 0, "it never got that far"
        pair.forward()
        assert (await handle).ok


@pytest.mark.parametrize("name", ["an empty frame", "a good frame and one more", "a thousand"])
async def test_a_decode_outlives_any_multipart_message(name: str) -> None:
    async with real() as pair:
        network = ZmqNetwork(pair.decode_node.loop)
        raw = RawPrefill(network, Pool().layout)
        handle = pair.expect(at=raw.address)
        offer = await raw.hear(Offer)
        frames = MULTIPARTS[name](encode(raw.hello(v=1)))
        raw._listener._pump.send([raw.peer, *frames])  # type: ignore[attr-defined]
        raw.done(offer)
        assert (await asyncio.wait_for(handle, 5)).ok
        assert pair.receiver.dialer.bad_frames == 1
        network.close()


async def test_a_refusal_reaches_a_decode_over_real_sockets() -> None:
    async with real() as pair:
        network = ZmqNetwork(pair.decode_node.loop)
        raw = RawDecode(network, pair.prefill.address, Pool(page_size=8).layout)
        raw.send(raw.hello(), dst=b"")
        assert "page_size" in (await raw.hear(Refused)).fields
        network.close()
