"""C++ symbols that ``mooncake.engine`` exports but does not bind, and whether they may be trusted.

The binding has no poll for a batch of many blocks, opens a peer's segment under a lock that every submission needs, and
deletes an engine with the GIL held. The library underneath has all three. Names, layouts and numbers here are not
versioned, and a wrong guess is no exception but a crash; so nothing is used before a *child process* has tried it with
the very same library (``mooncake_selftest``). Its verdict is kept in the user's cache directory.

A ``Status`` (16 bytes: code, message) is not trivially destructible, so it is returned through a hidden pointer on
every ABI in question. Declaring a structure of more than 16 bytes makes libffi pass one, whatever the processor: first
argument on x86-64, register x8 on aarch64.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from orchestrator.engines import mooncake_env
from protocols.errors import EngineUnavailableError

log = logging.getLogger(__name__)

BATCH_STATUS = "batch-status"
OPEN_SEGMENT = "open-segment"
FREE_ENGINE = "free-engine"

SYMBOLS = {
    BATCH_STATUS: (
        "_ZN8mooncake14TransferEngine22getBatchTransferStatusEmRNS_9Transport14TransferStatusE",
        "_ZN8mooncake14TransferEngine17getTransferStatusEmmRNS_9Transport14TransferStatusE",
        "_ZN8mooncake14TransferEngine11freeBatchIDEm",
    ),
    OPEN_SEGMENT: ("_ZN8mooncake14TransferEngine11openSegmentERKNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",),
    FREE_ENGINE: ("_ZN8mooncake14TransferEngine10freeEngineEv",),
}

WAITING, COMPLETED, FAILED = 0, 4, 6
UNKNOWN = -1
"""Not one of the library's: the call itself was refused."""

SELFTEST_TIMEOUT = 60.0
"""Seconds; it takes about two."""


class _Status(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("message", ctypes.c_void_p), ("unused", ctypes.c_uint64))


class _TransferStatus(ctypes.Structure):
    _fields_ = (("state", ctypes.c_int), ("nbytes", ctypes.c_size_t))


class _String(ctypes.Structure):
    """``std::string`` of libstdc++, as a caller may lay it out for a callee that only reads it."""

    _fields_ = (("data", ctypes.c_char_p), ("size", ctypes.c_size_t), ("local", ctypes.c_char * 16))


def exported(library: str) -> frozenset[str]:
    """The features whose symbols ``library`` has. Says nothing about whether they may be called."""
    handle = ctypes.CDLL(library)
    return frozenset(feature for feature, names in SYMBOLS.items() if all(hasattr(handle, name) for name in names))


class Abi:
    """The exported calls for one native engine. Only features that :func:`trusted` names may be used.

    ``batch_status``, ``task_status`` and ``free`` hold the GIL: they are short and cannot block. ``open_segment`` and
    ``free_engine`` release it and may take long: call them in a thread of their own, and keep the native engine alive.
    """

    def __init__(self, library: str, engine: int) -> None:
        self._engine = engine
        self._out = _TransferStatus()
        self._out_address = ctypes.addressof(self._out)
        short, long = ctypes.PyDLL(library), ctypes.CDLL(library)
        pointer, number = ctypes.c_void_p, ctypes.c_uint64
        batch, task, free = SYMBOLS[BATCH_STATUS]
        self._batch_status = _declare(short, batch, _Status, (pointer, number, pointer))
        self._task_status = _declare(short, task, _Status, (pointer, number, number, pointer))
        self._free = _declare(short, free, _Status, (pointer, number))
        self._open_segment = _declare(long, SYMBOLS[OPEN_SEGMENT][0], ctypes.c_int64, (pointer, pointer))
        self._free_engine = _declare(long, SYMBOLS[FREE_ENGINE][0], ctypes.c_int, (pointer,))

    def batch_status(self, batch: int) -> int:
        """The state of a whole batch. FAILED at the first failed task: others may still be running."""
        status = self._batch_status(self._engine, batch, self._out_address)
        return UNKNOWN if status.code else int(self._out.state)

    def task_status(self, batch: int, task: int) -> int:
        """The state of one block of a batch."""
        status = self._task_status(self._engine, batch, task, self._out_address)
        return UNKNOWN if status.code else int(self._out.state)

    def free(self, batch: int) -> bool:
        """Give a batch back whose tasks are all terminal; the id is dead afterwards, whatever the answer."""
        return not self._free(self._engine, batch).code

    def open_segment(self, session: str) -> bool:
        """First contact without the binding's lock. Blocks, up to a minute if the peer accepts and never answers."""
        name = session.encode()
        text = _String(name, len(name))
        return bool(self._open_segment(self._engine, ctypes.addressof(text)) >= 0)

    def free_engine(self) -> None:
        """End the engine's threads and close its ports; takes up to a second. Nothing may be called afterwards."""
        self._free_engine(self._engine)


