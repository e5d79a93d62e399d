"""The messages of wire protocol 1, as tagged frozen structs.

Field names travel, unknown fields are ignored, sizes and counts are bounded in the type. New fields go last and have
a default. A message is one frame; its envelope fields stand beside its own (see docs/protocol.md).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from protocols.layout import Layout, Natural, Positive

PROTOCOL_VERSION = 1
MAX_FRAME_BYTES = 16 << 20
SMALL_FRAME_BYTES = 64 << 10
"""Largest frame of a message that carries no list."""
MAX_BYTES_OF = {
    "hello": 1 << 20,
    "rollover": 1 << 20,
    "offer": MAX_FRAME_BYTES,
    "done": MAX_FRAME_BYTES,
    "abort_ack": MAX_FRAME_BYTES,
}
"""The others, by type. A larger frame is dropped before it is decoded, which could take a tenth of a second."""
MAX_DESTINATIONS = 1024
MAX_COVERAGE = 65536
FOREVER_MS = 30 * 24 * 3600 * 1000

Text = Annotated[str, Meta(max_length=4096)]
Name = Annotated[str, Meta(max_length=256)]
Id = Annotated[bytes, Meta(max_length=16)]
PageBytes = Annotated[bytes, Meta(max_length=MAX_FRAME_BYTES)]
Milliseconds = Annotated[int, Meta(ge=0, le=FOREVER_MS)]
Role = Literal["prefill", "decode"]
Status = Literal["ok", "failed"]
Run = tuple[Natural, Positive]
Generation = Annotated[int, Meta(ge=0)]
"""64 bits, all that the encoding holds; every other number has 63, so that any array takes it."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """The envelope: versions, who speaks to whom, sequence and acknowledgement. ``seq`` 0 means unsequenced.

    ``dial`` says which dial of the decode a frame belongs to, in both directions: another number starts both sequences
    anew, and a frame of an earlier one is late."""

    v: int = PROTOCOL_VERSION
    src: Id = b""
    dst: Id = b""
    seq: Natural = 0
    ack: Natural = 0
    dial: Natural = 0


class Envelope(msgspec.Struct, frozen=True, kw_only=True):
    """What is decoded first: of a bad body it still tells who sent it and which sequence number it used up."""

    type: Name
    v: int
    src: Id
    dst: Id
    seq: Natural = 0
    ack: Natural = 0
    dial: Natural = 0


class RoomRef(msgspec.Struct, frozen=True, kw_only=True):
    """The room a frame names, decoded loosely so that a bad body can fail it."""

    room: Natural
    gen: Generation


class Hello(Message, frozen=True, tag="hello"):
    """Who I am. Repeated until Welcome or Refused."""

    role: Role
    fingerprint: Name
    layout: Layout
    engine: Name
    engine_version: Name
    transport: Name
    session: Name
    name: Name = ""
    """A stable name of this rank; a newer incarnation of the same name means the older is gone. Empty: none."""
    v_min: int = PROTOCOL_VERSION
    v_max: int = PROTOCOL_VERSION


class Welcome(Message, frozen=True, tag="welcome"):
    chosen: int
    session_reused: bool = False
    max_frame: Natural = MAX_FRAME_BYTES


class Refused(Message, frozen=True, tag="refused"):
    reason: Text
    fields: dict[str, str] = {}


class WrongIncarnation(Message, frozen=True, tag="wrong_incarnation"):
    """The sender's ``src`` is who is here; ``meant`` is whom the frame was for."""

    meant: Id


class Ping(Message, frozen=True, tag="ping"):
    number: Natural
    rooms: Natural = 0
    oldest_ms: Milliseconds = 0


class Pong(Message, frozen=True, tag="pong"):
    """Answer to a Ping; with number 0, nothing but a carrier for ``ack``."""

    number: Natural
    rooms: Natural = 0
    oldest_ms: Milliseconds = 0


