import pickle
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocols.codec import decode, decode_envelope, encode, pack_indices, room_named_by, unpack_indices
from protocols.errors import ConfigError, MalformedFrameError, RemoteError
from protocols.ids import MAX_GENERATION, MAX_ROOM, RoomKey
from protocols.messages import (
    MAX_FRAME_BYTES,
    Abort,
    AbortAck,
    AnyMessage,
    Bye,
    Committed,
    Coverage,
    Done,
    Hello,
    Offer,
    Ping,
    Pong,
    Refused,
    Rollover,
    RolloverAck,
    Units,
    Welcome,
    WrongIncarnation,
)
from tests.support.layouts import make_layout
from tests.support.messages import MESSAGE_TYPES, messages
from tests.support.properties import examples

SRC, DST = b"s" * 16, b"d" * 16
SAMPLES: list[AnyMessage] = [
    Hello(
        src=SRC,
        role="decode",
        fingerprint=make_layout().fingerprint,
        layout=make_layout(),
        engine="loopback",
        engine_version="1",
        transport="memory",
        session="127.0.0.1:5000",
    ),
    Welcome(src=SRC, dst=DST, chosen=1),
    Refused(src=SRC, dst=DST, reason="the layouts differ", fields={"dtype": "'a' != 'b'"}),
    WrongIncarnation(src=SRC, dst=DST, meant=b"m" * 16),
    Ping(src=SRC, dst=DST, number=3, rooms=1, oldest_ms=20),
    Pong(src=SRC, dst=DST, number=3, ack=9),
    Offer(
        src=SRC,
        dst=DST,
        seq=1,
        room=7,
        gen=2,
        session="127.0.0.1:5000",
        pages=pack_indices(np.array([4, 5, 9])),
        prefix_tokens=16,
        total_tokens=60,
        aux_slot=3,
    ),
    Done(
        src=SRC,
        dst=DST,
        seq=2,
        ack=1,
        room=7,
        gen=2,
        status="ok",
        coverage=(Coverage((1, 2), 0, 512, ((1, 3),)),),
        bytes=3072,
        blocks=4,
        timing={"wait_s": 0.25},
    ),
    Committed(src=SRC, dst=DST, seq=2, ack=2, room=7, gen=2, status="ok"),
    Abort(src=SRC, dst=DST, seq=3, room=7, gen=2, origin="prefill", reason="cancelled"),
    AbortAck(src=SRC, dst=DST, seq=4, room=7, gen=2, session="s", in_doubt=Units(pages=b"\4\0\0\0", aux=(3,))),
    Rollover(src=SRC, dst=DST, seq=5, old_session="s", session="t", layout=make_layout(), deadline_ms=30_000),
    RolloverAck(src=SRC, dst=DST, seq=6, session="s"),
    Bye(src=SRC, dst=DST, seq=7),
]
FRAMES = [encode(message) for message in SAMPLES]
BARE: dict[str, Any] = {"type": "ping", "v": 1, "src": SRC, "dst": DST, "number": 1}


def frame_of(**changes: Any) -> bytes:
    return msgspec.msgpack.encode(BARE | changes)


def survives(frame: bytes) -> AnyMessage | None:
    """Put a frame through all that a receive loop does with one; anything but MalformedFrameError comes out."""
    message: AnyMessage | None = None
    with suppress(MalformedFrameError):
        message = decode(frame)
    try:
        decode_envelope(frame)
    except MalformedFrameError:
        message = None
    named = room_named_by(frame)
    assert named is None or (0 <= named.room <= MAX_ROOM and 0 <= named.gen <= MAX_GENERATION)
    return message


