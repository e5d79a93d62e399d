"""Frames to messages and back. Decoding raises MalformedFrameError and nothing else."""

from __future__ import annotations

from collections.abc import Container

import msgspec
import numpy as np

from protocols.blocks import Ints
from protocols.errors import ConfigError, KvferryError, MalformedFrameError
from protocols.ids import RoomKey, is_incarnation
from protocols.messages import (
    MAX_BYTES_OF,
    SMALL_FRAME_BYTES,
    AnyMessage,
    Envelope,
    Message,
    RoomRef,
)

_encoder = msgspec.msgpack.Encoder()
_envelope = msgspec.msgpack.Decoder(Envelope)
_message: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)
_room_ref = msgspec.msgpack.Decoder(RoomRef)

INT32_MAX = 2**31 - 1


def encode(message: Message) -> bytes:
    """One frame. Raises ConfigError if it would be larger than the peer accepts: an oversized frame drops the
    connection without a word to its sender."""
    frame = _encoder.encode(message)
    if len(frame) > SMALL_FRAME_BYTES and len(frame) > (limit := _limit(str(type(message).__struct_config__.tag))):
        raise ConfigError(
            "the message is larger than one frame",
            type=type(message).__name__,
            bytes=len(frame),
            limit=limit,
            hint="Offer fewer pages in one room, or use larger pages.",
        )
    return frame


def _limit(type_name: str) -> int:
    return MAX_BYTES_OF.get(type_name, SMALL_FRAME_BYTES)


def leading_type(frame: bytes) -> str:
    """The message's type where it stands first in the map, as our encoder writes it; else "". Looks at a few bytes."""
    start = {0xDE: 3, 0xDF: 5}.get(frame[0], 1) if frame else 0
    key = frame[start : start + 5]
    length = frame[start + 5] & 0x1F if len(frame) > start + 5 and frame[start + 5] >> 5 == 0b101 else 0
    name = frame[start + 6 : start + 6 + length]
    return name.decode("ascii", "replace") if key == b"\xa4type" else ""


def decode_envelope(frame: bytes, heard: Container[str] | None = None) -> Envelope:
    """The envelope of a frame. Raises MalformedFrameError; for a large one of a type that may not be so large, or is
    not among those ``heard``, before anything is decoded."""
    if len(frame) > SMALL_FRAME_BYTES:
        name = leading_type(frame)
        if len(frame) > _limit(name) or (heard is not None and name not in heard):
            raise MalformedFrameError("oversized frame", bytes=len(frame), limit=_limit(name), type=name)
    try:
        envelope = _envelope.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as exc:
        raise MalformedFrameError(f"not a message: {exc}") from exc
    if not is_incarnation(envelope.src) or not (envelope.dst == b"" or is_incarnation(envelope.dst)):
        raise MalformedFrameError("not an incarnation", src=envelope.src.hex(), dst=envelope.dst.hex())
    return envelope


def decode(frame: bytes) -> AnyMessage:
    """The whole message. Raises MalformedFrameError, also for an unknown type or a layout that contradicts itself."""
    try:
        return _message.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, KvferryError) as exc:
        raise MalformedFrameError(f"bad body: {exc}") from exc


def room_named_by(frame: bytes) -> RoomKey | None:
    """The room a frame with a bad body names, or None."""
    try:
        ref = _room_ref.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return None
    return RoomKey(ref.room, ref.gen)


def pack_indices(indices: Ints) -> bytes:
    """Page or row indices as int32, little endian. Raises ConfigError beyond 31 bits (pages are never wrapped)."""
    if len(indices) and (int(indices.max()) > INT32_MAX or int(indices.min()) < 0):
        raise ConfigError("an index does not fit 31 bits", largest=int(indices.max()), smallest=int(indices.min()))
    return indices.astype("<i4").tobytes()


def unpack_indices(raw: bytes) -> Ints:
    """The reverse of `pack_indices`. Raises MalformedFrameError for a torn or negative entry."""
    if len(raw) % 4:
        raise MalformedFrameError("an index list is torn", bytes=len(raw))
    indices = np.frombuffer(raw, "<i4").astype(np.int64)
    if len(indices) and int(indices.min()) < 0:
        raise MalformedFrameError("an index is negative", smallest=int(indices.min()))
    return indices
