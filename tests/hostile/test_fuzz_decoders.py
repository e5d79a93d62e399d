"""The fuzzer's targets and its mutator, without the fuzzer: some of what scripts/fuzz does, in every run."""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

pytestmark = [pytest.mark.row("N9"), pytest.mark.row("C7")]

PATH = Path(__file__).resolve().parents[2] / "scripts" / "lib" / "fuzz_decoders.py"


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fuzz_decoders", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fuzzer = load()


@pytest.mark.parametrize("name", sorted(fuzzer.TARGETS))
def test_a_target_takes_the_seeds_and_what_is_made_of_them(name: str) -> None:
    rng = random.Random(name)
    target = fuzzer.TARGETS[name]
    for seed in fuzzer.seeds():
        target(seed)
        value: Any = msgspec.msgpack.decode(seed) if seed[0] >= 0x80 else None
        for _ in range(40):
            target(bytes(rng.choice([rng.randrange(256), byte]) for byte in seed[:64]) + seed[64:])
            if value is not None:
                value = fuzzer.change(value, rng)
                try:
                    target(msgspec.msgpack.encode(value))
                except (OverflowError, TypeError):
                    value = msgspec.msgpack.decode(seed)


def test_a_target_says_when_it_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("protocols.coverage._check_runs", lambda *_: None)
    with pytest.raises(AssertionError):
        for seed in fuzzer.seeds():
            plain = msgspec.msgpack.decode(seed) if seed[0] >= 0x80 else {}
            if plain.get("type") == "done":
                plain["coverage"][0]["runs"] = [[0, 7]]
                fuzzer.coverage(msgspec.msgpack.encode(plain))


def test_without_atheris_it_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["fuzz"])
    assert fuzzer.main() == 2
    assert "pip install '.[fuzz]'" in capsys.readouterr().err
