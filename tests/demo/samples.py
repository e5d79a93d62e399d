"""Fixed data of one small demo run: two layers, a draft layer, one prompt of two chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from orchestrator.demo import wire
from orchestrator.demo.driver import Results
from orchestrator.demo.verdict import Case, Transfer, compare
from orchestrator.trace import Span

PAGES = {name: ["p0", "p1", "p2 cut", "p2"] for name in ("k[0]", "v[0]", "k[1]", "v[1]", "draft_k[2]", "draft_v[2]")}


def single(**changes: Any) -> wire.SingleRun:
    run = wire.SingleRun(tokens=[5, 6], logits=["a", "b"], pages=dict(PAGES), forward_s=2.0)
    return msgspec.structs.replace(run, **changes)


def span(chunk: int, layers: tuple[int, ...], kind: str, *stamps: float) -> Span:
    fired, ready, queued, posted, landed = stamps
    return Span(chunk, layers, kind, 100, 1, fired, ready, queued, posted, landed)


def prefill(**changes: Any) -> wire.PrefillRun:
    run = wire.PrefillRun(
        gen=7,
        first_token=5,
        logits="a",
        pages=dict(PAGES),
        forwards=[(100.0, 101.0), (101.0, 102.0)],
        bytes=2_500_000,
        blocks=30,
        chunks=2,
        layers_fired=4,
        layers_fallback=2,
        written=[(0, 100.1), (1, 100.5), (0, 101.1), (1, 101.5)],
        spans=[
            span(0, (0, 1), "group", 100.5, 100.5, 100.6, 100.7, 100.9),
            span(0, (2,), "fallback", 101.0, 101.0, 101.0, 101.0, 101.1),
            span(16, (0, 1), "group", 101.5, 101.5, 101.6, 101.7, 101.9),
            span(16, (2,), "fallback", 102.0, 102.0, 102.0, 102.0, 102.1),
            span(16, (), "aux", 102.0, 102.0, 102.0, 102.0, 102.1),
        ],
        stamps={"known": 100.0, "done": 102.1},
    )
    return msgspec.structs.replace(run, **changes)


def decode(**changes: Any) -> wire.DecodeRun:
    run = wire.DecodeRun(
        tokens=[5, 6], logits=["b"], pages=dict(PAGES), committed=102.125, first_token_at=102.126, stamps={}
    )
    return msgspec.structs.replace(run, **changes)


def transfer(committed: float = 102.125, **decode_changes: Any) -> Transfer:
    source, target = prefill(), decode(committed=committed, first_token_at=committed + 0.001, **decode_changes)
    return Transfer(source, target, compare(single(), source, target))


def case() -> Case:
    result = Case("1 long", prompt=0, ids=list(range(40)), pages=3, single=single())
    result.transfers = {
        "monolithic": [transfer(102.4)],
        "layerwise": [transfer()],
        "monolithic_paced": [transfer(102.9), transfer(102.7), transfer(103.0)],
        "layerwise_paced": [transfer(102.25), transfer(102.2), transfer(102.3)],
    }
    return result


def results(**changes: Any) -> Results:
    done = Results(
        model="Tiny",
        engine="mooncake",
        completion_mode="one-block",
        link_gbps=1.0,
        cases=[case()],
        texts={"1 long": "Hi"},
    )
    return replace(done, **changes)
