"""A model forward, simulated: layers that leave the GIL as a GPU's would, or launches that hold it as Python does."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Compute:
    """One layer's work: ``launches`` of about 20 µs of Python each, then ``sleep_s`` without the GIL."""

    sleep_s: float = 0.0
    launches: int = 0

    def layer(self) -> None:
        for _ in range(self.launches):
            launch()
        if self.sleep_s:
            time.sleep(self.sleep_s)


def launch() -> int:
    """About 20 µs of Python."""
    total = 0
    for number in range(400):
        total += number
    return total


def run_forward(layers: int, compute: Compute, layer_end: Callable[[int], object] | None = None) -> float:
    """Compute every layer and report it; returns the seconds it took. A sleep that came back late is made up for in
    the next layer, so that the forward takes as long as it should whatever the timer's grain."""
    start = time.monotonic()
    work = compute.layer
    if compute.sleep_s and not compute.launches:
        due = start
        for layer in range(layers):
            due += compute.sleep_s
            time.sleep(max(0.0, due - time.monotonic()))
            if layer_end is not None:
                layer_end(layer)
    else:
        for layer in range(layers):
            work()
            if layer_end is not None:
                layer_end(layer)
    return time.monotonic() - start