def test_there_is_a_sample_of_every_message() -> None:
    assert {type(message) for message in SAMPLES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_samples_come_back_as_they_went(message: AnyMessage) -> None:
    assert decode(encode(message)) == message


@given(messages())
def test_any_message_comes_back_as_it_went(message: AnyMessage) -> None:
    frame = encode(message)
    assert decode(frame) == message
    envelope = decode_envelope(frame)
    assert (envelope.v, envelope.src, envelope.dst) == (message.v, message.src, message.dst)
    assert (envelope.seq, envelope.ack) == (message.seq, message.ack)
    if hasattr(message, "room") and hasattr(message, "gen"):
        assert room_named_by(frame) == RoomKey(message.room, message.gen)


@pytest.mark.row("C7")
@given(st.binary(max_size=300))
def test_random_bytes(frame: bytes) -> None:
    assert survives(frame) is None


@pytest.mark.row("C7")
@pytest.mark.parametrize("frame", FRAMES, ids=[type(message).__name__ for message in SAMPLES])
def test_truncated_frames(frame: bytes) -> None:
    for end in range(len(frame)):
        assert survives(frame[:end]) is None
    assert survives(frame + b"\0") is None, "and one with something behind it"


@pytest.mark.row("C7")
@examples(400)
@given(st.sampled_from(FRAMES), st.data())
def test_mutated_frames_are_malformed_or_still_a_message(frame: bytes, data: st.DataObject) -> None:
    mutated = bytearray(frame)
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated) - 1))
        match data.draw(st.sampled_from(["set", "insert", "cut", "copy"])):
            case "set":
                mutated[at] = data.draw(st.integers(0, 255))
            case "insert":
                mutated[at:at] = data.draw(st.binary(min_size=1, max_size=6))
            case "cut":
                del mutated[at : at + data.draw(st.integers(1, 6))]
                mutated = mutated or bytearray(b"\0")
            case "copy":
                mutated[at:at] = mutated[at : at + data.draw(st.integers(1, 40))]
    message = survives(bytes(mutated))
    if message is not None:
        assert decode(encode(message)) == message


@pytest.mark.row("C7")
@pytest.mark.parametrize("message", SAMPLES, ids=lambda message: type(message).__name__)
def test_every_field_given_a_value_of_another_type(message: AnyMessage) -> None:
    fields = msgspec.msgpack.decode(encode(message))
    odd: list[Any] = [
        None,
        -1,
        2**63,
        2**64 - 1,
        1.5,
        float("nan"),
        "x",
        "x" * 5000,
        b"x",
        b"x" * 17,
        [],
        [[]],
        {},
        True,
    ]
    for name in fields:
        for value in odd:
            survives(msgspec.msgpack.encode(fields | {name: value}))
        survives(msgspec.msgpack.encode({key: value for key, value in fields.items() if key != name}))


class Exploit:
    def __reduce__(self) -> tuple[Any, ...]:
        return (pytest.fail, ("a pickle was executed",))


@pytest.mark.row("C7")
@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_are_never_executed(protocol: int) -> None:
    pickled = pickle.dumps(Exploit(), protocol)
    assert survives(pickled) is None
    assert survives(frame_of(number=pickled)) is None
    assert survives(frame_of(extra=pickled)) == Ping(src=SRC, dst=DST, number=1), "an unknown field is not looked at"
    assert survives(frame_of(number=msgspec.msgpack.Ext(1, pickled))) is None


@pytest.mark.row("C7")
@pytest.mark.parametrize(
    "opening", [b"\x91", b"\x81\xa1x", b"\xdd\0\0\0\1", b"\xdc\0\1"], ids=["array", "map", "array32", "array16"]
)
@pytest.mark.parametrize("depth", [10, 1000, 200_000])
def test_deep_nesting(opening: bytes, depth: int) -> None:
    assert survives(opening * depth + b"\xc0") is None
    nested = msgspec.msgpack.encode(BARE)
    within = bytes([nested[0] + 1]) + nested[1:] + b"\xa5extra" + opening * depth + b"\xc0"
    assert survives(within) in (None, Ping(src=SRC, dst=DST, number=1))


@pytest.mark.row("C7")
@pytest.mark.parametrize("claim", [2**16, 2**24, 2**31, 2**32 - 1])
@pytest.mark.parametrize("field", ["pages", "coverage", "timing", "unknown", "extra"])
@pytest.mark.parametrize("header", [0xDD, 0xDF, 0xC6, 0xDB], ids=["array", "map", "bytes", "text"])
def test_a_count_that_the_frame_does_not_hold_costs_nothing(claim: int, field: str, header: int) -> None:
    frame = FRAMES[[type(message) for message in SAMPLES].index(Done)]
    name = field.encode()
    fields = len(msgspec.msgpack.decode(frame))
    start = 1 if frame[0] & 0xF0 == 0x80 else 3
    within = b"\xde" + (fields + 1).to_bytes(2, "big") + frame[start:] + bytes([0xA0 + len(name)]) + name
    assert survives(within + bytes([header]) + claim.to_bytes(4, "big")) is None


@pytest.mark.row("C7")
def test_an_oversized_frame_is_refused_unread() -> None:
    with pytest.raises(MalformedFrameError, match="oversized"):
        decode_envelope(b"\xc1" * (MAX_FRAME_BYTES + 1))


def test_a_message_larger_than_a_frame_is_not_sent() -> None:
    offer = Offer(room=1, gen=1, session="s", pages=b"\0" * MAX_FRAME_BYTES, prefix_tokens=0, total_tokens=1)
    with pytest.raises(ConfigError, match="larger than one frame") as caught:
        encode(offer)
    assert caught.value.data["type"] == "Offer"
    assert caught.value.data["bytes"] > MAX_FRAME_BYTES


