"""Records which requirement rows the tests of a run proved, for ``scripts/rows``.

A test names its rows with ``@pytest.mark.row("A3")``. When the run ends, ``.build/rows.json`` holds::

    {"lane": "default", "selection": "", "complete": true, "time": 1767225600.0,
     "rows": {"A3": {"tests/protocols/test_blocks.py::test_merge": "passed"}}}

``scripts/test`` says through the environment which lane it runs and what was selected; a run started any other way
has the lane null. The rows travel in each report's ``user_properties``, so they arrive from xdist's workers too.
"""

import json
import os
import time
from pathlib import Path

import pytest

RESULTS = Path(".build", "rows.json")
_PROPERTY = "row"
_GROUP = "heavy"


class RowRecorder:
    """Collects the outcome of every test that names a row, and writes them when the session finishes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._rows: dict[str, dict[str, str]] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        outcome = self._outcome(report)
        if outcome is None:
            return
        nodeid = report.nodeid.removesuffix(f"@{_GROUP}")  # xdist appends the group
        for name, row in report.user_properties:
            if name == _PROPERTY:
                self._rows.setdefault(str(row), {})[nodeid] = outcome

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        stopped = session.shouldstop or session.shouldfail
        results = {
            "lane": os.environ.get("KVFERRY_LANE"),
            "selection": os.environ.get("KVFERRY_SELECTION", ""),
            "complete": exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) and not stopped,
            "time": time.time(),
            "rows": self._rows,
        }
        self._path.parent.mkdir(exist_ok=True)
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        unfinished.replace(self._path)

    @staticmethod
    def _outcome(report: pytest.TestReport) -> str | None:
        """What this phase settles about its test: a set-up or tear-down counts only when it did not pass."""
        if hasattr(report, "wasxfail"):
            return "xfailed" if report.skipped else "failed"
        if report.when == "call" or not report.passed:
            return report.outcome
        return None


def pytest_configure(config: pytest.Config) -> None:
    # A worker of xdist sends its reports to the controller, which writes for all of them.
    if not hasattr(config, "workerinput") and not config.option.collectonly:
        config.pluginmanager.register(RowRecorder(config.rootpath / RESULTS))


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in item.iter_markers("row"):
        item.user_properties.extend((_PROPERTY, row) for row in mark.args)
    # Tests that start real engines or load the model share one worker: side by side they would fight for the cores.
    if item.get_closest_marker("mooncake") or item.get_closest_marker("model"):
        item.add_marker(pytest.mark.xdist_group(_GROUP))
