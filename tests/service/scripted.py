"""A prefill whose engine follows a script, a decode, and chunks to send between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from orchestrator.chunk import ChunkSpec
from orchestrator.engines.faulty import Match
from orchestrator.pages.ranges import Range
from orchestrator.testing.cluster import Cluster
from orchestrator.testing.pool import Pool
from protocols.blocks import Blocks, Ints
from protocols.ids import Session
from tests.service.scenes import config, ints, wrapped

SOURCE, TARGET = ints(3, 4, 9), ints(20, 7, 8)
PAGE = 4
"""Tokens of a page, unless a test says otherwise."""


def scene(**changes: Any) -> Cluster:
    """One prefill whose engine follows a script, one decode."""
    fields: dict[str, Any] = {"prefills": [Pool(seed=1)], "decodes": [Pool()], "config": config(), "wrap": wrapped()}
    return Cluster(**fields | changes)


def differences(cluster: Cluster, source: Ints = SOURCE, target: Ints = TARGET) -> list[str]:
    return cluster.prefill_pools[0].differences(cluster.decode_pools[0], source, target)


class RaiseOnce:
    """In place of a function: raises at these calls (from 0), else calls it."""

    def __init__(self, real: Callable[..., Any], *at: int, error: type[Exception] = RuntimeError) -> None:
        self.real, self.at, self.error = real, at, error
        self.calls = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise self.error("injected")
        return self.real(*args, **kwargs)

    def __get__(self, owner: object, _: type) -> Callable[..., Any]:
        return lambda *args, **kwargs: self(owner, *args, **kwargs)


def pages_of(span: Range, table: Ints, page_size: int = PAGE) -> Ints:
    """The source pages of a range."""
    first, count = span.positions(page_size)
    return table[first : first + count]


def chunk_of(span: Range, table: Ints, page_size: int = PAGE, **more: Any) -> ChunkSpec:
    return ChunkSpec(
        room=1,
        start_token=span.start_token,
        end_token=span.end_token,
        pages=pages_of(span, table, page_size),
        last=span.last,
        **more,
    )


def to_pages(layout_of: Pool, pages: Ints) -> Match:
    """Match submissions that write one of these pages of a destination."""
    low, high = [], []
    for buffer in layout_of.layout.unit_buffers("page"):
        low += [buffer.address + page * buffer.item_len for page in pages.tolist()]
        high += [buffer.address + (page + 1) * buffer.item_len for page in pages.tolist()]
    spans = list(zip(low, high, strict=True))

    def match(session: Session, blocks: Blocks, ordinal: int) -> bool:
        return any(a <= dst < b for dst in blocks.dst.tolist() for a, b in spans)

    return match
