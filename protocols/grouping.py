"""How many layers to send together: group sizes for one forward. Pure.

What stays exposed is the tail: whatever the last group still has to send when the forward ends. So the last group is
as small as its own cost allows, and each one before it as large as can be sent while the layers behind it are computed:

    size(n) · transfer + overhead ≤ size(n + 1) · compute        (seconds a layer; n counts towards the end)

which grows geometrically when the link is faster than the forward: few submissions, one exposed layer. When the link is
the slower one there is a backlog, and it is shortest when the link is busy from the first layer on: groups stay as
small as their own cost allows. That cost is the loop's, which must keep up with the groups as they fire.
"""

from __future__ import annotations

import math

OVERHEAD_S = 0.0003
"""What one group costs beside its bytes: an event, a wake-up, a poll (measured, generous)."""
CHUNK_S = 0.0001
"""And for each chunk of the pass, at the least: a plan, a hand-over, a submission (measured, generous)."""
LEISURE = 2.0
"""Groups fire no faster than so many times their cost: half of the loop's time is for everything else."""
STATIC_TAIL = (1, 1, 2, 4)
"""The tail while nothing has been measured, from the end."""


def fixed_groups(layers: int, size: int) -> tuple[int, ...]:
    """Groups of ``size`` layers; the last one takes what is left."""
    return tuple(min(size, layers - first) for first in range(0, layers, size))


def group_overhead(chunks: int, submission_s: float) -> float:
    """Seconds that a group of a pass with so many chunks costs the loop, where a submission of late kept it for
    ``submission_s``. Beside a forward thread that holds the GIL a submission waits for it, and so does the question
    after it, a switch interval each: small groups would wait for longer than the forward takes."""
    return OVERHEAD_S + max(CHUNK_S, 2 * submission_s) * chunks


def adaptive_groups(
    layers: int, largest: int, compute_s: float | None, transfer_s: float | None, overhead_s: float = OVERHEAD_S
) -> tuple[int, ...]:
    """Sizes in the order of the forward, for ``compute_s`` and ``transfer_s`` seconds a layer (None: not measured).

    Each is between 1 and ``largest``; they sum to ``layers``.
    """
    if layers <= 0:
        return ()
    if compute_s is None or transfer_s is None or compute_s <= 0:
        return _from_the_end(layers, largest, list(STATIC_TAIL))
    tail = [min(largest, max(1, math.ceil(overhead_s / compute_s)))]
    steady = math.ceil(LEISURE * overhead_s / compute_s)
    while sum(tail) < layers and tail[-1] < largest:
        hidden = tail[-1] * compute_s - overhead_s
        fits = math.floor(hidden / transfer_s) if transfer_s > 0 else largest
        tail.append(min(largest, max(tail[-1], steady, fits)))
    return _from_the_end(layers, largest, tail)


def _from_the_end(layers: int, largest: int, tail: list[int]) -> tuple[int, ...]:
    """Sizes built backwards: the tail first, then the largest, the remainder at the very front."""
    sizes: list[int] = []
    left = layers
    for size in tail:
        if left <= 0:
            break
        sizes.append(min(size, largest, left))
        left -= sizes[-1]
    while left > 0:
        sizes.append(min(largest, left))
        left -= sizes[-1]
    return tuple(reversed(sizes))


def closing_layers(hooked: tuple[int, ...], sizes: tuple[int, ...]) -> frozenset[int]:
    """The hooked layers (in forward order) that close a group of these sizes."""
    closing: list[int] = []
    end = 0
    for size in sizes:
        end += size
        closing.append(hooked[min(end, len(hooked)) - 1])
    return frozenset(closing)
