"""Hypothesis as this suite uses it: the same examples in every run, no clock in the verdict.

A folder's conftest calls `load` before its tests are imported. ``KVFERRY_EXAMPLES=N`` looks further: N times the
examples, drawn at random.
"""

import os

from hypothesis import HealthCheck, settings

_FACTOR = int(os.environ.get("KVFERRY_EXAMPLES", "0"))


def examples(count: int) -> settings:
    """Settings for one test that needs another number of examples than the default."""
    return settings(max_examples=count * max(_FACTOR, 1))


def load() -> None:
    settings.register_profile(
        "kvferry",
        deadline=None,
        derandomize=_FACTOR == 0,
        max_examples=100 * max(_FACTOR, 1),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("kvferry")
