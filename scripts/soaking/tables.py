"""What is left in a worker's tables, and what its process has open."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from orchestrator.node import Node


def of_process() -> dict[str, int]:
    """Open descriptors, threads and resident memory (bytes) of this process."""
    resident = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "rss": resident * os.sysconf("SC_PAGE_SIZE"),
    }


def of_prefill(node: Node) -> dict[str, Any]:
    """Loop thread. Everything that must be empty when every room has ended, and what may stay."""
    sender = node.sender
    assert sender is not None
    lanes = sender.sessions.lanes.values()
    return {
        "rooms": [repr(room) for room in sender.rooms],
        "pinned": len(sender.pins),
        "busy_lanes": [lane.session for lane in lanes if not lane.idle],
        "permits": sum(lane.statistics().window.blocks for lane in lanes),
        "batches": sender.engine.pending,
        "tasks": len(sender._tasks),
        "links": len(sender.reception.links),
        "lanes": len(lanes),
        "doubtful": sum(len(rooms) for rooms in sender.sessions._doubtful.values()),
        "contacts": len(sender._contacts._peers),
        "remembered": sender.rooms.remembered,
        "outcomes": len(sender.rooms._outcomes),
        "counters": dict(sender.counters),
    }


def of_decode(node: Node) -> dict[str, Any]:
    """Loop thread. The same of a decode."""
    receiver = node.receiver
    assert receiver is not None
    return {
        "rooms": [repr(room) for room in receiver.rooms],
        "taken": receiver.book.taken(),
        "quarantine": [
            {"room": str(entry.key), "why": entry.why, "unknown": entry.unknown, "in_doubt": entry.in_doubt}
            for entry in receiver.quarantine()
        ],
        "tasks": len(receiver._tasks),
        "links": [repr(link) for link in receiver.dialer.links.values()],
        "rollover": receiver.rollover.machine.state.name,
        "fences": receiver.rollover.fences,
        "session": receiver.session,
        "remembered": receiver.rooms.remembered,
        "outcomes": len(receiver.rooms._outcomes),
        "counters": dict(receiver.counters),
    }
