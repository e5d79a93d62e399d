"""Mutations that the model does not notice, each with the reason why it does no harm (V3, V4, V5).

Names may hold ``*``; the first entry counts. An entry that excuses no survivor fails the test, and so does a survivor
without an entry.
"""

_NEVER_FREE = "A unit that turns FREE leaves its lease in the same step: no event ever meets one there."
_GRANTED_ONCE = "A grant makes a new lease; it never meets units of another."
_FAILED_FIRST = "The book fails a lease before it tells it anything but a commit: this event never meets LEASED."
_COMMITTED_LIVE = "A commit of a lease that failed is refused before any unit is asked."
_STAYS = "A unit without a cell for an event stays as it is, and this cell says the same."
_ALREADY_FAILED = "The shell asks first whether the room takes the event, and if not, leaves it as it is."
NOBODY_ASKS = "Nothing fires this event there, which without a cell would be an error, and nothing asks whether it may."
_ONE_STEP = "Both actions are performed in the same step, and neither changes what the other says."

HARMLESS: dict[str, str] = {
    "LEASE_TABLE FREE *: added, *": _NEVER_FREE,
    "LEASE_TABLE * GRANT: added, *": _GRANTED_ONCE,
    "LEASE_TABLE LEASED *: added, *": _FAILED_FIRST,
    "LEASE_TABLE * COMMIT: added, *": _COMMITTED_LIVE,
    "LEASE_TABLE DRAINING FAIL: added, to DRAINING": _STAYS,
    "LEASE_TABLE UNKNOWN FAIL: added, to UNKNOWN": _STAYS,
    "LEASE_TABLE IN_DOUBT FAIL: added, to IN_DOUBT": _STAYS,
    "LEASE_TABLE IN_DOUBT QUIET: added, to IN_DOUBT": _STAYS,
    "LEASE_TABLE IN_DOUBT DEADLINE: dropped": _STAYS,
    "LEASE_TABLE IN_DOUBT DOUBT: dropped": _STAYS,
    "LEASE_TABLE UNKNOWN DEADLINE: *": (
        "Units turn UNKNOWN at the acknowledgement deadline, and a room takes that event once: it never meets UNKNOWN."
    ),
    "PREFILL_ROOM COMMITTING DRAINED: added, to COMMITTING": (
        "The shell asks after the last write whether the room has drained; a cell that leads nowhere says no as well."
    ),
    "PREFILL_ROOM *: added, *": NOBODY_ASKS,
    "DECODE_ROOM *: added, *": NOBODY_ASKS,
    "ROLLOVER *: added, *": NOBODY_ASKS,
    "PREFILL_ROOM WAITING FAIL: to LINGERING": (
        "Nothing runs before a room is ready: it has drained in the same step, and no deadline of its drain can pass."
    ),
    "PREFILL_ROOM COMMITTING FAIL: to LINGERING": (
        "Everything has landed by then: the room has drained in the same step, and no deadline of its drain can pass."
    ),
    "PREFILL_ROOM WAITING FAIL: without STOP_SUBMITTING": "Nothing is submitted or queued before a room is ready.",
    "PREFILL_ROOM COMMITTING FAIL: without STOP_SUBMITTING": "Everything has landed by then: nothing is queued.",
    "PREFILL_ROOM * FAIL: actions in the other order": (
        "Nothing is acknowledged amid the actions of an event, so the reason goes out first in either order."
    ),
    "PREFILL_ROOM DRAINING FAIL: dropped": _ALREADY_FAILED,
    "PREFILL_ROOM LINGERING FAIL: dropped": (
        "An Abort that arrives late is not answered at once: what cannot be told yet was said at the drain deadline, "
        "and the rest follows when the room has drained."
    ),
    "PREFILL_ROOM LINGERING FAIL: without ACK": "As if the event were dropped: the decode has heard it all.",
    "PREFILL_ROOM LINGERING FAIL: STOP_SUBMITTING for ACK": "As if the event were dropped: all was stopped before.",
    "PREFILL_ROOM LINGERING FAIL: TELL_PEERS for ACK": (
        "One Abort more for a decode whose room has failed: it hears the reason twice and keeps the first."
    ),
    "PREFILL_ROOM LINGERING FAIL: to DRAINING": (
        "The room says once more what it cannot tell yet, and again at another drain deadline; it drains as before."
    ),
    "PREFILL_ROOM * DRAINED: actions in the other order": _ONE_STEP,
    "DECODE_ROOM ABORTING FAIL: dropped": _ALREADY_FAILED,
    "DECODE_ROOM QUARANTINED FAIL: dropped": _ALREADY_FAILED,
}
