"""The files the demo writes: its results as JSON, and every transfer's timeline as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.demo.driver import Results
from orchestrator.demo.verdict import Case, Transfer
from orchestrator.trace import TransferResult, chrome_trace
from protocols.errors import ConfigError
from protocols.ids import RoomKey


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a file in one step. Raises ConfigError if it cannot be written."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def as_json(results: Results) -> dict[str, Any]:
    """What ``--json`` holds."""
    return {
        "ok": results.ok,
        "engine": results.engine,
        "completion_mode": results.completion_mode,
        "model": results.model,
        "link_gbps": results.link_gbps,
        "prompts": [_case(case, results.texts.get(case.name, "")) for case in results.cases],
    }


def _case(case: Case, text: str) -> dict[str, Any]:
    equal = case.equal
    runs = case.transfers.get("layerwise", [])
    prefill = runs[-1].prefill if runs else None
    return {
        "name": case.name,
        "tokens": len(case.ids),
        "prefix_tokens": case.decode_prefix,
        "chunks": prefill.chunks if prefill else 0,
        "pages": case.pages,
        "bytes": prefill.bytes if prefill else 0,
        "layers_fired": prefill.layers_fired if prefill else 0,
        "layers_fallback": prefill.layers_fallback if prefill else 0,
        "tokens_equal": equal.tokens,
        "logits_equal": equal.logits,
        "pages_equal": equal.pages,
        "draft_equal": equal.draft,
        "remarks": list(equal.remarks),
        "text": text,
        "modes": {mode: asdict(timing) for mode, timing in case.timings.items()},
        "runs": {mode: [asdict(run.timing) for run in runs] for mode, runs in case.transfers.items()},
    }


def as_trace(results: Results) -> dict[str, Any]:
    """Every transfer of every prompt, the prefill's forwards beside its layers. Times are microseconds."""
    processes: dict[str, Sequence[TransferResult]] = {}
    for case in results.cases:
        for mode, runs in case.transfers.items():
            processes[f"{case.name}: {mode}"] = [_result(case, run) for run in runs]
    trace = chrome_trace(processes)
    return trace | {"traceEvents": _tracks(_with_forwards(trace["traceEvents"]))}


def _with_forwards(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Turn the stamps "forward N start" and "forward N end" into one bar each."""
    bars, others = [], []
    starts: dict[tuple[Any, ...], dict[str, Any]] = {}
    for event in events:
        name, _, edge = event["name"].rpartition(" ")
        key = (event["pid"], event.get("tid"), name)
        if not name.startswith("forward "):
            others.append(event)
        elif edge == "start":
            starts[key] = event
        else:
            start = starts.pop(key)
            track = f"{event['tid']} forward"
            bars.append(start | {"ph": "X", "name": name, "tid": track, "dur": event["ts"] - start["ts"]})
    return others + bars


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


def _result(case: Case, run: Transfer) -> TransferResult:
    prefill = run.prefill
    forwards = {
        f"forward {number} {edge}": at
        for number, times in enumerate(prefill.forwards, 1)
        for edge, at in zip(("start", "end"), times, strict=True)
    }
    return TransferResult(
        key=RoomKey(case.prompt + 1, prefill.gen),
        ok=True,
        error=None,
        bytes=prefill.bytes,
        blocks=prefill.blocks,
        chunks=prefill.chunks,
        layers_fired=prefill.layers_fired,
        layers_fallback=prefill.layers_fallback,
        timing={},
        spans=tuple(prefill.spans),
        stamps=prefill.stamps | forwards | {"decode may use the KV": run.decode.committed},
    )
