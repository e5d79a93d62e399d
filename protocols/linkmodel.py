"""What one link costs, learnt online: seconds = latency + bytes / bandwidth + blocks × cost. Pure.

Weighted least squares with exponential forgetting over busy periods of the link, each weighted by 1 / seconds² so that
what is fitted is the relative error; the three costs are kept non-negative by solving over the subsets that are. The
uncertainty is the running mean of the relative error of predictions made before each observation.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import numpy.typing as npt

FORGET = 0.97
"""Weight of the past at each observation: about the last thirty busy periods count."""
MIN_OBSERVATIONS = 8
SCALE = np.array([1.0, 1e6, 1e3])
"""Latency, megabytes, thousands of blocks: numbers of one size, so that the equations are well conditioned."""
RIDGE = 1e-6


@dataclass(frozen=True, slots=True)
class LinkCosts:
    """The fitted costs, in seconds, seconds a byte, seconds a block."""

    latency_s: float
    byte_s: float
    block_s: float

    def seconds(self, nbytes: float, blocks: float, starts: float = 1.0) -> float:
        return starts * self.latency_s + nbytes * self.byte_s + blocks * self.block_s


class LinkModel:
    """One link. `observe` after each busy period; `predict` before sending."""

    def __init__(self) -> None:
        self._normal = np.zeros((3, 3))
        self._target = np.zeros(3)
        self._costs: LinkCosts | None = None
        self.observations = 0
        self.error = 0.0
        """Running mean of |predicted - actual| / actual."""

    def observe(self, nbytes: int, blocks: int, seconds: float, *, starts: int = 1) -> None:
        """A busy period moved this much in this time. ``starts`` is 0 for a period that continues an earlier one."""
        if seconds <= 0 or blocks <= 0:
            return
        predicted = self.predict(nbytes, blocks, starts=starts)
        if predicted is not None:
            self.error += 0.1 * (abs(predicted - seconds) / seconds - self.error)
        row = np.array([starts, nbytes, blocks]) / SCALE / seconds
        self._normal = FORGET * self._normal + np.outer(row, row)
        self._target = FORGET * self._target + row
        self.observations += 1
        self._costs = None

    @property
    def known(self) -> bool:
        """Enough was observed to predict."""
        return self.observations >= MIN_OBSERVATIONS

    def predict(self, nbytes: int, blocks: int, *, starts: int = 1) -> float | None:
        """Seconds to move this much, alone on the link; None until enough was observed."""
        if not self.known:
            return None
        return self.costs().seconds(nbytes, blocks, starts)

    def costs(self) -> LinkCosts:
        """The present fit."""
        if self._costs is None:
            best = _non_negative(self._normal, self._target) / SCALE
            self._costs = LinkCosts(float(best[0]), float(best[1]), float(best[2]))
        return self._costs


def _non_negative(normal: npt.NDArray[np.float64], target: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """The non-negative solution of least error: with three unknowns every subset can be tried."""
    best, least = np.zeros(3), 0.0
    for count in (1, 2, 3):
        for chosen in combinations(range(3), count):
            part = np.ix_(chosen, chosen)
            matrix = normal[part] + RIDGE * np.diag(np.diag(normal[part]))
            try:
                values = np.linalg.solve(matrix, target[list(chosen)])
            except np.linalg.LinAlgError:
                continue
            if (values < 0).any():
                continue
            full = np.zeros(3)
            full[list(chosen)] = values
            error = float(full @ normal @ full - 2 * full @ target)
            if error < least:
                best, least = full, error
    return best
