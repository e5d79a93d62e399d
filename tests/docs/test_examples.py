"""The examples run, and what the README shows and tells is what is there."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.docs import reading
from tests.docs.reading import PAGES, README, ROOT, blocks, code_names

EXAMPLE = ROOT / "docs" / "examples" / "embed.py"


def run(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(path)],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | environment,
    )


@pytest.mark.mooncake
def test_the_example_moves_a_prompt() -> None:
    done = run(EXAMPLE)
    assert done.returncode == 0, done.stderr + done.stdout
    shown = next(block.text for block in blocks(README) if "examples/embed.py" in block.text)
    assert sorted(done.stdout.splitlines()) == sorted(shown.splitlines()[1:])


def test_without_mooncake_the_example_says_what_to_install(tmp_path: Path) -> None:
    """A finder in front of the others stands for a machine that has no wheel."""
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.metadata as metadata\n"
        "found = metadata.version\n"
        "def version(name):\n"
        "    if name.startswith('mooncake'):\n"
        "        raise metadata.PackageNotFoundError(name)\n"
        "    return found(name)\n"
        "metadata.version = version\n"
    )
    done = run(EXAMPLE, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1
    for side in ("prefill", "decode"):
        assert f"{side}: no Mooncake wheel is installed" in done.stderr
    assert "pip install 'kvferry[cpu]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_readme_shows_the_example() -> None:
    shown = [block.text for block in blocks(README) if block.language == "python"]
    text = EXAMPLE.read_text(encoding="utf-8")
    assert shown == [reading.between(text, "# [README begins]\n", "# [README ends]\n")]


def test_every_python_block_of_the_pages_is_python() -> None:
    for page in PAGES:
        for block in blocks(page):
            if block.language == "python":
                compile(block.text, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in reading.links(page):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name).resolve() if name else page
        assert target.exists(), f"{link} in {page.name}"
        assert target.is_relative_to(ROOT), f"{link} leads out of the repository"
        if anchor:
            assert anchor in reading.anchors(target), f"{link} in {page.name}"


@functools.cache
def help_of(command: str) -> str:
    """What a command says of its options, without any set-up."""
    if command == "scripts/demo" or command.startswith("kvferry demo"):
        arguments = [sys.executable, "-m", "orchestrator.demo", "--help"]
    elif command == "scripts/bench":
        arguments = [sys.executable, "-m", "scripts.benchmarks", "--help"]
    elif command.startswith("kvferry"):
        arguments = [sys.executable, "-m", "orchestrator.cli.main", *command.split()[1:], "--help"]
    elif command == "scripts/simulate":
        arguments = [sys.executable, "-m", "orchestrator.testing.simulate", "--help"]
    elif command == "scripts/model":
        arguments = [sys.executable, "-m", "orchestrator.testing.model", "--help"]
    elif command in ("scripts/rows", "scripts/draw_states"):
        arguments = [sys.executable, f"scripts/lib/{command.removeprefix('scripts/')}.py", "--help"]
    else:
        arguments = [command, "--help"]
    done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_their_options_exist(page: Path) -> None:
    for command in reading.commands(page):
        words = command.split(" -- ")[0].split()
        name = " ".join(words[:2]) if words[0] == "kvferry" and len(words) > 1 else words[0]
        if words[0] != "kvferry":
            assert os.access(ROOT / name, os.X_OK), command
        known = help_of(name)
        for word in words[1:]:
            if word.startswith("-"):
                assert re.search(rf"(?<!\S){re.escape(word)}\b", known), f"{command}: no option {word}"
        if name == "scripts/bench":
            assert words[1] in known, command


def test_the_readme_lists_the_options_of_the_demo() -> None:
    known = set(re.findall(r"(?<!\S)--[a-z-]+", help_of("scripts/demo"))) - {"--help"}
    names = [code for row in reading.table(README, "option", "meaning") for code in code_names(row[0])]
    assert {name.split()[0] for name in names} == known
    injected = {name.split()[1] for name in names if name.startswith("--inject")}
    assert injected == {"drop-layer", "corrupt-page", "skip-draft"}


def test_extras_that_a_reader_is_told_to_install_exist() -> None:
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for page in PAGES:
        for extra in re.findall(r"(?:\.|kvferry)\[(\w+)\]", page.read_text(encoding="utf-8")):
            assert extra in declared, f"{extra} in {page.name}"


def test_the_map_lists_every_module_once() -> None:
    text = reading.between(README.read_text(encoding="utf-8"), "<!-- map begins -->", "<!-- map ends -->")
    folder, listed = "", []
    for line in text.strip().strip("`").strip().splitlines():
        name, _, duty = line.strip().partition(" ")
        assert duty.strip(), f"no duty: {line}"
        if line.startswith(" "):
            listed.append(f"{folder}{name}.py")
        else:
            folder = name
    assert len(listed) == len(set(listed)), "a module is listed twice"
    missing, gone = sorted(reading.modules() - set(listed)), sorted(set(listed) - reading.modules())
    assert not missing, f"not on the README's map: {missing}"
    assert not gone, f"on the README's map, but not there: {gone}"
