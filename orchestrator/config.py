"""Every knob, with its unit and its default."""

from __future__ import annotations

from dataclasses import dataclass, fields

from protocols.errors import ConfigError


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
    """How long the verdict of an ended room is remembered (seconds)."""

    rollover_timeout_s: float = 5.0
    """Rooms of the old engine's session may finish for this long after a rollover began (seconds)."""
    rollover_at_units: int = 1024
    """Quarantined units at which the decode rolls its engine over by itself, if it can make another."""
    quarantine_limit_units: int = 1 << 16
    """Quarantined units at which new rooms are refused."""

    max_kept_offers: int = 4096
    """Offers kept for rooms that are not registered yet; the oldest beyond this is told so and dropped."""
    max_bad_frames: int = 64
    """A peer that sent more undecodable frames than this is disconnected."""
    log_burst: int = 5
    """Lines of one kind that are logged per minute before they are only counted."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (int, float)) and not isinstance(value, bool) and value <= 0:
                raise ConfigError("a setting must be above zero", setting=field.name, value=value)
        if self.silence_s < 2 * self.ping_interval_s:
            raise ConfigError(
                "silence_s must cover at least two pings",
                silence_s=self.silence_s,
                ping_interval_s=self.ping_interval_s,
            )
