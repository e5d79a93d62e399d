"""Timelines as a Chrome/Perfetto trace file (N4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from orchestrator.trace import TransferResult


def chrome_trace(processes: dict[str, Sequence[TransferResult]]) -> dict[str, Any]:
    """Results of one machine's processes as a Chrome/Perfetto trace (times in microseconds).

    One track per room and phase: fired → ready (event), ready → posted (queue), posted → landed (wire). Stamps named
    "X start" and "X end" become one bar X.
    """
    starts = [
        stamp
        for results in processes.values()
        for result in results
        for stamp in (
            *result.stamps.values(),
            *(span.fired for span in result.spans),
            *(s.queued for s in result.spans),
        )
        if stamp is not None
    ]
    origin = min(starts, default=0.0)
    events: list[dict[str, Any]] = []
    for pid, (name, results) in enumerate(processes.items(), 1):
        events.append({"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}})
        for result in results:
            events += _room_events(result, pid, origin)
    return {"traceEvents": _tracks(_bars(events)), "displayTimeUnit": "ms"}


def _room_events(result: TransferResult, pid: int, origin: float) -> list[dict[str, Any]]:
    room = f"room {result.key}"
    events: list[dict[str, Any]] = [
        {"ph": "i", "s": "p", "pid": pid, "tid": room, "name": name, "ts": (at - origin) * 1e6}
        for name, at in result.stamps.items()
    ]
    for span in result.spans:
        layers = f"{span.kind} {span.layers[0]}–{span.layers[-1]}" if span.layers else span.kind
        for phase, start, end in (
            ("event", span.fired, span.ready),
            ("queue", span.ready if span.ready is not None else span.queued, span.posted),
            ("wire", span.posted, span.landed),
        ):
            if start is not None and end is not None and end >= start:
                events.append(
                    {
                        "ph": "X",
                        "pid": pid,
                        "tid": f"{room} {phase}",
                        "name": f"{layers} @{span.chunk}",
                        "cat": phase,
                        "ts": (start - origin) * 1e6,
                        "dur": (end - start) * 1e6,
                        "args": {"bytes": span.bytes, "blocks": span.blocks, "chunk": span.chunk},
                    }
                )
    return events


def _bars(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn each pair of stamps "X start" and "X end" into one bar."""
    bars, others = [], []
    starts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:  # in the order of each room's stamps: rooms of one key may be in it several times
        name, _, edge = event["name"].rpartition(" ")
        key = (event["pid"], event.get("tid"), name)
        if event["ph"] == "i" and edge == "start":
            starts[key] = event
        elif event["ph"] == "i" and edge == "end" and key in starts:
            start = starts.pop(key)
            track = f"{event['tid']} {name.split(' ')[0]}"
            bars.append(start | {"ph": "X", "name": name, "tid": track, "dur": event["ts"] - start["ts"]})
        else:
            others.append(event)
    return others + list(starts.values()) + bars


def _tracks(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Give each named track a number and a name event, and as many tracks as keep its bars from overlapping: viewers
    nest bars of one track, so half-covered ones would be drawn wrongly."""
    numbers: dict[tuple[int, str], int] = {}
    ends: dict[tuple[int, str], float] = {}
    placed, names = [], []
    for event in sorted(events, key=lambda event: float(event.get("ts", -1.0))):
        if "tid" not in event:
            placed.append(event)
            continue
        lane = 1
        while ends.get((event["pid"], track := f"{event['tid']} {lane}"), -1.0) > event["ts"]:
            lane += 1
        key = (event["pid"], track)
        ends[key] = max(ends.get(key, -1.0), event["ts"] + event.get("dur", 0.0))
        if key not in numbers:
            numbers[key] = len(numbers) + 1
            title = event["tid"] if lane == 1 else track
            names.append(
                {"ph": "M", "pid": key[0], "tid": numbers[key], "name": "thread_name", "args": {"name": title}}
            )
        placed.append(event | {"tid": numbers[key]})
    return names + placed
