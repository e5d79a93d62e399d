"""What a prefill room says of itself: where a stuck one stands, where the time went, what became of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from orchestrator.trace import TransferResult, difference, union_length

if TYPE_CHECKING:
    from orchestrator.prefill_room import PrefillRoom


def layer_counts(room: PrefillRoom) -> str:
    """Layers fired / queued / posted / landed / failed over all chunks and destinations, for a stuck room's report."""
    fired = sum(len(chunk.taken) for chunk in room.chunks.values())
    queued = sum(len(span.layers) for span in room.spans)
    posted = sum(len(span.layers) for span in room.spans if span.posted is not None)
    landed = sum(len(span.layers) for span in room.spans if span.landed is not None)
    failed = sum(len(span.layers) for span in room.spans if span.failed)
    return f"fired {fired}, queued {queued}, posted {posted}, landed {landed}, failed {failed}"


def timing(room: PrefillRoom) -> dict[str, float]:
    """Seconds by name; what was never stamped is absent (D2)."""
    forward_end = room.stamps.get("forward_end")
    landed = [span.landed for span in room.spans if span.landed is not None]
    named = {
        "wait_offer": difference(room.stamps.get("known"), room.stamps.get("ready")),
        "wait_event": _total(difference(span.fired, span.ready) for span in room.spans),
        "wait_engine": _total(difference(span.queued, span.landed) for span in room.spans),
        "fallback": _total(
            difference(span.queued, span.landed) for span in room.spans if span.kind in ("fallback", "whole")
        ),
        "exposed": max(0.0, max(landed) - forward_end) if landed and forward_end is not None else None,
        "transfer": union_length((span.posted, span.landed) for span in room.spans) or None,
        "predicted": room.predicted,
        "commit": difference(room.stamps.get("done"), room.stamps.get("committed")),
    }
    return {name: value for name, value in named.items() if value is not None}


def result(room: PrefillRoom) -> TransferResult:
    fake = bool(room.chunks) and all(chunk.data.fake for chunk in room.chunks.values())
    moved = not fake and any(not destination.dummy for destination in room.destinations.values())
    return TransferResult(
        key=room.key,
        ok=not room.outcome.failed,
        error=room.outcome.error,
        bytes=sum(d.bytes for d in room.destinations.values()) if moved else None,
        blocks=sum(d.blocks for d in room.destinations.values()) if moved else None,
        chunks=len(room.chunks),
        layers_fired=sum(len(chunk.taken) for chunk in room.chunks.values()),
        layers_fallback=sum(len(chunk.fallback) for chunk in room.chunks.values()),
        timing=timing(room),
        spans=tuple(room.spans),
        stamps=dict(room.stamps),
    )


def _total(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if known else None
