"""A native Mooncake that does what a test says, knows only the calls we may make, and dies of a freed id."""

from __future__ import annotations

import sys
import threading
from collections import deque
from types import ModuleType

WAITING, LANDED, FAILED, TIMED_OUT = 0, 1, -1, -2

ALLOWED = {
    "initialize",
    "get_rpc_port",
    "get_engine_ptr",
    "register_memory",
    "unregister_memory",
    "send_probe",
    "transfer_submit_write",
    "transfer_check_status",
    "batch_transfer_async_write",
}
"""The native calls this package makes: asynchronous writes, their status, and an engine's own life."""


class NativeDouble:
    """Stands for ``mooncake.engine.TransferEngine``. Any call it does not have is an AttributeError."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.refuse_after: int | None = None
        """Accept this many submissions more, then refuse."""
        self.status: dict[int, int] = {}
        """Answers by id, ids counting from 1; what is missing is WAITING."""
        self.always = WAITING
        self.asked: list[int] = []
        self.written: deque[tuple[str, int, int, int]] = deque()
        self.memory_code = 0
        self.probe_code = 0
        self.probe_gate = threading.Event()
        self.probe_gate.set()
        self._ids = 0
        self._dead: set[int] = set()

    def initialize(self, host: str, metadata: str, protocol: str, devices: str) -> int:
        assert metadata == "P2PHANDSHAKE"
        return 0 if protocol == "tcp" else -1

    def get_rpc_port(self) -> int:
        return 15_000 + id(self) % 1000

    def get_engine_ptr(self) -> int:
        return 0

    def register_memory(self, address: int, nbytes: int) -> int:
        return self.memory_code

    def unregister_memory(self, address: int) -> int:
        return self.memory_code

    def send_probe(self, session: str) -> int:
        self.calls.append("send_probe")
        self.probe_gate.wait(30)
        return self.probe_code

    def transfer_submit_write(self, session: str, src: int, dst: int, length: int) -> int:
        self.calls.append("transfer_submit_write")
        if self.refuse_after is not None:
            if self.refuse_after == 0:
                return 0
            self.refuse_after -= 1
        self._ids += 1
        if length == 0:
            self.status[self._ids] = LANDED
        else:
            self.written.append((session, src, dst, length))
        return self._ids

    def transfer_check_status(self, ident: int) -> int:
        assert ident not in self._dead, f"id {ident} was freed: the real one crashes here"
        self.calls.append("transfer_check_status")
        self.asked.append(ident)
        answer = self.status.get(ident, self.always)
        if answer in (LANDED, FAILED):
            self._dead.add(ident)
        return answer


class ModuleDouble(ModuleType):
    """Stands for the module ``mooncake.engine``; remembers the engines it made."""

    def __init__(self) -> None:
        super().__init__("mooncake.engine")
        self.__file__ = sys.modules["_ctypes"].__file__  # some library, with none of the symbols
        self.made: list[NativeDouble] = []

    def TransferEngine(self) -> NativeDouble:
        self.made.append(NativeDouble())
        return self.made[-1]
