"""Keys: who gets in, whose an incarnation is, what can be read on the way, and what is refused before anything runs."""

from __future__ import annotations

import asyncio
import os
import stat
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import zmq
import zmq.auth
from zmq.utils import z85

from orchestrator.cli.main import main
from orchestrator.config import Config
from orchestrator.curve import Zap, load_clients, load_pair, write_pair
from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.hosts import is_here, is_loopback
from orchestrator.log import RateLimited
from orchestrator.loop_thread import EmbeddedLoop
from orchestrator.node import Node
from orchestrator.testing.pool import Pool
from orchestrator.wire import Origin, ZmqNetwork
from protocols.errors import BrokenPeerError, ConfigError
from protocols.messages import Abort, Bye, Offer, Pong, Refused, Rollover
from tests.peers.raw import QUICK, RawDecode
from tests.peers.scenes import DST, TOKENS, cluster, landed, raw_decode, sender, spec
from tests.support.waiting import until

pytestmark = pytest.mark.row("N9")


IMPATIENT: dict[str, Any] = {"connect_timeout_s": 0.5}
"""For whom nobody will answer."""


class Keys:
    """Certificates by name, as files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("prefill", "decode", "other", "stranger"):
            write_pair(folder, name)

    def public(self, name: str) -> Path:
        return self.folder / f"{name}.key"

    def secret(self, name: str) -> Path:
        return self.folder / f"{name}.key_secret"

    def text(self, name: str) -> str:
        return zmq.auth.load_certificate(self.public(name))[0].decode()

    def prefill(self, **changes: Any) -> Config:
        allowed = (self.public("decode"), self.public("other"))
        return replace(QUICK, secret_key=self.secret("prefill"), client_keys=allowed, **changes)

    def decode(self, name: str = "decode", server: str = "prefill", **changes: Any) -> Config:
        return replace(QUICK, secret_key=self.secret(name), server_key=self.public(server), **changes)


@pytest.fixture
def keys(tmp_path: Path) -> Keys:
    return Keys(tmp_path)


class House:
    """A prefill over real sockets, and what dials it."""

    def __init__(self, stack: AsyncExitStack, config: Config) -> None:
        self._stack = stack
        self._config = config
        self.fabric = LoopbackFabric()
        self.src = Pool(seed=1)
        self.pools: list[Pool] = []
        """What is written to must stay alive."""

    def pool(self) -> Pool:
        self.pools.append(Pool())
        return self.pools[-1]

    async def start(self) -> None:
        self.node = await self._stack.enter_async_context(Node())
        self.prefill = self.node.start_prefill(self.fabric.engine(), self.src.layout, config=self._config)
        assert self.node.sender is not None
        self.sender = self.node.sender
        self.counters: Counter[str] = self.node.sender.counters

    async def decode(self, config: Config) -> Any:
        node = await self._stack.enter_async_context(Node())
        return node.start_decode(self.fabric.engine(), self.pool().layout, config)

    def expect(self, decode: Any, room: int = 5) -> Any:
        return decode.expect(room, 1, [self.prefill.address], DST, total_tokens=TOKENS, aux_slot=2)

    def forward(self, room: int = 5) -> None:
        with self.prefill.begin_forward([spec(room=room)]) as forward:
            for layer in range(4):
                forward.layer_end(layer)

    def raw(self, config: Config, me: bytes | None = None) -> RawDecode:
        """A decode that the test plays, with an engine that can be written to."""
        network = ZmqNetwork(self.node.loop)
        self._stack.callback(network.close)
        pool, engine = self.pool(), self.fabric.engine()
        for buffer in pool.layout.buffers:
            engine.register(buffer.address, buffer.nbytes)
        raw = RawDecode(network.for_side("decode", config), self.prefill.address, pool.layout, engine.session, me)  # type: ignore[arg-type]
        raw.pool = pool
        return raw


@asynccontextmanager
async def house(config: Config) -> AsyncIterator[House]:
    async with AsyncExitStack() as stack:
        it = House(stack, config)
        await it.start()
        yield it


# -- who gets in ---------------------------------------------------------------------------------------------------


async def test_a_room_goes_through_and_strangers_stay_outside(keys: Keys) -> None:
    async with house(keys.prefill()) as it:
        good, stranger = await it.decode(keys.decode()), await it.decode(keys.decode("stranger", **IMPATIENT))
        handles = it.expect(good), it.expect(stranger, room=6)
        it.forward()
        assert (await handles[0]).ok
        error = (await asyncio.wait_for(handles[1], 3)).error
        assert error is not None
        assert isinstance(error.__cause__, BrokenPeerError)
        assert "client_keys" in error.hint, "it says where to look"
        assert it.counters["clients_refused"] >= 1
        assert len(it.sender.reception.links) == 1
        link = next(iter(it.sender.reception.links.values()))
        assert link.origin == Origin(keys.text("decode"), "127.0.0.1")


async def test_a_decode_without_keys_does_not_get_in(keys: Keys) -> None:
    async with house(keys.prefill()) as it:
        handle = it.expect(await it.decode(replace(QUICK, **IMPATIENT)))
        assert "does not answer" in str((await asyncio.wait_for(handle, 3)).error)
        assert not it.sender.reception.links


async def test_a_decode_talks_to_nobody_but_the_server_it_pinned(keys: Keys) -> None:
    async with house(keys.prefill()) as impostor:
        handle = impostor.expect(await impostor.decode(keys.decode(server="other", **IMPATIENT)))
        assert "does not answer" in str((await asyncio.wait_for(handle, 3)).error)
        assert not impostor.counters, "nothing reached it, not even a frame that it could count as bad"


async def test_servers_have_keys_by_address(keys: Keys) -> None:
    async with house(keys.prefill()) as it:
        known = replace(
            QUICK, secret_key=keys.secret("decode"), server_keys={it.prefill.address: keys.public("prefill")}
        )
        decode = await it.decode(known)
        handle = it.expect(decode)
        it.forward()
        assert (await handle).ok
        elsewhere = decode.expect(6, 1, ["tcp://127.0.0.1:9"], [5], total_tokens=4)
        error = (await asyncio.wait_for(elsewhere, 1)).error
        assert isinstance(error.__cause__, ConfigError)
        assert "server_keys" in str(error)


def test_both_sides_with_keys_under_the_embedded_loop_and_no_thread_more(keys: Keys) -> None:
    fabric, src, dst = LoopbackFabric(), Pool(seed=1), Pool()
    before = threading.active_count()
    with EmbeddedLoop(keys.prefill(server_key=keys.public("prefill"))) as loop:
        prefill = loop.start_prefill(fabric.engine(), src.layout)
        decode = loop.start_decode(fabric.engine(), dst.layout, keys.decode())
        handle = decode.expect(5, 1, [prefill.address], DST, total_tokens=TOKENS, aux_slot=2)
        with prefill.begin_forward([spec()]) as forward:
            for layer in range(4):
                forward.layer_end(layer)
        assert handle.wait(5).ok
        assert landed(src, dst)
        assert threading.active_count() == before + 1, "the loop's own"


class Tap:
    """A TCP relay that remembers what it carried."""

    def __init__(self, port: int) -> None:
        self._port = port
        self.seen = b""
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Tap:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        for source, sink in ((reader, back), (there, writer)):
            self._tasks.add(asyncio.get_running_loop().create_task(self._pump(source, sink)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(1 << 16):
                self.seen += data
                sink.write(data)
        finally:
            sink.close()


@pytest.mark.parametrize("encrypted", [True, False])
async def test_what_can_be_read_on_the_way(keys: Keys, encrypted: bool) -> None:
    async with house(keys.prefill() if encrypted else QUICK) as it:
        async with Tap(int(it.prefill.address.rpartition(":")[2])) as tap:
            decode = await it.decode(keys.decode() if encrypted else QUICK)
            handle = decode.expect(5, 1, [tap.address], DST, total_tokens=TOKENS, aux_slot=2)
            it.forward()
            assert (await handle).ok
            words = [b"offer", b"hello", b"loopback", b"kvferry-testing", decode._receiver.dialer._me]
            assert [word for word in words if word in tap.seen] == ([] if encrypted else words)


# -- whose an incarnation is ---------------------------------------------------------------------------------------


@pytest.mark.row("C7")
async def test_an_incarnation_belongs_to_the_key_that_first_used_it(keys: Keys) -> None:
    """The impostor is one of ours: an allowed key, and the incarnation of another. Nothing of it counts. ZMQ handed
    its victim's connection over to it, and tells nobody: the victim notices the silence, connects anew and goes on."""
    async with house(keys.prefill(silence_s=1.0)) as it:
        decode = await it.decode(keys.decode(silence_s=1.0))
        handle = it.expect(decode)
        await until(lambda: len(it.sender.rooms) == 1)
        link = next(iter(it.sender.reception.links.values()))
        impostor = it.raw(keys.decode("other"), me=link.peer)
        impostor.peer = it.sender.me
        for message in (Abort(room=5, gen=1, origin="decode", reason="mine now"), Bye()):
            impostor.send(message)
        impostor.send(impostor.hello(dial=99), dst=b"")
        impostor.send_frame(b"garbage")
        await until(lambda: it.counters["foreign_incarnations"] >= 4)
        assert link.bad_frames == 0, "its sins are not the victim's"
        impostor.close()
        it.forward()
        result = await asyncio.wait_for(handle, 8)
        assert result.ok, result.error
        assert not impostor.heard or all(isinstance(each, Offer | Pong) for each in impostor.heard)


