"""The command: what it prints, what it writes, how it exits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.testing.simulate import main

KEYS = ("rooms", "aborts", "crashes", "in_doubt", "late_landings", "fences", "violations", "virtual_s", "real_s")


@pytest.mark.slow
def test_many_seeds_and_their_sums(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = tmp_path / "sums.json"
    assert main(["--seeds", "20", "--workers", "2", "--json", str(sums)]) == 0
    written = json.loads(sums.read_text())
    assert written["seeds"] == 20
    assert written["violations"] == 0
    assert written["found"] == []
    assert all(written[name] > 0 for name in KEYS if name != "violations"), written
    assert "seeds 20" in capsys.readouterr().out


def test_one_seed_with_every_event(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = tmp_path / "sums.json"
    assert main(["--seed", "3", "--trace", "--json", str(sums)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("seed 3: ")
    assert "P0#1 starts" in text
    assert "Hello" in text
    assert json.loads(sums.read_text())["seeds"] == 1


def test_a_failure_is_replayed_told_and_shrunk(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    sums = tmp_path / "sums.json"
    arguments = ["--seed", "0", "--plant", "layer-read-before-event", "--shrink", "30", "--json", str(sums)]
    assert main(arguments) == 1
    text = capsys.readouterr().out
    assert "seed 0 violates: V2 read before final" in text
    assert "replay: scripts/simulate --seed 0 --plant layer-read-before-event" in text
    assert "last events:" in text
    assert "shrunk in" in text
    assert json.loads(sums.read_text())["found"][0]["violation"] == "V2 read before final"


@pytest.mark.slow
def test_many_seeds_stop_at_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--seeds", "200", "--workers", "1", "--plant", "relative-chunk-offset", "--shrink", "0"]) == 1
    text = capsys.readouterr().out
    assert "V1 landed in the wrong place" in text
    assert "seeds 200" not in text


@pytest.mark.slow
def test_a_time_bounds_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--minutes", "0.02", "--workers", "1", "--first", "500"]) == 0
    assert "violations 0" in capsys.readouterr().out
