"""What landed, told by the sender and proven by the receiver (the coverage rule; byte totals alone would let chunk 1
written over chunk 0 pass).

The sender builds its ledger from completed blocks, never from the plan. The receiver commits when the union over all
ranks is exactly its own list: each buffer, each position, once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from protocols.errors import MismatchError
from protocols.messages import Coverage

Runs = tuple[tuple[int, int], ...]

MAX_RUNS = 1 << 18
"""Runs that one room's proof may hold, all buffers together (shared lists count once): about 0.1 s of the loop."""


class Ledger:
    """Sender side: what has landed at one destination."""

    def __init__(self) -> None:
        self._landed: dict[tuple[int, int], list[tuple[int, int]]] = {}

    def landed(self, buffers: Iterable[int], item_len: Mapping[int, int], runs: Runs) -> None:
        """Every item at these positions of these (receiver) buffers is COMPLETED, whole."""
        if not runs:
            return  # a buffer that expects nothing must not appear in the report
        for buffer in buffers:
            self._landed.setdefault((buffer, item_len[buffer]), []).extend(runs)

    def coverage(self) -> tuple[Coverage, ...]:
        """The ledger as it travels: buffers with equal runs share one entry."""
        groups: dict[tuple[Runs, int], list[int]] = {}
        for (buffer, length), runs in self._landed.items():
            groups.setdefault((merged(runs), length), []).append(buffer)
        return tuple(Coverage(tuple(sorted(ids)), 0, length, runs) for (runs, length), ids in groups.items())


def merged(runs: Iterable[tuple[int, int]]) -> Runs:
    """Sorted runs with exact neighbours joined. Overlaps are kept apart: they are an error for the receiver to see."""
    joined: list[tuple[int, int]] = []
    for first, count in sorted(runs):
        if joined and joined[-1][0] + joined[-1][1] == first:
            joined[-1] = (joined[-1][0], joined[-1][1] + count)
        else:
            joined.append((first, count))
    return tuple(joined)


class Expected:
    """Receiver side: for every buffer the positions it must get, as one run each, and what was reported so far."""

    def __init__(self, wanted: Mapping[int, tuple[int, int, int]]) -> None:
        """``wanted``: buffer id -> (item_len, first position, count of positions)."""
        self._wanted = {buffer: want for buffer, want in wanted.items() if want[2]}
        self._reported: dict[int, list[Runs]] = {buffer: [] for buffer in self._wanted}
        """By reference: a frame that names one long list for thousands of buffers must not be multiplied here."""

    def add(self, coverage: Sequence[Coverage]) -> None:
        """Take one rank's report. Raises MismatchError for a buffer or a part of an item that was not asked for."""
        for entry in coverage:
            for buffer in entry.buffers:
                want = self._wanted.get(buffer)
                if want is None:
                    raise MismatchError("coverage of a buffer that expects nothing", buffer=buffer)
                if entry.offset != 0 or entry.length != want[0]:
                    raise MismatchError(
                        "coverage of a part of an item",
                        buffer=buffer,
                        offset=entry.offset,
                        length=entry.length,
                        item=want[0],
                    )
                if entry.runs:
                    self._reported[buffer].append(entry.runs)

    def check(self) -> None:
        """Raise MismatchError unless every buffer is covered exactly: no gap, no overlap, nothing beyond."""
        verified: set[tuple[tuple[int, ...], int, int]] = set()
        checked = 0
        for buffer, (_, first, count) in self._wanted.items():
            reports = self._reported[buffer]
            runs = sum(len(report) for report in reports)
            if runs > count:  # each has a position at least: told before a list is repeated thousands of times
                raise MismatchError("coverage has an excess", buffer=buffer, reported=runs, wanted=count)
            known = (tuple(id(report) for report in reports), first, count)  # buffers share their reports' run lists
            if known not in verified:
                checked += runs
                if checked > MAX_RUNS:
                    raise MismatchError("coverage is cut too finely to be checked", runs=checked, limit=MAX_RUNS)
                _check_runs(buffer, sorted(run for report in reports for run in report), first, count)
                verified.add(known)


def _check_runs(buffer: int, runs: list[tuple[int, int]], first: int, count: int) -> None:
    """Raise MismatchError unless these sorted runs are exactly ``[first, first + count)``."""
    at = first
    for start, length in runs:
        if start != at:
            what = "gap" if start > at else "overlap"
            raise MismatchError(f"coverage has a {what}", buffer=buffer, at=min(at, start), reported=len(runs))
        at += length
    if at != first + count:
        what = "gap" if at < first + count else "excess"
        raise MismatchError(f"coverage has a {what}", buffer=buffer, at=min(at, first + count), reported=len(runs))