async def test_an_incarnation_stays_its_keys_when_its_owner_has_left(keys: Keys) -> None:
    async with house(keys.prefill()) as it:
        owner = it.raw(keys.decode())
        await owner.connect()
        owner.send(Bye())
        await until(lambda: not it.sender.reception.links)
        heir = it.raw(keys.decode("other"), me=owner.me)
        heir.send(heir.hello(), dst=b"")
        await until(lambda: it.counters["foreign_incarnations"] == 1)
        assert not it.sender.reception.links
        assert heir.heard == []


async def test_a_key_that_is_not_allowed_cannot_even_take_a_connection_away(keys: Keys) -> None:
    async with house(keys.prefill()) as it:
        handle = it.expect(await it.decode(keys.decode()))
        await until(lambda: len(it.sender.rooms) == 1)
        victim = next(iter(it.sender.reception.links))
        it.raw(keys.decode("stranger"), me=victim)
        await until(lambda: it.counters["clients_refused"] >= 1)
        it.forward()
        assert (await asyncio.wait_for(handle, 3)).ok
        assert it.counters["foreign_incarnations"] == 0


@pytest.mark.parametrize("successor", ["decode", "other"])
async def test_a_name_is_taken_over_by_its_own_key_only(keys: Keys, successor: str) -> None:
    async with house(keys.prefill()) as it:
        first, second = it.raw(keys.decode()), it.raw(keys.decode(successor))
        await first.connect(name="rank 0")
        await second.connect(name="rank 0")
        expected = {second.me} if successor == "decode" else {first.me, second.me}
        assert set(it.sender.reception.links) == expected


