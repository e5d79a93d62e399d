"""Real processes over real sockets and the real engine: they transfer, die, stop, come back, and were never there."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.peers.worker import PROGRESS_S, Worker

pytestmark = pytest.mark.mooncake

LOCALHOST = "127.0.0.1"
LAYERS = [0, 1, 2, 3]
POOL = {"pages": 300, "layers": 4, "drafts": 1, "item_len": 4096}
LARGE = POOL | {"item_len": 16384}
SLOW = 0.125
"""Gigabits a second: a room of 250 large pages takes 2.6 s."""
CONFIG = {
    "ping_interval_s": 0.25,
    "silence_s": 1.0,
    "drain_timeout_s": 1.0,
    "connect_timeout_s": 2.0,
    "room_timeout_s": 60.0,
}
HANGS = 3.0
"""Seconds a prefill gives a first contact in the test of one that hangs."""
SLACK = 2.0
"""Seconds a busy machine may add to a bound."""

Start = Callable[..., Worker]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts workers; all of them are gone after the test."""
    with ExitStack() as stack:
        workers: list[Worker] = []

        def start(role: str, pool: dict[str, Any] | None = None, **options: Any) -> Worker:
            worker = stack.enter_context(Worker())
            workers.append(worker)
            config = CONFIG | options.pop("config", {})
            mine = (pool or POOL) | ({"seed": len(workers)} if role == "prefill" else {})
            return worker.start(role, mine, config=config, **options)

        yield start


def pages(count: int, seed: int, pool: int = 300) -> list[int]:
    return random.Random(seed).sample(range(pool), count)


def transfer(prefill: Worker, decode: Worker, room: int, count: int = 40, gen: int = 1) -> None:
    """A whole room, and its bytes compared."""
    src, dst = pages(count, room), pages(count, room + 1000)
    decode.ask("expect", room=room, gen=gen, peers=[prefill.address], pages=dst, aux_slot=1)
    prefill.ask("forward", room=room, gen=gen, pages=src, layers=LAYERS, aux_slot=2)
    result = decode.ask("wait", room=room, gen=gen, timeout=15)
    assert result["ok"], result
    assert prefill.ask("digest", pages=src) == decode.ask("digest", pages=dst)
    assert prefill.ask("finished", room=room, gen=gen, timeout=5)["bytes"] == result["bytes"] > 0


@pytest.mark.row("B6", "A15")
@pytest.mark.parametrize("completion", ["one-block", "batch-status"])
def test_a_transfer_arrives_byte_for_byte(start: Start, completion: str) -> None:
    prefill, decode = start("prefill", completion=completion), start("decode", completion=completion)
    for room in range(1, 4):
        transfer(prefill, decode, room)


def begin(prefill: Worker, decode: Worker, room: int, count: int = 250, gen: int = 1) -> list[int]:
    """A large room on its way: some of it has arrived, most of it has not. Its destination pages."""
    src, dst = pages(count, room), pages(count, room + 1000)
    decode.ask("expect", room=room, gen=gen, peers=[prefill.address], pages=dst)
    prefill.ask("forward", room=room, gen=gen, pages=src, layers=LAYERS)
    assert decode.ask("touched", page=dst[0], timeout=10)
    assert prefill.ask("poll", room=room, gen=gen) == "TRANSFERRING"
    return dst


@pytest.mark.slow
@pytest.mark.row("C1", "C3", "C5")
def test_a_decode_killed_in_the_middle_fails_its_room_and_no_other(start: Start) -> None:
    prefill = start("prefill", LARGE, gigabits=SLOW)
    victim, healthy = start("decode", LARGE), start("decode", LARGE)
    begin(prefill, victim, room=1)
    src, dst = pages(20, 2), pages(20, 3)
    healthy.ask("expect", room=2, gen=1, peers=[prefill.address], pages=dst)
    prefill.ask("forward", room=2, gen=1, pages=src, layers=LAYERS)
    victim.kill()
    killed = time.monotonic()
    result = prefill.ask("finished", room=1, gen=1, timeout=10)
    assert not result["ok"]
    assert time.monotonic() - killed < 10
    assert prefill.ask("source_free", room=1, gen=1, timeout=15), "nothing reads its pages any more"
    assert healthy.ask("wait", room=2, gen=1, timeout=10)["ok"], "the room beside it went on"
    assert prefill.ask("digest", pages=src) == healthy.ask("digest", pages=dst)
    transfer(prefill, healthy, room=3, count=10)
    transfer(prefill, start("decode", LARGE), room=4, count=10)  # its successor


