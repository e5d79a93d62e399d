"""What all tests share: the row plugin, and which lane whole folders belong to."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.row_plugin"]

LANES = {
    "tests/cancel/": "slow",
    "tests/docs/": "slow",
    "tests/faults/": "long",
    "tests/hostile/test_fuzz": "slow",
    "tests/incidents/test_storms.py": "long",
    "tests/service/test_soak_small.py": "slow",
}
"""By the beginning of a test's id: cheap enough for the full lane only, or for the long one. Faults of real processes
are long because their outcome must not hang on how busy the machine of a continuous integration is."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for beginning, lane in LANES.items():
            if item.nodeid.startswith(beginning):
                item.add_marker(lane)
