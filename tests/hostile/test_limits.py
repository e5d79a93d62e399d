"""Bounds of the pure core: what a peer's numbers and lists may cost before they are refused."""

from __future__ import annotations

import random
import time
from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.digest import check_digests
from protocols.channel import MAX_HELD, MAX_HELD_BYTES, Channel
from protocols.codec import decode_envelope, encode, leading_type
from protocols.coverage import MAX_RUNS, Expected
from protocols.errors import ConfigError, MalformedFrameError, MismatchError
from protocols.messages import (
    HEARD_BY_DECODE,
    HEARD_BY_PREFILL,
    MAX_BYTES_OF,
    MAX_FRAME_BYTES,
    SMALL_FRAME_BYTES,
    Abort,
    AnyMessage,
    Coverage,
    Digest,
    Offer,
)
from tests.support.layouts import buffer
from tests.support.messages import MESSAGE_TYPES, messages

pytestmark = [pytest.mark.row("N9"), pytest.mark.row("C7")]

ENVELOPE = {"v": 1, "src": b"s" * 16, "dst": b"d" * 16}


def cost(call: object) -> float:
    """CPU seconds of this thread."""
    assert callable(call)
    start = time.thread_time()
    call()
    return time.thread_time() - start


@given(messages())
def test_the_type_stands_first_in_what_we_send(message: AnyMessage) -> None:
    assert leading_type(encode(message)) == type(message).__struct_config__.tag


@given(st.binary(max_size=64))
def test_the_leading_type_is_read_from_anything(frame: bytes) -> None:
    name = leading_type(frame)
    assert name == "" or name.encode("ascii", "replace") in frame.replace(b"\xff", b"?") or not name.isascii()


def test_every_type_is_heard_by_somebody_and_the_lists_by_one_side_only() -> None:
    tags = {str(cls.__struct_config__.tag) for cls in MESSAGE_TYPES}
    assert HEARD_BY_PREFILL | HEARD_BY_DECODE == tags
    assert set(MAX_BYTES_OF) <= tags
    assert "done" not in HEARD_BY_PREFILL
    assert "offer" not in HEARD_BY_DECODE


@pytest.mark.parametrize("kind", ["ping", "hello", "nonsense", ""])
def test_a_large_frame_of_a_small_type_is_refused_before_it_is_decoded(kind: str) -> None:
    frame = msgspec.msgpack.encode({"type": kind, **ENVELOPE, "number": 1, "junk": [[]] * (MAX_FRAME_BYTES - 200)})

    def refused() -> None:
        with pytest.raises(MalformedFrameError, match="oversized"):
            decode_envelope(frame)

    assert cost(refused) < 0.005, "16 MiB of empty lists take 70 ms to skip"


def test_a_large_frame_whose_type_does_not_stand_first_is_refused() -> None:
    frame = msgspec.msgpack.encode({**ENVELOPE, "type": "offer", "pages": bytes(SMALL_FRAME_BYTES)})
    with pytest.raises(MalformedFrameError, match="oversized"):
        decode_envelope(frame)


def test_a_large_frame_that_this_side_does_not_hear_is_refused() -> None:
    frame = msgspec.msgpack.encode({"type": "done", **ENVELOPE, "junk": bytes(SMALL_FRAME_BYTES)})
    assert decode_envelope(frame, HEARD_BY_DECODE).type == "done"
    with pytest.raises(MalformedFrameError):
        decode_envelope(frame, HEARD_BY_PREFILL)


def test_a_large_offer_is_read() -> None:
    offer = Offer(room=1, gen=1, session="s", pages=bytes(1 << 20), prefix_tokens=0, total_tokens=1)
    frame = encode(msgspec.structs.replace(offer, src=b"s" * 16, dst=b"d" * 16))
    assert decode_envelope(frame, HEARD_BY_PREFILL).type == "offer"


def test_what_the_peer_would_not_take_is_not_sent() -> None:
    with pytest.raises(ConfigError, match="larger than one frame"):
        encode(Abort(room=1, gen=1, origin="decode", reason="x" * SMALL_FRAME_BYTES))


# -- the hold-back queue -------------------------------------------------------------------------------------------


