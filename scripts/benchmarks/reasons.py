"""Why a target is missed, as a profile showed it: what stands in the table of figures behind "no".

Keys are (bench, pattern); the pattern is matched against ``CASE: METRIC`` as `fnmatch` does, the first match counts.
Only what a profile supports stands here, with the date or the document it stands in; a guess is no reason.
"""

from __future__ import annotations

from fnmatch import fnmatchcase

UNKNOWN = "not explained yet"

REASONS: dict[tuple[str, str], str] = {}


def reason_for(bench: str, case: str, metric: str) -> str:
    for (name, pattern), text in REASONS.items():
        if name == bench and fnmatchcase(f"{case}: {metric}", pattern):
            return text
    return UNKNOWN