class Offer(Message, frozen=True, tag="offer"):
    """One destination: the pages of one decode rank for one room. ``pages`` are int32, little endian."""

    room: Natural
    gen: Generation
    session: Name
    pages: PageBytes
    prefix_tokens: Natural
    total_tokens: Natural
    aux_slot: Natural | None = None
    state_rows: PageBytes = b""
    destinations: Annotated[int, Meta(ge=1, le=MAX_DESTINATIONS)] = 1
    deadline_ms: Milliseconds = FOREVER_MS
    dummy: bool = False


class Coverage(msgspec.Struct, frozen=True):
    """Landed bytes: ``[offset, offset + length)`` of every item at these positions, in each of these buffers.

    Buffers are the receiver's ids; positions are absolute pages of the request (index in the Offer for aux and state).
    """

    buffers: Annotated[tuple[Natural, ...], Meta(max_length=4096)]
    offset: Natural
    length: Natural
    runs: Annotated[tuple[Run, ...], Meta(max_length=1 << 20)]


class Digest(msgspec.Struct, frozen=True):
    """A 64-bit hash for each position of ``runs``, in order, little endian: of the page's bytes in these buffers (the
    receiver's ids), one after the other."""

    buffers: Annotated[tuple[Natural, ...], Meta(max_length=4096)]
    runs: Annotated[tuple[Run, ...], Meta(max_length=1 << 20)]
    hashes: PageBytes


class Done(Message, frozen=True, tag="done"):
    room: Natural
    gen: Generation
    status: Status
    reason: Text = ""
    coverage: Annotated[tuple[Coverage, ...], Meta(max_length=MAX_COVERAGE)] = ()
    bytes: Natural = 0
    blocks: Natural = 0
    timing: dict[str, float] = {}
    digests: Annotated[tuple[Digest, ...], Meta(max_length=MAX_COVERAGE)] = ()


class Committed(Message, frozen=True, tag="committed"):
    room: Natural
    gen: Generation
    status: Status
    reason: Text = ""


class Abort(Message, frozen=True, tag="abort"):
    room: Natural
    gen: Generation
    origin: Role
    reason: Text


class Units(msgspec.Struct, frozen=True):
    """Destination units: pages (int32, little endian), aux slots, state rows (int32, little endian)."""

    pages: PageBytes = b""
    aux: tuple[Natural, ...] = ()
    state: PageBytes = b""


class AbortAck(Message, frozen=True, tag="abort_ack"):
    """What is not quiet at this destination from this rank; everything not listed is."""

    room: Natural
    gen: Generation
    session: Name
    unknown: Units = Units()
    in_doubt: Units = Units()


class Rollover(Message, frozen=True, tag="rollover"):
    """D→P. Deadline above 0: offers name the new session from now on, rooms of the old one may finish until then.
    Deadline 0: the old engine is deleted; submit nothing to it and say RolloverAck when all its tasks are terminal."""

    old_session: Name
    session: Name
    layout: Layout
    deadline_ms: Milliseconds


class RolloverAck(Message, frozen=True, tag="rollover_ack"):
    """P→D: every task of that session is terminal here, and none will be submitted to it again."""

    session: Name


class Bye(Message, frozen=True, tag="bye"):
    deadline_ms: Milliseconds = 0


AnyMessage = (
    Hello
    | Welcome
    | Refused
    | WrongIncarnation
    | Ping
    | Pong
    | Offer
    | Done
    | Committed
    | Abort
    | AbortAck
    | Rollover
    | RolloverAck
    | Bye
)
HEARD_BY_PREFILL = frozenset({"hello", "ping", "pong", "offer", "committed", "abort", "rollover", "bye"})
HEARD_BY_DECODE = frozenset(
    {"hello", "welcome", "refused", "wrong_incarnation", "ping", "pong"}
    | {"done", "abort", "abort_ack", "rollover_ack", "bye"}
)
"""What one side may say to the other: the rest is not even decoded."""
UNSEQUENCED = (Hello, Welcome, Refused, WrongIncarnation, Ping, Pong)