# -- what is refused before anything runs --------------------------------------------------------------------------


@pytest.mark.parametrize("bind", ["tcp://0.0.0.0:0", "tcp://[::]:0", "tcp://127.0.0.1.example.org:0"])
async def test_an_address_that_others_can_reach_needs_keys(bind: str) -> None:
    async with Node() as node:
        with pytest.raises(ConfigError) as caught:
            node.start_prefill(LoopbackFabric().engine(), Pool().layout, bind)
        assert "kvferry keygen" in caught.value.hint
        assert "insecure=True" in caught.value.hint


@pytest.mark.parametrize("how", ["keys", "insecure"])
async def test_an_address_that_others_can_reach_is_bound(
    keys: Keys, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    config = keys.prefill() if how == "keys" else Config(insecure=True)
    async with Node() as node:
        prefill = node.start_prefill(LoopbackFabric().engine(), Pool().layout, "tcp://0.0.0.0:0", config)
        assert prefill.address.startswith("tcp://0.0.0.0:")
    assert ("takes anybody" in caplog.text) is (how == "insecure")


@pytest.mark.parametrize(
    "address, expected",
    [
        ("tcp://127.0.0.1:5", True),
        ("tcp://127.9.9.9:5", True),
        ("tcp://localhost:5", True),
        ("tcp://[::1]:5", True),
        ("tcp://[::ffff:127.0.0.1]:5", True),
        ("127.0.0.1:15000", True),
        ("tcp://127.0.0.1.example.org:5", False),
        ("tcp://127.evil:5", False),
        ("tcp://localhost.example.org:5", False),
        ("tcp://*:5", False),
        ("tcp://0.0.0.0:5", False),
        ("tcp://[::]:5", False),
        ("tcp://10.0.0.1:5", False),
        ("loopback:1", False),
        ("", False),
    ],
)
def test_what_a_loopback_address_is(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected


@pytest.mark.parametrize("address, expected", [("127.0.0.1", True), ("::1", True), ("192.0.2.7", False), ("x", False)])
def test_what_lies_on_this_host(address: str, expected: bool) -> None:
    assert is_here(address) is expected


ELSEWHERE = Origin(address="192.0.2.7")


@pytest.mark.row("E5")
@pytest.mark.parametrize("session", ["127.0.0.1:15123", "localhost:15123", "[::1]:15123"])
async def test_a_loopback_session_of_a_worker_on_another_host_is_refused(session: str) -> None:
    async with cluster() as c:
        raw = RawDecode(c.network, c.addresses[0], Pool().layout, session)
        c.network.origins[raw.me] = ELSEWHERE
        raw.send(raw.hello(), dst=b"")
        refused = await raw.hear(Refused)
        assert "loopback" in refused.reason
        assert refused.fields["peer"] == ELSEWHERE.address
        assert not sender(c).reception.links
        c.network.origins[raw.me] = Origin(address="127.0.0.1")
        await raw.connect()


@pytest.mark.row("E5")
async def test_a_rollover_cannot_smuggle_a_loopback_session_in() -> None:
    async with cluster() as c:
        raw = await raw_decode(c)
        sender(c).reception.links[raw.me].origin = ELSEWHERE
        changed = Rollover(old_session=raw.session, session="127.0.0.1:1", layout=raw.layout, deadline_ms=1000)
        raw.send(changed)
        assert "loopback" in (await raw.hear(Refused)).reason
        raw.send(raw.offer(6, 1, DST, session="127.0.0.1:1"))
        assert "Hello first" in (await raw.hear(Refused, nth=1)).reason


def settings(**changes: Any) -> Callable[[Keys], dict[str, Any]]:
    return lambda keys: changes


BAD_SETTINGS: dict[str, tuple[Callable[[Keys], dict[str, Any]], str]] = {
    "server_key alone": (settings(server_key="x.key"), "does nothing without secret_key"),
    "server_keys alone": (settings(server_keys={"tcp://127.0.0.1:5": "x.key"}), "does nothing without secret_key"),
    "client_keys alone": (settings(client_keys=["x.key"]), "does nothing without secret_key"),
    "client_keys no list": (lambda keys: {"secret_key": keys.secret("prefill"), "client_keys": "dir"}, "is a list"),
    "a key of no type": (lambda keys: {"secret_key": 7}, "a key is a path, or bytes"),
    "a limit of none": (settings(max_peers=0), "above zero"),
}


@pytest.mark.parametrize("name", BAD_SETTINGS)
def test_settings_that_cannot_work_are_refused_where_they_are_made(keys: Keys, name: str) -> None:
    make, text = BAD_SETTINGS[name]
    with pytest.raises(ConfigError, match=text):
        Config(**make(keys))


def damaged(keys: Keys, change: Callable[[str], str]) -> Path:
    path = keys.folder / "damaged.key_secret"
    path.write_text(change(keys.secret("prefill").read_text()))
    path.chmod(0o600)
    return path


def readable(keys: Keys) -> Path:
    keys.secret("prefill").chmod(0o644)
    return keys.secret("prefill")


BAD_SECRETS: dict[str, tuple[Callable[[Keys], Any], str]] = {
    "missing": (lambda keys: keys.folder / "none", "cannot read"),
    "a directory": (lambda keys: keys.folder, "cannot read"),
    "empty": (lambda keys: damaged(keys, lambda text: ""), "cannot read"),
    "no value": (lambda keys: damaged(keys, lambda text: text.replace(" = ", " ")), "cannot read|not a key"),
    "cut off": (lambda keys: damaged(keys, lambda text: text[:-10]), "not a key"),
    "public only": (lambda keys: keys.public("prefill"), "holds no secret"),
    "of another pair": (
        lambda keys: damaged(keys, lambda text: text.replace(keys.text("prefill"), keys.text("decode"))),
        "are no pair",
    ),
    "readable by anybody": (readable, "anybody on this host can read"),
    "bytes too short": (lambda keys: b"short", "40 characters"),
    "bytes beyond Z85": (lambda keys: b"~" * 40, "40 characters"),
    "bytes too large for Z85": (lambda keys: b"#" * 40, "40 characters"),
}


@pytest.mark.parametrize("name", BAD_SECRETS)
async def test_a_secret_that_cannot_be_used_is_refused_at_the_start(keys: Keys, name: str) -> None:
    make, text = BAD_SECRETS[name]
    async with Node() as node:
        config = Config(secret_key=make(keys), client_keys=[keys.public("decode")])
        with pytest.raises(ConfigError, match=text) as caught:
            node.start_prefill(LoopbackFabric().engine(), Pool().layout, config=config)
        assert caught.value.hint
        secret = zmq.auth.load_certificate(keys.secret("prefill"))[1]
        assert secret is not None
        assert secret.decode() not in str(caught.value)


async def test_a_side_that_could_talk_to_nobody_is_refused_at_the_start(keys: Keys) -> None:
    async with Node() as node:
        with pytest.raises(ConfigError, match="nobody could connect"):
            config = Config(secret_key=keys.secret("prefill"))
            node.start_prefill(LoopbackFabric().engine(), Pool().layout, config=config)
        with pytest.raises(ConfigError, match="needs the public key of the prefill"):
            node.start_decode(LoopbackFabric().engine(), Pool().layout, Config(secret_key=keys.secret("decode")))


async def test_a_libzmq_without_curve_is_said_so(keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", lambda capability: False)
    async with Node() as node:
        with pytest.raises(ConfigError, match="built without CURVE"):
            node.start_prefill(LoopbackFabric().engine(), Pool().layout, config=keys.prefill())
        node.start_prefill(LoopbackFabric().engine(), Pool().layout)


def test_keys_are_taken_as_files_as_directories_and_as_bytes(keys: Keys) -> None:
    pair = load_pair(keys.secret("prefill"))
    assert pair.public == keys.text("prefill").encode()
    assert load_pair(pair.secret) == pair
    assert load_pair(str(keys.secret("prefill"))) == pair
    everybody = {keys.text(name).encode() for name in ("prefill", "decode", "other", "stranger")}
    assert load_clients([keys.folder]) == everybody
    assert load_clients([keys.public("decode"), pair.public]) == {pair.public, keys.text("decode").encode()}


def test_a_secret_is_in_no_text(keys: Keys) -> None:
    pair = load_pair(keys.secret("prefill"))
    config = Config(secret_key=pair.secret, client_keys=[keys.public("decode")])
    assert pair.secret.decode() not in repr(config) + repr(pair)


# -- the ZAP handler -----------------------------------------------------------------------------------------------


def zap(keys: Keys) -> tuple[Zap, bytes, bytes, Counter[str]]:
    handler, counters = Zap(RateLimited("test", lambda: 0.0, 5)), Counter[str]()
    domain = handler.admit(load_clients([keys.public("decode")]), counters)
    return handler, domain, z85.decode(keys.text("decode")), counters


def test_the_zap_handler_lets_the_right_key_in(keys: Keys) -> None:
    handler, domain, key, counters = zap(keys)
    reply = handler.answer([b"1.0", b"7", domain, b"127.0.0.1", b"", b"CURVE", key])
    assert reply[:3] == [b"1.0", b"7", b"200"]
    assert reply[4].decode() == keys.text("decode")
    assert not counters


@pytest.mark.parametrize(
    "change",
    [
        {0: b"2.0"},
        {2: b""},
        {2: b"kvferry-9"},
        {5: b"NULL"},
        {5: b"PLAIN"},
        {6: b""},
        {6: b"x" * 32},
        {6: b"x" * 31},
        {6: b"x" * 100},
    ],
)
def test_the_zap_handler_lets_nothing_else_in(keys: Keys, change: dict[int, bytes]) -> None:
    handler, domain, key, _ = zap(keys)
    request = [b"1.0", b"7", domain, b"127.0.0.1", b"", b"CURVE", key]
    for at, value in change.items():
        request[at] = value
    assert handler.answer(request)[2] == b"400"
    for length in range(len(request)):
        assert handler.answer(request[:length])[2] == b"400"


# -- keygen --------------------------------------------------------------------------------------------------------


def test_keygen_writes_a_pair_that_zmq_reads_and_others_do_not(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "keys"
    before = os.umask(0)
    try:
        assert main(["keygen", str(folder), "--name", "rank0"]) == 0
    finally:
        os.umask(before)
    public, secret = folder / "rank0.key", folder / "rank0.key_secret"
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert zmq.auth.load_certificate(public)[1] is None
    loaded = zmq.auth.load_certificate(secret)
    assert loaded[1] is not None
    assert loaded[1] not in public.read_bytes()
    assert load_pair(secret).public == zmq.auth.load_certificate(public)[0]
    assert str(secret) in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "a/b", "..", "../up"])
def test_keygen_takes_file_names_only(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keygen", str(tmp_path / "keys"), "--name", name]) == 2
    assert "file name" in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.key*"))


def test_keygen_overwrites_nothing_and_says_what_it_cannot_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["keygen", str(tmp_path)]) == 0
    before = (tmp_path / "kvferry.key_secret").read_bytes()
    assert main(["keygen", str(tmp_path)]) == 2
    assert "--name" in capsys.readouterr().err
    assert (tmp_path / "kvferry.key_secret").read_bytes() == before
    assert main(["keygen", str(tmp_path / "kvferry.key")]) == 2
    assert "cannot write" in capsys.readouterr().err
