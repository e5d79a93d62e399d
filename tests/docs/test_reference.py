"""Tables of the pages that repeat what the code says: they must repeat it rightly."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from dataclasses import fields
from enum import Enum

from orchestrator.config import Config
from orchestrator.engines import mooncake_env
from orchestrator.engines.base import EngineLimits
from protocols import machines
from protocols.messages import HEARD_BY_DECODE, HEARD_BY_PREFILL, Message
from tests.docs import reading
from tests.docs.reading import ROOT, code_names
from tests.support.messages import MESSAGE_TYPES

DOCS = ROOT / "docs"


def test_states_are_drawn_from_the_tables() -> None:
    command = [sys.executable, "scripts/lib/draw_states.py", "--check"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_every_table_of_the_machines_is_drawn() -> None:
    page = (DOCS / "states.md").read_text(encoding="utf-8")
    enums = [each for each in vars(machines).values() if isinstance(each, type) and issubclass(each, Enum)]
    missing = [
        f"{each.__name__}.{member.name}" for each in enums for member in each if f"| {member.name} |" not in page
    ]
    assert not missing


def test_settings_and_their_defaults() -> None:
    rows = reading.table(DOCS / "embedding.md", "setting", "default", "meaning")
    listed = {code_names(name)[0]: ast.literal_eval(code_names(default)[0]) for name, default, _ in rows}
    assert listed == {field.name: getattr(Config(), field.name) for field in fields(Config)}


def test_messages_and_their_fields() -> None:
    rows = reading.table(DOCS / "protocol.md", "message", "direction", "fields beyond the envelope")
    envelope = set(Message.__struct_fields__)
    actual = {cls.__name__: set(cls.__struct_fields__) - envelope for cls in MESSAGE_TYPES}
    listed = {name: set(code_names(text)) for name, _, text in rows}
    assert listed.keys() == actual.keys()
    for name, names in listed.items():
        if name == "Pong":  # "the same" as Ping
            names |= listed["Ping"] - {"ack"}
        assert actual[name] <= names, f"{name} lacks {actual[name] - names}"
        assert names - actual[name] <= {"ack", "src"}, f"{name} has no {names - actual[name]}"


def test_who_says_what() -> None:
    tags = {cls.__name__: str(cls.__struct_config__.tag) for cls in MESSAGE_TYPES}
    heard = {"D→P": {HEARD_BY_PREFILL}, "P→D": {HEARD_BY_DECODE}, "both": {HEARD_BY_PREFILL, HEARD_BY_DECODE}}
    for name, direction, _ in reading.table(DOCS / "protocol.md", "message", "direction", "fields beyond the envelope"):
        assert {side for side in (HEARD_BY_PREFILL, HEARD_BY_DECODE) if tags[name] in side} == heard[direction], name


def test_what_is_set_and_refused_in_the_environment() -> None:
    page = DOCS / "engines.md"
    listed = {
        code_names(name)[0]: code_names(value)[0] for name, value, _ in reading.table(page, "variable", "set to", "why")
    }
    assert listed == mooncake_env.READ_AT_IMPORT | mooncake_env.READ_LATER
    refused = {name.partition("=")[0] for row in reading.table(page, "refused", "why") for name in code_names(row[0])}
    bad = dict.fromkeys(refused, "1") | {"MC_TCP_ENABLE_CONNECTION_POOL": "0"}
    assert {name for name, _ in mooncake_env.refusals(bad)} == refused
    source = (ROOT / "orchestrator" / "engines" / "mooncake_env.py").read_text(encoding="utf-8")
    body = reading.between(source, "def refusals(", "def prepare(")
    assert set(re.findall(r"MC_\w+", body)) == refused | {"MC_USE_TENT"}


def test_the_limits_of_an_engine() -> None:
    units = {"MiB": 1 << 20}
    listed = {}
    for name, default, _ in reading.table(DOCS / "engines.md", "limit", "default", "meaning"):
        number, _, unit = default.partition(" ")
        listed[code_names(name)[0]] = int(number) * units.get(unit, 1)
    assert listed == {field.name: field.default for field in fields(EngineLimits)}