@pytest.mark.slow
@pytest.mark.row("C1", "C4", "C5")
def test_a_stopped_decode_holds_up_nobody_but_itself(start: Start) -> None:
    prefill = start("prefill", LARGE, gigabits=SLOW)
    stopped, healthy = start("decode", LARGE), start("decode", LARGE)
    begin(prefill, stopped, room=1)
    stopped.stop()
    since = time.monotonic()
    transfer(prefill, healthy, room=2, count=10)
    assert time.monotonic() - since < CONFIG["silence_s"] + SLACK
    result = prefill.ask("finished", room=1, gen=1, timeout=10)
    assert not result["ok"]
    assert time.monotonic() - since < CONFIG["silence_s"] + CONFIG["drain_timeout_s"] + SLACK
    for room in range(10, 1000):
        transfer(prefill, healthy, room=room, count=10)
        if time.monotonic() - since > 2 * PROGRESS_S + SLACK:
            break  # the engine has given the first of its writes up
    stopped.resume()
    result = stopped.ask("wait", room=1, gen=1, timeout=10)
    assert not result["ok"]
    assert prefill.ask("source_free", room=1, gen=1, timeout=20)
    assert stopped.ask("quarantine", in_doubt=1, timeout=10)[1] > 0, "its writes failed while it stood still"
    assert not stopped.ask("free", room=1, gen=1)
    free = sorted(set(range(300)) - set(pages(250, 1001)))[:10]
    stopped.ask("expect", room=4, gen=1, peers=[prefill.address], pages=free)
    prefill.ask("forward", room=4, gen=1, pages=free, layers=LAYERS)
    assert stopped.ask("wait", room=4, gen=1, timeout=15)["ok"], "it is back"
    assert prefill.ask("digest", pages=free) == stopped.ask("digest", pages=free)


@pytest.mark.slow
@pytest.mark.row("C1", "C4")
def test_a_prefill_killed_in_the_middle_leaves_the_units_quarantined(start: Start) -> None:
    prefill = start("prefill", LARGE, gigabits=SLOW)
    decode = start("decode", LARGE)
    dst = begin(prefill, decode, room=1)
    prefill.kill()
    killed = time.monotonic()
    result = decode.ask("wait", room=1, gen=1, timeout=10)
    assert "silent" in result["error"]
    assert time.monotonic() - killed < CONFIG["silence_s"] + 2 * CONFIG["ping_interval_s"] + SLACK
    drained = 2 * CONFIG["drain_timeout_s"] + SLACK
    assert decode.ask("quarantine", unknown=250, timeout=drained) == [250, 0], "its writes may still be in the kernel"
    assert not decode.ask("free", room=1, gen=1)
    decode.ask("expect", room=2, gen=1, peers=[prefill.address], pages=dst[:10])
    assert "under another lease" in decode.ask("wait", room=2, gen=1, timeout=5)["error"]
    successor = start("prefill", LARGE, bind=prefill.address)
    free = sorted(set(range(300)) - set(dst))
    for gen in range(1, 4):
        mine, free = free[:10], free[10:]
        decode.ask("expect", room=3, gen=gen, peers=[successor.address], pages=mine)
        successor.ask("forward", room=3, gen=gen, pages=mine, layers=LAYERS)
        result = decode.ask("wait", room=3, gen=gen, timeout=15)
        if result["ok"]:
            break
        # A busy machine: it took too long to ask the address, or to hear of the successor. The dead process was offered
        # nothing, so nothing of this is in doubt: it is free at once, or when the successor has acknowledged its end.
        assert any(text in result["error"] for text in ("restarted", "silent", "not answer")), result
        assert decode.ask("free", room=3, gen=gen, timeout=10)
    assert result["ok"]
    assert successor.ask("digest", pages=mine) == decode.ask("digest", pages=mine)
    assert decode.ask("quarantine", in_doubt=250, timeout=5) == [0, 250], "the dead one's writes, and no others"
    assert not decode.ask("free", room=1, gen=1)


@pytest.mark.slow
@pytest.mark.row("B5")
def test_a_black_hole_and_a_closed_port_cost_nobody_else_anything(start: Start) -> None:
    with socket.create_server((LOCALHOST, 0)) as hole, socket.create_server((LOCALHOST, 0)) as closed:
        sessions = [f"{LOCALHOST}:{server.getsockname()[1]}" for server in (hole, closed)]
        closed.close()
        prefill, healthy = start("prefill", config={"connect_timeout_s": HANGS}), start("decode")
        swallowed, refused = (start("decode", session=session) for session in sessions)
        for room, decode in ((1, swallowed), (2, refused)):
            decode.ask("expect", room=room, gen=1, peers=[prefill.address], pages=[1, 2, 3])
            prefill.ask("forward", room=room, gen=1, pages=[1, 2, 3], layers=LAYERS)
        transfer(prefill, healthy, room=10)
        assert prefill.ask("poll", room=1, gen=1) == "WAITING", "first contact still hangs, and nobody minds"
        transfer(prefill, healthy, room=11)
        for room, decode in ((1, swallowed), (2, refused)):
            for result in (
                prefill.ask("finished", room=room, gen=1, timeout=HANGS + SLACK),
                decode.ask("wait", room=room, gen=1, timeout=SLACK),
            ):
                assert not result["ok"]
                assert "peer" in result["error"]
            assert decode.ask("free", room=room, gen=1, timeout=SLACK), "nothing was submitted"
        transfer(prefill, healthy, room=12)


