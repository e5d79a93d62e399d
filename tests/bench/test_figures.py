"""What a figure says, and the form in which it is stored."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from scripts.benchmarks import __main__ as command
from scripts.benchmarks import reasons, settings
from scripts.benchmarks.figures import Figure, bounded, compared, read, show, write


class Stored(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A figure in a file."""

    bench: str
    case: str
    metric: str
    unit: str
    value: float
    target: str
    ok: bool
    baseline: str | None
    baseline_value: float | None
    ratio: float | None
    reason: str
    runs: list[float]
    baseline_runs: list[float]


class File(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The whole file."""

    machine: dict[str, Any]
    versions: dict[str, str]
    settings: dict[str, Any]
    figures: list[Stored]


def check(figures: list[Figure]) -> None:
    """Every figure says what it should, met or not."""
    assert figures
    for figure in figures:
        assert figure.runs, figure
        assert figure.target, figure
        assert figure.ok or figure.reason, figure
        assert (figure.baseline is None) == (figure.baseline_value is None) == (figure.ratio is None), figure
        assert figure.baseline is None or figure.baseline_runs, figure


def test_a_bound_is_met_by_the_median() -> None:
    assert bounded("b", "c", "m", "ms", [9.0, 1.0, 2.0], at_most=2.0).ok
    assert not bounded("b", "c", "m", "ms", [9.0, 1.0, 3.0], at_most=2.0).ok
    assert bounded("b", "c", "m", "GiB/s", [3.0], at_least=2.0).ok
    assert not bounded("b", "c", "m", "GiB/s", [1.0], at_least=2.0).ok


def test_a_figure_without_a_bound_is_reported() -> None:
    figure = bounded("b", "c", "m", "ms", [1.0])
    assert (figure.ok, figure.target) == (True, "reported")


@pytest.mark.parametrize(
    "bound, ours, met",
    [
        ({"at_most": 2.0}, 4.0, True),
        ({"at_most": 2.0}, 4.1, False),
        ({"below": 1.0}, 1.9, True),
        ({"below": 1.0}, 2.0, False),
        ({"at_least": 0.95}, 1.9, True),
        ({"at_least": 0.95}, 1.8, False),
    ],
)
def test_a_ratio_is_of_medians(bound: dict[str, Any], ours: float, met: bool) -> None:
    figure = compared("b", "c", "m", "ms", [ours, 0.0, 100.0], "other", [2.0, 2.0, 50.0], **bound)
    assert (figure.ok, figure.baseline_value, figure.ratio) == (met, 2.0, ours / 2.0)


def test_a_miss_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasons, "REASONS", {("b", "case *: m"): "the profile says so"})
    assert bounded("b", "case 1", "m", "ms", [2.0], at_most=1.0).reason == "the profile says so"
    assert bounded("b", "case 1", "n", "ms", [2.0], at_most=1.0).reason == reasons.UNKNOWN
    assert bounded("b", "case 1", "m", "ms", [1.0], at_most=1.0).reason == ""


def test_a_file_holds_machine_versions_settings_and_figures(tmp_path: Path) -> None:
    figures = [
        bounded("b", "c", "m", "µs", [1.0, 2.0], at_most=1.0),
        compared("b", "c", "m", "ms", [1.0], "other", [2.0], at_most=2.0),
    ]
    file = tmp_path / "figures.json"
    write(file, figures, settings.used())
    stored = msgspec.json.decode(file.read_bytes(), type=File)
    assert {"cpus", "memory_bytes", "load"} <= stored.machine.keys()
    assert {"python", "numpy", "uvloop"} <= stored.versions.keys()
    assert {"engine_limits", "raw", "monolithic", "mooncake"} <= stored.settings.keys()
    assert read(file) == figures
    assert json.loads(file.read_text())["figures"][0]["unit"] == "µs"


def test_a_table_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    show([bounded("b", "c", "m", "ms", [2.0], at_most=1.0)])
    assert "not explained yet" in capsys.readouterr().out


def test_a_bench_that_breaks_fails_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each bench is a process; one that ends badly, or leaves no figures, is an error, and the others go on."""
    monkeypatch.setattr(command, "BENCHES", ("no-such-bench",))
    assert command.run_all(quick=True) == ([], False)
