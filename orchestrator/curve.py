"""CURVE on the control sockets: key files, and the list of clients that a prefill lets in.

libzmq asks a ZAP handler about every client key. Ours is one more socket on the loop: no thread, no file read while a
peer waits. Certificates are the files that zmq's own tools write.
"""

from __future__ import annotations

import os
import stat
import struct
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import zmq
import zmq.auth
from zmq.utils import z85

from orchestrator.config import Key
from orchestrator.log import RateLimited
from protocols.errors import ConfigError

ZAP_ENDPOINT = "inproc://zeromq.zap.01"
KEY_BYTES = 40
"""Of a key in Z85, as it stands in certificates."""
KEYGEN = "Make a pair with `kvferry keygen DIR`."


@dataclass(frozen=True, slots=True)
class Pair:
    """This side's own keys, in Z85."""

    public: bytes
    secret: bytes = field(repr=False)


def check_available() -> None:
    """Raise ConfigError where libzmq was built without CURVE."""
    if not zmq.has("curve"):
        raise ConfigError(
            "this libzmq was built without CURVE",
            libzmq=zmq.zmq_version(),
            hint="Install pyzmq from its wheels, which have it, or remove secret_key from the settings.",
        )


def load_pair(key: Key) -> Pair:
    """This side's pair, from its secret certificate or from the secret itself. Raises ConfigError."""
    check_available()
    if isinstance(key, bytes):
        return Pair(zmq.curve_public(_checked(key, "secret_key")), key)
    path = Path(key)
    public, secret = _load(path, "secret_key")
    if secret is None:
        raise ConfigError("the certificate holds no secret", secret_key=str(path), hint="Name the .key_secret file.")
    # Others must not read it; a group may, since orchestrators hand secrets to unprivileged processes that way.
    if stat.S_IMODE(path.stat().st_mode) & stat.S_IRWXO:
        raise ConfigError("anybody on this host can read the secret key", secret_key=str(path), hint="chmod 600 it.")
    if zmq.curve_public(secret) != public:
        raise ConfigError("the two keys of the certificate are no pair", secret_key=str(path), hint=KEYGEN)
    return Pair(public, secret)


def load_public(key: Key, setting: str) -> bytes:
    """Somebody's public key, from a certificate or as it is. Raises ConfigError."""
    if isinstance(key, bytes):
        return _checked(key, setting)
    return _load(Path(key), setting)[0]


def load_clients(keys: Iterable[Key]) -> frozenset[bytes]:
    """The allow-list: keys, certificates, and directories of certificates (``*.key``). Raises ConfigError."""
    found: set[bytes] = set()
    for key in keys:
        if not isinstance(key, bytes) and Path(key).is_dir():
            found.update(_load(path, "client_keys")[0] for path in sorted(Path(key).glob("*.key")))
        else:
            found.add(load_public(key, "client_keys"))
    if not found:
        raise ConfigError(
            "nobody could connect: client_keys names no public key",
            hint="List the decode workers' .key files, or a directory of them.",
        )
    return frozenset(found)


class Servers:
    """The public keys of prefill workers: one for all, or by control address."""

    def __init__(self, default: Key | None, by_address: Mapping[str, Key]) -> None:
        """Raises ConfigError."""
        self._default = None if default is None else load_public(default, "server_key")
        self._by_address = {address: load_public(key, "server_keys") for address, key in by_address.items()}
        if self._default is None and not self._by_address:
            raise ConfigError(
                "a decode worker with a secret_key needs the public key of the prefill workers",
                hint="Set server_key (one for all) or server_keys (by address).",
            )

    def key_of(self, address: str) -> bytes:
        """Raises ConfigError for an address without a key: nobody is talked to without knowing who it is."""
        key = self._by_address.get(address, self._default)
        if key is None:
            raise ConfigError("no key of this prefill worker is known", address=address, hint="Add it to server_keys.")
        return key


def _load(path: Path, setting: str) -> tuple[bytes, bytes | None]:
    try:
        public, secret = zmq.auth.load_certificate(path)
    except (OSError, ValueError, IndexError) as error:
        raise ConfigError(f"cannot read a certificate: {error}", setting=setting, path=str(path), hint=KEYGEN) from None
    return _checked(public, setting), None if secret is None else _checked(secret, setting)


def _checked(key: bytes, setting: str) -> bytes:
    """Raises ConfigError for what is no key; the value is not repeated, it may be a secret."""
    try:
        if len(key) == KEY_BYTES and len(z85.decode(key)) == 32:
            return key
    except (ValueError, KeyError, struct.error):
        pass
    raise ConfigError("not a key: 40 characters of Z85", setting=setting, characters=len(key), hint=KEYGEN)


class Zap:
    """Who may connect to which of this context's sockets. Give `answer` every request of the ZAP socket."""

    def __init__(self, log: RateLimited) -> None:
        self._log = log
        self._domains: dict[bytes, tuple[frozenset[bytes], Counter[str]]] = {}

    def admit(self, clients: frozenset[bytes], counters: Counter[str]) -> bytes:
        """Open a domain for a socket: these clients may connect, refusals count there."""
        domain = f"kvferry-{len(self._domains)}".encode()
        self._domains[domain] = (clients, counters)
        return domain

    def answer(self, request: list[bytes]) -> list[bytes]:
        """The reply to one request (RFC 27): 200 with the key as the user id, or 400."""
        version, number, domain, address, _, mechanism, *credentials = [*request, *[b""] * 7]
        clients, counters = self._domains.get(domain, (frozenset[bytes](), Counter[str]()))
        key = z85.encode(credentials[0]) if len(credentials[0]) == 32 else b""
        if version == b"1.0" and mechanism == b"CURVE" and key in clients:
            return [version, number, b"200", b"OK", key, b""]
        counters["clients_refused"] += 1
        self._log.warning("client", "the unknown key %s was refused (from %s)", key.decode(), address.decode())
        return [b"1.0", number, b"400", b"unknown key", b"", b""]


def write_pair(directory: str | os.PathLike[str], name: str) -> tuple[Path, Path]:
    """Make a pair and write ``NAME.key`` and ``NAME.key_secret`` (mode 0600 from its first byte). Raises ConfigError;
    nothing is overwritten."""
    check_available()
    if Path(name).name != name or name in ("", ".."):
        raise ConfigError("a key's name is a file name", name=name)
    folder = Path(directory)
    public_path, secret_path = folder / f"{name}.key", folder / f"{name}.key_secret"
    public, secret = zmq.curve_keypair()
    text = f'metadata\ncurve\n    public-key = "{public.decode()}"\n'
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True)
        _write_new(secret_path, f'{text}    secret-key = "{secret.decode()}"\n', 0o600)
        _write_new(public_path, text, 0o644)
    except FileExistsError as error:
        raise ConfigError(
            "cannot write: the file is there already", path=error.filename, hint="Choose another --name, or directory."
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot write the keys: {error}", directory=str(folder)) from None
    return public_path, secret_path


def _write_new(path: Path, text: str, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(descriptor, mode)  # whatever the umask says
        file.write(text)
