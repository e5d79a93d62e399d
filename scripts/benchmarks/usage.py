"""CPU time of this process by thread, with the engine's own threads told apart."""

from __future__ import annotations

import os
import threading
from pathlib import Path

TASKS = Path("/proc/self/task")


def thread_cpu_ns() -> dict[int, int]:
    """Nanoseconds on a CPU, by thread id. A thread that ended is gone."""
    found = {}
    for task in TASKS.iterdir():
        try:
            found[int(task.name)] = int((task / "schedstat").read_text().split()[0])
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def is_ours(task: int) -> bool:
    """A Python thread, or one of ZMQ's: everything but the engine's own threads and the libraries' idle pools."""
    if task in {thread.native_id for thread in threading.enumerate()}:
        return True
    try:
        return (TASKS / str(task) / "comm").read_text().startswith("ZMQ")
    except OSError:
        return False


def our_cpu_s(without: set[int] | None = None) -> float:
    """CPU seconds so far of everything but the engine's own threads, and but ``without`` (thread ids)."""
    skip = without or set()
    return sum(ns for task, ns in thread_cpu_ns().items() if task not in skip and is_ours(task)) / 1e9


def rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
