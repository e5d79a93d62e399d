"""Windows and engine settings that a run's figures were taken with; they stand in its JSON."""

from __future__ import annotations

import os
from dataclasses import asdict
from typing import Any

from orchestrator import Config
from orchestrator.engines.base import EngineLimits
from orchestrator.engines.mooncake_env import READ_AT_IMPORT, READ_LATER
from scripts.benchmarks.baselines.monolithic import WINDOW
from scripts.benchmarks.baselines.raw import IDEAL
from scripts.benchmarks.baselines.threadpool import WORKERS


def used() -> dict[str, Any]:
    defaults = {**READ_AT_IMPORT, **READ_LATER}
    return {
        "config": asdict(Config()),
        "engine_limits": asdict(EngineLimits()),
        "raw": asdict(IDEAL),
        "monolithic": {"window": WINDOW},
        "threadpool": {"workers": WORKERS},
        "mooncake": {name: os.environ.get(name, value) for name, value in defaults.items()}
        | {name: value for name, value in sorted(os.environ.items()) if name.startswith("MC_")},
    }
