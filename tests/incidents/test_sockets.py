"""A peer that has been stopped: its sockets take what fits into them, and then nothing."""

from __future__ import annotations

import asyncio
import socket
import time

import zmq

from orchestrator.engines.loopback import LoopbackFabric
from orchestrator.node import Node
from orchestrator.testing.pool import Pool
from orchestrator.wire import SEND_QUEUE, ZmqNetwork
from protocols.ids import Incarnation
from tests.service.scenes import config
from tests.support.waiting import within

FRAME = bytes(1 << 12)
LONGEST_S = 1.5


async def test_a_send_to_a_peer_that_reads_nothing_is_refused_and_never_waits() -> None:
    """sglang#31144: a blocking PUSH to a stopped prefill wedged the scheduler of decode."""
    network = ZmqNetwork(asyncio.get_running_loop())
    context = zmq.Context()
    stopped = context.socket(zmq.ROUTER)
    stopped.setsockopt(zmq.RCVHWM, 1)
    port = stopped.bind_to_random_port("tcp://127.0.0.1")
    wire = network.dial(f"tcp://127.0.0.1:{port}", Incarnation(b"\1" * 16), lambda frame: None)
    try:
        taken, longest, refused = 0, 0.0, 0
        while refused < 50:
            since = time.monotonic()
            took = wire.send(FRAME)
            longest = max(longest, time.monotonic() - since)
            taken, refused = taken + took, refused + (not took)
            if refused or taken % 64 == 0:
                await asyncio.sleep(0.001)
            assert taken < 100 * SEND_QUEUE, "it takes frames without end"
        assert longest < LONGEST_S
        assert taken >= SEND_QUEUE
    finally:
        wire.close()
        network.close()
        stopped.close(linger=0)
        context.term()


async def test_a_prefill_that_accepts_and_never_speaks_delays_nobody() -> None:
    """sglang#31188: the loop goes round while a room waits for such a peer, and the room ends with the reason."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"tcp://127.0.0.1:{mute.getsockname()[1]}"
        async with Node() as node:
            settings = config(connect_timeout_s=0.3)
            decode = node.start_decode(LoopbackFabric().engine(), Pool().layout, config=settings)
            handle = decode.expect(1, 0, [address], [1, 2, 3], total_tokens=12)
            longest = 0.0
            while not handle.poll().ended:
                since = time.monotonic()
                await asyncio.sleep(0.001)
                longest = max(longest, time.monotonic() - since)
            assert longest < LONGEST_S
            assert "does not answer" in str((await within(handle)).error)
