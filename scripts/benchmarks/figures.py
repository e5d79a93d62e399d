"""Figures as they are printed and stored: value, baseline, ratio, target, raw numbers."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.reasons import reason_for


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. ``ok`` says whether it meets ``target``; where not, ``reason`` says why."""

    bench: str
    case: str
    metric: str
    unit: str
    value: float
    target: str
    ok: bool
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None
    reason: str = ""
    runs: list[float] = field(default_factory=list)
    baseline_runs: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.ok and not self.reason:
            object.__setattr__(self, "reason", reason_for(self.bench, self.case, self.metric))


def bounded(
    bench: str,
    case: str,
    metric: str,
    unit: str,
    runs: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    target: str = "",
) -> Figure:
    """The median of ``runs`` against a bound of its own; without a bound it is only reported."""
    value = statistics.median(runs)
    bounds = ((at_most, "≤"), (at_least, "≥"))
    target = target or " and ".join(f"{sign} {bound:g} {unit}" for bound, sign in bounds if bound is not None)
    ok = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return Figure(bench, case, metric, unit, value, target or "reported", ok, runs=list(runs))


def compared(
    bench: str,
    case: str,
    metric: str,
    unit: str,
    runs: Sequence[float],
    baseline: str,
    baseline_runs: Sequence[float],
    *,
    at_most: float | None = None,
    at_least: float | None = None,
    below: float | None = None,
    target: str = "",
) -> Figure:
    """The median of ``runs`` as a ratio to the baseline's median, against a bound of that ratio."""
    value, other = statistics.median(runs), statistics.median(baseline_runs)
    ratio = value / other if other else float("inf")
    bounds = [(at_most, "≤", at_most is None or ratio <= at_most), (below, "<", below is None or ratio < below)]
    bounds.append((at_least, "≥", at_least is None or ratio >= at_least))
    texts = [f"{sign} {bound:g} × {baseline}" for bound, sign, _ in bounds if bound is not None]
    return Figure(
        bench,
        case,
        metric,
        unit,
        value,
        target or " and ".join(texts) or "reported",
        all(met for _, _, met in bounds),
        baseline,
        other,
        ratio,
        runs=list(runs),
        baseline_runs=list(baseline_runs),
    )


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpus": os.cpu_count(),
        "memory_bytes": memory,
        "machine": platform.machine(),
        "system": platform.system(),
        "kernel": platform.release(),
        "load": [round(load, 2) for load in os.getloadavg()],
    }


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in ("kvferry", "uvloop", "pyzmq", "msgspec", "numpy", "torch", "mooncake-transfer-engine-non-cuda"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def show(figures: list[Figure]) -> None:
    table = Table(
        "bench", "case", "metric", "value", "baseline", "ratio", "target", "met", box=None, header_style="bold"
    )
    for figure in figures:
        baseline = "" if figure.baseline_value is None else f"{figure.baseline} {figure.baseline_value:.3g}"
        ratio = "" if figure.ratio is None else f"{figure.ratio:.3g}"
        met = "[green]yes[/]" if figure.ok else f"[red]no[/] {figure.reason}"
        value = f"{figure.value:.3g} {figure.unit}"
        table.add_row(figure.bench, figure.case, figure.metric, value, baseline, ratio, figure.target, met)
    Console(width=max(160, Console().width)).print(table)


def content(figures: list[Figure], settings: dict[str, Any]) -> dict[str, Any]:
    """What the JSON holds. ``settings``: windows and engine settings that the figures were taken with."""
    return {
        "machine": machine(),
        "versions": versions(),
        "settings": settings,
        "figures": [asdict(figure) for figure in figures],
    }


def write(path: Path, figures: list[Figure], settings: dict[str, Any]) -> None:
    path.write_text(json.dumps(content(figures, settings), indent=2, ensure_ascii=False) + "\n")


def read(path: Path) -> list[Figure]:
    return [Figure(**figure) for figure in json.loads(path.read_text())["figures"]]