@pytest.mark.slow
@pytest.mark.row("B5", "C7")
def test_a_prefill_that_is_not_there_or_mute_is_said_so_in_time(start: Start) -> None:
    decode = start("decode")
    with socket.create_server((LOCALHOST, 0)) as mute, socket.create_server((LOCALHOST, 0)) as gone:
        addresses = [f"tcp://{LOCALHOST}:{server.getsockname()[1]}" for server in (mute, gone)]
        gone.close()
        for room, address in enumerate(addresses, 1):
            decode.ask("expect", room=room, gen=1, peers=[address], pages=[2 * room, 2 * room + 1])
        for room, address in enumerate(addresses, 1):
            answer = decode.ask("check", address=address)
            assert answer["kind"] == "BrokenPeerError"
            assert address in answer["text"]
            assert answer["seconds"] < CONFIG["connect_timeout_s"] + SLACK
            result = decode.ask("wait", room=room, gen=1, timeout=SLACK)
            assert "does not answer" in result["error"]
            assert decode.ask("free", room=room, gen=1, timeout=SLACK)


@pytest.mark.slow
@pytest.mark.row("B3")
@pytest.mark.timeout(120)
@pytest.mark.parametrize("completion", ["one-block", pytest.param("batch-status", marks=pytest.mark.long)])
def test_two_hundred_thousand_blocks_to_one_peer(start: Start, completion: str) -> None:
    count = 50_000
    pool = {"pages": count, "layers": 4, "drafts": 0, "kind": "mla", "item_len": 256, "page_size": 1}
    prefill, decode = start("prefill", pool, completion=completion), start("decode", pool)
    src, dst = pages(count, 1, count), pages(count, 2, count)
    decode.ask("expect", room=1, gen=1, peers=[prefill.address], pages=dst)
    prefill.ask("forward", room=1, gen=1, pages=src, layers=LAYERS)
    result = decode.ask("wait", room=1, gen=1, timeout=60)
    assert result["ok"], result
    assert result["blocks"] > 199_900, "hardly a neighbour on both sides"
    assert result["bytes"] == 4 * 256 * count
    assert prefill.ask("digest", pages=src) == decode.ask("digest", pages=dst)


@pytest.mark.row("C8", "C4", "C2")
def test_pages_granted_again_after_quiet_keep_the_new_bytes(start: Start) -> None:
    """Two prefills, two decodes, a write held in flight while its room is aborted."""
    slices = [[0, 1], [2, 3, 4]]
    prefills = [
        start("prefill", POOL | {"own_layers": owned, "pp_rank": nth, "pp_size": 2}, faulty=True)
        for nth, owned in enumerate(slices)
    ]
    decodes = [start("decode"), start("decode")]
    peers = [prefill.address for prefill in prefills]
    src, dst = pages(30, 1), pages(30, 2)

    def forward(room: int, gen: int) -> None:
        for prefill, owned in zip(prefills, slices, strict=True):
            layers = [layer for layer in owned if layer < 4]
            prefill.ask("forward", room=room, gen=gen, pages=src, layers=layers)

    def same(decode: Worker) -> bool:
        return all(
            prefill.ask("digest", pages=src, layers=owned) == decode.ask("digest", pages=dst, layers=owned)
            for prefill, owned in zip(prefills, slices, strict=True)
        )

    prefills[0].ask("hold", ordinal=0)
    decodes[0].ask("expect", room=1, gen=1, peers=peers, pages=dst)
    forward(1, 1)
    assert prefills[0].ask("attempts", at_least=2, timeout=5)
    decodes[1].ask("expect", room=2, gen=1, peers=peers, pages=dst)
    forward(2, 1)
    assert decodes[1].ask("wait", room=2, gen=1, timeout=10)["ok"], "the other decode is served meanwhile"
    assert same(decodes[1])
    assert decodes[0].ask("abort", room=1, gen=1)
    assert not prefills[0].ask("finished", room=1, gen=1, timeout=5)["ok"]
    assert not decodes[0].ask("free", room=1, gen=1, timeout=0.5)
    assert not prefills[0].ask("source_free", room=1, gen=1)
    decodes[0].ask("expect", room=3, gen=1, peers=peers, pages=dst)
    assert "holder=room 1.1" in decodes[0].ask("wait", room=3, gen=1, timeout=5)["error"]
    for prefill in prefills:
        prefill.ask("release")
    assert decodes[0].ask("free", room=1, gen=1, timeout=10)
    assert prefills[0].ask("source_free", room=1, gen=1, timeout=5)
    for nth, prefill in enumerate(prefills):
        prefill.ask("fill", seed=100 + nth)
    decodes[0].ask("expect", room=3, gen=2, peers=peers, pages=dst)
    forward(3, 2)
    assert decodes[0].ask("wait", room=3, gen=2, timeout=10)["ok"]
    assert same(decodes[0])
    assert all(prefill.ask("idle", timeout=5) for prefill in prefills)
    assert same(decodes[0]), "nothing of the old room came later"
