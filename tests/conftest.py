"""What all tests share: the row plugin, and which lane whole folders belong to."""

from __future__ import annotations

import pytest

pytest_plugins = ["tests.row_plugin"]

LANES = {
    "tests/cancel/": "slow",
    "tests/demo/": "slow",
    "tests/docs/": "slow",
    "tests/faults/test_addresses.py::test_memory": "long",
    "tests/faults/test_addresses.py::test_one_failed": "slow",
    "tests/faults/test_leaks.py": "slow",
    "tests/faults/test_many_restarts.py": "long",
    "tests/faults/test_neighbours.py": "long",
    "tests/faults/test_restarts.py": "slow",
    "tests/faults/test_rollover.py": "long",
    "tests/faults/test_stops.py": "long",
    "tests/hostile/test_curve.py": "slow",
    "tests/hostile/test_floods.py": "slow",
    "tests/hostile/test_fuzz": "slow",
    "tests/incidents/test_storms.py": "long",
    "tests/model/test_found.py": "slow",
    "tests/model/test_mutations.py": "slow",
    "tests/peers/test_zmq.py": "slow",
    "tests/service/test_soak_small.py": "slow",
    "tests/sim/test_found.py": "slow",
}
"""By the beginning of a test's id: cheap enough for the full lane only, or for the long one. Faults of real processes
whose outcome hangs on how busy the machine is are long."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for beginning, lane in LANES.items():
            if item.nodeid.startswith(beginning):
                item.add_marker(lane)
