"""Page tables as engines keep them: rectangular, one row a request slot, with whatever an earlier request left behind
the valid entries of a row.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from protocols.blocks import Ints, page_array
from protocols.errors import LayoutError


def mask_table(row: Any, tokens: int, page_size: int) -> Ints:
    """The entries of a table row that hold the request's first ``tokens`` tokens, as an array of its own.

    What lies behind them is never looked at: it may name pages of others, or nothing at all. Raises LayoutError when
    the row ends before the tokens do, or its valid part is no list of pages.
    """
    if tokens < 0 or page_size < 1:
        raise LayoutError("a page table needs a page size, and tokens or none", tokens=tokens, page_size=page_size)
    needed = -(-tokens // page_size)
    if needed == 0:
        return np.empty(0, np.int64)
    try:
        head = row[:needed]
    except (TypeError, LookupError) as exc:
        raise LayoutError("a page table row must be a list or a one-dimensional array", row=type(row).__name__) from exc
    pages = page_array(head, "page table entries")
    if len(pages) < needed:
        raise LayoutError("the page table row is too short", entries=len(pages), needed=needed, tokens=tokens)
    return pages
