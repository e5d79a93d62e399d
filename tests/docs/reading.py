"""The documents as the tests read them: Markdown without a parser, as far as these pages need one."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


class Block(NamedTuple):
    language: str
    text: str


def blocks(path: Path) -> list[Block]:
    """The fenced code blocks of a page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", path.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [Block(*each) for each in found]


def prose(path: Path) -> str:
    """A page without its fenced code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def between(text: str, first: str, last: str) -> str:
    """What stands between two marks, each of which stands there once."""
    assert text.count(first) == 1, first
    assert text.count(last) == 1, last
    return text.partition(first)[2].partition(last)[0]


def links(path: Path) -> Iterator[str]:
    """Targets of a page's links."""
    yield from re.findall(r"\]\(([^)\s]+)\)", prose(path))


def anchors(path: Path) -> set[str]:
    """What a page's headings can be linked to by."""
    headings = re.findall(r"^#+ (.+)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(path: Path) -> list[str]:
    """Every ``scripts/…`` and ``kvferry …`` command that a page tells its reader to run."""
    shell = [block.text for block in blocks(path) if block.language in ("console", "sh", "bash")]
    typed = [line.removeprefix("$ ") for text in shell for line in text.splitlines() if line.startswith("$ ")]
    inline = [each.replace("\n", " ") for each in re.findall(r"`([^`]+)`", prose(path))]
    return [each for each in typed + inline if re.match(r"(scripts/\w+|kvferry)( |$)", each)]


def table(path: Path, *header: str) -> list[list[str]]:
    """The rows of every table of a page with this header, as cells."""
    lines = iter(path.read_text(encoding="utf-8").splitlines())
    rows: list[list[str]] = []
    for line in lines:
        if cells(line) == list(header):
            next(lines)
            for row in lines:
                if not row.startswith("|"):
                    break
                rows.append(cells(row))
    assert rows, f"{path.name} has no table {header}"
    return rows


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def code_names(text: str) -> list[str]:
    """The names in backquotes."""
    return re.findall(r"`([^`]+)`", text)


def modules() -> set[str]:
    """The modules of both packages, as paths. What somebody has not committed yet is not expected on the map."""
    packages = ("orchestrator", "protocols")
    if (ROOT / ".git").exists():
        command = ["git", "ls-files", "--", *packages]
        listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
        paths = [Path(name) for name in listed if (ROOT / name).exists()]
    else:
        paths = [path.relative_to(ROOT) for package in packages for path in (ROOT / package).rglob("*.py")]
    return {str(path) for path in paths if path.suffix == ".py" and not path.name.startswith("__")}
