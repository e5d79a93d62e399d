"""Figures as they are printed and stored: value, baseline, ratio, target, raw numbers."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


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


def machine() -> dict[str, Any]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"cpus": os.cpu_count(), "memory_bytes": memory, "machine": platform.machine(), "system": platform.system()}


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
    Console(width=max(120, Console().width)).print(table)


def write(path: Path, figures: list[Figure]) -> None:
    content = {"machine": machine(), "versions": versions(), "figures": [asdict(figure) for figure in figures]}
    path.write_text(json.dumps(content, indent=2) + "\n")
