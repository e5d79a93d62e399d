"""The rooms of the house: who may import whom, read from the sources. The tables below are the rules."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAX_LINES = 400

# Lowest first. An entry names a module or a whole package below `orchestrator`; a module may import, at run time, what
# stands in its own line or above. A module that stands nowhere fails: give it its place.
FLOORS: list[tuple[str, ...]] = [
    ("config", "metrics", "trace", "clock", "log", "timerfd", "pages", "digest", "hosts"),
    ("inbox", "outcome", "perfetto", "deadlines"),
    ("engines",),
    ("progress", "cuda_events", "curve", "wire", "planner", "handover"),
    ("registry", "flow", "link", "guests", "hello", "contacts", "dialer", "reception"),
    ("transfer", "forward", "chunk", "destination"),
    (
        "kept",
        "prefill_report",
        "prefill_room",
        "decode_room",
        "sessions",
        "rollover",
        "sender",
        "receiver",
        "prefill",
        "decode",
    ),
    ("node", "service", "control", "loop_thread"),
    ("orchestrator",),  # the package itself, which hands out the public names
    ("adapters", "testing"),
    ("demo",),
    ("cli",),
]
# Imports under TYPE_CHECKING may point upwards from this floor on (a chunk knows the type of its room), never below.
TYPES_MAY_POINT_UP_FROM = "registry"

# What the pure core may use. No loop, thread, lock, clock, socket, process, file or log among them.
CORE_PACKAGES = {"msgspec", "numpy", "protocols"}
CORE_STDLIB = {
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "math",
    "operator",
    "random",
    "typing",
}


@dataclass(frozen=True)
class Import:
    target: str
    """Dotted name of the module, or of the name imported from it."""
    line: int
    types_only: bool
    at_start: bool
    """Executed when the module is imported, not later within a function."""


def source_files(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for package in ("orchestrator", "protocols") for path in source_files(package)}
CORE = {name: path for name, path in MODULES.items() if name.split(".")[0] == "protocols"}
HOUSE = {name: path for name, path in MODULES.items() if name not in CORE}


def is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def imports_of(name: str, source: str, *, package: bool = False) -> list[Import]:
    """Every import statement of a module, relative ones made absolute."""

    def walk(node: ast.AST, types_only: bool, at_start: bool) -> Iterator[Import]:
        match node:
            case ast.Import():
                for alias in node.names:
                    yield Import(alias.name, node.lineno, types_only, at_start)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    here = name.split(".") if package else name.split(".")[:-1]
                    base = ".".join([*here[: len(here) - node.level + 1], *([base] if base else [])])
                for alias in node.names:
                    yield Import(f"{base}.{alias.name}", node.lineno, types_only, at_start)
            case ast.If() if is_type_checking(node.test):
                for typed in node.body:
                    yield from walk(typed, True, at_start)
                for other in node.orelse:
                    yield from walk(other, types_only, at_start)
            case _:
                inside = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                for child in ast.iter_child_nodes(node):
                    yield from walk(child, types_only, at_start and not inside)

    return list(walk(ast.parse(source), False, True))


def imports_of_module(name: str) -> list[Import]:
    path = MODULES[name]
    return imports_of(name, path.read_text(), package=path.name == "__init__.py")


def module_of(target: str) -> str | None:
    """The longest prefix of a dotted name that is one of our modules."""
    parts = target.split(".")
    for end in range(len(parts), 0, -1):
        if ".".join(parts[:end]) in MODULES:
            return ".".join(parts[:end])
    return None


def floor_of(name: str) -> int | None:
    """On which floor a module of the orchestrator stands; None where the table has no place for it."""
    top = name.removeprefix("orchestrator.").split(".")[0]
    return next((nth for nth, entries in enumerate(FLOORS) if top in entries), None)


def upward(name: str, imports: list[Import]) -> list[str]:
    """The imports of a module that break the order."""
    mine = floor_of(name)
    assert mine is not None
    free = floor_of(f"orchestrator.{TYPES_MAY_POINT_UP_FROM}")
    assert free is not None
    broken: list[str] = []
    for each in imports:
        target = module_of(each.target)
        if target is None or not target.startswith("orchestrator"):
            continue
        theirs = floor_of(target)
        if theirs is None or (theirs > mine and not (each.types_only and mine >= free)):
            broken.append(f"line {each.line}: {each.target}")
    return broken


@pytest.mark.parametrize("name", CORE)
def test_the_core_imports_only_what_is_pure(name: str) -> None:
    for each in imports_of_module(name):
        top = each.target.split(".")[0]
        assert top in CORE_PACKAGES | CORE_STDLIB, f"line {each.line} imports {each.target}"
        assert top in CORE_PACKAGES or top in sys.stdlib_module_names


@pytest.mark.parametrize("name", CORE)
def test_the_core_has_no_coroutine_and_draws_no_luck_of_its_own(name: str) -> None:
    for node in ast.walk(ast.parse(CORE[name].read_text())):
        assert not isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "random":
            assert node.attr == "Random", "randomness is handed in"


@pytest.mark.parametrize("name", HOUSE)
def test_imports_flow_downwards(name: str) -> None:
    assert floor_of(name) is not None, "give the module its place in FLOORS"
    assert upward(name, imports_of_module(name)) == []


def test_no_module_imports_itself_in_a_circle() -> None:
    graph: dict[str, set[str]] = {}
    for name in MODULES:
        targets = {module_of(each.target) for each in imports_of_module(name) if each.at_start and not each.types_only}
        graph[name] = {target for target in targets if target is not None and target != name}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, f"a circle: {' -> '.join([*path[path.index(name) :], name])}"
        if name not in done:
            for target in sorted(graph[name]):
                visit(target, (*path, name))
            done.add(name)

    for name in sorted(graph):
        visit(name, ())


@pytest.mark.parametrize("name", MODULES)
def test_no_module_is_longer_than_a_reader_bears(name: str) -> None:
    lines = len(MODULES[name].read_text().splitlines())
    assert lines <= MAX_LINES, f"{lines} lines"


@pytest.mark.parametrize("package", ["protocols", "orchestrator/pages"])
def test_every_pure_module_has_its_test_file(package: str) -> None:
    tests = ROOT / "tests" / Path(package).name
    for path in source_files(package):
        if path.name != "__init__.py":
            assert (tests / f"test_{path.name}").exists(), path.name


@pytest.mark.parametrize("package", ["protocols", "orchestrator/pages"])
def test_the_map_of_a_pure_package_names_its_modules(package: str) -> None:
    text = ast.get_docstring(ast.parse((ROOT / package / "__init__.py").read_text())) or ""
    table = re.split(r"^=+ +=+$", text, flags=re.MULTILINE)[1]
    named = {line.split()[0] for line in table.splitlines() if line[:1].isalpha()}
    assert named == {path.stem for path in source_files(package) if path.name != "__init__.py"}


# The checks themselves.


def test_imports_are_found_wherever_they_stand() -> None:
    source = """