@pytest.mark.row("C7")
@pytest.mark.parametrize(
    "changes",
    [
        {"src": b""},
        {"src": b"\0" * 16},
        {"src": b"s" * 15},
        {"src": b"s" * 17},
        {"dst": b"d"},
        {"dst": b"\0" * 16},
        {"seq": -1},
        {"ack": "1"},
        {"v": None},
        {"type": 4},
        {"type": "x" * 257},
    ],
)
def test_bad_envelopes(changes: dict[str, Any]) -> None:
    with pytest.raises(MalformedFrameError):
        decode_envelope(frame_of(**changes))


@pytest.mark.row("C7")
@pytest.mark.parametrize("missing", ["type", "v", "src", "dst"])
def test_an_envelope_needs_all_that_says_where_it_belongs(missing: str) -> None:
    with pytest.raises(MalformedFrameError):
        decode_envelope(msgspec.msgpack.encode({key: value for key, value in BARE.items() if key != missing}))


@pytest.mark.row("C7")
def test_a_bad_body_still_tells_its_envelope_and_its_room() -> None:
    bad = frame_of(type="offer", seq=4, room=7, gen=2, pages=17)
    assert decode_envelope(bad).seq == 4
    with pytest.raises(MalformedFrameError):
        decode(bad)
    assert room_named_by(bad) == RoomKey(7, 2)
    unknown = frame_of(type="teleport", seq=5)
    assert decode_envelope(unknown).type == "teleport"
    with pytest.raises(MalformedFrameError):
        decode(unknown)
    assert room_named_by(unknown) is None


@pytest.mark.row("C7")
@pytest.mark.parametrize("room", [-1, 2**63, 2**64 - 1, None, "7"])
def test_a_room_id_is_63_bits(room: Any) -> None:
    frame = frame_of(type="abort", room=room, gen=2, origin="decode", reason="")
    assert room_named_by(frame) is None
    with pytest.raises(MalformedFrameError):
        decode(frame)


@pytest.mark.row("C7")
@given(st.integers(2**63, 2**64 - 1), st.sampled_from(["prefix_tokens", "total_tokens", "aux_slot", "destinations"]))
def test_a_number_that_no_array_can_hold_is_malformed(number: int, field: str) -> None:
    """Past 63 bits arithmetic on it would raise OverflowError in whoever handles the message."""
    offer = msgspec.msgpack.decode(FRAMES[6])
    with pytest.raises(MalformedFrameError):
        decode(msgspec.msgpack.encode(offer | {field: number}))


def test_a_generation_is_64_bits() -> None:
    abort = Abort(src=SRC, dst=DST, room=MAX_ROOM, gen=MAX_GENERATION, origin="decode", reason="")
    assert decode(encode(abort)) == abort
    assert room_named_by(encode(abort)) == RoomKey(MAX_ROOM, MAX_GENERATION)


@pytest.mark.row("C7")
def test_a_layout_that_contradicts_itself_is_malformed_not_our_error() -> None:
    hello = msgspec.msgpack.decode(FRAMES[0])
    hello["layout"]["tp_rank"] = 9
    with pytest.raises(RemoteError, match="tp_rank must be below tp_size"):
        decode(msgspec.msgpack.encode(hello))


def test_unknown_fields_are_ignored() -> None:
    assert decode(frame_of(later={"a": [1, 2]})) == decode(frame_of())


@given(st.lists(st.integers(0, 2**31 - 1)))
def test_indices_come_back_as_they_went(indices: list[int]) -> None:
    raw = pack_indices(np.array(indices, np.int64))
    assert len(raw) == 4 * len(indices)
    assert unpack_indices(raw).tolist() == indices


def test_indices_are_little_endian() -> None:
    assert pack_indices(np.array([1, 256])) == b"\1\0\0\0\0\1\0\0"


@pytest.mark.parametrize("index", [-1, 2**31, 2**32 + 5])
def test_indices_are_never_wrapped(index: int) -> None:
    with pytest.raises(ConfigError, match="31 bits"):
        pack_indices(np.array([0, index]))


@pytest.mark.row("C7")
@given(st.binary(max_size=64))
def test_torn_and_negative_indices_are_malformed(raw: bytes) -> None:
    entries = [int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, len(raw) - 3, 4)]
    if len(raw) % 4 or any(entry < 0 for entry in entries):
        with pytest.raises(MalformedFrameError):
            unpack_indices(raw)
    else:
        assert unpack_indices(raw).tolist() == entries
