"""Which layers close a group: fixed, or from the measured forward and the link model (N6).

`plan_for` is a dictionary lookup on the forward thread; `observe`, on the loop at the end of a pass, replaces the plan
that the next pass of about that size will use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from orchestrator.config import Config
from protocols.grouping import adaptive_groups, closing_layers, fixed_groups, group_overhead
from protocols.layout import LayerBuffer

SMOOTH = 0.3
"""Weight of the newest forward in the running mean of its size."""
Seconds = Callable[[float, float], float | None]
"""(bytes, blocks) → seconds on the slowest link in use; None while nothing is known of it."""


class GroupPlan:
    """The layers that close a group. Immutable: a pass keeps the plan it began with."""

    __slots__ = ("closing", "sizes")

    def __init__(self, hooked: Sequence[int], sizes: tuple[int, ...]) -> None:
        self.sizes = sizes
        self.closing = closing_layers(tuple(hooked), sizes) if hooked else frozenset()


class GroupPlanner:
    """One prefill rank's plans, by the size of the pass: its pages and its chunks, each to a power of two."""

    def __init__(
        self, buffers: Sequence[LayerBuffer], config: Config, seconds: Seconds, submission: Callable[[], float]
    ) -> None:
        """``submission``: seconds that handing a batch to the engine keeps the loop, of late."""
        paged = [buffer for buffer in buffers if buffer.unit == "page" and buffer.hooked]
        self._hooked = tuple(sorted({buffer.layer for buffer in paged})) if config.layerwise else ()
        layers = max(1, len(self._hooked))
        self._page_bytes = sum(buffer.item_len for buffer in paged) / layers
        self._buffers = len(paged) / layers
        self._largest = config.layer_group or config.max_layer_group
        self._adaptive = config.layer_group is None
        self._seconds = seconds
        self._submission = submission
        self._compute: dict[tuple[int, int], float] = {}
        self._blocks_per_page = 1.0
        if self._adaptive:
            sizes = adaptive_groups(len(self._hooked), self._largest, None, None)
        else:
            sizes = fixed_groups(len(self._hooked), self._largest)
        self._default = GroupPlan(self._hooked, sizes)
        self._plans: dict[tuple[int, int], GroupPlan] = {}

    def plan_for(self, pages: int, chunks: int = 1) -> GroupPlan:
        """Forward thread. The plan for a pass that writes so many pages of so many chunks."""
        return self._plans.get((pages.bit_length(), chunks.bit_length()), self._default)

    def fragmented(self, runs: int, pages: int) -> None:
        """A chunk's pages were found to lie in so many runs."""
        if pages:
            self._blocks_per_page += SMOOTH * (runs / pages - self._blocks_per_page)

    def observe(self, pages: int, chunks: int, seconds: float, layers: int) -> None:
        """A pass of so many pages and chunks took this long for so many layers. Loop thread."""
        if not self._adaptive or layers <= 0 or seconds <= 0:
            return
        size = pages.bit_length(), chunks.bit_length()
        measured = seconds / layers
        known = self._compute.get(size, measured)
        compute = self._compute[size] = known + SMOOTH * (measured - known)
        transfer = self._seconds(pages * self._page_bytes, pages * self._buffers * self._blocks_per_page)
        if transfer is not None:
            overhead = group_overhead(chunks, self._submission())
            sizes = adaptive_groups(len(self._hooked), self._largest, compute, transfer, overhead)
            if sizes != self.plan_for(pages, chunks).sizes:
                self._plans[size] = GroupPlan(self._hooked, sizes)
