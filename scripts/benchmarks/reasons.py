"""Why a target is missed, as a profile showed it: what stands in the table of figures behind "no".

Keys are (bench, pattern); the pattern is matched against ``CASE: METRIC`` as `fnmatch` does, the first match counts.
Only what a profile supports stands here, with the date or the document it stands in; a guess is no reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

UNKNOWN = "not explained yet"

REASONS: dict[tuple[str, str], str] = {
    ("gil", "*: exposed"): "each native submission gives the GIL back and waits up to a switch interval for it again: "
    "four fifths of the loop's samples stand there (docs/performance.md)",
    (
        "link",
        "*: error of the prediction, median",
    ): "the same formula fitted to these rooms afterwards errs by more: the "
    "machine does not repeat itself more exactly (docs/performance.md)",
}


def reason_for(bench: str, case: str, metric: str) -> str:
    for (name, pattern), text in REASONS.items():
        if name == bench and fnmatchcase(f"{case}: {metric}", pattern):
            return text
    return UNKNOWN