def abort(number: int) -> Abort:
    return Abort(room=number, gen=0, origin="decode", reason="")


def test_frames_that_come_early_are_held_within_a_number_of_bytes() -> None:
    counters: Counter[str] = Counter()
    channel = Channel(random.Random(0), counters)
    kept = 0
    for seq in range(2, MAX_HELD):
        if channel.wants(seq, MAX_FRAME_BYTES // 2):
            channel.receive(seq, abort(seq), MAX_FRAME_BYTES // 2)
            kept += 1
    assert kept * (MAX_FRAME_BYTES // 2) == MAX_HELD_BYTES
    assert counters["early_frames"] == MAX_HELD - 2 - kept
    ready = channel.receive(1, abort(1), MAX_FRAME_BYTES)
    assert [each.room for each in ready if isinstance(each, Abort)] == [1, 2, 3], "the next in order always has place"
    assert channel.wants(5, MAX_FRAME_BYTES), "and what was held gave its bytes back"


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, MAX_HELD_BYTES)), max_size=60))
def test_the_held_bytes_balance(frames: list[tuple[int, int]]) -> None:
    channel = Channel(random.Random(0))
    for seq, nbytes in frames:
        channel.receive(seq, abort(seq), nbytes)
        assert channel._held_bytes == sum(size for _, size in channel._held.values())
    for seq in range(1, 31):
        channel.receive(seq, abort(seq), 0)
    assert channel._held_bytes == 0
    assert channel.ack == 30


def test_a_replay_is_told_before_it_is_decoded() -> None:
    counters: Counter[str] = Counter()
    channel = Channel(random.Random(0), counters)
    channel.receive(1, abort(1))
    channel.ack_owed = False
    assert not channel.wants(1)
    assert channel.ack_owed, "its sender did not hear the acknowledgement"
    assert counters == {"repeated_frames": 1}


# -- the coverage proof --------------------------------------------------------------------------------------------


def test_one_long_list_named_for_a_buffer_thousands_of_times_is_not_expanded() -> None:
    runs = tuple((nth, 1) for nth in range(100_000))
    expected = Expected({1: (64, 0, 100_000)})
    expected.add([Coverage((1,) * 4096, 0, 64, runs)])

    def refused() -> None:
        with pytest.raises(MismatchError, match="excess"):
            expected.check()

    assert cost(refused) < 0.05


def test_a_proof_cut_into_dust_for_every_buffer_is_refused() -> None:
    pages, buffers = MAX_RUNS // 4, 160
    expected = Expected({number: (64, 0, pages) for number in range(buffers)})
    dust = tuple((nth, 1) for nth in range(pages - 1))
    expected.add([Coverage((number,), 0, 64, ((pages - 1, 1),)) for number in range(buffers)])
    expected.add([Coverage(tuple(range(buffers)), 0, 64, dust)])

    def refused() -> None:
        with pytest.raises(MismatchError, match="too finely"):
            expected.check()

    assert cost(refused) < 0.5


# -- digests -------------------------------------------------------------------------------------------------------

ENDLESS: dict[str, tuple[Digest, ...]] = {
    "a run without end": (Digest((1,), ((0, 2**60),), b""),),
    "a run without end, of no buffer": (Digest((), ((0, 2**60),), b""),),
    "runs that add up": (Digest((1,), tuple((0, 2**40) for _ in range(1000)), b""),),
    "a buffer named thousands of times": (Digest((1,) * 4096, tuple((nth, 1) for nth in range(10_000)), b""),),
    "an honest one and one of no buffer": (Digest((1,), ((0, 8),), bytes(64)), Digest((), ((0, 2**60),), b"")),
}


@pytest.mark.parametrize("name", ENDLESS)
async def test_a_digest_is_counted_before_it_is_spelt_out(name: str) -> None:
    buffers = {1: buffer(1, "k", 0)}
    coverage = (Coverage((1,), 0, buffers[1].item_len, ((0, 8),)),)
    start = time.thread_time()
    with pytest.raises(MismatchError, match="do not stand for"):
        await check_digests(ENDLESS[name], coverage, buffers, np.arange(8), 0)
    assert time.thread_time() - start < 0.1
