"""What a room's two outcomes may be, and what is a violation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from scripts.soaking.plan import Planned

REUSED = "an earlier process had this engine session"
"""A restarted decode whose engine took a port that its predecessor had refuses its first rooms, and takes another."""

Kind = Literal["ok", "aborted", "killed", "refused", "violation"]


@dataclass(frozen=True, slots=True)
class Verdict:
    kind: Kind
    why: str = ""


def judge(planned: Planned, decode: dict[str, Any] | None, prefill: dict[str, Any]) -> Verdict:
    """``decode`` is None where its process was killed before it answered. Pages are compared elsewhere: a page that
    is wrong is a violation whatever this says."""
    if decode is None:
        return Verdict("killed")
    if decode["ok"] and prefill["ok"]:
        return Verdict("ok")
    if prefill["ok"]:
        return Verdict("violation", f"the prefill says success, the decode: {decode['error']}")
    if decode["aborted"] or prefill["aborted"]:
        # A prefill that ends a room between Done and Committed fails a room that its decode has committed.
        if decode["ok"] and not prefill["aborted"]:
            return Verdict("violation", f"only the prefill failed: {prefill['error']}")
        return Verdict("aborted")
    if REUSED in decode["error"]:
        return Verdict("refused", decode["error"])
    return Verdict(
        "violation",
        f"nobody ended it, and yet it failed; decode: {decode['error'] or 'ok'}; prefill: {prefill['error']}"
        f"{'' if planned.abort is None else ' (the abort that was planned came too late)'}",
    )


def left_over(role: str, tables: dict[str, Any]) -> list[str]:
    """What must be empty when every room has ended, and is not."""
    must = ["rooms", "busy_lanes", "permits", "batches", "pinned", "tasks", "open"]
    if role == "decode":
        must = ["rooms", "taken", "tasks", "open"]
    left = [f"{name}: {tables[name]}" for name in must if tables[name]]
    if role == "decode" and tables["rollover"] != "IDLE":
        left.append(f"rollover: {tables['rollover']}")
    return left