def _declare(library: ctypes.CDLL, name: str, result: type, arguments: tuple[type, ...]) -> Callable[..., Any]:
    function: Callable[..., Any] | None = getattr(library, name, None)
    if function is None:
        return functools.partial(_missing, name)
    function.restype, function.argtypes = result, arguments  # type: ignore[attr-defined]
    return function


def _missing(name: str, *_: object) -> NoReturn:
    raise EngineUnavailableError("this Mooncake does not export a symbol", symbol=name)


@functools.cache
def trusted() -> frozenset[str]:
    """The features this machine's wheel passed the self-test with. Blocks about two seconds the first time.

    Later processes read the verdict from the cache; it is tried again for another wheel, library, Python or machine.
    Raises what :func:`mooncake_env.load` raises. Anything but a clean end of the child counts as no feature at all.
    """
    library = mooncake_env.load().__file__
    assert library is not None
    path = verdict_path(library)
    verdict = read_verdict(path)
    if verdict is None:
        verdict = run_selftest()
        if verdict is None:
            return frozenset()
        write_verdict(path, verdict)
    return verdict


def run_selftest() -> frozenset[str] | None:
    """Try the exported symbols in a child process and return what worked; None if the child got no verdict."""
    command = [sys.executable, "-m", "orchestrator.engines.mooncake_selftest"]
    root = str(Path(__file__).resolve().parents[2])
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}
    try:
        child = subprocess.run(command, capture_output=True, timeout=SELFTEST_TIMEOUT, env=environ, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("the self-test of mooncake's symbols did not end, using the plain calls: %s", error)
        return None
    if child.returncode != 0:
        log.warning("the self-test of mooncake's symbols failed (exit %d), using the plain calls", child.returncode)
        return frozenset()
    return parse_verdict(child.stdout.decode(errors="replace").strip().rpartition("\n")[2]) or frozenset()


def verdict_path(library: str) -> Path:
    """Where the verdict about this very library on this machine is kept."""
    facts = (
        mooncake_env.installed_version(),
        hashlib.sha256(Path(library).read_bytes()).hexdigest(),
        sys.version,
        platform.machine(),
    )
    key = hashlib.sha256("\n".join(facts).encode()).hexdigest()[:16]
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "kvferry" / f"mooncake-abi-{key}.json"


def parse_verdict(text: str) -> frozenset[str] | None:
    """A list of feature names in JSON; None for anything else."""
    try:
        names = json.loads(text)
    except ValueError:
        return None
    if not isinstance(names, list) or not all(name in SYMBOLS for name in names):
        return None
    return frozenset(names)


def read_verdict(path: Path) -> frozenset[str] | None:
    try:
        return parse_verdict(path.read_text())
    except (OSError, UnicodeDecodeError):
        return None


def write_verdict(path: Path, verdict: frozenset[str]) -> None:
    """Replaces the file in one step: two processes may start at once. A cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(sorted(verdict), file)
        os.replace(file.name, path)
    except OSError as error:
        log.info("the verdict on mooncake's symbols could not be kept: %s", error)
