"""Why a target is missed, as a profile showed it: what stands in the table of figures behind "no".

Keys are (bench, pattern); the pattern is matched against ``CASE: METRIC`` as `fnmatch` does, the first match counts.
Only what a profile supports stands here, with the date or the document it stands in; a guess is no reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

UNKNOWN = "not explained yet"

_SEE = "(docs/performance.md)"
_FLAT = "spread flat over planning, hand-over, lane and the messages of both sides: no place above a tenth"

REASONS: dict[tuple[str, str], str] = {
    ("hook", "1000 chunks against 1: *"): f"both wake a loop that has slept for 20 ms, and that varies by more {_SEE}",
    (
        "hook",
        "*: boundary layer_end",
    ): "waking a sleeping loop costs 6.8 µs by itself on such a machine, and several times "
    f"that after a longer pause {_SEE}",
    ("hook", "*: non-boundary layer_end"): f"a bare append slows from 0.14 to 0.57 µs after the same pauses {_SEE}",
    ("hook", "*thread pool*"): f"eight boundaries, each of which wakes a loop that has slept {_SEE}",
    (
        "overlap",
        "*10 × 2*: exposed, limit",
    ): "ten hand-overs of 0.13 ms one after the other once the last layer is there, "
    f"and two cores that the engine's own threads fill {_SEE}",
    ("overlap", "*: exposed, limit"): "0.4 ms until the loop hears of the last layer beside the thread that ran the "
    f"forward, and 0.7 ms of messages from the last landing to the commit {_SEE}",
    (
        "overlap",
        "MHA*: exposed, monolithic",
    ): "the last of 32 layers is 0.031 of what monolithic sends: the limit itself is above the target",
    ("overlap", "*: exposed, monolithic"): "what is above the limit is that of the row before",
    (
        "overlap",
        "*: exposed, threadpool",
    ): f"the pool gives its notice from the thread that sent; a commit is Done, proof and answer, 0.7 ms more {_SEE}",
    ("cpu", "*: CPU a block"): f"two thirds of the loop's samples at work stand in the native submission {_SEE}",
    (
        "cpu",
        "*: CPU over wall",
    ): "at loopback's rate 64 KiB take 18 µs, and 5 % of that is 0.9: less than a block costs; "
    f"for larger blocks no profile has been taken {_SEE}",
    (
        "cpu",
        "*30 % of the forward*",
    ): "that pool spins for as long as the transfer takes; ours costs as much a block as "
    "in the first row, however long it takes",
    ("gil", "*: exposed"): "each native submission gives the GIL back and waits up to a switch interval for it again: "
    f"four fifths of the loop's samples stand there {_SEE}",
    ("gil", "*: slowdown beyond the control"): f"each pass and each submission of the loop takes the GIL once {_SEE}",
    ("scale", "*"): f"{_FLAT} {_SEE}",
    (
        "fairness",
        "*p99",
    ): "its block competes with theirs inside the engine, which knows no priority, and the loop waits "
    f"for one of two busy cores {_SEE}",
    (
        "handshake",
        "warm*",
    ): "the engine's own latency for a block is 0.3 to 0.7 ms here, as the link model learns it, and "
    "the Offer's way is beside it",
    ("plan", "1,000,000 tokens*"): "the target is for 100,000 tokens; the list of a million pages is paired in one go",
    (
        "throughput",
        "*",
    ): "windows of 160 blocks at most, which a stopped peer is drained of within a minute; raw has an ideal one",
    (
        "link",
        "*: error of the prediction, median",
    ): "the same formula fitted to these rooms afterwards errs by more: the "
    f"machine does not repeat itself more exactly {_SEE}",
}


def reason_for(bench: str, case: str, metric: str) -> str:
    for (name, pattern), text in REASONS.items():
        if name == bench and fnmatchcase(f"{case}: {metric}", pattern):
            return text
    return UNKNOWN
