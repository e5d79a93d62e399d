"""The files the demo writes: its results as JSON, and every transfer's timeline as a Chrome/Perfetto trace."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from orchestrator.demo.driver import Results
from orchestrator.demo.verdict import Case, Transfer
from orchestrator.perfetto import chrome_trace
from orchestrator.trace import TransferResult
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
    return chrome_trace(processes)


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
