"""``kvferry doctor``: what this machine has for the job, what is missing, and what was settled because of it."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

from rich.console import Console
from rich.table import Table

from protocols.errors import KvferryError


@dataclass(frozen=True, slots=True)
class Finding:
    """``state``: ``ok``, ``note`` (works, but know this) or ``missing`` (nothing runs without it)."""

    what: str
    state: str
    text: str


def run_doctor(*, as_json: bool) -> int:
    """Print the findings; 1 when something needed is missing."""
    findings = [*packages(), *engine(), *torch(), timer()]
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        table = Table("what", "state", "found", box=None, header_style="bold")
        for finding in findings:
            colour = {"ok": "green", "note": "yellow", "missing": "red"}[finding.state]
            table.add_row(finding.what, f"[{colour}]{finding.state}[/]", finding.text)
        Console().print(table)
    return int(any(finding.state == "missing" for finding in findings))


def packages() -> list[Finding]:
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.machine()}")]
    found += [Finding(name, "ok", version(name)) for name in ("kvferry", "pyzmq", "msgspec", "numpy")]
    try:
        found.append(Finding("uvloop", "ok", version("uvloop")))
    except PackageNotFoundError:
        found.append(Finding("uvloop", "note", "not installed: the slower asyncio loop is used"))
    return found


def engine() -> list[Finding]:
    """Mooncake, and what its self-test on this machine allows."""
    from orchestrator.engines import mooncake_abi, mooncake_env

    try:
        mooncake_env.load()
        features = mooncake_abi.trusted()
    except KvferryError as error:
        return [Finding("mooncake", "missing", str(error))]
    batch = mooncake_abi.BATCH_STATUS in features
    contact = mooncake_abi.OPEN_SEGMENT in features
    return [
        Finding("mooncake", "ok", mooncake_env.installed_version()),
        Finding(
            "completion",
            "ok" if batch else "note",
            "batch-status: the self-test passed" if batch else "one-block: the self-test failed",
        ),
        Finding(
            "first contact",
            "ok" if contact else "note",
            "off the engine's lock"
            if contact
            else "through the engine's lock: a peer that accepts and never answers stalls every submission for 62 s",
        ),
    ]


def torch() -> list[Finding]:
    try:
        import torch as module
    except ImportError:
        return [Finding("torch", "note", "not installed: host pools only (pip install 'kvferry[torch]')")]
    cuda = f"CUDA device {module.cuda.get_device_name(0)}" if module.cuda.is_available() else "no CUDA device"
    return [Finding("torch", "ok", f"{module.__version__}, {cuda}")]


def timer() -> Finding:
    if sys.platform == "linux":
        return Finding("timer", "ok", "timerfd: completions are asked for below a millisecond")
    return Finding("timer", "note", "no timerfd: completions are asked for every millisecond at best")
