"""Transfer engines: what moves the bytes, behind one contract.

============================ =========================================================================================
``base``                     the contract: Engine, Batch, limits, and the two facts about a batch
``loopback``                 in memory, real copies, deterministic: tests and the simulator
``faulty``                   any engine with faults by script, and a log of what was submitted
``paced``                    any engine behind a link of a given rate
``mooncake``                 the real one; ``mooncake_*`` are its parts: settings, symbols, completion, contact
``admission`` ``draining``   what they share: checks before a submission, the wait before a close
``wrapping`` ``daemon``      what wrappers share; one blocking call in a daemon thread
============================ =========================================================================================

``MooncakeEngine`` is imported on first use, so that nothing here needs its wheel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from orchestrator.engines.base import Batch, Engine, EngineInfo, EngineLimits, Probe
from orchestrator.engines.faulty import Fault, FaultyEngine
from orchestrator.engines.loopback import LoopbackEngine, LoopbackFabric
from orchestrator.engines.paced import PacedEngine

if TYPE_CHECKING:
    from orchestrator.engines.mooncake import MooncakeEngine

__all__ = [
    "Batch",
    "Engine",
    "EngineInfo",
    "EngineLimits",
    "Fault",
    "FaultyEngine",
    "LoopbackEngine",
    "LoopbackFabric",
    "MooncakeEngine",
    "PacedEngine",
    "Probe",
]


def __getattr__(name: str) -> object:
    if name == "MooncakeEngine":
        from orchestrator.engines.mooncake import MooncakeEngine

        return MooncakeEngine
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
