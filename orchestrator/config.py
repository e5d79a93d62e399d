"""Every knob, with its unit and its default."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

from protocols.errors import ConfigError

Key = str | os.PathLike[str] | bytes
"""A CURVE key: the path of its certificate, or, as bytes, the key itself (40 characters of Z85)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Settings of one side. Raises ConfigError for a value that cannot work."""

    name: str = ""
    """A stable name of this rank; a restarted worker that keeps it is recognised as the successor. Empty: none."""
    layerwise: bool = True
    """Send layers while the forward runs. Off: the same coroutine sends the whole chunk after its forward."""
    layer_group: int | None = None
    """Hooked layers sent as one batch. None: sizes follow what was measured, and taper towards the forward's end."""
    max_layer_group: int = 8
    """Largest group when sizes are adaptive (layers)."""
    admission: bool = False
    """Refuse a room when the link model predicts that it cannot land by its deadline."""
    digest: bool = False
    """Hash every page on both sides and commit only if they agree; both sides must have it on. Host pools only."""
    link_quantum_bytes: int = 256 << 10
    """How much one room sends before the next room of the same peer has its turn (bytes)."""

    connect_timeout_s: float = 5.0
    """A peer must answer Hello, and its engine the first contact, within this (seconds)."""
    bootstrap_timeout_s: float = 120.0
    """Prefill: from the moment a room is known until it is registered and every destination has offered (seconds)."""
    progress_timeout_s: float = 30.0
    """Prefill: longest time in which nothing of a ready room fires, lands or ends (seconds)."""
    waiting_timeout_s: float = 120.0
    """Decode: from `expect` until every prefill rank has said Done (seconds)."""
    room_timeout_s: float = 120.0
    """From the moment a room is known to the moment all of it landed (seconds)."""
    commit_timeout_s: float = 30.0
    """From Done to the decode's Committed (seconds)."""
    pass_timeout_s: float = 60.0
    """A forward pass must end, or be discarded, within this (seconds); else its chunks fail."""
    drain_timeout_s: float = 5.0
    """A failed room acknowledges what is still unfinished after this (seconds); the decode then quarantines it."""
    ping_interval_s: float = 1.0
    """While rooms are open with a peer it is pinged this often (seconds). An idle process sends nothing."""
    silence_s: float = 5.0
    """A peer that says nothing for this long while rooms are open ends those rooms (seconds)."""
    tombstone_s: float = 600.0
    """How long the verdict of an ended room is remembered (seconds); a peer that acknowledges nothing for so long, or
    stays silent while it is asked, is given up, but never before `silence_s`."""

    rollover_timeout_s: float = 5.0
    """Rooms of the old engine's session may finish for this long after a rollover began (seconds)."""
    rollover_at_units: int = 1024
    """Quarantined units at which the decode rolls its engine over by itself, if it can make another."""
    quarantine_limit_units: int = 1 << 16
    """Quarantined units at which new rooms are refused."""

    secret_key: Key | None = field(default=None, repr=False)
    """This side's own pair (`kvferry keygen`): control traffic is authenticated and encrypted. None: neither."""
    server_key: Key | None = None
    """Decode: the public key of the prefill workers it dials."""
    server_keys: Mapping[str, Key] = field(default_factory=dict, hash=False)
    """Decode: the same by control address, where prefill workers have keys of their own."""
    client_keys: Sequence[Key] = field(default=(), hash=False)
    """Prefill: the public keys of the decode workers that may connect; directories of certificates count too."""
    insecure: bool = False
    """Let the control endpoint bind other than loopback addresses without keys: whoever reaches it is trusted."""

    max_peers: int = 1024
    """Prefill: decode workers at a time. Beyond it those go that were silent longest, of whoever has most of them."""
    max_peers_per_origin: int = 128
    """Prefill: decode workers at a time from one address, or with one key."""
    max_kept_offers: int = 4096
    """Offers kept for rooms not registered yet. Beyond it the oldest goes, of whoever has most; its offerer is told."""
    max_kept_pages: int = 1 << 24
    """Pages that kept offers name, all together: what bounds their memory."""
    max_peer_tombstones: int = 1 << 16
    """Verdicts remembered of rooms that only a peer ever named. Beyond it the oldest goes, of whoever has most."""
    max_bad_frames: int = 64
    """A peer that sent more undecodable frames than this is disconnected."""
    log_burst: int = 5
    """Lines of one kind that are logged per minute before they are only counted."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError("a setting must be above zero", setting=each.name, value=value)
        if self.silence_s < 2 * self.ping_interval_s:
            raise ConfigError(
                "silence_s must cover at least two pings",
                silence_s=self.silence_s,
                ping_interval_s=self.ping_interval_s,
            )
        self._check_keys()

    def _check_keys(self) -> None:
        if isinstance(self.client_keys, (str, bytes, os.PathLike)):
            raise ConfigError("client_keys is a list", hint="Put the one key, or the directory, into brackets.")
        keys = {"secret_key": [self.secret_key], "server_key": [self.server_key], "client_keys": self.client_keys}
        keys["server_keys"] = list(self.server_keys.values())
        for setting, values in keys.items():
            for value in values:
                if value is not None and not isinstance(value, (str, bytes, os.PathLike)):
                    raise ConfigError("a key is a path, or bytes", setting=setting, type=type(value).__name__)
        if self.secret_key is None:
            for setting in ("server_key", "server_keys", "client_keys"):
                if getattr(self, setting):
                    raise ConfigError(
                        f"{setting} does nothing without secret_key: the control traffic would stay in the open",
                        hint="Make a pair with `kvferry keygen DIR` and set secret_key, or remove the setting.",
                    )
