"""What the driver and its workers say to each other: one JSON object a line, over a socket pair.

The driver sends commands; a worker answers each with one :class:`Done` or :class:`Failed`, in order, and may send
:class:`Note` at any time. Times are seconds of CLOCK_MONOTONIC, which all processes of one machine share.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from orchestrator.trace import Span

Mode = Literal["monolithic", "layerwise"]
Digests = dict[str, list[str]]
"""Page hashes by buffer name; see ``PagedPool.digest``."""


class Command(msgspec.Struct, frozen=True, tag_field="do"):
    """Something a worker is asked to do."""


class Convert(Command, frozen=True, tag="convert"):
    """Make the fast copy of the model."""


class Open(Command, frozen=True, kw_only=True, tag="open"):
    """Load the model and get everything ready. Answered with an :class:`Opened`."""

    cache: str
    """Directory of the fast copy."""
    pages: int
    page_size: int
    chunk_tokens: int
    layer_group: int
    link_gbps: float
    control_port: int = 0
    inject: str = ""
    warm_up: bool = True
    """Run what will be timed once before: the first forwards of a process are slow."""


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    engine: str = ""
    completion_mode: str = ""
    address: str = ""
    """Prefill: where its control socket listens."""


class Connect(Command, frozen=True, tag="connect"):
    """Decode: make contact with the prefill at ``address``."""

    address: str


class Tokenize(Command, frozen=True, tag="tokenize"):
    """Apply the chat template. Answered with one list of token ids per text."""

    texts: list[str]


class Detokenize(Command, frozen=True, tag="detokenize"):
    """Answered with one text per list of token ids."""

    tokens: list[list[int]]


class Job(Command, frozen=True, kw_only=True):
    """One prompt, one way. ``prefix_tokens`` are there already, ``keep_tokens`` are left for a later job."""

    prompt: int
    """Index of the prompt; its kept prefix and its draft bytes go by this."""
    prefix_tokens: int = 0
    keep_tokens: int = 0
    new_tokens: int = 0


class SingleJob(Job, frozen=True, tag="single"):
    """Prefill and generate in one process. Answered with a :class:`SingleRun`."""

    ids: list[int]


class PrefillJob(Job, frozen=True, tag="prefill"):
    """Prefill and send. Answered with a :class:`PrefillRun` when everything is done and the source is free."""

    room: int
    gen: int
    ids: list[int]
    mode: Mode
    paced: bool


class DecodeJob(Job, frozen=True, tag="decode"):
    """Receive and generate. Notes ``expecting`` once the room is registered; answered with a :class:`DecodeRun`."""

    room: int
    gen: int
    total_tokens: int


class Close(Command, frozen=True, tag="close"):
    """Close everything in order and end."""


AnyCommand = Convert | Open | Connect | Tokenize | Detokenize | SingleJob | PrefillJob | DecodeJob | Close


class SingleRun(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    logits: list[str]
    """Hashes: of the prefill's last position, then of each decode step."""
    pages: Digests
    forward_s: float


class PrefillRun(msgspec.Struct, frozen=True, kw_only=True):
    gen: int
    first_token: int
    logits: str
    """Hash of the logits that chose the first token."""
    pages: Digests
    forwards: list[tuple[float, float]]
    """When each forward began, and when its KV, draft pages and aux slot were final."""
    bytes: int
    blocks: int
    chunks: int
    layers_fired: int
    layers_fallback: int
    written: list[tuple[int, float]]
    """Layer and time of every hook, in order, as the forward thread saw them."""
    spans: list[Span]
    stamps: dict[str, float]


class DecodeRun(msgspec.Struct, frozen=True, kw_only=True):
    tokens: list[int]
    logits: list[str]
    """Hashes of each decode step."""
    pages: Digests
    committed: float
    """When the worker's thread was told that it may use the pages."""
    first_token_at: float
    stamps: dict[str, float]


class Note(msgspec.Struct, frozen=True, tag="note"):
    """Something to show while a command runs."""

    text: str


class Done(msgspec.Struct, frozen=True, tag="done"):
    value: msgspec.Raw


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """``expected``: the text is a clear message for the user; otherwise it is a bug and the text its traceback."""

    text: str
    expected: bool


EXPECTING = "expecting"

encode = msgspec.json.Encoder().encode
decode_command = msgspec.json.Decoder(AnyCommand).decode
decode_answer = msgspec.json.Decoder(Note | Done | Failed).decode


def line(message: Any) -> bytes:
    """One message as a line."""
    return encode(message) + b"\n"
