"""docs/incidents.md: every incident has its row, every row its tests or the reason why it needs none."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

TESTS = Path(__file__).resolve().parents[1]
DOCUMENT = TESTS.parent / "docs" / "incidents.md"
DOES_NOT_APPLY = "does not apply: "

# What was read, by project and number. A row may go only together with its entry here.
NUMBERED = {
    "vllm": """
        17192 18485 27083 29503 33170 35876 35943 41230 41269 46283 46289 47021 48224 49230 49238 50620 50765 52234
        53078 53095 53314 55434 55870 56033
    """,
    "aws-do-eks": "84",
    "TRT-LLM": "9155 13713 14414 14565 14740 15727 17223",
    "LMCache": "1133 1339 4955 5248",
    "ATOM": "2146",
    "DingoCache": "234",
    "sglang": """
        17430 19931 22716 23444 23515 23937 24519 24522 24526 24527 24578 24580 25287 26486 27004 27372 27374 28236
        28529 28651 29017 29316 30233 30551 30890 31144 31188 31239 31306 31357 31993 32564 32758 33496 33970 34208
        34457 34572 34905 35049 35132 35360 35823 36029 36610 36707 37077 37454 38309 38961 38981 39428 39623 40100
        40125 40297
    """,
    "Mooncake": "1033 1088 2113 2478 2738 4247",
    "kthena": "1423",
    "dynamo": "4178 8624",
    "vllm-ascend": "5404 6125 13248 13934 16040 16315",
    "smg": "2491",
    "vllm-backport": "33",
    "nixl": "297 1159 1656 1862 1921",
    "ray": "65756",
}
NAMED = {
    "vllm-ascend, layer-wise connector",
    "Z.ai, “Scaling pain”",
    "SGLang 0.5.23, uneven stages",
    "SGLang 0.5.23, items above 4 GiB",
    "SGLang 0.5.23, figures counted twice",
    "SGLang 0.5.23, malformed frames",
    "SGLang 0.5.23, failed nodes by prefix",
    "SGLang 0.5.23, no reasons",
    "GHSA-hj4w-hm2g-p6w5",
}
INCIDENTS = {f"{project}#{number}" for project, numbers in NUMBERED.items() for number in numbers.split()} | NAMED


class Row(NamedTuple):
    incident: str
    symptom: str
    here: str
    tests: tuple[str, ...]

    @property
    def names(self) -> list[str]:
        found = re.findall(r"[\w.-]+#\d+|GHSA-[\w-]+", self.incident)
        return found or [self.incident]


def rows() -> list[Row]:
    """Every line of a table, but for its head."""
    found = []
    for line in DOCUMENT.read_text().splitlines():
        if not line.startswith("| ") or line.startswith(("| incident |", "| --- |")):
            continue
        cells = line.removeprefix("| ").removesuffix(" |").split(" | ")
        assert len(cells) == 4, f"four cells: {line}"
        found.append(Row(cells[0], cells[1], cells[2], tuple(re.findall(r"`([^`]+)`", cells[3]))))
    return found


@cache
def names_in(path: Path) -> frozenset[str]:
    """Names of the tests in a file, those of a class as ``Class::test``. Nothing is imported."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}::" if isinstance(node, ast.ClassDef) else ""
        for member in members:
            if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef) and member.name.startswith("test_"):
                found.add(prefix + member.name)
    return frozenset(found)


ROWS = rows()


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.incident.split(",")[0])
def test_a_row_has_tests_that_exist_or_a_reason(row: Row) -> None:
    if row.here.startswith(DOES_NOT_APPLY):
        assert len(row.here) > len(DOES_NOT_APPLY) + 10, "a reason"
        assert not row.tests
        return
    assert row.symptom
    assert row.here
    assert row.tests, "a test, or a reason why none is needed"
    for test in row.tests:
        file, _, name = test.partition("::")
        assert (TESTS / file).is_file(), f"no such file: {file}"
        assert name in names_in(TESTS / file), f"no such test: {test}"


def test_every_incident_has_one_row() -> None:
    named = Counter(name for row in ROWS for name in row.names)
    assert [name for name, count in named.items() if count > 1] == []
    assert set(named) == INCIDENTS


def test_every_test_of_this_folder_is_named_in_the_document() -> None:
    own = {
        f"incidents/{path.name}::{name}"
        for path in Path(__file__).parent.glob("test_*.py")
        if path != Path(__file__)
        for name in names_in(path)
    }
    assert own <= {test for row in ROWS for test in row.tests}
