"""The way to ``mooncake.engine``: settings first, then the import, then every failure in words.

Mooncake reads part of its settings once, while it is imported, and the rest whenever an engine is made. So they are
set here before either, and what would break this package's promises is refused by name. Values the user has set win.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import logging
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from types import ModuleType

from protocols.errors import ConfigError, EngineUnavailableError

log = logging.getLogger(__name__)

MODULE = "mooncake.engine"
MINIMUM = "0.3.13.post1"
"""The first with acknowledged writes (COMPLETED = applied at the destination) and the connection pool on."""

DISTRIBUTIONS = {
    "mooncake-transfer-engine-non-cuda": "cpu",
    "mooncake-transfer-engine": "cuda12",
    "mooncake-transfer-engine-cuda13": "cuda13",
}
"""The wheels that bring the module, and the extra of this package that installs each."""

READ_AT_IMPORT = {
    "MC_LOG_LEVEL": "ERROR",  # INFO writes lines for every engine and every batch
    "MC_HANDSHAKE_CONNECT_TIMEOUT": "2",  # seconds; a dead host must not hold first contact for 5
}
READ_LATER = {
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",  # a stopped peer frees one block a lane in this time, plus a second
    "MC_TCP_STATUS_TIMEOUT_SEC": "5",
    "MC_TCP_LANES_PER_PEER": "16",  # four times the default drains a stopped peer four times as fast
    "MC_TCP_MAX_QUEUED_TRANSFERS_PER_PEER": "65535",  # our own window is the limit, this only catches its errors
}

DRAIN_BUDGET_S = 60.0
"""What a stopped peer has in flight must be terminal after this long."""

OFF = ("0", "false", "off", "no")

LIBRARIES = {
    "libcurl.so.4": "libcurl4",
    "libibverbs.so.1": "libibverbs1",
    "libnuma.so.1": "libnuma1",
    "librdmacm.so.1": "librdmacm1",
    "liburing.so.2": "liburing2",
}
"""System libraries the wheels load but do not bring, and their Debian packages."""


def refusals(environ: Mapping[str, str]) -> list[tuple[str, str]]:
    """The settings in ``environ`` this package cannot work with, as (variable, reason)."""
    never = {
        "MC_USE_TENT": "its batches have another layout, and asking for their status crashes the process",
        "MC_USE_TEV1": "it selects the same other engine as MC_USE_TENT",
        "MC_LOG_DIR": "the wheel aborts the process at import when it is set",
        "MC_DISABLE_METACACHE": "every submission would then make a blocking call to the peer",
    }
    found = [(name, reason) for name, reason in never.items() if name in environ]
    if environ.get("MC_TCP_PROTO", "").strip() == "1":
        found.append(("MC_TCP_PROTO", "writes are not acknowledged then: COMPLETED would prove nothing"))
    if environ.get("MC_TCP_ENABLE_CONNECTION_POOL", "").strip().lower() in OFF:
        found.append(("MC_TCP_ENABLE_CONNECTION_POOL", "every block would then connect, blocking, in submit"))
    return found


def prepare(environ: MutableMapping[str, str], *, already_imported: bool = False) -> None:
    """Check ``environ`` and add the settings the user left open.

    Raises ConfigError naming the variable, its value and the reason. With ``already_imported``, somebody else imported
    the module before: settings it read then can no longer be made, and the log says which.
    """
    for name, reason in refusals(environ):
        hint = "Unset it"
        if already_imported:
            hint = f"Unset it, and call orchestrator.engines.mooncake_env.load() before anything imports {MODULE}"
        raise ConfigError(
            f"{name} is set to a value kvferry cannot work with: {reason}", hint=hint, value=environ[name]
        )
    missed = [name for name in READ_AT_IMPORT if already_imported and name not in environ]
    if missed:
        log.warning("%s was imported before kvferry could set %s; its defaults apply", MODULE, ", ".join(missed))
    else:
        for name, value in READ_AT_IMPORT.items():
            environ.setdefault(name, value)
    for name, value in READ_LATER.items():
        environ.setdefault(name, value)


def drain_bound(environ: Mapping[str, str]) -> int:
    """Most blocks in flight to one peer, so that a stopped one is drained within the budget: it frees one block a lane
    in each progress timeout plus a second (measured)."""
    timeout = float(environ.get("MC_TCP_PROGRESS_TIMEOUT_SEC", READ_LATER["MC_TCP_PROGRESS_TIMEOUT_SEC"]))
    return max(1, int(DRAIN_BUDGET_S * lanes(environ) / (timeout + 1)))


def lanes(environ: Mapping[str, str]) -> int:
    """Most connections to one peer."""
    return int(environ.get("MC_TCP_LANES_PER_PEER", READ_LATER["MC_TCP_LANES_PER_PEER"]))


def installed_version() -> str:
    """The installed wheel's version. Raises EngineUnavailableError if there is none, or one that is too old."""
    found = {}
    for distribution in DISTRIBUTIONS:
        try:
            found[distribution] = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not found:
        extras = ", ".join(f"pip install 'kvferry[{extra}]'" for extra in DISTRIBUTIONS.values())
        raise EngineUnavailableError("no Mooncake wheel is installed", hint=f"Choose one of: {extras}")
    for distribution, version in found.items():
        if version_key(version) < version_key(MINIMUM):
            raise EngineUnavailableError(
                "the installed Mooncake is too old: its writes are not acknowledged by the destination",
                hint=f"pip install 'kvferry[{DISTRIBUTIONS[distribution]}]'",
                distribution=distribution,
                found=version,
                needed=MINIMUM,
            )
    return next(iter(found.values()))


def version_key(version: str) -> tuple[tuple[int, ...], int, int]:
    """An ordering of the wheels' versions: release numbers, then pre-releases before finals before posts."""
    match = re.match(r"(\d+(?:\.\d+)*)(?:\.?(a|b|rc|dev)\d*)?(?:\.post(\d+))?", version)
    if match is None:
        return (), 0, 0
    release = tuple(int(part) for part in match[1].split("."))
    return release, -1 if match[2] else 0, int(match[3] or 0)


@functools.cache
def load() -> ModuleType:
    """Settings, then ``mooncake.engine``; once a process. Blocks while the library loads (about 0.1 s).

    Raises ConfigError for a refused setting and EngineUnavailableError for a missing, old or unloadable wheel.
    """
    installed_version()
    prepare(os.environ, already_imported=MODULE in sys.modules)
    try:
        return importlib.import_module(MODULE)
    except ImportError as error:
        raise explain(error) from error


def explain(error: ImportError) -> EngineUnavailableError:
    """``error`` from the import, as what is missing and what to install."""
    match = re.search(r"(lib[\w.+-]+\.so[.\d]*): cannot open", str(error))
    if match is None:
        return EngineUnavailableError(f"{MODULE} cannot be imported: {error}")
    library = match[1]
    if library in LIBRARIES:
        packages = " ".join(sorted(LIBRARIES.values()))
        hint = f"On Debian: apt-get install {LIBRARIES[library]} (all that Mooncake may need: {packages})"
    elif library.startswith(("libcuda", "libcudart", "libnv")):
        hint = "This wheel needs a GPU driver; without one: pip install 'kvferry[cpu]'"
    else:
        hint = "Install the package that brings it"
    return EngineUnavailableError(f"Mooncake needs the system library {library}", hint=hint, library=library)
