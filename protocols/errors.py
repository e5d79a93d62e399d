"""Every error kvferry raises, in one tree.

::

    KvferryError
    ├── LocalError                 we, or the embedder, erred
    │   ├── ConfigError            a setting or an argument is not usable         (config, layout, engines)
    │   ├── LayoutError            a layout or plan contradicts itself            (layout, blocks, ownership)
    │   ├── EngineUnavailableError a wheel, symbol or system library is missing   (engines)
    │   ├── ClosedError            we closed it: loop ended, node stopped          (inbox, loop thread)
    │   ├── BusyError              the unit, room or address has another owner    (leases, rooms, sockets)
    │   ├── UnknownRoomError       no room of that key is or recently was here    (faces)
    │   └── IllegalTransitionError a state table has no such cell                 (machines)
    ├── RemoteError                the peer erred
    │   ├── MalformedFrameError    a frame that does not decode                   (codec)
    │   ├── RefusedError           the peer, or we, refused the other's Hello     (peers)
    │   └── BrokenPeerError        the connection or the process is gone          (peers, engines)
    └── TransferError              a room did not end well; `cause` says why      (rooms)
        ├── AbortedError           a side asked for the end
        ├── MismatchError          source and destination do not cover each other
        └── DeadlineError          a deadline of the room passed

Errors carry data and build their text from it, so a log line, a metric label and a test read the same fields.
Decoding a peer's frame raises only :class:`RemoteError`; that sentence is the fuzz test.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class KvferryError(Exception):
    """Root of the tree. ``what`` says what happened, ``hint`` what to do, ``data`` holds the facts."""

    def __init__(self, what: str, *, hint: str = "", **data: Any) -> None:
        self.what = what
        self.hint = hint
        self.data: Mapping[str, Any] = data
        super().__init__(what)

    def __str__(self) -> str:
        facts = ", ".join(f"{name}={value}" for name, value in self.data.items())
        text = f"{self.what} ({facts})" if facts else self.what
        return f"{text}. {self.hint}" if self.hint else text


class LocalError(KvferryError):
    """We, or the embedder, erred."""


class ConfigError(LocalError):
    """A setting or an argument is not usable."""


class LayoutError(LocalError):
    """A layout or a plan contradicts itself."""


class EngineUnavailableError(LocalError):
    """A wheel, a symbol or a system library that the engine needs is missing or too old."""


class ClosedError(LocalError):
    """The loop, node or engine was closed by us; nothing is accepted any more."""


class BusyError(LocalError):
    """The unit, room or address already has an owner."""


class UnknownRoomError(LocalError):
    """No room with that key is, or recently was, here."""


class IllegalTransitionError(LocalError):
    """The state table has no cell for this event; the state is unchanged."""


class RemoteError(KvferryError):
    """The peer erred."""


class MalformedFrameError(RemoteError):
    """The frame does not decode, is oversized, or breaks a bound."""


class RefusedError(RemoteError):
    """A Hello was refused: another protocol version or layout. ``data`` names the fields that differ."""


class BrokenPeerError(RemoteError):
    """The peer's connection or process is gone, or it never answered."""


class TransferError(KvferryError):
    """A room ended without success; the text is the first cause."""


class AbortedError(TransferError):
    """One side asked for the end of the room."""


class MismatchError(TransferError):
    """Source and destination do not cover each other exactly."""


class DeadlineError(TransferError):
    """A deadline of the room passed; ``data`` says where the room stood."""