import asyncio, numpy as np
from orchestrator.link import Link
from . import clock
from .engines.base import Engine
if TYPE_CHECKING:
    from orchestrator.sender import Sender
else:
    import zmq
def late():
    import torch
class Body:
    import msgspec
"""
    found = {each.target: (each.types_only, each.at_start) for each in imports_of("orchestrator.flow", source)}
    assert found == {
        "asyncio": (False, True),
        "numpy": (False, True),
        "orchestrator.link.Link": (False, True),
        "orchestrator.clock": (False, True),
        "orchestrator.engines.base.Engine": (False, True),
        "orchestrator.sender.Sender": (True, True),
        "zmq": (False, True),
        "torch": (False, False),
        "msgspec": (False, True),
    }
    inside = imports_of("orchestrator.engines", "from .base import Engine\nfrom ..clock import Clock", package=True)
    assert [each.target for each in inside] == ["orchestrator.engines.base.Engine", "orchestrator.clock.Clock"]


@pytest.mark.parametrize(
    "name, source, good",
    [
        ("orchestrator.engines.paced", "from orchestrator.sender import Sender", False),
        ("orchestrator.engines.paced", "def f():\n    from orchestrator.sender import Sender", False),
        ("orchestrator.engines.paced", "from orchestrator import sender", False),
        ("orchestrator.engines.paced", "import orchestrator", False),
        ("orchestrator.engines.paced", "if TYPE_CHECKING:\n    from orchestrator.sender import Sender", False),
        ("orchestrator.engines.paced", "from orchestrator.engines.base import Engine", True),
        ("orchestrator.engines.paced", "from orchestrator.clock import Clock", True),
        ("orchestrator.transfer", "from orchestrator.sender import Sender", False),
        ("orchestrator.transfer", "if TYPE_CHECKING:\n    from orchestrator.sender import Sender", True),
        ("orchestrator.sender", "from orchestrator.transfer import run_chunk", True),
        ("orchestrator.node", "from orchestrator import Prefill", False),
        ("orchestrator.demo.prefill", "from orchestrator import Prefill", True),
        ("orchestrator.config", "from orchestrator.inbox import Inbox", False),
        ("orchestrator.config", "from protocols.errors import ConfigError", True),
    ],
)
def test_the_order_is_told(name: str, source: str, good: bool) -> None:
    assert (upward(name, imports_of(name, source)) == []) is good
